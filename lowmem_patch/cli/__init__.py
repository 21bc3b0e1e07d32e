"""The command line ``lowmem-patch``. The only importer of typer."""

from lowmem_patch.cli.app import app as app

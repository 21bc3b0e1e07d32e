"""``python -m lowmem_patch`` is ``lowmem-patch``."""

from lowmem_patch.cli import app

app(prog_name="lowmem-patch")

"""The command ``run``: an unmodified script with its models patched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli import options
from lowmem_patch.cli.runtime import ExitCode, command

__all__ = ["RUN_SETTINGS", "run"]

# what stands behind the script is the script's own
RUN_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT [ARGS]...", help="A Python script and its arguments.")
    ],
    preset: options.PresetOption = "auto",
    fit: Annotated[str | None, typer.Option(help="A memory budget, such as 24GiB.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step, for --fit in a loop of one's own.")
    ] = None,
    seq_len: options.LengthOption = None,
    as_module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module's name, as of python -m.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A model that cannot be patched ends the script.")
    ] = False,
) -> None:
    """Run SCRIPT with its models patched, without a change to it: in this process alone, and said.

    A model is patched when transformers' Trainer (TRL, sentence-transformers, LLaMA-Factory), Lightning's
    Trainer, accelerate or timm.create_model has it. With several processes: torchrun ... -m lowmem_patch run
    SCRIPT, or accelerate launch -m lowmem_patch run SCRIPT. The exit code is the script's.
    """
    with command(debug=False, waiting=None):
        from lowmem_patch.errors import ConfigError
        from lowmem_patch.integrations.script import ScriptPatching, run_script

        patching = ScriptPatching(preset, fit, None, seq_len, batch_size, strict)
        if not (as_module or Path(script).is_file()):
            raise ConfigError(f"there is no script {script}; a module's name needs -m")
    # outside: errors and signals of the script are its own
    try:
        run_script(script, context.args, patching, as_module=as_module)
    except KeyboardInterrupt:
        raise SystemExit(ExitCode.INTERRUPTED) from None

"""The command ``run``: an unmodified script with its models patched."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli import options
from lowmem_patch.cli.runtime import ExitCode, command, print_note
from lowmem_patch.errors import ConfigError, LowmemPatchError

if TYPE_CHECKING:
    from lowmem_patch.integrations.script import ScriptPatching

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
        int | None,
        typer.Option(
            min=1, help="Rows of a step, for the report; --fit needs them in a loop of one's own."
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens per row, for the report; --fit needs them where no trainer tells."
        ),
    ] = None,
    as_module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module's name, as of python -m.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="A model that cannot be patched ends the script; exit with 3 if none was patched.",
        ),
    ] = False,
    debug: options.DebugOption = False,
) -> None:
    """Run SCRIPT, which you do not change, with its models patched.

    They are patched in this process alone, and standard error names them.

    Options of run stand before SCRIPT: whatever stands behind it goes to the script.

    A model is patched when transformers' Trainer (TRL, sentence-transformers, LLaMA-Factory), Lightning's
    Trainer, accelerate or timm.create_model has it. With several processes: torchrun ... -m lowmem_patch run
    SCRIPT, or accelerate launch -m lowmem_patch run SCRIPT. The exit code is the script's; with --strict it
    is 3 where the script ends well and no model was patched.
    """
    with command(debug, waiting=None):
        from lowmem_patch.integrations.script import ScriptPatching

        patching = ScriptPatching(preset, fit, None, seq_len, batch_size, strict)
        _check_script(script, as_module)
        own = [name for parameter in context.command.params for name in parameter.opts]
        _name_late_options(script, context.args, own)
    _run(script, context.args, patching, as_module, debug)
    if strict and not any(report.patched for report in patching.reports.values()):
        raise SystemExit(ExitCode.NOTHING_TO_DO)  # standard error has said why


def _run(
    script: str, arguments: list[str], patching: ScriptPatching, as_module: bool, debug: bool
) -> None:
    """Run the script; errors and signals are its own, but for those of this package."""
    from lowmem_patch.integrations.script import run_script

    try:
        run_script(script, arguments, patching, as_module=as_module)
    except ImportError as error:
        if not as_module or str(error) != f"No module named {script}":
            raise
        with command(debug, waiting=None):
            raise ConfigError(f"there is no module {script}") from error
    except SystemExit as ended:
        if ended.code or not patching.strict:
            raise
    except KeyboardInterrupt:
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except LowmemPatchError as error:
        # proposals stand below the first line
        first, *rest = str(error).split("\n")
        text = "\n".join([first + _place_in(script, error), *rest])
        error.args = (text, *error.args[1:])
        with command(debug, waiting=None):
            raise


def _check_script(script: str, as_module: bool) -> None:
    """Refuse a script or package that is not there; modules inside of a package are found by importing it."""
    if not as_module:
        if not Path(script).is_file():
            raise ConfigError(f"there is no script {script}; a module's name needs -m")
        return
    package = script.partition(".")[0]
    here = PathFinder.find_spec(package, [str(Path.cwd())])
    if here is None and importlib.util.find_spec(package) is None:
        raise ConfigError(f"there is no module {script}: is it installed in {sys.prefix}?")


def _name_late_options(script: str, arguments: Sequence[str], own: Sequence[str]) -> None:
    """Say which options of ``run`` stand behind a script whose text has none of that name."""
    path = Path(script)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for given in arguments:
        option = given.partition("=")[0]
        if option not in own or not option.startswith("--"):
            continue
        name = option.removeprefix("--").replace("-", "[-_]")
        if not re.search(rf"--{name}\b|\b{name}\s*:|['\"]{name}['\"]", text):
            print_note(
                f"{option} stands behind the script and goes to it: options of run stand before, as in "
                f"lowmem-patch run {option} ... {path.name}"
            )


def _place_in(script: str, error: BaseException) -> str:
    """Where the script was, as its traceback would say."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == script
    ]
    return f" ({Path(script).name}, line {lines[-1]})" if lines else ""

"""The surroundings of every command: errors, signals, messages of libraries, JSON."""

from __future__ import annotations

import contextlib
import enum
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.errors import LowmemPatchError

__all__ = ["ExitCode", "command", "print_json", "print_result", "quiet_libraries"]


class ExitCode(enum.IntEnum):
    """The exit codes of all commands."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NOTHING_TO_DO = 3
    INTERRUPTED = 130


@contextlib.contextmanager
def command(debug: bool) -> Iterator[None]:
    """Turn an error into one line and an exit code, and a termination signal into an exit that cleans up."""
    from lowmem_patch import report

    try:
        with _terminable():
            yield
    except KeyboardInterrupt:
        report.print_error("interrupted; nothing was left behind")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except LowmemPatchError as error:
        if debug:
            raise
        from lowmem_patch.checkpoint import SelfCheckError

        report.print_error(str(error))
        wrong_result = isinstance(error, SelfCheckError)
        raise typer.Exit(ExitCode.FAILED if wrong_result else ExitCode.BAD_INPUT) from None


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that half-written files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Messages of transformers, timm and the hub go to standard error."""
    import transformers
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging: Any = transformers.logging  # its functions have no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        # deprecations address the callers of a library, not a user of this command
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def print_result(as_json: bool, data: Any, render: Callable[..., None], *arguments: Any) -> None:
    """The data as one JSON object, or the tables that ``render`` makes of the arguments."""
    if as_json:
        print_json(data)
    else:
        render(*arguments)


def print_json(data: Any) -> None:
    """One JSON object on standard output."""
    # a path or dtype in a record is best shown as its text
    typer.echo(json.dumps(data, indent=2, default=str))

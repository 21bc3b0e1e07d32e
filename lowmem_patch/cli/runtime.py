"""The surroundings of every command: errors, signals, messages of libraries, JSON."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import typer  # noqa: TID251 - only the command line imports typer
from typer.core import TyperGroup  # noqa: TID251

import lowmem_patch
from lowmem_patch.errors import BudgetError, LowmemPatchError

JSON_SCHEMA = 1  # of the objects of --json; another number where a key goes or changes its meaning


class ExitCode(enum.IntEnum):
    """The exit codes of all commands."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NOTHING_TO_DO = 3
    DOES_NOT_FIT = 4
    INTERRUPTED = 130


@contextlib.contextmanager
def command(debug: bool, as_json: bool = False, waiting: str | None = "working") -> Iterator[None]:
    """Turn an error into one line and an exit code, and a termination signal into an exit that cleans up.

    With ``as_json`` the error is an object on standard output as well. ``waiting`` is shown with a spinner
    until something is printed.
    """
    from lowmem_patch.report.layout import print_error, spinner

    try:
        with _terminable(), spinner(waiting):
            yield
    except KeyboardInterrupt:
        print_error("interrupted; nothing was left behind")
        if as_json:
            _print_json_error("KeyboardInterrupt", "interrupted", ExitCode.INTERRUPTED)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except LowmemPatchError as error:
        if debug:
            raise
        from lowmem_patch.checkpoint import SelfCheckError

        # its proposals stand one below the other
        print_error(str(error), lines=isinstance(error, BudgetError))
        code = ExitCode.FAILED if isinstance(error, SelfCheckError) else ExitCode.BAD_INPUT
        if isinstance(error, BudgetError) and error.least is not None:
            code = ExitCode.DOES_NOT_FIT
        if as_json:
            _print_json_error(type(error).__name__, str(error), code)
        raise typer.Exit(code) from None


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
    """What libraries print goes to standard error; their warnings, which address their callers, nowhere."""
    import transformers
    from huggingface_hub.utils.tqdm import disable_progress_bars

    verbosity: Any = transformers.logging  # its functions have no types
    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    handler = logging.lastResort  # of loggers without one of their own
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module="lowmem_patch")
        if handler is not None:
            stack.callback(handler.setLevel, handler.level)
            handler.setLevel(logging.ERROR)
        yield


def print_note(text: str) -> None:
    """One line on standard error: of what was asked for, what does nothing here."""
    from lowmem_patch.report.layout import stop_spinner

    stop_spinner()
    typer.echo(f"note: {text}", err=True)


def print_result(as_json: bool, data: Any, render: Callable[..., None], *arguments: Any) -> None:
    """The data as one JSON object, or the tables that ``render`` makes of the arguments."""
    if as_json:
        print_json(data)
    else:
        render(*arguments)


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on standard output, with the number of its schema and the version that wrote it."""
    head = {"schema": JSON_SCHEMA, "version": lowmem_patch.__version__}
    from lowmem_patch.report.layout import stop_spinner

    stop_spinner()
    # a path or dtype in a record is best shown as its text
    typer.echo(json.dumps({**head, **data}, indent=2, default=str))


class JsonErrors(TyperGroup):
    """Commands whose usage errors, which typer finds before a command begins, are JSON as well."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        try:
            return super().main(args, *rest, **more)
        except SystemExit as stopped:
            message = getattr(stopped.__context__, "format_message", None)
            if message is not None and "--json" in given:
                _print_json_error("UsageError", message(), ExitCode.BAD_INPUT)
            raise


def _print_json_error(kind: str, message: str, code: ExitCode) -> None:
    print_json({"error": {"type": kind, "message": message, "exit_code": int(code)}})

"""Nothing half written, nothing lost: interruptions, signals, overwriting, a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from lowmem_patch.checkpoint import SelfCheckError, convert, resolve
from lowmem_patch.errors import CheckpointError
from tests.support.checkpoints import llama, write


def test_a_wrong_fold_never_gets_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[convert.__module__]
    real = module.fold_tensors

    def wrong(*args: Any, **kwargs: Any) -> Any:
        weight, bias = real(*args, **kwargs)
        return weight * 1.001, bias

    monkeypatch.setattr(module, "fold_tensors", wrong)
    with pytest.raises(SelfCheckError, match="logits"):
        convert(resolve(write(tmp_path / "in", llama())), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), OSError("disk")])
def test_an_interrupted_run_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(write(tmp_path / "in", llama()))
    convert(source, tmp_path / "out", check=False)
    before = (tmp_path / "out" / "lowmem_patch.json").read_bytes()

    def fail(*_args: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules[convert.__module__], "write_card", fail)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    for out, overwrite in ((tmp_path / "new", False), (tmp_path / "out", True)):
        with pytest.raises(expected):
            convert(source, out, overwrite=overwrite, check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert (tmp_path / "out" / "lowmem_patch.json").read_bytes() == before


# both processes are forked from one
INTERRUPTED = """
import os, signal, sys, time
from lowmem_patch.checkpoint import convert
from lowmem_patch.cli import app
try:
    app(["convert", *sys.argv[1:3], "--dry-run"])  # imports what they need
except SystemExit:
    pass
module = sys.modules[convert.__module__]
def stall(*_args):
    print("half", os.getpid(), flush=True)
    time.sleep(60)
module.write_card = stall
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
for out in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        app(["convert", sys.argv[1], out])
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status), file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_a_signal_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "in", llama())
    numbers = (signal.SIGINT, signal.SIGTERM)
    outs = [str(tmp_path / number.name) for number in numbers]
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "in"), *outs],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:  # fmt: skip
        # the stalled step prints on what the command line made of standard output: standard error
        assert process.stderr is not None
        for number in numbers:
            (child,) = _line_of(process.stderr, "half")
            assert len(list(tmp_path.iterdir())) == 2  # the source, and what is half written
            os.kill(int(child), number)
            assert _line_of(process.stderr, "ended") == [str(128 + number)]
            assert [path.name for path in tmp_path.iterdir()] == ["in"]


def _line_of(stream: IO[str], word: str) -> list[str]:
    """The words behind this one, in the first line that begins with it."""
    return next(line.split()[1:] for line in stream if line.startswith(word))


def test_overwrite_replaces_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    source = resolve(write(tmp_path / "in", llama()))
    out = tmp_path / "out"
    convert(source, out, check=False)
    (out / "stale.txt").write_text("old")
    with pytest.raises(CheckpointError, match="--overwrite"):
        convert(source, out, check=False)
    convert(source, out, check=False, overwrite=True)
    assert not (out / "stale.txt").exists() and (out / "lowmem_patch.json").is_file()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        convert(source, precious, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years"


def test_a_full_disk_is_seen_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(write(tmp_path / "in", llama()))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="no space"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()

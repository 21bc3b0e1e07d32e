"""Write a folder beside its final place and rename it, so that an interrupted run leaves nothing."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lowmem_patch.errors import CheckpointError


def check_output(out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuse an output that would lose something.

    Raises:
        CheckpointError: it is a file, is not empty, or is, contains or lies in the source.
    """
    if source is not None:
        here, there = out.resolve(), source.resolve()
        if here == there or there in here.parents or here in there.parents:
            raise CheckpointError(
                f"{out} and the model {source} lie in each other: choose another folder to write"
            )
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} is a file: choose a new folder")
    if any(out.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{out} is not empty: choose a new folder or add --overwrite")
        if not (out / "config.json").is_file():
            raise CheckpointError(
                f"{out} holds no checkpoint, so it is not overwritten: remove it yourself"
            )


def check_space(parent: Path, needed: int) -> None:
    """Refuse to start where the disk of a folder, which need not be there, lacks space.

    Raises:
        CheckpointError: the disk has fewer bytes free.
    """
    parent = next(path for path in (parent.resolve(), *parent.resolve().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"no space: {needed / 1e9:.2f} GB are needed in {parent} and {free / 1e9:.2f} GB are free"
        )


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``; it becomes ``out`` when the block succeeds, else it is removed.

    Raises:
        CheckpointError: the folder beside ``out`` cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise CheckpointError(f"{out.parent} cannot be written: {error}") from error
    try:
        written = aside / "new"
        written.mkdir()
        yield written
        if out.exists():
            out.rename(aside / "old")
        written.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error}") from error
    finally:
        # after any failure, an interrupt too, the former checkpoint goes back
        if (aside / "old").exists() and not out.exists():
            (aside / "old").rename(out)
        shutil.rmtree(aside, ignore_errors=True)

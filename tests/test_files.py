"""Rules on the files themselves: short modules, and nothing that holds on one machine alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_MODULE = 400
BIGGEST_ASSETS = 2_000_000  # bytes; every install and clone carries them
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home|Users|mnt|opt)/\w|/tmp/\w|file:/{2}")


def project_files() -> list[Path]:
    """What git tracks or would track; in an unpacked source archive, what lies in it."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0 and (ROOT / ".git").exists():
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    else:
        folders = ("lowmem_patch", "tests", "scripts", "constraints")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        paths += ROOT.glob("*.*")
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PYTHON_FILES = [path for path in project_files() if path.suffix == ".py"]
TEXT_FILES = [path for path in project_files() if b"\0" not in path.read_bytes()[:4096]]


def test_files_are_found() -> None:
    assert ROOT / "lowmem_patch" / "errors.py" in PYTHON_FILES
    assert ROOT / "pyproject.toml" in TEXT_FILES


def test_modules_are_short() -> None:
    """A longer one is to be split by reason to change."""
    lines = {name_of(path): path.read_bytes().count(b"\n") for path in PYTHON_FILES}
    assert {name: count for name, count in lines.items() if count >= LONGEST_MODULE} == {}


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in TEXT_FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


# In parts, so that this file does not name such a path itself.
@pytest.mark.parametrize(
    "parts", [("cd ", "work", "x"), ("'", "tmp", "out'"), ("file:", "", "x"), ("(", "Users", "me")]
)
def test_machine_paths_are_recognised(parts: tuple[str, ...]) -> None:
    assert MACHINE_PATH.search("/".join(parts))


@pytest.mark.parametrize(
    "parts",
    [("from a", "work", "b"), ("https:", "", "example.org", "home", "x"), ("n", "opt", "m")],
)
def test_other_paths_are_not_machine_paths(parts: tuple[str, ...]) -> None:
    assert not MACHINE_PATH.search("/".join(parts))


def test_assets_stay_small() -> None:
    folder = ROOT / "lowmem_patch" / "assets"
    assert (
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= BIGGEST_ASSETS
    )

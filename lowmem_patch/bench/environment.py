"""The machine, the driver and the versions that a measurement was made with."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

_PACKAGES = (
    "torch", "triton", "transformers", "timm", "peft", "liger-kernel", "unsloth", "bitsandbytes",
)  # fmt: skip
_ROOT = Path(__file__).parents[2]


def environment(device: str) -> dict[str, str]:
    """The machine (a GPU by its name), its driver, the date, and the versions of the packages: of this one
    with its commit, where it runs from a checkout.
    """
    found = {"machine": platform.machine(), "date": datetime.date.today().isoformat()}
    if device == "cuda":
        found["machine"] = torch.cuda.get_device_name()
        collect: Any = collect_env  # has no types
        driver = collect.get_nvidia_driver_version(collect.run)
        if driver is not None:  # some containers have no nvidia-smi
            found["driver"] = driver
    own = commit(_ROOT)
    package: Any = sys.modules["lowmem_patch"]  # in a checkout it is not installed
    version = package.__version__ + (f" ({own})" if own else "")
    return {**found, **package_versions(_PACKAGES), "lowmem-patch": version}


def commit(folder: Path) -> str:
    """The commit of a checkout, with a + where its files differ from it; empty where there is no checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--dirty=+"]
    if not (folder / ".git").exists():
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Name to version of the packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata

import torch

__all__ = ["environment"]

_PACKAGES = ("torch", "triton", "transformers", "timm", "peft", "liger-kernel", "lowmem-patch")


def environment(device: str) -> dict[str, str]:
    """The machine (a GPU by its name), its driver, the date, and the versions of what is installed."""
    found = {"machine": platform.machine(), "date": datetime.date.today().isoformat()}
    if device == "cuda":
        found["machine"] = torch.cuda.get_device_name()
        driver = _driver_version()
        if driver is not None:
            found["driver"] = driver
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # no such tool in some containers
    return done.stdout.split()[0]

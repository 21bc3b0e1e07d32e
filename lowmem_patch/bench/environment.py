"""The machine, the driver and the versions that a measurement was made with."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch
from torch.utils import collect_env

_PACKAGES = ("torch", "triton", "transformers", "timm", "peft", "liger-kernel", "lowmem-patch")


def environment(device: str) -> dict[str, str]:
    """The machine (a GPU by its name), its driver, the date, and the versions of installed packages."""
    found = {"machine": platform.machine(), "date": datetime.date.today().isoformat()}
    if device == "cuda":
        found["machine"] = torch.cuda.get_device_name()
        collect: Any = collect_env  # has no types
        driver = collect.get_nvidia_driver_version(collect.run)
        if driver is not None:  # some containers have no nvidia-smi
            found["driver"] = driver
    return {**found, **package_versions(_PACKAGES)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Name to version of the packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

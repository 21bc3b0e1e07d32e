"""A budget of bytes as a user gives it, and what of it is left free."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowmem_patch.errors import ConfigError
from lowmem_patch.memory.model_states import FEWEST_BYTES, parse_bytes
from lowmem_patch.planning.names import size_text

_FRAGMENTS = 0.03  # of what a GPU's allocator gives beside the model states
_RESERVE, _LEAST_RESERVE = 0.02, 512 * 2**20  # of a GPU, for its context and other processes
# of cgroups, version 2 and 1: a folder, the limit, what is used, what of that is given back when it is needed
_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes that a training step may take on one device.

    Attributes:
        bytes: in all.
        asked: as it was asked for.
        fragments: the share of the bytes beside the model states that the allocator may lose.
        bare: it was asked for as a number without a unit, which is one of bytes.
    """

    bytes: int
    asked: str
    fragments: float = 0.0
    bare: bool = False

    def reserve(self, room: int) -> int:
        """What of ``room``, the bytes beside the model states, is left for fragmentation."""
        return int(room * self.fragments)

    def total(self, held: int, peak: int) -> int:
        """Bytes of a step with this peak beside the model states, and what must be left then."""
        return held + (int(peak / (1 - self.fragments)) + 1 if self.fragments else peak)


def make_budget(fit: str | int, model: nn.Module) -> Budget:
    """Read ``"24GiB"`` (also ``"24GB"``, ``"24g"``), bytes or ``"auto"``.

    Raises:
        ConfigError: it is no size, or ``"auto"`` for a model that is on no GPU.
    """
    parameter = next(model.parameters(), None)
    # a model on the meta device will run on a GPU
    fragments = _FRAGMENTS if parameter is not None and parameter.device.type != "cpu" else 0.0
    size = checked_budget(fit)
    if size is None:
        device = _gpu_of(parameter)
        free, total = torch.cuda.mem_get_info(device)
        # what this process has of the GPU and could have, less a reserve
        free += torch.cuda.memory_reserved(device) - max(int(_RESERVE * total), _LEAST_RESERVE)
        return Budget(max(free, 1), f"auto ({size_text(max(free, 1))})", _FRAGMENTS)
    if isinstance(fit, int):
        return Budget(size, size_text(size), fragments, bare=True)
    return Budget(size, fit.strip(), fragments)


def checked_budget(fit: str | int) -> int | None:
    """The bytes of a budget; None for ``"auto"``, which asks for a GPU.

    Raises:
        ConfigError: it is no size.
    """
    if isinstance(fit, float) and math.isfinite(fit):
        mend = f"{fit:.0f}" if fit >= FEWEST_BYTES else f'"{fit:g}GiB"'
        raise ConfigError(f"fit {fit!r} is no budget: did you mean fit={mend}?")
    if isinstance(fit, bool) or not isinstance(fit, (str, int)):
        raise ConfigError(f"fit {fit!r} is no budget: give it as 24GiB, as bytes, or auto")
    if isinstance(fit, int):
        if fit < 1:
            raise ConfigError(f"fit {fit!r} is no budget: it must be a number of bytes above 0")
        return fit
    return None if fit.strip().lower() == "auto" else parse_bytes(fit.strip())


def _gpu_of(parameter: Tensor | None) -> torch.device:
    """The GPU that holds a model's weights, or will hold them."""
    if parameter is not None and parameter.is_cuda:
        return parameter.device
    if parameter is not None and parameter.is_meta and torch.cuda.is_available():
        return torch.device("cuda")
    if parameter is not None and parameter.is_meta:
        raise ConfigError(
            'fit "auto" is what the GPU has free, and there is none: name a size (24GiB)'
        )
    place = "nowhere" if parameter is None else parameter.device.type
    raise ConfigError(
        f'fit "auto" is what the GPU has free, and the model is on {place}: move it to the GPU first, or '
        "name a size (24GiB)"
    )


def available_host_bytes() -> int | None:
    """What a new allocation can have of the host's memory, or the container's, where the system says so."""
    try:
        found = _numbers_in(Path("/proc/meminfo")).get("MemAvailable:", 0) * 1024
    except OSError:  # no Linux
        return None
    limits = (_free_in_group(*names) for names in _GROUPS)
    return min([found, *(limit for limit in limits if limit is not None)])


def _free_in_group(folder: str, limit: str, usage: str, cache: str) -> int | None:
    """Bytes that the processes of this container may still take; None without a limit."""
    group = Path(folder)
    try:
        most, used = ((group / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        kept = _numbers_in(group / "memory.stat").get(cache, 0)
    except OSError:
        return None
    return max(0, int(most) - int(used) + kept) if most.isdecimal() else None


def _numbers_in(file: Path) -> dict[str, int]:
    """The lines ``name number ...`` of a file."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def free_host_bytes() -> int:
    """For this process, half of the memory that the host has available, as far as it says so: the rest is for
    loaders and other programs. The processes of a training on one host share it."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = int(local) if local.isdecimal() else 1
    if not local and dist.is_available() and dist.is_initialized():
        processes = dist.get_world_size()
    return (available_host_bytes() or 0) // 2 // max(1, processes)

"""What ``inspect`` is asked: of which step memory is predicted, and what it shall fit into."""

from __future__ import annotations

import dataclasses
import enum
import re

from lowmem_patch.errors import ConfigError

_NONE = re.compile(r"0+\s*([KMGT](i?B)?|B)?", re.IGNORECASE)  # other sizes are above 0


Solve = enum.StrEnum("Solve", ("batch", "length"))  # the size that is looked for


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of ``inspect`` that say of which step memory is predicted, and what it shall fit into."""

    batch_size: int
    length: int | None
    batches: int
    memory: str | None
    fit: str | int | None
    host_memory: str | None
    solve: Solve | None

    def check(self, checkpointing: bool) -> None:
        """Refuse options that need another one, or exclude one another."""
        if self.solve is not None and self.memory is None and self.fit is None:
            raise ConfigError("--solve needs --memory or --fit: say into how much it shall fit")
        if self.solve is not None and self.memory is not None and self.fit is not None:
            raise ConfigError(
                "--solve looks for a size within --fit or within --memory: leave one of the two out"
            )
        if self.fit is not None and checkpointing:
            raise ConfigError("--fit decides what runs again: leave --checkpointing out")
        if self.fit is None and self.host_memory is not None:
            raise ConfigError("--host-memory needs --fit, which offloads to it")

    def host(self, gpus: int) -> int:
        """Bytes of host memory for what the blocks on one of several GPUs offload."""
        from lowmem_patch.memory import parse_bytes
        from lowmem_patch.planning.budget import free_host_bytes

        if self.host_memory is None:
            return free_host_bytes() // gpus
        if _NONE.fullmatch(self.host_memory.strip()):
            return 0
        return parse_bytes(self.host_memory) // gpus

    def about_host(self, host: int, gpus: int) -> str:
        """What is assumed of host memory, in words."""
        from lowmem_patch.planning.names import human_bytes

        given = self.host_memory is not None
        source = (
            "--host-memory" if given else "half of what this machine has available; --host-memory"
        )
        shared = f" for each of {gpus} GPUs" if gpus > 1 else ""
        return f"{human_bytes(host)}{shared} for what blocks offload ({source})"

"""A narrow copy of a wide tensor: it travels on that tensor, and lives as long."""

from __future__ import annotations

from torch import Tensor

__all__ = ["attach_copy", "attached_copy"]

_COPY = "_lowmem_patch_copy"


def attach_copy(tensor: Tensor, copy: Tensor) -> None:
    """Let Linears that read ``tensor`` under autocast find ``copy``, the same rounded."""
    setattr(tensor, _COPY, (copy, tensor._version))


def attached_copy(tensor: Tensor) -> Tensor | None:
    """The copy, if there is one and nobody wrote into the wide tensor since."""
    attached: tuple[Tensor, int] | None = getattr(tensor, _COPY, None)
    if attached is None:
        return None
    copy, version = attached
    return copy if tensor._version == version else None

"""Whether a backward has a saved tensor for itself, so that a gradient may take the tensor's place.

Autograd holds what it saved until the backward is over, and for the next one where the graph is retained.
Only torch's non-reentrant checkpoint gives it away: it computes the tensors of a block again for one
backward, gives each once, and holds it no longer. So where checkpoint packed a tensor, and no other tensor
has its memory, nobody reads its values any more.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.functional._library import in_compiler

_autograd: Any = torch._C._autograd  # has no types
may_pack = _autograd._saved_tensors_hooks_is_enabled  # whether nobody forbids it
_top_hooks = _autograd._top_saved_tensors_default_hooks
_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.")


def packer() -> Any:
    """Pack and unpack of who packs what is saved here, of which only the innermost is called; or None."""
    return _top_hooks(True)


def is_in_other_block(made_by: Any) -> bool:
    """Whether a block of torch's checkpoint runs now that did not run where a tensor was made, or the other
    way round.

    In its later run such a block gets its inputs as autograd saved them: hooks of somebody else may have made
    ordinary tensors of them. Behind a block, who saves what its output is computed from would hold that,
    which the block computes again.

    Args:
        made_by: what `packer` gave where the tensor was made.
    """
    hooks = packer()
    if hooks is made_by or in_compiler():  # two None, mostly
        return False
    hooks, made_by = _outermost(hooks), _outermost(made_by)
    return hooks != made_by and (_is_of_checkpoint(hooks) or _is_of_checkpoint(made_by))


def _outermost(hooks: Any) -> Any:
    """``hooks`` or, where they are this package's own, the hooks that get what those give."""
    while hooks is not None and hasattr(hooks[0], "outer"):
        hooks = hooks[0].outer
    return hooks


def packs_saved_tensors() -> bool:
    """Whether somebody packs what is saved, or forbids it."""
    return packer() is not None or not may_pack()


def is_checkpoint_packing() -> bool:
    """Whether torch's checkpoint packs what is saved now, in a block's first run or a later one."""
    return not in_compiler() and _is_of_checkpoint(packer())


class TorchCheckpointFrame(NamedTuple):
    """A block under torch's checkpoint while it runs.

    Attributes:
        frame: what stands for it in its first run and in each later one; None where torch does not tell.
        again: it runs again, in a backward.
    """

    frame: Any
    again: bool


def checkpointed_block() -> TorchCheckpointFrame | None:
    """The block that runs, also where this package packs first what checkpoint gets then; None outside."""
    if in_compiler():
        return None
    hooks = _outermost(packer())
    if not _is_of_checkpoint(hooks):
        return None
    pack = inspect.unwrap(hooks[0])
    held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    again = held.get("target_frame_ref")
    cell = again or held.get("frame")
    frame = None if cell is None else cell.cell_contents
    return TorchCheckpointFrame(
        frame() if isinstance(frame, weakref.ref) else frame, again is not None
    )


def _is_of_checkpoint(hooks: Any) -> bool:
    name: str = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return name.startswith(_HOOKS)


def as_it_is(tensor: Tensor) -> tuple[Tensor, int]:
    """What a pack hook saves in the place of a tensor that it leaves, for `unwritten`."""
    # not an output itself: it holds the node that would hold it
    return (tensor if tensor.is_leaf else tensor.detach()), tensor._version


def unwritten(tensor: Tensor, version: int, where: str) -> Tensor:
    """``tensor``, saved as it was at ``version``: torch itself looks at versions only where nobody packs.

    Raises:
        RuntimeError: somebody wrote into it; torch's own words come first, by which others know the error.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype}, which {where}"
        )
    return tensor


# builds of torch for a CPU alone do not have it
_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
TELLS_HOLDERS = _use_count is not None


def _holders(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(_use_count(storage._cdata))


_ONE_HOLDER = _holders(torch.empty(1)) if TELLS_HOLDERS else 0


def can_be_overwritten(dy: Tensor, *saved: Tensor | None) -> bool:
    """Whether contiguous results of the dtype of ``dy`` may take the places of what checkpoint gave."""
    return TELLS_HOLDERS and all(
        tensor is None
        or (
            tensor.is_contiguous()
            and tensor.dtype == dy.dtype
            and _holders(tensor) == _ONE_HOLDER  # no other tensor, of Python or of autograd, has it
        )
        for tensor in saved
    )

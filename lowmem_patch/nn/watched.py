"""The output of a norm that the norm saves, and that somebody may write into without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lowmem_patch.functional import register_plain, save_copy

_call: Any = torch._C._disabled_torch_function_impl
_DATA: Any = Tensor.data
RUN_BACKWARD = (Tensor.backward, torch.autograd.grad)


class Watched(Tensor):
    """An ordinary tensor, of which its norm saves a copy when somebody asks for its ``.data``."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # a checkpoint may run modules again in a backward, and they need torch functions
        if func in RUN_BACKWARD:
            with torch._C.DisableTorchFunctionSubclass():
                args = (tree_map(_plain, args[0]), *args[1:])
            if not any(isinstance(item, Watched) for item in tree_leaves(args)):
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__self__", None) is _DATA:
                save_copy(args[0].grad_fn)
            if len(types) > 1 and not _OWN.issuperset(types):
                # another subclass has an opinion, and is given ordinary tensors
                args, kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
                types = None
        return (
            func(*args, **(kwargs or {}))
            if types is None
            else _call(func, types, args, kwargs or {})
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.detach().requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)


def _plain(item: Any) -> Any:
    return item.as_subclass(Tensor) if isinstance(item, Watched) else item


_OWN = frozenset((Tensor, Watched))

register_plain(Watched)


def watch(y: Tensor) -> Tensor:
    """``y``, a norm's output that nobody else has yet."""
    if type(y) is Tensor:
        y.__class__ = Watched  # as torch's lazy parameters do
    return y

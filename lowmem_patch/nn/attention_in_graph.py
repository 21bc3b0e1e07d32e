"""Fused attention that a compiler sees, with q, k, v and its output stored in 8 bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowmem_patch.functional import EIGHT_BIT_DTYPES, stored_attention
from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.deferred import value_of


class AttentionInGraph(TorchFunctionMode):
    """Inside, a compiled graph has `stored_attention` in the place of torch's function."""

    # a mode that the compiler follows: it keeps no state and knows of no thread
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            args = tuple(map(value_of, args))
            kwargs = {name: value_of(value) for name, value in kwargs.items()}
            if _are_storable(args, kwargs):
                return stored_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _are_storable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the query, key and value can be stored."""
    names = ("query", "key", "value")
    given = [*args[:3], *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    return len(given) == len(names) and all(
        isinstance(one, Tensor) and one.dtype in EIGHT_BIT_DTYPES and not is_foreign(one)
        for one in given
    )

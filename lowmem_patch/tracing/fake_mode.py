"""The mode that makes fake tensors: torch's own, and grouped products in the dtypes that its kernels take."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config  # torch does not import it by itself
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_patch.tracing.known_values import KnownValues

# torch's kernels take these beside bfloat16, of which alone it knows the shape of a product
_GROUPED = frozenset((torch.float16, torch.float32))
_NOTHING: Mapping[str, object] = {}


def make_fake_mode() -> FakeTensorMode:
    """A mode whose tensors give no address to C++ either: an extension called with one raises."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    # of this one mode: torch's higher-order operators (flex attention) know no class derived from its own
    own: Any = mode
    own.dispatch = partial(_dispatch, weakref.ref(mode))
    own.values = KnownValues()
    return mode


def values_of(mode: FakeTensorMode) -> KnownValues:
    """The known values of the tensors of a mode that `make_fake_mode` made."""
    found: KnownValues = mode.values  # type: ignore[attr-defined]  # set above
    return found


def _dispatch(
    reference: weakref.ref[FakeTensorMode],
    func: Any,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = _NOTHING,
) -> object:
    mode = reference()
    assert mode is not None  # it calls this
    if func is torch.ops.aten.embedding.default and args[1].is_floating_point():
        # torch looks at data alone
        raise TypeError(f"an embedding is indexed by integers, and got {args[1].dtype}")
    grouped = func is torch.ops.aten._grouped_mm.default
    if grouped and args[0].dtype != args[1].dtype:  # as on data; torch 2.15 computes a shape
        raise RuntimeError(
            "the factors of a grouped product must have the same dtype, got "
            f"{args[0].dtype} and {args[1].dtype}"
        )
    if grouped and args[0].dtype in _GROUPED:
        with mode:
            return _grouped_product(*args, **kwargs)

    def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        return FakeTensorMode.dispatch(mode, func, types, args, kwargs)

    if not isinstance(func, torch._ops.OpOverload):
        return call(func, args, kwargs)
    return values_of(mode).dispatched(call, mode, func, args, kwargs)


def _grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``[M, K] x [E, K, N] -> [M, N]``, ``[E, M, K] x [K, N] -> [M, N]``,
    ``[M, K] x [K, N] -> [E, M, N]`` and ``[E, M, K] x [E, K, N] -> [E, M, N]``."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        groups = a.shape[0] if offs is None or a.dim() == 3 else offs.shape[0]
        shape = [groups, *shape]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)

"""A Linear behind a norm's affine that saves z, and not y = gamma z + beta.

A norm whose gamma trains cannot recover z from y where gamma comes near 0. So it saves z, and the Linears
behind it save the same z. For the weight's gradient there are two ways, of which the cheaper is taken:

    d_W = dy^T y, with y computed again from z                       a pass over y
    d_W = (dy^T z) gamma + (sum dy) beta^T                           a pass over d_W

Both are exact for every gamma, 0 included. The input's gradient, dy W, goes to y.
Saved: z, gamma, beta where the weight or the adapter's A trains; W where the input asks for a gradient, in
the product's dtype where it trains, as torch's own Linear saves it.

Where nobody else packs saved tensors (checkpointing, offloading and counting do), torch's own Linear serves,
with z packed in the place of y: it costs a third of the Python. y is computed again once for all Linears
that read it (`Recomputed`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import NormSettings
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import module, resolve
from lowmem_patch.functional._ownership import unwritten
from lowmem_patch.functional.products import (
    IDENTITY,
    LowRank,
    PackedWeight,
    linear_of,
    split_packed,
    unpacked,
)
from lowmem_patch.functional.products_backward import linear_backward, one_for_each
from lowmem_patch.functional.shared_input import SharedValue


def _implementation(tensor: Tensor) -> str:
    return resolve("auto", tensor) if _library.is_eager(tensor) else "reference"


class Affine(NamedTuple):
    """y = z gamma + bias.

    Attributes:
        weight: ``[N]`` or None for a factor of 1; no gradient goes to it.
        bias: ``[N]`` or None; no gradient goes to it.
        settings: of the norm, which give gamma.
    """

    weight: Tensor | None
    bias: Tensor | None
    settings: NormSettings

    def versions(self) -> tuple[int | None, ...]:
        """The versions of weight and bias, which change with a write in place."""
        weight, bias = self.weight, self.bias
        return (
            None if weight is None else weight._version,
            None if bias is None else bias._version,
        )

    def of(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """y in ``dtype``, from the rounded z."""
        operations: Any = module(_implementation(z))
        y: Tensor = operations.affine(z, *self, dtype)
        return y

    def of_weight(self, gradient: Tensor, row_sums: Tensor | None) -> Tensor:
        """dy^T y from dy^T z, ``[O, N]``, and sum dy, ``[O]``; overwrites ``gradient``."""
        if self.weight is not None:
            gradient.mul_(self.settings.gamma_of(self.weight))
        if self.bias is not None and row_sums is not None:
            gradient.addr_(row_sums.to(gradient.dtype), self.bias.to(gradient.dtype))
        return gradient


class Recomputed(SharedValue):
    """y = affine(z), computed again in backward: once for all Linears that packed it.

    Args:
        y: ``[..., N]``, the value that the Linears read.
        z: ``[..., N]``, without a gradient.
        affine: how y is computed from z.
    """

    __slots__ = ("address", "affine", "dtype", "size", "versions", "z")

    def __init__(self, y: Tensor, z: Tensor, affine: Affine) -> None:
        super().__init__()
        self.z, self.affine, self.dtype = z, affine, y.dtype
        self.address, self.size = y.data_ptr(), y.numel()
        self.versions = affine.versions()

    def linear(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear(y, weight, bias), which saves z."""
        _push_hooks(self._pack, _unpack)
        try:
            return F.linear(y, weight, bias)
        finally:
            _pop_hooks()

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.data_ptr() == self.address and tensor.numel() == self.size:
            self.saved()
            return self, tensor.shape
        return tensor, tensor._version  # torch does not check the version of what is packed

    def again(self) -> Tensor:
        """y, for one of the Linears."""
        return self.value(self._compute)

    def _compute(self) -> Tensor:
        if self.affine.versions() != self.versions:
            raise RuntimeError(_WRITTEN)
        with torch.no_grad():
            return self.affine.of(self.z, self.dtype)


_WRITTEN = (
    "lowmem_patch: one of the variables needed for gradient computation has been modified by an inplace "
    "operation: the weight or bias of a norm was written between forward and backward"
)


def _unpack(packed: Any) -> Tensor:
    saved, how = packed
    if isinstance(saved, Recomputed):
        _library.refuse_second_order("affine_linear")
        return saved.again().view(how)
    return unwritten(saved, how, "was written between forward and backward")


_autograd: Any = torch._C._autograd  # what torch.autograd.graph.saved_tensors_hooks calls
_push_hooks = _autograd._push_saved_tensors_default_hooks
_pop_hooks = _autograd._pop_saved_tensors_default_hooks


class _AffineLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        z: Tensor,
        affine: Affine,
        weight: Tensor | PackedWeight,
        bias: Tensor | None,
        lora_A: Tensor | None,
        lora_B: Tensor | None,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        _library.see_undefined(ctx)
        for_y, _, _, for_weight, for_bias, for_A, for_B, *_ = ctx.needs_input_grad
        # an absent tensor's dtype is never read
        ctx.dtypes = [(weight if t is None else t).dtype for t in (y, weight, bias, lora_A, lora_B)]
        if for_weight and isinstance(weight, Tensor):
            # a copy in the product's dtype is worth its bytes, as torch's own Linear finds
            weight = weight.to(dtype)
        chosen = _implementation(y)
        given = (y, y, None, weight, bias, lora_A, lora_B, scale, IDENTITY, dtype, chosen)
        out: Tensor
        out, low = linear_of(*given)
        ctx.packed, saved_weight = split_packed(weight)
        ctx.save_for_backward(
            *((z, affine.weight, affine.bias) if for_weight or for_A else (None, None, None)),
            *((saved_weight, lora_A) if for_y else (None, None)),
            lora_B if for_y or for_A or for_B else None,
            low if for_B else None,
        )
        ctx.needs = (for_y, for_weight, for_bias, for_A, for_B)
        ctx.norm = affine.settings
        ctx.settings = (scale, IDENTITY, ctx.needs)
        return out

    @staticmethod
    @_library.first_order("affine_linear")
    def backward(ctx: Any, dy: Tensor) -> Any:
        z, gamma, beta, *linear = ctx.saved_tensors
        if ctx.packed is not None and ctx.needs[0]:
            linear[0] = unpacked(ctx.packed, dy.dtype)
        affine = Affine(gamma, beta, ctx.norm)
        outputs = dy.shape[-1]
        corrects = ctx.needs[1] and not ctx.needs[3] and dy.numel() > outputs * outputs
        source = z if z is None or corrects else affine.of(z, dy.dtype)
        rest = (*linear, *ctx.settings, _implementation(dy))
        found = linear_backward(dy, source, None, *rest)
        d_y, d_weight, d_bias, d_A, d_B = one_for_each(found, ctx.needs, ctx.dtypes)
        if corrects:
            sums = d_bias
            if beta is not None and d_bias is None:
                sums = dy.reshape(-1, outputs).sum(0)
            d_weight = affine.of_weight(d_weight, sums)
        return d_y, None, None, d_weight, d_bias, d_A, d_B, None, None


_apply = _library.direct_call(_AffineLinear)


def affine_linear(
    y: Tensor,
    z: Tensor,
    affine: Affine,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    adapter: LowRank | None = None,
) -> Tensor:
    """F.linear(y, weight, bias), plus an adapter's product, that saves ``z`` where y = affine(z).

    Args:
        y: ``[..., N]``, the affine's value; the input's gradient goes to it.
        z: ``[..., N]``, without a gradient.
        affine: how y is computed from z.
        weight: ``[O, N]``.
        bias: ``[O]`` or None.
        compute_dtype: y, weight and bias are cast to it; the casts are repeated in backward.
        adapter: a low-rank adapter beside the Linear.

    Returns:
        ``[..., O]`` in ``compute_dtype``.
    """
    low_rank = (None, None, 1.0) if adapter is None else adapter
    with _library.without_autocast(y.device.type):
        out: Tensor = _apply(y, z, affine, weight, bias, *low_rank, compute_dtype)
    return out

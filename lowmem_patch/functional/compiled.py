"""The ops as torch.compile and DTensors see them: plain tensor code, with marks that say what is saved.

An operator that the compiler cannot look into costs the fusion with its neighbours: a norm with the
residual's addition, a cast with a product. So nothing here is one. Left to itself, the compiler's
partitioner would save what it can, and undo the plan; two means hold it:

- elementwise ops stand in a region of activation checkpointing, whose tags the partitioner obeys: their
  values are recomputed in backward, fused into whatever reads them;
- a norm's backward is written in terms of its output or of z, so that its input is not asked for.

What is stored in 8 bits is made by an operator, and backward reads values that are computed from it
(`lowmem_patch.functional.graph_storage`).

Torch knows of none but its own ops how to shard or transform them, so DTensors and what runs under torch.func
take the same way. A norm of them saves its
input: where that is sharded by the sequence, the Linears behind it read a gathered copy of its output, and
share nothing with it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_patch import reference
from lowmem_patch.constants import ActivationKind, NormSettings
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import resolve
from lowmem_patch.functional.eight_bit import EIGHT_BIT_DTYPES
from lowmem_patch.functional.graph_storage import graph_values
from lowmem_patch.functional.products import IDENTITY, LowRank, linear_op
from lowmem_patch.functional.products_backward import linear_backward_op, one_for_each

# Multiplications that take an H200 about 0.1 ms: the host takes longer for an operator, forward and backward.
SHORT_PRODUCT = 2**35

# how exactly an output is saved: in 8 bits, in float16, in bfloat16, in a wider dtype
SavedAs = Literal["bits", "half", "low", "wide"]


def limits_of(saved_as: SavedAs) -> tuple[float, float]:
    """Least |gamma|, as a share of the largest, and most |beta / gamma|, with which an output tells z."""
    # literals, as numbers from elsewhere are none in a graph of dynamic shapes
    if saved_as == "bits":
        return 1 / 16, 2.0
    if saved_as == "half":
        return 1e-4, 16.0
    return 1e-8, 16.0 if saved_as == "low" else 1e3


def _recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    if _library.is_transformed():  # torch.func knows no checkpoint
        return function(*args)
    y: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def _activation(x: Tensor, kind: Any, up: Tensor | None = None) -> Tensor:
    y = reference.activate(x, kind)
    return y if up is None else y * up


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``, cast again in backward."""
    return _recomputed(reference.cast, tensor, dtype)


def activation(x: Tensor, kind: ActivationKind, up: Tensor | None = None) -> Tensor:
    """h(x) or h(x) * up, recomputed from these in backward."""
    return _recomputed(_activation, x, kind, up)


def gathered_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]``, gathered again in backward."""
    return _recomputed(operator.getitem, tensor, index)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    adapter: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """F.linear in ``dtype``, plus an adapter's product; casts are repeated in backward."""
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype != dtype:
            x = cast(x, dtype)
        if weight.dtype != dtype:
            weight = cast(weight, dtype)
        bias = None if bias is None else bias.to(dtype)
        if adapter is not None and is_short_product(x, weight):
            return _sum_of_products(x, weight, bias, adapter)
        y = F.linear(x, weight, bias)
    if adapter is None:
        return y
    lora_A, lora_B, scale = adapter
    return y + linear(linear(x, lora_A, None, dtype), lora_B, None, dtype) * scale


def _sum_of_products(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: tuple[Tensor, Tensor, float]
) -> Tensor:
    """As the operator computes it, to the bit: the large product is added to the small one unrounded."""
    dtype, outputs = x.dtype, len(weight)
    *factors, scale = adapter
    lora_A, lora_B = (t if t.dtype == dtype else cast(t, dtype) for t in factors)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # a view is saved beside what it shows
    low = F.linear(rows, lora_A)
    # zeros, for beta=0 the compiler may multiply by 0 what is not finite
    start = low.new_zeros(outputs) if bias is None else bias
    y = torch.addmm(start, low, lora_B.t(), alpha=scale)
    return torch.addmm(y, rows, weight.t()).view(*x.shape[:-1], outputs)


class _Near(_library.Function):
    """``values``, which are near ``x``, in its place: the gradient goes to ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return values.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return reference.cast(dy, ctx.dtype), None


class _StoredLinear(_library.Function):
    """F.linear of ``hidden``, plus an adapter's product, whose backward reads ``near`` in its place."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        near, hidden, weight, bias, lora_A, lora_B, scale, implementation = arguments
        y: Tensor
        if lora_A is None:
            y, low = F.linear(hidden, weight, bias), None
        else:  # of three products and two sums the compiler makes four more passes over the output
            products = (weight, bias, lora_A, lora_B, scale)
            settings = (IDENTITY, hidden.dtype, implementation)
            y, low = linear_op.traced(hidden, hidden, None, *products, *settings)
        ctx.save_for_backward(near, weight, lora_A, lora_B, low)
        ctx.scale, ctx.implementation = scale, implementation
        # an absent tensor's dtype is never read
        ctx.dtypes = [None if t is None else t.dtype for t in (near, *arguments[2:6])]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        near, weight, lora_A, lora_B, low = ctx.saved_tensors
        for_near, _, *for_rest = ctx.needs_input_grad[:6]
        needs = [for_near, *for_rest]
        if lora_A is None:
            found = _product_gradients(dy, near, weight, needs)
        else:
            products, settings = (weight, lora_A, lora_B, low), (ctx.scale, IDENTITY)
            found = linear_backward_op.traced(
                dy, near, None, *products, *settings, needs, ctx.implementation
            )
        d_near, *gradients = one_for_each(found, needs, ctx.dtypes)
        return (d_near, None, *gradients, None, None)


def _product_gradients(
    dy: Tensor, near: Tensor, weight: Tensor, needs: list[bool]
) -> Iterator[Tensor]:
    """Those of near, weight and bias that ``needs`` asks for."""
    rows = dy.reshape(-1, dy.shape[-1])
    if needs[0]:
        yield rows.mm(weight).view(near.shape)
    if needs[1]:
        yield rows.t().mm(near.reshape(-1, near.shape[-1]))
    if needs[2]:
        yield rows.sum(0)


def stored_linear(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
    adapter: LowRank | None,
    dtype: torch.dtype,
    kind: str = IDENTITY,
    near: Tensor | None = None,
) -> Tensor:
    """F.linear of h(sources) in ``dtype``, plus an adapter's product, that saves ``sources`` in 8 bits.

    Args:
        kind: of h, by default none: the one source is the input.
        near: what 8 bits hold of the one source, where somebody else stores them (`stored_norm`).
    """
    with torch.autocast(weight.device.type, enabled=False):
        if kind == IDENTITY and sources[0].dtype != dtype:
            sources = (cast(sources[0], dtype),)  # as a norm stores it
        # in no region: its tags would have the sources saved for a value that nobody reads in backward
        plain = [source.detach() for source in sources]
        if near is not None:
            nears = [reference.cast(near, dtype)]
        else:
            nears = [_Near.apply(source, graph_values(source)) for source in sources]
        hidden, near = (
            h[0] if kind == IDENTITY else reference.cast(_activation(h[0], kind, *h[1:]), dtype)
            for h in (plain, nears)
        )
        weight = weight if weight.dtype == dtype else cast(weight, dtype)
        bias = None if bias is None else reference.cast(bias, dtype)
        rest = (None, None, 1.0) if adapter is None else adapter
        return _StoredLinear.apply(near, hidden, weight, bias, *rest, resolve("auto", hidden))


class _Norm(_library.Function):
    """`reference.norm` and `reference.norm_backward`.

    The latter reads ``saved``, y or z; where that is None, the output rounded to ``saved_dtype``. With
    ``saved_as`` it is y.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        saved: Tensor | None,
        settings: NormSettings,
        out_dtype: torch.dtype,
        saved_dtype: torch.dtype,
        saved_as: SavedAs | None,
    ) -> Tensor:
        y, rstd = reference.norm(x, weight, bias, settings, out_dtype)
        if saved is None:
            saved = reference.cast(y, saved_dtype)
        ctx.save_for_backward(saved, rstd, weight, bias)
        ctx.settings, ctx.dtype, ctx.saved_as = settings, x.dtype, saved_as
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved, rstd, weight, bias = ctx.saved_tensors
        if ctx.saved_as is not None and weight is not None:
            weight = _nan_beyond(ctx.saved_as, weight, bias, ctx.settings)
        rest = (ctx.settings, ctx.dtype, ctx.needs_input_grad[:3], ctx.saved_as is None)
        gradients = reference.norm_backward(dy, saved, rstd.squeeze(-1), weight, bias, *rest)
        return (*gradients, *(None,) * 5)


def _nan_beyond(
    saved_as: SavedAs, weight: Tensor, bias: Tensor | None, settings: NormSettings
) -> Tensor:
    """``weight``, NaN where the output does not tell z: a graph can neither ask first nor save z then."""
    ratio, shift = limits_of(saved_as)
    size = settings.gamma_of(weight.float()).abs()
    # the largest is a kernel of its own
    known = size > (ratio * size.max() if saved_as in ("bits", "half") else 0.0)
    if bias is not None:
        known = known & (bias.float().abs() < shift * size)
    return torch.where(known, weight, float("nan"))


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
    saved_dtype: torch.dtype,
    saved_as: SavedAs | None,
) -> Tensor:
    """LayerNorm or RMSNorm that saves its output or, right for a gamma of 0, z, rounded to ``saved_dtype``.

    Give the dtype to which Linears cast the output: the compiler makes one cast of the two. Behind z, the
    affine is computed again in backward, fused into whatever reads it.

    Args:
        saved_as: of the output: gradients are NaN where gamma has passed its `limits_of` since the graph was
            made. None: z is saved.
    """
    if saved_as is not None:
        return _Norm.apply(x, weight, bias, None, settings, out_dtype, saved_dtype, saved_as)
    z = _Norm.apply(x, None, None, None, settings, saved_dtype, saved_dtype, None)
    return _recomputed(reference.affine, z, weight, bias, settings, out_dtype)


def stored_norm(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """`norm` that saves 8 bits, and behind the output what they hold of it, for `stored_linear`.

    ``rest``: all further arguments of `norm`. No float64 is stored: the output is all there is then.
    """
    weight, bias, settings, out_dtype, saved_dtype, saved_as = rest
    if saved_dtype not in EIGHT_BIT_DTYPES:
        return (norm(x, *rest),)
    affine: tuple[Any, Any] = (None, None) if saved_as is None else (weight, bias)
    with torch.no_grad():
        near = values = graph_values(reference.norm(x, *affine, settings, saved_dtype)[0])
        if saved_as is None:
            near = reference.affine(values, weight, bias, settings, saved_dtype)
    y = _Norm.apply(x, weight, bias, values, settings, out_dtype, saved_dtype, saved_as)
    return y, _Near.apply(y, near)


_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def runs_plain(*tensors: Tensor | None) -> bool:
    """Whether one of them is a DTensor, or a transform of torch.func or forward mode is under way."""
    return is_sharded(*tensors) or _library.is_transformed()


def is_short_product(x: Tensor, weight: Tensor) -> bool:
    """Whether a compiler sees all products of a LoRA Linear: they end before Python has called the operator.

    Of long ones the operator saves time: its second product writes where the first has.
    Sizes that vary are taken for long, as a comparison would become a guard.
    """
    if not _library.in_compiler():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports SymPy

    rows = x.numel() // x.shape[-1]
    return bool(statically_known_true(rows * weight.numel() < SHORT_PRODUCT))


def is_sharded(*tensors: Tensor | None) -> bool:
    """Whether one of them is a DTensor."""
    if _library.in_compiler():
        return False
    # a loop that most calls leave at once: this runs at each call of each op
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            module = sys.modules.get("torch.distributed.tensor")  # a second to import
            if module is not None and isinstance(tensor, module.DTensor):
                return True
    return False


def foreign_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    z_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`ms_norm` of DTensors, of nested tensors or under torch.func, recomputed from ``x`` in backward."""
    z = None if z_dtype is None else _plain_norm(x.detach(), None, None, settings, z_dtype)
    arguments = (x, weight, bias, settings, out_dtype)
    if _library.wants_gradient(x, weight, bias):
        y = _recomputed(_plain_norm, *arguments)
    else:  # a checkpoint would hold the input
        y = _plain_norm(*arguments)
    return y, None if copy_dtype is None else y.to(copy_dtype), z


def _plain_norm(*arguments: Any) -> Tensor:
    return reference.norm(*arguments)[0]


def _one_number(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """One number in the memory of a whole tensor: what a graph has in the place of values that wait."""
    number = like.new_full((), torch.nan, dtype=dtype)
    # as expand, which gives sizes of one other strides
    return number.as_strided(shape, (0,) * len(shape))


# An operator, since the compiler makes an expanded tensor that leaves its graph again from its one number,
# and loses a write into it. An operator's result has a memory of its own, and strides that tell of a write.
placeholder = _library.Operator(
    "placeholder(Tensor like, SymInt[] shape, ScalarType dtype) -> Tensor",
    _one_number,
    lambda like, shape, dtype: like.new_empty_strided(shape, (0,) * len(shape), dtype=dtype),
)


def is_written(tensor: Tensor) -> bool:
    """Whether a placeholder that has left its graph holds anything else."""
    # a graph that is run as it is writes in place
    return any(tensor.stride()) or tensor._version > 0

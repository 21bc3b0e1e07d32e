"""Norms that save their output, which the next Linear saves anyway, instead of their input.

MS-BP (arXiv 2406.16282, section 5): with z = (x - mean) rstd and y = z gamma + bias, backward needs z and
rstd only, and z = (y - bias) / gamma:

    g = dy gamma,    dx = rstd (g - mean(g) - z mean(g z)),    d_weight = sum dy z,  d_bias = sum dy

(RMSNorm: no mean(g)). Saved: y, rstd (one number a row), weight and bias. y shares its storage with
the input of the Linears behind it. Where gamma may come near 0, z is saved in the place of y, and the
Linears save the same z (`affine_linear`).

Post-norm models under autocast (BERT) read y in two dtypes: in full by a residual, in low precision by
Linears, each of which would save a copy of its own. The norm makes this copy once, and saves it in the place
of y; the gradients of both are added first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lowmem_patch.constants import NormSettings, wide
from lowmem_patch.functional import _library, compiled
from lowmem_patch.functional._implementation import Implementation, check_floating, module, resolve
from lowmem_patch.functional._ownership import is_checkpoint_packing
from lowmem_patch.functional.eight_bit import EIGHT_BIT_DTYPES, Memory

Outputs = tuple[Tensor, Tensor | None, Tensor | None]
Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor]


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings | list[float],
    out_dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    z_dtype: torch.dtype | None,
    implementation: str,
) -> Results:
    """y, its copy, z and rstd; what has no dtype is None."""
    if type(settings) is list:
        settings = _from_operator(settings)
    results: Results = module(implementation).norm_forward(
        x, weight, bias, settings, out_dtype, copy_dtype, z_dtype
    )
    return results


def _forward_fake(
    x: Tensor, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    *_, out_dtype, copy_dtype, z_dtype, _ = rest
    y, copy, z = (
        None if dtype is None else x.new_empty(x.shape, dtype=dtype)
        for dtype in (out_dtype, copy_dtype, z_dtype)
    )
    return y, copy, z, x.new_empty(x.shape[:-1], dtype=wide(x.dtype))


def _from_operator(settings: list[float]) -> NormSettings:
    eps, offset, centered = settings
    return NormSettings(eps, offset, bool(centered))


def _backward(*arguments: Any) -> list[Tensor]:
    *vectors, settings, input_dtype, needs, normalized, implementation = arguments
    if type(settings) is list:
        settings = _from_operator(settings)
    rest = (settings, input_dtype, needs, normalized)
    gradients = module(implementation).norm_backward(*vectors, *rest)
    return [gradient for gradient in gradients if gradient is not None]


def _backward_fake(dy: Tensor, *rest: Any) -> list[Tensor]:
    _, _, weight, bias, _, input_dtype, needs, *_ = rest
    gradients = [dy.new_empty(dy.shape, dtype=input_dtype)] if needs[0] else []
    vectors = zip((weight, bias), needs[1:], strict=True)
    return gradients + [torch.empty_like(v) for v, need in vectors if need and v is not None]


_norm = _library.Operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float[] settings, ScalarType out_dtype, "
    "ScalarType? copy_dtype, ScalarType? z_dtype, str implementation) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_norm_backward = _library.Operator(
    "norm_backward(Tensor dy, Tensor y, Tensor rstd, Tensor? weight, Tensor? bias, "
    "float[] settings, ScalarType input_dtype, bool[] needs, "
    "bool normalized, str implementation) -> Tensor[]",
    _backward,
    _backward_fake,
)


def save_copy(node: Any) -> None:
    """Let a norm's backward read a copy of its output, into which somebody may be about to write unseen.

    Args:
        node: the ``grad_fn`` of the norm's output, which it saves; any other is left as it is.
    """
    if getattr(node, "written", True) is None:
        node.written = node.saved_tensors[0].detach().clone()


def _compute_and_save(ctx: Any, *arguments: Any, eight_bits: bool = False) -> Any:
    ctx.set_materialize_grads(False)
    parts = None
    if eight_bits and any(ctx.needs_input_grad[:2]):
        *given, implementation = arguments
        output, parts = module(implementation).norm_forward_in_eight_bits(*given)
    else:
        output = _forward(*arguments)
    y, copy, z, _ = output
    _save(ctx, arguments, output, parts)
    if copy is None and z is None:
        return y
    if z is not None:
        ctx.mark_non_differentiable(z)
    return y, copy, z


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Any, ...],
    parts: tuple[Tensor, Tensor] | None = None,
    saved_as: Callable[[Tensor], Tensor] | None = None,
) -> None:
    x, weight, bias, settings, _, copy_dtype, z_dtype, implementation = inputs
    y, copy, z, rstd = output
    needs_input, needs_weight, *_ = ctx.needs_input_grad
    if needs_input or needs_weight:
        if z_dtype is not None:
            y = z
        elif copy_dtype is not None:
            y = copy
        if parts is None:
            y = y if saved_as is None else saved_as(y)
            ctx.save_for_backward(y, rstd, weight, bias)
            ctx.saved_as = None if saved_as is None else TensorWeakRef(y)
        else:
            memory = Memory.of(y)
            memory.hold(*parts)
            memory.saved()
            ctx.save_for_backward(*parts, rstd, weight, bias)
    else:
        # d_bias needs dy alone; the empty tensors stand in for what is not read
        ctx.save_for_backward(y.new_empty(0), rstd.new_empty(0), None, bias)
    ctx.copies = copy_dtype is not None
    ctx.shape = None if parts is None else y.shape
    # torch's checkpoint gives what it computes again, whatever was written into that
    packed = parts is None and saved_as is None and is_checkpoint_packing()
    ctx.version = y._version if packed else None
    ctx.written = None if parts is None else ()  # of `save_copy`
    ctx.confirm = None  # set by who has to be asked before z is recovered from what is saved
    ctx.settings = settings, x.dtype
    ctx.rest = z_dtype is not None, implementation


@_library.first_order("norm")
def _gradients(ctx: Any, dy: Tensor | None, d_copy: Tensor | None = None, *_: None) -> Any:
    if d_copy is not None and ctx.copies:
        dy = d_copy if dy is None else torch.add(dy, d_copy)
    y, *others = _library.saved_tensors(ctx, "the output of a norm, or its weight or bias,")
    if ctx.version is not None and y._version != ctx.version:
        raise _library.written("the output of a norm")
    if hasattr(y, "detached"):  # what `saved_as` made, unless somebody packed it
        y = y.detached()
    if ctx.shape is not None:
        scales, *others = others
        y = y.memory.read(y, scales).view(ctx.shape)
    elif ctx.written is not None:
        y = ctx.written
    if ctx.confirm is not None:
        ctx.confirm()
    needs = ctx.needs_input_grad[:3]
    found = iter(_norm_backward(dy, y, *others, *ctx.settings, needs, *ctx.rest))
    return (*(next(found) if need else None for need in needs), *(None,) * 5)


_call_norm = _norm.differentiable(_save, _gradients, _compute_and_save, outputs=3, with_gradient=2)


class _NormInEightBits(torch.autograd.Function):
    """The op where it saves its output in 8 bits, of which no operator knows."""

    forward = staticmethod(partial(_compute_and_save, eight_bits=True))
    backward = staticmethod(_gradients)


_call_in_eight_bits = _library.direct_call(_NormInEightBits)


class _NormSavedAs(torch.autograd.Function):
    """The op where something else stands for its output: what the last argument makes of it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, saved_as = arguments
        ctx.set_materialize_grads(False)
        y, *absent, rstd = _norm(*given)  # as an operator where somebody traces
        _save(ctx, tuple(given), (y, *absent, rstd), saved_as=saved_as)
        made: Tensor = y
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        return *_gradients(ctx, dy), None


_call_saved_as = _library.direct_call(_NormSavedAs)


def _may_store(*arguments: Any) -> bool:
    """Whether an op that no operator knows serves, and has anything to store."""
    x, _, _, _, out_dtype, *_ = arguments
    found = out_dtype in EIGHT_BIT_DTYPES and x.numel() > 0 and _library.is_eager(*arguments)
    return found and not _library.is_transformed()


def ms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype | None = None,
    copy_dtype: torch.dtype | None = None,
    z_dtype: torch.dtype | None = None,
    *,
    implementation: Implementation = "auto",
    trains: bool = False,
    eight_bits: bool = False,
    saved_as: Callable[[Tensor], Tensor] | None = None,
) -> Outputs:
    """LayerNorm or RMSNorm over the last dimension that saves one output and one rstd per row.

    The gradient is exact up to the rounding of what is saved: z, where it is asked for, else the copy, else
    y. To recover z from y takes entries of gamma that are not tiny against those of ``bias``; with z saved
    it is exact for every gamma. Statistics and products are float32 inside (float64 for float64), whatever
    autocast says.

    Args:
        x: ``[..., N]``, floating point.
        weight, bias: ``[N]`` or None; their dtype may differ from that of ``x``.
        settings: of the norm.
        out_dtype: dtype of y, by default ``x.dtype``; in the compute dtype of readers they save this tensor.
        copy_dtype: dtype of a copy of y, None for no copy.
        z_dtype: dtype of z, None where it is not asked for.
        implementation: see `resolve`.
        trains: the caller knows that a gradient is wanted, and that no tensor is a DTensor.
        eight_bits: where ``trains``, and nobody but autograd looks on, the output is saved in 8 bits.
        saved_as: where ``trains``, makes of y what is saved in its place, whose ``detached()`` is y again.

    Returns:
        y and its copy, and z, which has no gradient: ``[..., N]``, contiguous; None for what has no dtype.

    Raises:
        TypeError: a tensor is not floating point, or ``out_dtype`` mixes float64 with other dtypes.
        ValueError: shapes do not fit.
    """
    check_floating("ms_norm", "x", x)
    _check_last_dimension(x, weight, bias)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    chosen = resolve(implementation, x, weight, bias)
    # the float64 oracle must not be asked for by mixing dtypes by accident
    if (x.dtype == torch.float64) != (out_dtype == torch.float64):
        raise TypeError(f"ms_norm: x is {x.dtype} but out_dtype is {out_dtype}")
    arguments = (x, weight, bias, settings, out_dtype, copy_dtype, z_dtype, chosen)
    if trains:
        return _outputs(_training(arguments, eight_bits, saved_as), copy_dtype, z_dtype)
    if _library.knows_no_operators(x, weight, bias) or _library.is_transformed():
        return compiled.foreign_norm(x, weight, bias, settings, out_dtype, copy_dtype, z_dtype)
    found: Any = None
    trains = _library.wants_gradient(x, weight, bias)
    if not trains and copy_dtype is None and z_dtype is None:
        found = _without_gradient(x, weight, bias, settings, out_dtype)
    if found is None:
        # autocast would make F.layer_norm return float32
        found = (_call_norm if trains or _library.in_forward_mode() else _norm)(*arguments)
    return _outputs(found, copy_dtype, z_dtype)


def _check_last_dimension(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """``x`` has at least one dimension and the vectors, where given, the size of its last one."""
    if x.dim() < 1:
        raise ValueError("ms_norm: x must have at least one dimension, got shape ()")
    size = x.shape[-1:]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != size:
            raise ValueError(
                f"ms_norm: {name} must have shape ({size[0]},) for x of shape "
                f"{tuple(x.shape)}, got {tuple(vector.shape)}"
            )


def _training(
    arguments: tuple[Any, ...], eight_bits: bool, saved_as: Callable[[Tensor], Tensor] | None
) -> Any:
    if saved_as is not None:
        return _call_saved_as(*arguments, saved_as)
    call = _call_in_eight_bits if eight_bits and _may_store(*arguments) else _call_norm
    return call(*arguments)


def _outputs(found: Any, copy_dtype: torch.dtype | None, z_dtype: torch.dtype | None) -> Outputs:
    if not isinstance(found, tuple):
        return found, None, None
    y, copy, z, *_ = found  # of an operator, what is absent is empty
    return y, None if copy_dtype is None else copy, None if z_dtype is None else z


def _without_gradient(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: NormSettings,
    out_dtype: torch.dtype,
) -> Tensor | None:
    """The norm by torch's own operators, where they compute it; None where they do not."""
    stock = all(t is None or t.dtype == x.dtype for t in (weight, bias))
    stock = stock and settings.identity_weight == 1.0
    stock = stock and not torch.is_autocast_enabled(x.device.type)
    if _library.is_exporting() and not (stock and settings.centered):  # ONNX has no RMSNorm
        return _forward(x, weight, bias, settings, out_dtype, None, None, "reference")[0]
    if not stock or out_dtype != x.dtype:
        return None
    if not settings.centered and bias is not None:  # F.rms_norm takes none
        return None
    if settings.centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, settings.eps)
    return F.rms_norm(x, x.shape[-1:], weight, settings.eps)

"""Outputs against float64, and the error that a candidate may make, as `lowmem_patch.verify` says."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.isolation import uncompiled
from lowmem_patch.tracing.observers import DispatchObserver
from lowmem_patch.tracing.shadow import finite_parts, named_tensors

FORWARD_FACTOR = 2.0
# Allowed on top, in eps of the dtype: an output that the unpatched model happens to hit exactly.
BAND = 4.0
_KNOWN_DIRECTION = 10.0


@dataclasses.dataclass(frozen=True)
class TensorCheck:
    """One output or gradient: relative L2 errors against float64, of both models.

    ``has_direction``: it is so much larger than the unpatched model's error that its cosine tells anything.
    """

    name: str
    unpatched_error: float
    error: float
    limit: float
    cosine: float
    passed: bool
    has_direction: bool = True


def cast_parameters(model: Any, dtype: torch.dtype | None, *, all_buffers: bool = False) -> Any:
    """Cast parameters and persistent buffers in place.

    Other buffers stay, but for ``all_buffers``: the error of a rotary table in low precision would exceed all
    others.
    """
    if dtype is None:
        return model
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            cast = all_buffers or name not in module._non_persistent_buffers_set
            if buffer is not None and buffer.is_floating_point() and cast:
                module._buffers[name] = buffer.to(dtype)
    return model


class _StayInFloat64(DispatchObserver):
    """Undoes the casts to float32 inside a model (RMSNorm, softmax), which would round the truth, and
    multiplies expert by expert, for which torch's grouped_mm takes no float64."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped_product(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            wanted = kwargs.get("dtype")
            if wanted is not None and wanted.is_floating_point:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """``[M, K] x [E, K, N] -> [M, N]``, ``[E, M, K] x [K, N] -> [M, N]``, ``[M, K] x [K, N] -> [E, M, N]``:
    expert e has the rows, columns or terms up to ``offs[e]``."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if a.dim() == b.dim():
        return torch.stack([a[:, part] @ b[part] for part in parts])
    product = a.new_zeros(a.shape[-2], b.shape[-1])
    for expert, part in enumerate(parts):
        if a.dim() == 2:
            product[part] = a[part] @ b[expert]
        else:
            product[:, part] = a[expert] @ b[:, part]
    return product


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Forwards stay in float64, also in compiled functions, in which no mode would see a cast."""
    with uncompiled(), _StayInFloat64():
        yield


def named_outputs(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a model's output, with their place in it."""
    return ((name, tensor) for name, tensor in named_tensors(output) if tensor.is_floating_point())


def check_tensor(
    name: str,
    truth: Tensor,
    unpatched: Tensor,
    found: Tensor,
    *,
    factor: float,
    eps: float,
    scale: float = 0.0,
    floor: float = 0.0,
) -> TensorCheck:
    """Judge one tensor: its error may be ``factor`` times the unpatched one's, and a few eps more.

    Args:
        scale: the least size that errors are measured against.
        floor: the least error of the unpatched model that the budget starts from.
    """
    parts = finite_parts(truth, unpatched, found)
    if parts is None:
        return TensorCheck(name, 0.0, math.inf, 0.0, 0.0, False, False)
    truth, unpatched, found = parts
    size = float(truth.norm())
    scale = max(scale, size, torch.finfo(torch.float64).tiny)
    own = float((unpatched - truth).norm()) / scale
    error = float((found - truth).norm()) / scale
    limit = factor * max(own, floor) + BAND * eps
    product = size * float(found.norm())
    cosine = float((truth * found).sum()) / product if product else 0.0
    # a NaN is within no limit
    has_direction = size / scale > _KNOWN_DIRECTION * own
    return TensorCheck(name, own, error, limit, cosine, error <= limit, has_direction)


def check_outputs(
    truth: Mapping[str, Tensor],
    unpatched: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    eps: float,
) -> tuple[TensorCheck, ...]:
    """Compare outputs by name.

    Raises:
        TraceError: the two models return different outputs.
    """
    shapes = [{name: tuple(t.shape) for name, t in outputs.items()} for outputs in (truth, found)]
    if shapes[0] != shapes[1]:
        raise TraceError(f"the models return different outputs: {shapes[0]} and {shapes[1]}")
    return tuple(
        check_tensor(
            name, truth[name], unpatched[name], found[name], factor=FORWARD_FACTOR, eps=eps
        )
        for name in truth
    )

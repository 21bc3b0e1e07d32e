"""8-bit storage of what backward reads: integers of 8 bits, and a scale for each group of neighbours.

    s = max |x| / 127 of a group,    q = round(x / s),    x~ = q s,    |x~ - x| <= s / 2

s is bfloat16, which has the range of every dtype that is stored, and is rounded up to it, so that |q| is at
most 127. q is rounded to the nearest: stochastic rounding has 1.4 times the error, and its zero mean gains
nothing in the sum over a batch that a weight's gradient is. On activations, fp8 (e4m3) with the same scales
has 2 to 4 times the error, groups of 64 have four fifths to nine tenths of it, and one scale for a tensor
with outlying columns has 3 times as much (benchmarks/eight_bit.py).

What the rounding reaches: the weight gradient dW = dy^T x~, whose error is that of x. A norm that saves its
output y takes z~ = (y~ - beta) / gamma from it, and dx = rstd (dz - mean(dz) - z~ mean(dz z~)): z~ stands in
one term alone, whose size is the share of dz along z. An activation takes h'(x~), and attention the
softmax of q~ k~^T with the statistics of the exact one. So gradients of activations are rounded too, where
they are computed from what is stored. On three trained models in float32, each weight's gradient has a cosine
of at least 0.9995 to that in float64; without attention's tensors, 1 - cosine is half to a tenth on average.

A group with a value that is not finite is read as NaN: the gradient that is made of it says so. A scale below
2^-126 is 0. Float64 is not stored in 8 bits: it is the truth that others are measured by.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from lowmem_patch.constants import EIGHT_BIT_GROUP, EightBits
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve

EIGHT_BIT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))


def _to_fake(x: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    groups = (x.numel() + EIGHT_BIT_GROUP - 1) // EIGHT_BIT_GROUP
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(groups, dtype=torch.bfloat16)


_to = _library.Operator(
    "to_eight_bits(Tensor x, str implementation) -> (Tensor, Tensor)",
    dispatched("to_eight_bits"),
    _to_fake,
)
_from = _library.Operator(
    "from_eight_bits(Tensor integers, Tensor scales, ScalarType dtype, str implementation) -> Tensor",
    dispatched("from_eight_bits"),
    lambda integers, scales, dtype, implementation: integers.new_empty(integers.shape, dtype=dtype),
)


def to_eight_bits(x: Tensor, *, implementation: Implementation = "auto") -> tuple[Tensor, Tensor]:
    """Integers and scales that stand for a tensor; no gradient flows.

    Args:
        x: ``[n]``, contiguous, float16, bfloat16 or float32.
        implementation: see `resolve`.

    Returns:
        Integers ``[n]`` int8, from -127 to 127, and scales ``[ceil(n / 128)]`` bfloat16, one for each 128
        neighbours.

    Raises:
        TypeError: ``x`` is of another dtype.
        ValueError: ``x`` has more than one dimension, or is not contiguous.
    """
    if x.dtype not in EIGHT_BIT_DTYPES:
        raise TypeError(f"to_eight_bits: x must be float16, bfloat16 or float32, got {x.dtype}")
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"to_eight_bits: x must be [n] and contiguous, got shape {tuple(x.shape)}, strides {x.stride()}"
        )
    with _library.without_grad():
        integers, scales = _to(x, resolve(implementation, x))
    return integers, scales


def from_eight_bits(
    integers: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """What `to_eight_bits` made integers and scales of, to half a scale.

    Args:
        integers: ``[n]`` int8.
        scales: ``[ceil(n / 128)]`` bfloat16.
        dtype: of the result.
        implementation: see `resolve`.

    Returns:
        ``[n]``.

    Raises:
        TypeError: a dtype is another one.
        ValueError: ``scales`` has another length.
    """
    if (integers.dtype, scales.dtype) != (torch.int8, torch.bfloat16):
        raise TypeError(
            "from_eight_bits: integers must be int8 and scales bfloat16, got "
            f"{integers.dtype} and {scales.dtype}"
        )
    if dtype not in EIGHT_BIT_DTYPES:
        raise TypeError(f"from_eight_bits: no values of {dtype} are stored in 8 bits")
    if scales.numel() != -(-integers.numel() // EIGHT_BIT_GROUP):
        raise ValueError(
            f"from_eight_bits: {integers.numel()} integers have one scale for {EIGHT_BIT_GROUP}, got "
            f"{scales.numel()}"
        )
    with _library.without_grad():
        values: Tensor = _from(integers, scales, dtype, resolve(implementation, scales))
    return values


_weak: Any = StorageWeakRef  # has no types


class _Known:
    """A memory that is stored in 8 bits, as long as somebody holds its integers.

    Args:
        flat: the memory, ``[n]``.
        version: of its tensor.
        integers, scales: what stands for it.
    """

    def __init__(self, flat: Tensor, version: int, integers: Tensor, scales: Tensor) -> None:
        # keeps the address of the storage, not its bytes: no other storage has it while this is known by it
        self.storage = _weak(flat.untyped_storage())
        self.state = flat.dtype, version
        self.integers, self.scales = TensorWeakRef(integers), scales


# By the address of the storage; held by the integers, and gone with them.
_KNOWN: weakref.WeakValueDictionary[int, _Known] = weakref.WeakValueDictionary()


def stored_memory(flat: Tensor, version: int) -> tuple[Tensor, Tensor]:
    """What `to_eight_bits` gives for a whole memory ``[n]``; once for all who store it, whoever they are."""
    return _stored(flat, version, (flat.numel(),))


def _stored(flat: Tensor, version: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    key = int(flat.untyped_storage()._cdata)
    known = _KNOWN.get(key)
    integers = None if known is None else known.integers()
    if known is not None and integers is not None and known.state == (flat.dtype, version):
        integers, scales = integers.view(shape), known.scales
    else:
        integers, scales = to_eight_bits(flat)
        integers = integers.view(shape)
        known = _KNOWN[key] = _Known(flat, version, integers, scales)
    integers.__dict__["known"] = known  # what autograd saves keeps its attributes
    return integers, scales


def stored_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in the shape of ``x`` ``[..., F]``, contiguous, and scales, as of `to_eight_bits`."""
    with _library.without_grad():
        flat = x.contiguous().view(-1)
        if x.is_contiguous() and flat.nbytes == x.untyped_storage().nbytes():
            return _stored(flat, x._version, tuple(x.shape))
        integers, scales = to_eight_bits(flat)
        return integers.view(x.shape), scales


def read_matrix(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor | EightBits:
    """What `stored_matrix` stored: in 8 bits where a row is whole groups, the values where it is not."""
    if integers.shape[-1] % EIGHT_BIT_GROUP == 0:
        return EightBits(integers, scales, dtype)
    return matrix_values(integers, scales, dtype)


def matrix_values(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of what `stored_matrix` stored."""
    return from_eight_bits(integers.view(-1), scales, dtype).view(integers.shape)

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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lowmem_patch.constants import EIGHT_BIT_GROUP, EightBits
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve
from lowmem_patch.functional._ownership import packs_saved_tensors
from lowmem_patch.functional.products import product
from lowmem_patch.functional.shared_input import SharedValue

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
    """
    with _library.without_grad():
        integers, scales = _to(x, resolve(implementation, x))
    return integers, scales


def from_eight_bits(
    integers: Tensor, scales: Tensor, dtype: torch.dtype, *, implementation: Implementation = "auto"
) -> Tensor:
    """What `to_eight_bits` made integers and scales of, to half a scale.

    Args:
        integers: ``[n]`` int8.
        scales: ``[ceil(n / 128)]`` bfloat16.
        dtype: of the result, float16, bfloat16 or float32.
        implementation: see `resolve`.

    Returns:
        ``[n]``.

    Raises:
        TypeError: somebody who packs what is saved gave another dtype back.
    """
    if (integers.dtype, scales.dtype) != (torch.int8, torch.bfloat16):
        raise TypeError(
            "from_eight_bits: integers must be int8 and scales bfloat16, got "
            f"{integers.dtype} and {scales.dtype}"
        )
    with _library.without_grad():
        values: Tensor = _from(integers, scales, dtype, resolve(implementation, scales))
    return values


class Memory(SharedValue):
    """A tensor's memory ``[n]`` in 8 bits: made once for all who save it, and read once in a backward.

    It is held by its integers. Torch keeps a storage's object in Python, and its attributes, as long as the
    storage: one of them tells of this.

    Args:
        dtype, version: of the tensor.
        packer: pack and unpack of who packs what we save, or None.
    """

    __slots__ = ("_integers", "_task", "dtype", "packed", "packer", "version")
    # the backward in which one was read last: an optimizer may have written since, which no version tells
    last_task = -1

    def __init__(self, dtype: torch.dtype, version: int, packer: Any = None) -> None:
        super().__init__()
        self.dtype, self.version, self.packer = dtype, version, packer
        # integers and scales as they were packed, where somebody packs them
        self.packed: Any = None
        self._integers: Any = None
        self._task = Memory.last_task

    @staticmethod
    def of(tensor: Tensor, packer: Any = None) -> Memory:
        """The memory behind a tensor as it is now, for those whose saved tensors ``packer`` packs."""
        storage = tensor.untyped_storage()
        known = storage.__dict__.get(_NAME)
        memory: Memory | None = None if known is None else known()
        if (
            memory is None
            or memory.version != tensor._version
            or memory.dtype != tensor.dtype
            or memory.packer != packer
            or memory._task != Memory.last_task
        ):
            memory = Memory(tensor.dtype, tensor._version, packer)
            storage.__dict__[_NAME] = weakref.ref(memory)
        return memory

    def parts(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Integers ``[n]`` and scales; ``tensor`` has this memory."""
        integers: Any = None if self._integers is None else self._integers()
        if integers is None:
            integers, scales = memory_in_eight_bits(tensor)
            self.hold(integers, scales)
        return integers, integers.scales

    def hold(self, integers: Tensor, scales: Tensor) -> None:
        """Let these stand for the memory, as long as somebody saves them."""
        # what autograd saves keeps its attributes, and frees them with itself
        integers.__dict__.update(memory=self, scales=scales)
        self._integers = TensorWeakRef(integers)

    def read(
        self, integers: Any, scales: Any, unpack: Callable[[Any], Tensor] | None = None
    ) -> Tensor:
        """The values ``[n]``, for one of those who saved it."""
        task = _library.backward_number()
        if task != -1:
            Memory.last_task = task

        def make() -> Tensor:
            if unpack is None:
                return from_eight_bits(integers, scales, self.dtype)
            return from_eight_bits(unpack(integers), unpack(scales), self.dtype)

        return self.value(make)


def memory_in_eight_bits(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Integers ``[n]`` and scales of the whole memory behind a tensor."""
    with _library.without_grad():
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return to_eight_bits(tensor.as_strided((size,), (1,), 0))


_NAME = "lowmem_patch_eight_bits"


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous and has its memory for itself."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def stored_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in the shape of ``x`` ``[..., F]``, contiguous, and scales, as of `to_eight_bits`."""
    if is_whole(x):
        flat, scales = Memory.of(x).parts(x)
        integers = flat.view(x.shape)
        integers.__dict__["flat"] = flat
        return integers, scales
    with _library.without_grad():
        integers, scales = to_eight_bits(x.contiguous().view(-1))
    return integers.view(x.shape), scales


def read_matrix(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor | EightBits:
    """What `stored_matrix` stored: in 8 bits where a row is whole groups, the values where it is not."""
    if integers.shape[-1] % EIGHT_BIT_GROUP == 0:
        return EightBits(integers, scales, dtype)
    return matrix_values(integers, scales, dtype)


def matrix_values(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of what `stored_matrix` stored."""
    return from_eight_bits(integers.view(-1), scales, dtype).view(integers.shape)


class _StoredLinear(torch.autograd.Function):
    """A Linear whose d_W = dy^T x~ is of what 8 bits tell of x; its output and d_x are those of F.linear.

    Hooks on saved tensors would save the same, and take more of the host's time: this is for where nobody
    packs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _library.see_undefined(ctx)
        needs_input, needs_weight, _ = ctx.needs_input_grad
        parts: tuple[Tensor | None, Tensor | None] = None, None
        if needs_weight:
            memory = Memory.of(x)
            parts = memory.parts(x)
            memory.saved()
        ctx.save_for_backward(*parts, weight if needs_input else None)
        with _library.without_autocast(x.device.type):
            return product(x, weight, bias)

    @staticmethod
    @_library.first_order("eight_bit_storage")
    def backward(ctx: Any, dy: Tensor) -> Any:
        integers, scales, weight = ctx.saved_tensors
        d_x = d_weight = None
        rows = dy.reshape(-1, dy.shape[-1])
        with _library.without_autocast(dy.device.type):
            # first: torch's sum takes a multiple of dy for a while, and nothing else is there yet
            d_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
            if weight is not None:
                d_x = rows.mm(weight).view(*dy.shape[:-1], weight.shape[1])
            if integers is not None:
                x = integers.memory.read(integers, scales)
                d_weight = rows.t().mm(x.view(rows.shape[0], -1))
        return d_x, d_weight, d_bias


_call = _library.direct_call(_StoredLinear)


def stores_directly(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the op can store ``x``, which nobody packs: all are ordinary tensors, which no mode watches."""
    if packs_saved_tensors() or not _library.is_eager(x, weight, bias):
        return False
    if torch.is_inference_mode_enabled() or x.is_inference() or x.is_meta or x.is_nested:
        return False
    strided = x.layout is torch.strided and x.dtype in EIGHT_BIT_DTYPES
    return strided and x.numel() > 0 and weight.numel() > 0 and is_whole(x)


def stored_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype
) -> Tensor:
    """F.linear that saves ``x``, of which `stores_directly` is true, in 8 bits.

    Nothing is checked: that would cost as much as a small kernel.

    Args:
        x: ``[..., F]`` in ``compute_dtype``.
        weight: ``[O, F]``, which is cast to ``compute_dtype``, and saved so, as autocast does.
        bias: ``[O]`` or None.
        compute_dtype: of the product.

    Returns:
        ``[..., O]`` in ``compute_dtype``, bit for bit that of F.linear.
    """
    if weight.dtype != compute_dtype:
        weight = weight.to(compute_dtype)
    if bias is not None and bias.dtype != compute_dtype:
        bias = bias.to(compute_dtype)
    y: Tensor = _call(x, weight, bias)
    return y

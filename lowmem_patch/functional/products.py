"""The products of a Linear and its low-rank adapter, forward and backward, of the values in `linear`.

`linear`, `affine` and `dropout` are autograd functions around them. They save different things, from
which the input of the products is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import padded_rank
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import module
from lowmem_patch.reference import cast

# the kind of a Linear whose input is saved as it is, in its own dtype
IDENTITY = "identity"


class LowRank(NamedTuple):
    """An adapter beside a Linear: ``scale * (hidden @ lora_A.T) @ lora_B.T`` is added to its output.

    Attributes:
        lora_A: ``[r, F]``.
        lora_B: ``[O, r]``.
        scale: the field's alpha / r.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float


class PackedWeight(NamedTuple):
    """A frozen weight of few bits in the place of a Linear's: unpacked for each product, and never saved.

    Attributes:
        unpack: gives the weight, ``[O, F]``; in autograd's thread, too.
        shape: of the unpacked weight.
        dtype, device: of what is unpacked.
    """

    unpack: Callable[[], Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def requires_grad(self) -> bool:
        return False

    def dim(self) -> int:
        return len(self.shape)


_library.register_plain(PackedWeight)


def unpacked(weight: Tensor | PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight itself, or what a packed one holds, in ``dtype``."""
    return cast(weight.unpack(), dtype) if isinstance(weight, PackedWeight) else weight


def split_packed(weight: Any) -> tuple[PackedWeight | None, Tensor | None]:
    """What backward holds of a weight beside its saved tensors, and what it saves."""
    return (weight, None) if isinstance(weight, PackedWeight) else (None, weight)


def scaled_product(scale: float, left: Tensor, right: Tensor) -> Tensor:
    """scale * (left @ right), scaled before it is rounded, in one launch."""
    y = left.new_empty(left.shape[0], right.shape[1])
    return y.addmm_(left, right, beta=0, alpha=scale)  # reads nothing of y


def linear_forward(
    hidden: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    lora_A: Tensor | None,
    lora_B: Tensor | None,
    scale: float,
    compute_dtype: torch.dtype,
    implementation: str = "reference",
    low: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y ``[..., O]`` and, with an adapter, low ``[rows, R]``, both in ``compute_dtype``; low may be given."""
    weight = unpacked(weight, compute_dtype)
    outputs = weight.shape[0]
    device = hidden.device.type
    alike = hidden.dtype == weight.dtype == compute_dtype and (
        bias is None or bias.dtype == compute_dtype
    )
    if alike and lora_A is None and not torch.is_autocast_enabled(device):
        return product(hidden, weight, bias), None
    with _library.without_autocast(device):
        hidden, weight = cast(hidden, compute_dtype), cast(weight, compute_dtype)
        bias = None if bias is None else cast(bias, compute_dtype)
        if lora_A is None or lora_B is None:
            return product(hidden, weight, bias), None
        rows = hidden.reshape(-1, hidden.shape[-1])
        ops = module(implementation)
        lora_A, lora_B = ops.adapter_weights(lora_A, lora_B, compute_dtype)
        low = F.linear(rows, lora_A) if low is None else low
        if _library.keeps_results():
            y = torch.addmm(F.linear(rows, weight, bias), low, lora_B.t(), alpha=scale)
            return torch.ops.aten._unsafe_view.default(y, (*hidden.shape[:-1], outputs)), low
        # The adapter's product first, to which cuBLAS adds the large one while it computes: the other
        # way round a second product reads and writes y.
        if bias is None:
            y = scaled_product(scale, low, lora_B.t())
        else:
            y = torch.addmm(bias, low, lora_B.t(), alpha=scale)
        y.addmm_(rows, weight.t())
    return y.resize_(*hidden.shape[:-1], outputs), low


def low_product(
    hidden: Tensor, lora_A: Tensor, lora_B: Tensor, compute_dtype: torch.dtype, implementation: str
) -> Tensor:
    """low ``[rows, R]`` in ``compute_dtype``, as `linear_forward` gives it."""
    with _library.without_autocast(hidden.device.type):
        rows = cast(hidden, compute_dtype).reshape(-1, hidden.shape[-1])
        padded_A, _ = module(implementation).adapter_weights(lora_A, lora_B, compute_dtype)
        return F.linear(rows, padded_A)


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What F.linear gives, bit for bit, but contiguous and no view, which autograd would not let anybody
    write into: ``x = fc2(h); x += shortcut``."""
    if not hidden.is_contiguous():  # torch multiplies in another order then
        y = F.linear(hidden, weight, bias).contiguous()
        whole: Tensor = torch.ops.aten._unsafe_view.default(y, y.shape)
        return whole
    y = F.linear(hidden.view(-1, hidden.shape[-1]), weight, bias)
    # to the same number of elements: the least that torch does to rows of its own
    return y.resize_(*hidden.shape[:-1], weight.shape[0])


low_product_op = _library.Operator(
    "low_product(Tensor hidden, Tensor lora_A, Tensor lora_B, ScalarType compute_dtype, "
    "str implementation) -> Tensor",
    low_product,
    lambda hidden, lora_A, lora_B, compute_dtype, implementation: hidden.new_empty(
        (hidden.numel() // hidden.shape[-1], padded_rank(lora_A.shape[0], compute_dtype)),
        dtype=compute_dtype,
    ),
)


def _forward_fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    _, _, weight, _, lora_A, *_, compute_dtype, _ = rest
    y = hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=compute_dtype)
    if lora_A is None:
        return y, None
    rows = hidden.numel() // hidden.shape[-1]
    return y, y.new_empty((rows, padded_rank(lora_A.shape[0], compute_dtype)))


linear_op = _library.Operator(
    "activation_linear(Tensor hidden, Tensor source, Tensor? up, Tensor weight, Tensor? bias, "
    "Tensor? lora_A, Tensor? lora_B, float scale, str kind, ScalarType compute_dtype, "
    "str implementation) -> (Tensor, Tensor)",
    lambda hidden, source, up, weight, bias, lora_A, lora_B, scale, kind, compute_dtype, implementation: (
        linear_forward(hidden, weight, bias, lora_A, lora_B, scale, compute_dtype, implementation)
    ),
    _forward_fake,
)


def linear_of(*arguments: Any) -> Any:
    """What `linear_op` gives, also of a packed weight, which no operator takes."""
    hidden, _, _, weight, bias, lora_A, lora_B, scale, _, dtype, implementation = arguments
    if isinstance(weight, PackedWeight):
        return linear_forward(hidden, weight, bias, lora_A, lora_B, scale, dtype, implementation)
    return linear_op(*arguments)

"""8-bit storage in a compiled graph: an operator makes what is saved, and graph code the values from it.

Of two tensors that can be had from each other, torch's partitioner saves the smaller. `graph_values` and
`stored_attention` are no operators to it: it sees what their Python does while the graph is traced, below
Dynamo and above autograd (CompositeImplicitAutograd). There a tensor knows whose view it is, so that one
memory is stored once, whoever saves a view of it; and autograd hands hooks what attention saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowmem_patch.constants import EIGHT_BIT_GROUP
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import module, resolve
from lowmem_patch.functional.eight_bit import EIGHT_BIT_DTYPES, from_eight_bits

_LARGEST_HALF = torch.finfo(torch.float16).max


def _parts_in(packed: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Integers and scales of so many elements, which lie behind each other."""
    return packed[:elements], packed[elements + elements % 2 :].view(torch.bfloat16)


def _packed_fake(x: Tensor, _: str) -> Tensor:
    elements = x.numel()
    groups = (elements + EIGHT_BIT_GROUP - 1) // EIGHT_BIT_GROUP
    return x.new_empty(elements + elements % 2 + 2 * groups, dtype=torch.int8)


def _packed(x: Tensor, implementation: str) -> Tensor:
    packed = _packed_fake(x, implementation)
    module(implementation).to_eight_bits(x.contiguous().view(-1), _parts_in(packed, x.numel()))
    return packed


# One result, not two: of what a part is taken of, torch's partitioner thinks that it costs twice its bytes to
# save, which is more than the values.
_packed_op = _library.Operator(
    "packed_in_eight_bits(Tensor x, str implementation) -> Tensor", _packed, _packed_fake
)


def _place(x: Tensor, beside: tuple[Tensor, ...] = ()) -> tuple[Tensor, Any, Any, Any]:
    """A memory that is stored, contiguous and without a gradient; size, strides and offset of ``x`` in it.

    ``beside``: tensors that are stored as well, as parts of the same memory perhaps.
    """
    base: Tensor = x if x._base is None else x._base
    parts = {id(part): part for part in (x, *beside) if part is base or part._base is base}
    covered = base.dtype == x.dtype and sum(p.numel() for p in parts.values()) == base.numel()
    order = sorted(range(base.dim()), key=base.stride, reverse=True)
    lying = base.permute(order)
    if not (covered and lying.is_contiguous()):
        whole = x.contiguous()
        return whole, whole.size(), whole.stride(), 0
    return lying, x.size(), x.stride(), x.storage_offset() - base.storage_offset()


def _values(packed: Tensor, size: Any, dtype: torch.dtype) -> Tensor:
    """What was packed of a contiguous tensor of this size.

    Where the last dimensions are whole groups, the values are computed in whatever reads them. There what
    lies within 1 % of the largest float32 or bfloat16 becomes infinite: to compare each value with that would
    cost each reader time.
    """
    integers, scales = _parts_in(packed, math.prod(size))
    row, rows = 1, list(size)
    while rows and row % EIGHT_BIT_GROUP:
        row *= rows.pop()
    if row % EIGHT_BIT_GROUP:
        return from_eight_bits(integers, scales, dtype).view(size)
    shape = (*rows, row // EIGHT_BIT_GROUP, EIGHT_BIT_GROUP)
    values = integers.view(shape).float() * scales.float().view(shape[:-1]).unsqueeze(-1)
    if dtype == torch.float16:
        values = values.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    return values.to(dtype).view(size)


def _stored(x: Tensor, beside: tuple[Tensor, ...] = ()) -> Callable[[], Tensor]:
    """Store a tensor; the result computes what the 8 bits hold of it."""
    with _library.without_grad():
        memory, *place = _place(x, beside)
        packed = _packed_op.traced(memory, resolve("auto", x))
        size, dtype = memory.size(), x.dtype

    def again() -> Tensor:
        values = _values(packed, size, dtype)
        same = place[0] == size or values.dim() == 1
        return values.view(place[0]) if same else values.as_strided(*place)

    return again


def _near(x: Tensor) -> Tensor:
    with _library.without_grad():
        return _stored(x)()


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    given = (query, key, value)
    output = query.numel() // max(query.shape[-1], 1) * value.shape[-1]
    sizes = (*(one.numel() for one in given), output)  # no set, which takes no symbol for a length
    widths = (query.shape[-1], value.shape[-1])

    def pack(x: Tensor) -> Any:
        # the log-sum-exp has one number a row; a mask may have the shape of q, and holds infinite numbers
        fits = x.dim() == query.dim() and x.shape[-1] in widths and x.numel() in sizes
        known = any(x is one for one in given)
        if not (fits and x.dtype in EIGHT_BIT_DTYPES and (x.requires_grad or known)):
            return x
        return _stored(x, given if known else ())

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved()

    # a tracer hides the hooks of whoever calls the compiled function, which see what the graph saves
    traced = _autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with saved_tensors_hooks(pack, unpack):
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    finally:
        _autograd._saved_tensors_hooks_set_tracing(traced)


_autograd: Any = torch._C._autograd  # has no types
graph_values: Callable[[Tensor], Tensor] = _library.traced_through(
    "near_in_eight_bits(Tensor x) -> Tensor", _near
)
"""What 8 bits hold of a tensor, in a compiled graph that saves the 8 bits; no gradient flows."""
stored_attention: Callable[..., Tensor] = _library.traced_through(
    "attention_in_eight_bits(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor",
    _attention,
)
"""F.scaled_dot_product_attention in a compiled graph that saves q, k, v and the output in 8 bits."""

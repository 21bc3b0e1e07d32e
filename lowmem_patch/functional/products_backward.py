"""The gradients of a Linear and its low-rank adapter, behind an activation or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem_patch.constants import EightBits, padded_rank
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import module
from lowmem_patch.functional.eight_bit import matrix_values, read_matrix
from lowmem_patch.functional.products import IDENTITY, scaled_product
from lowmem_patch.functional.shared_input import GradientSum
from lowmem_patch.reference import cast
from lowmem_patch.tracing.live_storages import OF_OPERATORS, Temporary, sum_bytes


def _low_gradient(
    ops: Any, rows: Tensor, lora_A: Tensor | None, lora_B: Tensor, scale: float, held: bool
) -> tuple[Tensor, Tensor]:
    """d_low and the padded A, which is not read where ``lora_A`` is None.

    ``held``: A is read later than in this backward's node: who trains in the backward may have written into
    ``lora_A`` by then.
    """
    first = lora_B.new_empty((lora_B.shape[1], 1)) if lora_A is None else lora_A
    padded_A, padded_B = ops.adapter_weights(first, lora_B, rows.dtype)
    is_given = padded_A is lora_A
    if held and is_given:
        padded_A = padded_A.clone()
    return scaled_product(scale, rows, padded_B), padded_A


def _hidden_gradient(
    dy: Tensor,
    rows: Tensor,
    weight: Tensor,
    d_low: Tensor | None,
    padded_A: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """``[..., F]``; ``out``, if given: memory for as many elements or more."""
    weight = cast(weight, dy.dtype)
    place = None
    if out is not None:
        place = out[: len(rows) * weight.shape[1]].view(len(rows), weight.shape[1])
    if d_low is None or padded_A is None:
        d_hidden = torch.mm(rows, weight, out=place)
    else:  # in the order of the forward
        d_hidden = torch.mm(d_low, padded_A, out=place).addmm_(rows, weight)
    return d_hidden.view(*dy.shape[:-1], weight.shape[1])


def _input_gradient(
    dy: Tensor, rows: Tensor, weight: Tensor, d_low: Any, lora_A: Any, added_up: GradientSum | None
) -> Tensor:
    """``[..., F]``; added up, without the adapters' products: of this reader, or of all up to this one."""
    if added_up is None:
        return _hidden_gradient(dy, rows, weight, d_low, lora_A)
    weight, total = cast(weight, dy.dtype), added_up.returned()
    if total is None:
        total = rows.mm(weight).view(*dy.shape[:-1], weight.shape[1])
    else:
        total.view(-1, total.shape[-1]).addmm_(rows, weight)
    added_up.leave(total, d_low, lora_A)
    return total


def _hidden(ops: Any, source: Tensor, up: Tensor | None, kind: str, dtype: torch.dtype) -> Tensor:
    """The Linear's input, computed again."""
    if kind == IDENTITY:
        return cast(source, dtype)
    y: Tensor = ops.activation_forward(source, up, kind, dtype)
    return y


def _without_padding(gradient: Tensor, dim: int, lora_B: Tensor) -> Tensor:
    rank = lora_B.shape[1]
    if gradient.shape[dim] == rank:
        return gradient
    return gradient.narrow(dim, 0, rank).contiguous()


def linear_backward(
    dy: Tensor,
    source: Any,
    up: Tensor | None,
    weight: Any,
    lora_A: Tensor | None,
    lora_B: Any,
    low: Any,
    scale: float,
    kind: str,
    needs: Sequence[bool],
    implementation: str,
    *,
    over: bool = False,
    added_up: GradientSum | None = None,
) -> list[Tensor]:
    """Gradients of source (and up), weight, bias, lora_A and lora_B, those that ``needs`` asks for.

    They have the dtype of ``dy``, or of source and up behind an activation. What is not read may be None.
    Behind them stands the memory that is needed meanwhile, for who counts bytes.

    ``over``: source and up, contiguous and of the dtype of ``dy``, are overwritten, and ``up`` becomes the
    gradient of source.

    ``added_up``: source, of the dtype of ``dy`` and with an adapter, has other readers, which have this
    gradient in common.
    """
    needs_input, needs_weight, needs_bias, needs_A, needs_B = needs
    ops: Any = module(implementation)
    rows = dy.reshape(-1, dy.shape[-1])
    d_low: Any = None
    padded_A: Any = None
    meanwhile: list[Tensor] = []
    with _library.without_autocast(dy.device.type):
        # first: torch's sum takes a multiple of dy for a while, and nothing else is there yet
        d_bias = [rows.sum(0)] if needs_bias else []
        if lora_B is not None and (needs_input or needs_A):
            held = added_up is not None
            d_low, padded_A = _low_gradient(ops, rows, lora_A, lora_B, scale, held)
        lefts = [rows if needs_weight else None, d_low if needs_A else None]
        if needs_input and kind != IDENTITY:
            sources = [source] if up is None else [source, up]
            step = _ActivationBackward(ops, dy, rows, weight, d_low, padded_A, sources, kind, lefts)
            gradients, products, meanwhile = step.over_sources() if over else step.in_parts()
        else:
            gradients = []
            if needs_input:
                given = (dy, rows, weight, d_low, padded_A)
                gradients.append(_input_gradient(*given, added_up))
            products = _products(lefts, lambda: _hidden(ops, source, up, kind, dy.dtype))
        d_weight, d_A = products
        gradients += [] if d_weight is None else [d_weight]
        gradients += d_bias
        if d_A is not None:
            gradients.append(_without_padding(d_A, 0, lora_B))
        if needs_B:
            gradients.append(_without_padding(scaled_product(scale, rows.t(), low), 1, lora_B))
    return gradients + meanwhile


def _products(lefts: list[Any], hidden: Callable[[], Tensor]) -> list[Tensor | None]:
    """left^T hidden of each left; hidden is made where there is one."""
    if all(left is None for left in lefts):
        return [None for _ in lefts]
    right = _flat(hidden())
    # the order of torch's own mm backward, for equal bits
    return [None if left is None else left.t().mm(right) for left in lefts]


_Found = tuple[list[Tensor], list[Tensor | None], list[Tensor]]


class _ActivationBackward(NamedTuple):
    """The backward of a Linear behind an activation: the gradients of source (and up), left^T hidden of each
    left, and the memory that is needed meanwhile.

    Attributes:
        ops: an implementation.
        rows: ``dy`` of two dimensions.
        sources: source, and up of a gated product; each a tensor or, but for `over_sources`, in 8 bits.
        lefts: what hidden is multiplied with; None for a product that nobody needs.
    """

    ops: Any
    dy: Tensor
    rows: Tensor
    weight: Tensor
    d_low: Tensor | None
    padded_A: Tensor | None
    sources: list[Any]
    kind: str
    lefts: list[Any]

    def in_parts(self) -> _Found:
        """Takes a large value some columns at a time: d_hidden, whose place hidden takes, is never whole.
        No column is a sum over others, so that nothing is rounded more often."""
        rows, features = self.rows, self.weight.shape[1]
        found = [
            rows.new_empty((*self.dy.shape[:-1], features), dtype=t.dtype) for t in self.sources
        ]
        products = [None if t is None else rows.new_empty(t.shape[1], features) for t in self.lefts]
        pairs = [(t.t(), y) for t, y in zip(self.lefts, products, strict=True) if y is not None]
        parts = _column_parts(rows, features)
        memory = None if parts[0] is None else rows.new_empty(len(rows) * parts[0].stop)
        for part in parts:
            weight, padded_A = _columns(self.weight, part), _columns(self.padded_A, part)
            d_hidden = _hidden_gradient(self.dy, rows, weight, self.d_low, padded_A, memory)
            # takes the place of its gradient: the peak of a plain backward
            hidden = d_hidden if pairs else None
            sources = [_columns(t, part) for t in self.sources]
            self._gradients(d_hidden, sources, hidden, [_columns(t, part) for t in found])
            for left, product in pairs:
                torch.mm(left, _flat(d_hidden), out=_columns(product, part))
        return found, products, [d_hidden if memory is None else memory]

    def over_sources(self) -> _Found:
        """The gradients take the places of up and of d_hidden, and hidden that of source."""
        d_hidden = _hidden_gradient(self.dy, self.rows, self.weight, self.d_low, self.padded_A)
        places, hidden = [*self.sources[1:], d_hidden], self.sources[0]
        self._gradients(d_hidden, self.sources, hidden, places)
        return places, _products(self.lefts, lambda: hidden), []

    def _gradients(
        self, dy: Tensor, sources: list[Any], hidden: Tensor | None, places: list[Tensor]
    ) -> None:
        x, up = sources if len(sources) == 2 else (sources[0], None)
        self.ops.activation_backward(dy, x, up, self.kind, hidden, places)


def _flat(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


# A part of the columns has so many bytes at least, and there are so many parts at most: products of fewer
# columns take more time. A part begins where a kernel's reads are aligned.
_PART_BYTES, _MOST_PARTS, _ALIGNED = 96 << 20, 4, 128


def _column_parts(rows: Tensor, features: int) -> list[slice | None]:
    """The columns of d_hidden that are computed at one time, the first part the largest; None: all."""
    size = rows.shape[0] * features * rows.element_size()
    columns = -(-features // max(1, min(_MOST_PARTS, size // _PART_BYTES)))
    columns += -columns % _ALIGNED
    if columns >= features or features % _ALIGNED:
        return [None]
    return [slice(start, min(start + columns, features)) for start in range(0, features, columns)]


def _columns(tensor: Any, part: slice | None) -> Any:
    if tensor is None or part is None:
        return tensor
    return tensor.columns(part) if isinstance(tensor, EightBits) else tensor[..., part]


def _backward_fake(dy: Tensor, *rest: Any) -> list[Tensor]:
    source, up, weight, _, lora_B, _, _, kind, needs, _ = rest
    needs_input, *needs_weights = needs
    gradients = []
    if needs_input and kind == IDENTITY:
        gradients.append(dy.new_empty((*dy.shape[:-1], weight.shape[1])))
    elif needs_input:
        gradients.extend(t.new_empty(t.shape) for t in (source, up) if t is not None)
    outputs, rank = dy.shape[-1], 0 if lora_B is None else lora_B.shape[1]
    features = 0 if source is None else source.shape[-1]
    # whose rows lie behind d_A, as `_without_padding` leaves them
    padded = padded_rank(rank, dy.dtype)
    shapes = ((outputs, features), (outputs,), (padded, features), (outputs, rank))
    lengths = (outputs, outputs, rank, outputs)
    gradients += [
        dy.new_empty(shape)[:length]
        for shape, length, need in zip(shapes, lengths, needs_weights, strict=True)
        if need
    ]
    if needs_input and kind != IDENTITY:
        part = _column_parts(dy.reshape(-1, outputs), weight.shape[1])[0]
        if part is None:
            gradients.append(dy.new_empty((*dy.shape[:-1], weight.shape[1])))
        else:
            gradients.append(dy.new_empty(dy.numel() // outputs * part.stop))
    return gradients


def _backward_over(
    dy: Tensor, source: Tensor, up: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    """What `linear_backward` computes over source and up, but for the gradient that lies in ``up``."""
    gradients = iter(linear_backward(dy, source, up, *rest, over=True)[0 if up is None else 1 :])
    *_, needs, _ = rest
    return tuple(next(gradients) if need else None for need in needs)


def _backward_over_fake(dy: Tensor, source: Tensor, _: Any, *rest: Any) -> tuple[Any, ...]:
    *others, _kind, needs, implementation = rest
    found = iter(_backward_fake(dy, source, None, *others, IDENTITY, needs, implementation))
    return tuple(next(found) if need else None for need in needs)


def _of_eight_bits(
    dy: Tensor,
    integers: Tensor,
    scales: Tensor,
    up_integers: Tensor | None,
    up_scales: Tensor | None,
    dtype: torch.dtype,
    *rest: Any,
) -> list[Tensor]:
    """What `linear_backward` computes, of source and up in 8 bits."""
    *_, kind, needs, _ = rest
    # an activation's kernel reads 8 bits, products need values
    read = read_matrix if needs[0] and kind != IDENTITY else matrix_values
    source: Any = read(integers, scales, dtype)
    up: Any = None
    if up_integers is not None and up_scales is not None:
        up = read(up_integers, up_scales, dtype)
    return linear_backward(dy, source, up, *rest)


def _of_eight_bits_fake(
    dy: Tensor, integers: Tensor, _: Any, up_integers: Any, __: Any, dtype: Any, *rest: Any
) -> list[Tensor]:
    source, up = (
        None if stored is None else stored.new_empty(stored.shape, dtype=dtype)
        for stored in (integers, up_integers)
    )
    return _backward_fake(dy, source, up, *rest)


linear_backward_op = _library.Operator(
    "activation_linear_backward(Tensor dy, Tensor? source, Tensor? up, Tensor? weight, "
    "Tensor? lora_A, Tensor? lora_B, Tensor? low, float scale, str kind, "
    "bool[] needs, str implementation) -> Tensor[]",
    linear_backward,
    _backward_fake,
)
linear_backward_of_eight_bits = _library.Operator(
    "activation_linear_backward_of_eight_bits(Tensor dy, Tensor integers, Tensor scales, "
    "Tensor? up_integers, Tensor? up_scales, ScalarType dtype, Tensor? weight, Tensor? lora_A, "
    "Tensor? lora_B, Tensor? low, float scale, str kind, bool[] needs, str implementation) -> Tensor[]",
    _of_eight_bits,
    _of_eight_bits_fake,
)
_backward_over_op = _library.Operator(
    "activation_linear_backward_over(Tensor dy, Tensor(a!) source, Tensor(b!)? up, Tensor weight, "
    "Tensor? lora_A, Tensor? lora_B, Tensor? low, float scale, str kind, "
    "bool[] needs, str implementation) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_over,
    _backward_over_fake,
)


def linear_backward_over(dy: Tensor, source: Tensor, up: Tensor | None, *rest: Any) -> list[Tensor]:
    """As `linear_backward` with ``over``; the gradient of the input must be asked for."""
    *_, needs, _ = rest
    found = _backward_over_op(dy, source, up, *rest)
    gradients = [gradient for gradient, need in zip(found, needs, strict=True) if need]
    return gradients if up is None else [up, *gradients]


def _backward_temporary(dy: Tensor, *rest: Any) -> Temporary:
    _, _, needs_bias, *_ = rest[-2]
    return Temporary(sum_bytes(dy, range(dy.dim() - 1)) if needs_bias else 0, beside_outputs=False)


for _operator in (linear_backward_op, linear_backward_of_eight_bits, _backward_over_op):
    OF_OPERATORS[_operator.traced] = _backward_temporary


def one_for_each(
    found: Iterable[Tensor], needs: Iterable[bool], dtypes: Iterable[torch.dtype]
) -> tuple[Any, ...]:
    """The gradients that ``needs`` asked for, each in its dtype, and None for each of the others."""
    gradients = iter(found)
    pairs = zip(needs, dtypes, strict=True)
    return tuple(cast(next(gradients), dtype) if need else None for need, dtype in pairs)

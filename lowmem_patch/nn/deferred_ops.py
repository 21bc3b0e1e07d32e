"""The ops behind deferred tensors: activation, gated product, a tensor saved once, norm, dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.formulas import FORWARD
from lowmem_patch.functional import (
    ActivationKind,
    Affine,
    ExpertWeight,
    Recomputed,
    RecomputedMatmul,
    activation_gradients,
    activation_linear,
    affine_linear,
    below_modes,
    compiled,
    computed_again,
    differentiable_activation,
    dropout_linear,
    in_compiler,
    is_eager,
    matrix_product,
    packed_dropout,
    packs_saved_tensors,
    recast_linear,
    recast_matmul,
    save_copy,
    saves_input,
    without_torch_function,
)
from lowmem_patch.nn import readers as readers  # fills the table of those who read these
from lowmem_patch.nn.context import autocast_dtype
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, Stored, value_of
from lowmem_patch.nn.deferred_experts import GatheredRows, Product
from lowmem_patch.nn.op import Op, Projection
from lowmem_patch.nn.stored import attach, keep, plain_linear, read_input, saved_linear


class Activation(Op):
    """``act(x)`` or, with two sources, ``act(gate) * up``; elementwise, gradients exact.

    Autograd saves the sources; the value is recomputed from them where a gradient needs it.

    Args:
        reads: as of an `Op`.
        at_once: no known reader saves the values: they are computed before one asks, in less Python, of one
            source where torch's own operator saves that, or of two (``gated``).
        gated: the values that are read are a product's.
        weighed: each row of a Linear of them is multiplied with a number, as a shared expert's gate does.
    """

    elementwise = True
    given_away = False  # the gradients of the sources may take their places
    eight_bits = False  # Linears save the sources in 8 bits

    def __init__(
        self, kind: ActivationKind, reads: int = 0,
        at_once: bool = False, gated: bool = False, weighed: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.reads, self.weighed = kind, reads, weighed
        sources = 2 if gated else int(saves_input(kind))
        self.at_once = sources if at_once else 0

    def of(self, sources: tuple[Tensor, ...]) -> Deferred:
        """The deferred value."""
        if in_compiler():  # which computes no value that nobody reads
            value = compiled.activation(sources[0], self.kind, *sources[1:])
            return keep(value, self, sources)
        if len(sources) != self.at_once or not is_eager(*sources):
            return defer(self, sources)
        if len(sources) == 1:  # unseen by the mode that calls us in the place of such a function
            value = below_modes(FORWARD[self.kind], sources[0])
            return attach(value, self, sources, watched=True)
        gate, up = sources
        value = differentiable_activation(gate, self.kind, up)
        return attach(value, self, sources, watched=True)

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        dtype = sources[0].dtype
        for other in sources[1:]:
            dtype = torch.promote_types(dtype, other.dtype)
        return dtype

    def strides(self, sources: tuple[Tensor, ...]) -> tuple[int, ...] | None:
        return super().strides(sources) if len(sources) == 1 else None  # of a product

    def compute(self, *sources: Tensor) -> Tensor:
        return computed_again(*sources, kind=self.kind)

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        return activation_gradients(dy, sources, self.kind, self.given_away)

    def in_checkpoint(self) -> Activation:
        op = copy.copy(self)
        op.given_away = True
        return op

    def in_eight_bits(self) -> Activation:
        op = copy.copy(self)
        op.eight_bits = True
        return op

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        h.was_bypassed = True
        sources = tuple(move(source) for source in h.sources)
        if type(h) is Stored and not in_compiler():
            return keep(move(h), self, sources)  # who writes into a view writes into the whole
        return self.of(sources)

    def times(self, h: Deferred, other: Any) -> Any:
        gates = len(h.sources) == 1 and isinstance(other, Tensor) and other.shape == h.shape
        if not gates or not other.is_floating_point():
            return NotImplemented
        h.was_bypassed = True
        return self.of((h.sources[0], value_of(other)))

    def squared(self, h: Deferred) -> Any:
        if self.kind != "relu" or len(h.sources) != 1:
            return NotImplemented
        h.was_bypassed = True
        return Activation("relu_squared").of(h.sources)

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        if to.stored:
            return compiled.stored_linear(h.sources, *to[:3], dtype, self.kind)
        if to.adapter is None:
            if in_compiler():
                return plain_linear(h.plain(), to, dtype)
            if self.weighed and to.bias is None and h.dtype == dtype == to.weight.dtype:
                product: Tensor = self.grouped(h, matrix_product, ExpertWeight(to.weight.t()), None)
                return product
            if not to.weight.requires_grad:
                # the tensor's own node saves the sources; who else reads it shares its gradient
                return saved_linear(h.plain(), to, dtype)
        h.was_bypassed = True
        weight, bias, adapter = to[:3]
        return activation_linear(
            h.detached(), h.sources, weight, bias, self.kind, dtype, adapter,
            eight_bits=self.eight_bits,
        )  # fmt: skip

    def dropped(self, h: Deferred, p: float) -> Any:
        sources = h.sources
        while sources and isinstance(sources[0], Deferred):  # behind a cast
            sources = sources[0].sources
        return Dropped.of(h, p, sources, self.kind)

    def recipe(self, h: Deferred) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        return partial(computed_again, kind=self.kind), h.sources

    def grouped(
        self, h: Deferred, func: Callable[..., Any], weight: ExpertWeight, offsets: Tensor | None
    ) -> Any:
        if in_compiler():
            return NotImplemented
        again, sources = self.recipe(h)
        return Product.of(RecomputedMatmul(func, again, h.plain(), weight, offsets, sources))


class Saved(Op):
    """A stored tensor that autograd saves anyway, so that casts of it need not be saved as well."""

    may_be_bypassed = False  # all gradients pass through the tensor

    def of(self, tensor: Tensor, *, passing: bool = False) -> Deferred:
        """``tensor``, read so; ``passing`` as of `keep`."""
        return keep(tensor, self, passing=passing)

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        return keep(move(h), self)

    def gathered(self, h: Deferred, index: Tensor) -> Any:
        if in_compiler():
            return compiled.gathered_rows(h.plain(), index)
        return GatheredRows.of(h.plain(), index)

    def dropped(self, h: Deferred, p: float) -> Any:
        source: Any = h
        while source.op is not self:  # behind a cast
            source = source.sources[0]
        return Dropped.of(h, p, (self.saved_as(source),), None)

    def saved_as(self, h: Deferred) -> Tensor:
        """What a Linear behind a dropout saves of ``h``."""
        return h.plain()

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        return saved_linear(read_input(h, h.plain(), to, dtype), to, dtype)


class Shared(Saved):
    """The output of a norm that saves it, to recover z from it in backward; ``node`` is the norm's."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def written_unseen(self, h: Deferred) -> None:
        save_copy(self.node)


class Normed(Saved):
    """The output of a norm, whose sources are (copy, z), each of which may be absent.

    In a compiled graph that stores 8 bits, the one source is what these hold of the output.

    Args:
        copy: the first source is the output in autocast's dtype, which Linears read under autocast.
        affine: gamma and beta with which the output is computed from z: the norm saves z, and so do
            the Linears. None: the norm saves its output.
    """

    def __init__(self, copy: bool, affine: Affine | None) -> None:
        self.copy = copy
        self.affine = affine
        self.recomputed: Recomputed | None = None
        self.may_be_bypassed = copy  # the gradient of Linears goes to the copy

    def moved(self, h: Deferred, move: Callable[[Tensor], Tensor]) -> Any:
        if self.copy:
            h.was_bypassed = True
        op = Normed(self.copy, self.affine)  # z lies in another order there
        return keep(move(h), op, tuple(move(source) for source in h.sources))

    def gathered(self, h: Deferred, index: Tensor) -> Any:
        # nobody saves the output itself: a few of its rows are fewer bytes
        return NotImplemented if len(index) < len(h) else super().gathered(h, index)

    def saved_as(self, h: Deferred) -> Tensor:
        # the product is rounded to the copy's dtype in any case
        return h.sources[0] if self.copy else h.plain()

    def _read(self, h: Deferred, dtype: torch.dtype) -> Tensor:
        if self.copy and h.sources[0].dtype == dtype:
            h.was_bypassed = True
            return h.sources[0]
        if type(h) is Stored and h._origin is None and not in_compiler():
            return h  # no view of it, which would cost a node of autograd
        return h.plain()

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        compiling = in_compiler()
        value = self._read(h, dtype)
        trains = to.weight.requires_grad or to.adapter is not None
        if to.stored and h.sources:
            return compiled.stored_linear((value,), *to[:3], dtype, near=h.sources[-1])
        if self.affine is None or not trains or compiling:
            return saved_linear(read_input(h, value, to, dtype), to, dtype)
        packs = to.adapter is None and value.dtype == dtype and type(value) in (Tensor, Stored)
        if packs and not packs_saved_tensors():
            if self.recomputed is None:
                self.recomputed = Recomputed(value, h.sources[-1], self.affine)
            return self.recomputed.linear(value, to.weight, to.bias)
        return affine_linear(
            value, h.sources[-1], self.affine, to.weight, to.bias, dtype, to.adapter
        )


def saved_copy(h: Stored) -> Tensor | None:
    """What Linears read in the place of a norm's output, where the norm saves it as well; else None."""
    with without_torch_function():
        op = h.op
        saved = type(op) is Normed and op.copy and op.affine is None and not h.is_changed()
        return h.sources[0] if saved else None


class Dropped(Op):
    """A dropout, whose mask is drawn at once: the random numbers are those of unpatched code.

    A Linear that trains saves the mask in bits and what the dropout's input is computed from; any other
    reader reads the stored value, whose own node saves the bits alone. The last source is the mask.

    Args:
        kind: of the activation that the sources are of, None where the source is the input itself.
        p: the probability, above 0 and below 1.
    """

    may_be_bypassed = False

    def __init__(self, kind: ActivationKind | None, p: float) -> None:
        self.kind = kind
        self.p = p

    @classmethod
    def of(
        cls, h: Deferred, p: float, sources: tuple[Tensor, ...], kind: ActivationKind | None
    ) -> Deferred:
        value, bits = packed_dropout(h.plain(), p)
        return keep(
            value,
            cls(kind, p),
            (*sources, bits),
            passing=True,  # all gradients are added at the result, as those of a block that runs again
        )

    def dropped(self, h: Deferred, p: float) -> Any:
        return Dropped.of(h, p, (h.plain(),), None)

    def linear(self, h: Deferred, to: Projection, dtype: torch.dtype) -> Tensor:
        weight, bias, adapter = to[:3]
        if adapter is not None:
            low = self.linear(h, Projection(adapter.lora_A, None), dtype)
            product = recast_linear(low, adapter.lora_B, None, dtype) * adapter.scale
            return self.linear(h, Projection(weight, bias), dtype) + product
        value = h.plain()
        if not weight.requires_grad:
            return saved_linear(value, to, dtype)
        *sources, bits = h.sources
        settings = (self.p, self.kind, dtype)
        return dropout_linear(value, tuple(sources), bits, weight, bias, *settings)


class Matrix(Saved):
    """A high-precision matrix whose product is computed in autocast's dtype, without a saved cast."""

    def matmul(self, h: Deferred, right: Any) -> Any:
        dtype = autocast_dtype(h.device.type, h.dtype)
        if (
            dtype is None
            or not isinstance(right, Tensor)
            or not h.dim() == right.dim() > 2
            or h.shape[:-2] != right.shape[:-2]
        ):
            return NotImplemented
        return recast_matmul(h.plain(), value_of(right), dtype)

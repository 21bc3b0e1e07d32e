"""Logits that nobody has computed: a deferred tensor, and the readers that never need it whole.

A head returns `Unstored` logits. Casts, scales, soft caps and moves of rows only note what is to be done.
These readers work on a chunk of rows at a time:

- a cross entropy, and `nll_loss` of a log_softmax: `lowmem_patch.functional.cross_entropy`;
- logsumexp, and the gather of one class a row, from logits or from a log_softmax;
- argmax.

Anybody else gets the logits, computed whole, and sends a gradient to the head by the logits' own node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.functional import Head, flat, in_compiler, wide, without_autocast
from lowmem_patch.nn.context import is_freed
from lowmem_patch.nn.defer import defer
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.op import Arguments, Function, Named, Op
from lowmem_patch.nn.shared_memory import SharedMemory
from lowmem_patch.nn.traced import trace
from lowmem_patch.nn.trained_weights import TrainedWeights
from lowmem_patch.tracing.op_roles import Role, function_name, role_of
from lowmem_patch.tracing.row_moves import moves_rows

_FREED = (
    "lowmem_patch: the weight of a head was freed before its logits were read (FSDP and ZeRO free weights "
    "after a forward): compute the loss inside the model's forward, or keep the weights of the root "
    "(reshard_after_forward=False), or patch with head: keep"
)


_WORTH_WAITING = 0.25  # of the labels are ignored


class HeadReads:
    """Who asked for the logits of a head: what a report says of it, and what its next loss is told.

    Attributes:
        whole: how often they were computed whole, by the torch function that asked.
        ignored: the share of labels that were to be ignored, as far as it is known without waiting.
        not_deferred: why the logits are computed at once, where that is known since the patch.
    """

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()
        self.ignored = 0.0
        self.not_deferred = ""
        self._pending: tuple[Tensor, Any] | None = None  # a count on its way from the GPU

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pending": None}

    def selects(self, labels: Tensor, ignore_index: int) -> bool:
        """Whether rows with ignored labels shall be left out. On a GPU that means to wait for it, which is
        worth it where the last steps ignored many."""
        if not labels.is_cuda:
            return True
        # of a fake tensor there are no values, and nothing to wait for
        if isinstance(labels, FakeTensor) or torch.cuda.is_current_stream_capturing():
            return False
        if self._pending is not None and self._pending[1].query():
            self.ignored, self._pending = float(self._pending[0]), None
        if self._pending is None:
            share = (labels == ignore_index).float().mean()
            target = torch.empty((), pin_memory=True)
            target.copy_(share, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record()
            self._pending = (target, event)
        return self.ignored > _WORTH_WAITING


class Settings(NamedTuple):
    """Which sources there are, and what is done with their product.

    Attributes:
        compute_dtype: of the product.
        to: of the values.
        bias, adapter: whether b, and whether low and B, are among the sources.
        sum_dtype: in which a bias is added, where that is not the compute dtype.
        scale, cap, sign, normalised: the formula, as of `Logits`.
        lead: the dimensions before the classes, where x has others.
        second: the classes are dimension 1, and not the last.
    """

    compute_dtype: torch.dtype
    to: torch.dtype
    bias: bool
    adapter: bool
    scale: float = 1.0
    cap: float = 0.0
    sign: float = 1.0
    normalised: bool = False
    lead: tuple[int, ...] | None = None
    second: bool = False
    sum_dtype: torch.dtype | None = None


class Logits(Op):
    """``scale a`` or ``cap tanh(scale a)`` of a = x W^T + b + low B^T, or its log_softmax times ``sign``.

    The sources are x ``[..., D]``, W ``[V, D]`` and, where they are there, b ``[V]``, low ``[..., r]`` and B
    ``[V, r]``.

    Args:
        head_reads: where to note who reads them whole.
        settings: which sources there are, and what is done with their product.
        weights: those of the sources that train; None under a compiler.
    """

    written_source = (
        "lowmem_patch: these logits were not computed before the weight of their head, its input, or a bias "
        "that was added to them, was written (by an optimizer's step): read them, or a clone of them, before "
        "that, or patch with head: keep"
    )
    written_view = (
        "lowmem_patch: logits were written in place while others that share their memory (a view, a slice, a "
        "detached tensor) are held, and would not see it: write into a clone, or patch with head: keep"
    )

    def __init__(
        self, head_reads: HeadReads, settings: Sequence[Any], weights: TrainedWeights | None = None
    ) -> None:
        settings = Settings(*settings)
        self.head_reads, self.settings, self.weights = head_reads, settings, weights
        self.compute_dtype, self.to, self.bias, self.adapter = settings[:4]
        self.scale, self.cap, self.sign, self.normalised = settings[4:8]
        self.lead, self.second = settings[8:10]
        self.sum_dtype = settings.sum_dtype or self.compute_dtype

    def changed(self, **settings: Any) -> Logits:
        """Other values of the same product, or the same in another order."""
        return Logits(self.head_reads, self.settings._replace(**settings), self.weights)

    def of(self, sources: tuple[Tensor, ...]) -> Deferred:
        """The deferred logits."""
        if in_compiler():
            # an ordinary tuple: of a named one the compiler of torch 2.11 returns an empty one
            return trace(Logits, (self.head_reads, (*self.settings,)), sources)
        h = defer(self, sources)
        SharedMemory.of(h)  # for a compiled function to which these may be given
        return h

    def head(self, sources: tuple[Tensor, ...]) -> Head:
        """The sources as the ops read them."""
        x, weight, *rest = sources
        bias = rest.pop(0) if self.bias else None
        low, lora_B = rest if self.adapter else (None, None)
        if not in_compiler() and ((weight.numel() and is_freed(weight)) or weight.dim() != 2):
            raise RuntimeError(_FREED)
        dtypes = (self.compute_dtype, self.sum_dtype)
        return Head(x, weight, bias, low, lora_B, self.scale, self.cap, *dtypes)

    # as an op

    def dtype(self, sources: tuple[Tensor, ...]) -> torch.dtype:
        return self.to

    def rows_shape(self, sources: tuple[Tensor, ...]) -> tuple[int, ...]:
        """The dimensions but that of the classes."""
        return tuple(sources[0].shape[:-1]) if self.lead is None else self.lead

    def shape(self, sources: tuple[Tensor, ...]) -> torch.Size:
        lead, classes = self.rows_shape(sources), sources[1].shape[0]
        return torch.Size((lead[0], classes, *lead[1:]) if self.second else (*lead, classes))

    def compute(self, *sources: Tensor) -> Tensor:
        return self._finished(self._product(sources), sources)

    def is_outdated(self) -> bool:
        return self.weights is not None and self.weights.are_others()

    def note_reader(self, name: str) -> None:
        self.head_reads.whole[name] += 1

    def _product(self, sources: tuple[Tensor, ...]) -> Tensor:
        """a, ``[rows, V]``."""
        head = self.head(sources)
        added = head.bias if head.has_wider_sums else None
        with without_autocast(head.x.device.type):
            x, weight, bias, low, lora_B = (
                None if t is None or t is added else t.to(self.compute_dtype) for t in head.tensors
            )
            a = F.linear(x, weight, bias)  # type: ignore[arg-type]  # neither is None
            if low is not None and lora_B is not None:
                a = a + low @ lora_B.t()
            if added is not None:
                a = a.to(head.sum_dtype) + added
        return a.view(-1, a.shape[-1])

    def _finished(self, a: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        y = a
        if self.cap:
            y = self.cap * torch.tanh(a.to(wide(a.dtype)) * self.scale)
        elif self.scale != 1:
            y = a.to(wide(a.dtype)) * self.scale
        if self.normalised:
            y = F.log_softmax(y, -1, dtype=wide(y.dtype)) * self.sign
        y = y.to(self.to).view(*self.rows_shape(sources), a.shape[-1])
        return y.movedim(-1, 1).contiguous() if self.second else y

    def gradients(self, dy: Tensor, *sources: Tensor) -> tuple[Tensor | None, ...]:
        head = self.head(sources)
        if self.second:
            dy = dy.movedim(1, -1)
        plain = not self.cap and self.scale == 1 and not self.normalised
        if plain:
            d_a = dy.reshape(-1, head.weight.shape[0]).to(self.sum_dtype)
        else:
            with torch.enable_grad():
                a = self._product(sources).requires_grad_()
                op = self.changed(second=False)
                y = op._finished(a, sources)
                (d_a,) = torch.autograd.grad(y, a, dy.reshape(y.shape))
        with without_autocast(d_a.device.type):
            dtype, x, low = self.compute_dtype, flat(head.x), head.low
            d_bias = [d_a.sum(0)] if self.bias else []
            d_a = d_a.to(dtype)
            d_x = (d_a @ head.weight.to(dtype)).view(sources[0].shape)
            found = [d_x, d_a.t() @ x.to(dtype), *d_bias]
            if low is not None and head.lora_B is not None:
                found.append((d_a @ head.lora_B.to(dtype)).view(low.shape))
                found.append(d_a.t() @ flat(low).to(dtype))
        return tuple(found)

    # readers

    def _in_rows(self, tensor: Tensor) -> Tensor:
        """x or low in the dimensions of the logits."""
        return tensor if self.lead is None else tensor.reshape(*self.lead, tensor.shape[-1])

    def _moved_rows(
        self, h: Deferred, move: Callable[[Tensor], Any]
    ) -> Deferred | tuple[Deferred, ...]:
        """The logits of moved rows, or of each part of rows that ``move`` takes apart."""
        h.was_bypassed = True
        op, (x, *rest) = self.changed(lead=None), h.sources
        moved = move(self._in_rows(x))
        low = move(self._in_rows(rest[-2])) if self.adapter else None

        def of(x: Tensor, low: Tensor | None) -> Deferred:
            return op.of((x, *rest) if low is None else (x, *rest[:-2], low, rest[-1]))

        if isinstance(moved, Tensor):
            return of(moved, low)
        return tuple(map(of, moved, low or (None,) * len(moved)))

    def rearranged(self, h: Deferred, func: Function, args: Arguments, kwargs: Named) -> Any:
        if self.second:
            return NotImplemented
        role, rest = role_of(function_name(func)), args[1:]
        if role.has(Role.RESHAPE):
            return self._reshaped(h, func, rest, kwargs)
        if role.has(Role.INDEX) and (chosen := _class_slice(rest[0], h.dim())):
            return self._of_classes(h, func, *chosen)
        x = self._in_rows(h.sources[0])
        try:
            moved = func(x, *rest, **kwargs)
        except (IndexError, RuntimeError, TypeError, ValueError):
            return NotImplemented  # it asks for classes, of which x has none
        if moved is x or role.has(Role.CONTIGUOUS):
            return h
        if moves_rows(func, (x, *rest), kwargs, x, moved):
            return self._moved_rows(h, lambda tensor: func(tensor, *rest, **kwargs))
        if role.has(Role.TRANSPOSE | Role.PERMUTE) and h.dim() > 2:
            like = torch.empty(tuple(range(2, 2 + h.dim())), device="meta")  # no two are alike
            if func(like, *rest, **kwargs).stride() == like.movedim(-1, 1).stride():
                h.was_bypassed = True
                return self.changed(second=True).of(h.sources)
        return NotImplemented

    def _reshaped(self, h: Deferred, func: Function, rest: Arguments, kwargs: Named) -> Any:
        """Rows in other dimensions; x stays as it is, since a slice of it would have to be copied."""
        if rest and isinstance(rest[0], torch.dtype):
            return NotImplemented  # another reading of the same bits
        # which whoever counts bytes need not see
        like = torch.empty((), device="meta").expand(h.shape)
        shape = func(like, *rest, **kwargs).shape
        if not shape or shape[-1] != h.shape[-1]:
            return NotImplemented
        h.was_bypassed = True
        return self.changed(lead=tuple(shape[:-1])).of(h.sources)

    def _of_classes(self, h: Deferred, func: Function, rows: Arguments, classes: slice) -> Any:
        """Some classes of rows: those of a vocabulary without its padding."""
        if self.normalised or not len(range(h.shape[-1])[classes]):
            return NotImplemented  # a log_softmax is one over all classes
        moved = self.rearranged(h, func, (h, rows), {})
        if not isinstance(moved, Deferred):
            return NotImplemented
        op: Any = moved.op
        x, weight, *rest = moved.sources
        places = [0] * self.bias + [len(rest) - 1] * self.adapter  # of b and B
        for place in places:
            rest[place] = rest[place][classes]
        moved.was_bypassed = True
        return op.of((x, weight[classes], *rest))

    def cast(self, h: Deferred, dtype: torch.dtype) -> Any:
        h.was_bypassed = True
        return self.changed(to=dtype).of(h.sources)

    def times(self, h: Deferred, other: Any) -> Any:
        if isinstance(other, bool) or not isinstance(other, (int, float)) or other == 0:
            return NotImplemented
        name = "sign" if self.normalised else "cap" if self.cap else "scale"
        factor = getattr(self, name) * other
        if factor == 0:  # too small for a float; a cap of 0 would be none
            return NotImplemented
        h.was_bypassed = True
        return self.changed(**{name: factor}).of(h.sources)

    def plus(self, h: Deferred, other: Any) -> Any:
        """A bias that is added behind the product, in the dtype that torch adds it in: a mask of float32's
        smallest number would be infinite in bf16."""
        plain = not (self.cap or self.second or self.normalised or self.bias)
        if not plain or self.scale != 1 or not isinstance(other, Tensor):
            return NotImplemented
        fits = other.numel() == other.shape[-1:].numel() == h.shape[-1] and other.dim() <= h.dim()
        if not fits or other.device != h.device or not other.is_floating_point():
            return NotImplemented
        to = torch.promote_types(self.to, other.dtype) if other.dim() else self.to
        if torch.promote_types(self.to, self.compute_dtype) != self.to:
            return NotImplemented  # the product was rounded
        h.was_bypassed = True
        sum_dtype = None if to == self.compute_dtype else to
        op = self.changed(bias=True, to=to, sum_dtype=sum_dtype)
        x, weight, *adapter = h.sources
        return op.of((x, weight, value_of(other).reshape(-1), *adapter))


def _class_slice(item: Any, dim: int) -> tuple[tuple[Any, ...], slice] | None:
    """An index that chooses classes by a slice of the last dimension: that of rows, and the slice."""
    if not isinstance(item, tuple) or not item or not isinstance(item[-1], slice):
        return None
    whole = any(one is Ellipsis for one in item) or sum(one is not None for one in item) == dim
    last = item[-1]
    if not whole or last == slice(None) or last.step not in (None, 1):
        return None
    return (*item[:-1], slice(None)), last

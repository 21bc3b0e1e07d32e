"""The readers that never need logits whole; each gets the arguments of its torch function by their names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.functional import (
    Labels,
    flat,
    in_compiler,
    in_compute_dtype,
    linear_cross_entropy,
    linear_losses,
    logits_in_chunks,
    wide,
    without_autocast,
)
from lowmem_patch.nn.deferred import READERS, Deferred
from lowmem_patch.nn.logits import Logits
from lowmem_patch.nn.traced import join
from lowmem_patch.tracing.op_roles import Role, names_with

_NO_CLASS = -(1 << 31)  # ignored nowhere


def _logits(h: Any) -> Logits | None:
    """The op of deferred logits that nobody has written into, or hangs a hook on."""
    if not isinstance(h, Deferred) or not isinstance(h.op, Logits):
        return None
    return None if h.is_changed() else h.op


Reader = Callable[[Logits, Deferred, dict[str, Any]], Any]


def _reader(reader: Reader, like: Callable[..., Any]) -> Callable[..., Any]:
    """What the table of readers holds: it gets logits, and the arguments by the names of ``like``'s."""
    parameters = inspect.signature(like).parameters
    names = [*parameters][1:]
    empty = inspect.Parameter.empty
    defaults = {n: parameters[n].default for n in names if parameters[n].default is not empty}

    def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        h: Any = args[0]
        op = _logits(h)
        if op is None or len(args) > len(parameters):
            return NotImplemented
        # not Signature.bind, which no compiler reads
        given = dict(zip(names, args[1:], strict=False))
        for name, value in kwargs.items():
            if name in given or name not in names:
                return NotImplemented  # torch's own error
            given[name] = value
        given = {**defaults, **given}
        return reader(op, h, given) if len(given) == len(names) else NotImplemented

    return read


def _labels(op: Logits, h: Deferred, given: dict[str, Any]) -> Labels | None:
    """Labels of classes for every row, None where they are anything else."""
    target, weight = given["target"], given["weight"]
    if type(target) is not Tensor and not hasattr(target, "fake_mode"):
        return None
    lead = op.rows_shape(h.sources)
    if target.dtype != torch.int64 or target.shape != lead or target.device != h.device:
        return None
    if len(lead) > 1 and not op.second:
        return None  # torch takes the second dimension for the classes
    if weight is not None and not _fits(weight, h):
        return None
    smoothing = given.get("label_smoothing", 0.0)
    if not 0 <= smoothing <= 1:
        return None
    return Labels(target.reshape(-1), weight, given["ignore_index"], smoothing)


def _fits(weight: Tensor, h: Deferred) -> bool:
    """Whether torch takes these class weights; elsewhere it raises its own error."""
    same = weight.dtype == h.dtype or torch.is_autocast_enabled(h.device.type)
    placed = weight.shape == h.shape[1:2] and weight.device == h.device
    return same and placed and not weight.requires_grad


def _read_loss(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    """Of `F.cross_entropy`, or of `F.nll_loss`, which knows no label smoothing, and reads a log_softmax."""
    if op.normalised == ("label_smoothing" in given) or op.sign != 1:
        return NotImplemented
    labels, reduction = _labels(op, h, given), given["reduction"]
    legacy = given["size_average"] is not None or given["reduce"] is not None
    if labels is None or legacy or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    h.was_bypassed = True
    head, target = op.head(h.sources), labels.target
    assert target is not None
    waits = reduction != "none" and not in_compiler()
    selects = waits and op.head_reads.selects(target, labels.ignore_index)
    loss = linear_cross_entropy(head, labels, reduction, selects=selects)
    if reduction == "none":
        loss = loss.view(op.rows_shape(h.sources))
    return loss.to(_result_dtype(_mean_loss, h))


def _mean_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, logits.new_zeros(1, dtype=torch.int64))


def _result_dtype(func: Callable[..., Any], h: Tensor, *rest: Any) -> torch.dtype:
    """The dtype that a torch function of logits gives: autocast computes some of them in float32."""
    device = h.device
    if not torch.is_autocast_enabled(device.type):
        return h.dtype
    asked = _asked_dtype if in_compiler() else _known_dtype
    return asked(func, device, h.dtype, torch.get_autocast_dtype(device.type), *rest)


def _asked_dtype(
    func: Callable[..., Any], device: torch.device, dtype: torch.dtype, _: torch.dtype, *rest: Any
) -> torch.dtype:
    made: Tensor = func(torch.zeros(1, 2, dtype=dtype, device=device), *rest)
    return made.dtype


_known_dtype = cache(_asked_dtype)


def _is_last(h: Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and dim in (-1, h.dim() - 1)


def _single(dim: Any) -> Any:
    """The dimension of a function that takes a list of them."""
    return dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim


def _read_log_softmax(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    dim = given["dim"]
    at_classes = dim in (1, 1 - h.dim()) if op.second else _is_last(h, dim)
    if op.normalised or not at_classes:
        return NotImplemented
    h.was_bypassed = True
    to = _result_dtype(F.log_softmax, h, -1) if given["dtype"] is None else given["dtype"]
    return op.changed(normalised=True, to=to).of(h.sources)


def _read_logsumexp(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    if op.normalised or op.second or not _is_last(h, _single(given["dim"])):
        return NotImplemented
    h.was_bypassed = True
    found = linear_losses(op.head(h.sources), Labels(None)).view(h.shape[:-1])
    found = found.to(_result_dtype(torch.logsumexp, h, -1))
    return found.unsqueeze(-1) if given["keepdim"] else found


def _read_gather(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    """One class of each row."""
    index = given["index"]
    fits = index.dim() == h.dim() and index.shape == (*h.shape[:-1], 1)
    if op.second or not _is_last(h, given["dim"]) or not fits or given["sparse_grad"]:
        return NotImplemented
    h.was_bypassed = True
    classes = index.reshape(-1)
    if op.normalised:
        labels = Labels(classes, None, _NO_CLASS)
        found = linear_cross_entropy(op.head(h.sources), labels, "none") * -op.sign
    else:
        found = _scores_of(op, h, classes)
    return found.view(index.shape).to(op.to)


def _scores_of(op: Logits, h: Deferred, classes: Tensor) -> Tensor:
    """y of one class a row, by as many rows of the weight."""
    head, dtype = op.head(h.sources), op.compute_dtype
    with without_autocast(h.device.type):

        def products(x: Tensor, weight: Tensor) -> Tensor:
            chosen = F.embedding(classes, weight).to(dtype)
            return torch.bmm(x.to(dtype).unsqueeze(1), chosen.unsqueeze(2)).view(-1)

        a = products(flat(head.x), head.weight)
        if head.bias is not None:
            a = a + head.bias.to(head.sum_dtype)[classes]
        if head.low is not None and head.lora_B is not None:
            a = a + products(flat(head.low), head.lora_B)
        a = a.to(wide(head.sum_dtype)) * op.scale
        return op.cap * torch.tanh(a) if op.cap else a


def _read_sum(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    """The sum of all log-probabilities of a row, as label smoothing asks for it."""
    if not op.normalised or op.second or not _is_last(h, _single(given["dim"])):
        return NotImplemented
    h.was_bypassed = True
    head = op.head(h.sources)
    classes = torch.zeros(flat(head.x).shape[0], dtype=torch.int64, device=h.device)
    labels = Labels(classes, None, _NO_CLASS, 1.0)
    found = linear_cross_entropy(head, labels, "none") * (-op.sign * h.shape[-1])
    found = found.view(h.shape[:-1]).to(op.to if given["dtype"] is None else given["dtype"])
    return found.unsqueeze(-1) if given["keepdim"] else found


def _read_argmax(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    finite = math.isfinite(op.scale) and math.isfinite(op.cap) and h.numel()
    grows = finite and (op.sign > 0 if op.normalised else op.scale > 0 and op.cap >= 0)
    if op.second or not _is_last(h, given["dim"]) or not grows:
        return NotImplemented
    with torch.no_grad(), without_autocast(h.device.type):
        head = in_compute_dtype(op.head(h.sources))
        parts = [a.argmax(-1) for _, a in logits_in_chunks(head)]
        found = torch.cat(parts).view(h.shape[:-1])
    return found.unsqueeze(-1) if given["keepdim"] else found


def _read_detach(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    found = op.of(tuple(source.detach() for source in h.sources))
    return join(found, h, Tensor.detach, (h,), {})


def _read_division(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    other = given["other"]
    if given["rounding_mode"] is not None or not isinstance(other, (int, float)) or not other:
        return NotImplemented
    return op.times(h, 1 / other)


def _read_tanh(op: Logits, h: Deferred, given: dict[str, Any]) -> Any:
    if op.cap or op.normalised or op.to == torch.float64:
        return NotImplemented
    h.was_bypassed = True
    return op.changed(cap=1.0).of(h.sources)


def _read_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One row, or all parts: as ``for row in logits``."""
    op = _logits(args[0])
    if op is None:
        return NotImplemented
    return join(op.rearranged(args[0], func, args, kwargs), args[0], func, args, kwargs)


def _read_iter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As eager code: a compiler asks for the iterator itself."""
    parts = _read_parts(torch.unbind, args, kwargs)
    return parts if parts is NotImplemented else iter(parts)


# torch's functions in C++ have no signatures of their own; named as torch names their arguments
_BY_ROLE: tuple[tuple[Role, Reader, Callable[..., Any]], ...] = (
    (Role.LOG_SOFTMAX, _read_log_softmax, lambda input, dim=None, _stacklevel=3, dtype=None: None),
    (Role.LOG_SUM_EXP, _read_logsumexp, lambda input, dim, keepdim=False: None),
    (Role.GATHER, _read_gather, lambda input, dim, index, sparse_grad=False: None),
    (Role.ARGMAX, _read_argmax, lambda input, dim=None, keepdim=False: None),
    (Role.DIVISION, _read_division, lambda input, other, rounding_mode=None: None),
    (Role.NEGATION, lambda op, h, given: op.times(h, -1), lambda input: None),
)
READERS.update(
    {name: _reader(read, like) for role, read, like in _BY_ROLE for name in names_with(role)}
)
READERS.update((name, _read_parts) for name in names_with(Role.SELECT | Role.SPLIT))
READERS["__iter__"] = _read_iter
READERS["cross_entropy"] = _reader(_read_loss, F.cross_entropy)
READERS["nll_loss"] = _reader(_read_loss, F.nll_loss)
READERS["sum"] = _reader(_read_sum, lambda input, dim=None, keepdim=False, dtype=None: None)
READERS["tanh"] = _reader(_read_tanh, lambda input: None)
READERS["detach"] = _reader(_read_detach, lambda input: None)

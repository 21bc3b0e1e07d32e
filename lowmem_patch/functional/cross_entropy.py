"""Cross entropy of the outputs of a Linear, in chunks of rows: the logits are never whole.

    a = x W^T + b + low B^T,    y = s a   or, with a soft cap c,   y = c tanh(s a)
    q = (1 - e) w_t [class t] + e w / V,    Q = sum q        (e: label smoothing, w: class weights)
    loss = Q logsumexp(y) - sum q y                          (0 where the label is to be ignored)
    d_y = (Q softmax(y) - q) d_loss,    d_a = s d_y   or   s (c - y^2 / c) d_y
    d_x = d_a W,    d_W = d_a^T x,    d_b = sum d_a,    d_low = d_a B,    d_B = d_a^T low

Where the losses are added up, the gradient of each row is known but for one factor of all rows. So the
forward makes it while a chunk's logits are there: three products in all. Saved: d_x and d_low; the
gradients of the weights are there from then on. Where each row has its own loss, the forward saves
logsumexp(y), and the backward computes the logits again: four products.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.constants import wide
from lowmem_patch.functional import _library
from lowmem_patch.functional._implementation import Implementation, dispatched, resolve
from lowmem_patch.functional._library import in_compiler
from lowmem_patch.functional.head import (
    WEIGHTS,
    Head,
    HeadGradients,
    Labels,
    chunk_memory,
    divisor_of,
    flat,
    in_compute_dtype,
    labelled_rows,
    logits_in_chunks,
)

# Probabilities below float16's range would be lost; what is multiplied with them is divided out again.
_HALF_FACTOR = 256.0


_SETTINGS = "int ignore_index, float smoothing, float scale, float cap"


def _losses_fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, dtype = logits.shape[0], wide(logits.dtype)
    return logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)


# both write the gradient of a over the logits
_forward = _library.Operator(
    "cross_entropy_forward(Tensor(a!) logits, Tensor? target, Tensor? class_weight, Tensor? factor, "
    f"{_SETTINGS}, bool gradient, str implementation) -> (Tensor, Tensor)",
    dispatched("cross_entropy_forward"),
    _losses_fake,
)
_backward = _library.Operator(
    "cross_entropy_backward(Tensor(a!) logits, Tensor logsumexp, Tensor d_losses, Tensor? target, "
    f"Tensor? class_weight, {_SETTINGS}, str implementation) -> ()",
    dispatched("cross_entropy_backward"),
    lambda *_: None,
)
_scale = _library.Operator(
    "scale_in_place(Tensor(a!) tensor, Tensor factor, str implementation) -> ()",
    dispatched("scale_in_place"),
    lambda *_: None,
)


def _sum_forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """loss, the gradients of the five tensors, the labelled rows where x and low have gradients for them
    alone, the factor that float16 gradients lack, and the memory of a chunk, for who counts bytes."""
    given, labels, (mean, selects, needs, implementation) = _unpacked(arguments)
    dtype = wide(given.sum_dtype)
    with _library.without_autocast(given.x.device.type):
        labelled = labelled_rows(labels) if selects else None
        head, target = in_compute_dtype(given, labelled), labels.target
        memory = chunk_memory(head, needs)
        chunks = _begun(logits_in_chunks(head, memory))
        _check_labels(labels, given.weight.shape[0])
        assert target is not None
        divisor = divisor_of(labels, dtype) if mean else target.new_ones((), dtype=dtype)
        if labelled is not None:
            target = target.index_select(0, labelled)
        half = given.compute_dtype == torch.float16
        factor = torch.full_like(divisor, _HALF_FACTOR) if half else divisor.reciprocal()
        gradients = HeadGradients(head, needs, memory)
        loss = torch.zeros_like(divisor)
        settings = (*labels[2:], head.scale, head.cap, any(needs), implementation)
        for chunk, logits in chunks:
            losses, _ = _forward(logits, target[chunk], labels.class_weight, factor, *settings)
            loss += losses.sum()
            gradients.add(chunk, logits)
        lacking = (divisor * _HALF_FACTOR).reciprocal().nan_to_num(posinf=0.0) if half else None
        return (loss / divisor, *gradients.take(given), labelled, lacking, memory.whole)


def _begun(chunks: Iterator[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    """The same chunks, the first of them computed at once: a GPU is busy while the host prepares the rest."""
    first = next(chunks, None)
    return chunks if first is None else itertools.chain((first,), chunks)


def _unpacked(arguments: tuple[Any, ...]) -> tuple[Head, Labels, tuple[Any, ...]]:
    """The head, the labels, and the arguments behind them."""
    return Head(*arguments[:9]), Labels(*arguments[9:13]), arguments[13:]


def _sum_fake(*arguments: Any) -> tuple[Tensor | None, ...]:
    head, _, (_, _, needs, _) = _unpacked(arguments)
    loss = head.x.new_empty((), dtype=wide(head.sum_dtype))
    lacking = torch.empty_like(loss) if head.compute_dtype == torch.float16 else None
    return (loss, *_gradients_fake(head, needs), None, lacking, chunk_memory(head).whole)


def _gradients_fake(head: Head, needs: tuple[bool, ...]) -> list[Tensor | None]:
    return HeadGradients(in_compute_dtype(head), needs, chunk_memory(head, needs)).take(head)


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? low, Tensor? lora_B"
_HEAD = f"{_TENSORS}, float scale, float cap, ScalarType compute_dtype, ScalarType sum_dtype"
_LABELS = "Tensor? target, Tensor? class_weight, int ignore_index, float smoothing"
_sum = _library.Operator(
    f"linear_cross_entropy({_HEAD}, {_LABELS}, "
    "bool mean, bool selects, bool[] needs, str implementation) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _sum_forward,
    _sum_fake,
)


def _compute_and_save(ctx: Any, *arguments: Any) -> Any:
    ctx.set_materialize_grads(False)
    output = _sum_forward(*arguments)
    _save_sum(ctx, arguments, output)
    ctx.in_place = True
    return output[0]


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    # the results of an operator are its caller's; who counts bytes counts what happens without him
    ctx.in_place = bool(torch._C._len_torch_dispatch_stack())
    gradients = list(output[1:6])
    # who writes down what runs must see every tensor that backward takes
    ctx.early, ctx.in_graph = None, in_compiler() or _library.is_traced()
    if not ctx.in_graph:
        # the first backward takes the gradients of weights, and scales them in place: they are as large
        # as the weights; a second one (retain_graph) makes them again
        ctx.early = [gradients[place] for place in WEIGHTS]
        for place in WEIGHTS:
            gradients[place] = None
    ctx.save_for_backward(*inputs[:5], *inputs[9:11], *gradients, *output[6:8])
    ctx.scaling, ctx.rest = inputs[5:9], inputs[11:]


@_library.first_order("linear_cross_entropy")
def _gradients_of_sum(ctx: Any, d_loss: Tensor, *_: None) -> Any:
    saved = _library.saved_tensors(ctx, "the input, the weight, the bias or the label of a head")
    tensors, labels, found = saved[:5], saved[5:7], list(saved[7:12])
    labelled, lacking = saved[12:]
    needs, implementation = ctx.rest[4:]
    # an operator gives an empty tensor for what is absent
    if labelled is not None and labelled.dtype != torch.int64:
        labelled = None
    if lacking is not None and lacking.numel():
        d_loss = d_loss * lacking
    if ctx.in_graph:
        weights = [found[place] * d_loss for place in WEIGHTS]
    else:
        arguments = (*tensors, *ctx.scaling, *labels, *ctx.rest)
        weights = _early_gradients(ctx, arguments, d_loss, implementation)
    for place, gradient in zip(WEIGHTS, weights, strict=True):
        found[place] = gradient
    for place in _ROWS:
        found[place] = _of_all_rows(found[place], d_loss, labelled, tensors[place])
    wanted = (g if need else None for g, need in zip(found, needs, strict=True))
    return (*wanted, *(None,) * 12)


def _early_gradients(
    ctx: Any, arguments: tuple[Any, ...], d_loss: Tensor, implementation: str
) -> list[Tensor | None]:
    """Those of the weights, made by the forward or, for a second backward, made again."""
    early, ctx.early = ctx.early, None
    if early is None:
        again = _sum_forward(*arguments)[1:6]
        early = [again[place] for place in WEIGHTS]
    if not ctx.in_place:
        return [None if gradient is None else gradient * d_loss for gradient in early]
    for gradient in early:
        if gradient is not None:
            _scale(gradient, d_loss, implementation)
    return list(early)


_ROWS = (0, 3)  # places among a head's tensors


def _of_all_rows(
    gradient: Tensor | None, d_loss: Tensor, labelled: Tensor | None, like: Tensor | None
) -> Tensor | None:
    """The gradient of x or low, which for rows without a label is 0."""
    if gradient is None or like is None or gradient.dim() != 2:
        return None  # an operator gives an empty tensor for what is absent
    gradient = gradient * d_loss
    if labelled is None:
        return gradient.view(like.shape)
    zeros = gradient.new_zeros(like.numel() // like.shape[-1], like.shape[-1])
    return zeros.index_copy_(0, labelled, gradient).view(like.shape)


_call_sum = _sum.differentiable(_save_sum, _gradients_of_sum, _compute_and_save)


def _rows_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and logsumexp(y) of each row, and the memory of a chunk."""
    given, labels, (implementation,) = _unpacked(arguments)
    dtype = wide(given.sum_dtype)
    with _library.without_autocast(given.x.device.type):
        head = in_compute_dtype(given)
        memory = chunk_memory(head)
        chunks = _begun(logits_in_chunks(head, memory))
        _check_labels(labels, given.weight.shape[0])
        rows = head.x.shape[0]
        found = [head.x.new_empty(rows, dtype=dtype) for _ in range(2)]
        settings = (*labels[2:], head.scale, head.cap, False, implementation)
        for chunk, logits in chunks:
            target = None if labels.target is None else labels.target[chunk]
            parts = _forward(logits, target, labels.class_weight, None, *settings)
            for whole, part in zip(found, parts, strict=True):
                whole[chunk] = part
        return found[0], found[1], memory.whole


def _rows_fake(*arguments: Any) -> tuple[Tensor, ...]:
    head = Head(*arguments[:9])
    rows = flat(head.x).shape[0]
    found = (head.x.new_empty(rows, dtype=wide(head.sum_dtype)) for _ in range(2))
    return (*found, chunk_memory(head).whole)


def _rows_backward(
    d_losses: Tensor, logsumexp: Tensor, needs: tuple[bool, ...], *arguments: Any
) -> tuple[Tensor | None, ...]:
    given, labels, (implementation,) = _unpacked(arguments)
    with _library.without_autocast(given.x.device.type):
        head = in_compute_dtype(given)
        memory = chunk_memory(head, needs)
        chunks = _begun(logits_in_chunks(head, memory))
        gradients = HeadGradients(head, needs, memory)
        settings = (*labels[2:], head.scale, head.cap, implementation)
        for chunk, logits in chunks:
            target = None if labels.target is None else labels.target[chunk]
            given_rows = (logsumexp[chunk], d_losses[chunk], target, labels.class_weight)
            _backward(logits, *given_rows, *settings)
            gradients.add(chunk, logits)
        return (*_in_shape(gradients.take(given), given), memory.whole)


def _rows_backward_fake(
    d_losses: Tensor, logsumexp: Tensor, needs: tuple[bool, ...], *arguments: Any
) -> tuple[Tensor | None, ...]:
    head = Head(*arguments[:9])
    return (*_in_shape(_gradients_fake(head, needs), head), chunk_memory(head).whole)


def _in_shape(found: list[Tensor | None], head: Head) -> list[Tensor | None]:
    """The gradients, those of rows in the shape of x and low."""
    for place in _ROWS:
        tensor, gradient = head.tensors[place], found[place]
        if tensor is not None and gradient is not None:
            found[place] = gradient.view(tensor.shape)
    return found


_rows = _library.Operator(
    f"linear_cross_entropy_rows({_HEAD}, {_LABELS}, str implementation) -> (Tensor, Tensor, Tensor)",
    _rows_forward,
    _rows_fake,
)
_rows_gradient = _library.Operator(
    f"linear_cross_entropy_rows_backward(Tensor d_losses, Tensor logsumexp, bool[] needs, {_HEAD}, "
    f"{_LABELS}, str implementation) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rows_backward,
    _rows_backward_fake,
)


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *inputs[9:11], output[1])
    ctx.scaling, ctx.rest, ctx.needs = inputs[5:9], inputs[11:], ctx.needs_input_grad[:5]


@_library.first_order("linear_cross_entropy_rows")
def _gradients_of_rows(ctx: Any, d_losses: Tensor, *_: None) -> Any:
    *saved, logsumexp = _library.saved_tensors(
        ctx, "the input, the weight, the bias or the label of a head"
    )
    arguments = (*saved[:5], *ctx.scaling, *saved[5:], *ctx.rest)
    found = _rows_gradient(d_losses, logsumexp, ctx.needs, *arguments)
    wanted = (g if need else None for g, need in zip(found[:5], ctx.needs, strict=True))
    return (*wanted, *(None,) * 9)


_call_rows = _rows.differentiable(_save_rows, _gradients_of_rows)


def linear_cross_entropy(
    head: Head,
    labels: Labels,
    reduction: str = "mean",
    *,
    selects: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """Cross entropy of a head's logits with class labels, the logits never whole.

    Args:
        head: the Linear; gradients flow to its tensors.
        labels: what the logits are compared with.
        reduction: ``mean``, ``sum`` or ``none``, as of `torch.nn.functional.cross_entropy`.
        selects: leave rows out whose label is ignored; on a GPU this waits for the labels.
        implementation: see `resolve`.

    Returns:
        ``[]``, or ``[N]`` for ``none``; float32, float64 for a float64 head.

    Raises:
        IndexError: a label is neither a class nor to be ignored (on a GPU a device-side assertion).
    """
    assert labels.target is not None
    if reduction == "none":
        return linear_losses(head, labels, implementation=implementation)
    needs = tuple(
        tensor is not None and torch.is_grad_enabled() and tensor.requires_grad
        for tensor in head.tensors
    )
    chosen = resolve(implementation, head.x.new_empty(0, dtype=head.sum_dtype))
    loss: Tensor = _call_sum(*head, *labels, reduction == "mean", selects, needs, chosen)
    return loss


def linear_losses(head: Head, labels: Labels, *, implementation: Implementation = "auto") -> Tensor:
    """The loss of each row, ``[N]``; without labels logsumexp(y). As `linear_cross_entropy` otherwise."""
    chosen = resolve(implementation, head.x.new_empty(0, dtype=head.sum_dtype))
    losses: Tensor = _call_rows(*head, *labels, chosen)
    return losses


def _check_labels(labels: Labels, classes: int) -> None:
    target = labels.target
    if target is None or isinstance(target, FakeTensor) or target.is_meta:
        return
    right = ((target >= 0) & (target < classes)) | (target == labels.ignore_index)
    if target.is_cuda:
        torch._assert_async(right.all())
    elif not right.all():
        raise IndexError(f"Target {int(target[~right][0])} is out of bounds.")

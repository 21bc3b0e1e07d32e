"""A Linear whose outputs are logits, computed a chunk of rows at a time; its gradients, and the labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.constants import wide

# Above this many rows the products of a chunk take no less time for each of them (H200, 4096 x 128,256).
_ROWS = 1024
_FEWEST_ROWS = 64
# The gradient of a 16-bit weight is rounded with each chunk that is added to it. So often, that costs less
# than the rounding of the logits, which one product over all rows has, too; more are added in float32.
_ROUNDINGS = 8
_FREE_SHARE = 4  # a chunk takes at most this part of the free memory


class Head(NamedTuple):
    """A Linear whose outputs are logits.

    Attributes:
        x: ``[..., D]``, N rows.
        weight: ``[V, D]``.
        bias: ``[V]``; in a wider dtype than the products where somebody added it to logits.
        low, lora_B: ``[..., r]`` and ``[V, r]``, an adapter's part: ``low lora_B^T`` is added.
        scale, cap: y = scale a, or cap tanh(scale a) where the cap is not 0.
        compute_dtype: of the products.
        sum_dtype: of a, in which the bias is added: the compute dtype, or the wider one of the bias.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    low: Tensor | None
    lora_B: Tensor | None
    scale: float
    cap: float
    compute_dtype: torch.dtype
    sum_dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    @property
    def has_wider_sums(self) -> bool:
        """Whether a chunk holds a beside its products."""
        return self.sum_dtype != self.compute_dtype


def chunk_rows(head: Head, needs: Sequence[bool] = ()) -> int:
    """How many rows are computed at a time: few where memory is short, as many as pay otherwise.

    Args:
        head: of N rows.
        needs: which of its five tensors have a gradient.
    """
    rows = head.x.numel() // max(1, head.x.shape[-1])
    each = head.compute_dtype.itemsize + (head.sum_dtype.itemsize if head.has_wider_sums else 0)
    row = head.weight.shape[0] * each
    short = (
        None
        if isinstance(head.x, FakeTensor)
        else _available(head.x.device, _FREE_SHARE * _ROWS * row)
    )
    most = _ROWS
    if short is not None:
        most = max(_fewest_rows(rows, head, needs), min(_ROWS, short // (_FREE_SHARE * row)))
    chunks = max(1, -(-rows // most))
    return -(-rows // chunks)


def _available(device: torch.device, enough: int) -> int | None:
    """The free bytes of a GPU; None where they are enough, or nobody may ask."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    free = torch.cuda.mem_get_info(device)[0]
    if free >= enough:
        return None
    # what torch's allocator holds is as good
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _fewest_rows(rows: int, head: Head, needs: Sequence[bool]) -> int:
    """Below this many, a chunk of fewer rows saves no memory."""
    trains = len(needs) > 1 and needs[1]
    fewest = -(-rows // _ROUNDINGS)
    # with more chunks, the gradient of the weight would be added in float32, and take twice the memory
    sums_in_16_bits = trains and head.compute_dtype == torch.bfloat16 and fewest <= _ROWS
    return max(_FEWEST_ROWS, fewest if sums_in_16_bits else 0)


class ChunkMemory(NamedTuple):
    """Memory for the logits of one chunk.

    Attributes:
        whole: all of it, in the dtype of the sums.
        products, sums: ``[rows, V]`` in the head's two dtypes; one and the same where the dtypes are.
    """

    whole: Tensor
    products: Tensor
    sums: Tensor


def chunk_memory(head: Head, needs: Sequence[bool] = ()) -> ChunkMemory:
    """Memory that nothing is written in yet, for a head of which these tensors have a gradient."""
    rows, classes = chunk_rows(head, needs), head.weight.shape[0]
    ratio = head.sum_dtype.itemsize // head.compute_dtype.itemsize
    more = -(-rows // ratio) if head.has_wider_sums else 0
    whole = head.x.new_empty(rows + more, classes, dtype=head.sum_dtype)
    if not head.has_wider_sums:
        return ChunkMemory(whole, whole, whole)
    products = whole[rows:].view(-1).view(head.compute_dtype)[: rows * classes]
    return ChunkMemory(whole, products.view(rows, classes), whole[:rows])


def logits_in_chunks(
    head: Head, memory: ChunkMemory | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each chunk and a, all in the same memory; the head is in its compute dtype."""
    memory = chunk_memory(head) if memory is None else memory
    rows, size = head.x.shape[0], len(memory.products)
    for start in range(0, rows, max(1, size)):
        chunk = slice(start, min(start + size, rows))
        products = memory.products[: chunk.stop - start]
        if head.bias is None or head.has_wider_sums:
            torch.mm(head.x[chunk], head.weight.t(), out=products)
        else:
            torch.addmm(head.bias, head.x[chunk], head.weight.t(), out=products)
        if head.low is not None and head.lora_B is not None:
            products.addmm_(head.low[chunk], head.lora_B.t())
        if head.has_wider_sums and head.bias is not None:
            yield chunk, torch.add(products, head.bias, out=memory.sums[: len(products)])
        else:
            yield chunk, products


def in_compute_dtype(head: Head, rows: Tensor | None = None) -> Head:
    """The head in its compute dtype, without history, x as ``[N, D]``; of these rows alone, if given."""
    x, low = flat(head.x), None if head.low is None else flat(head.low)
    if rows is not None:
        x = x.index_select(0, rows)
        low = None if low is None else low.index_select(0, rows)

    def cast(tensor: Tensor | None, dtype: torch.dtype = head.compute_dtype) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(dtype)

    return head._replace(
        x=x.detach().to(head.compute_dtype),
        weight=head.weight.detach().to(head.compute_dtype),
        bias=cast(head.bias, head.sum_dtype),
        low=cast(low),
        lora_B=cast(head.lora_B),
    )


def flat(x: Tensor) -> Tensor:
    """``[..., D]`` as ``[N, D]``."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class HeadGradients:
    """The gradients of a head's tensors, made chunk by chunk from that of the logits.

    Args:
        head: in its compute dtype.
        needs: which of its five tensors have a gradient.
        memory: of a chunk; a gradient of wider logits is cast into the place of their products.
    """

    def __init__(self, head: Head, needs: Sequence[bool], memory: ChunkMemory) -> None:
        self.head, self.products = head, memory.products
        few = len(head.x) <= _ROUNDINGS * len(memory.products)
        few = few and head.compute_dtype != torch.float16
        total = head.compute_dtype if few else wide(head.compute_dtype)
        for_bias = wide(head.sum_dtype) if head.has_wider_sums else total
        dtypes = (head.compute_dtype, total, for_bias, head.compute_dtype, total)
        make = torch.empty_like if len(head.x) else torch.zeros_like  # no chunk writes then
        self.sums = [
            make(tensor, dtype=dtype) if tensor is not None and need else None
            for tensor, dtype, need in zip(head.tensors, dtypes, needs, strict=True)
        ]

    def add(self, chunk: slice, d_logits: Tensor) -> None:
        head = self.head
        d_x, d_weight, d_bias, d_low, d_B = self.sums
        first = chunk.start == 0
        if d_bias is not None:
            column_sums = d_logits.sum(0, dtype=d_bias.dtype)
            d_bias.copy_(column_sums) if first else d_bias.add_(column_sums)
        if head.has_wider_sums:
            d_logits = self.products[: len(d_logits)].copy_(d_logits)
        if d_x is not None:
            torch.mm(d_logits, head.weight, out=d_x[chunk])
        if d_weight is not None:
            _add_product(d_weight, d_logits, head.x[chunk], first)
        if d_low is not None and head.lora_B is not None:
            torch.mm(d_logits, head.lora_B, out=d_low[chunk])
        if d_B is not None and head.low is not None:
            _add_product(d_B, d_logits, head.low[chunk], first)

    def take(self, given: Head) -> list[Tensor | None]:
        """The gradients: of rows in the compute dtype, of weights in their own, but for float16, which
        cannot hold them before they are scaled."""
        found: list[Tensor | None] = []
        for place, tensor in enumerate(given.tensors):
            total, self.sums[place] = self.sums[place], None  # released one by one
            if total is not None and tensor is not None and place in WEIGHTS:
                total = total if tensor.dtype == torch.float16 else total.to(tensor.dtype)
            found.append(total)
        return found


WEIGHTS = (1, 2, 4)  # places among a head's tensors


def _add_product(total: Tensor, d_logits: Tensor, x: Tensor, first: bool) -> None:
    """total += d_logits^T x, or for the first chunk total = d_logits^T x, in the precision of ``total``."""
    left, beta = d_logits.t(), 0 if first else 1  # 0 reads nothing
    if total.dtype == x.dtype:
        total.addmm_(left, x, beta=beta)
    elif x.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, x, total.dtype, beta=beta, out=total)
    else:
        x = x.to(total.dtype)
        block = max(1, _BLOCK // max(1, x.shape[1]))
        for start in range(0, total.shape[0], block):
            part = slice(start, start + block)
            total[part].addmm_(left[part].to(total.dtype), x, beta=beta)


_BLOCK = 1 << 24  # elements of a float32 copy that is made of d_logits


class Labels(NamedTuple):
    """What the logits are compared with.

    Attributes:
        target: ``[N]`` int64; None for logsumexp(y) in the place of a loss.
        class_weight: ``[V]``.
        ignore_index, smoothing: as of `torch.nn.functional.cross_entropy`.
    """

    target: Tensor | None
    class_weight: Tensor | None = None
    ignore_index: int = -100
    smoothing: float = 0.0


def labelled_rows(labels: Labels) -> Tensor | None:
    """The rows whose label is not ignored, where the others are worth leaving out; waits for the device."""
    target = labels.target
    if target is None or isinstance(target, FakeTensor):
        return None
    labelled = (target != labels.ignore_index).nonzero().squeeze(1)
    return labelled if len(labelled) < _WORTH * len(target) else None


_WORTH = 0.9  # share of the rows


def divisor_of(labels: Labels, dtype: torch.dtype) -> Tensor:
    """What a mean divides by: the labels that are not ignored, or their class weights."""
    assert labels.target is not None
    counts = labels.target != labels.ignore_index
    if labels.class_weight is None:
        return counts.sum(dtype=dtype)
    weights = labels.class_weight.to(dtype)[torch.where(counts, labels.target, 0)]
    return (weights * counts).sum()

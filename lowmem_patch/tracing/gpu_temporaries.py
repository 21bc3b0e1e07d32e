"""Memory that a GPU's kernel takes for itself while it runs, and that no op returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_UNSORTED = 3072  # so many rows of a table are added without an order
_ROWS = 10  # of one token that are added up at a time
# of a reduction: most threads of a block, those of a warp, columns that a thread adds
_THREADS, _WARP, _VECTOR = 512, 32, 4
_LEAST_VALUES, _MOST_VALUES = 16, 256  # rows that a thread adds
_H200 = (132, 2048)  # multiprocessors, threads of one


class Temporary(NamedTuple):
    """Bytes for a while: beside what an op returns, or released before it makes that."""

    bytes: int
    beside_outputs: bool = True


def temporary_of(func: Any, args: tuple[Any, ...]) -> Temporary:
    """The temporary of one op on a GPU, as far as it is large and known."""
    known = OF_OPERATORS.get(func)
    return Temporary(0) if known is None else known(*args)


def _table_gradient(
    gradient: Tensor, tokens: Tensor, rows: int, _padding: int, by_frequency: bool
) -> Temporary:
    """The gradient of a table is made of sorted tokens: parts of its rows are added in float32 first
    (torch's ``EmbeddingBackwardKernel.cu``)."""
    count, width = tokens.numel(), gradient.shape[-1]
    if count <= _UNSORTED and not by_frequency:
        return Temporary(0)
    different = min(count, rows)
    parts = count // _ROWS + different
    # sorted tokens, their places, where each begins; how many parts it has, its first; where a part begins
    numbers = (4 if by_frequency else 3) * count + 2 * different + parts
    sums = parts * width * max(4, gradient.element_size())
    return Temporary(int(sums + numbers * tokens.element_size()))


def sum_bytes(tensor: Tensor, dims: Any) -> int:
    """Bytes that a sum over leading dimensions takes, such as a bias' gradient; others take hardly any."""
    leading = sorted(dim % tensor.dim() for dim in dims or ())
    count = len(leading)
    if not 0 < count < tensor.dim() or leading != list(range(count)) or not tensor.is_contiguous():
        return 0
    if tensor.numel() == 0:
        return 0
    rows, size = math.prod(tensor.shape[:count]), max(4, tensor.element_size())
    return column_sum_bytes(rows, tensor.numel() // rows, size, tensor.device)


def _sum(tensor: Tensor, dims: Any = None, *_: Any) -> Temporary:
    return Temporary(sum_bytes(tensor, dims))


def column_sum_bytes(rows: int, columns: int, size: int, device: torch.device) -> int:
    """Partial sums, ``size`` bytes each, of blocks that share the rows of one column.

    torch takes them once for each thread of a block, though one of them writes (``setReduceConfig`` and
    ``global_memory_size`` in ``Reduce.cuh``): for 12,608 x 1,024 in bfloat16 four times the tensor.
    """
    vector = math.gcd(columns, _VECTOR)
    threads = _THREADS // vector
    width = min(_power_of_two(columns // vector), _WARP)
    height = min(_power_of_two(rows), threads // width)
    width = min(_power_of_two(columns // vector), threads // height)
    if rows < min(height * _LEAST_VALUES, _MOST_VALUES):
        return 0
    values = -(-rows // height)  # of a thread
    grid = -(-columns // vector // width)
    processors, resident = _processors(device)
    target = processors * (resident // (width * height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return size * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_two(number: int) -> int:
    """The largest that is not above."""
    return 1 << (number.bit_length() - 1)


def _processors(device: torch.device) -> tuple[int, int]:
    if not torch.cuda.is_available():
        return _H200
    known = torch.cuda.get_device_properties(device if device.type == "cuda" else None)
    return known.multi_processor_count, known.max_threads_per_multi_processor


# by the operator, from its arguments; operators of ours add theirs
OF_OPERATORS: dict[Any, Callable[..., Temporary]] = {
    torch.ops.aten.embedding_dense_backward.default: _table_gradient,
    torch.ops.aten.sum.dim_IntList: _sum,
    torch.ops.aten.mean.dim: _sum,
}

"""Launch settings, row views and the device guard: the one place that decides them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

__all__ = [
    "BACKWARD_COLUMNS",
    "FORWARD_COLUMNS",
    "NormSettings",
    "as_rows",
    "common_rows",
    "contiguous",
    "norm_settings",
    "on_device",
    "persistent_programs",
]

# A row longer than this does not fit the registers of one program and is looped over instead.
# Backward holds dy, y, gamma, bias and two sums per column, forward a third of that.
FORWARD_COLUMNS = 16384
BACKWARD_COLUMNS = 8192
WIDE_BLOCK = 4096

# Below this many columns a program per row is mostly launch; such strided inputs are copied.
_SHORT_ROW = 128


class NormSettings(NamedTuple):
    block_rows: int
    block_columns: int
    num_warps: int


def norm_settings(columns: int, limit: int) -> NormSettings:
    """Tile of a norm kernel: several short rows, or one long row.

    16 elements a thread forward, 8 backward, which holds several numbers for each.
    """
    block_columns = min(triton.next_power_of_2(columns), WIDE_BLOCK if columns > limit else limit)
    block_rows = max(1, min(16, 2048 // block_columns))
    per_warp = 32 * (16 if limit == FORWARD_COLUMNS else 8)
    num_warps = max(1, min(16, block_rows * block_columns // per_warp))
    return NormSettings(block_rows, block_columns, num_warps)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter: enough to see more than one program
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def persistent_programs(device: torch.device, tiles: int, elements: int) -> int:
    """Programs that loop over tiles of ``elements`` and fill the device about once."""
    per_multiprocessor = max(1, min(8, 4096 // elements))
    return min(tiles, _multiprocessors(device) * per_multiprocessor)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device; this makes the tensor's device current."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _row_stride(tensor: Tensor) -> int | None:
    """The stride between rows if the tensor reads as ``[rows, columns]`` in place, else None."""
    columns = tensor.shape[-1]
    if tensor.is_contiguous():
        return columns
    if columns > 1 and tensor.stride(-1) != 1:
        return None
    expected: int | None = None
    stride = columns
    for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is None:
            stride = step
        elif step != expected:
            return None
        expected = step * size
    # rows that overlap (expanded tensors) are read in place just as well
    return stride


def as_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor, copied only if it must be, and the stride between its rows of the last dimension."""
    stride = _row_stride(tensor)
    if stride is None:
        return tensor.contiguous(), tensor.shape[-1]
    return tensor, stride


def common_rows(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...], int, int]:
    """One elementwise reading of tensors of one shape, and of contiguous outputs.

    Returns:
        the tensors (copied only if they must be), their row strides, rows, columns. All contiguous
        tensors read as one long row.
    """
    first = tensors[0]
    elements = first.numel()
    if all(tensor.is_contiguous() for tensor in tensors):
        return tensors, (elements,) * len(tensors), 1, elements
    columns = first.shape[-1]
    if columns < _SHORT_ROW:
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        return tensors, (elements,) * len(tensors), 1, elements
    pairs = [as_rows(tensor) for tensor in tensors]
    return (
        tuple(tensor for tensor, _ in pairs),
        tuple(stride for _, stride in pairs),
        elements // columns,
        columns,
    )


def contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()

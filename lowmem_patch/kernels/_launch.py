"""Launch settings, row views and the launcher: the one place that decides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

# A row longer than this does not fit the registers of one program and is looped over instead.
FORWARD_COLUMNS = 16384
BACKWARD_COLUMNS = 16384
LONG_ROW_BLOCK = 4096

# Backward up to this keeps gamma, 1 / gamma, bias and two sums per column in registers; longer rows
# read the vectors again for each row (from the first-level cache) unless they have gamma alone.
_VECTORS_IN_REGISTERS = 8192

# Tiles that programs of one multiprocessor load ahead; every GPU since 2020 has this much shared memory.
_AHEAD_BYTES = 80 * 1024

# Below this many columns a program per row is mostly launch; such strided inputs are copied.
_SHORT_ROW = 128

_INT32 = 2**31
_dtype_of = attrgetter("dtype")
# A compiled kernel is called with all arguments, constants too; HIP specialises on more than `Launch` tells
# apart.
_REUSES_COMPILED = torch.version.hip is None
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# What a launch of a compiled kernel comes down to in these versions, where the device is known.
_CALLS_RUN = _TRITON in ((3, 6), (3, 7))


class NormTiles(NamedTuple):
    """The part of a norm's rows that one program takes, and how it is launched."""

    block_rows: int
    block_columns: int
    num_warps: int
    num_stages: int = 1
    programs_per_multiprocessor: int = 0
    reload: bool = False


@cache
def forward_tiles(columns: int) -> NormTiles:
    """A program per tile of about 2048 elements or one row, 32 elements a thread."""
    looped = columns > FORWARD_COLUMNS
    block_columns = LONG_ROW_BLOCK if looped else triton.next_power_of_2(columns)
    block_rows = max(1, min(16, 2048 // block_columns))
    return NormTiles(block_rows, block_columns, max(1, min(16, block_rows * block_columns // 1024)))


@cache
def backward_tiles(columns: int, nbytes: int, vectors: int, sums: bool) -> NormTiles:
    """Tiles of the backward, 16 elements a thread.

    Without vectors a program per tile. With them, programs that stay and walk over tiles: they read
    the vectors once, and since 512 threads of a multiprocessor do not hide memory by their number, the
    next tiles are loaded ahead into shared memory.

    Args:
        columns: N.
        nbytes: of one element of dy and one of y.
        vectors: how many of weight and bias there are.
        sums: their gradients are asked for.
    """
    if columns > BACKWARD_COLUMNS:
        return NormTiles(1, LONG_ROW_BLOCK, 16)
    block = triton.next_power_of_2(columns)
    if not vectors:
        rows = max(1, min(16, 1024 // block))
        return NormTiles(rows, block, max(1, min(16, rows * block // 512)))
    if block > _VECTORS_IN_REGISTERS:
        reload = sums or vectors > 1
        return NormTiles(1, block, 32 if reload and not sums else 16, 1, 1, reload)
    num_warps = max(4, min(16, block // 256))
    rows = max(1, min(16, 512 * num_warps // block))
    programs = {4: 3, 8: 2, 16: 1}[num_warps]  # 4 would have to fit 128 registers a thread
    stages = min(4, 1 + _AHEAD_BYTES // (programs * rows * block * nbytes))
    return NormTiles(rows, block, num_warps, stages, programs)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter: enough to see more than one program
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Launch:
    """A kernel with its constants, launched with little work in Python.

    The kernel's arguments come as tensors, then numbers that it must not be specialised on, then
    strides, then constants. Triton's launcher binds and hashes all of them at each call. Here the usual
    case (pointers and strides divisible by 16, numbers of 32 bits) is told apart by the dtypes alone,
    and its compiled kernel is called directly; every other call goes through Triton's launcher.
    """

    def __init__(self, kernel: Any, num_warps: int, *, fuse: bool = True, **constants: Any) -> None:
        assert list(constants) == kernel.arg_names[-len(constants) :]
        self._kernel = kernel
        self._constants = tuple(constants.values())
        self._keywords = {**constants, "num_warps": num_warps}
        if not fuse:
            self._keywords["enable_fp_fusion"] = False
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        strides: Sequence[int] = (),
    ) -> None:
        device = tensors[0].get_device()
        # torch.cuda.current_device without its checks: a CUDA tensor exists, or nothing asks
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):  # Triton launches on the current device
                self(grid, tensors, numbers, strides)
            return
        bits, largest = 0, max(numbers)
        # as numbers, which Triton does not ask the driver about
        pointers = [tensor.data_ptr() for tensor in tensors]
        for pointer in pointers:
            bits |= pointer
        for stride in strides:
            bits |= stride
            if stride > largest:
                largest = stride
        if bits & 15 or largest >= _INT32 or not _REUSES_COMPILED:
            self._kernel[grid](*tensors, *numbers, *strides, **self._keywords)
            return
        key = (device, *map(_dtype_of, tensors))
        compiled = self._compiled.get(key)
        if compiled is None:
            # None under Triton's interpreter
            self._compiled[key] = self._kernel[grid](*tensors, *numbers, *strides, **self._keywords)
            return
        arguments = (*pointers, *numbers, *strides, *self._constants)
        if _CALLS_RUN and not _is_watched():
            stream = torch._C._cuda_getCurrentRawStream(device)
            function, metadata = compiled.function, compiled.packed_metadata
            compiled.run(*grid, stream, function, metadata, None, None, None, *arguments)
        else:
            compiled[grid](*arguments)


def launches(kernel: Any, num_warps: int, *last: Any, fuse: bool = True) -> Callable[..., Launch]:
    """What gives the launch for a kernel's constants, but for the ``last`` ones, made once for each."""

    @cache
    def launch(*first: Any) -> Launch:
        constants = (*first, *last)
        names = kernel.arg_names[-len(constants) :]
        return Launch(kernel, num_warps, fuse=fuse, **dict(zip(names, constants, strict=True)))

    return launch


def _is_watched() -> bool:
    """Whether a profiler wants to be told of launches."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def _row_stride(tensor: Tensor) -> int | None:
    """The stride between rows if the tensor, which is not contiguous, reads as ``[rows, columns]`` in place,
    else None."""
    columns = tensor.shape[-1]
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
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
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


def empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, of the shape and device of ``like``."""
    # in a third of the time of torch.empty(shape, dtype=..., device=...)
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()

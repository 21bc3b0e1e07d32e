"""The bytes of all storages that are alive while code runs, and of memory that a GPU's kernels take for
themselves meanwhile, which no op returns."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowmem_patch.tracing.observers import DispatchObserver
from lowmem_patch.tracing.saved_bytes import parts_of, storage_key

_WEIGHTS_OF_A_SCALE, _SCALE = 64, 4  # bitsandbytes: one float32 for so many weights
_TEMPORARY = -1  # number of what a kernel takes and gives back
_TORCH = str(Path(torch.__file__).parent)
_UNSORTED = 3072  # so many rows of a table are added without an order
_ROWS = 10  # of one token that are added up at a time
# of a reduction: most threads of a block, those of a warp, columns that a thread adds
_THREADS, _WARP, _VECTOR = 512, 32, 4
_LEAST_VALUES, _MOST_VALUES = 16, 256  # rows that a thread adds
_H200 = (132, 2048)  # multiprocessors, threads of one


class LiveStorages(DispatchObserver):
    """Counts each storage from the op that allocates it to its release.

    Where two gradients of one tensor meet (a tied weight, a residual stream), autograd adds the second to the
    first in place, unless somebody else holds the first. It makes a third tensor for fake ones, and while a
    dispatch mode such as this one is on: that is counted as what a step without either takes.

    Attributes:
        live: by key: bytes, the ``owner`` when it was allocated, and a reference.
        now: bytes that are alive.
        owner: to whom the next allocations belong.
        events: on a GPU, what an allocator is asked in this order: the number of a storage with its bytes
            when it is made, and with 0 when it is released.
    """

    def __init__(
        self, ignored: Iterable[Tensor], packed: Iterable[Tensor] = (), *, on_gpu: bool = False
    ) -> None:
        """
        Args:
            ignored: tensors whose storages are not counted.
            packed: weights of few bits, which a product of another library unpacks for a while.
            on_gpu: count what a GPU's kernels take for a while.
        """
        super().__init__()
        self.ignored = {storage_key(part) for tensor in ignored for part in parts_of(tensor)}
        self.packed = set(map(storage_key, packed))
        self.live: dict[int, tuple[int, int, Any]] = {}
        self.now, self.owner, self.on_gpu = 0, -1, on_gpu
        self.events: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}  # of the storages in the events, by key
        # key of the first gradient, of the sum, bytes with a third
        self._sum: tuple[int, int, int] | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.settle()
        taken = temporary_of(func, args) if self.on_gpu else Temporary(0)
        if not taken.beside_outputs:
            self._take_for_a_while(taken.bytes)
        output = func(*args, **kwargs)
        if _sums_gradients(func, args) and output.layout is torch.strided:
            if self._count(output):
                self._sum = storage_key(args[0]), storage_key(output), self.now
            return output
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        temporary = taken.bytes if taken.beside_outputs else 0
        if self.packed and func.namespace != "aten":
            temporary += self._unpacked(args, output)
        if temporary:
            self._take_for_a_while(temporary)
        return output

    def _take_for_a_while(self, size: int) -> None:
        self.grown(self.now + size)
        if self.on_gpu:
            self.events += (_TEMPORARY, size), (_TEMPORARY, 0)

    def _unpacked(self, args: tuple[Any, ...], output: Any) -> int:
        """Bytes of a weight, with its scales, that a product of another library unpacks inside: torch sees
        no allocation there. A kernel that unpacks as it multiplies takes less."""
        given = [a for a in args if isinstance(a, Tensor)]
        if not (given and isinstance(output, Tensor) and given[0].shape[:-1] == output.shape[:-1]):
            return 0  # no product of rows
        weights = output.shape[-1] * given[0].shape[-1]
        if not any(w.numel() < weights and storage_key(w) in self.packed for w in given[1:]):
            return 0
        return weights * given[0].element_size() + -(-weights // _WEIGHTS_OF_A_SCALE) * _SCALE

    def settle(self) -> None:
        """Look whether the first of two gradients that were added was released by that."""
        if self._sum is not None:
            (first, third, most), self._sum = self._sum, None
            if first in self.live or first in self.ignored:
                self._made(third)
                self.grown(most)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted or ignored, or a deferred tensor that has none."""
        if hasattr(tensor, "held_values"):  # deferred: its value was counted when it was computed
            return
        for part in parts_of(tensor):
            if self._count(part):
                self._made(storage_key(part))
                self.grown(self.now)

    def _made(self, key: int) -> None:
        if self.on_gpu and key in self.live:
            self._numbers[key] = len(self.events)
            self.events.append((len(self.events), self.live[key][0]))

    def _released(self, key: int) -> None:
        number = self._numbers.pop(key, None)
        if number is None:
            return
        if self._sum is not None and key == self._sum[0]:
            self._numbers[self._sum[1]] = number  # the sum is where the first gradient was
        else:
            self.events.append((number, 0))

    def _count(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        if key in self.live or key in self.ignored:
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def released(_reference: Any, key: int = key, size: int = size) -> None:
            del self.live[key]
            self.now -= size
            self._released(key)

        self.live[key] = (size, self.owner, weakref.ref(storage, released))
        self.now += size
        return True

    def grown(self, now: int) -> None:
        """Called when the bytes that are alive have grown to ``now``."""
        raise NotImplementedError


def _sums_gradients(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op is autograd's own sum of two gradients of one tensor, and the first could hold it.

    It is an addition in a backward, with nobody's code but torch's between it and the call of the backward.
    """
    if (
        func is not torch.ops.aten.add.Tensor
        or torch.is_grad_enabled()
        or torch._C._current_graph_task_id() < 0
        or args[0]._base is not None  # which a view holds
    ):
        return False
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return frame is None  # a thread of the engine's own, or somebody's code


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

"""Saved bytes: what autograd holds after a forward, exactly, on any device (also fake tensors).

Counted are unique storages: a tensor that ten ops save, or that ten views show, counts once.
Parameters and buffers do not count; low-precision copies of weights, which autocast makes (for
frozen weights too), are reported apart because they do not grow with the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_patch.tracing.base_model import checked_model
from lowmem_patch.tracing.categories import CATEGORIES, Saver, category_of, module_categories
from lowmem_patch.tracing.observers import (
    DispatchObserver,
    FunctionObserver,
    ended_checkpoints,
    observed_calls,
)
from lowmem_patch.tracing.op_roles import MATMULS, WEIGHT_MATMULS, Role, function_name, role_of

_MATMULS = WEIGHT_MATMULS | MATMULS


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage behind a tensor, the same for all its views; valid while it lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse, or one of torch.func's transforms: they have no storage
        return -id(tensor)


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors whose storages hold this one: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        names = _PARTS.get(tensor.layout, ())
        return tuple(getattr(tensor.detach(), name)() for name in names)


_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: (*_ROWS, "values"),
    torch.sparse_bsr: (*_ROWS, "values"),
    torch.sparse_csc: (*_COLUMNS, "values"),
    torch.sparse_bsc: (*_COLUMNS, "values"),
}


@dataclasses.dataclass(frozen=True)
class SavedStorage:
    """One storage that autograd holds.

    Attributes:
        bytes: its size.
        shape, dtype: of the tensor that was saved first.
        category: one of ``lowmem_patch.tracing.categories.CATEGORIES``.
        savers: the modules and torch functions that saved it, in the order of the forward.
        key: of the storage, as long as the graph lives.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: str
    savers: tuple[Saver, ...]
    key: int


@dataclasses.dataclass
class SavedBytes:
    """Bytes that autograd holds.

    Attributes:
        activations: bytes of unique storages that are neither parameters, buffers nor weight copies.
        weight_copies: bytes of copies of parameters (casts under autocast) held for backward.
        by_module: activation bytes by the path of the innermost module that saved a storage first.
        own: activation bytes by module path, of storages which that module alone saved. A frozen head whose
            logits wait, and the loss that reads them, hold its input, and save none.
        by_kind: activation bytes by category (``lowmem_patch.tracing.categories.CATEGORIES``).
        storages: every storage behind ``activations``.
    """

    activations: int = 0
    weight_copies: int = 0
    by_module: dict[str, int] = dataclasses.field(default_factory=dict)
    own: dict[str, int] = dataclasses.field(default_factory=dict)
    by_kind: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(CATEGORIES, 0)
    )
    storages: list[SavedStorage] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        return self.activations + self.weight_copies

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size:,}" for name, size in self.by_kind.items() if size)
        copies = f"; copies of weights {self.weight_copies:,}" if self.weight_copies else ""
        return f"SavedBytes({self.activations:,} bytes of activations: {sizes or 'none'}{copies})"


class _WeightCopies(DispatchObserver):
    """Remembers the storages that hold a copy of a parameter (a cast, a clone)."""

    _COPIES = frozenset(
        (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.copy.default)
    )

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.copies: dict[int, Tensor] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if func in self._COPIES and isinstance(args[0], Tensor):
            source = storage_key(args[0])
            if source in self.weights or source in self.copies:
                self.copies[storage_key(output)] = output
        return output


class _Held:
    """What autograd holds in a tensor's place; it dies with the node that saved the tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _without_graph(tensor: Tensor) -> Tensor:
    """The tensor without its node: an output holds the node that holds it, which no garbage collector sees.
    No trace sees the op."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach()


class _Saved(NamedTuple):
    """A storage that autograd holds, the tensor that showed it first, and how often it is held for each
    saver. No tensor is held here: one without a graph would be one more op."""

    storage: torch.UntypedStorage
    shape: torch.Size
    dtype: torch.dtype
    savers: Counter[Saver]


@contextlib.contextmanager
def saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count what autograd saves of the forwards in the context; read the result after it closed.

    Not counted is what was let go before the saver's caller ended (nobody took the result's gradient), what
    a budget's level ``attention`` keeps, what waits in the host's memory, and what a backward computes again
    and saves meanwhile. A forward without gradients saves nothing. Count without torch's non-reentrant
    checkpoint, whose second run may save other tensors than one that is counted.

    Raises:
        ConfigError: ``model`` is no module.

    Example:
        >>> with saved_bytes(model) as saved:
        ...     loss = model(**batch).loss
        >>> saved.activations, saved.by_kind["attention"]
    """
    checked_model(model, "saved_bytes")
    # held as long as their keys: offloading exchanges them in the forward
    held = (*model.parameters(), *model.buffers())
    weights = {storage_key(part) for tensor in held for part in parts_of(tensor)}
    copies = _WeightCopies(weights)
    until_read = {n for n, one in model.named_modules() if getattr(one, "saves_until_read", False)}
    result, counted = SavedBytes(), _Counted(weights, copies.copies, until_read)
    stack = counted.stack
    # a cast of a weight that autocast remembers from before would not be seen to be one
    torch.clear_autocast_cache()
    with observed_calls(model, lambda name, *_: stack.append(name), lambda *_: stack.pop()):
        hooks = torch.autograd.graph.saved_tensors_hooks(counted.pack, counted.unpack)
        with hooks, copies, counted, ended_checkpoints():
            yield result
    counted.add_waiting()
    _add_up(result, model, counted.saved, copies.copies)


class _Counted(FunctionObserver):
    """The storages that autograd holds for forwards, by their keys; ``saved`` keeps them alive, so that these
    stay unique. Who saves one: the innermost module of the ``stack``, and the torch function that runs.

    Args:
        weights: keys of their storages.
        copies: of weights, by their keys.
        until_read: names of modules whose reader may save something else in the place of what they save.
    """

    def __init__(
        self, weights: set[int], copies: Mapping[int, Tensor], until_read: set[str]
    ) -> None:
        super().__init__()
        self._until_read = until_read
        self.saved: dict[int, _Saved] = {}
        self.stack: list[str] = []  # names of the modules that are running
        self.function, self.weighted = "", False  # whether it is a matmul of a weight that trains
        self._weights, self._copies = weights, copies
        self._watched: set[weakref.ref[_Held]] = set()
        self._waiting: list[tuple[Any, Saver]] = []  # deferred tensors

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self.function, self.weighted
        self.function = function_name(func)
        matmul = role_of(self.function).has(_MATMULS)
        self.weighted = matmul and any(map(self._is_weight, (*args, *kwargs.values())))
        try:
            return func(*args, **kwargs)
        finally:
            self.function, self.weighted = before

    def _is_weight(self, item: object) -> bool:
        """Whether it is a weight that trains, or a copy of one that the forward casts by itself."""
        if not isinstance(item, Tensor) or not item.requires_grad or item.dim() < 2:
            return False
        # a deferred tensor would make a storage, and hold it
        key = None if hasattr(item, "held_values") else storage_key(item)
        return key in self._weights or key in self._copies

    def pack(self, tensor: Tensor) -> _Held:
        saver = Saver(self.stack[-1] if self.stack else "", self.function, self.weighted)
        waits = hasattr(tensor, "held_values")
        held = _Held(tensor if tensor.is_leaf or waits else _without_graph(tensor))
        if torch._C._current_graph_task_id() >= 0:  # in a backward
            return held
        if waits:
            self._waiting.append((tensor, saver))
        for part in () if waits else parts_of(tensor):
            if storage_key(part) not in self._weights:
                self._count(part, held, saver)
        return held

    def unpack(self, held: _Held) -> Tensor:
        self.add_waiting()  # before a backward computes them
        return held.tensor

    def _count(self, tensor: Tensor, held: _Held, saver: Saver) -> None:
        key, stack = storage_key(tensor), self.stack
        # of the call of the module that calls this one; a patched activation's reader may stand beside that
        depth = max(len(stack) - (2 if saver.module in self._until_read else 1), 1)
        caller = stack[depth - 1 : depth]

        def let_go(reference: weakref.ref[_Held]) -> None:
            self._watched.discard(reference)
            # a later release depends on who else holds the outputs: a trace holds all of them
            if caller and stack[depth - 1 : depth] == caller:
                self._drop(saver, key)

        self._add(tensor, saver)
        self._watched.add(weakref.ref(held, let_go))

    def _add(self, tensor: Tensor, saver: Saver) -> None:
        key = storage_key(tensor)
        if key not in self.saved:
            storage = tensor.untyped_storage()
            self.saved[key] = _Saved(storage, tensor.shape, tensor.dtype, Counter())
        self.saved[key].savers[saver] += 1

    def _drop(self, saver: Saver, key: int) -> None:
        """One of those who saved a storage let it go."""
        savers = self.saved[key].savers
        savers[saver] -= 1
        if not savers[saver]:
            del savers[saver]
        if not savers:
            del self.saved[key]

    def add_waiting(self) -> None:
        """Add the values of deferred tensors, at the end: they may let them go."""
        for tensor, saver in self._waiting:
            values = tensor.held_values()
            if values is not None:
                self._add(values, saver)
        self._waiting.clear()


def _add_up(
    result: SavedBytes, model: nn.Module, saved: dict[int, _Saved], copies: Mapping[int, Tensor]
) -> None:
    for key in copies.keys() & saved.keys():
        result.weight_copies += saved.pop(key).storage.nbytes()
    categories = module_categories(model)
    frozen = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    }
    largest: dict[str, int] = {}
    scores = set()
    for one in saved.values():
        elements = one.shape.numel()
        for saver in one.savers:
            largest[saver.module] = max(largest.get(saver.module, 0), elements)
            if role_of(saver.function).has(Role.SOFTMAX):
                scores.add((saver.module, elements))
    for key, (storage, shape, dtype, counts) in saved.items():
        size, savers = storage.nbytes(), tuple(counts)
        module = savers[0].module
        category = category_of(dtype, shape.numel(), savers, categories, largest[module], scores)
        result.storages.append(SavedStorage(size, tuple(shape), dtype, category, savers, key))
        result.activations += size
        result.by_kind[category] += size
        result.by_module[module] = result.by_module.get(module, 0) + size
        if all(_adds_none(saver, module, frozen) for saver in savers):
            result.own[module] = result.own.get(module, 0) + size


def _adds_none(saver: Saver, first: str, frozen: set[str]) -> bool:
    """Whether a storage that the module ``first`` saved is no other's as well, by this saver."""
    lone = saver.module == first or saver.module in frozen
    return lone or role_of(saver.function).has(Role.CROSS_ENTROPY)

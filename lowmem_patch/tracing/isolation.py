"""A foreign forward runs, on fake tensors, on a few rows or on data: nothing of it stays behind, and no
kernel that is no torch op sees a fake address."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from lowmem_patch.nn.checkpointing import SWITCHES
from lowmem_patch.tracing.observers import FunctionObserver, eagerly
from lowmem_patch.tracing.op_roles import Role, names_with

_Cache = functools._lru_cache_wrapper
_jit: Any = torch.jit  # says of none of its names that it is public
_ADDRESSES = names_with(Role.ADDRESS)
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE  # has no types
# arguments of kernels that hold no tensor, as functions that are part of a kernel
_PLAIN = (NoneType, bool, int, float, str, torch.dtype, torch.device, FunctionType)
# whether the address that is asked for here is that of a launch that runs nothing
is_skipped: ContextVar[bool] = ContextVar("is_skipped", default=False)


class ForeignKernelError(RuntimeError):
    """A forward came to a kernel that is no torch op, where none may run."""


class NoForeignKernels(FunctionObserver):
    """Refuses what every kernel asks for that is no torch op (a Triton launch, a call through ctypes,
    cupy): the address of a tensor, unless it is that of a launch that runs nothing. ``torch.tensor`` asks for
    it of tensors in a list: it gets numbers."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.tensor:
            args, kwargs = tree_map_only(Tensor, lambda number: number.tolist(), (args, kwargs))
        if getattr(func, "__name__", None) in _ADDRESSES:
            if is_skipped.get():
                return 0
            raise ForeignKernelError("a kernel of its own needs real memory")
        return func(*args, **kwargs)


def is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate leaves weights on the meta device, and brings them at each call of a module."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    return any(getattr(hook, "offload", False) for hook in hooks)


@contextlib.contextmanager
def _preserved_flags(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextlib.contextmanager
def in_training_mode(model: nn.Module) -> Iterator[None]:
    """Training mode for a while, so that a trace sees dropouts; every module's own flag is put back."""
    with _preserved_flags(model):
        model.train()
        yield


def without_randomness(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, without dropouts, but for norms with running statistics: in training they
    compute those of the batch, and their gradient passes through these."""
    model.eval()
    for module in model.modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            module.training = True
    return model


@contextlib.contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Other libraries' activation checkpointing off for a while.

    A reentrant checkpoint runs its block without gradients, and again with them in backward: a trace of the
    forward would find nothing in the block that autograd keeps.
    """
    switched = [
        (module, name)
        for module in model.modules()
        for name in SWITCHES
        if module.__dict__.get(name) is True
    ]
    try:
        for module, name in switched:
            setattr(module, name, False)
        yield
    finally:
        for module, name in switched:
            setattr(module, name, True)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back what a forward on data changes: buffers, training flags, random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices), _preserved_flags(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Functions that torch.jit scripted or torch.compile compiled run as they are written.

    After two runs a GPU's fuser would make a kernel of a scripted function (DeBERTa's positions), for fake
    tensors if it met those. Of torch.compile see `DispatchObserver`.
    """
    with eagerly, _jit.optimized_execution(False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        warnings.filterwarnings(
            "ignore", "torch.compile with fullgraph=True found no compiled frames"
        )
        yield


def _skip(mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a launch does under a fake mode: nothing, but for a RuntimeError where an argument is a tensor
    with data, into which the kernel would write, or something that may hold one."""
    tensors = list(_tensors((args, kwargs)))
    token = is_skipped.set(True)
    try:
        for tensor in tensors:
            # in a backward torch itself answers, and has no address
            with contextlib.suppress(RuntimeError):
                tensor.data_ptr()
            if isinstance(tensor, FakeTensor) and hasattr(mode, "values"):  # of `make_fake_mode`
                mode.values.forget(tensor)
    finally:
        is_skipped.reset(token)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(getattr(value, "base", None), Tensor):  # a view of other type, or a descriptor
        yield from _tensors(value.base)
    elif not (isinstance(value, _PLAIN) or type(value).__module__.startswith("triton.")):
        raise RuntimeError(f"a kernel of its own needs real memory: of a {type(value).__name__}")


class _SkippedLaunches:
    """Inside, ``kernel[grid](...)`` is `_skip` under fake tensors, and as ever elsewhere (in other threads).

    A Triton kernel allocates nothing. It writes into what torch's own ops have made, so that shapes and saved
    bytes are known without it. Kernels in C++ that make their own outputs are none of these.

    Torch has no hook for launches, nor has Triton one that skips them: Triton's own method is exchanged
    meanwhile, counted over all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._kernels: Any = None
        self._launch: Any = None

    def __enter__(self) -> None:
        with self._lock:
            triton: Any = sys.modules.get("triton.runtime.jit")
            if self._count == 0 and triton is not None:
                self._kernels = triton.KernelInterface
                self._launch = launch = self._kernels.__getitem__

                def launch_or_skip(kernel: Any, grid: Any) -> Any:
                    own = launch(kernel, grid)

                    def decided_at_each_call(*args: Any, **kwargs: Any) -> Any:
                        mode = torch._C._get_dispatch_mode(_FAKE)
                        return own(*args, **kwargs) if mode is None else _skip(mode, args, kwargs)

                    return decided_at_each_call  # somebody may hold it

                self._kernels.__getitem__ = launch_or_skip
            self._count += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._kernels is not None:
                self._kernels.__getitem__ = self._launch
                self._kernels = None


_skipped_launches = _SkippedLaunches()


@contextlib.contextmanager
def running_fake(mode: FakeTensorMode) -> Iterator[None]:
    """``mode``, quietly and without foreign kernels: torch logs each op that refuses fake tensors, which
    callers handle, and a kernel would be launched on address 0. Launches of Triton kernels are skipped.

    A forward may remember a table (of positions, say) in a functools cache, where the next real
    forward would find a fake one: caches that were filled meanwhile are emptied.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    misses = {id(cache): cache.cache_info().misses for cache in find_caches()}
    try:
        with mode, NoForeignKernels(), _skipped_launches, uncompiled():
            yield
    finally:
        logger.disabled = disabled
        for cache in find_caches(surely=True):
            if cache.cache_info().misses > misses.get(id(cache), 0):
                cache.cache_clear()


# the caches that were found in the process; `gc.freeze` hides what it froze from later searches
_caches: weakref.WeakSet[_Cache[Any]] = weakref.WeakSet()
_beside = -1  # references to their type that are none of theirs


def find_caches(*, surely: bool = False) -> list[_Cache[Any]]:
    """Every cache of the process but torch's own, also those in closures, which no module lists.

    A walk over the heap takes a tenth of a second. Unless ``surely``, it is made only if there seems to be a
    cache more than were seen: each holds a reference to its type, as others may. So one that was made since
    may be missing; what was in it is emptied by `running_fake`.
    """
    global _beside
    if surely or sys.getrefcount(_Cache) - len(_caches) != _beside:
        referrers = gc.get_referrers(_Cache)
        _caches.update(thing for thing in referrers if type(thing) is _Cache)
        del referrers
        _beside = sys.getrefcount(_Cache) - len(_caches)
    return [cache for cache in _caches if not str(cache.__module__).startswith("torch.")]

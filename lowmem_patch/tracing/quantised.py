"""Quantised weights of other libraries: tensors of a class of their own, and fakes of them.

Two kinds have fakes. A packed tensor (bitsandbytes) has a storage, and attributes such as its scales: its
fake is a fake tensor with such attributes, and its library tells torch what its ops return. A wrapper
(torchao, quanto) has no storage, and says itself how it is made of plain tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowmem_patch.tracing.saved_bytes import storage_key

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_PARTS_OF_A_MODULE = ("_parameters", "_buffers", "_modules")


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether it has no storage, but wraps tensors that have."""
    return type(tensor) not in _PLAIN and bool(is_traceable_wrapper_subclass(tensor))


def _is_packed(tensor: Tensor) -> bool:
    """Whether it has a storage, and a class whose attributes say how to read it."""
    plain_to_torch = torch._C._disabled_torch_dispatch_impl
    return type(tensor) not in _PLAIN and type(tensor).__torch_dispatch__ is plain_to_torch


def own_bytes(tensor: Tensor) -> int:
    """Bytes of its own storage; what a wrapper holds lies beside it (``held_beside``)."""
    return 0 if _is_wrapper(tensor) else tensor.numel() * tensor.element_size()


def held_beside(model: nn.Module) -> list[Tensor]:
    """What holds quantised weights beside parameters and buffers, each storage once."""
    held = set(map(storage_key, (*model.parameters(), *model.buffers())))
    found: dict[int, Tensor] = {}
    for tensor in _attached(model):
        found.setdefault(storage_key(tensor), tensor)
    return [tensor for key, tensor in found.items() if key not in held]


def _attached(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that hang on quantised weights and on their modules, or lie in a wrapper."""
    seen: set[int] = set()
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values())
        own = [tensor for tensor in held if tensor is not None and type(tensor) not in _PLAIN]
        for tensor in own:
            yield from _inside(tensor, seen)
        for name, value in vars(module).items():
            if own and name not in _PARTS_OF_A_MODULE:
                yield from _tensors(value, seen)


def _inside(tensor: Tensor, seen: set[int]) -> Iterator[Tensor]:
    if _is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # of wrappers
        for name in names:
            yield from _tensors(getattr(tensor, name), seen)
    else:
        yield from _tensors(vars(tensor), seen)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in a value, also in an object that holds them (bitsandbytes' QuantState); not in a module."""
    if id(value) in seen or isinstance(value, (nn.Module, type)) or callable(value):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield from _inside(value, seen) if _is_wrapper(value) else (value,)
        return
    if not isinstance(value, (list, tuple, set)):
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        value = parts.values()
    for item in list(value):
        yield from _tensors(item, seen)


class Fakes:
    """Fakes of what a model holds, for a copy of it; TypeError where a tensor has none.

    Attributes:
        memo: the fakes by the ids of the tensors, as ``copy.deepcopy`` takes them.
        packed: those of packed weights.
        beside: those of ``held_beside``.
    """

    def __init__(
        self, model: nn.Module, mode: FakeTensorMode, instead_of_meta: torch.device
    ) -> None:
        self.mode, self.instead_of_meta = mode, instead_of_meta
        self.memo: dict[int, Any] = {}
        self.by_storage: dict[int, Tensor] = {}
        held = [*model.parameters(), *model.buffers()]
        for tensor in held:
            fake = self._fake_of(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._add(tensor, fake)
        beside = held_beside(model)
        for tensor in (*beside, *_attached(model)):
            if id(tensor) not in self.memo:
                known = self.by_storage.get(storage_key(tensor))
                shape = (tensor.shape, tensor.dtype)
                if known is not None and (known.shape, known.dtype) == shape:
                    self._add(tensor, known.detach())  # bitsandbytes' 8-bit state holds the weight
                else:
                    self._add(tensor, self._fake_of(tensor))
        packed = list(filter(_is_packed, held))
        for tensor in packed:
            vars(self.memo[id(tensor)]).update(copy.deepcopy(vars(tensor), self.memo))
        self.packed = tuple(self.memo[id(tensor)] for tensor in packed)
        self.beside = tuple(self.memo[id(tensor)] for tensor in beside)

    def _add(self, tensor: Tensor, fake: Tensor) -> None:
        self.memo[id(tensor)] = fake
        self.by_storage.setdefault(storage_key(tensor), fake)

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if _is_wrapper(tensor):
            return self.mode.from_tensor(tensor, static_shapes=True)
        if type(tensor) not in _PLAIN and not _is_packed(tensor):
            raise TypeError(f"a parameter is a {type(tensor).__name__}")
        device = self.instead_of_meta if tensor.is_meta else tensor.device
        with self.mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )

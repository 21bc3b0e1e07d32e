"""What a block has when it runs again in backward: what it had in its first run."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lowmem_patch.functional import is_sharded, unwritten
from lowmem_patch.nn.context import is_fsdp_unit


def is_gathered(block: nn.Module) -> bool:
    """Whether the weights are there while this very block runs (FSDP, ZeRO-3), and no other."""
    marks = ("ds_id", "_fsdp_flattened")
    return is_fsdp_unit(block) or any(
        is_sharded(parameter) or any(hasattr(parameter, mark) for mark in marks)
        for parameter in block.parameters()
    )


# what a module holds under some names, and what it held
_Places = list[tuple[dict[str, Any], dict[str, Any]]]


class BlockState:
    """What a block has while it runs: parameters and buffers, what trains, flags, numbers and names that are
    set on its modules (train mode, PEFT's active adapter and its scale), and their forward hooks.

    ``written``: names of the buffers that its forward writes.
    """

    def __init__(self, block: nn.Module, written: tuple[str, ...]) -> None:
        self._block, self._written = block, written
        self._tensors: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        # of those that train, into which an optimizer may write before the second run
        self._versions: list[tuple[Tensor, int]] = []
        self._settings: _Places = []
        for module in block.modules():
            for place in (module._parameters, module._buffers):
                for name, tensor in place.items():
                    if tensor is not None:
                        self._tensors.append((place, name, tensor, tensor.requires_grad))
                        if tensor.requires_grad:
                            self._versions.append((tensor, tensor._version))
            self._settings.append((module.__dict__, _settings_of(module)))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block again with what it had: torch.func.functional_call takes its tensors away before the
        backward begins, and hooks and adapters may be switched off.

        Raises:
            RuntimeError: somebody has written into a weight since.
        """
        self._refuse_writes()
        others, trained = self._changed()
        before = [{name: place[name] for name in other} for place, other in others]
        written: list[tuple[Tensor, Tensor]] = []
        try:
            for place, other in others:
                place.update(other)
            for tensor, trains in trained:
                tensor.requires_grad_(trains)
            for buffer in map(self._block.get_buffer, self._written):
                written.append((buffer, buffer.detach().clone()))
            yield
        finally:
            for buffer, value in written:  # by the first run as well
                buffer.data.copy_(value)  # past autograd, which would take the write for a change
            for tensor, trains in trained:
                tensor.requires_grad_(not trains)
            for (place, _), other in zip(others, before, strict=True):
                place.update(other)

    def _refuse_writes(self) -> None:
        for tensor, version in self._versions:
            if tensor._version != version and not is_gathered(self._block):
                what = "a block that runs again in backward reads: write into it when that is over"
                unwritten(tensor, version, what)

    def _changed(self) -> tuple[_Places, list[tuple[Tensor, bool]]]:
        """What has another value now, with that of the first run."""
        others: _Places = [
            (place, {name: tensor})
            for place, name, tensor, _ in self._tensors
            if place.get(name, tensor) is not tensor
        ]
        trained = [
            (tensor, trains)
            for _, _, tensor, trains in self._tensors
            if tensor.is_leaf and tensor.requires_grad is not trains
        ]
        settings = ((place, _changed_settings(place, then)) for place, then in self._settings)
        others += [(place, other) for place, other in settings if other]
        if (others or trained) and is_gathered(self._block):
            return [], []
        return others, trained


def _changed_settings(place: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy.copy(then)  # a run may add to it
        for name, then in settings.items()
        if (now := place.get(name, then)) is not then
        and (type(now) is not type(then) or now != then)
    }


_PLAIN = frozenset((bool, int, float, str, type(None)))
_HOLDERS = frozenset((list, tuple, dict, set))  # of these
_HOOKS = tuple(
    f"_forward_{kind}{rest}" for kind in ("hooks", "pre_hooks") for rest in ("", "_with_kwargs")
)
_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def _settings_of(module: nn.Module) -> dict[str, Any]:
    own = module.__dict__
    found = {name: own[name].copy() if own[name] else _NO_HOOKS for name in _HOOKS}
    found["training"] = own["training"]
    for name in own.keys() - _OF_EVERY_MODULE:
        value = own[name]
        if type(value) in _PLAIN:
            found[name] = value
        elif type(value) in _HOLDERS:
            items = value.values() if type(value) is dict else value
            if _PLAIN.issuperset(map(type, items)):
                found[name] = copy.copy(value)
    return found

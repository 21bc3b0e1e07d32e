"""What a strategy is: one file that finds patches; and what a patch is: data for one change to one model.

A strategy looks at the facts of a trace and returns what it found (`Strategy.find`). A patch is carried out
on a model (`Patch.apply`). It may be of a norm, of a head, of a block or of the whole model.

Other code may move, wrap and copy afterwards what a patch changed. So undoing does not ask the patches: what
a patch leaves on a model carries a mark (`ORIGINAL`, `lowmem_patch.nn.own.Own`), and is found by it wherever
it is now.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.functional import ActivationKind
from lowmem_patch.nn.own import Own, has_foreign_forward, is_compiled_function
from lowmem_patch.tracing.base_model import is_leaf
from lowmem_patch.tracing.categories import Saver
from lowmem_patch.tracing.consumers import Reads, Writes
from lowmem_patch.tracing.dataflow import makers
from lowmem_patch.tracing.functions import FunctionSite, find_functions
from lowmem_patch.tracing.gated_norms import GatedNormSpec, match_gated_norm
from lowmem_patch.tracing.op_roles import OF_ELEMENTS
from lowmem_patch.tracing.probes import (
    NormSpec,
    looks_like_activation,
    match_activation,
    match_norm,
    means_something_else,
)
from lowmem_patch.tracing.saved_bytes import SavedStorage, storage_key
from lowmem_patch.tracing.sharded import came_sharded
from lowmem_patch.tracing.trace import FOREIGN_KERNEL, Call, Op, Trace

# of a module whose forward is told to call another function: each costs a microsecond more
_MOST_FUNCTIONS = 100
# where that saves a good part of what the module holds: sparse attention of DeepSeek's calls 116, its hyper
# connections 144, a block of Flux with adapters in all Linears 154, and a scan that is written in torch many
# hundreds
_MOST_FOR_MUCH = 200
_MUCH = 0.03

Answer = TypeVar("Answer")
P = ParamSpec("P")
Question = Callable[Concatenate["Facts", P], Answer]
Affines = Mapping[str, tuple[Tensor | None, Tensor | None]]


def once(find: Question[P, Answer]) -> Question[P, Answer]:
    """A function of facts that several ask, and whose answer is found at the first question."""

    @wraps(find)
    def ask(facts: Facts, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        question = (find, *args, *kwargs.items())
        if question not in facts.answers:
            facts.answers[question] = find(facts, *args, **kwargs)
        answer: Answer = facts.answers[question]
        return answer

    return ask


class Facts:
    """What strategies decide from.

    Args:
        model: holds the weights.
        shadow: the copy that was traced; ``model`` itself where that was traced on data.
        trace: of one forward.
        originals: gamma and beta of norms whose affine an earlier patch folded away, by name.
        on_meta: the model has no data, and will run on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        shadow: nn.Module,
        trace: Trace,
        originals: Affines,
        *,
        on_meta: bool = False,
    ) -> None:
        self.on_meta = on_meta
        self.model, self.shadow, self.trace, self.originals = model, shadow, trace, originals
        self.modules = dict(shadow.named_modules())
        self.calls: dict[str, list[Call]] = {}
        for call in trace.calls:
            self.calls.setdefault(call.name, []).append(call)
        self.order = sorted(self.calls, key=lambda name: self.calls[name][0].last_op)
        # what a probe said of equal modules
        self._norms: dict[object, NormSpec | str] = {}
        self._gated: dict[object, GatedNormSpec | None] = {}
        self._kinds: dict[object, ActivationKind | None] = {}
        self.answers: dict[object, Any] = {}  # of functions that are marked with `once`

    @cached_property
    def writes(self) -> Writes:
        return Writes(self.trace)

    @cached_property
    def reads(self) -> Reads:
        return Reads(self.trace)

    @cached_property
    def makers(self) -> dict[int, Op]:
        """The op that made a tensor, by the tensor's id."""
        return makers(self.trace)

    @cached_property
    def foreign_kernels(self) -> dict[str, None]:
        """Names of the modules that ran kernels of their own (Liger's, mamba's), of which a trace sees
        what they read, and no more; in the order of the forward."""
        return {op.module: None for op in self.trace.ops if op.name == FOREIGN_KERNEL}

    @cached_property
    def is_sharded(self) -> bool:
        """Whether the model came sharded."""
        return came_sharded(self.model)

    @cached_property
    def storages(self) -> dict[int, SavedStorage]:
        """What autograd saves, by the storages' keys."""
        return {storage.key: storage for storage in self.trace.saved.storages}

    @cached_property
    def state_keys(self) -> frozenset[int]:
        """Keys of the storages of parameters and buffers."""
        return frozenset(map(storage_key, (*self.shadow.parameters(), *self.shadow.buffers())))

    @cached_property
    def functions(self) -> dict[str, FunctionSite]:
        """The activations that a module's forward calls as functions, by name."""
        return find_functions(self.trace, self.is_site)

    def is_site(self, name: str) -> bool:
        """Whether a module is an activation or a norm as a whole, whatever it calls."""
        if name not in self.calls or not is_leaf(self.modules[name]):
            return False
        if self.activation(name) is not None or looks_like_activation(self.modules[name]):
            return True
        return self.is_known_norm(name)

    def is_known_norm(self, name: str) -> bool:
        """Whether a module is a norm of which we know what it computes, with a gate perhaps."""
        if not is_leaf(self.modules[name]):
            return False
        return isinstance(self.norm(name), NormSpec) or self.gated_norm(name) is not None

    @cached_property
    def _alike(self) -> Counter[str]:
        return Counter(map(_starred, self.modules))

    def alike(self, name: str) -> int:
        """How many modules have this name but for its numbers: one in each block, however many blocks there
        are."""
        return self._alike[_starred(name)]

    def calls_of(self, name: str) -> list[Call]:
        """The calls of a module or of a function; one of a custom function."""
        if custom := self.trace.custom.get(name):
            return [Call(custom.module, (), (), 1, custom.place, custom.place)]
        return self.calls[name] if name in self.calls else self.functions[name].calls

    def ops_of(self, name: str) -> Iterator[Op]:
        """The ops that ran in the calls of a module."""
        for call in self.calls[name]:
            yield from self.trace.ops[call.first_op : call.last_op]

    @once
    def activation(self, name: str) -> ActivationKind | None:
        """Which activation a module is that has no parameters, and takes and returns one tensor."""
        module = self.modules[name]
        single = all(
            call.takes_one and len(call.outputs) == 1 and not means_something_else(module, call)
            for call in self.calls[name]
        )
        plain = single and next(module.parameters(), None) is None
        return match_activation(module, self._kinds) if plain else None

    @once
    def caller(self, name: str) -> str:
        """The module that calls one which holds nothing and calls elementwise functions alone, as activations
        do; of any other, and where no forward of ours can run around the caller, the module itself."""
        outer = name.rpartition(".")[0]
        around = self.calls.get(outer, ())
        through = outer and self._is_elementwise(name)
        inside = through and all(
            any(one.first_op <= call.first_op and call.last_op <= one.last_op for one in around)
            for call in self.calls[name]
        )
        return outer if inside and forward_obstacle(self, outer) is None else name

    def _is_elementwise(self, name: str) -> bool:
        module = self.modules[name]
        if not is_leaf(module) or module._parameters or module._buffers:
            return False
        return name in self.calls and all(op.role.has(OF_ELEMENTS) for op in self.ops_of(name))

    def norm(self, name: str) -> NormSpec | str | None:
        """What a module without children computes, or why it is no norm that we know; None where it cannot
        be one."""
        module, calls = self.modules[name], self.calls[name]
        own = len(list(module.parameters())) <= 2  # gamma and beta
        single = all(len(call.outputs) == 1 and len(call.inputs) == 1 for call in calls)
        if not own or not single or isinstance(module, nn.Linear):
            return None
        longest = max(calls, key=lambda call: (call.arguments, call.given))
        return match_norm(module, longest, self.trace, self._norms)

    def gated_norm(self, name: str) -> GatedNormSpec | None:
        """What a module without children computes that is a norm of one tensor times an activation of
        another; None where it is no such norm."""
        return match_gated_norm(self.modules[name], self.calls[name], self._gated)

    @property
    def leaves(self) -> Iterator[str]:
        """Names of the modules without children that ran, in the order in which they ended."""
        for name in self.order:
            if name and is_leaf(self.modules[name]):
                yield name

    def outputs(self, name: str) -> list[Tensor]:
        return [tensor for call in self.calls_of(name) for tensor in call.outputs]

    def saved(self, name: str) -> int:
        """Bytes that autograd holds for a module, a function or a custom one alone."""
        if name in self.calls:
            return self.trace.saved.own.get(name, 0)
        if name in self.functions:
            return self.functions[name].saved(self.trace)
        return self.trace.custom[name].saved

    def savers_of(self, *tensors: Tensor) -> Iterator[Saver]:
        """Who saved the memory of tensors."""
        for key in set(map(storage_key, tensors)) & self.storages.keys():
            yield from self.storages[key].savers

    def is_saved_for(self, op: Op, *tensors: Tensor, alone: bool = False) -> bool:
        """Whether the memory of one of these was saved for an op, or its like in the same module; or
        ``alone`` for such ops."""
        key = op.module, op.name
        own = [(saver.module, saver.function) == key for saver in self.savers_of(*tensors)]
        return any(own) and (all(own) or not alone)

    def written(self, name: str, tensors: str) -> str | None:
        """Who writes in place into the ``inputs`` or ``outputs`` of a site's calls once they are over."""
        found = (
            self.writes.later(getattr(call, tensors), call.last_op) for call in self.calls_of(name)
        )
        return next((text for text in found if text is not None), None)


def _starred(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def forward_obstacle(facts: Facts, name: str, gain: int = 0) -> str | None:
    """Why no forward of ours that looks at each torch function can run around a module's, to save ``gain``
    bytes."""
    if has_foreign_forward(facts.modules[name]):
        return f"the forward of {name} is overridden on the instance"
    if is_compiled_function(type(facts.modules[name]).forward):
        return f"the forward of {name} is compiled"
    if any(op.compiled for op in facts.ops_of(name)):
        return f"{name} calls a function that torch.compile compiled"
    longest = max(call.last_op - call.first_op for call in facts.calls[name])
    most = _MOST_FUNCTIONS
    if longest > most:
        inside = sum(
            storage.bytes
            for storage in facts.trace.saved.storages
            if any(f"{one.module}.".startswith(f"{name}.") for one in storage.savers)
        )
        most = _MOST_FOR_MUCH if gain >= _MUCH * inside else most
    if longest > most:
        return f"{name} calls {longest} torch functions, all of which would take longer"
    return None


class Target:
    """A model that patches are carried out on; the places of its modules are looked up once.

    Args:
        arithmetic: False for a shadow without data: modules are swapped, no weight is computed.
    """

    def __init__(self, model: nn.Module, *, arithmetic: bool = True) -> None:
        self.model, self.arithmetic = model, arithmetic
        self._slots: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in model.modules():
            for slot, child in parent._modules.items():
                if child is not None:
                    self._slots.setdefault(id(child), []).append((parent, slot))

    def put(self, new: nn.Module, old: nn.Module) -> None:
        """``new`` in every place that holds ``old``."""
        places = self._slots.get(id(old), [])
        for parent, slot in places:
            parent._modules[slot] = new
        self._slots[id(new)] = places


@dataclasses.dataclass(frozen=True)
class Patch:
    """One change to one model.

    Attributes:
        site: path of the module, block or head that is changed.
        strategy: the strategy's name.
        reason: why, as a report prints it.
        kind: of the site (``layer_norm``, ``gelu``); None where a report has no row for it.
        consumers: who reads the site's output.
        approximate: gradients are not exact.
        for_autocast: saves something under autocast alone.
    """

    site: str
    strategy: str
    _: dataclasses.KW_ONLY
    reason: str = ""
    kind: str | None = None
    consumers: tuple[str, ...] = ()
    approximate: bool = False
    for_autocast: bool = False

    @property
    def module(self) -> str:
        """Path of the module that is changed, which may hold the site."""
        return self.site

    def apply(self, target: Target) -> None:
        """Carry it out; what it leaves on the model is a replacement, or an `Own`, which undoing finds."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Change(Patch):
    """A module that stays, and gets a hook or another forward: ``change(module, *settings)``."""

    change: Callable[..., Any]
    settings: tuple[Any, ...] = ()

    def apply(self, target: Target) -> None:
        self.change(target.model.get_submodule(self.site), *self.settings)


def hook_before(module: nn.Module, function: Any, *settings: Any) -> None:
    module.register_forward_pre_hook(Own(function, *settings), with_kwargs=True)


def hook_behind(module: nn.Module, function: Any) -> None:
    module.register_forward_hook(Own(function))


@dataclasses.dataclass(frozen=True)
class Skip:
    """A site that is left alone, and why."""

    site: str
    kind: str
    reason: str
    consumers: tuple[str, ...] = ()


@dataclasses.dataclass
class Found:
    """What one strategy found: patches, sites that it decides to leave alone, and sentences of a report."""

    patches: list[Any] = dataclasses.field(default_factory=list)
    skips: list[Skip] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def take(self, patches: Sequence[Patch], text: str) -> Found:
        """Add patches, and a note with their number behind ``text``; none of no patches."""
        self.patches += patches
        self.notes += [f"{text}: {len(patches)}"] if patches else []
        return self

    def add(self, one: Patch | Skip) -> None:
        if isinstance(one, Skip):
            self.skips.append(one)
        else:
            self.patches.append(one)


class Strategy(Protocol):
    """A file of `lowmem_patch.strategies`."""

    def find(self, facts: Facts, config: PatchConfig) -> Found:
        """Patches for what this strategy decides on; nothing is touched."""

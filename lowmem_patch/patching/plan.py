"""Decide what is done to each site: legality first, then benefit. Nothing is touched.

Facts come from the trace (who reads what), from the modules (what they compute) and from the
parameters (what trains); a model's name plays no part.
"""

from __future__ import annotations

import dataclasses
import zlib

from torch import Tensor, nn

from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.functional import ActivationKind
from lowmem_patch.nn.rotary import Rotation
from lowmem_patch.patching.adapters import Adapters, find_adapters, frozen_linears
from lowmem_patch.patching.config import PatchConfig
from lowmem_patch.patching.dropout_masks import find_dropouts
from lowmem_patch.patching.fold import identity_affine
from lowmem_patch.patching.legality import FoldRules, has_data
from lowmem_patch.patching.notes import foreign_kernels
from lowmem_patch.patching.packed_qkv import find_packed_qkv
from lowmem_patch.patching.rotary import find_rotations
from lowmem_patch.patching.sites import Site
from lowmem_patch.patching.softmaxes import find_softmaxes
from lowmem_patch.tracing.consumers import (
    Consumer,
    Writes,
    consumers_behind_dropouts,
    find_consumers,
    weight_read_with,
    weight_trains,
)
from lowmem_patch.tracing.op_roles import Role, role_of
from lowmem_patch.tracing.probes import (
    NormSpec,
    looks_like_activation,
    looks_like_norm,
    match_activation,
    match_norm,
)
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.sharded import came_sharded
from lowmem_patch.tracing.trace import Call, Trace

__all__ = [
    "ActivationPatch",
    "DropoutPatch",
    "NormPatch",
    "Patch",
    "Plan",
    "make_plan",
    "trains_signature",
]

Affines = dict[str, tuple[Tensor | None, Tensor | None]]


@dataclasses.dataclass(frozen=True)
class NormPatch:
    """How one norm is replaced."""

    spec: NormSpec
    folded: bool
    feeds_autocast: bool
    sunk: bool
    one_copy: str | None
    shares_copy: bool = False  # Linears among other readers share one narrow copy under autocast
    output_saved: bool = False  # an op that is no Linear saves the output


@dataclasses.dataclass(frozen=True)
class ActivationPatch:
    """How one activation is replaced: ``codes`` or ``recompute``."""

    kind: ActivationKind
    strategy: str
    in_place: bool = False


@dataclasses.dataclass(frozen=True)
class DropoutPatch:
    """A dropout that keeps its mask in bits."""

    p: float


Patch = NormPatch | ActivationPatch | DropoutPatch


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sites in the order of the forward, the replacement of each site that is patched, and the
    layers that shall keep one copy of their input or none of their weight."""

    sites: tuple[Site, ...]
    patches: dict[str, Patch]
    adapters: Adapters = dataclasses.field(default_factory=Adapters)
    frozen_linears: tuple[str, ...] = ()  # those that shall keep no copy of their weight
    softmaxes: tuple[str, ...] = ()  # those of whose output a matmul shall keep no copy
    lowers: bool = False  # adapters compute in the activations' dtype
    rotations: dict[str, Rotation] = dataclasses.field(default_factory=dict)  # by module
    joint: tuple[str, ...] = ()  # those whose output is q, k and v


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        shadow: nn.Module,
        trace: Trace,
        config: PatchConfig,
        originals: Affines,
    ) -> None:
        self.model = model
        self.originals = originals
        self.modules = dict(shadow.named_modules())
        self.shadow = shadow
        self.trace = trace
        self.config = config
        self.writes = Writes(trace)
        self.foreign = foreign_kernels(trace)
        self.patches: dict[str, Patch] = {}
        self.specs: dict[object, NormSpec | str] = {}  # of equal modules
        keeps = config.linear_inputs == "keep"
        self.adapters = Adapters() if keeps else find_adapters(self.modules)

    def plan(self) -> Plan:
        calls: dict[str, list[Call]] = {}
        for call in self.trace.calls:
            calls.setdefault(call.name, []).append(call)
        order = sorted(calls, key=lambda name: calls[name][0].last_op)
        last_norm = next((n for n in reversed(order) if looks_like_norm(self.modules[n])), "")
        self.rules = FoldRules(self.model, self.modules, self.trace, last_norm)
        sites = [site for name in order if (site := self._site(name, calls[name])) is not None]
        lowers = self.config.linear_inputs == "activation_dtype"
        keeps = self.config.linear_inputs == "keep"
        frozen = () if keeps else frozen_linears(self.modules, self.adapters)
        softmaxes = () if keeps else find_softmaxes(self.trace, self.shadow, calls)
        if not keeps:
            for name, p in find_dropouts(self.trace, self.modules, self.adapters).items():
                self.patches[name] = DropoutPatch(p)
        fuses = self.config.attention == "fused"
        rotations = find_rotations(self.modules, calls) if fuses else {}
        joint = find_packed_qkv(self.trace, calls) if fuses else ()
        return Plan(
            tuple(sites), self.patches, self.adapters, frozen, softmaxes, lowers, rotations, joint,
        )  # fmt: skip

    def _site(self, name: str, calls: list[Call]) -> Site | None:
        module = self.modules[name]
        if name == "" or next(module.children(), None) is not None:
            return None
        if name in self.foreign:
            known = looks_like_norm(module) or looks_like_activation(module)
            return self._left(name, "other", "runs a kernel of its own") if known else None
        parameters = {n for n, _ in module.named_parameters()}
        elementwise = all(len(c.outputs) == 1 and len(c.inputs) == 1 for c in calls)
        if not parameters and elementwise:
            kind = match_activation(module)
            if kind is not None:
                return self._activation(name, kind, calls)
        if parameters <= {"weight", "bias"} and elementwise and not isinstance(module, nn.Linear):
            spec = match_norm(module, calls[0], self.trace, self.specs)
            if isinstance(spec, NormSpec):
                return self._norm(name, spec, calls)
            if looks_like_norm(module):
                return self._left(name, "other", spec)
        if looks_like_norm(module):
            return self._left(name, "other", "takes or returns more than one tensor")
        if looks_like_activation(module):
            return self._left(name, "other", f"no step table for {type(module).__name__}")
        return None

    def _left(self, name: str, kind: str, reason: str, consumers: tuple[str, ...] = ()) -> Site:
        own = self.trace.saved.own.get(name, 0)
        return Site(name, kind, "keep", reason, consumers, own, own)

    # norms

    def _norm(self, name: str, spec: NormSpec, calls: list[Call]) -> Site:
        outputs = [tensor for call in calls for tensor in call.outputs]
        readers = find_consumers(self.trace, outputs)
        consumers = tuple(dict.fromkeys(reader.text for reader in readers))
        choice = self.config.norms
        if choice == "keep":
            return self._left(name, spec.kind, "norms: keep", consumers)
        writer = next((reader.text for reader in readers if reader.use == "write"), None)
        writer = writer or self._written(calls, "outputs")
        if writer is not None:
            text = f"its output is written in place by {writer}"
            return self._left(name, spec.kind, text, consumers)
        gamma, beta = self._values(name)
        step, why_not = None, ""
        if choice == "fold":  # never unasked: a weight that others know would get another meaning
            step, why_not = self.rules.fold(name, spec, readers, gamma, beta)
        fold = step is not None
        if not fold and not self._share_gains(name, outputs, readers):
            text = "nothing to gain: no Linear keeps its output"
            return self._left(name, spec.kind, text, consumers)
        reason = self._norm_reason(fold, why_not, gamma, beta, spec)
        distinct = {id(reader.tensor) for reader in readers}
        linears = all(reader.use == "linear" for reader in readers) and bool(readers)
        rearranged = any(reader.reshaped for reader in readers)
        sunk = linears and len(distinct) == 1 and readers[0].copied and not rearranged
        sunk &= self._written(calls, "inputs") is None
        if sunk:
            reason += "; sunk behind the row moves to its Linear"
        # a norm inside an autocast region whose readers are outside must stay wide, as it was
        around = {call.autocast for call in calls}
        feeds_autocast = bool(readers) and all(
            r.use in ("linear", "autocast") and r.op is not None and {r.op.autocast} == around
            for r in readers
        )
        one_copy = self._one_copy(readers, feeds_autocast) if linears else None
        shares_copy = (
            not feeds_autocast
            and self.config.linear_inputs != "keep"
            and self._shares_copy(readers, around)
        )
        # Linears whose weights are sharded save the output of their own
        saved = self._saved_by_others(readers) or came_sharded(self.model)
        self.patches[name] = NormPatch(
            spec, fold, feeds_autocast, sunk, one_copy, shares_copy, saved
        )
        before = self.trace.saved.own.get(name, 0)
        strategy = "fold" if fold else "share"
        return Site(
            name, spec.kind, strategy, reason, consumers, before, 0, fold=step if fold else None
        )

    def _one_copy(self, readers: list[Consumer], feeds_autocast: bool) -> str | None:
        """When Linears would keep casts, of the output or of a frozen weight, if it did not wait."""
        prefixes = tuple(f"{name}." for name in self.adapters.layers)  # these see to it themselves
        others = [reader for reader in readers if not reader.text.startswith(prefixes)]
        if self.config.linear_inputs != "keep" and any(reader.cast for reader in others):
            return "always"
        return None if feeds_autocast and all(map(weight_trains, others)) else "autocast"

    def _shares_copy(self, readers: list[Consumer], around: set[bool]) -> bool:
        """Whether stock Linears read the very output, among readers of other kinds."""
        if any(reader.op is not None and {reader.op.autocast} != around for reader in readers):
            return False
        whole = [reader for reader in readers if not reader.copied and not reader.reshaped]
        names = [reader.linear.module for reader in whole if reader.linear is not None]
        return any(type(self.modules.get(name)) is nn.Linear for name in names)

    def _saved_by_others(self, readers: list[Consumer]) -> bool:
        """Whether an op that is no Linear saves the output, so that z beside it would be one more."""
        if any(reader.use == "output" or reader.reshaped for reader in readers):
            return True  # the caller holds it, or a Linear saves it as rows of another length
        others = [r for r in readers if r.use != "linear" and r.op is not None]
        if not others:
            return False
        keys = {storage_key(r.tensor) for r in others if r.tensor is not None}
        return any(
            not role_of(saver.function).has(Role.LINEAR)
            for storage in self.trace.saved.storages
            if storage.key in keys
            for saver in storage.savers
        )

    def _share_gains(self, name: str, outputs: list[Tensor], readers: list[Consumer]) -> bool:
        """Whether keeping the output beats keeping what the original keeps."""
        if any(reader.use in ("linear", "autocast") for reader in readers):
            return True
        size = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        return self.trace.saved.own.get(name, 0) > 1.5 * size

    def _norm_reason(
        self, fold: bool, why_not: str, gamma: Tensor | None, beta: Tensor | None, spec: NormSpec
    ) -> str:  # fmt: skip
        if fold:
            known = gamma is not None and has_data(gamma)
            if gamma is None or (known and identity_affine(gamma, beta, spec.weight_offset)):
                return "nothing left to fold: the affine is an identity"
            return "affine folded into its Linears"
        what = "output" if gamma is None and beta is None else "output, or z where gamma trains"
        return f"{what}, saved once for it and its Linears{f': {why_not}' if why_not else ''}"

    def _values(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        if name in self.originals:
            return self.originals[name]
        module = self.model.get_submodule(name)
        return getattr(module, "weight", None), getattr(module, "bias", None)

    def _waited_for(self, readers: list[Consumer]) -> str | None:
        """Who hangs a hook on the output, or on the gated product: the gradient must pass through it."""
        products = [t for r in readers if r.use == "product" and r.op for t in r.op.outputs]
        for reader in readers + (self._waiting(products) if products else []):
            if reader.op is not None and reader.op.role.has(Role.HOOK):
                return reader.text
        return None

    def _written(self, calls: list[Call], tensors: str) -> str | None:
        """Who writes in place into the inputs or outputs of these calls once they are over."""
        found = (self.writes.later(getattr(call, tensors), call.last_op) for call in calls)
        return next((text for text in found if text is not None), None)

    # activations

    def _waiting(self, outputs: list[Tensor]) -> list[Consumer]:
        """Who reads an activation's output or a gated product, also behind a dropout."""
        readers = find_consumers(self.trace, outputs)
        return consumers_behind_dropouts(self.trace, readers)

    def _recomputed(self, readers: list[Consumer]) -> str:
        outputs = [t for r in readers if r.use == "product" and r.op for t in r.op.outputs]
        reading = self._waiting(outputs)
        other = next((reader for reader in reading if weight_read_with(reader) is None), None)
        if other is None:
            return "their product recomputed"
        return f"the activation's output recomputed; their product is read by {other.text}"

    def _activation(self, name: str, kind: ActivationKind, calls: list[Call]) -> Site:
        readers = self._waiting([tensor for call in calls for tensor in call.outputs])
        consumers = tuple(dict.fromkeys(reader.text for reader in readers))
        choice = self.config.activations
        if choice == "keep":
            return self._left(name, kind, "activations: keep", consumers)
        writers = [reader for reader in readers if reader.use == "write"]
        own = [w for w in writers if w.op is not None and w.op.module == name]
        in_place = bool(own) and len(own) == len(writers)
        writer = writers[0].text if writers and not in_place else self._written(calls, "outputs")
        if writer is not None:
            text = f"its output is written in place by {writer}"
            return self._left(name, kind, text, consumers)
        rows = [reader for reader in readers if not reader.reshaped]  # what can be deferred
        gated = any(reader.use == "product" for reader in rows)
        linear = next((reader for reader in rows if weight_trains(reader)), None)
        waited = self._waited_for(readers)
        if choice == "auto":
            waits = waited is None and (gated or linear is not None)
            strategy = "recompute" if waits or kind not in STEP_TABLES else "codes"
        else:
            strategy = choice
        if strategy == "codes" and kind not in STEP_TABLES:
            text = f"no step table for {kind}: `recompute` is exact"
            return self._left(name, kind, text, consumers)
        before = self.trace.saved.own.get(name, 0)
        if strategy == "codes" and not before:
            return self._left(
                name,
                kind,
                "nothing to gain: its input is kept for another op, or not at all",
                consumers,
            )
        if strategy == "codes":
            reason = "2-bit codes in place of its input"
            if choice == "auto":
                why = "no Linear that trains reads it" if waited is None else f"read by {waited}"
                reason += f": {why}"
        elif in_place:
            text = "cannot recompute: it works in place, where later readers of its input get its output"
            return self._left(name, kind, text, consumers)
        elif waited is not None:
            return self._left(name, kind, f"cannot recompute: it is read by {waited}", consumers)
        elif (writer := self._written(calls, "inputs")) is not None:
            text = f"cannot recompute: its input is written in place by {writer}"
            return self._left(name, kind, text, consumers)
        elif gated:
            reason = f"gate and up kept, {self._recomputed(readers)}"
        elif linear is not None:
            reason = f"input kept, output recomputed for the weight gradient of {linear.text}"
        else:
            text = readers[0].text if readers else "nothing"
            return self._left(
                name, kind, f"nothing to gain: its output is read by {text}", consumers
            )
        self.patches[name] = ActivationPatch(kind, strategy, in_place)
        return Site(
            name, kind, strategy, reason, consumers, before, 0, approximate=strategy == "codes"
        )


def make_plan(
    model: nn.Module, shadow: nn.Module, trace: Trace, config: PatchConfig, originals: Affines
) -> Plan:
    """Plan every site of ``model`` from a trace of its shadow (the model itself for a real trace).

    ``originals`` holds gamma and beta of norms whose affine an earlier patch folded away.
    """
    return _Planner(model, shadow, trace, config, originals).plan()


def trains_signature(model: nn.Module) -> int:
    """A number that changes when what trains, or the model's structure, changes; the same in any process."""
    facts = [(name, p.requires_grad, str(p.dtype)) for name, p in model.named_parameters()]
    return zlib.crc32(repr(facts).encode())

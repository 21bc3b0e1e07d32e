"""share: a norm and the Linears behind it save one tensor between them (MS-BP, arXiv 2406.16282).

The norm saves its output, which its Linears save anyway, and recovers z from it in backward; or z, where the
output does not tell it (`lowmem_patch.nn.gammas`). No weight changes.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STOCK_NAMES
from lowmem_patch.nn.norms import (
    MSLayerNorm,
    MSNorm,
    MSRMSNorm,
    NamedMSLayerNorm,
    NamedMSRMSNorm,
    OutputUse,
    StockMSLayerNorm,
    StockMSRMSNorm,
)
from lowmem_patch.strategies.activations import ActivationSite, activation_sites, products
from lowmem_patch.strategies.chains import chain_sources
from lowmem_patch.strategies.head import head_names
from lowmem_patch.strategies.lora import inside_adapters
from lowmem_patch.strategies.norm_sites import NormSite, eps_name, norm_sites, read_as_it_lies
from lowmem_patch.strategies.protocol import Facts, Found, Skip, once
from lowmem_patch.strategies.rotary import is_turned
from lowmem_patch.strategies.swap import Swap
from lowmem_patch.tracing.call_arguments import CalledFunction, dropout_call
from lowmem_patch.tracing.consumers import (
    Consumer,
    consumers_behind_dropouts,
    feed_autocast,
    gathers_for_a_weight,
    weight_read_with,
    weight_trains,
)
from lowmem_patch.tracing.dataflow import forward
from lowmem_patch.tracing.op_roles import MATMULS, OF_ELEMENTS, REARRANGES, SELECTS, Role, role_of
from lowmem_patch.tracing.probes import NormSpec
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op

_MOVES = REARRANGES | SELECTS | Role.ALIAS | Role.EXPAND | Role.REPEAT
_AS_IT_LIES = OF_ELEMENTS | Role.CONCATENATION  # what rotary embeddings are written with
_OR_Z = ", or its normalised input z if a gamma is so near 0 that the output does not give z"

_TURNED = (
    "a number for each row kept, and its normalised input z if a gamma is near 0: the output is told by what "
    "the rotary embedding makes of it, which attention saves"
)
_COMPUTED = (
    "nothing kept: its input is computed again, and so is the norm, for the Linears that read it"
)


@dataclasses.dataclass(frozen=True)
class SharedNorm(Swap):
    """A norm that saves its output, or z."""

    spec: NormSpec
    use: OutputUse

    folded: ClassVar[bool] = False

    def make(self, original: nn.Module) -> MSNorm:
        spec = self.spec
        if self.function is not None:
            original = _module_of(self.function, spec.settings.eps)
        norm = _class_for(original, spec)(
            getattr(original, spec.names[0], None),
            getattr(original, spec.names[1], None),
            spec.settings,
            folded=self.folded,
            use=self.use,
            eps_name=eps_name(original, spec.settings.eps),
            names=spec.names,
            dim=spec.dim,
        )
        if self.function is not None:
            norm.eps = original.eps
        # in the order of the original's state dict
        own = {name: norm._parameters.pop(name) for name in original._parameters}
        norm._parameters.update(own)
        return norm


def _module_of(function: CalledFunction, eps: float) -> nn.Module:
    """A module without weight and bias that has the eps of a function, None where torch chooses it."""
    module = nn.Identity()
    given = any(type(item) is float for item in (*function.args, *dict(function.kwargs).values()))
    chosen = function.name == "rms_norm" and not given
    module.eps = None if chosen else eps  # type: ignore[assignment]  # nn.Module's __setattr__
    return module


def _class_for(original: nn.Module, spec: NormSpec) -> type[MSNorm]:
    if spec.names != STOCK_NAMES:
        return NamedMSLayerNorm if spec.kind == "layer_norm" else NamedMSRMSNorm
    if spec.kind == "layer_norm":
        return StockMSLayerNorm if isinstance(original, nn.LayerNorm) else MSLayerNorm
    return StockMSRMSNorm if isinstance(original, nn.RMSNorm) else MSRMSNorm


def find(facts: Facts, config: PatchConfig) -> Found:
    """Every norm whose output a Linear saves, or that saves more than its output."""
    found = Found()
    for site in norm_sites(facts, config) if config.norms != "fold" else ():
        found.add(site if isinstance(site, Skip) else share_or_skip(facts, config, site))
    return found


def share_or_skip(
    facts: Facts, config: PatchConfig, site: NormSite, why_not_folded: str = ""
) -> SharedNorm | Skip:
    """The patch of a norm, or why there is none."""
    consumers = _who_saves_it(facts, config, site.consumers)
    whole = site.gamma is None and site.beta is None
    inside = inside_adapters(facts, config)
    read = any(weight_trains(c) or c.text.startswith(inside) for c in consumers)
    who = (
        "the norm and its Linears save one tensor"
        if read
        else "one tensor is saved in place of the input"
    )
    reason = f"{who}: the norm's output" + _OR_Z * (not whole) + _no_gain(facts, site, read)
    if why_not_folded:
        reason += f"; not folded: {why_not_folded}"
    patch = shared_norm(facts, config, site, reason)
    if patch.use.of_computed:
        return dataclasses.replace(patch, reason=_COMPUTED, saves=0)
    if patch.use.turned and facts.saved(site.name):
        return dataclasses.replace(patch, reason=_TURNED)
    more = facts.saved(site.name) > 1.5 * sum(output.nbytes for output in site.outputs)
    read_by_linears = any(consumer.use in ("linear", "autocast") for consumer in consumers)
    if read_by_linears or more or _is_saved(facts, config, site):
        return patch
    return site.skip("nothing to gain: nobody saves its output")


def _no_gain(facts: Facts, site: NormSite, read: bool) -> str:
    """Why a norm saves as many bytes as before; nothing where it saves fewer."""
    if not any(tensor.requires_grad for tensor in site.outputs):
        return "; nothing up to it trains, and it saves nothing itself"
    if read or facts.is_sharded or any(call.autocast for call in facts.calls_of(site.name)):
        return ""
    # the output that frozen Linears alone read is as many bytes as the input is
    weights = [weight_read_with(c) if c.use == "linear" else None for c in site.consumers]
    frozen = all(weight is not None and not weight.requires_grad for weight in weights)
    size = sum(tensor.nbytes for tensor in site.outputs)
    if frozen and facts.saved(site.name) < 1.5 * size:
        return "; it saves nothing here, since the Linears that read it are frozen and have no adapters"
    return ""


def shared_norm(facts: Facts, config: PatchConfig, site: NormSite, reason: str) -> SharedNorm:
    """The patch of a norm, by who reads its output."""
    consumers = site.consumers
    linears = all(consumer.use == "linear" for consumer in consumers) and bool(consumers)
    behind_row_moves = (
        linears and _is_behind_row_moves(consumers) and facts.written(site.name, "inputs") is None
    )
    # a norm inside an autocast region whose readers are outside must stay in high precision, as it was
    around = {call.autocast for call in facts.calls_of(site.name)}
    feeds_autocast = feed_autocast(consumers, around)
    inside = inside_adapters(facts, config)
    # adapter layers see to their input themselves
    others = [consumer for consumer in consumers if not consumer.text.startswith(inside)]
    saves_casts = config.linear_inputs != "keep"
    behind = _who_saves_it(facts, config, consumers)
    dropped = _is_dropped(behind, consumers)
    lies_as_input = _may_lie_as_input(facts, config, site, behind)
    turned = lies_as_input and is_turned(facts, config, site.name, site.outputs)
    use = OutputUse(
        feeds_autocast=feeds_autocast,
        full_precision_autocast=site.spec.full_precision_autocast,
        output=site.spec.output,
        behind_row_moves=behind_row_moves,
        of_computed=_is_of_computed(facts, config, site),
        one_copy=_one_copy(others, feeds_autocast, saves_casts, linears, dropped),
        shares_copy=not feeds_autocast and saves_casts and _shares_copy(facts, consumers, around),
        output_saved=dropped
        or turned
        or facts.is_sharded
        or _is_saved_whole(facts, config, consumers),
        output_moved=any(_reads_a_moved_view(consumer, site.outputs) for consumer in consumers),
        lies_as_input=lies_as_input,
        turned=turned,
    )
    return SharedNorm(
        site.name,
        "share",
        spec=site.spec,
        use=use,
        reason=reason
        + "; computed at its Linear, once the rows are moved there" * behind_row_moves,
        kind=site.spec.kind,
        consumers=site.texts,
        function=site.function,
        saves=_statistics(site),
    )


def _is_of_computed(facts: Facts, config: PatchConfig, site: NormSite) -> bool:
    """Whether activations that are computed again make all inputs of a norm, or gated products of those do;
    and Linears alone read it."""
    if site.spec.dim != -1 or not read_as_it_lies(site.consumers):
        return False
    made, calls = _computed(facts, config), facts.calls_of(site.name)
    return bool(calls) and all(call.inputs and id(call.inputs[0]) in made for call in calls)


@once
def _computed(facts: Facts, config: PatchConfig) -> set[int]:
    def drops_nothing(op: Op, _: Tensor) -> bool:
        return op.role.has(Role.DROPOUT) and dropout_call(op.args, op.kwargs).p == 0

    return {
        id(path.end)
        for site in activation_sites(facts, config)
        if isinstance(site, ActivationSite) and site.chosen == "recompute"
        for made in ([*facts.outputs(site.name), *products(site.consumers)],)
        for path in forward(facts.trace, made, drops_nothing)
    }


def _may_lie_as_input(
    facts: Facts, config: PatchConfig, site: NormSite, behind: list[Consumer]
) -> bool:
    # a function may have Linears inside (nn.MultiheadAttention)
    for one in behind:
        if one.use == "linear" or (one.op is not None and one.op.role.has(Role.HOLDS_LINEARS)):
            return False
    if _feeds_matmuls(facts, site):
        return False
    # whoever saves it may ask for a view, of which torch's own norm allows any
    return not _is_saved(facts, config, site, Role.FUSED_ATTENTION)


def _feeds_matmuls(facts: Facts, site: NormSite) -> bool:
    """Whether a matmul of two tensors reads the output, be it behind views, scales or rotations: attention
    that is written with matmuls, which copy rows that do not lie contiguously, and save the copy."""
    function = f".{site.function}"
    around = site.name.removesuffix(function) if site.function else site.name.rpartition(".")[0]

    def passes_on(op: Op, tensor: Tensor) -> bool:
        if op.writes or op.opaque:
            return False
        # other modules add it to what they read
        inside = not around or f"{op.module}.".startswith(f"{around}.")
        return op.role.has(_MOVES) or (inside and op.role.has(_AS_IT_LIES))

    return any(
        op.role.has(MATMULS)
        for path in forward(facts.trace, site.outputs, passes_on)
        for op in facts.trace.consumers.get(id(path.end), ())
    )


def _statistics(site: NormSite) -> int:
    """Bytes of the number that is saved for each row."""
    size = max(torch.float32.itemsize, site.outputs[0].element_size())
    return sum(size * (one.numel() // one.shape[site.spec.dim]) for one in site.outputs)


def _who_saves_it(facts: Facts, config: PatchConfig, consumers: list[Consumer]) -> list[Consumer]:
    """``consumers``, with those behind a dropout that save its input and the mask."""
    if config.linear_inputs == "keep":
        return consumers
    return consumers_behind_dropouts(facts.trace, consumers)


def _reads_a_moved_view(consumer: Consumer, outputs: list[Tensor]) -> bool:
    """Whether a Linear reads a view of the output of which it would save a contiguous copy of its own."""
    view = consumer.tensor
    if consumer.use != "linear" or view is None:
        return False
    whole = next((one for one in outputs if storage_key(one) == storage_key(view)), None)
    if whole is None:  # a copy was made on the way
        return not view.is_contiguous()
    return view is not whole and not _would_be_contiguous(view, whole)


def _would_be_contiguous(view: Tensor, whole: Tensor) -> bool:
    """Whether a view of a norm's output is contiguous if the output is, as a patched norm's. The original's
    may lie in memory as a transposed input does."""
    if whole.is_contiguous():
        return view.is_contiguous()
    # a stride of the view is a number of steps along one dimension of the whole
    steps = zip(whole.stride(), torch.empty(whole.shape, device="meta").stride(), strict=True)
    known = sorted(
        pair for pair, size in zip(steps, whole.shape, strict=True) if size > 1 and pair[0]
    )
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        if size > 1:
            own, contiguous = max((pair for pair in known if pair[0] <= stride), default=(1, 0))
            if stride // own * contiguous != expected:
                return False
            expected *= size
    return True


def _is_behind_row_moves(consumers: list[Consumer]) -> bool:
    """Whether Linears read one and the same copy of the output, its rows in another order."""
    distinct = {id(consumer.tensor) for consumer in consumers}
    rearranged = any(consumer.reshaped for consumer in consumers)
    return len(distinct) == 1 and consumers[0].copied and not rearranged


def _is_dropped(behind: list[Consumer], consumers: list[Consumer]) -> bool:
    """Whether Linears behind a dropout save the very output, with the bits of the mask."""
    return any(weight_trains(consumer) and consumer not in consumers for consumer in behind)


def _one_copy(
    consumers: list[Consumer], feeds_autocast: bool, saves_casts: bool, linears: bool, dropped: bool
) -> str | None:
    """When the output shall wait, because Linears would save casts, of it or of a frozen weight, or what a
    dropout gives."""
    if saves_casts and any(
        c.cast and c.op is not None and c.op.role.has(Role.LINEAR) for c in consumers
    ):
        return "always"  # a router of experts reads one in float32, by a weight that is cast too
    if not linears:
        return "always" if dropped else None
    return None if feeds_autocast and all(map(weight_trains, consumers)) else "autocast"


def _shares_copy(facts: Facts, consumers: list[Consumer], around: set[bool]) -> bool:
    """Whether stock Linears read the very output, among consumers of other kinds."""
    if any(c.op is not None and {c.op.autocast} != around for c in consumers):
        return False
    whole = [consumer for consumer in consumers if not consumer.copied and not consumer.reshaped]
    names = [consumer.linear.module for consumer in whole if consumer.linear is not None]
    return any(type(facts.modules.get(name)) is nn.Linear for name in names)


def _is_saved(
    facts: Facts, config: PatchConfig, site: NormSite, besides: Role | None = None
) -> bool:
    """Whether somebody besides the norm saves its output, and besides ops of these roles: a chain, a
    convolution, a product."""
    if chain_sources(facts, config) & set(map(id, site.outputs)):
        return True
    return any(
        besides is None or not role_of(saver.function).has(besides)
        for saver in facts.savers_of(*site.outputs)
        if not f"{saver.module}.".startswith(f"{site.name}.")
    )


def _is_saved_whole(facts: Facts, config: PatchConfig, consumers: list[Consumer]) -> bool:
    """Whether an op that is no Linear saves the output, so that z beside it would be one more; or a head,
    which saves rows that it reads. Sharded Linears do so as well."""
    heads, sources = head_names(facts, config), chain_sources(facts, config)
    if any(c.use == "linear" and c.text in heads for c in consumers):
        return True
    if any(c.use == "output" or c.reshaped or id(c.tensor) in sources for c in consumers):
        return True  # the caller holds it, or a Linear saves it as rows of another length, or a chain does
    if any(c.op is not None and gathers_for_a_weight(facts.trace, c.op) for c in consumers):
        return True  # experts, in the place of the rows
    others = (c.tensor for c in consumers if c.use != "linear" and c.tensor is not None)
    return any(not role_of(saver.function).has(Role.LINEAR) for saver in facts.savers_of(*others))

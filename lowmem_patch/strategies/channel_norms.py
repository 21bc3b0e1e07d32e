"""channel norms: a BatchNorm or GroupNorm and the activation behind it save the norm's input alone; exact."""

from __future__ import annotations

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.channel_norms import DeferChannelNorms
from lowmem_patch.nn.modes import run_under
from lowmem_patch.strategies import recompute
from lowmem_patch.strategies.activations import next_to_nothing
from lowmem_patch.strategies.normed_channels import normed_channels, residual_sums
from lowmem_patch.strategies.protocol import Change, Facts, Found, Skip
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.probes import looks_like_norm
from lowmem_patch.tracing.trace import Op

_WORTH = 1e-4


def find(facts: Facts, config: PatchConfig) -> Found:
    """The norms over channels that recomputed activations alone read, and those that are left alone."""
    found, readers = Found(), _readers(facts, config)
    sums = _summed(facts)
    waiting = {key: key for key in normed_channels(facts)} | sums
    by_module: dict[str, list[Op]] = {}
    for op in facts.trace.ops:
        if op.role.has(Role.CHANNEL_NORM):
            by_module.setdefault(op.module, []).append(op)
    for name, ops in by_module.items():
        kind, outputs = ops[0].name, [op.outputs[0] for op in ops]
        read = all(waiting.get(id(output)) in readers for output in outputs)
        left = _left_alone(facts, config, outputs, read)
        if left is None:
            reader, summed = readers[waiting[id(outputs[0])]], id(outputs[0]) in sums
            what = "norm, residual sum" if summed else "norm"
            reason = f"input kept, {what} and activation recomputed from it for {reader}"
            found.add(
                Change(
                    name, recompute.NAME, run_under, (DeferChannelNorms, summed),
                    reason=reason, kind=kind, consumers=(reader,),
                )
            )  # fmt: skip
        elif looks_like_norm(facts.modules[name]):
            found.add(Skip(name, kind, left))
    return found


def _readers(facts: Facts, config: PatchConfig) -> dict[int, str]:
    """The activations that are recomputed, by the ids of what they read."""
    return {
        id(call.inputs[0]): patch.site
        for patch in recompute.find(facts, config).patches
        if not patch.gated
        for call in facts.calls_of(patch.site)
        if call.inputs
    }


def _summed(facts: Facts) -> dict[int, int]:
    """The ids of residual sums, by those of what norms make for them."""
    return {
        id(norm.outputs[0]): made
        for made, summed in residual_sums(facts).items()
        for norm in summed.norms
    }


def _left_alone(facts: Facts, config: PatchConfig, outputs: list[Tensor], read: bool) -> str | None:
    if config.norms == "keep":
        return "norms: keep"
    if not read:
        return "nothing to gain: an activation that is recomputed would have to be the only reader"
    return next_to_nothing(facts, sum(output.nbytes for output in outputs), _WORTH)

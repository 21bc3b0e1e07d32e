"""Sentences of a report about norms and activations that are no sites."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.planning.names import listed
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.call_arguments import attention_call, dropout_call
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.probes import looks_like_norm, match_activation
from lowmem_patch.tracing.trace import describe

_NAMED = 3


def notes_of_no_sites(facts: Facts, sites: Collection[str]) -> Iterator[str]:
    """What a report says of norms and activations that are no sites."""
    if places := _functional_calls(facts, sites):
        yield (
            f"norms and activations that are called as functions, left alone: {len(places)} "
            f"({listed(dict.fromkeys(places), _NAMED)})"
        )
    if names := _not_run(facts):
        mend = "pass example_inputs= that reach them"
        if facts.shadow is facts.model:  # on fake tensors nothing is left to chance
            mend += ", or, if training skips layers at random (layerdrop), patch while that is turned off"
        yield (
            f"{len(names)} norms or activations did not run on the example inputs: left alone "
            f"({listed(names, _NAMED)}); {mend}"
        )
    if places := [describe(facts.modules[name], name) for name in facts.foreign_kernels]:
        named = listed(places, _NAMED)
        yield f"{len(places)} modules run kernels of their own, which are left alone ({named})"


def note_of_dropouts(facts: Facts) -> Iterator[str]:
    """What a CPU saves of dropouts beyond what a GPU does, where the model lies on a CPU and has some."""
    ops = [op for op in facts.trace.ops if op.outputs and op.outputs[0].device.type == "cpu"]
    masks = attention = False
    for op in ops:
        if op.role.has(Role.DROPOUT):
            masks |= 0 < dropout_call(op.args, op.kwargs).p < 1
        elif op.name == "scaled_dot_product_attention":
            attention |= attention_call(op.name, op.args, op.kwargs).dropout_p > 0
    parts = ["the probabilities of attention, which runs as matmuls"] if attention else []
    parts += ["(unpatched) a mask as wide as the tensor"] if masks else []
    if parts:
        yield (
            f"for dropout a CPU saves {', and '.join(parts)}: a GPU saves fewer bytes, as inspect counts"
        )


def _functional_calls(facts: Facts, sites: Collection[str]) -> list[str]:
    """Where norms and activations are called as functions outside the sites."""
    called = {call.first_op for site in facts.functions.values() for call in site.calls}
    return [
        f"F.{op.name} in {op.module or 'the model itself'}"
        for number, op in enumerate(facts.trace.ops)
        # of activations those that save their input; an output is often saved by its reader anyway
        if (
            op.role.has(Role.ROW_NORM)
            or (op.name in STEP_TABLES and not op.role.has(Role.SAVES_OUTPUT))
        )
        and op.module not in sites
        and number not in called
    ]


def _not_run(facts: Facts) -> list[str]:
    """Norms and activations that did not run (an image tower, where the inputs are text)."""
    ran = {call.name for call in facts.trace.calls}
    # by type: an activation is told by running it, and experts are many
    known: dict[type, bool] = {}
    names = []
    for name, module in facts.shadow.named_modules():
        if name in ran:
            continue
        if type(module) not in known:
            known[type(module)] = looks_like_norm(module) or match_activation(module) is not None
        if known[type(module)]:
            names.append(name)
    return names

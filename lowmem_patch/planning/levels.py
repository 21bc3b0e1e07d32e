"""A step of a patched shadow whose blocks have levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from lowmem_patch.memory.blocks import shortened
from lowmem_patch.nn.checkpointing import is_checkpointed, keep_block
from lowmem_patch.planning.few_runs import FewRuns
from lowmem_patch.planning.timeline import Timeline, run_timeline
from lowmem_patch.strategies.checkpointing import Blocks, patches_of
from lowmem_patch.strategies.protocol import Target
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow


def run_levels(
    shadow: Shadow,
    blocks: Blocks,
    levels: Mapping[str, str],
    *,
    settled: bool = False,
    inputs: ExampleInputs | None = None,
    few: FewRuns | None = None,
    accumulates: bool = False,
) -> Timeline:
    """A step in which the blocks have these levels; afterwards they have none.

    Args:
        settled: no input is on its way to the host any more when the forward ends.
        inputs: in the place of the shadow's.
        few: only these blocks of a list are run.
        accumulates: as `run_timeline`.

    Raises:
        TraceError: the step fails.
    """
    model = shadow.model
    patches = patches_of(blocks, levels)
    if inputs is not None:
        shadow = dataclasses.replace(shadow, inputs=inputs)
    hosts = [patch.how.host for patch in patches if patch.how.host is not None]
    settle: Callable[[], None] | None = hosts[0].release if settled and hosts else None
    path, depth = (few.path, few.depth) if few else (None, None)
    with shortened(model, path, depth):
        target, there = Target(model), {name for name, _ in model.named_modules()}
        try:
            for patch in patches:
                if patch.site in there:
                    patch.apply(target)
            sites = [block.site for block in blocks.blocks]
            return run_timeline(shadow, sites, settle, accumulates=accumulates)
        finally:
            for module in model.modules():
                if is_checkpointed(module):
                    keep_block(module)

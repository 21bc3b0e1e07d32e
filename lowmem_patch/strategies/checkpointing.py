"""checkpointing: blocks that save their input alone, and run again in backward; or all that they save waits
in host memory.

Which blocks a model has is a fact of its trace: the modules of a list that run one after the other, each on
what the one before gave. Which of them are run again is decided from a budget (`lowmem_patch.planning.fit`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from lowmem_patch.nn.caches import ForwardCaches, watch_caches
from lowmem_patch.nn.checkpointing import Recompute, checkpointed
from lowmem_patch.nn.host_memory import HostMemory
from lowmem_patch.nn.offloading import Await, LastRun, Offload, awaiting, offloaded
from lowmem_patch.nn.own import give_forward_around, has_foreign_forward
from lowmem_patch.strategies.protocol import Facts, Patch, Target
from lowmem_patch.tracing.base_model import is_leaf
from lowmem_patch.tracing.shadow import tensors_in
from lowmem_patch.tracing.trace import Call

_NAME = "checkpointing"
# what a block may do
LEVELS = ("patched", "offloaded", "attention", "checkpointed", "host", "segment", "halves")
ALONE = ("patched", "attention", "checkpointed", "host")  # without its neighbours
_INPUTS = {"segment": "segment", "halves": "segment", "host": "host"}  # else on the device
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# of its saved bytes that a block's own list of blocks has, so that these are the blocks
_MOST = 0.5
_FORWARDS: dict[type, Any] = {Recompute: checkpointed, Offload: offloaded, Await: awaiting}


@dataclasses.dataclass(frozen=True)
class LevelPatch(Patch):
    """A block that is run again in backward, or whose saved tensors wait in host memory, or before which what
    an earlier one saved has left the device."""

    how: Recompute | Offload | Await

    def apply(self, target: Target) -> None:
        block = target.model.get_submodule(self.site)
        give_forward_around(block, _FORWARDS[type(self.how)], self.how)
        if not isinstance(self.how, Await):
            watch_caches(target.model, self.how.caches)


@dataclasses.dataclass(frozen=True)
class Block:
    """One module that may be run again.

    Attributes:
        site: its path.
        buffers: names of those that its forward writes.
        refusal: why it cannot be run again, or an empty text.
    """

    site: str
    buffers: tuple[str, ...] = ()
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """One call of a block, in the order of the forward.

    Attributes:
        block: its number.
        links: it reads the very tensor that the run before gave.
    """

    block: int
    links: bool


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a model and their runs.

    Attributes:
        lag: runs that a copy to the host may take, from an offloaded run on.
    """

    blocks: tuple[Block, ...]
    runs: tuple[BlockRun, ...]
    lag: int = 1

    def awaits(self, number: int) -> int | None:
        """The run before which what a run saved has left, if it is offloaded; None where it cannot be: there
        is no such run, or one of the two blocks runs several times."""
        later = number + self.lag
        if later >= len(self.runs):
            return None
        ran = [run.block for run in self.runs]
        once = all(ran.count(ran[one]) == 1 for one in (number, later))
        return later if once else None


def find_blocks(facts: Facts) -> Blocks:
    """The repeated blocks of a traced model, through which the gradient runs; of stages that hold blocks,
    the blocks."""
    chains = _chains(facts)
    sites: list[str] = []
    for chain in _outermost(chains):
        sites += _members(facts, chains, chain)
    chosen = {site for site in sites if any(t.requires_grad for t in facts.outputs(site))}
    calls = [call for call in facts.trace.calls if call.name in chosen]
    calls.sort(key=lambda call: call.first_op)
    order = list(dict.fromkeys(call.name for call in calls))
    runs = tuple(
        BlockRun(order.index(call.name), number > 0 and _is_link(calls[number - 1], call))
        for number, call in enumerate(calls)
    )
    return Blocks(tuple(_block(facts, site) for site in order), runs)


def _block(facts: Facts, site: str) -> Block:
    module = facts.modules[site]
    refusal = "other code gave it a forward of its own" if has_foreign_forward(module) else ""
    written = tuple(
        f"{name}.{buffer}" if name else buffer
        for name, inner in module.named_modules()
        if getattr(inner, "running_mean", None) is not None  # statistics, which training updates
        for buffer in inner._buffers
    )
    return Block(site, written, refusal)


def _inside(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.") or outer == ""


def _outermost(names: Collection[str]) -> list[str]:
    return [n for n in names if not any(other != n and _inside(other, n) for other in names)]


def _chains(facts: Facts) -> dict[str, list[str]]:
    """Lists of blocks: their members. Where no list repeats any, the outermost ones count."""
    lists = {name: _blocks_in(facts, name) for name in facts.modules}
    repeated = {name: members for name, members in lists.items() if _repeats(facts, members)}
    known = [name for name, members in lists.items() if members]
    return repeated or {name: lists[name] for name in _outermost(known)}


def _blocks_in(facts: Facts, name: str) -> list[str]:
    module = facts.modules[name]
    if not isinstance(module, _LISTS):
        return []
    slots = (f"{name}.{slot}" if name else slot for slot in module._modules)
    ran = [(slot, facts.modules[slot]) for slot in slots if slot in facts.calls]
    # one layer is no block
    return [slot for slot, m in ran if not is_leaf(m) and next(m.parameters(), None) is not None]


def _repeats(facts: Facts, members: list[str]) -> bool:
    """Whether blocks of one class run one after the other, each on what the one before gave (experts run
    side by side)."""
    calls = sorted(
        (call for member in members for call in facts.calls[member]), key=lambda c: c.first_op
    )
    classes = [type(facts.modules[call.name]) for call in calls]
    pairs = itertools.pairwise(calls)
    return len(set(classes)) < len(classes) and all(_follows(facts, *pair) for pair in pairs)


def _follows(facts: Facts, first: Call, second: Call) -> bool:
    """Whether the second call reads what was made from the outputs of the first."""
    made = {id(tensor) for tensor in first.outputs}
    wanted = {id(tensor) for tensor in second.inputs}
    for op in facts.trace.ops[first.last_op : second.first_op]:
        if any(id(tensor) in made for tensor in tensors_in(op.args)):
            made.update(id(output) for output in op.outputs)
    return bool(made & wanted)


def _is_link(first: Call, second: Call) -> bool:
    return bool(first.outputs) and any(tensor is first.outputs[0] for tensor in second.inputs)


def _members(facts: Facts, chains: Mapping[str, list[str]], chain: str) -> Iterator[str]:
    """The members of a list, or the blocks that a member is mostly made of."""
    for member in chains[chain]:
        inner = [name for name in chains if name == member or _inside(member, name)]
        found = [site for name in _outermost(inner) for site in _members(facts, chains, name)]
        if found and sum(_bytes(facts, s) for s in found) >= _MOST * _bytes(facts, member):
            yield from found
        else:
            yield member


def _bytes(facts: Facts, site: str) -> int:
    saved = facts.trace.saved.by_module
    return sum(size for name, size in saved.items() if name == site or _inside(site, name))


def patches_of(
    blocks: Blocks, levels: Mapping[str, str], reasons: Mapping[str, str] | None = None
) -> tuple[LevelPatch, ...]:
    """The patches that give each block its level.

    Args:
        levels: by site, of ``LEVELS``; blocks that are not named stay as patched. A run of blocks of
            the level ``"segment"`` or ``"halves"`` continues the segment that the nearest block before it
            begins, which is ``"checkpointed"`` or ``"host"``. ``"offloaded"`` stays as patched where no
            later block can await it.
        reasons: by site, what a report says.
    """
    recomputes = bool(set(levels.values()) - {"patched", "offloaded"})
    host, caches = HostMemory(), ForwardCaches(recomputes)
    first_runs = {run.block: number for number, run in reversed(list(enumerate(blocks.runs)))}
    found: list[LevelPatch] = []
    awaiting: list[LevelPatch] = []  # around the forwards that the levels of these blocks give
    for number, block in enumerate(blocks.blocks):
        level, reason = levels.get(block.site, "patched"), (reasons or {}).get(block.site, "")
        if level == "offloaded":
            later = blocks.awaits(first_runs[number])
            if later is None:
                continue
            last = LastRun()
            found.append(LevelPatch(block.site, _NAME, Offload(host, last, caches), reason=reason))
            site = blocks.blocks[blocks.runs[later].block].site
            awaiting.append(LevelPatch(site, _NAME, Await(host, last)))
        elif level != "patched":
            behind = blocks.runs[first_runs[number] + 1 :]
            next_level = levels.get(blocks.blocks[behind[0].block].site) if behind else None
            how = Recompute(
                attention=level == "attention",
                input=_INPUTS.get(level, "device"),
                continues=next_level in ("segment", "halves"),
                halves="halves" in (level, next_level),
                buffers=block.buffers,
                host=host if level == "host" else None,
                caches=caches,
                repeats=sum(run.block == number for run in blocks.runs) > 1,
            )
            found.append(LevelPatch(block.site, _NAME, how, reason=reason))
    return *found, *awaiting

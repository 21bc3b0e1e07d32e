"""chains: what a chain of elementwise functions computes is computed again in backward; exact.

An activation that a forward writes as many functions (``gate * torch.sigmoid(1.7 * gate) * (up + 1)``) saves
many tensors of the full width. What enters the chain is saved in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.chains import VIEWED, DeferChains
from lowmem_patch.nn.modes import run_under
from lowmem_patch.strategies import codes, recompute
from lowmem_patch.strategies.activations import is_norm, next_to_nothing
from lowmem_patch.strategies.protocol import Facts, Found, Patch, Target, forward_obstacle
from lowmem_patch.tracing.call_arguments import ElementwiseCall, elementwise_call
from lowmem_patch.tracing.chains import Chain, find_chains
from lowmem_patch.tracing.consumers import Consumer, find_consumers, matmul_of
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op

_KIND = "chain"
# functions: a single product, or a cast, is its readers' to know, but for one that is read through a view
_FEWEST = 2
_WORTH = 1e-3  # Python looks at each function of the forward


@dataclasses.dataclass(frozen=True)
class DeferredChains(Patch):
    """A module whose forward calls such functions.

    Attributes:
        calls: of the functions.
        viewed: Linears read views of what they give.
    """

    strategy = "recompute"

    calls: frozenset[ElementwiseCall]
    viewed: bool

    def apply(self, target: Target) -> None:
        module = target.model.get_submodule(self.site)
        run_under(module, DeferChains, self.calls, self.viewed)


def find(facts: Facts, config: PatchConfig) -> Found:
    """The modules whose chains save more than what enters them, and that no other strategy takes."""
    found = Found()
    if config.activations == "keep":
        return found
    by_module: dict[str, list[Chain]] = {}
    for chain in saving_chains(facts, config):
        by_module.setdefault(chain.module, []).append(chain)
    for name, chains in by_module.items():
        texts = tuple(dict.fromkeys(c.text for chain in chains for c in readers(facts, chain)))
        gain = sum(_gain(facts, chain) for chain in chains) - _beside(facts, chains)
        # no row of a report says that a model, which calls many such functions, is left as it is
        if (
            next_to_nothing(facts, gain * facts.alike(name), _WORTH)
            or forward_obstacle(facts, name, gain)
            or _obstacle(facts, chains)
        ):
            continue
        calls = frozenset(call for chain in chains for call in chain.calls)
        viewed = any(_is_viewed(facts, chain) for chain in chains)
        count = sum(len(chain.ops) for chain in chains)
        found.add(
            DeferredChains(
                name, calls, viewed,
                reason=f"input of {count} elementwise functions kept, their values recomputed",
                kind=_KIND, consumers=texts,
            )
        )  # fmt: skip
    return found


def saving_chains(facts: Facts, config: PatchConfig) -> list[Chain]:
    """The chains for which autograd saves more than what enters them."""
    return facts.once(saving_chains, lambda: list(_saving_chains(facts, config)))


def chain_sources(facts: Facts, config: PatchConfig) -> set[int]:
    """Ids of the tensors that are saved in the place of what chains save."""
    if config.activations == "keep":
        return set()

    def find() -> set[int]:
        return {id(t) for chain in saving_chains(facts, config) for t in chain.sources}

    return facts.once(chain_sources, find)


def _saving_chains(facts: Facts, config: PatchConfig) -> Iterator[Chain]:
    patches = (*recompute.find(facts, config).patches, *codes.find(facts, config).patches)
    known = {id(t) for patch in patches for t in facts.outputs(patch.site)}

    sites = {patch.site for patch in patches}

    def caller(name: str) -> str:
        return name if name in sites else facts.caller(name)  # nothing of what is replaced

    for chain in find_chains(facts.trace, known, caller):
        functions = [op for op in chain.ops.values() if not op.role.has(Role.CAST)]
        few = len(functions) < _FEWEST and not _is_viewed(facts, chain)
        if few or _gain(facts, chain) <= 0:
            continue
        if chain.module not in sites and not is_norm(facts, chain.module):
            yield chain


def _gain(facts: Facts, chain: Chain) -> int:
    """How many bytes fewer are saved where the chain is computed again."""
    saved = facts.storages
    sources = {storage_key(tensor): tensor for tensor in chain.sources}
    inside = {storage_key(tensor) for tensor in chain.made.values()} - sources.keys()
    gone = sum(saved[key].bytes for key in inside & saved.keys() - _still_saved(facts, chain))
    if not gone:
        return 0
    return gone - _more_bytes(facts, sources)


def _more_bytes(facts: Facts, tensors: Mapping[int, Tensor]) -> int:
    """Bytes of the storages, by key, that neither autograd nor the model holds anyway."""
    return sum(
        tensor.untyped_storage().nbytes()
        for key, tensor in tensors.items()
        if key not in facts.state_keys and key not in facts.storages
    )


def _beside(facts: Facts, chains: list[Chain]) -> int:
    """Bytes that are saved for other functions, of the module or of those in it, which are called as those of
    the chains are, so that they wait, too."""
    made = {key for chain in chains for key in chain.made}
    read = {
        storage_key(tensor): tensor
        for op in _called_alike(facts, chains, made)
        for tensor in op.reads
        if id(tensor) not in made
    }
    return _more_bytes(facts, read)


def _called_alike(facts: Facts, chains: list[Chain], made: Set[int]) -> Iterator[Op]:
    """Functions with a gradient that are not of the chains, and that the module's forward lets wait, too."""
    name, calls = chains[0].module, {call for chain in chains for call in chain.calls}
    own = {id(op) for chain in chains for op in chain.ops.values()}
    for op in facts.trace.ops:
        inside = op.module == name or op.module.startswith(f"{name}.")
        if not inside or id(op) in own or not any(t.requires_grad for t in op.outputs):
            continue
        if elementwise_call(op.name, op.args, op.kwargs, lambda t: id(t) in made) in calls:
            yield op


def _still_saved(facts: Facts, chain: Chain) -> set[int]:
    """Storages of the chain's values that a reader outside saves all the same."""
    found: set[int] = set()
    own = set(map(id, chain.ops.values()))
    for tensor in chain.made.values():
        key = storage_key(tensor)
        savers = {(saver.module, saver.function) for saver in facts.savers.get(key, ())}
        for op in facts.trace.consumers.get(id(tensor), ()):
            if id(op) in own or _saves_sources(facts, op, tensor):
                continue
            is_view = any(storage_key(output) == key for output in op.outputs)
            if op.opaque or is_view or (op.module, op.name) in savers:
                found.add(key)
    return found


def _saves_sources(facts: Facts, op: Op, tensor: Tensor) -> bool:
    """Whether an op that reads a chain's value can save what the value is computed from.

    A matmul of a weight can, and a view that such matmuls alone read.
    """
    if op.opaque:
        return False
    if matmul_of(op, tensor) is not None:
        return True
    if not op.role.has(VIEWED) or not tensor.is_contiguous():
        return False
    behind = [
        (reader, output)
        for output in op.outputs
        for reader in facts.trace.consumers.get(id(output), ())
    ]
    return bool(behind) and all(_saves_sources(facts, *pair) for pair in behind)


def _is_viewed(facts: Facts, chain: Chain) -> bool:
    """Whether a matmul of a weight reads a view of a chain's value."""
    return any(
        op.role.has(VIEWED) and _saves_sources(facts, op, tensor)
        for tensor in chain.made.values()
        for op in facts.trace.consumers.get(id(tensor), ())
    )


def readers(facts: Facts, chain: Chain) -> list[Consumer]:
    """Who reads what a chain makes."""
    own = set(map(id, chain.ops.values()))
    found = (one for made in chain.made.values() for one in find_consumers(facts.trace, [made]))
    return [one for one in found if id(one.op) not in own]


def _obstacle(facts: Facts, chains: list[Chain]) -> str | None:
    """What keeps the values of chains from waiting."""
    for chain in chains:
        writer = facts.writes.later(chain.sources, min(chain.ops))
        if writer is not None:
            return f"its input is written in place by {writer}"
        for reader in readers(facts, chain):
            if reader.use == "write":
                return f"its output is written in place by {reader.text}"
            if reader.op is not None and reader.op.role.has(Role.HOOK | Role.UNTRACKED):
                return f"it is read by {reader.text}"
    return None

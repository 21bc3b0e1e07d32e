"""chains: what a chain of elementwise functions computes is computed again in backward; exact.

An activation that a forward writes as many functions (``gate * torch.sigmoid(1.7 * gate) * (up + 1)``) saves
many tensors of the full width. What enters the chain is saved in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from lowmem_patch.config import PatchConfig
from lowmem_patch.nn.chains import MOVED, DeferChains
from lowmem_patch.nn.modes import run_under
from lowmem_patch.strategies import codes, recompute
from lowmem_patch.strategies.activations import next_to_nothing
from lowmem_patch.strategies.norm_sites import makes_chains, norms_by_output
from lowmem_patch.strategies.protocol import Change, Facts, Found, Patch, forward_obstacle, once
from lowmem_patch.strategies.scales import scaled_outputs
from lowmem_patch.tracing.call_arguments import elementwise_call
from lowmem_patch.tracing.consumers import Consumer, find_consumers, matmul_of
from lowmem_patch.tracing.functions import Chain, find_chains, maker_in
from lowmem_patch.tracing.op_roles import NEEDS_TENSOR, Role
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Op

# functions: a single one, or a cast, is its readers' to know, but for one that a weight is multiplied with
_FEWEST = 2
_WORTH = 1e-3  # Python looks at each function of the forward
_LONGEST = 32  # functions, of which some are tried: more take long


def find(facts: Facts, config: PatchConfig) -> Found:
    """The modules whose chains save more than what enters them, and that no other strategy takes."""
    found = Found()
    for name, chains in planned_chains(facts, config).items():
        texts = tuple(dict.fromkeys(c.text for chain in chains for c in readers(facts, chain)))
        calls = frozenset(call for chain in chains for call in chain.calls)
        moved = any(_is_moved(facts, chain) for chain in chains)
        count = sum(len(chain.ops) for chain in chains)
        reason = f"input of {count} elementwise functions kept, their values recomputed"
        if count == 1:
            reason = "input of an elementwise function kept, its value recomputed"
        found.add(
            Change(
                name, recompute.NAME, run_under, (DeferChains, calls, moved),
                reason=reason, kind="chain", consumers=texts,
            )
        )  # fmt: skip
    return found


@once
def planned_chains(facts: Facts, config: PatchConfig) -> dict[str, list[Chain]]:
    """The chains that are computed again, by the modules whose forwards call them."""
    found: dict[str, list[Chain]] = {}
    for chain in () if config.activations == "keep" else _saving_chains(facts, config):
        if _can_wait(facts, chain):
            found.setdefault(chain.module, []).append(chain)
    # no row of a report says that a model, which calls many such functions, is left as it is
    return {name: chains for name, chains in found.items() if _pays(facts, config, chains)}


def _pays(facts: Facts, config: PatchConfig, chains: list[Chain]) -> bool:
    """Whether the chains of a module can be computed again, and save enough."""
    name = chains[0].module
    gain = sum(_gain(facts, config, chain) for chain in chains)
    alike = _alike(facts, config, chains)
    gain -= _more_bytes(facts, config, _read_beside(alike, chains))
    return (
        next_to_nothing(facts, gain * facts.alike(name), _WORTH) is None
        and forward_obstacle(facts, name, gain) is None
        and _can_wait(facts, alike, written=True)
    )


@once
def chain_sources(facts: Facts, config: PatchConfig) -> set[int]:
    """Ids of the tensors that are saved in the place of what chains save."""
    planned = planned_chains(facts, config).values()
    own = {id(t) for chains in planned for chain in chains for t in chain.sources}
    beside = (_read_beside(_alike(facts, config, chains), chains) for chains in planned)
    return own | {id(tensor) for read in beside for tensor in read}


def _saving_chains(facts: Facts, config: PatchConfig) -> Iterator[Chain]:
    known = _known(facts, config)
    sites = {patch.site for patch in known.values()}

    def caller(name: str) -> str:
        return name if name in sites else facts.caller(name)  # nothing of what is replaced

    given = facts.trace, known.keys(), caller, _normed(facts, config)
    modules: dict[str, list[Chain]] = {}
    for chain in find_chains(*given):
        modules.setdefault(chain.module, []).append(chain)
    left = {t for chains in modules.values() for t in _better_left(facts, config, chains)}
    for chain in find_chains(*given, left):
        if _is_its_readers(facts, config, chain) or _gain(facts, config, chain) <= 0:
            continue
        if chain.module not in sites and makes_chains(facts, config, chain.module):
            yield chain


def _is_its_readers(facts: Facts, config: PatchConfig, chain: Chain) -> bool:
    """Whether a chain is a function alone, or a cast, that no strategy but those of its readers knows."""
    functions = [op for op in chain.ops.values() if not op.role.has(Role.CAST)]
    known = _known(facts, config)
    if len(functions) >= _FEWEST or any(id(tensor) in known for tensor in chain.sources):
        return False
    return not (_is_moved(facts, chain) or _feeds_a_weight(facts, chain))


@once
def _normed(facts: Facts, config: PatchConfig) -> frozenset[int]:
    """Ids of the outputs of norms that may save them."""
    sites = norms_by_output(facts, config).values()
    return frozenset(id(t) for site in sites for t in site.outputs if t.requires_grad)


@once
def _known(facts: Facts, config: PatchConfig) -> dict[int, Patch]:
    """The patches of activations, by the ids of what these give."""
    patches = (*recompute.find(facts, config).patches, *codes.find(facts, config).patches)
    return {id(t): patch for patch in patches for t in facts.outputs(patch.site)}


def _gain(facts: Facts, config: PatchConfig, chain: Chain) -> int:
    """How many bytes fewer are saved where the chain is computed again."""
    gone = _gone(facts, config, chain)
    if not gone:
        return 0
    sources = {storage_key(tensor): tensor for tensor in chain.sources}
    known = _known(facts, config)
    beside = [
        tensor
        for tensor in sources.values()
        # a recomputed activation saves its input in any case
        if id(tensor) not in known or known[id(tensor)].strategy != recompute.NAME
    ]
    return gone - _more_bytes(facts, config, beside)


def _gone(facts: Facts, config: PatchConfig, chain: Chain) -> int:
    """Bytes of the chain's values that are saved, and would not be; a part of the chain has no more."""
    saved = facts.storages
    made = [*chain.made.values(), *_rearranged(facts, chain)]
    inside = {storage_key(tensor) for tensor in made} - set(map(storage_key, chain.sources))
    if not inside & saved.keys():
        return 0
    still = _still_saved(facts, config, chain)
    return sum(saved[key].bytes for key in inside & saved.keys() - still)


def _better_left(facts: Facts, config: PatchConfig, chains: list[Chain]) -> set[int]:
    """Ids of the first and last values of a module's chains that are better left to torch: a sum of two
    tensors that nobody else saves is saved itself, and nobody saves what is only added to something."""
    most, left = 0, set[int]()
    if not any(_gone(facts, config, chain) for chain in chains):
        return left
    # all in the same way: what several read is saved once, so that one alone would rather leave it
    for off in ((), (_first,), (_last,), (_first, _last)):
        whole, cut = Chain(""), set[int]()
        for chain in chains:
            shorter = chain
            for ends in off:
                shorter = _shortened(facts, config, shorter, ends)
            if _gain(facts, config, shorter) > 0:
                whole.ops.update(shorter.ops)
                cut |= chain.made.keys() - shorter.made.keys()
        gain = _gain(facts, config, whole)
        if gain > most:
            most, left = gain, cut
    return left


def _shortened(
    facts: Facts, config: PatchConfig, chain: Chain, ends: Callable[[Chain], list[int]]
) -> Chain:
    """The best of the chains that are left where ops are taken off, each time that whose loss costs least."""
    most, best = _gain(facts, config, chain), chain
    while 1 < len(chain.ops) <= _LONGEST:
        shorter = [
            Chain(chain.module, {n: op for n, op in chain.ops.items() if n != end})
            for end in ends(chain)
        ]
        gains = [_gain(facts, config, one) for one in shorter]
        gain = max(gains)
        chain = shorter[gains.index(gain)]
        if gain > most:
            most, best = gain, chain
    return best


def _first(chain: Chain) -> list[int]:
    """The ops that read nothing that a chain makes."""
    made = chain.made
    return [n for n, op in chain.ops.items() if not any(id(t) in made for t in op.reads)]


def _last(chain: Chain) -> list[int]:
    """The ops that make what no op of a chain reads."""
    read = {id(tensor) for op in chain.ops.values() for tensor in op.reads}
    return [n for n, op in chain.ops.items() if id(op.outputs[0]) not in read]


def _more_bytes(facts: Facts, config: PatchConfig, tensors: list[Tensor]) -> int:
    """Bytes of the storages of tensors that nobody holds anyway: neither autograd, once norms are patched,
    nor the model, nor a norm that made them, in the place of its input, which nobody else saves."""
    normed, norms = _normed(facts, config), norms_by_output(facts, config)
    beside = {
        storage_key(tensor): tensor
        for tensor in tensors
        if id(tensor) not in normed or tensor.nbytes > facts.saved(norms[id(tensor)].name)
    }
    # of a Linear's output that a scale multiplies nothing would be saved
    scaled = {storage_key(value) for _, value in scaled_outputs(facts, config)}
    gone = scaled | _left_by_norms(facts, config)
    return sum(
        tensor.untyped_storage().nbytes()
        for key, tensor in beside.items()
        if key not in facts.state_keys and (key in gone or key not in facts.storages)
    )


@once
def _left_by_norms(facts: Facts, config: PatchConfig) -> set[int]:
    """Storages that norms alone save of what they read: where Linears read a norm's output, the patched norm
    saves that instead."""
    sites = norms_by_output(facts, config).values()
    names = {s.name for s in sites if any(reader.use == "linear" for reader in s.consumers)}
    made = {storage_key(tensor) for site in sites for tensor in site.outputs}
    return {
        key
        for key, storage in facts.storages.items()
        if key not in made and all(saver.module in names for saver in storage.savers)
    }


def _alike(facts: Facts, config: PatchConfig, chains: list[Chain]) -> Chain:
    """The functions with a gradient that are not of the chains, of the module or of those in it, which are
    called as those of the chains are, so that its forward lets them wait, too."""
    name = chains[0].module
    whole, alike = Chain(name), Chain(name)
    for chain in chains:
        whole.ops.update(chain.ops)
        whole.calls |= chain.calls
    made = set(whole.made)
    # of a norm that is left alone, the forward does not know that a norm made its output
    makers = maker_in(made, _normed(facts, config)), maker_in(made, frozenset())
    for number, op in enumerate(facts.trace.ops):
        inside = op.module == name or op.module.startswith(f"{name}.")
        if not inside or number in whole.ops or not any(t.requires_grad for t in op.outputs):
            continue
        if any(
            elementwise_call(op.name, op.args, op.kwargs, maker) in whole.calls for maker in makers
        ):
            made.add(id(op.outputs[0]))
            alike.ops[number] = op
    return alike


def _read_beside(alike: Chain, chains: list[Chain]) -> list[Tensor]:
    """What `_alike` functions read that neither they nor the chains make."""
    made = {key for chain in chains for key in chain.made}
    return [tensor for tensor in alike.sources if id(tensor) not in made]


def _still_saved(facts: Facts, config: PatchConfig, chain: Chain) -> set[int]:
    """Storages of the chain's values that a reader outside saves all the same."""
    known = _known(facts, config)
    found: set[int] = set()
    own = set(map(id, chain.ops.values()))
    for tensor in chain.made.values():
        key = storage_key(tensor)
        for op in facts.trace.consumers.get(id(tensor), ()):
            if id(op) in own or _saves_sources(facts, op, tensor):
                continue
            patch = known.get(id(op.outputs[0])) if op.outputs else None
            if patch is not None and patch.strategy == recompute.NAME:
                continue  # an activation that is one more step of the chain
            is_view = any(storage_key(output) == key for output in op.outputs)
            if op.opaque or is_view or facts.is_saved_for(op, tensor):
                found.add(key)
    return found


def _saves_sources(facts: Facts, op: Op, tensor: Tensor) -> bool:
    """Whether an op that reads a chain's value can save what the value is computed from.

    A matmul of a weight can, and a rearrangement that such matmuls alone read.
    """
    if op.opaque:
        return False
    if matmul_of(op, tensor) is not None or op.role.has(Role.CONVOLUTION):
        return True
    if not op.role.has(MOVED):
        return False
    behind = [
        (reader, output)
        for output in op.outputs
        for reader in facts.trace.consumers.get(id(output), ())
    ]
    return bool(behind) and all(_saves_sources(facts, *pair) for pair in behind)


def _saving_sources(facts: Facts, chain: Chain) -> Iterator[Op]:
    """The readers of a chain's values that save what these are computed from."""
    for tensor in chain.made.values():
        for op in facts.trace.consumers.get(id(tensor), ()):
            if _saves_sources(facts, op, tensor):
                yield op


def _rearranged(facts: Facts, chain: Chain) -> Iterator[Tensor]:
    """What is made of a chain's values for the matmuls of weights that read them rearranged."""
    pending = [op for op in _saving_sources(facts, chain) if op.role.has(MOVED)]
    while pending:
        (output,) = pending.pop().outputs
        yield output
        readers = facts.trace.consumers.get(id(output), ())
        pending += [op for op in readers if op.role.has(MOVED)]


def _is_moved(facts: Facts, chain: Chain) -> bool:
    """Whether a matmul of a weight reads a chain's value rearranged."""
    return any(op.role.has(MOVED) for op in _saving_sources(facts, chain))


def _feeds_a_weight(facts: Facts, chain: Chain) -> bool:
    """Whether a matmul of a weight, or a convolution, reads what functions of a chain make."""
    functions = any(not op.role.has(Role.CAST) for op in chain.ops.values())
    return functions and any(True for _ in _saving_sources(facts, chain))


def readers(facts: Facts, chain: Chain) -> list[Consumer]:
    """Who reads what a chain makes."""
    return [reader for made in chain.made.values() for reader in _readers_of(facts, chain, made)]


def _readers_of(facts: Facts, chain: Chain, made: Tensor) -> list[Consumer]:
    """Who reads one value of a chain, but for the chain's own ops."""
    own = set(map(id, chain.ops.values()))
    return [one for one in find_consumers(facts.trace, [made]) if id(one.op) not in own]


def _can_wait(facts: Facts, chain: Chain, *, written: bool = False) -> bool:
    """Whether nobody writes into what a chain reads or makes, or asks for the memory of that.

    A write into what no op of the chain reads is seen, and no obstacle; ``written``: no write is.
    """
    if not chain.ops:
        return True
    held = [t for t in chain.sources if storage_key(t) in facts.state_keys]
    # of the model's own, any write: that of the next forward may come before this one's backward
    if facts.writes.later(chain.sources, min(chain.ops)) or facts.writes.later(held, 0):
        return False
    read = {id(tensor) for op in chain.ops.values() for tensor in op.reads}
    return not any(
        (reader.use == "write" and not written and key in read)
        or (reader.op is not None and reader.op.role.has(NEEDS_TENSOR))
        for key, made in chain.made.items()
        for reader in _readers_of(facts, chain, made)
    )

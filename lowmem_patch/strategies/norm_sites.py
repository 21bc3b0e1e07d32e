"""The norms of a model that a strategy may patch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import STOCK_NAMES, NormSettings
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.strategies.protocol import Facts, Skip, forward_obstacle, once
from lowmem_patch.tracing.call_arguments import CalledFunction
from lowmem_patch.tracing.consumers import Consumer, find_consumers, read_compiled
from lowmem_patch.tracing.probes import NormSpec, looks_like_norm

_TAKEN = frozenset(dir(MSNorm(None, None, NormSettings(0.0))))


@dataclasses.dataclass(frozen=True)
class PatchSite:
    """A norm or an activation that some strategy may patch; ``consumers`` read its output."""

    name: str
    kind: str
    consumers: list[Consumer]

    @property
    def texts(self) -> tuple[str, ...]:
        """Who reads the output, as a report names them."""
        return tuple(dict.fromkeys(consumer.text for consumer in self.consumers))

    def skip(self, reason: str) -> Skip:
        return Skip(self.name, self.kind, reason, self.texts)


@dataclasses.dataclass(frozen=True)
class NormSite(PatchSite):
    """A norm that some strategy may patch."""

    spec: NormSpec
    outputs: list[Tensor]
    gamma: Tensor | None
    beta: Tensor | None
    function: CalledFunction | None = None


def norm_sites(facts: Facts, config: PatchConfig) -> Iterator[NormSite | Skip]:
    """Each norm of the model, in the order of the forward, or why no strategy may patch it."""
    for name in facts.leaves:
        module = facts.modules[name]
        if name in facts.foreign_kernels:
            if looks_like_norm(module):
                yield Skip(name, "other", "runs a kernel of its own")
            continue
        if facts.activation(name) is not None:
            continue
        spec = facts.norm(name)
        if isinstance(spec, NormSpec):
            yield _site(facts, config, name, spec)
        elif looks_like_norm(module) and (spec is not None or facts.gated_norm(name) is None):
            yield Skip(name, "other", spec or "takes or returns more than one tensor")
    for name, called in facts.functions.items():
        if isinstance(called.kind, NormSpec):
            yield _site(facts, config, name, called.kind, called.function)


@once
def norms_by_output(facts: Facts, config: PatchConfig) -> dict[int, NormSite]:
    """The norms that may be patched, by the ids of the tensors that they return."""
    sites = [site for site in norm_sites(facts, config) if isinstance(site, NormSite)]
    return {id(output): site for site in sites for output in site.outputs}


def _site(
    facts: Facts,
    config: PatchConfig,
    name: str,
    spec: NormSpec,
    function: CalledFunction | None = None,
) -> NormSite | Skip:
    outputs, gamma, beta = facts.outputs(name), None, None
    if function is None:
        module = facts.model.get_submodule(name)
        vectors = (getattr(module, spec.names[0], None), getattr(module, spec.names[1], None))
        gamma, beta = facts.originals.get(name, vectors)
    consumers = find_consumers(facts.trace, outputs)
    site = NormSite(name, spec.kind, consumers, spec, outputs, gamma, beta, function)
    obstacle = _obstacle(facts, site, config)
    return site if obstacle is None else site.skip(obstacle)


def _obstacle(facts: Facts, site: NormSite, config: PatchConfig) -> str | None:
    if site.function is not None:
        obstacle = forward_obstacle(facts, facts.functions[site.name].module)
        if obstacle is not None:
            return obstacle
    if config.norms == "keep":
        return "norms: keep"
    for name, own in zip(site.spec.names, STOCK_NAMES, strict=True):
        if name != own and name in _TAKEN:
            return f"the name of its parameter {name} has another meaning in the module that would replace it"
    writers = (consumer.text for consumer in site.consumers if consumer.use == "write")
    writer = next(writers, None) or facts.written(site.name, "outputs")
    if writer is not None:
        return f"its output is written in place by {writer}"
    reader = read_compiled(facts.trace, facts.outputs(site.name), site.consumers)
    return None if reader is None else f"its output {reader}"


def eps_name(original: nn.Module, eps: float) -> str:
    """The one attribute of a norm that has this value, or leaves it to torch."""
    if getattr(original, "eps", eps) is None:
        return "eps"
    names = [n for n, v in vars(original).items() if type(v) is float and v == eps]
    return names[0] if len(names) == 1 and not names[0].startswith("_") else ""


def read_as_it_lies(consumers: list[Consumer]) -> bool:
    """Whether Linears alone read a norm's output, or casts of it, and no copy or view."""
    whole = (c.use == "linear" and not c.reshaped and c.cast >= c.copied for c in consumers)
    return bool(consumers) and all(whole)


def is_norm(facts: Facts, name: str) -> bool:
    """Whether a module is a norm, with a gate perhaps."""
    return looks_like_norm(facts.modules[name]) or facts.is_known_norm(name)


def makes_chains(facts: Facts, config: PatchConfig, name: str) -> bool:
    """Whether the functions of a module may make chains: not those of a norm that is known, or kept."""
    kept = config.norms == "keep" and looks_like_norm(facts.modules[name])
    return not (kept or facts.is_known_norm(name))

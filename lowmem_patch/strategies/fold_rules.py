"""When folding a norm is legal: facts of the trace and of the weights against one rule after the other."""

from __future__ import annotations

import gc

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.functional import is_sharded
from lowmem_patch.nn.own import is_own
from lowmem_patch.strategies.fold_weights import FoldStep
from lowmem_patch.strategies.norm_sites import NormSite
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.strategies.swap import ORIGINAL
from lowmem_patch.tracing.consumers import Consumer, LinearRef, parameter_uses
from lowmem_patch.tracing.dataflow import forward
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.probes import looks_like_norm
from lowmem_patch.tracing.saved_bytes import storage_key

# behind these a Linear's output is no longer the model's output
_ENDS = Role.LINEAR | Role.ROW_NORM | Role.RSQRT | Role.FUSED_ATTENTION


def has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _place(parameter: Tensor) -> tuple[int, int]:
    return storage_key(parameter), int(parameter.storage_offset())


def _tied_parameters(model: nn.Module) -> dict[str, str]:
    """Parameters whose memory another module holds as well, also where the trace did not run that."""
    owners: dict[tuple[int, int], dict[int, str]] = {}
    names = [*model.named_parameters(remove_duplicate=False)]
    for name, parameter in names:
        holder = model.get_submodule(name.rpartition(".")[0])
        if parameter.numel():
            owners.setdefault(_place(parameter), {}).setdefault(id(holder), name)
    tied = {}
    for name, parameter in names:
        others = [n for n in owners.get(_place(parameter), {}).values() if n != name]
        if others:
            tied[name] = others[0]
    return tied


def _foreign_parameters(model: nn.Module) -> dict[str, str]:
    """Parameters that a module outside this model holds as well: of another model, or of a larger one."""
    own = {id(module) for module in model.modules()}
    own |= {id(module.__dict__.get(ORIGINAL)) for module in model.modules()}
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    found = {}
    for module in gc.get_objects():
        # by the exact type: an isinstance runs code of objects that stand for others
        if not issubclass(type(module), nn.Module) or id(module) in own:
            continue
        state = vars(module)
        if ORIGINAL in state:  # what it stands for is looked at
            continue
        held = [*state.get("_parameters", {}).values()]
        for child in state.get("_modules", {}).values():
            if child is not None and id(child) in own and child is not model:
                held += child.parameters()
        for parameter in held:
            if id(parameter) in names:
                found[names[id(parameter)]] = f"a {type(module).__name__} outside the model"
    return found


class FoldRules:
    """Whether folding a norm keeps the function, for every input that the model accepts."""

    def __init__(self, facts: Facts) -> None:
        self.model, self.modules, self.trace = facts.model, facts.modules, facts.trace
        norms = (name for name in reversed(facts.order) if looks_like_norm(facts.modules[name]))
        self.last_norm = next(norms, "")
        self.uses = parameter_uses(facts.trace)
        self.tied = _tied_parameters(facts.model)
        self.foreign = _foreign_parameters(facts.model)

    def fold(self, site: NormSite) -> tuple[FoldStep | None, str]:
        """The step that folds this norm, or why there is none."""
        name, gamma, beta = site.name, site.gamma, site.beta
        read_by = (consumer.linear for consumer in site.consumers)
        linears = tuple(dict.fromkeys(linear for linear in read_by if linear is not None))
        why_not = (
            self._of_consumers(site)
            or self._of_callers(site, linears)
            or self._of_linears(site)
            or self._of_own_parameters(site)
        )
        if why_not is not None:
            return None, why_not
        weight = f"{name}.weight" if gamma is not None else None
        bias = f"{name}.bias" if beta is not None else None
        return FoldStep(name, weight, bias, site.spec.settings.weight_offset, linears), ""

    def _of_consumers(self, site: NormSite) -> str | None:
        """Whether anything but Linears reads the output in the traced forward."""
        if not site.consumers:
            return "nothing reads its output in the traced forward"
        for consumer in site.consumers:
            if consumer.use == "output":
                return "its output is returned by the model"
            if consumer.use != "linear":
                return f"its output is also read by {consumer.text}"
            if consumer.reshaped:
                return f"a reshape before {consumer.text} makes other rows of its channels"
        return None

    def _of_callers(self, site: NormSite, linears: tuple[LinearRef, ...]) -> str | None:
        """Whether other code than the traced forward takes the output, or writes on its Linears."""
        # of a block of many nobody takes an inner norm's output, be it the last one that runs
        in_block = any(part.isdigit() for part in site.name.split(".")[:-1])
        if site.name == self.last_norm and not in_block:
            return "it is the last norm, whose output other code may take for the model's features"
        caller = self.modules[site.name.rpartition(".")[0]]
        if hasattr(caller, "forward_features"):  # timm's, and what is built on it, return it
            return f"{type(caller).__name__} gives its output to callers of forward_features"
        if any(self._adapted(linear.module) for linear in linears):
            return "an adapter reads it, and must stay valid for the unfolded model"
        hooks = [*self.model.get_submodule(site.name)._forward_hooks.values()]
        for linear in linears:
            hooks += self.model.get_submodule(linear.module)._forward_pre_hooks.values()
        return None if all(map(is_own, hooks)) else "a forward hook reads it"

    def _of_linears(self, site: NormSite) -> str | None:
        """Whether a Linear cannot take gamma or beta."""
        beta = site.beta
        shift = beta is not None and not (has_data(beta) and bool((beta == 0).all()))
        reading = {id(consumer.op) for consumer in site.consumers}
        for consumer in site.consumers:
            linear = consumer.linear
            assert linear is not None
            why_not = (
                self._of_weight(linear)
                or self._of_other_owners(linear, reading)
                or self._loses_training(site, linear)
                or (_of_shift(consumer, linear) if shift else None)
            )
            if why_not is not None:
                return why_not
            if self._is_head(consumer):
                return (
                    f"{linear.module}, which reads it, makes the model's output: other code may take the "
                    "norm's for the model's features"
                )
        return None

    def _of_weight(self, linear: LinearRef) -> str | None:
        weight = self.model.get_parameter(linear.weight)
        if is_sharded(weight):
            return f"{linear.module} is sharded"
        if type(weight) is not nn.Parameter or not weight.is_floating_point():
            return f"{linear.module} is quantised"
        if weight.numel() == 0:
            return f"the weight of {linear.module} is empty (sharded?): patch before sharding"
        return None

    def _of_other_owners(self, linear: LinearRef, reading: set[int]) -> str | None:
        for parameter in (linear.weight, linear.bias):
            if parameter is None:
                continue
            others = (op for op in self.uses.get(parameter, ()) if id(op) not in reading)
            other = next(others, None)
            if other is not None:
                return f"{parameter} is also used by {other.place}"
            if parameter in self.tied:
                return f"{parameter} shares its memory with {self.tied[parameter]}"
            if parameter in self.foreign:
                return f"{parameter} is also a parameter of {self.foreign[parameter]}"
        return None

    def _of_own_parameters(self, site: NormSite) -> str | None:
        for slot, vector in (("weight", site.gamma), ("bias", site.beta)):
            parameter = f"{site.name}.{slot}"
            if vector is None:
                continue
            if any(op.module != site.name for op in self.uses.get(parameter, ())):
                return f"{parameter} is used outside the norm"
            if parameter in self.foreign:
                return f"{parameter} is also a parameter of {self.foreign[parameter]}"
        return None

    def _loses_training(self, site: NormSite, linear: LinearRef) -> str | None:
        """How gamma or beta, which trains, would end in a weight or bias that does not."""
        own = self.modules[site.name]
        slots = (("weight", site.gamma, linear.weight), ("bias", site.beta, linear.bias))
        for slot, tensor, into in slots:
            if tensor is None or not getattr(own, slot).requires_grad:
                continue
            if into is None:
                return f"its {slot} trains, and {linear.module} has none into which it would fold"
            if not self.model.get_parameter(into).requires_grad:
                return f"its {slot} trains, and {into} into which it would fold does not"
        return None

    def _is_head(self, consumer: Consumer) -> bool:
        """Whether the Linear's output reaches the model's output past no other Linear or norm."""
        assert consumer.op is not None
        reached = forward(self.trace, consumer.op.outputs, lambda op, _: not op.role.has(_ENDS))
        return any(id(path.end) in self.trace.outputs for path in reached)

    def _adapted(self, name: str) -> bool:
        """Whether a Linear belongs to an adapter layer (PEFT names the original ``base_layer``)."""
        parts = name.split(".")
        ancestors = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return any(hasattr(self.modules.get(path), "base_layer") for path in ancestors)


def _of_shift(consumer: Consumer, linear: LinearRef) -> str | None:
    """Whether a Linear cannot take a beta that is not 0."""
    if linear.bias is None or consumer.foreign_bias:
        return f"beta needs a bias, and {linear.module} has none of its own"
    if consumer.padded or consumer.copied:
        # where rows are rearranged (windows), other input sizes than the traced may be padded
        return "zeros may be padded between it and its Linear, which do not commute with beta"
    return None

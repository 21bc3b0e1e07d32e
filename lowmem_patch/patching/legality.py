"""What may be done to a norm: facts of the trace and of the weights against the rules of each strategy."""

from __future__ import annotations

import gc

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.functional import is_sharded
from lowmem_patch.nn.copies import is_own_hook
from lowmem_patch.patching.sites import ORIGINAL, FoldStep, LinearRef
from lowmem_patch.tracing.consumers import Consumer, parameter_uses
from lowmem_patch.tracing.dataflow import forward
from lowmem_patch.tracing.op_roles import Role
from lowmem_patch.tracing.probes import NormSpec
from lowmem_patch.tracing.saved_bytes import storage_key
from lowmem_patch.tracing.trace import Trace

__all__ = ["FoldRules", "has_data"]

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
    """Whether folding a norm keeps the function, for every input that the model accepts.

    Args:
        model: holds the weights.
        modules: modules of the traced model by name.
        trace: of one forward.
        last_norm: the norm that runs last.
    """

    def __init__(
        self, model: nn.Module, modules: dict[str, nn.Module], trace: Trace, last_norm: str
    ) -> None:
        self.model = model
        self.modules = modules
        self.trace = trace
        self.last_norm = last_norm
        self.uses = parameter_uses(trace)
        self.tied = _tied_parameters(model)
        self.foreign = _foreign_parameters(model)

    def fold(
        self,
        name: str,
        spec: NormSpec,
        readers: list[Consumer],
        gamma: Tensor | None,
        beta: Tensor | None,
    ) -> tuple[FoldStep | None, str]:
        """The step that folds this norm, or why there is none."""
        if not readers:
            return None, "nothing reads its output in the traced forward"
        for reader in readers:
            if reader.use == "output":
                return None, "its output is returned by the model"
            if reader.use != "linear":
                return None, f"its output is also read by {reader.text}"
            if reader.reshaped:
                return None, f"a reshape before {reader.text} makes other rows of its channels"
        if name == self.last_norm:
            return (
                None,
                "it is the last norm, whose output other code takes for the model's features",
            )
        caller = self.modules[name.rpartition(".")[0]]
        if hasattr(caller, "forward_features"):  # timm's, and what is built on it, return it
            return None, f"{type(caller).__name__} gives its output to callers of forward_features"
        if any(self._adapted(reader) for reader in readers):
            return None, "an adapter reads it, and must stay valid for the unfolded model"
        if self._hooked(name, readers):
            return None, "a forward hook reads it"
        shift = beta is not None and not (has_data(beta) and bool((beta == 0).all()))
        reading = {id(reader.op) for reader in readers}
        linears = []
        for reader in readers:
            reference = reader.linear
            assert reference is not None
            weight = self.model.get_parameter(reference.weight)
            if is_sharded(weight):
                return None, f"{reference.module} is sharded"
            if type(weight) is not nn.Parameter or not weight.is_floating_point():
                return None, f"{reference.module} is quantised"
            if weight.numel() == 0:
                return (
                    None,
                    f"the weight of {reference.module} is empty (sharded?): patch before sharding",
                )
            for parameter in (reference.weight, reference.bias):
                alien = self._alien_use(parameter, reading)
                if alien is not None:
                    return None, f"{parameter} is also used by {alien}"
                if parameter in self.tied:
                    return None, f"{parameter} shares its memory with {self.tied[parameter]}"
                if parameter in self.foreign:
                    return None, f"{parameter} is also a parameter of {self.foreign[parameter]}"
            loss = self._loses_training(name, reference, gamma, beta)
            if loss is not None:
                return None, loss
            if shift and (reference.bias is None or reader.foreign_bias):
                return None, f"beta needs a bias, and {reference.module} has none of its own"
            if shift and (reader.padded or reader.copied):
                # where rows are rearranged (windows), other input sizes than the traced may be padded
                return (
                    None,
                    "zeros may be padded between it and its Linear, which do not commute with beta",
                )
            if self._is_head(reader):
                return (
                    None,
                    f"{reference.module} makes the model's output: the last norm stays as it is",
                )
            linears.append(reference)
        owned = [
            f"{name}.weight" if gamma is not None else None,
            f"{name}.bias" if beta is not None else None,
        ]
        for parameter in owned:
            if parameter is not None and any(
                op.module != name for op in self.uses.get(parameter, ())
            ):
                return None, f"{parameter} is used outside the norm"
            if parameter in self.foreign:
                return None, f"{parameter} is also a parameter of {self.foreign[parameter]}"
        unique = tuple(dict.fromkeys(linears))
        return FoldStep(name, owned[0], owned[1], spec.weight_offset, unique), ""

    def _alien_use(self, parameter: str | None, reading: set[int]) -> str | None:
        for op in self.uses.get(parameter, ()) if parameter is not None else ():
            if id(op) not in reading:
                return op.place
        return None

    def _loses_training(
        self, name: str, linear: LinearRef, gamma: Tensor | None, beta: Tensor | None
    ) -> str | None:
        """How gamma or beta, which trains, would end in a weight or bias that does not."""
        own = self.modules[name]
        for slot, tensor, into in (("weight", gamma, linear.weight), ("bias", beta, linear.bias)):
            if tensor is None or not getattr(own, slot).requires_grad:
                continue
            if into is None:
                return f"its {slot} trains, and {linear.module} has none into which it would fold"
            if not self.model.get_parameter(into).requires_grad:
                return f"its {slot} trains, and {into} into which it would fold does not"
        return None

    def _hooked(self, name: str, readers: list[Consumer]) -> bool:
        """Whether somebody's hook sees the norm's output, which folding changes."""
        hooks = [*self.model.get_submodule(name)._forward_hooks.values()]
        for reader in readers:
            if reader.linear is not None:
                hooks += self.model.get_submodule(reader.linear.module)._forward_pre_hooks.values()
        return any(not is_own_hook(hook) for hook in hooks)

    def _is_head(self, reader: Consumer) -> bool:
        """Whether the Linear's output reaches the model's output past no other Linear or norm."""
        assert reader.op is not None
        reached = forward(self.trace, reader.op.outputs, lambda op, _: not op.role.has(_ENDS))
        return any(id(path.end) in self.trace.outputs for path in reached)

    def _adapted(self, reader: Consumer) -> bool:
        """Whether the reading Linear belongs to an adapter layer (PEFT names the original ``base_layer``)."""
        if reader.linear is None:
            return False
        parts = reader.linear.module.split(".")
        ancestors = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return any(hasattr(self.modules.get(path), "base_layer") for path in ancestors)

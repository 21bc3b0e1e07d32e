"""What may be done to a norm: facts of the trace and of the weights against the rules of each strategy."""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.patching.match import NormSpec
from lowmem_patch.patching.readers import Reader, parameter_uses
from lowmem_patch.patching.sites import FoldStep
from lowmem_patch.patching.trace import Trace

__all__ = ["FoldRules", "has_data", "unfit_to_share"]

# share recovers z = y/gamma - beta/gamma: y's rounding error grows by 1 + |beta/gamma| / |z|
_LARGEST_SHIFT = 8.0
# below this share of the largest gamma, y underflows before z does
_SMALLEST_GAMMA_RATIO = 1e-4
# behind these a Linear's output is no longer the model's output
_ENDS = frozenset(
    ("linear", "addmm", "layer_norm", "rms_norm", "rsqrt", "scaled_dot_product_attention")
)


def has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def unfit_to_share(spec: NormSpec, gamma: Tensor | None, beta: Tensor | None) -> str | None:
    """Why z cannot be recovered from the output, looked at before anything is divided."""
    if gamma is None or not has_data(gamma):
        return None
    factor = gamma.detach().double() + spec.weight_offset
    size = factor.abs()
    if size.numel() == 0:
        return "its weight is empty (sharded?): patch before sharding"
    if float(size.min()) < _SMALLEST_GAMMA_RATIO * float(size.max()):
        return f"cannot share: gamma goes down to {float(size.min()):.1e}, too near 0 to divide by"
    if beta is not None and float((beta.detach().double() / factor).abs().max()) > _LARGEST_SHIFT:
        worst = float((beta.detach().double() / factor).abs().max())
        return f"cannot share: |beta/gamma| goes up to {worst:.1f}, which would lose z's digits"
    return None


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

    def fold(
        self,
        name: str,
        spec: NormSpec,
        readers: list[Reader],
        gamma: Tensor | None,
        beta: Tensor | None,
    ) -> tuple[FoldStep | None, str]:
        """The step that folds this norm, or why there is none."""
        if not readers:
            return None, "nothing reads its output in the traced forward"
        for reader in readers:
            if reader.kind == "output":
                return None, "its output is returned by the model"
            if reader.kind != "linear":
                return None, f"its output is also read by {reader.text}"
        if name == self.last_norm:
            return None, "the last norm stays as it is: its output is what the model's features are"
        if any(self._adapted(reader) for reader in readers):
            return None, "an adapter reads it, and must stay valid for the unfolded model"
        shift = beta is not None and not (has_data(beta) and bool((beta == 0).all()))
        reading = {id(reader.op) for reader in readers}
        linears = []
        for reader in readers:
            reference = reader.linear
            assert reference is not None
            weight = self.model.get_parameter(reference.weight)
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
            if shift and (reference.bias is None or reader.foreign_bias):
                return None, f"beta needs a bias, and {reference.module} has none of its own"
            if shift and reader.padded:
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
        unique = tuple(dict.fromkeys(linears))
        return FoldStep(name, owned[0], owned[1], spec.weight_offset, unique), ""

    def _alien_use(self, parameter: str | None, reading: set[int]) -> str | None:
        for op in self.uses.get(parameter, ()) if parameter is not None else ():
            if id(op) not in reading:
                return f"{op.name} in {op.module}" if op.module else op.name
        return None

    def _is_head(self, reader: Reader) -> bool:
        """Whether the Linear's output reaches the model's output past no other Linear or norm."""
        assert reader.op is not None
        pending, seen = list(reader.op.outputs), set()
        while pending:
            tensor = pending.pop()
            if id(tensor) in self.trace.outputs:
                return True
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            for op in self.trace.readers.get(id(tensor), ()):
                if op.name not in _ENDS:
                    pending.extend(op.outputs)
        return False

    def _adapted(self, reader: Reader) -> bool:
        """Whether the reading Linear belongs to an adapter layer (PEFT names the original ``base_layer``)."""
        if reader.linear is None:
            return False
        parts = reader.linear.module.split(".")
        ancestors = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return any(hasattr(self.modules.get(path), "base_layer") for path in ancestors)

"""Gated norms, found by a numerical probe: ``norm(x) * act(gate)`` and ``norm(x * act(gate))``.

Linear attention and state spaces end in one: the first form in Qwen3-Next, Qwen3.5 and Kimi Linear, the
second in Mamba 2 and its hybrids (Granite 4, Nemotron-H), there often over groups of the channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lowmem_patch import reference
from lowmem_patch.constants import NormSettings
from lowmem_patch.formulas import FORWARD
from lowmem_patch.functional import ActivationKind
from lowmem_patch.nn.own import runs_class_forward
from lowmem_patch.tracing.probed_gradients import has_gradients_of, is_close, rows_and_starts
from lowmem_patch.tracing.probes import (
    NormSpec,
    find_norm,
    is_steady,
    isolated_copy,
    output_dtype,
    probed_rows,
    run_probe,
    settings_of,
)
from lowmem_patch.tracing.trace import Call

_WEIGHT = ("weight", "")
_GATE = torch.linspace(-6, 6, 49)


class GatedNormSpec(NamedTuple):
    """What a gated norm computes over the last dimension.

    Attributes:
        norm: an RMSNorm with a weight; of each group of the channels, where there are several.
        activation: of the gate.
        gate_first: the norm's input is multiplied, and not its output.
        groups: how many; the weight has a number for each channel.
        arguments: the names of the forward's two arguments, x and the gate.
        needs_gate: the forward asks for one.
    """

    norm: NormSpec
    activation: ActivationKind
    gate_first: bool
    groups: int
    arguments: tuple[str, str]
    needs_gate: bool


def match_gated_norm(
    module: nn.Module, calls: list[Call], known: dict[object, GatedNormSpec | None]
) -> GatedNormSpec | None:
    """The `GatedNormSpec` of a module without children with these traced calls, or None; ``known`` as of
    `match_norm`."""
    if not all(map(_takes_two, calls)):
        return None
    x, _ = calls[0].inputs
    parameters = dict(module.named_parameters())
    if parameters.keys() != {"weight"} or module._buffers:
        return None
    if parameters["weight"].shape != (x.shape[-1],) or not runs_class_forward(module):
        return None
    settings = ("gated", *settings_of(module), x.dim(), x.shape[-1])
    if settings not in known:
        known[settings] = _probe(module, x.dim(), x.shape[-1])
    return known[settings]


def _takes_two(call: Call) -> bool:
    """Whether a call makes one floating tensor of two, all of one shape."""
    tensors = (*call.inputs, *call.outputs)
    if (len(call.inputs), call.arguments, len(call.outputs)) != (2, 2, 1):
        return False
    shape = call.inputs[0].shape
    return len(shape) > 1 and all(t.shape == shape and t.is_floating_point() for t in tensors)


def _probe(module: nn.Module, dimensions: int, size: int) -> GatedNormSpec | None:
    _, *arguments = inspect.signature(type(module).forward).parameters.values()
    if len(arguments) != 2:
        return None
    names = (arguments[0].name, arguments[1].name)
    needs_gate = arguments[1].default is inspect.Parameter.empty
    isolated = isolated_copy(module)
    rows = probed_rows(dimensions, size)
    generator = torch.Generator().manual_seed(2)
    wide = _GATE[torch.randint(len(_GATE), rows.shape, generator=generator)]
    gates = [torch.rand(rows.shape, generator=generator) + 0.5 for _ in range(2)]
    for kind in get_args(ActivationKind):
        for gate_first in (False, True):
            views = [_Ungated(isolated, gate, kind, gate_first) for gate in gates]
            first, second = (run_probe(view, rows) for view in views)
            if first is None or second is None or not is_close(second, first.double()):
                continue
            for groups in _groups(module, size) if gate_first else (1,):
                found = _norm_of(views[0], rows, groups)
                if found is None or not is_steady(views[0], rows):
                    continue
                formula = partial(_formula, kind, gate_first, found, groups)
                if not _is_gated(isolated, formula, rows, wide):
                    continue
                output = output_dtype(views[0], rows)
                norm = NormSpec("rms_norm", found, output, False, _WEIGHT)
                return GatedNormSpec(norm, kind, gate_first, groups, names, needs_gate)
    return None


class _Ungated(nn.Module):
    """A gated norm as a norm of one tensor: what its gate does is undone."""

    def __init__(
        self, module: nn.Module, gate: Tensor, kind: ActivationKind, gate_first: bool
    ) -> None:
        super().__init__()
        self.module, self.gate, self.kind, self.gate_first = module, gate, kind, gate_first
        self.weight: Any = module.weight

    def forward(self, x: Tensor) -> Any:
        gate, factor = self.gate.to(x.dtype), reference.activate(self.gate, self.kind).to(x.dtype)
        if self.gate_first:
            return self.module(x / factor, gate)
        y = self.module(x, gate)
        return y / factor.to(y.dtype)


def _groups(module: nn.Module, size: int) -> Iterator[int]:
    """Numbers of groups that a module may have: one, and what its whole numbers give, as the size of a group
    or the number of groups."""
    yield 1
    numbers = {value for value in vars(module).values() if type(value) is int and value > 1}
    found = {number for number in numbers if size % number == 0 and number < size}
    yield from sorted(found | {size // number for number in found})


def _norm_of(view: _Ungated, rows: Tensor, groups: int) -> NormSettings | None:
    """The RMSNorm that a view is, of the whole rows or of each group."""
    if groups == 1:
        found = find_norm(view, rows, _WEIGHT, vars(view.module))
    else:
        weight = view.weight.detach()

        def grouped(x: Tensor) -> Any:
            return (view(x.reshape(rows.shape)) / weight).reshape(x.shape)

        split = rows.reshape(*rows.shape[:-1], groups, -1)
        found = find_norm(grouped, split, ("", ""), vars(view.module))
    return None if found is None or found.centered else found


def _formula(
    kind: ActivationKind, gate_first: bool, settings: NormSettings, groups: int,
    x: Tensor, gate: Tensor, weight: Tensor,
) -> Tensor:  # fmt: skip
    """What a gated norm computes, in torch's own functions."""
    factor = FORWARD[kind](gate)
    x = x * factor if gate_first else x
    split = x.reshape(*x.shape[:-1], groups, -1)
    z = split * torch.rsqrt(split.square().mean(-1, keepdim=True) + settings.eps)
    y = z.reshape(x.shape) * settings.gamma_of(weight)
    return y if gate_first else y * factor


def _is_gated(
    module: Any, formula: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, gate: Tensor
) -> bool:
    """Whether the module computes this, with these gradients, for gates and rows of any size."""
    # some stay near 0, where a sigmoid has a gradient that float32 tells
    far = torch.arange(gate.numel()).view(gate.shape) % 2 == 0
    return all(
        has_gradients_of(formula, module, given, (module.weight,), start)
        for size, large, _, start in rows_and_starts(rows)
        for given in ((rows, gate * torch.where(far, size, 1.0)), (large, gate))
    )

"""A bias of each expert that is gathered for its rows: what a product saves in its place is the bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import in_compiler, is_exporting, is_transformed, packer
from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.deferred_rows import GatheredRows
from lowmem_patch.nn.modes import AroundForward
from lowmem_patch.nn.own import Own, give_forward_around, inner_forward
from lowmem_patch.tracing.call_arguments import are_row_numbers


class _Gathers(AroundForward):
    def __init__(self, biases: list[Tensor]) -> None:
        super().__init__()
        self.biases = biases
        # a checkpoint inside of the module runs again without this mode, and must save the same both times
        self.packer = packer()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = func is Tensor.__getitem__ and any(args[0] is bias for bias in self.biases)
        if known and are_row_numbers(args[1]) and packer() == self.packer:
            return GatheredRows.of(*args)
        return func(*args, **kwargs)


def defer_biases(module: nn.Module, names: tuple[str, ...]) -> None:
    """Let the module's forward gather rows of these parameters as `GatheredRows`, with gradients on."""
    give_forward_around(module, _defers_biases, names)


def _defers_biases(
    module: nn.Module, names: tuple[str, ...], given: Own | None, /, *args: Any, **kwargs: Any
) -> Any:
    forward = inner_forward(module, given)
    saves = torch.is_grad_enabled() and not in_compiler()
    if not saves or is_exporting() or is_transformed():
        return forward(*args, **kwargs)
    found = (getattr(module, name, None) for name in names)
    biases = [bias for bias in found if isinstance(bias, Tensor) and not is_foreign(bias)]
    with _Gathers(biases):
        return forward(*args, **kwargs)

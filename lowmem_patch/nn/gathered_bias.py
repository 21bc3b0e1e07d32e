"""A bias of each expert that is gathered for its rows: what a product saves in its place is the bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.deferred_rows import GatheredRows
from lowmem_patch.nn.modes import ForwardMode, run_under
from lowmem_patch.tracing.call_arguments import are_row_numbers


class _Gathers(ForwardMode):
    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(module)
        found = (getattr(module, name, None) for name in names)
        self.biases = [one for one in found if isinstance(one, Tensor) and not is_foreign(one)]

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = func is Tensor.__getitem__ and any(args[0] is bias for bias in self.biases)
        if known and are_row_numbers(args[1]) and self.packs_alike():
            return GatheredRows.of(*args)
        return func(*args, **kwargs)


def defer_biases(module: nn.Module, names: tuple[str, ...]) -> None:
    """Let the module's forward gather rows of these parameters as `GatheredRows`, with gradients on."""
    run_under(module, _Gathers, names)

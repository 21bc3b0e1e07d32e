"""A module whose forward gathers numbers of a tensor that autograd need not save for that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import gather
from lowmem_patch.nn.context import is_foreign
from lowmem_patch.nn.modes import ForwardMode, run_under
from lowmem_patch.tracing.call_arguments import GatherCall, gather_call


class _Gathers(ForwardMode):
    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = gather_call(args, kwargs) if func in _GATHERS and self.packs_alike() else None
        if call is None or not _is_plain(call):
            return func(*args, **kwargs)
        return gather(*call)


_GATHERS = (Tensor.gather, torch.gather)


def _is_plain(call: GatherCall) -> bool:
    return call.tensor.requires_grad and not (is_foreign(call.tensor) or is_foreign(call.places))


def gather_unsaved(module: nn.Module) -> None:
    """Let the module's forward save no tensor of which it gathers, with gradients on."""
    run_under(module, _Gathers)

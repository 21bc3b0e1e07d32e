"""The optimizers that a step is predicted with: torch's own are run on fake tensors, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.errors import ConfigError
from lowmem_patch.tracing.observers import DispatchObserver
from lowmem_patch.tracing.shadow import tensors_in

# Name to what is meant by it, as a report prints it.
OPTIMIZERS = {
    "adamw": "torch's AdamW, fused, as transformers trains by default: no temporaries",
    "adamw_foreach": "torch's AdamW as torch builds it: its step makes a copy of one moment",
    "adamw8bit": "bitsandbytes' AdamW8bit",
    "paged_adamw": "bitsandbytes' PagedAdamW: float32 states, which may lie on the host",
    "paged_adamw8bit": "bitsandbytes' PagedAdamW8bit: states may lie on the host",
    "sgd": "torch's SGD, without momentum",
    "adafactor": "torch's Adafactor",
}

_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"fused": True}),
    "adamw_foreach": ("AdamW", {"foreach": True}),
    "sgd": ("SGD", {"foreach": True}),
    "adafactor": ("Adafactor", {}),
}


def check_optimizer(name: str) -> None:
    """Raises:
    ConfigError: an unknown optimizer.
    """
    if not isinstance(name, str) or name not in OPTIMIZERS:
        given = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
        raise ConfigError(f"optimizer {given} is none of {', '.join(OPTIMIZERS)}: give such a name")


class _AnyNumber(DispatchObserver):
    """Answers 1.0 where an optimizer asks a tensor without data for its value (a norm of an update)."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return func(*args, **kwargs)


class FakeOptimizer:
    """An optimizer over fake parameters, with its state, whose steps can be watched.

    The kernels of bitsandbytes work in place: theirs is none here, and a step does nothing.
    """

    def __init__(self, name: str, parameters: Sequence[Tensor]) -> None:
        """Enter the fake mode first; gradients of the parameters are lost.

        Raises:
            ConfigError: an unknown optimizer.
        """
        check_optimizer(name)
        self.state: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        if name not in _TORCH or not parameters:
            return
        kind, settings = _TORCH[name]
        self._optimizer = getattr(torch.optim, kind)(parameters, lr=1e-3, **settings)
        with DispatchObserver():  # which answers at once where torch asks for devices
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            self.step()  # the first makes the state
            for parameter in parameters:
                parameter.grad = None
        self.state = tensors_in(list(self._optimizer.state.values()))

    def step(self) -> None:
        if self._optimizer is not None:
            with _AnyNumber():
                self._optimizer.step()

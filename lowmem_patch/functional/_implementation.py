"""Which implementation runs: decided per call, in one place; and which tensors the ops take."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lowmem_patch import reference

Implementation = Literal["auto", "triton", "reference"]

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
# bool: the flags that are packed
_KERNEL_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.bool))
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def resolve(
    implementation: Implementation, *tensors: Tensor | None
) -> Literal["triton", "reference"]:
    """The implementation for these tensors.

    ``"auto"`` takes the Triton kernels for CUDA tensors (any device under ``TRITON_INTERPRET=1``)
    of float16, bfloat16 or float32, and eager torch otherwise; on CUDA without Triton it says so
    once. An explicit request is met or refused, never exchanged.

    Raises:
        ValueError: unknown name.
        RuntimeError: ``"triton"`` was asked for and is not installed, or not for these tensors.
    """
    if implementation == "reference":
        return "reference"
    if implementation not in ("auto", "triton"):
        raise ValueError(
            f"implementation must be 'auto', 'triton' or 'reference', got {implementation!r}"
        )
    obstacle = _obstacle(tensors)
    if obstacle is None:
        return "triton"
    if implementation == "triton":
        raise RuntimeError(f"implementation='triton' was asked for, but {obstacle}")
    return "reference"


def _obstacle(tensors: tuple[Tensor | None, ...]) -> str | None:
    """Why the kernels cannot take these tensors; None if they can."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return f"a tensor is on {tensor.device}; the kernels need CUDA"
        if tensor.dtype not in _KERNEL_DTYPES:
            return f"a tensor is {tensor.dtype}; the kernels take float16, bfloat16 and float32"
    if not _TRITON_INSTALLED:
        _warn_without_triton()
        return "triton is not installed"
    return None


@cache
def _warn_without_triton() -> None:
    warnings.warn(
        "triton is not installed: lowmem_patch runs its eager reference path on CUDA, which "
        "saves the same memory but is slower",
        RuntimeWarning,
        stacklevel=3,
    )


_kernels: Any = None


def module(implementation: str) -> Any:
    """The module that implements the ops: `reference`, or `kernels`, imported at first use."""
    global _kernels
    if implementation == "reference":
        return reference
    if _kernels is None:
        from lowmem_patch import kernels

        _kernels = kernels
    return _kernels


def dispatched(name: str) -> Callable[..., Any]:
    """The function of this name, of the implementation that is given as its last argument."""

    def run(*arguments: Any) -> Any:
        return getattr(module(arguments[-1]), name)(*arguments[:-1])

    return run


def check_floating(operator: str, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):  # what only behaves like one would lose its gradient
        raise TypeError(f"{operator}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"{operator}: {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}"
        )

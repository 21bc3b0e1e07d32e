"""Modules whose arithmetic is no torch op: a Triton kernel, or a call through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
Kernel = Callable[[Tensor, Tensor, Tensor], None]
# the shapes on which kernels ran or were launched, and whether these were fake; tensors would be held
RAN: list[tuple[torch.Size, bool]] = []

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover
    triton = None


if triton is not None:

    @triton.jit
    def _multiply(x_ptr, y_ptr, out_ptr, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        x = tl.load(x_ptr + at, mask=at < size)
        y = tl.load(y_ptr + at, mask=at < size)
        tl.store(out_ptr + at, x * y, mask=at < size)


def _note(x: Tensor) -> None:
    RAN.append((x.shape, isinstance(x, FakeTensor)))


def triton_kernel(x: Tensor, y: Tensor, out: Tensor) -> None:
    """``out = x * y``, launched raw."""
    _multiply[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), block=64)
    _note(x)


def _floats(tensor: Tensor) -> Any:
    number = ctypes.c_float if tensor.dtype == torch.float32 else ctypes.c_double
    return (number * tensor.numel()).from_address(tensor.data_ptr())


def ctypes_kernel(x: Tensor, y: Tensor, out: Tensor) -> None:
    """``out = x * y`` in C's numbers at the tensors' addresses."""
    left, right, into = _floats(x), _floats(y), _floats(out)
    for i in range(x.numel()):
        into[i] = left[i] * right[i]
    _note(x)


class Product(torch.autograd.Function):
    """``x * y`` by a kernel; gradients by the same kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        kernel(x, y, out)
        ctx.save_for_backward(x, y)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        gradient = gradient.contiguous()
        left, right = torch.empty_like(x), torch.empty_like(y)
        ctx.kernel(gradient, y, left)
        ctx.kernel(gradient, x, right)
        return left, right, None


class ForeignSquare(nn.Module):
    """An activation, ``x^2``."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Product.apply(x, x, self.kernel)
        return out


class ForeignRMSNorm(nn.Module):
    """A norm that a probe would take for an RMSNorm, had it run it."""

    def __init__(self, size: int, kernel: Kernel) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        z = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        out: Tensor = Product.apply(z, self.weight.expand_as(z), self.kernel)
        return out


class InPlaceDouble(nn.Module):
    """Writes ``2 x`` over ``x``, which torch is not told of."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kernel(x, torch.full_like(x, 2.0), x)
        return x


def ran_or_was_skipped(kernel: Kernel) -> bool:
    """Whether a kernel ran on real tensors alone, or, if Triton's, was launched on fake ones alone."""
    return {fake for _, fake in RAN} == {kernel is triton_kernel}

"""Norms in the spellings that models have: without weight, 1 + w, scaled, gated, T5's, from a buffer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.support.toy_blocks import WIDTH, TokenModel


class Scaleless(nn.Module):
    """Gemma's ``with_scale=False``: a norm class whose weight is optional."""

    def __init__(self, with_scale: bool) -> None:
        super().__init__()
        self.eps = 1e-6
        self.with_scale = with_scale
        if with_scale:
            self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * self.weight if self.with_scale else y


class WithScale(TokenModel):
    def build(self) -> None:
        self.norm = Scaleless(with_scale=True)
        self.bare = Scaleless(with_scale=False)
        self.inner, self.next = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.norm(x))
        return x + self.next(self.bare(x))


class T5Norm(TokenModel):
    """T5's norm: no mean, no beta, and its output has the weight's dtype where that is narrow."""

    def build(self) -> None:
        self.norm = T5LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def body(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class PlusOne(nn.Module):
    """Gemma's norm: 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        z = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (z * (1 + self.weight.float())).type_as(x)


class PlusOneNorm(TokenModel):
    def build(self) -> None:
        self.norm = PlusOne(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class PlusOneLayerNorm(nn.Module):
    """Nemotron's norm: LayerNorm with 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight + 1, self.bias, self.eps)


class PlusOneCentered(PlusOneNorm):
    def build(self) -> None:
        super().build()
        self.norm = PlusOneLayerNorm(WIDTH)


class NoWeight(TokenModel):
    def build(self) -> None:
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class BufferNorm(nn.Module):
    """Falcon-Mamba's: a weight that is a buffer, does nothing, and has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.register_buffer("weight", torch.ones(2 * WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class WeightIsBuffer(TokenModel):
    def build(self) -> None:
        self.norm = BufferNorm()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class GatedRMSNorm(nn.Module):
    """Mamba's norm: a second input gates the first before it is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * F.silu(gate)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class GatedNorm(TokenModel):
    def build(self) -> None:
        self.gate, self.gated, self.inner = (
            nn.Linear(WIDTH, WIDTH),
            GatedRMSNorm(),
            nn.Linear(WIDTH, WIDTH),
        )

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.inner(self.gated(x, self.gate(y)))

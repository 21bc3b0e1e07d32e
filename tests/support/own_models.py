"""Models as people write them from scratch: functions in the forwards, and nothing of any library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH = 512, 64, 4, 32


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Attention(nn.Module):
    """Causal attention with a norm of queries and keys, by a function that has no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, HEADS, -1) for layer in (self.query, self.key, self.value)
        )
        q, k, v = rms(q).transpose(1, 2), rms(k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class SquaredReluBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(rms(x))
        return x + self.down(F.relu(self.up(rms(x))).square())


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.type_as(x) * self.weight


class GatedBlock(nn.Module):
    """As the first LLaMA was written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = RootMeanSquare(), RootMeanSquare()
        self.attention = Attention()
        self.mlp = GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PlainBlock(nn.Module):
    """As GPT-2 is written in a course."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        h = F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + F.dropout(self.down(h), 0.1, self.training)


class Decoder(nn.Module):
    """Embedding, blocks, a norm, a head, and the loss in the model's own forward."""

    def __init__(self, block: type[nn.Module], layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = RootMeanSquare()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1))


BLOCKS = {"squared_relu": SquaredReluBlock, "gated": GatedBlock, "plain": PlainBlock}

"""Small models by hand, one trap each: a trace that misreads it patches a wrong function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

WIDTH = 16


class TokenModel(nn.Module):
    """Tokens in, features out; a body with a norm, an activation and something to get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.build()
        self.final = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def build(self) -> None:
        raise NotImplementedError

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.final(self.body(self.embed(x))))


class ParallelBlock(TokenModel):
    """Attention and MLP read the same norm."""

    def build(self) -> None:
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = (
            nn.Linear(WIDTH, 24),
            nn.GELU(),
            nn.Linear(24, WIDTH),
        )

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.down(self.act(self.up(y)))


class CrossAttention(TokenModel):
    """An encoder's last norm is read by the key and value of every decoder layer, not once."""

    def build(self) -> None:
        self.keys = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        encoded = self.norm(x)
        for key in self.keys:
            x = x + F.scaled_dot_product_attention(x, key(encoded), key(encoded))
        return x


class QueryNorm(TokenModel):
    """Norms of queries and keys are read by a rotation, not by a Linear."""

    def build(self) -> None:
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query_norm, self.key_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None]

        def rotated(t: Tensor) -> Tensor:
            left, right = t.chunk(2, -1)
            return t * angles.cos() + torch.cat((-right, left), -1) * angles.sin()

        query = rotated(self.query_norm(self.query(y).unflatten(-1, (2, 8))))
        key = rotated(self.key_norm(self.key(y).unflatten(-1, (2, 8))))
        return x + F.scaled_dot_product_attention(query, key, key).flatten(-2)


class SandwichNorm(TokenModel):
    """A norm after the block: the residual reads it."""

    def build(self) -> None:
        self.inner, self.after = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.after(self.inner(self.norm(x)))


class PostNorm(TokenModel):
    """BERT's habit: the residual reads the norm that the next Linear reads."""

    def build(self) -> None:
        self.inner, self.next = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x + self.inner(x))
        return y + self.next(y)


class ReturnedNorm(TokenModel):
    """The norm's output is read by a Linear and is also one of the model's outputs."""

    def build(self) -> None:
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.embed(x))
        return self.head(self.final(self.inner(y))), y


class SharedBlock(TokenModel):
    """ALBERT's habit: the same norm, Linears and activation for every layer."""

    def build(self) -> None:
        self.up, self.act, self.down = (
            nn.Linear(WIDTH, 24),
            nn.GELU(),
            nn.Linear(24, WIDTH),
        )

    def body(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.down(self.act(self.up(self.norm(x))))
        return x


class ShiftedWindows(TokenModel):
    """Swin's attention: rolled, cut into windows and put together again, behind a norm."""

    def build(self) -> None:
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        image = self.norm(x).view(-1, 4, 4, WIDTH).roll((-1, -1), (1, 2))
        windows = image.view(-1, 2, 2, 2, 2, WIDTH).permute(0, 1, 3, 2, 4, 5)
        y = self.inner(windows.reshape(-1, 4, WIDTH)).view(-1, 2, 2, 2, 2, WIDTH)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, WIDTH).roll((1, 1), (1, 2))
        return x + y.reshape(x.shape)


class PaddedWindows(TokenModel):
    """As Swin where the image does not divide: zeros are padded behind a norm with a beta."""

    def build(self) -> None:
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        y = F.pad(self.norm(x), (0, 0, 0, 4)).view(-1, 5, WIDTH)
        return x + self.inner(y).view(x.shape[0], -1, WIDTH)[:, : x.shape[1]]


class SlicedTokens(TokenModel):
    """Some Linears read some tokens: the first one's class token, the other's the rest."""

    def build(self) -> None:
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.cat((self.first(y[:, :1]), self.rest(y[:, 1:])), 1)


class SlicedChannels(TokenModel):
    """Linears read halves of the channels: gamma would have to be cut as well."""

    def build(self) -> None:
        self.one, self.two = nn.Linear(WIDTH // 2, WIDTH), nn.Linear(WIDTH // 2, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        one, two = self.norm(x).chunk(2, -1)
        return x + self.one(one) + self.two(two)


class OtherDimensions(TokenModel):
    """Norms over channels that are not last: one by a subclass of LayerNorm, one a GroupNorm."""

    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def build(self) -> None:
        self.two = self.LayerNorm2d(WIDTH)
        self.group = nn.GroupNorm(4, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).unflatten(-1, (4, 4))  # as many channels as columns would hide it
        image = self.group(self.two(image))
        return x + self.inner(self.norm(image.flatten(2).transpose(1, 2)))


class TransposedWeight(TokenModel):
    """GPT-2's Conv1D holds its weight as [in, out]; square, so that a wrong fold runs."""

    def build(self) -> None:
        self.inner = Conv1D(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class PackedAttention(TokenModel):
    """nn.MultiheadAttention reads its input with one in_proj weight, here self- and cross-attention."""

    def build(self) -> None:
        self.self_attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cross_attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.cross_attention(x, y, y, need_weights=False)[0]


class EncoderLayers(TokenModel):
    """Torch's own layers, which read the norms' weights themselves where no gradient is wanted."""

    def build(self) -> None:
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 24, 0.0, nn.GELU(), batch_first=True, norm_first=norm_first
            )
            for norm_first in (True, False)
        )

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Experts(TokenModel):
    """The router's Linear reads the norm, and so do 3-D expert weights that are no Linear."""

    def build(self) -> None:
        self.router = nn.Linear(WIDTH, 3)
        self.act = nn.SiLU()
        self.gate_up = nn.Parameter(torch.randn(3, WIDTH, 48) * 0.2)
        self.down = nn.Parameter(torch.randn(3, 24, WIDTH) * 0.2)

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.router(y).softmax(-1)
        gate, up = torch.einsum("bld,edh->belh", y, self.gate_up).chunk(2, -1)
        outputs = torch.einsum("belh,ehd->beld", self.act(gate) * up, self.down)
        return x + (outputs * scores.transpose(1, 2)[..., None]).sum(1)


class NormTwice(TokenModel):
    """One norm module before two Linears of which one also reads the raw input."""

    def build(self) -> None:
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.one(self.norm(x))
        return x + self.two(self.norm(x)) + self.one(x)


class TwoNormsOneLinear(TokenModel):
    """ALBERT's habit: one Linear behind two norms cannot hold both affines."""

    def build(self) -> None:
        self.other = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.norm(x))
        return x + self.inner(self.other(x))


class TiedEmbedding(TokenModel):
    """The Linear's weight is the embedding's, by storage and under another name."""

    def build(self) -> None:
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight = self.embedding.weight

    def body(self, x: Tensor) -> Tensor:
        x = x + self.embedding(torch.arange(x.shape[1]) % WIDTH)
        return x + self.inner(self.norm(x))


@functools.lru_cache
def positions(length: int) -> Tensor:
    return torch.linspace(0, 1, length * WIDTH).reshape(length, WIDTH)


class CachedTable(TokenModel):
    """DINOv3's habit: a table that one forward leaves for all others, and a trace must not."""

    def build(self) -> None:
        self.inner = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x + positions(x.shape[1])))


class FunctionalCalls(TokenModel):
    """No modules: left alone, and named."""

    def build(self) -> None:
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        y = F.layer_norm(self.norm(x), (WIDTH,))
        return x + self.down(F.gelu(self.up(y)))


class ViewedChannels(TokenModel):
    """Patch merging: four neighbours become one row between norm and Linear, so gamma would repeat."""

    def build(self) -> None:
        self.merge, self.back = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        merged = self.norm(x).reshape(x.shape[0], x.shape[1] // 4, 4 * WIDTH)
        return x + self.back(self.merge(merged)).repeat_interleave(4, 1)


def built(make: Callable[[], nn.Module]) -> tuple[Any, tuple[Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    return make(), (torch.randn(2, 16, WIDTH, generator=generator),)

"""Stacks of small blocks, and blocks of them given levels by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.strategies.checkpointing import Blocks, find_blocks, patches_of
from lowmem_patch.strategies.protocol import Facts, Target
from lowmem_patch.tracing.inputs import as_example_inputs
from lowmem_patch.tracing.shadow import make_shadow
from lowmem_patch.tracing.trace import trace_forward
from tests.support.step import warned

BATCH, LENGTH, WIDTH, HEADS = 3, 8, 16, 2
INPUT = BATCH * LENGTH * WIDTH * 4  # bytes of a block's input


class AttentionBlock(nn.Module):
    """Fused attention, dropout, statistics that a forward writes, and an argument given by name."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, None]:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        values = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(values)) * scale
        return self.statistics(x.transpose(1, 2)).transpose(1, 2), None


class Stack(nn.Module):
    """``between(x)`` stands behind each block."""

    def __init__(self, blocks: Any, between: Any = lambda x: x) -> None:
        super().__init__()
        self.blocks, self.head, self.between = nn.ModuleList(blocks), nn.Linear(WIDTH, 3), between

    def forward(self, x: Tensor) -> Any:
        scale = torch.ones_like(x) * 0.5
        for block in self.blocks:
            output = block(x, scale=scale)
            x = self.between(output[0] if isinstance(output, tuple) else output)
        return self.head(x)


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def rows() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))


def stack(count: int = 6, **settings: Any) -> Any:
    torch.manual_seed(0)
    return Stack((AttentionBlock() for _ in range(count)), **settings).train()


def blocks_of(model: Any, inputs: Any) -> Blocks:
    shadow = make_shadow(model, as_example_inputs(inputs))
    return find_blocks(Facts(model, shadow.model, trace_forward(shadow), {}))


def patched(model: Any, inputs: Any, config: Any = "exact") -> Any:
    model = copy.deepcopy(model)
    with warned():
        return patch_model(model, config, example_inputs=inputs)


def give_levels(model: Any, blocks: Blocks, levels: Mapping[str, str]) -> Any:
    """A copy of a patched model whose blocks have these levels."""
    model = copy.deepcopy(model)
    target = Target(model)
    for patch in patches_of(blocks, levels):
        patch.apply(target)
    return model


def all_of(blocks: Blocks, level: str) -> dict[str, str]:
    """One level for all; segments begin at the first."""
    levels = {block.site: level for block in blocks.blocks}
    if level in ("segment", "halves"):
        levels[blocks.blocks[0].site] = "checkpointed"
    return levels

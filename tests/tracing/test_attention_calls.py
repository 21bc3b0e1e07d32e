"""Attention whose arguments are given by name, in any order, is attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.planning.costs import _operations
from lowmem_patch.tracing.call_arguments import attention_call
from lowmem_patch.tracing.trace import Op

WIDTH, LENGTH = 128, 16


class Block(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.by_name = nn.Linear(WIDTH, WIDTH), by_name

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if self.by_name:
            y = F.scaled_dot_product_attention(is_causal=True, value=v, key=k, query=q)
        else:
            y = F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
        found: Tensor = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return found


def model(by_name: bool, part: int = 0, size: float = 0.0) -> Any:
    """Three blocks, in the first of which the biases of queries, keys or values have this size."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(by_name) for _ in range(3)))
    qkv: Any = blocks[0].qkv
    with torch.no_grad():
        qkv.weight.normal_(0, WIDTH**-0.5)  # makes 1 of a token
        qkv.bias[WIDTH * part : WIDTH * (part + 1)].normal_(0, size)
    return blocks


def given() -> dict[str, Tensor]:
    return {"input": torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))}


def test_arguments_are_read_by_place_and_by_name() -> None:
    fused = "scaled_dot_product_attention"
    assert attention_call(fused, (1, 2, 3, 4, 0.5, True), {}) == (1, 2, 3, 4, 0.5, True)
    assert attention_call(fused, (1,), {"value": 3, "key": 2}) == (1, 2, 3, None, 0.0, False)
    # its fourth argument is a width
    assert attention_call("multi_head_attention_forward", (1, 2, 3, 64), {}).attn_mask is None


def test_a_budget_counts_attention_by_name() -> None:
    first, second = (
        patch_report(patch_model(model(by_name), fit="1GiB", example_inputs=given())).fit
        for by_name in (False, True)
    )
    assert first is not None and first.predicted == second.predicted


def test_operations_of_attention_with_its_products() -> None:
    x = torch.empty(LENGTH, 2, WIDTH, device="meta")
    with torch.device("meta"):
        attention = nn.MultiheadAttention(WIDTH, 2)
    name, pairs = "multi_head_attention_forward", 2 * LENGTH * LENGTH
    op = Op(name, F.multi_head_attention_forward, "", (x, x, x, WIDTH), {}, (x,), False)
    with FlopCounterMode(display=False) as counter:
        attention(x, x, x, need_weights=True)  # two products, as the flash kernel's
    assert _operations(op) == counter.get_total_flops() == 4 * pairs * WIDTH + 8 * x.numel() * WIDTH


@pytest.mark.parametrize(("part", "size", "left"), [(0, 1.0, 0), (1, 9.0, 1), (2, 1.0, 1)])
def test_queries_keys_and_values_by_name_are_told_apart(part: int, size: float, left: int) -> None:
    for by_name in (False, True):
        notes = plan_patch(model(by_name, part, size), "compact", example_inputs=given()).notes
        assert sum("stays in full" in note for note in notes) == left, by_name

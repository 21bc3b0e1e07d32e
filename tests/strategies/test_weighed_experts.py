"""A shared expert with a gate for each token, and experts of as many rows each: no last product is saved."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes
from lowmem_patch.tracing.saved_bytes import storage_key
from tests.support.judge import assert_same_step
from tests.support.models import randomise
from tests.support.step import MODES, cast, step, twin_of

TOKENS, WIDTH, INNER, EXPERTS = 18, 32, 24, 4


class SharedGate(nn.Module):
    """A shared expert, each row of whose output is multiplied with a number, as in Qwen2-MoE."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.weight, self.act = nn.Linear(WIDTH, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.gate(x)) * self.up(x))
        return F.sigmoid(self.weight(x)) * y


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trains", [True, False])
def test_a_shared_expert_saves_no_output_for_its_gate(trains: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = cast(randomise(SharedGate()), MODES[mode].weights)
    model.down.weight.requires_grad = trains
    x = {"x": torch.randn(TOKENS, WIDTH, dtype=MODES[mode].weights).requires_grad_()}
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, twin_of(stock, model), x, mode=MODES[mode])
    output: list[Tensor] = []
    model.down.register_forward_hook(lambda module, args, y: output.append(y))
    with saved_bytes(model) as saved, torch.autocast("cpu", torch.bfloat16, mode == "autocast"):
        model(**x)
    kept = {item.key for item in saved.storages}
    assert (storage_key(output[0]) in kept) is (
        mode == "autocast"
    )  # there its dtype is not the weight's


class BatchedExperts(nn.Module):
    """Experts of as many rows each, as in Llama 4: a weight of three dimensions for all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 5)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x.view(EXPERTS, -1, WIDTH), self.gate_up).chunk(2, dim=-1)
        return torch.bmm(up * self.act(gate), self.down).view(-1, WIDTH)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
def test_batched_experts_save_no_gated_product(transposed: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = cast(BatchedExperts(), MODES[mode].weights)
    if transposed:
        model.down.data = model.down.data.mT.contiguous().mT
    x = {"x": torch.randn(EXPERTS * TOKENS, WIDTH, dtype=MODES[mode].weights).requires_grad_()}
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, twin_of(stock, model), x, mode=MODES[mode])
    found, expected = (step(one, x, MODES[mode], count=True).saved for one in (model, stock))
    product = EXPERTS * TOKENS * INNER * (4 if mode == "fp32" else 2)
    # act(gate) and the product; the weight of the second matmul is none of autocast's dtype
    assert expected - found == (1 if mode == "autocast" else 2) * product
    assert patch_report(model).saved_after == found
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        model(**x).sum().backward()
    assert model.down.grad.stride() == model.down.stride()

"""A measured step: saved bytes by hand, by module and by kind; the model is put back."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import plan_patch, saved_bytes
from lowmem_patch.config import load_config
from lowmem_patch.profile import materialise, measure_step, profile_model
from lowmem_patch.tracing.categories import CATEGORIES
from lowmem_patch.tracing.inputs import as_example_inputs
from tests.support.models import llama, tokens


class Block(nn.Module):
    """Linear, norm, GELU, Linear, attention without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.act, self.outer = (
            nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.act(self.norm(self.inner(x))))
        return torch.softmax(y @ y.transpose(-1, -2), -1)


def test_kinds_and_modules_by_hand() -> None:
    model, x = Block(), torch.randn(2, 3, 16)
    with saved_bytes(model) as saved:
        model(x)
    rows = 2 * 3 * 4
    assert saved.by_kind == {
        "linear inputs": rows * (16 + 32),  # of inner and outer
        "norms": rows * 32,
        "activations": rows * 32,
        "codes and statistics": rows * 2,  # mean and rstd
        "attention": rows * 16 + rows * 3,  # y once, the probabilities
        "head and loss": 0,
        "rest": 0,
    }
    assert tuple(saved.by_kind) == CATEGORIES
    assert sum(saved.by_kind.values()) == saved.activations == sum(saved.by_module.values())
    assert saved.by_module["norm"] == rows * 32 + rows * 2
    assert sum(storage.bytes for storage in saved.storages) == saved.activations


def test_a_frozen_weight_keeps_no_input() -> None:
    model = Block()
    model.outer.requires_grad_(False)
    with saved_bytes(model) as saved:
        model(torch.randn(2, 3, 16))
    assert saved.by_kind["linear inputs"] == 2 * 3 * 4 * 16


@pytest.mark.parametrize("preset", ["auto", "exact", "paper"])
def test_a_real_step_saves_what_the_plan_says(preset: str) -> None:
    model, inputs, config = llama(), tokens(), load_config(preset)
    before = copy.deepcopy(model.state_dict())
    names = [type(module) for module in model.modules()]
    result = profile_model(model, config, inputs)
    plan = plan_patch(model, config, example_inputs=inputs)
    for measured, size, kinds in (
        (result.before, plan.saved_before, plan.kinds.before),
        (result.after, plan.saved_after, plan.kinds.after),
    ):
        assert measured.saved.activations == size and measured.saved.by_kind == kinds
        assert measured.peak_allocated is None
    assert result.patched == len(plan.patched) > 0 and result.device == "cpu"
    assert [type(module) for module in model.modules()] == names
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])
    data = result.to_dict()
    assert data["after"]["saved"] == plan.saved_after and data["before"]["by_module"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_on_the_meta_device_get_values() -> None:
    model = get_peft_model(
        llama(), LoraConfig(r=2, target_modules=["q_proj"]), low_cpu_mem_usage=True
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    materialise(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert measure_step(model, tokens()).saved.activations > 0


@pytest.mark.gpu
def test_peaks_on_a_gpu() -> None:
    model = llama().cuda()
    inputs = tokens().map(lambda tensor: tensor.cuda())
    result = profile_model(model, load_config("exact"), inputs)
    for measured in (result.before, result.after):
        assert measured.peak_allocated is not None and measured.peak_reserved is not None
        assert measured.saved.activations < measured.peak_allocated <= measured.peak_reserved


def test_masks_of_a_cpu_are_said_to_be_wide() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5), nn.Linear(4, 4))
    inputs = as_example_inputs(torch.ones(2, 4))
    assert profile_model(model.train(), load_config("exact"), inputs).wide_masks
    assert not profile_model(model.eval(), load_config("exact"), inputs).wide_masks

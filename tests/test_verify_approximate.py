"""`verify` on approximate gradients: those of codes, and of what is stored in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from lowmem_patch.checkpoint.compare import TensorCheck
from lowmem_patch.verify import EIGHT_BIT_ERROR, RunResult, VerifyResult, verify_model
from tests.support.verify import F32, broken, randomised_llama

WEIGHT = "model.layers.0.self_attn.o_proj.weight"


def failed(run: RunResult) -> list[str]:
    return [check.name for check in run.approximate if not check.passed]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_fails_even_where_approximate(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"

    def damage(model: nn.Module) -> None:
        if patch_report(model).approximate:
            model.get_parameter(name).register_hook(lambda g: torch.full_like(g, value))

    broken(monkeypatch, damage)
    result = verify_model(randomised_llama(), "paper", dtypes=F32, autocast=None)
    assert failed(result.runs[0]) == [name]
    assert str(result).endswith("FAILED")  # an infinity alone is within no limit


@pytest.mark.parametrize(
    ("preset", "factor"), [("paper", 1 + 1e-4), ("compact", 1 + 2 * EIGHT_BIT_ERROR)]
)
def test_a_wrong_approximate_gradient_fails(
    preset: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(model: nn.Module) -> None:
        if patch_report(model).approximate:
            model.get_parameter(WEIGHT).register_hook(lambda g: g * factor) and None

    broken(monkeypatch, damage)
    run = verify_model(randomised_llama(), preset, dtypes=F32, autocast=None).runs[0]
    assert failed(run) == [WEIGHT]
    assert all(check.passed for check in (*run.outputs, *run.gradients))


class Functions(nn.Module):
    """An activation that is called as a function, and one that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.in_place = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x), approximate="tanh")
        found: Tensor = self.third(self.in_place(self.second(hidden)))
        return found


def test_codes_of_functions_and_in_place_activations_are_judged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Functions(), nn.Linear(16, 16))
    result = verify_model(model, "paper", example_inputs=torch.randn(64, 16))
    assert result.passed, str(result)
    assert result.approximate_sites == ("0.gelu(approximate='tanh')", "0.in_place")
    exact, low = (max(c.error for c in run.approximate) for run in result.runs[:2])
    assert exact < 1e-5 < low < 0.1
    # beside the exact gradients they are far off
    assert result.runs[0].approximate[0].cosine < 0.999


def test_codes_of_a_frozen_linear_are_judged() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv.requires_grad_(True)
    result = verify_model(model, "auto")
    assert result.passed and result.approximate_sites, str(result)
    assert all(check.error < 1e-5 for check in result.runs[0].approximate)


def test_the_verdict_tells_the_cosine_in_low_precision_as_well() -> None:
    """Rounding moves values over steps, so that errors beside the step tables tell of no direction."""
    bf16: Any = {"dtypes": (torch.bfloat16,), "autocast": None}
    result = verify_model(randomised_llama(), "paper", **bf16)
    cosines = [check.cosine for check in result.runs[0].approximate if check.has_direction]
    assert len(cosines) > len(result.runs[0].approximate) / 2
    assert f"is {min(cosines):.4f} (" in result.verdict and min(cosines) < 0.99


def test_a_patched_model_is_verified_with_its_own_preset() -> None:
    result = verify_model(patch_model(randomised_llama(), "compact"), dtypes=F32, autocast=None)
    assert result.candidate == "patched with preset compact" and result.approximate_sites
    checks = [check for check in result.runs[0].approximate if check.has_direction]
    least = min(checks, key=lambda check: check.cosine)
    text = "passed; gradients are approximate, their least cosine to the exact ones is "
    assert result.verdict == f"{text}{least.cosine:.4f} ({least.name} in float32)"
    assert "inf" not in str(result)


def test_the_direction_of_rounding_is_no_part_of_the_verdict() -> None:
    along = TensorCheck("weight", 1e-7, 1e-2, float("inf"), 0.99, True)
    rounding = TensorCheck("bias", 1e-7, 1e-7, float("inf"), 0.0, True, False)
    run = RunResult("float32", (), (), (along, rounding), 2, 1, 0, 0)
    result = VerifyResult("Model", "patched", "inputs", (run,), 1, ("act",))
    assert result.verdict.endswith("cosine to the exact ones is 0.9900 (weight in float32)")

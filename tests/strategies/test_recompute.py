"""Recompute, family by family: the bits of every gradient stay, and the hidden tensor is not kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from timm.layers import GluMlp, SwiGLU, SwiGLUPacked
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from lowmem_patch import PatchReport, patch_model, patch_report, saved_bytes
from tests.support.configs import FOLD_AND_SHARE, RECOMPUTE
from tests.support.judge import assert_equal, assert_same_step
from tests.support.models import EVERY_FAMILY, build
from tests.support.quantised import in_bits
from tests.support.step import step
from tests.support.toys import Around, Toy, assert_same_steps, batch, patched_twin

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

EPS = torch.finfo(torch.float32).eps
# they write GELU's formula in Python, which rounds otherwise than a kernel
FORMULAS = ("t5", "gpt2")
# values of hidden tensors of the whole model, by hand: rows x width, over all layers
HIDDEN = {
    "timm-vit": 2 * 17 * 128 * 2, "vit": 2 * 17 * 64 * 2, "llama": 18 * 48 * 2, "gemma": 18 * 48,
    "phi3": 18 * 48, "bert": 18 * 48 * 2, "roberta": 18 * 48, "t5": (18 + 10) * 48,
    "timm-swin": (128 * 64) * 2 + 32 * 128,
    "swin": (128 * 64) * 2 + 32 * 128, "mistral": 18 * 48 * 2, "qwen2": 18 * 48 * 2, "qwen3": 18 * 48 * 2,
    "gpt2": 18 * 128 * 2,
}  # fmt: skip


def compare(model: Any, inputs: Any, judge: str = "bits") -> tuple[int, PatchReport]:
    """Bytes that recomputing saves; outputs and gradients must be those of the unpatched model.

    ``judge``: ``bits``, ``float64`` (its error there is the unpatched model's) or ``rounding`` (where
    float64 cannot run: other roundings of the same sums).
    """
    twin = copy.deepcopy(model)
    patch_model(model, RECOMPUTE, example_inputs=inputs)
    report = patch_report(model)
    found, expected = (step(one.train(), inputs, count=True) for one in (model, twin))
    assert (report.saved_before, report.saved_after) == (expected.saved, found.saved)
    assert set(found.gradients) == set(expected.gradients) and expected.gradients
    if judge == "bits":
        assert_equal(found, expected)
    elif judge == "float64":
        assert_same_step(model.eval(), twin.eval(), inputs)
    else:
        theirs = expected.gradients
        mean = max(float(gradient.norm()) for gradient in theirs.values()) / 100
        for name, gradient in theirs.items():
            size = max(float(gradient.norm()), mean)
            assert float((found.gradients[name] - gradient).norm()) < 32 * EPS * size, name
    return expected.saved - found.saved, report


def gates(report: PatchReport) -> set[str]:
    return {site.strategy for site in report.sites if "norm" not in site.kind}


@pytest.mark.parametrize("name", HIDDEN)
def test_every_family_recomputes_its_hidden_tensor(name: str) -> None:
    family = EVERY_FAMILY[name]
    saved, report = compare(
        build(family), family.inputs(), "float64" if name in FORMULAS else "bits"
    )
    assert gates(report) == {"recompute"}
    gated = any("product" in site.reason for site in report.patched)
    # the hidden tensor; where it is a product, act(gate) as well
    least = HIDDEN[name] * 4 * (2 if gated else 1)
    assert saved == least if name not in FORMULAS else saved >= least


@pytest.mark.parametrize("name", ["llama", "timm-vit", "bert", "phi3", "t5"])
def test_adapters_on_every_linear_recompute(name: str) -> None:
    family = EVERY_FAMILY[name]
    options = LoraConfig(r=2, target_modules=family.linears, init_lora_weights=False)
    model = get_peft_model(build(family), options)
    saved, report = compare(model, family.inputs(), "float64")  # its products are one op
    assert gates(report) == {"recompute"}
    assert saved >= HIDDEN[name] * 4


@pytest.mark.parametrize(
    "build_mlp",
    [
        lambda: SwiGLU(16, 32),
        lambda: SwiGLUPacked(16, 64),
        lambda: GluMlp(16, 64, act_layer=nn.GELU, gate_last=False),
        lambda: GluMlp(16, 64, act_layer=nn.SiLU),
    ],
    ids=["SwiGLU", "SwiGLUPacked", "GEGLU", "GluMlp"],
)
def test_gated_mlps_of_timm_recompute_their_product(build_mlp: Callable[[], nn.Module]) -> None:
    saved, report = compare(Around(build_mlp()), torch.randn(2, 5, 16))
    assert gates(report) == {"recompute"}
    assert saved == 2 * 10 * 32 * 4  # act(gate), and its product with up


@pytest.mark.filterwarnings("ignore:.*inputs will be cast")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "timm-vit"])
def test_quantised_linears_under_adapters_recompute(name: str, bits: int) -> None:
    family = EVERY_FAMILY[name]
    model = in_bits(build(family), bits)
    options = LoraConfig(r=4, target_modules=family.linears, init_lora_weights=False)
    saved, report = compare(get_peft_model(model, options), family.inputs(), "rounding")
    assert gates(report) == {"recompute"}
    assert saved == HIDDEN[name] * 4 * (2 if name == "llama" else 1)


@pytest.mark.filterwarnings("ignore:.*inputs will be cast")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_linears_with_dropout_keep_masks_in_bits(bits: int) -> None:
    family = EVERY_FAMILY["llama"]
    model = in_bits(build(family), bits)
    options = {"target_modules": family.linears, "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, **options))
    saved, report = compare(adapted, family.inputs(), "rounding")
    with saved_bytes(adapted) as kept:
        adapted(**family.inputs())
    masks = [item.bytes for item in kept.storages if item.dtype == torch.uint8]
    assert len(masks) == 2 * 7 and sum(masks) == 2 * (6 * 32 + 48) * 18 // 8
    assert saved == report.saved_before - report.saved_after > 2 * HIDDEN["llama"] * 4


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_recompute_for_each_token(experts: str) -> None:
    """Two experts for each of 18 tokens; weights are three-dimensional parameters."""
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, experts_implementation=experts,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    inputs = {"input_ids": torch.randint(0, 64, (2, 9))}
    # torch has no grouped_mm of float64
    saved, report = compare(model, inputs, "rounding" if experts == "grouped_mm" else "bits")
    assert gates(report) == {"recompute"}
    hidden, (site,) = 2 * 18 * 48 * 4, [s for s in report.patched if s.kind == "silu"]
    rows = 2 * 18 * 32 * 4
    if experts == "batched_mm":  # it keeps a copy of its expert's weights for every token
        assert saved == hidden and "is read by unsqueeze" in site.reason
    else:  # what is gathered, and of a grouped product what it gives
        others = rows if experts == "eager" else 2 * rows
        assert saved == 2 * hidden + others and "their product recomputed" in site.reason


class Expert(nn.Module):
    """One expert of several, without a gate: the weight is a part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 32) / 8)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.act(torch.cat([x, x], -1)), self.weights[1]).repeat(
            1, 1, 2
        )


def test_an_expert_without_a_gate_recomputes() -> None:
    saved, report = compare(Around(Expert()), torch.randn(2, 5, 16))
    assert gates(report) == {"recompute"}
    # neither what the activation gives, nor the repeated half of what the Linear behind reads
    assert saved == 10 * 32 * 4 + 10 * 8 * 4


class Ending(Toy):
    """The activation works before a Linear, and a second time for the output."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.down(self.act(self.up(self.norm(self.enter(x))))))
        return self.body(self, x)


@pytest.mark.parametrize("config", [*FOLD_AND_SHARE, "auto"], ids=["fold", "share", "auto"])
@pytest.mark.parametrize(
    "end",
    [
        lambda net, x: net.act(net.up(x)),
        lambda net, x: net.act(net.gate(x)) * net.up(x),
        lambda net, x: nn.functional.dropout(net.act(net.up(x)), 0.1, net.training),
        lambda net, x: nn.functional.dropout(net.act(net.gate(x)) * net.up(x), 0.1, net.training),
    ],
    ids=["activation", "product", "dropout", "dropped product"],
)
def test_what_is_returned_is_a_tensor(end: Any, config: Any) -> None:
    patched, twin, original = patched_twin(Ending(end), config)
    assert isinstance(patched.train()(batch()), Tensor)
    if config in FOLD_AND_SHARE:
        assert_same_steps(*(model.eval() for model in (patched, twin, original)))

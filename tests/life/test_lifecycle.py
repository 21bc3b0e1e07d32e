"""What people do to a model around patching: copy, store, load, cast, freeze, train, wrap, undo."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from lowmem_patch import api, patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.errors import PatchError, UnfoldedWeightsError
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.strategies import fold
from tests.support.configs import FOLD, SHARE
from tests.support.judge import (
    UNFOLDED,
    assert_close,
    assert_same_function,
    assert_same_outputs,
    assert_same_step,
)
from tests.support.models import FAMILIES, doubles
from tests.support.step import DOUBLE, MODES, StayInFloat64, cast, step, twin_of
from tests.support.toys import Toy, batch, gated

Make = Callable[[str], Any]
FP32 = MODES["fp32"]


def patched_norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, MSNorm)]


@pytest.mark.parametrize("config", ["exact", FOLD], ids=["share", "fold"])
@pytest.mark.parametrize("name", ["llama", "gemma", "vit", "bert", "t5"])
def test_save_pretrained_is_a_stock_checkpoint(
    name: str, config: Any, make: Make, tmp_path: Path
) -> None:
    inputs, model = FAMILIES[name].inputs(), make(name)
    before = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs).save_pretrained(tmp_path)
    headless = {"add_pooling_layer": False} if name in ("vit", "bert") else {}
    stock = type(model).from_pretrained(tmp_path, **headless).eval()
    assert not patched_norms(stock)
    assert_same_outputs(stock, before, inputs)


@pytest.mark.parametrize("name", ["timm-vit", "vit", "llama"])
def test_trainer_decays_the_weights_that_it_decays_unpatched(name: str, make: Make) -> None:
    """It leaves out torch's LayerNorms by their class, whatever they are called (ln_1, norm1)."""
    inputs, model = FAMILIES[name].inputs(), make(name)
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
    one, two = (
        get_parameter_names(m, [nn.LayerNorm], ["bias", "layernorm", r"(?:^|\.)norm(?:$|\.)"])
        for m in (patched, model)
    )
    assert patched_norms(patched) and one == two


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_stock_norms_stay_instances_of_their_class(norm: Any) -> None:
    net = Toy(gated)
    net.norm = norm(8)
    patch_model(net, SHARE, example_inputs=batch())
    assert isinstance(net.norm, MSNorm) and isinstance(net.norm, norm)
    assert net.norm.normalized_shape == (8,)


@pytest.mark.parametrize("preset", ["exact", "paper"])
@pytest.mark.parametrize("name", ["timm-vit", "llama"])
def test_eps_that_is_set_after_the_patch_counts(name: str, preset: str, make: Make) -> None:
    """Under the name that the model's norms give it, also in what `unpatch_model` puts back."""
    inputs, model = FAMILIES[name].inputs(), make(name)
    stock = copy.deepcopy(model)
    patch_model(model, preset, example_inputs=inputs)
    for net in (model, stock):
        for module in net.modules():
            for eps in ("eps", "variance_epsilon"):
                if isinstance(getattr(module, eps, None), float):
                    setattr(module, eps, 0.1)
    assert_same_outputs(model, stock, inputs)
    assert_same_outputs(copy.deepcopy(model), stock, inputs)
    assert_same_outputs(unpatch_model(model), stock, inputs)


def test_eps_that_was_left_to_torch_can_be_set() -> None:
    net = Toy(gated)
    net.norm = nn.RMSNorm(8)
    stock = copy.deepcopy(net)
    patch_model(net, SHARE, example_inputs=batch())
    assert net.norm.eps is None
    net.norm.eps = stock.norm.eps = 0.1
    assert_same_outputs(net, stock, batch())
    assert_same_outputs(unpatch_model(net), stock, batch())


def test_parameters_that_torch_swaps(make: Make) -> None:
    """As torch does for some subclasses always: ``.to()`` and loading make no other Parameter objects."""
    model, inputs = doubles(make, "bert")
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=inputs)
    model.train()(**inputs)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.float().double()
        model.load_state_dict(stock.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same_function(model, stock, inputs)


def test_optimizer_with_gradients_from_before_a_fold() -> None:
    """Left over, they would move the identity that the checkpoint must hold."""
    net = Toy(gated)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(batch()).sum().backward()
    optimizer.step()
    patch_model(net, FOLD, example_inputs=batch())
    optimizer.zero_grad(set_to_none=False)
    with pytest.warns(UserWarning, match="make the optimizer after the patch"):
        net(batch()).sum().backward()
    optimizer.step()
    stock = Toy(gated)
    stock.load_state_dict(net.state_dict())
    assert_same_outputs(net, stock, batch())


def test_patching_draws_no_random_numbers(make: Make) -> None:
    model = make("llama")
    before = torch.get_rng_state()
    patch_model(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_folded_state_dict_into_a_fresh_timm_model(make: Make) -> None:
    inputs, model = FAMILIES["timm-vit"].inputs(), make("timm-vit")
    before = copy.deepcopy(model)
    patch_model(model, FOLD, example_inputs=inputs)
    stock = FAMILIES["timm-vit"].build().eval()
    stock.load_state_dict(model.state_dict())
    assert bool((stock.blocks[0].norm1.weight == 1).all())
    assert_same_outputs(stock, before, inputs)


@pytest.mark.parametrize("config", [FOLD, SHARE], ids=["fold", "share"])
def test_copies_are_patched_and_undone_on_their_own(config: Any, make: Make) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    plain = make("llama")
    patch_model(model, config, example_inputs=inputs)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert patch_report(other) == patch_report(model)
        assert_same_step(other, twin_of(plain, model), inputs, FP32)
        patch_model(other, config, example_inputs=inputs)  # nothing to do
        with torch.no_grad():
            other.lm_head.weight.mul_(2.0)
        unpatch_model(other)
        assert not patched_norms(other) and not other._forward_pre_hooks
        if config is FOLD:  # its own hook is gone: unfolded weights are welcome
            other.load_state_dict(plain.state_dict())
            with pytest.raises(UnfoldedWeightsError):
                model.load_state_dict(plain.state_dict())
        assert patched_norms(model)
    assert_same_step(model, twin_of(plain, model), inputs, FP32)


@pytest.mark.parametrize("name", ["llama", "gemma", "timm-swin", "bert"])
def test_a_cast_after_patching_trains_the_same(name: str, make: Make) -> None:
    inputs, plain = FAMILIES[name].inputs(), make(name)
    for config in ("exact", FOLD):
        model = patch_model(copy.deepcopy(plain), config, example_inputs=inputs)
        twin = twin_of(plain, model)
        for dtype in ("bf16", "fp32"):
            cast(model, MODES[dtype].weights), cast(twin, MODES[dtype].weights)
            assert_same_step(model, twin, inputs, MODES[dtype])
    moved = patch_model(copy.deepcopy(plain), FOLD, example_inputs=inputs).to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in unpatch_model(moved).parameters())


def test_unfolded_weights_are_refused_before_anything_is_loaded(make: Make) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    unfolded = {key: value + 1 for key, value in model.state_dict().items()}
    patch_model(model, FOLD, example_inputs=inputs)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for holder, state in (
        (model, unfolded),
        (nn.ModuleDict({"inner": model}), {f"inner.{k}": v for k, v in unfolded.items()}),
    ):
        with pytest.raises(
            UnfoldedWeightsError, match=r"input_layernorm.weight is not 1 everywhere"
        ):
            holder.load_state_dict(state)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    folded = {key: value.clone() for key, value in before.items()}
    folded["lm_head.weight"] *= 2
    model.load_state_dict(folded)
    assert torch.equal(model.lm_head.weight, folded["lm_head.weight"])


def test_loaded_weights_that_cannot_be_divided_out_are_right() -> None:
    plain = Toy(gated)
    net = patch_model(copy.deepcopy(plain), SHARE, example_inputs=batch())
    state = {key: value.clone() for key, value in net.state_dict().items()}
    state["norm.weight"][3] = 1e-20
    for model in (net, plain):
        model.load_state_dict(state)
    assert_same_step(net, plain, batch())


def test_training_a_folded_model_and_unfolding_it(make: Make) -> None:
    model, inputs = doubles(make, "llama")
    plain = copy.deepcopy(model)
    patch_model(model, FOLD, example_inputs=inputs)
    twin = twin_of(plain, model)
    for each in (model, twin):
        trained = [parameter for parameter in each.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05)
        for _ in range(3):
            with StayInFloat64():
                each(**inputs).logits.square().mean().backward()
            # data-parallel training waits for a gradient of each of these
            assert all(parameter.grad is not None for parameter in trained)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_function(model, twin, inputs)
    unpatch_model(model)
    assert torch.equal(
        model.model.layers[0].input_layernorm.weight, plain.model.layers[0].input_layernorm.weight
    )
    after, trained_output = (step(m, inputs, DOUBLE, backward=False) for m in (model, twin))
    assert_close(after.output, trained_output.output, "logits")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
def test_another_config_plans_from_the_original(make: Make) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    before = copy.deepcopy(model)
    fresh = {c: plan_patch(model, c, example_inputs=inputs) for c in ("paper", "exact", "auto")}
    for config in ("paper", "exact", "auto", "exact", "paper"):
        assert plan_patch(model, config, example_inputs=inputs) == fresh[config]
        patch_model(model, config, example_inputs=inputs)
        assert patch_report(model) == fresh[config]
        assert_same_outputs(model, before, inputs)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_patching_again_without_a_preset_keeps_the_earlier_one(make: Make) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    patch_model(model, "exact", example_inputs=inputs)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert plan_patch(model, example_inputs=inputs).config.name == "exact"
    patch_model(model, example_inputs=inputs)
    assert patch_report(model).config.name == "exact"
    patch_model(model, "auto", example_inputs=inputs)
    assert patch_report(patch_model(model)).config.name == "auto"


def test_freezing_then_patching_again_plans_anew(make: Make) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    patch_model(model, FOLD, example_inputs=inputs)
    assert patch_report(model).fold_steps
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    patch_model(model, "auto", example_inputs=inputs)
    assert not patch_report(model).fold_steps
    trains = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trains == ["model.embed_tokens.weight"]  # unfolding must not wake what was frozen since
    assert {s.strategy for s in patch_report(model).patched} == {"share", "recompute"}


def test_training_a_folded_norm_is_refused() -> None:
    net = patch_model(Toy(gated), FOLD, example_inputs=batch())
    net.requires_grad_(True)
    with pytest.raises(PatchError, match="patch_model again"):
        net(batch())
    with torch.no_grad():
        net(batch())
    patch_model(net, FOLD, example_inputs=batch())
    net(batch())


def test_patched_parts_of_a_larger_model(make: Make) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    before = copy.deepcopy(model)
    hidden = torch.randn(1, 4, 32)
    for layer in model.model.layers:
        patch_model(layer.mlp, {"norms": "keep", "activations": "recompute"}, example_inputs=hidden)
    patch_model(model, "exact", example_inputs=inputs)
    with pytest.raises(PatchError, match="part of a patched model"):
        patch_model(model.model.layers[0].mlp, "exact", example_inputs=hidden)
    assert_same_outputs(model, before, inputs)
    unpatch_model(model)
    assert type(model.model.layers[1].mlp.act_fn).__name__.startswith("SiLU")
    with pytest.raises(PatchError, match="is not patched"):
        patch_report(model)


def test_unpatching_what_is_not_patched_does_nothing() -> None:
    net = Toy(gated)
    assert unpatch_model(net) is net


def test_failing_apply_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    values = {key: value.clone() for key, value in model.state_dict().items()}
    modules = {name: id(module) for name, module in model.named_modules()}
    real, folds = fold.fold_step, []

    def fails_at_the_third(target: Any, step: Any) -> Any:
        folds.append(step.norm)
        if len(folds) == 3:
            raise RuntimeError("no memory left")
        return real(target, step)

    monkeypatch.setattr(fold, "fold_step", fails_at_the_third)
    with pytest.raises(PatchError, match=r"put back as it was.*no memory left"):
        patch_model(model, FOLD, example_inputs=inputs)
    assert {name: id(module) for name, module in model.named_modules()} == modules
    assert all(parameter.requires_grad for parameter in model.parameters())
    for key, value in model.state_dict().items():
        assert_close(value, values[key], key, UNFOLDED)  # a folded one is off by a factor of gamma
    with pytest.raises(PatchError, match="is not patched"):
        patch_report(model)


# the norm before the MLP of the second layer is wrong: the first module to differ is what reads it
@pytest.mark.parametrize("config", [FOLD, SHARE], ids=["fold", "share"])
@pytest.mark.parametrize("planted", ["wrong", "raises"])
def test_check_undoes_a_wrong_patch(
    planted: str, config: Any, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    inputs, model = FAMILIES["llama"].inputs(), make("llama")
    before, keys = copy.deepcopy(model), list(model.state_dict())
    real = api.apply_plan

    def wrong(target: Any, plan: Any, **options: Any) -> Any:
        applied = real(target, plan, **options)
        if target is model:
            norm: Any = model.get_submodule("model.layers.1.post_attention_layernorm")
            eps: Any = 3.0 if planted == "wrong" else "none"
            norm.settings, norm.eps_name = norm.settings._replace(eps=eps), ""
        return applied

    monkeypatch.setattr(api, "apply_plan", wrong)
    with pytest.raises(PatchError, match="undone") as raised:
        patch_model(model, config, example_inputs=inputs, check=True)
    if planted == "wrong":
        first = "mlp.gate_proj" if config is FOLD else "post_attention_layernorm"
        assert f"the first module whose output differs is model.layers.1.{first}:" in str(
            raised.value
        )
    assert not patched_norms(model)
    assert list(model.state_dict()) == keys
    assert_same_outputs(model, before, inputs)
    monkeypatch.undo()
    patch_model(model, config, example_inputs=inputs, check=True)
    assert patched_norms(model)


def test_no_warning_is_given_where_something_is_patched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(Toy(gated), "auto", example_inputs=batch())

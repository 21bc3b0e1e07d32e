"""Adapters before and after the patch: the same function, and adapters that fit the stock base."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from transformers.integrations.peft import MIN_PEFT_VERSION

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.errors import PatchError
from lowmem_patch.nn.own import given_forward, is_own
from lowmem_patch.strategies.swap import is_replacement
from tests.support.configs import AUTO_WITHOUT_CODES
from tests.support.judge import (
    assert_close,
    assert_same_function,
    assert_same_parameters,
    assert_same_step,
)
from tests.support.models import FAMILIES, doubles, fill_adapters, randomise
from tests.support.step import DOUBLE, bytes_of, step, trained, warned
from tests.support.versions import before

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
Make = Callable[[str], Any]
CONFIGS = {"auto": AUTO_WITHOUT_CODES, "exact": "exact"}
BOTH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
ADDED = "14 adapter layers were added since the patch"


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": FAMILIES["llama"].linears, **options})


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return fill_adapters(get_peft_model(model, lora(**options))).double()


def silent(model: Any, inputs: Any) -> None:
    """A training forward of which nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        copy.deepcopy(model).train()(**inputs)


@BOTH
@pytest.mark.parametrize("order", ["before", "after", "again"])
def test_get_peft_model_and_the_patch_in_any_order(order: str, config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    stock = adapted(copy.deepcopy(model))
    if order != "before":
        patch_model(model, config, example_inputs=inputs)
    model = adapted(model)
    if order != "after":
        patch_model(model, config, example_inputs=inputs)
    assert_same_parameters(model, stock)
    assert_same_function(model, stock, inputs)
    if order != "after":
        silent(model, inputs)
        fresh = patch_model(copy.deepcopy(stock), config, example_inputs=inputs)
        assert bytes_of(model, inputs) == bytes_of(fresh, inputs) < bytes_of(stock, inputs)


@BOTH
@pytest.mark.parametrize("order", ["before", "after"])
def test_trained_adapter_fits_the_stock_base(
    order: str, config: Any, make: Make, tmp_path: Path
) -> None:
    model, inputs = doubles(make, "llama")
    base = copy.deepcopy(model)
    if order == "after":
        patch_model(model, config, example_inputs=inputs)
    model = adapted(model)
    if order == "before":
        patch_model(model, config, example_inputs=inputs)
    trained(model.eval(), inputs, steps=3).save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path).double()
    found, expected = (step(net, inputs, DOUBLE, backward=False) for net in (loaded, model))
    assert_close(found.outputs[0], expected.outputs[0], "output")


@BOTH
@pytest.mark.parametrize("order", ["before", "after"])
def test_from_pretrained_and_the_patch_in_any_order(
    order: str, config: Any, make: Make, tmp_path: Path
) -> None:
    model, inputs = doubles(make, "llama")
    stock = adapted(copy.deepcopy(model))
    stock.save_pretrained(tmp_path)
    if order == "after":
        patch_model(model, config, example_inputs=inputs)
    model = PeftModel.from_pretrained(model, tmp_path, is_trainable=True).double()
    if order == "before":
        patch_model(model, config, example_inputs=inputs)
    assert_same_parameters(model, stock)
    assert_same_function(model, stock, inputs)


@BOTH
def test_second_adapter_and_switching_after_the_patch(config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    model = adapted(model)
    stock = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    for net in (model, stock):
        torch.manual_seed(1)
        net.add_adapter("second", lora(r=3))
        fill_adapters(net).double()
    assert_same_function(model, stock, inputs)
    for name in ("second", "default"):
        for net in (model, stock):
            net.set_adapter(name)
        assert_same_function(model, stock, inputs)
        silent(model, inputs)


@BOTH
def test_loaded_adapter_after_the_patch(config: Any, make: Make, tmp_path: Path) -> None:
    model, inputs = doubles(make, "llama")
    adapted(copy.deepcopy(model), r=3).save_pretrained(tmp_path)
    model = adapted(model)
    stock = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    for net in (model, stock):
        net.load_adapter(tmp_path, "loaded", is_trainable=True)
        net.double().set_adapter("loaded")
    assert_same_parameters(model, stock)
    assert_same_function(model, stock, inputs)


@pytest.mark.skipif(
    before("peft", MIN_PEFT_VERSION),
    reason=f"transformers' own adapters need PEFT {MIN_PEFT_VERSION}",
)
@BOTH
def test_transformers_own_add_adapter_after_the_patch(config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    stock = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    for net in (model, stock):
        torch.manual_seed(0)
        net.add_adapter(lora())
        fill_adapters(net).double()
    assert_same_function(model, stock, inputs)
    with warned() as texts:
        model.train()(**inputs)
    assert len(texts) == 1 and ADDED in texts[0]


@BOTH
def test_modules_to_save_of_a_norm_train(config: Any, make: Make) -> None:
    options = {"modules_to_save": ["input_layernorm", "lm_head"]}
    for order in ("before", "after"):
        model, inputs = doubles(make, "llama")
        stock = adapted(copy.deepcopy(model), **options)
        if order == "after":
            patch_model(model, config, example_inputs=inputs)
        model = adapted(model, **options)
        if order == "before":
            patch_model(model, config, example_inputs=inputs)
        assert_same_function(model, stock, inputs)
        assert any("input_layernorm" in n for n in step(model, inputs, DOUBLE).gradients)


@BOTH
def test_disabled_adapters_give_the_base_back(config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    base = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    model = adapted(model)
    with model.disable_adapter():
        found = step(model, inputs, DOUBLE, backward=False).outputs[0]
    assert_close(found, step(base, inputs, DOUBLE, backward=False).outputs[0], "output")
    merged = model.merge_and_unload()
    unpatch_model(merged)
    expected = adapted(base).merge_and_unload()
    for net in (merged, expected):
        net.requires_grad_(True)
    assert_same_function(merged, expected, inputs)


@BOTH
def test_merged_model_can_be_put_back_without_the_whole(config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    model = adapted(model)
    expected = copy.deepcopy(model).merge_and_unload()
    merged = patch_model(model, config, example_inputs=inputs).merge_and_unload()
    for call in (patch_report, partial(patch_model, example_inputs=inputs)):
        with pytest.raises(PatchError, match=r"part of a patched model.*merge_and_unload"):
            call(merged)
    unpatch_model(merged)
    assert not any(is_replacement(module) for module in merged.modules())
    assert not any(map(is_own, map(given_forward, merged.modules())))
    for net in (merged, expected):
        net.requires_grad_(True)
    assert_same_function(patch_model(merged, config, example_inputs=inputs), expected, inputs)
    assert patch_report(merged).patched


@BOTH
def test_late_adapters_are_said_once_and_mended(config: Any, make: Make) -> None:
    model, inputs = make("llama"), FAMILIES["llama"].inputs()
    patch_model(model, config, example_inputs=inputs)
    torch.manual_seed(0)
    model = get_peft_model(model, lora()).train()
    with torch.no_grad():
        model(**inputs)
    with warned() as texts:
        model(**inputs)
        model(**inputs)
    assert len(texts) == 1 and ADDED in texts[0] and "call patch_model(model) again" in texts[0]
    assert [note for note in patch_report(model).notes if ADDED in note] == texts
    late = bytes_of(model, inputs)
    patch_model(model, config, example_inputs=inputs)
    silent(model, inputs)
    assert bytes_of(model, inputs) == patch_report(model).saved_after <= late
    assert not [note for note in patch_report(model).notes if ADDED in note]


@BOTH
def test_layers_frozen_after_the_patch_are_said(config: Any, make: Make) -> None:
    model, inputs = doubles(make, "timm-vit")
    stock = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    for net in (model, stock):
        net.blocks[0].requires_grad_(False)
    assert_same_function(model, stock, inputs)
    with warned() as texts:
        model.train()(**inputs)
    assert len(texts) == 1 and "12 parameters that trained at the patch are frozen" in texts[0]
    patch_model(model, config, example_inputs=inputs)
    silent(model, inputs)
    fresh = patch_model(stock, config, example_inputs=inputs)
    assert bytes_of(model, inputs) == bytes_of(fresh, inputs)


def test_timm_vit_with_late_adapters_is_right(make: Make) -> None:
    model, inputs = doubles(make, "timm-vit")
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=inputs)
    options = {"target_modules": FAMILIES["timm-vit"].linears, "modules_to_save": ["head"]}
    model, stock = adapted(model, **options), adapted(stock, **options)
    assert_same_function(model, stock, inputs)
    patch_model(model, "exact", example_inputs=inputs)
    assert_same_function(model, stock, inputs)
    silent(model, inputs)


def test_a_mixed_model_needs_no_example_inputs(make: Make) -> None:
    """PeftMixedModel, which has no ``get_base_model``."""
    model = make("llama")
    linears = {"first": ["q_proj"], "second": ["down_proj"]}
    mixed = get_peft_model(model, lora(target_modules=linears["first"]), "first", mixed=True)
    mixed.add_adapter("second", LoHaConfig(r=2, target_modules=linears["second"]))
    mixed.set_adapter(["first", "second"])
    twin = copy.deepcopy(randomise(mixed))
    assert patch_report(patch_model(mixed, "exact")).patched
    assert_same_step(mixed, twin, FAMILIES["llama"].inputs())

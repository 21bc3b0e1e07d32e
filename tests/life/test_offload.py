"""accelerate's offloading: weights that come at each call, before the patch and after it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.errors import BudgetError
from lowmem_patch.nn.deferred import Deferred
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import is_own
from tests.support.fitted import assert_predicted, planned_once, tokens
from tests.support.judge import assert_accurate
from tests.support.models import FAMILIES, build
from tests.support.quantised import qlora as four_bits
from tests.support.step import Step, step, truth_of

FAMILY = FAMILIES["llama"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TOKENS, INNER = 18, 48  # of the example inputs; values of a gate for each of them


def offloaded(model: Any, where: str, folder: Path) -> Any:
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return model


def embedded() -> dict[str, Tensor]:
    embeddings = torch.randn(2, TOKENS // 2, 32, generator=torch.Generator().manual_seed(0))
    return {"inputs_embeds": embeddings.requires_grad_()}


def embedding_alone(found: Step) -> Step:
    """Weights that come and go get no gradient."""
    name = "input.inputs_embeds"
    return found._replace(gradients={name: found.gradients[name]})


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_before_the_patch_saves_what_can_be_saved(where: str, tmp_path: Path) -> None:
    plain = build(FAMILY).train()
    twin = offloaded(copy.deepcopy(plain), where, tmp_path / "twin")
    model = offloaded(copy.deepcopy(plain), where, tmp_path / "model")
    inputs = embedded()
    patch_model(model, "exact", example_inputs=inputs)
    report = patch_report(model)
    strategies = {site.name.rpartition(".")[2]: site.strategy for site in report.sites}
    assert strategies["act_fn"] == "recompute"
    assert {site.reason for site in report.left_alone} == {
        "its forward is overridden on the instance"
    }
    assert any("weights are offloaded" in n and "patch before that" in n for n in report.notes)
    assert not any("kernels of their own" in note for note in report.notes)
    found, own = (step(one, inputs, count=True) for one in (model, twin))
    assert_accurate(found, own, embedding_alone(truth_of(plain, inputs)))
    # the output of silu and its product with up, in each of two blocks
    gained = own.saved - found.saved
    assert gained == 2 * 2 * 4 * TOKENS * INNER
    assert report.saved_before - report.saved_after == gained


def test_offloaded_after_the_patch_computes_the_same(tmp_path: Path) -> None:
    plain = build(FAMILY).train()
    twin = offloaded(copy.deepcopy(plain), "cpu", tmp_path)
    inputs = embedded()
    truth = embedding_alone(truth_of(plain, inputs))
    patch_model(plain, "exact", example_inputs=FAMILY.inputs())
    model = offloaded(plain, "cpu", tmp_path)
    found, own = (step(one, inputs, count=True) for one in (model, twin))
    assert_accurate(found, own, truth)
    assert found.saved < own.saved


@pytest.mark.parametrize("first", ["hooks", "patch"])
def test_a_head_whose_weight_stays_is_deferred(first: str) -> None:
    """``device_map`` on one device puts a hook on each module, and moves no weight."""
    plain = build(FAMILY).train()
    inputs = {**FAMILY.inputs()}
    inputs["labels"] = inputs["input_ids"]
    model, own = copy.deepcopy(plain), step(copy.deepcopy(plain), inputs)
    for act in (first, "patch" if first == "hooks" else "hooks"):
        if act == "hooks":
            accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
            assert hasattr(model.lm_head, "_hf_hook")
        else:
            patch_model(model, {"norms": "keep", "activations": "keep"}, example_inputs=inputs)
    assert any("lm_head: its" in note for note in patch_report(model).notes)
    logits = model(**FAMILY.inputs()).logits
    assert isinstance(logits, Deferred)
    assert_accurate(step(model, inputs), own, truth_of(plain, inputs))
    assert not any("computed at once" in note for note in patch_report(model).notes)
    unpatch_model(model)
    assert not isinstance(model(**FAMILY.inputs()).logits, Deferred)
    assert hasattr(model.lm_head, "_hf_hook")


def test_a_head_whose_weight_leaves_says_so(tmp_path: Path) -> None:
    model = patch_model(build(FAMILY).train(), "exact", example_inputs=FAMILY.inputs())
    offloaded(model, "cpu", tmp_path)
    model(**embedded())
    assert any("its weight is freed" in note for note in patch_report(model).notes)


def test_undo_leaves_the_offloading(tmp_path: Path) -> None:
    model = offloaded(build(FAMILY), "cpu", tmp_path)
    twin = copy.deepcopy(model)
    kinds = [type(module) for module in model.modules()]
    unpatch_model(patch_model(model, "exact", example_inputs=FAMILY.inputs()))
    assert [type(module) for module in model.modules()] == kinds
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(**FAMILY.inputs()).logits, twin(**FAMILY.inputs()).logits)


def qlora(dispatched: bool) -> Any:
    torch.manual_seed(0)
    options = {"target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.1}
    model = get_peft_model(build(FAMILY), LoraConfig(r=4, **options)).train()
    if dispatched:
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    return model


@pytest.mark.parametrize("preset", ["auto", "exact", "compact"])
def test_hooks_of_a_device_map_change_nothing(preset: str) -> None:
    """What is patched runs beneath accelerate's hooks, and saves the same."""
    inputs = FAMILY.inputs()
    plain, hooked = (
        patch_model(qlora(dispatched), preset, example_inputs=inputs)
        for dispatched in (False, True)
    )
    sites = [[(s.name, s.strategy) for s in patch_report(m).sites] for m in (plain, hooked)]
    assert sites[0] == sites[1]
    norms = [m for m in hooked.modules() if isinstance(m, MSNorm)]
    assert norms and all(hasattr(m, "_hf_hook") for m in hooked.modules() if list(m.parameters()))
    wanted, found = (step(model, inputs, count=True) for model in (plain, hooked))
    assert found.saved == wanted.saved == patch_report(hooked).saved_after
    assert all(map(torch.equal, found.outputs, wanted.outputs))
    assert all(torch.equal(g, wanted.gradients[n]) for n, g in found.gradients.items())
    assert found.gradients.keys() == wanted.gradients.keys()


def test_the_hook_of_a_replaced_module_runs() -> None:
    model = qlora(dispatched=True)
    patch_model(model, "exact", example_inputs=FAMILY.inputs())
    norm: Any = next(m for m in model.modules() if isinstance(m, MSNorm))
    before, seen = norm._hf_hook.pre_forward, []
    norm._hf_hook.pre_forward = lambda m, *args: (seen.append(m), before(m, *args))[1]
    norm(torch.randn(2, 32))
    assert seen == [norm]


def test_undo_leaves_the_hooks_as_they_are_now() -> None:
    inputs, models = FAMILY.inputs(), [qlora(dispatched=True) for _ in range(2)]
    with planned_once():
        least = least_budget(models[0], inputs)
        for model in models:
            patch_model(model, "exact", example_inputs=inputs, fit=least)
    for removed, model in zip((False, True), models, strict=True):
        twin = qlora(dispatched=True)
        for one in (twin, model) if removed else ():
            accelerate.hooks.remove_hook_from_module(one, recurse=True)
        assert_undone(unpatch_model(model), twin, removed)
        found, wanted = step(model, inputs, count=True), step(twin, inputs, count=True)
        assert found.saved == wanted.saved
        assert all(torch.equal(g, wanted.gradients[n]) for n, g in found.gradients.items())


def assert_undone(model: Any, twin: Any, removed: bool) -> None:
    pairs = zip(model.named_modules(), twin.named_modules(), strict=True)
    for (name, module), (_, own) in pairs:
        assert type(module) is type(own), name
        assert (
            hasattr(module, "_hf_hook")
            == hasattr(own, "_hf_hook")
            == (not removed and bool(list(own.parameters()) or own is twin))
        ), name
        for slot in ("forward", "_old_forward"):
            forwards = [getattr(m, slot, None) for m in (module, own)]
            kinds = [getattr(f, "__func__", getattr(f, "func", f)) for f in forwards]
            names = {getattr(kind, "__qualname__", None) for kind in kinds}
            assert len(names) == 1 and not is_own(forwards[0]), (name, slot)


def test_a_budget_beneath_hooks_holds() -> None:
    """A model in 4 bits on one device, as ``from_pretrained`` with ``device_map`` loads it."""
    inputs = {"input_ids": tokens(2, 24)}
    model = four_bits("4bit")
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with planned_once():
        patch_model(model, "exact", example_inputs=inputs, fit=least_budget(model, inputs))
    report = patch_report(model).fit
    assert report is not None and "patched" not in report.levels
    assert_predicted(report, model, inputs)


def least_budget(model: Any, inputs: Any) -> int:
    with pytest.raises(BudgetError) as error:
        plan_patch(model, "exact", example_inputs=inputs, fit=1)
    assert error.value.least is not None
    return error.value.least

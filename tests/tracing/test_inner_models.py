"""A model inside another module is found where the module itself says nothing of its inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForMultipleChoice

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.errors import TraceError
from lowmem_patch.planning.report import find_records
from lowmem_patch.tracing.base_model import base_model
from lowmem_patch.tracing.example_inputs import inner_models
from tests.support.models import FAMILIES, build, llama


class Wrapped(nn.Module):
    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(models)

    def forward(self, tokens: torch.Tensor) -> Any:
        return [model(input_ids=tokens).logits.mean() for model in self.inner]


TOKENS = torch.arange(4, 12)[None]


def test_the_only_model_is_patched_and_unpatched() -> None:
    wrapped, alone = Wrapped(llama()), patch_model(llama(), "exact")
    assert plan_patch(wrapped, "exact").model == "LlamaForCausalLM"
    assert patch_model(wrapped, "exact") is wrapped
    assert patch_model(wrapped, "exact") is wrapped and len(find_records(wrapped)) == 1
    assert patch_report(wrapped).saved_after == patch_report(alone).saved_after
    with saved_bytes(wrapped) as ours:
        wrapped(TOKENS)
    with saved_bytes(alone) as theirs:
        alone(input_ids=TOKENS).logits.mean()
    assert ours.activations == theirs.activations
    unpatch_model(wrapped)
    assert not find_records(wrapped)


def test_what_trains_is_meant() -> None:
    wrapped = Wrapped(llama().requires_grad_(False), llama())
    patch_model(wrapped, "exact")
    ((holder, _),) = find_records(wrapped)
    assert holder is wrapped.inner[1]


def test_a_model_held_twice_is_one() -> None:
    model = llama()
    patch_model(Wrapped(model, model), "exact")
    assert patch_report(model).patched


def test_several_are_named() -> None:
    with pytest.raises(TraceError, match=r"Wrapped holds 2 models that train \(inner.0, inner.1\)"):
        patch_model(Wrapped(llama(), llama()))


def test_example_inputs_mean_the_whole() -> None:
    wrapped = Wrapped(llama(), llama())
    patch_model(wrapped, "exact", example_inputs=TOKENS)
    ((holder, _),) = find_records(wrapped)
    assert holder is wrapped
    assert patch_model(wrapped, "exact") is wrapped and len(find_records(wrapped)) == 1


def test_a_module_without_any_asks_for_inputs() -> None:
    with pytest.raises(TraceError, match="neither a transformers, a timm nor a diffusers model"):
        patch_model(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))


def test_inputs_that_were_made_and_do_not_fit_name_the_mend() -> None:
    model = BertForMultipleChoice(build(FAMILIES["bert"]).config)
    with pytest.raises(TraceError, match="pass a batch of your own as example_inputs=") as caught:
        patch_model(model)
    assert "could not be run on the example inputs (input_ids 2x16)" in str(caught.value)
    tokens = torch.ones(2, 3, 8, dtype=torch.int64)  # two rows of three choices
    patch_model(model, example_inputs={"input_ids": tokens})
    with pytest.raises(TraceError) as given:
        patch_model(model, example_inputs={"input_ids": tokens[0, 0]})
    assert "pass a batch" not in str(given.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_part_is_no_wrapper_of_peft() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))  # type: ignore[no-untyped-call]
    assert base_model(scripted) is scripted
    whole = nn.Sequential(nn.LayerNorm(4), scripted)
    assert inner_models(whole) == [whole]

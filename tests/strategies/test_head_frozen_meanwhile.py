"""head: whether a weight trains is decided where the head runs, though its logits are read later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lowmem_patch import patch_model
from tests.support.heads import CLASSES, HEAD, IDS, llama, logits_of, run, truth, whole_reads
from tests.support.judge import assert_accurate

READERS = {
    "cross entropy": lambda y: F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1)),
    "rows": lambda y: F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1), reduction="none").sum(),
    "gather": lambda y: -y.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).mean(),
    "a score": lambda y: y.gather(-1, IDS.unsqueeze(-1)).mean(),
    "logsumexp": lambda y: y.logsumexp(-1).mean(),
    "whole": lambda y: y.square().mean(),
}


@pytest.mark.filterwarnings("ignore:.*are frozen now:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_a_head_frozen_or_trained_between_its_run_and_the_loss(
    reader: str, trains: bool, tied: bool
) -> None:
    def loss_of(model: Any) -> Tensor:
        model.lm_head.weight.requires_grad_(trains)
        logits = logits_of(model)
        model.lm_head.weight.requires_grad_(not trains)
        loss: Tensor = READERS[reader](logits)
        model.lm_head.weight.requires_grad_(True)
        return loss

    model = llama(tied)
    patched = patch_model(copy.deepcopy(model), HEAD)
    assert_accurate(run(patched, loss_of), run(model, loss_of), truth(model, loss_of))
    assert whole_reads(patched) == (reader == "whole")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("saved", [False, True], ids=["lora on the head", "the head saved"])
def test_a_preference_loss_where_adapters_are_off(saved: bool) -> None:
    config = LoraConfig(
        r=4, target_modules=["q_proj", *([] if saved else ["lm_head"])],
        modules_to_save=["lm_head"] if saved else None, init_lora_weights=False,
    )  # fmt: skip

    def chosen(logits: Tensor) -> Tensor:
        return logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).mean((-1, -2))

    def loss_of(model: Any) -> Tensor:
        logits = logits_of(model)
        with model.disable_adapter():  # which freezes adapters inside
            with torch.no_grad():
                reference = chosen(logits_of(model))
            gained = chosen(logits) - reference
            return -F.logsigmoid(0.1 * (gained[0] - gained[1]))

    torch.manual_seed(1)
    model = get_peft_model(llama(), config).train()
    patched = patch_model(copy.deepcopy(model), "exact")
    found = run(patched, loss_of)
    assert any("lm_head" in name for name in found.gradients)
    assert_accurate(found, run(model, loss_of), truth(model, loss_of))


def test_a_write_into_the_weight_is_noticed() -> None:
    model = patch_model(llama(), HEAD)
    logits = logits_of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="were not computed before the weight"):
        READERS["whole"](logits)

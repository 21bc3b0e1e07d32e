"""Blocks that are not equal are planned with their own bytes and times; and some inputs wait on the host."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.errors import BudgetError
from lowmem_patch.planning import fit_model
from lowmem_patch.planning.fit_report import FitReport, FittedBlock
from tests.support.fitted import assert_predicted, made, planned_once, tokens
from tests.support.stacks import PlainBlock, Stack, rows
from tests.support.step import step, warned
from tests.support.tiers import slow_but

pytestmark = pytest.mark.timeout(600)


def moe() -> tuple[Any, Any]:
    """Layers with experts, and in turn without."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=192, moe_intermediate_size=16, num_hidden_layers=6,
        shared_expert_intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=2, max_position_embeddings=64,
    )  # fmt: skip
    # on fake float32 tensors grouped products have no shapes
    return Qwen2MoeForCausalLM(config).to(torch.bfloat16).train(), {"input_ids": tokens()}


def kind_of(name: str, site: str) -> str:
    if name == "moe":
        return "experts" if int(site.rsplit(".", 1)[1]) % 2 else "dense"
    return site.rsplit(".", 2)[0] if name == "swin" else site.split(".")[-3]


def fit_at(model: Any, inputs: Any, share: float) -> FitReport:
    """Within a share of what a patched step takes beside the weights."""
    whole = plan_patch(model, "exact", example_inputs=inputs, fit="1TiB", optimizer="sgd").fit
    assert whole is not None
    budget = whole.parameters + int(share * (whole.predicted - whole.parameters))
    found = plan_patch(model, "exact", example_inputs=inputs, fit=budget, optimizer="sgd").fit
    assert found is not None and found.predicted <= budget
    return found


@pytest.mark.parametrize(
    ("name", "share"), slow_but([("swin", 0.8), ("whisper", 0.9), ("moe", 0.8)], ("swin", 0.8))
)
def test_the_plan_differs_by_the_kind_of_block(name: str, share: float) -> None:
    model, inputs = moe() if name == "moe" else made(name)
    with planned_once():
        found = fit_at(model, inputs, share)
    kinds: dict[str, list[FittedBlock]] = defaultdict(list)
    for block in found.blocks:
        kinds[kind_of(name, block.site)].append(block)
    assert len(kinds) == 2, kinds.keys()
    one, other = kinds.values()
    assert {b.patched for b in one[1:-1]}.isdisjoint(b.patched for b in other[1:-1])
    again = [{b.seconds for b in blocks if b.level == "checkpointed"} for blocks in (one, other)]
    assert again[0].isdisjoint(again[1])
    patched = [sum(b.level == "patched" for b in blocks) / len(blocks) for blocks in (one, other)]
    assert patched[0] != patched[1], found.levels


def test_some_inputs_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Stack(PlainBlock() for _ in range(12)).train(), rows()
    monkeypatch.setattr(fit_model, "free_host_bytes", lambda: 4 * x.numel() * 4)
    with planned_once(), warned():
        with pytest.raises(BudgetError) as error:
            patch_model(model, "exact", example_inputs=x, fit=1, optimizer="sgd")
        least = error.value.least
        assert least is not None
        plain = step(patch_model(copy.deepcopy(model), "exact", example_inputs=x), x)
        patch_model(model, "exact", example_inputs=x, fit=least, optimizer="sgd")
    report = patch_report(model).fit
    assert report is not None and 0 < report.levels["host"] <= 4 and len(report.levels) > 1
    again = step(copy.deepcopy(model), x)
    assert all(torch.equal(g, plain.gradients[n]) for n, g in again.gradients.items())
    assert_predicted(report, model, x)

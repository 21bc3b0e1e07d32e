"""A step of many equal blocks, told from a step of few of them: byte for byte the step of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from lowmem_patch.config import load_config
from lowmem_patch.memory.model_states import USUAL_TRAINING
from lowmem_patch.memory.timeline import FewRuns, few_of, few_runs
from lowmem_patch.planning.fit import Fitting
from lowmem_patch.planning.planner import Planned, plan_model
from lowmem_patch.strategies.checkpointing import find_blocks
from tests.support.fitted import made, tokens
from tests.support.models import llama_of

pytestmark = pytest.mark.timeout(600)


def fitting(model: Any, inputs: Any) -> Fitting:
    planned = plan_model(model, load_config("exact"), inputs)
    return Fitting(model, planned.shadow, planned.facts, USUAL_TRAINING, host=1 << 30)


def found_few(planned: Planned) -> FewRuns | None:
    model = planned.shadow.model
    return few_runs(model, find_blocks(planned.facts), few_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 9])
def test_few_blocks_tell_the_step_of_all(count: int) -> None:
    model = llama_of(num_hidden_layers=count).train()
    found = fitting(model, {"input_ids": tokens()})
    assert found.few is not None and found.few.depth == 6 + count % 2
    few, sides = found.few, found._kept()
    assert few.depth + few.more == count
    for level, timeline in found.profiles.items():
        assert timeline == found.run({} if level == "patched" else found.all_at(level)), level
    found.few = None
    assert sides == found._kept()
    assert [few.stands_for(n) for n in (0, 2, 3, 4, count - 1)] == [0, 2, 3, 2, few.depth - 1]


@pytest.mark.slow
def test_blocks_that_differ_are_all_run() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    model, inputs = Gemma2ForCausalLM(config).train(), {"input_ids": tokens()}
    assert fitting(model, inputs).few is None
    model = llama_of(num_hidden_layers=8).train()
    model.model.layers[5].requires_grad_(False)
    planned = plan_model(model, load_config("exact"), inputs)
    assert found_few(planned) is None
    short, inputs = made("llama")  # four blocks
    planned = plan_model(short, load_config("exact"), inputs)
    assert found_few(planned) is None

"""PEFT's adapters of experts: their weights' sums with the adapters are not made, and never saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.judge import assert_accurate
from tests.support.models import randomise
from tests.support.step import FP32, MODES, Mode, cast, step, truth_of, twin_of

pytestmark = [
    # PEFT reads a name that transformers has since deprecated
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*target_parameters:RuntimeWarning"),
]

WIDTH, INNER, EXPERTS = 32, 24, 4
SIZES = {
    "vocab_size": 64, "hidden_size": WIDTH, "moe_intermediate_size": INNER, "intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "num_local_experts": EXPERTS, "num_experts": EXPERTS, "shared_expert_intermediate_size": 40,
    "head_dim": 8, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")


def adapted(name: str, how: str = "grouped_mm", rank: int = 3, **options: Any) -> Any:
    """A tiny causal LM, whose experts and attention have adapters that are not zero."""
    known = getattr(transformers, f"{name}Config")
    names = known().to_dict().keys() | {"num_local_experts"}
    sizes = {key: value for key, value in SIZES.items() if key in names}
    torch.manual_seed(0)
    config = known(**sizes, experts_implementation=how, pad_token_id=0, use_cache=False)
    model = randomise(getattr(transformers, f"{name}ForCausalLM")(config))
    given = {
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": list(PARAMETERS),
        **options,
    }
    lora = LoraConfig(r=rank, lora_alpha=5, init_lora_weights=False, **given)
    return get_peft_model(model, lora).train()


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(1, 64, (2, 9), generator=generator)}


def assert_same(model: Any, stock: Any, mode: Mode = FP32) -> None:
    """As accurate as the unpatched model; the truth is of a loop, since grouped_mm has no float64."""
    exact = copy.deepcopy(stock)
    exact.config._experts_implementation = exact.base_model.model.config._experts_implementation = (
        "eager"
    )
    own = step(stock, tokens(), mode)
    assert_accurate(step(model, tokens(), mode), own, truth_of(exact, tokens()), mode)


def weights_saved(model: Any) -> set[tuple[int, ...]]:
    """The shapes of what autograd holds of experts that are those of their weights."""
    with saved_bytes(model) as saved:
        model(**tokens())
    sizes = {tuple(sorted((WIDTH, inner))) for inner in (INNER, 2 * INNER)}
    return {
        item.shape
        for item in saved.storages
        if "experts" in item.savers[0].module and tuple(sorted(item.shape[-2:])) in sizes
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Qwen2Moe", "GptOss", "Glm4Moe"])
def test_experts_with_adapters_save_no_weights(name: str, how: str, mode: str) -> None:
    model = cast(adapted(name, how), MODES[mode].weights)
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=tokens())
    assert_same(model, twin_of(stock, model), MODES[mode])
    found, expected = (step(one, tokens(), MODES[mode], count=True).saved for one in (model, stock))
    if how != "batched_mm":  # which saves a weight for each row
        assert found < expected
        assert weights_saved(stock)
        assert not weights_saved(model)
    assert how != "grouped_mm" or mode != "fp32" or patch_report(model).saved_after == found

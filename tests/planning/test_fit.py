"""A budget of bytes: what is chosen holds it, is predicted as it is measured, and computes the same."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError, ConfigError, HostMemoryError
from lowmem_patch.memory.step import run_step
from lowmem_patch.nn.checkpointing import is_checkpointed
from lowmem_patch.nn.host_memory import HostMemory
from lowmem_patch.planning.budget import Budget, free_host_bytes, make_budget
from lowmem_patch.planning.costs import RunSeconds, device_of, run_seconds, scaled, timed_forward
from lowmem_patch.planning.fit_model import fit_planned
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.planning.planner import Planned, plan_model
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.inputs import as_example_inputs
from lowmem_patch.tracing.shadow import make_shadow
from lowmem_patch.tracing.trace import trace_forward
from tests.support.live import LiveBytes
from tests.support.models import llama_of
from tests.support.stacks import WIDTH, PlainBlock, Stack, blocks_of, rows, stack
from tests.support.step import step, warned

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.timeout(600),
]
GIB = 2**30


def tokens(rows_: int = 4, length: int = 48) -> Any:
    return torch.randint(3, 60, (rows_, length), generator=torch.Generator().manual_seed(5))


def llama_lora() -> Any:
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
    return get_peft_model(llama_of(num_hidden_layers=6), config)


def vit() -> Any:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config, add_pooling_layer=False)


def swin() -> Any:
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16, depths=(2, 3),
        num_heads=(2, 2), num_classes=5, drop_path_rate=0.1,
    )  # fmt: skip


def bert() -> Any:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
    )
    return BertModel(config, add_pooling_layer=False)


def t5() -> Any:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def whisper() -> Any:
    config = WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, dropout=0.1,
        max_source_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def numbers(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "llama": (lambda: llama_of(num_hidden_layers=6), lambda: {"input_ids": tokens()}),
    "llama-lora": (llama_lora, lambda: {"input_ids": tokens()}),
    "vit": (vit, lambda: {"pixel_values": numbers(4, 3, 32, 32)}),
    "swin": (swin, lambda: numbers(4, 3, 64, 64)),
    "bert": (bert, lambda: {"input_ids": tokens()}),
    "t5": (t5, lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(4, 32)}),
    "whisper": (
        whisper,
        lambda: {"input_features": numbers(2, 8, 64), "decoder_input_ids": tokens(2, 16)},
    ),
}


def made(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return MODELS[name][0]().train(), MODELS[name][1]()


def measured_peak(model: Any, inputs: Any) -> int:
    """Bytes at the peak of a real step, counted storage by storage; model states and host memory are not."""
    inputs = as_example_inputs(inputs)
    with warned():
        run_step(model, inputs)  # looks at gammas, and fills the buffers of the host
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        live.ignore(*model.parameters(), *model.buffers())
        for module in filter(is_checkpointed, model.modules()):
            host = module.forward.args[1].host  # type: ignore[union-attr]
            for waiting in () if host is None else host.free.values():
                live.ignore(*waiting)
        live.count(*inputs.args, *inputs.kwargs.values())
        run_step(model, inputs)
        return live.peak


def least_of(error: str) -> int:
    found = re.search(r"least budget is [^(]*\((\d+) bytes\)", error)
    assert found is not None, error
    return int(found[1])


def fitted(model: Any, inputs: Any, budget: int, config: str = "auto") -> tuple[Any, FitReport]:
    model = copy.deepcopy(model)
    with warned():
        patch_model(model, config, example_inputs=inputs, fit=budget)
    report = patch_report(model).fit
    assert report is not None and report.predicted <= budget == report.budget
    return model, report


def assert_predicted(report: FitReport, model: Any, inputs: Any, more: int = 0) -> None:
    """Never below what is measured, and at most 3 % above, and ``more`` bytes."""
    measured = measured_peak(model, inputs)
    predicted = report.predicted - report.parameters - report.optimizer_state
    assert measured <= predicted <= 1.03 * measured + more, (report.levels, predicted, measured)


@pytest.mark.parametrize("name", MODELS)
def test_predicted_peak_is_measured_and_the_budget_holds(name: str) -> None:
    model, inputs = made(name)
    config = "auto" if "lora" in name else "exact"
    whole = plan_patch(model, config, example_inputs=inputs, fit="1TiB").fit
    assert whole is not None and set(whole.levels) == {"patched"}
    states = whole.parameters + whole.optimizer_state
    patched, report = fitted(model, inputs, states + (whole.predicted - states), config)
    assert report.predicted == whole.predicted and report.extra_seconds == 0
    assert_predicted(report, patched, inputs)
    wanted = step(copy.deepcopy(patched), inputs)
    held, seconds = report.held, 0.0
    budgets = [states + int(share * (whole.predicted - states)) for share in (0.7, 0.5)]
    with pytest.raises(BudgetError) as error:
        plan_patch(model, config, example_inputs=inputs, fit=states + 1000)
    least = least_of(str(error.value))
    for budget in (*(budget for budget in budgets if budget > least), least):
        again, report = fitted(model, inputs, budget, config)
        assert report.held <= held and report.extra_seconds > 0.95 * seconds
        held, seconds = report.held, report.extra_seconds
        assert_predicted(report, again, inputs)
        found = step(again, inputs)
        assert all(map(torch.equal, found.outputs, wanted.outputs))
        assert found.gradients.keys() == wanted.gradients.keys()
        assert all(torch.equal(g, wanted.gradients[n]) for n, g in found.gradients.items())


def small_fit(budget: str | int | None = None, **settings: Any) -> Any:
    model, x = stack(), rows()
    whole = plan_patch(model, "exact", example_inputs=x, fit="1GiB").fit
    assert whole is not None
    states = whole.parameters + whole.optimizer_state
    budget = int(states + 0.75 * (whole.predicted - states)) if budget is None else budget
    return model, x, budget


# life


def test_patch_fit_unpatch_and_fit_again() -> None:
    model, x, budget = small_fit()
    keys = list(model.state_dict())
    plain = copy.deepcopy(model)
    with warned():
        patch_model(model, "exact", example_inputs=x)
        wanted = step(copy.deepcopy(model), x)
        patch_model(model, "exact", example_inputs=x, fit=budget)
    first = patch_report(model)
    assert first.fit is not None and any(map(is_checkpointed, model.modules()))
    text = str(first)
    assert f"predicted peak {first.fit.predicted / 1024:.2f} KiB" in text
    for block in first.fit.blocks:
        assert f"{block.site}: {block.level}" in text
    assert "3x8x16" in text and "adamw" in text
    with warned():
        assert patch_model(model, "exact", fit=budget) is model
    assert patch_report(model) is first  # nothing was planned again
    stored = io.BytesIO()
    model.between = None
    torch.save(model, stored)
    stored.seek(0)
    read = torch.load(stored, weights_only=False)
    read.between = model.between = lambda tensor: tensor
    for twin in (read, copy.deepcopy(model)):
        assert patch_report(twin).fit == first.fit and list(twin.state_dict()) == keys
        found = step(twin, x)
        assert all(torch.equal(g, wanted.gradients[n]) for n, g in found.gradients.items())
    with warned():
        patch_model(model, "exact", example_inputs=x, fit="1GiB")
    second = patch_report(model).fit
    assert second is not None and set(second.levels) == {"patched"}
    assert not any(map(is_checkpointed, model.modules()))
    with warned():
        patch_model(model, "exact", example_inputs=x, fit=budget)
        patch_model(model, "exact", example_inputs=x)
    assert patch_report(model).fit is None and not any(map(is_checkpointed, model.modules()))
    unpatch_model(model)
    assert list(model.state_dict()) == keys
    before, after = step(plain, x), step(model, x)
    assert all(torch.equal(g, after.gradients[n]) for n, g in before.gradients.items())


def test_plan_touches_nothing_and_works_on_the_meta_device() -> None:
    model, x, budget = small_fit()
    plan_patch(model, "exact", example_inputs=x, fit=budget)
    assert not any(map(is_checkpointed, model.modules()))
    found = plan_patch(model.to("meta"), "exact", example_inputs=x, fit=10 * budget).fit
    assert found is not None and "A100" in found.device


def test_forwards_that_are_taken_away_are_told() -> None:
    model, x, budget = small_fit()
    with warned():
        patch_model(model, "exact", example_inputs=x, fit=budget)
    block = next(module for module in model.modules() if is_checkpointed(module))
    del block.__dict__["forward"]
    assert any("forward" in note for note in patch_report(model).notes)


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_switch_that_is_on_before_counts(library: str) -> None:
    model, inputs = made("llama" if library == "transformers" else "swin")
    free = plan_patch(model, "exact", example_inputs=inputs, fit="1TiB").fit
    if library == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.set_grad_checkpointing()
    found = plan_patch(model, "exact", example_inputs=inputs, fit="1TiB").fit
    assert free is not None and found is not None
    assert found.predicted < 0.8 * free.predicted and set(found.levels) == {"patched"}
    assert all("another library's checkpointing" in block.reason for block in found.blocks)
    again, report = fitted(model, inputs, found.predicted, "exact")
    # torch's checkpoint keeps states of random numbers (5056 bytes), which are tensors in a fake run alone
    states = 5056 * (2 * len(report.blocks) + 2)
    assert_predicted(report, again, inputs, more=states)


# budgets


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("24g", 24 * GIB), ("24G", 24 * GIB), ("24GB", 24 * 10**9), ("900m", 900 * 2**20),
     (" 1.5 GiB ", 3 * GIB // 2), (12345, 12345)],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    budget = make_budget(text, nn.Linear(2, 2))
    assert budget.bytes == size and budget.reserve(1000) == 0


@pytest.mark.parametrize("text", ["", "24", "24 apples", "GiB", "-3GiB", 0, -5, 2.5, True, "nan g"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"fit|size"):
        plan_patch(stack(), "exact", example_inputs=rows(), fit=text)


def test_auto_asks_a_gpu() -> None:
    with pytest.raises(ConfigError, match="the model is on cpu"):
        plan_patch(stack(), "exact", example_inputs=rows(), fit="auto")


def test_reserve_is_told_apart() -> None:
    budget = Budget(1000, "1000", 0.03)
    assert budget.reserve(1000) == 30
    above = budget.reserve_above(970)
    assert 970 + above - budget.reserve(970 + above) >= 970


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(ConfigError, match="optimizer"):
        plan_patch(stack(), "exact", example_inputs=rows(), fit="1GiB", optimizer="magic")


def test_too_small_a_budget_names_the_least_and_what_helps() -> None:
    model, inputs = made("llama")
    model = llama_of(num_hidden_layers=4, hidden_size=64, intermediate_size=128).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError) as error:
        patch_model(model, "exact", example_inputs=inputs, fit="100KiB")
    text = str(error.value)
    assert "the parameters alone are larger than the budget" in text
    assert "4x48" in text and "adamw" in text
    rungs = dict(re.findall(r"^  (.*): ([\d.]+ [KM]iB)", text, flags=re.MULTILINE))
    assert {"24 tokens in the place of 48", "a batch of 1 in the place of 4"} <= rungs.keys()
    assert any("8-bit" in name for name in rungs) and any("QLoRA" in name for name in rungs)
    assert any("FSDP over 2 GPUs" in name for name in rungs)
    assert not any(map(is_checkpointed, model.modules()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fitted(model, inputs, least_of(text), "exact")
    with pytest.raises(BudgetError):
        plan_patch(model, "exact", example_inputs=inputs, fit=int(0.97 * least_of(text)))


def test_what_a_rung_says_is_so() -> None:
    """The least budget for one row is what the error for four rows says of it, or less."""
    model, inputs = made("vit")
    texts = []
    for given in (inputs, {"pixel_values": inputs["pixel_values"][:1]}):
        with pytest.raises(BudgetError) as error:
            plan_patch(model, "exact", example_inputs=given, fit="1KiB")
        texts.append(str(error.value))
    said = re.search(r"a batch of 1 in the place of 4: ([\d.]+) KiB", texts[0])
    assert said is not None
    assert 0.7 * float(said[1]) < least_of(texts[1]) / 1024 <= 1.01 * float(said[1])


def test_a_model_without_blocks_says_so() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    found = plan_patch(model, "exact", example_inputs=rows(), fit="1GiB").fit
    assert found is not None and found.blocks == () and "no blocks were found" in str(found)
    with pytest.raises(BudgetError, match="least budget"):
        plan_patch(model, "exact", example_inputs=rows(), fit="1KiB")


def planned(model: Any, inputs: Any) -> Planned:
    return plan_model(model, load_config("exact"), inputs)


def test_no_host_memory_and_little_of_it() -> None:
    torch.manual_seed(0)
    model, x = Stack(PlainBlock() for _ in range(24)).train(), rows()
    levels = {}
    for host in (0, 5 * x.numel() * 4, 1 << 30):
        with pytest.raises(BudgetError) as error:
            fit_planned(model, planned(model, x), 1, "adamw", host=host)
        budget = least_of(str(error.value))
        report = fit_planned(model, planned(model, x), budget, "adamw", host=host).report.fit
        assert report is not None and report.on_host <= host
        levels[host] = report.levels
    none, little, much = levels.values()
    assert "host" not in none and none.keys() & {"segment", "halves"}
    assert 0 < little["host"] <= 5 < much["host"]
    assert free_host_bytes() > 0


def test_a_host_without_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("cannot allocate")

    memory, x = HostMemory(), rows()
    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(HostMemoryError, match="fit="):
        memory.buffer(x.numel(), pinned=False)


# times


def test_the_cost_model_counts_products() -> None:
    model, x = llama_of(num_hidden_layers=3).train(), {"input_ids": tokens()}
    blocks = blocks_of(model, x)
    shadow = make_shadow(model, as_example_inputs(x))
    facts = Facts(model, shadow.model, trace_forward(shadow), {})
    device = device_of(model)
    slow = run_seconds(facts, blocks, device)
    assert len(slow) == 3 and slow[0] == slow[1]
    assert 0 < slow[0].attention < slow[0].forward < slow[0].backward < 3 * slow[0].forward
    for block in model.model.layers:
        block.requires_grad_(False)  # the gradient of the input alone
    shadow = make_shadow(model, as_example_inputs(x))
    frozen = run_seconds(Facts(model, shadow.model, trace_forward(shadow), {}), blocks, device)
    assert frozen[1].backward < slow[1].backward


def test_blocks_are_timed_and_nothing_of_it_stays() -> None:
    model, x = stack(), rows()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    sites = [block.site for block in blocks_of(model, x).blocks]
    seconds = timed_forward(model, as_example_inputs(x), sites)
    assert len(seconds) == len(sites) and all(0 < one < 1 for one in seconds)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and model.training
    found = scaled([RunSeconds(1.0, 0.25, 2.0)], [0.5])
    assert found == (RunSeconds(0.5, 0.125, 1.0),)
    assert scaled([RunSeconds(1.0, 0.25, 2.0)], [0.5, 0.5]) == (RunSeconds(1.0, 0.25, 2.0),)
    timed = fit_planned(model, planned(model, x), "1GiB", "adamw", timed=True).report.fit
    assert timed is not None and timed.step_seconds > 0

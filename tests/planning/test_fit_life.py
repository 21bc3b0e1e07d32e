"""fit: switches, sizes, errors, host memory and costs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_patch import patch_model, plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError, ConfigError, HostMemoryError
from lowmem_patch.memory.model_states import USUAL_TRAINING
from lowmem_patch.nn.checkpointing import is_checkpointed
from lowmem_patch.nn.host_memory import HostMemory
from lowmem_patch.planning import budget, costs
from lowmem_patch.planning.budget import Budget, available_host_bytes, free_host_bytes, make_budget
from lowmem_patch.planning.costs import RunSeconds, device_of, run_seconds, scaled, timed_forward
from lowmem_patch.planning.fit_model import fit_planned
from lowmem_patch.planning.planner import Planned, plan_model
from lowmem_patch.planning.report import find_records
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.inputs import as_example_inputs
from lowmem_patch.tracing.shadow import make_shadow
from lowmem_patch.tracing.trace import trace_forward
from tests.support.fitted import (
    GIB,
    Known,
    assert_predicted,
    fitted,
    least_of,
    made,
    planned_once,
    tokens,
)
from tests.support.models import llama_of
from tests.support.stacks import WIDTH, PlainBlock, Stack, blocks_of, rows, stack

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.timeout(600),
]


@pytest.mark.slow
def test_the_least_budget_does_not_depend_on_an_empty_cache() -> None:
    reports = []
    for use_cache in (True, False):
        model, inputs = made("llama")
        model.config.use_cache = use_cache
        with planned_once():
            with pytest.raises(BudgetError) as error:
                plan_patch(model, "exact", example_inputs=inputs, fit=1001)
            _, report = fitted(model, inputs, least_of(str(error.value)), "exact")
        reports.append((report.predicted, report.levels))
    assert reports[0] == reports[1]
    assert set(reports[0][1]) == {"checkpointed"}


@pytest.mark.slow
@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_switch_that_is_on_before_counts(library: str) -> None:
    model, inputs = made("llama" if library == "transformers" else "swin")
    free = plan_patch(model, "exact", example_inputs=inputs, fit="1TiB").fit
    if library == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.set_grad_checkpointing()
    with planned_once():
        found = plan_patch(model, "exact", example_inputs=inputs, fit="1TiB").fit
        assert found is not None
        again, report = fitted(model, inputs, found.predicted, "exact")
    assert free is not None
    assert found.predicted < 0.8 * free.predicted and set(found.levels) == {"patched"}
    assert all("checkpointing that is on already" in block.reason for block in found.blocks)
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


def test_a_number_with_a_fraction_is_asked_for_its_unit() -> None:
    with pytest.raises(ConfigError, match=r'did you mean fit="24\.5GiB"'):
        plan_patch(stack(), "exact", example_inputs=rows(), fit=24.5)
    with pytest.raises(ConfigError, match=r"did you mean fit=150000000\?"):
        plan_patch(stack(), "exact", example_inputs=rows(), fit=1.5e8)
    with pytest.raises(ConfigError, match="fit nan is no budget: give it as 24GiB"):
        plan_patch(stack(), "exact", example_inputs=rows(), fit=float("nan"))


@pytest.mark.parametrize("name", ["adam", "", None, 3, ["adamw"]])
def test_what_is_no_optimizer(name: Any) -> None:
    with pytest.raises(ConfigError, match="is none of adamw, "):
        plan_patch(stack(), "exact", example_inputs=rows(), fit="1GiB", optimizer=name)


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "the model is on cpu"), ("meta", "name a size")]
)
def test_auto_asks_a_gpu(device: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=said):
        make_budget("auto", nn.Linear(2, 2, device=device))


def test_reserve_is_told_apart() -> None:
    budget = Budget(1000, "1000", 0.03)
    assert budget.reserve(1000) == 30
    total = budget.total(0, 970)
    assert total - budget.reserve(total) >= 970


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(ConfigError, match="optimizer"):
        plan_patch(stack(), "exact", example_inputs=rows(), fit="1GiB", optimizer="magic")


def test_too_small_a_budget_names_the_least_and_what_helps() -> None:
    inputs = {"input_ids": tokens()}
    model = llama_of(num_hidden_layers=3, hidden_size=64, intermediate_size=128).train()
    before = copy.deepcopy(model.state_dict())
    with planned_once():
        with pytest.raises(BudgetError) as error:
            patch_model(model, "exact", example_inputs=inputs, fit="100KiB")
        text = str(error.value)
        fitted(model, inputs, least_of(text), "exact")
        with pytest.raises(BudgetError):
            plan_patch(model, "exact", example_inputs=inputs, fit=int(0.97 * least_of(text)))
    assert "the parameters alone are larger than the budget" in text
    assert "4x48" in text and "adamw" in text
    suggestions = dict(re.findall(r"^  (.*): ([\d.]+ [KM]iB)", text, flags=re.MULTILINE))
    assert {"24 tokens a row, not 48", "a batch of 1, not 4"} <= suggestions.keys()
    assert any("8-bit" in name for name in suggestions) and any(
        "QLoRA" in name for name in suggestions
    )
    assert "none is enough by itself" in text and ", fits" not in text
    assert not any("FSDP" in name for name in suggestions)  # no number of GPUs suffices
    assert not any(map(is_checkpointed, model.modules()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_only_changes_that_are_worth_it_are_proposed() -> None:
    """Weights are next to nothing of this step, so that no other optimizer and no GPU beside it helps."""
    model = llama_of(num_hidden_layers=2, hidden_size=16, intermediate_size=32, vocab_size=16)
    inputs = {"input_ids": torch.randint(16, (8, 256))}
    inputs["labels"] = inputs["input_ids"]
    with planned_once():
        with pytest.raises(BudgetError) as error:
            plan_patch(model.train(), "exact", example_inputs=inputs, fit="100KiB")
        text, least = str(error.value), least_of(str(error.value))
        with pytest.raises(BudgetError) as error:
            plan_patch(model, "exact", example_inputs=inputs, fit=int(0.9 * least))
    assert not any(word in text for word in ("8-bit", "QLoRA", "FSDP"))
    assert "128 tokens a row, not 256" in text and "a batch of 1, not 8" in text
    text = str(error.value)
    assert "one that says fits is enough" in text and "none is enough" not in text
    # a batch that fits, and not the smallest one
    rows_that_fit = re.search(r"a batch of (\d), not 8: .*, fits$", text, flags=re.MULTILINE)
    assert rows_that_fit is not None and 1 < int(rows_that_fit[1]) < 8
    fewer = {name: tensor[: int(rows_that_fit[1])] for name, tensor in inputs.items()}
    assert plan_patch(model, "exact", example_inputs=fewer, fit=int(0.9 * least)).fit is not None


@pytest.fixture(scope="module")
def known() -> Known:
    """Of a model that is planned once for several tests."""
    return Known()


def test_a_budget_below_the_model_states_says_so(known: Known) -> None:
    model, inputs = made("llama")
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    said = "the model states alone are larger than the budget"
    with planned_once(known), pytest.raises(BudgetError, match=said):
        plan_patch(model, "exact", example_inputs=inputs, fit=2 * parameters)


@pytest.mark.parametrize(("fit", "meant"), [(24, "24GiB"), (12345, "24GiB"), ("24KiB", None)])
def test_a_number_without_a_unit_is_asked_about_first(
    fit: Any, meant: str | None, known: Known
) -> None:
    model, inputs = made("llama")
    with planned_once(known), pytest.raises(BudgetError) as error:
        plan_patch(model, "exact", example_inputs=inputs, fit=fit)
    first, second = str(error.value).splitlines()[:2]
    if meant is None:
        assert first.startswith("fit 24KiB: no training step") and "did you mean" not in str(
            error.value
        )
    else:
        assert first == f'fit={fit} is {fit} bytes: did you mean fit="{meant}"?'
        assert second.startswith("fit") and "no training step of this model fits" in second


@pytest.mark.slow
def test_what_a_suggestion_says_is_so() -> None:
    """The least budget for one row is what the error for four rows says of it, or less."""
    model, inputs = made("vit")
    texts = []
    for given in (inputs, {"pixel_values": inputs["pixel_values"][:1]}):
        with pytest.raises(BudgetError) as error:
            plan_patch(model, "exact", example_inputs=given, fit="1KiB")
        texts.append(str(error.value))
    said = re.search(r"a batch of 1, not 4: ([\d.]+) KiB", texts[0])
    assert said is not None
    assert 0.7 * float(said[1]) < least_of(texts[1]) / 1024 <= 1.01 * float(said[1])


def test_a_model_without_blocks_says_so() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    found = plan_patch(model, "exact", example_inputs=rows(), fit="1GiB").fit
    assert (
        found is not None and found.blocks == () and "no repeated blocks were found" in str(found)
    )
    assert "; no blocks" in found.head[0] and "before the blocks" not in found.head[0]
    with pytest.raises(BudgetError, match="no repeated blocks were found"):
        plan_patch(model, "exact", example_inputs=rows(), fit="1KiB")


def planned(model: Any, inputs: Any) -> Planned:
    return plan_model(model, load_config("exact"), inputs)


@pytest.mark.slow
def test_no_host_memory_and_little_of_it() -> None:
    torch.manual_seed(0)
    model, x = Stack(PlainBlock() for _ in range(16)).train(), rows()
    levels, plan = {}, planned(model, x)
    for host in (0, 5 * x.numel() * 4, 1 << 30):
        with planned_once():
            with pytest.raises(BudgetError) as error:
                fit_planned(model, plan, 1, USUAL_TRAINING, host=host)
            budget = least_of(str(error.value))
            report = fit_planned(model, plan, budget, USUAL_TRAINING, host=host).report.fit
        assert report is not None and report.on_host <= host
        levels[host] = report.levels
    none, little, much = levels.values()
    assert "host" not in none and none.keys() & {"segment", "halves"}
    assert 0 < little["host"] <= 5 < much["host"]
    assert free_host_bytes() > 0


@pytest.mark.parametrize("cache", ["", "inactive_file 300\n"])
def test_a_container_and_its_processes_share_host_memory(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    for name, text in zip(
        (*names[:2], "memory.stat"), ("2000\n", "900\n", f"anon 5\n{cache}"), strict=True
    ):
        (tmp_path / name).write_text(text)
    unlimited = available_host_bytes()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(budget, "_GROUPS", (("nowhere", *names), (str(tmp_path), *names)))
    free = 1100 + (300 if cache else 0)
    assert available_host_bytes() == free and free_host_bytes() == free // 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_host_bytes() == free // 2 // 4
    (tmp_path / "memory.max").write_text("max\n")
    found = available_host_bytes()
    assert unlimited is not None and found is not None and found > 2000


def test_a_host_without_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("cannot allocate")

    memory, x = HostMemory(), rows()
    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(HostMemoryError, match="fit="):
        memory.buffer(x.numel(), x.device)


# times


@pytest.mark.parametrize(
    ("name", "counted_as"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40"),
        ("NVIDIA T400 4GB", "a GPU like the A100"),
        ("NVIDIA RTX A1000", "a GPU like the A100"),
    ],
)
def test_a_gpu_is_counted_as_the_one_that_it_is(name: str, counted_as: str) -> None:
    assert costs._device_named(name).name == counted_as


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
    found = scaled([RunSeconds(1.0, 0.25, 2.0, 0.5)], [0.5])
    assert found == (RunSeconds(0.5, 0.125, 1.0, 0.25),)
    assert scaled([RunSeconds(1.0, 0.25, 2.0)], [0.5, 0.5]) == (RunSeconds(1.0, 0.25, 2.0),)
    timed = fit_planned(model, planned(model, x), "1GiB", USUAL_TRAINING, timed=True).report.fit
    assert timed is not None and timed.step_seconds > 0
    assert not find_records(model) and not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("call", [plan_patch, patch_model])
def test_a_budget_asks_for_the_batch_that_trains(call: Callable[..., Any]) -> None:
    """Made-up inputs of a few tokens would fit in any budget."""
    model = stack()
    with pytest.raises(
        ConfigError, match="fit='1GiB' is a budget for one batch: give example_inputs"
    ):
        call(model, "exact", fit="1GiB")
    assert not find_records(model)

"""Quantised weights in a prediction: their bytes, and what their products allocate for a while.

That a fitted model of them holds its budget and computes the same is in `test_fit.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError
from lowmem_patch.memory import Training, model_state_bytes, predict_memory
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.quantised import held_beside
from lowmem_patch.tracing.shadow import make_shadow
from tests.support.fitted import assert_predicted, planned_once, tokens
from tests.support.models import llama_of
from tests.support.quantised import in_bits, qlora
from tests.support.step import warned

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
KINDS = ("4bit", "8bit", "wrapper")
# of a LLaMA of hidden size 32 and intermediate size 48, with half as many heads of keys and values
WEIGHTS = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
ROWS = 32 + 16 + 16 + 32 + 48 + 48 + 32


def scale_bytes(kind: str) -> int:
    """Of one block: doubly quantised scales (a byte for 64 weights, four for 256 of those), or four a row."""
    if kind != "4bit":
        return 4 * ROWS
    scales = [numel // 64 for numel in (1024, 512, 512, 1024, 1536, 1536, 1536)]
    tables = 4 * 16 + 4 * 256 + 4  # of values, of scales, and their mean
    return sum(scales) + 7 * (4 + tables)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_bytes_are_counted(kind: str) -> None:
    model = qlora(kind, num_hidden_layers=2)
    others = sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if p.requires_grad or "proj" not in name
    )
    others += sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    packed = 2 * (WEIGHTS // (2 if kind == "4bit" else 1) + scale_bytes(kind))
    assert model_state_bytes(model, "sgd").parameters == others + packed


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_leaves_the_model_as_it_is(kind: str) -> None:
    model, inputs = qlora(kind, num_hidden_layers=2), {"input_ids": tokens(2, 8)}
    held = [*model.parameters(), *model.buffers(), *held_beside(model)]
    before = [copy.deepcopy(tensor.detach()) for tensor in held]
    state = torch.get_rng_state()
    report = plan_patch(model, "exact", example_inputs=inputs, fit="1GiB")
    assert not any("with data" in note for note in report.notes)
    now = [*model.parameters(), *model.buffers(), *held_beside(model)]
    assert len(now) == len(held) and all(map(lambda a, b: a is b, now, held))
    assert all(plain(a).equal(plain(b)) for a, b in zip(held, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def plain(tensor: Any) -> Any:
    return tensor.codes if hasattr(tensor, "codes") else tensor.detach()


def test_a_copy_without_data_holds_no_data() -> None:
    """Not even of what lies beside the weights, also once a forward has moved it."""
    for kind in KINDS:
        model = qlora(kind, num_hidden_layers=1)
        model(input_ids=tokens(1, 4))
        shadow = make_shadow(model, ExampleInputs((), {"input_ids": tokens(1, 4)}))
        beside = held_beside(model)
        assert [t.shape for t in shadow.beside] == [t.shape for t in beside] != []
        assert all(type(t).__name__ == "FakeTensor" for t in shadow.beside)
        found = [t for m in shadow.model.modules() for t in loose_tensors(m) if t.numel() > 1]
        assert not [t.shape for t in found if type(t) is torch.Tensor]


def loose_tensors(module: Any) -> list[Any]:
    values = [getattr(module, name, None) for name in ("state", "quant_state")]
    values = [value for value in values if hasattr(value, "__dict__")]
    return [t for value in values for t in vars(value).values() if isinstance(t, torch.Tensor)]


def test_a_weight_that_a_product_unpacks_is_counted() -> None:
    """In a forward without a backward, which unpacks it by an op of its own."""
    model = in_bits(nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 1)), 4)
    model[1] = nn.Linear(4096, 1)
    x = torch.randn(2, 64)
    report = plan_patch(model, "exact", example_inputs=x, fit="1GiB", optimizer="sgd").fit
    assert report is not None and report.predicted - report.parameters > 64 * 4096 * 4
    assert_predicted(report, model, x)


def test_a_step_of_few_rows_is_mostly_unpacked_weights() -> None:
    model = qlora("4bit", num_hidden_layers=2, hidden_size=64, intermediate_size=256)
    inputs = {"input_ids": tokens(1, 4)}
    with warned():
        patch_model(model, "exact", example_inputs=inputs, fit="1GiB", optimizer="sgd")
    report = patch_report(model).fit
    assert report is not None and report.predicted - report.parameters > 64 * 256 * 4
    assert_predicted(report, model, inputs)


def test_memory_of_a_quantised_model_is_that_of_its_fit() -> None:
    model = qlora("4bit")
    inputs = {"input_ids": tokens()}

    def make(batch: int, length: int | None) -> ExampleInputs:
        return ExampleInputs((), {"input_ids": tokens(batch, length or 0)})

    fit = plan_patch(model, "exact", example_inputs=inputs, fit="1GiB", optimizer="sgd").fit
    report = predict_memory(
        model, load_config("exact"), make, batch_size=4, length=48, limit=fit.predicted if fit else 0,
        training=Training(optimizer="sgd"),
    )  # fmt: skip
    assert fit is not None and report.after.parameters == fit.parameters
    assert report.after.total == fit.predicted < report.before.total
    assert report.largest_after == 4 and (report.largest_before or 0) < 4


def test_what_would_help_names_no_qlora() -> None:
    model, inputs = qlora("4bit", num_hidden_layers=2), {"input_ids": tokens()}
    with pytest.raises(BudgetError) as error:
        plan_patch(model, "exact", example_inputs=inputs, fit=1)
    assert "a batch of 1" in str(error.value)
    assert not any(word in str(error.value) for word in ("QLoRA", "FSDP"))


@pytest.mark.parametrize("packed", [True, False], ids=["4bit", "bf16"])
def test_gradients_of_a_small_rank_lie_in_padded_memory(packed: bool) -> None:
    """In bf16 products take ranks of eight: the gradient of lora_A of rank 4 lies before padded rows."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128}
    torch.manual_seed(0)
    model = llama_of(**sizes).to(torch.bfloat16).requires_grad_(False)
    if packed:
        in_bits(model, 4)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model, inputs = get_peft_model(model, config).train(), {"input_ids": tokens(4, 32)}
    with planned_once(), warned():
        whole = plan_patch(model, "auto", example_inputs=inputs, fit="1GiB", optimizer="sgd").fit
        assert whole is not None
        budget = whole.parameters + int(0.7 * (whole.predicted - whole.parameters))
        patch_model(model, "auto", example_inputs=inputs, fit=budget, optimizer="sgd")
    report = patch_report(model).fit
    assert report is not None
    assert_predicted(report, model, inputs)

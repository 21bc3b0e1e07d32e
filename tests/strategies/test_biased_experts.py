"""Experts with biases: no last product, to which rows of a bias are added, is saved for routing weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, GptOssForCausalLM

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from tests.support.judge import assert_accurate
from tests.support.models import randomise
from tests.support.step import FP32, MODES, cast, step, truth_of, twin_of
from tests.support.versions import before

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 18, 32, 24, 4, 2
GIVEN = 16
ROWS = TOKENS * CHOSEN


_UNMASKED = pytest.mark.skipif(
    before("transformers", "5.18"), reason="it masks each product for expert parallelism"
)


def gpt_oss() -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=CHOSEN,
        num_local_experts=EXPERTS, experts_implementation="grouped_mm", pad_token_id=0,
    )  # fmt: skip
    return randomise(GptOssForCausalLM(config)).train()


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(3))}


def holds_product(model: Any, x: Any) -> bool:
    with saved_bytes(model) as saved:
        model(**x)
    return (ROWS, WIDTH) in {item.shape for item in saved.storages}


TRAINS: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "no bias": lambda name: "bias" not in name,
    "the router and biases": lambda name: "router" in name or "bias" in name,
    "no experts": lambda name: "experts" not in name,
}


@_UNMASKED
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trains", TRAINS)
def test_gpt_oss_saves_no_last_product(trains: str, mode: str) -> None:
    model = cast(gpt_oss(), MODES[mode].weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = TRAINS[trains](name)
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=tokens())
    exact = twin_of(stock, model)
    exact.config._experts_implementation = "eager"  # grouped_mm has no float64
    own = step(twin_of(stock, model), tokens(), MODES[mode])
    found = step(model, tokens(), MODES[mode], count=True)
    assert_accurate(found, own, truth_of(exact, tokens()), MODES[mode])
    if (
        mode != "autocast"
    ):  # its trace ran on data, whose gammas let norms save z, of which nobody has a copy
        assert patch_report(model).saved_after == found.saved
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        assert holds_product(stock, tokens())
        assert not holds_product(model, tokens())


@_UNMASKED
def test_adapters_below_frozen_experts() -> None:
    """The router has a gradient, though no weight of the experts trains."""
    options = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(gpt_oss(), options)
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=tokens())
    exact = copy.deepcopy(stock)
    exact.config._experts_implementation = "eager"
    found = step(model, tokens(), FP32)
    assert_accurate(found, step(stock, tokens(), FP32), truth_of(exact, tokens()), FP32)
    assert holds_product(stock, tokens())
    assert not holds_product(model, tokens())


def add_in_place(y: Tensor, rows: Tensor) -> Tensor:
    return y.add_(rows)


def add_twice(y: Tensor, rows: Tensor) -> Tensor:
    return y.add_(rows).add_(rows)


def add_scaled(y: Tensor, rows: Tensor) -> Tensor:
    return y.add_(rows, alpha=2)


def add_anew(y: Tensor, rows: Tensor) -> Tensor:
    return y + rows


def assign_sum(y: Tensor, rows: Tensor) -> Tensor:
    y += rows
    return y


def add_then_double(y: Tensor, rows: Tensor) -> Tensor:
    return y.add_(rows).mul_(2)


def add_then_read(y: Tensor, rows: Tensor) -> Tensor:
    y.add_(rows)
    return y + y.square().mean()


def add_what_was_written(y: Tensor, rows: Tensor) -> Tensor:
    rows.mul_(3)
    return y.add_(rows)


def write_after_the_sum(y: Tensor, rows: Tensor) -> Tensor:
    y.add_(rows)
    rows.mul_(3)
    return y + 0 * rows.sum()


SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "in place": (add_in_place, False),
    "twice": (add_twice, True),
    "scaled": (add_scaled, True),
    "anew": (add_anew, True),
    "assigned": (assign_sum, False),
    "doubled": (add_then_double, True),
    "read by others": (add_then_read, True),
    "written before": (add_what_was_written, True),
    "written after": (write_after_the_sum, True),
}


class Experts(nn.Module):
    """Batched experts of as many rows each, with a bias of each and a routing weight for each row."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor], numbered: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, GIVEN, INNER) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.router, self.act = nn.Linear(GIVEN, 1), nn.SiLU()
        self.how, self.numbered = how, numbered

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.arange(EXPERTS).repeat_interleave(len(x) // EXPERTS)
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(x) // EXPERTS)
        hidden = self.act(torch._grouped_mm(x, self.up, offs=ends))
        y = torch._grouped_mm(hidden, self.down, offs=ends)
        y = self.how(y, self.bias[numbers])
        if self.numbered:
            numbers.fill_(0)
        return y * self.router(x)


def made(
    how: str = "in place", numbered: bool = False, traced: str = ""
) -> tuple[Any, Any, dict[str, Tensor]]:
    """The model and one without the patch, which saw ``traced`` if another sum is to come."""
    torch.manual_seed(0)
    stock = Experts(SUMS[traced or how][0], numbered)
    x = {"x": torch.randn(ROWS, GIVEN)}
    model = patch_model(copy.deepcopy(stock), "exact", example_inputs=x)
    for one in (model, stock):
        one.how = SUMS[how][0]
    return model, stock, x


@pytest.mark.parametrize("traced", ["", "in place"], ids=["as traced", "another than was traced"])
@pytest.mark.parametrize("how", SUMS)
def test_every_sum_has_right_gradients(how: str, traced: str) -> None:
    model, stock, x = made(how, traced=traced)
    x["x"].requires_grad_()
    ours, theirs = step(model, x), step(stock, x)
    for name, wanted in theirs.gradients.items():
        # sums of a few tens of float32 products in another order
        torch.testing.assert_close(ours.gradients[name], wanted, rtol=1e-4, atol=1e-5)
    assert (ours.output - theirs.output).abs().max() <= 1e-5
    assert holds_product(model, x) is SUMS[how][1]


def test_without_a_gradient_of_routing_weights_nothing_is_deferred() -> None:
    model = Experts(add_in_place)
    x = {"x": torch.randn(ROWS, GIVEN)}
    assert _NOTE in str(plan_patch(model, "exact", example_inputs=x))
    model.router.requires_grad_(False)
    assert _NOTE not in str(plan_patch(model, "exact", example_inputs=x))


_NOTE = "experts whose last product is not saved, nor its bias: 1"


def test_a_bias_that_changes_before_backward_is_an_error() -> None:
    model, _, x = made()
    y = model(**x)
    with torch.no_grad():
        model.bias.mul_(2)
    with pytest.raises(RuntimeError, match="written in place after it was made"):
        y.sum().backward()


def test_numbers_that_change_before_backward_are_an_error() -> None:
    model, stock, x = made(numbered=True)
    for one in (model, stock):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            one(**x).sum().backward()


def test_a_retained_graph_gives_the_same_again() -> None:
    model, _, x = made()
    loss = model(**x).square().sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for name, one, other in zip(names, first, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_it_again(reentrant: bool) -> None:
    model, stock, x = made()
    given = x["x"].requires_grad_()
    results = []
    for one in (model, stock):
        checkpoint(one, given, use_reentrant=reentrant).square().sum().backward()
        results.append({n: p.grad for n, p in one.named_parameters()})
    for name, wanted in results[1].items():
        torch.testing.assert_close(results[0][name], wanted, rtol=1e-4, atol=1e-5)


def test_a_hook_on_the_product_sees_its_gradient() -> None:
    seen: list[Tensor] = []

    def hooked(y: Tensor, rows: Tensor) -> Tensor:
        y.add_(rows)
        y.register_hook(lambda gradient: seen.append(gradient))
        return y

    torch.manual_seed(0)
    stock = Experts(hooked)
    x = {"x": torch.randn(ROWS, GIVEN)}
    model = patch_model(copy.deepcopy(stock), "exact", example_inputs=x)
    for one in (model, stock):
        one(**x).square().sum().backward()
    ours, theirs = seen[-2:]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_copies_pickles_and_undoing() -> None:
    model, stock, x = made()
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal_gradients(one, model, x)
        assert not holds_product(one, x)
    unpatch_model(model)
    assert holds_product(model, x)
    assert_equal_gradients(model, stock, x)


def assert_equal_gradients(model: Any, other: Any, x: Any) -> None:
    ours, theirs = step(model, x), step(other, x)
    for name, wanted in theirs.gradients.items():
        assert torch.equal(ours.gradients[name], wanted), name


def test_a_bias_of_another_dtype_is_left_to_torch() -> None:
    model, stock, x = made()
    for one in (model, stock):
        one.bias.data = one.bias.data.bfloat16()
    assert_equal_gradients(model, stock, x)


@pytest.mark.gpu
@_UNMASKED
def test_gpt_oss_on_a_gpu() -> None:
    """By torch's own kernel of grouped products, which runs in bf16; the truth is of a loop."""
    stock = cast(gpt_oss(), torch.bfloat16).to("cuda")
    x = {name: tensor.to("cuda") for name, tensor in tokens().items()}
    model = patch_model(copy.deepcopy(stock), "exact", example_inputs=x)
    exact = copy.deepcopy(stock)
    exact.config._experts_implementation = "eager"
    found, own = (step(one, x, MODES["bf16"], count=True) for one in (model, stock))
    assert_accurate(found, own, truth_of(exact, x), MODES["bf16"])
    assert holds_product(stock, x)
    assert not holds_product(model, x)
    assert patch_report(model).saved_after == found.saved

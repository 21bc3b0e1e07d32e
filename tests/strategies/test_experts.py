"""Experts: rows that are gathered again, products whose routing weights need no saved product."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes
from lowmem_patch.functional import ExpertWeight, RecomputedMatmul
from tests.support.judge import assert_accurate, assert_same_step
from tests.support.models import randomise
from tests.support.step import FP32, MODES, Mode, cast, step, truth_of, twin_of

# PEFT reads a name that transformers has since deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 18, 32, 24, 4, 2
ROWS = TOKENS * CHOSEN
SIZES = {
    "vocab_size": 64, "hidden_size": WIDTH, "moe_intermediate_size": INNER, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": CHOSEN,
    "num_local_experts": EXPERTS, "num_experts": EXPERTS, "shared_expert_intermediate_size": 40,
    "head_dim": 8,
}  # fmt: skip
NAMES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "Phimoe", "FlexOlmo")


def experts(name: str, how: str = "grouped_mm") -> Any:
    """A tiny causal LM whose blocks have experts."""
    known = getattr(transformers, f"{name}Config")
    names = known().to_dict().keys() | {"num_local_experts"}
    sizes = {key: value for key, value in SIZES.items() if key in names}
    torch.manual_seed(0)
    config = known(**sizes, experts_implementation=how, pad_token_id=0)
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config)).train()


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(1, 64, (2, 9), generator=generator)}


def patched(model: Any, config: Any = "exact") -> tuple[Any, Any]:
    """The model and a copy of it from before the patch."""
    stock = copy.deepcopy(model)
    return patch_model(model, config, example_inputs=tokens()), stock


def assert_same(model: Any, stock: Any, mode: Mode = FP32) -> None:
    """As accurate as the unpatched model; the truth is of a loop, since grouped_mm has no float64."""
    exact = copy.deepcopy(stock)
    exact.config._experts_implementation = "eager"
    own = step(stock, tokens(), mode)
    assert_accurate(step(model, tokens(), mode), own, truth_of(exact, tokens()), mode)


def shapes(model: Any) -> set[tuple[int, ...]]:
    """Of the tensors that autograd holds."""
    with saved_bytes(model) as saved:
        model(**tokens())
    return {item.shape for item in saved.storages}


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_products_of_experts_are_not_saved(name: str) -> None:
    model, stock = patched(experts(name))
    assert (ROWS, WIDTH) in shapes(stock)
    assert (ROWS, WIDTH) not in shapes(model)
    report = patch_report(model)
    assert report.floor <= report.saved_after
    assert_same(model, stock)


@pytest.mark.parametrize(
    ("name", "shared"), [("Mixtral", 0), ("Qwen2Moe", 2 * 40), ("FlexOlmo", 0)]
)
def test_the_floor_of_experts_by_hand(name: str, shared: int) -> None:
    """What q, k and v read, what experts gather of, and what the head reads; gate and up of each row."""
    report = plan_patch(experts(name), "exact", example_inputs=tokens())
    by_token, by_row = 3 * WIDTH + shared, 2 * INNER
    assert report.kinds.floor["linear inputs"] == (TOKENS * by_token + ROWS * by_row) * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", ["exact", "auto", "paper"])
def test_a_step_is_as_accurate_as_the_unpatched_one(preset: str, mode: str) -> None:
    model = cast(experts("Qwen3Moe"), MODES[mode].weights)
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, preset, example_inputs=tokens())
    assert_same(model, twin_of(stock, model), MODES[mode])
    found, expected = (step(one, tokens(), MODES[mode], count=True) for one in (model, stock))
    assert patch_report(model).saved_after == found.saved < expected.saved


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_frozen_experts_save_no_product(how: str) -> None:
    """The router below adapters has a gradient, though the experts' weights have none."""
    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, stock = patched(get_peft_model(experts("Mixtral", how), options))
    assert ((ROWS, WIDTH) in shapes(stock)) is (how == "grouped_mm")
    assert (ROWS, WIDTH) not in shapes(model)
    assert_same(model, stock)


def test_a_loop_over_experts_gathers_again() -> None:
    model, stock = patched(experts("Mixtral", "eager"))
    gathered = ROWS * WIDTH * 4
    hidden = 2 * ROWS * INNER * 4  # act(gate), and its product with up
    saved = [step(one, tokens(), count=True).saved for one in (stock, model)]
    assert saved[0] - saved[1] >= gathered + hidden
    assert_same(model, stock)


class Experts(nn.Module):
    """Weights in three dimensions; ``body`` calls them: (experts, x, numbers of rows, a weight for each)."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 8)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.body = body

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float64:  # the truth, for which torch has no kernel
            return torch.bmm(x.view(EXPERTS, -1, x.shape[-1]), weight).flatten(0, 1)
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=x.device)
        return nn.functional.grouped_mm(x, weight, offs=ends * (ROWS // EXPERTS))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.body(self, *args, **kwargs)


class Block(nn.Module):
    """A norm, a router and experts, which may be checkpointed alone."""

    def __init__(self, body: Callable[..., Tensor], reentrant: bool | None = None) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        # without a bias, whose gradient would be the one sum of all weights'
        self.router, self.leave = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, WIDTH)
        self.experts, self.reentrant = Experts(body), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x))
        index = torch.arange(ROWS, device=x.device) % TOKENS
        weights = self.router(h)[index]
        if self.reentrant is None:
            y = self.experts(h, index, weights=weights)
        else:
            y = checkpoint(self.experts, h, index, weights, use_reentrant=self.reentrant)
        return x + self.leave(y[:TOKENS])


def plain(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    hidden = net.act(net.multiply(h[index], net.up))
    return net.multiply(hidden, net.down) * weights


def weighted_twice(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    return y * weights + weights * weights * y + y * weights.tanh()


def written_rows(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = h[index]
    rows.masked_fill_(rows > 0.5, 0.0)
    return net.multiply(net.act(net.multiply(rows, net.up)), net.down) * weights


def written_source(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    h = h * 1.5
    rows = h[index]
    h.mul_(2.0)
    return net.multiply(net.act(net.multiply(rows, net.up)), net.down) * weights


def biased_product(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    y.add_(weights)
    return y * weights


def hooked_product(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    y.register_hook(lambda gradient: gradient * 3.0)
    return y * weights


def moved_rows(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = h[index].view(2, -1, WIDTH).flip(0).flatten(0, 1)
    y = net.multiply(net.act(net.multiply(rows, net.up)), net.down)
    return y.reshape(-1, WIDTH) * weights


def weightless(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    return y * (weights * 0.0) + y * weights.detach()


def read_beside(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = h[index]
    y = net.multiply(net.act(net.multiply(rows, net.up)), net.down)
    return nn.functional.linear(y, net.square) * weights + rows.square() + h[index.int()]


BODIES = (
    plain, weighted_twice, written_rows, written_source, biased_product, hooked_product, moved_rows,
    weightless, read_beside,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_any_use_of_rows_and_products_is_right(body: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    model = randomise(Block(body))
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, stock, x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_experts_that_are_checkpointed_alone(reentrant: bool) -> None:
    """The tensors that the second run saves are those of the first."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    model = randomise(Block(plain, reentrant))
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, stock, x)


@pytest.mark.parametrize("frozen", ["experts.up", "experts.down", "router", "norm", "enter"])
def test_whoever_trains(frozen: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    model = randomise(Block(plain))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, stock, x)


def test_a_weight_of_zero_has_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    model = randomise(Block(plain))
    with torch.no_grad():
        model.router.weight.zero_()
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, stock, x)
    assert float(step(model, x).gradients["router.weight"].norm()) > 0


def test_a_row_that_is_written_after_it_was_read_is_an_error() -> None:
    def late(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = plain(net, h, index, weights)
        h.data_ptr()
        with torch.no_grad():
            h.mul_(2.0)
        return y

    model = patch_model(randomise(Block(late)), "exact", example_inputs=torch.randn(TOKENS, WIDTH))
    with pytest.raises(RuntimeError, match="written in place after it was made"):
        model(torch.randn(TOKENS, WIDTH)).sum().backward()


def assert_a_late_hook_is_refused(weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    """``weigh``: multiplies a product with the routing weights, before a hook is registered on it."""

    def late(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
        weighed = weigh(y, weights)
        if net.hooks:
            y.register_hook(lambda gradient: gradient * 3.0)
        return weighed

    model = randomise(Block(late))
    model.experts.hooks = False
    patch_model(model, "exact", example_inputs=torch.randn(TOKENS, WIDTH))
    model.experts.hooks = True
    with pytest.raises(RuntimeError, match="call register_hook before"):
        model(torch.randn(TOKENS, WIDTH))


def test_a_hook_that_comes_after_the_weights_is_an_error() -> None:
    assert_a_late_hook_is_refused(torch.mul)


def test_backward_twice_and_no_second_derivative() -> None:
    model = patch_model(randomise(Block(plain)), "exact", example_inputs=torch.randn(TOKENS, WIDTH))
    loss = model(torch.randn(TOKENS, WIDTH)).square().sum()
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    assert all(
        torch.equal(first[name], p.grad) for name, p in model.named_parameters() if name in first
    )
    loss = model(torch.randn(TOKENS, WIDTH)).square().sum()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, [model.experts.up], create_graph=True)


@pytest.mark.parametrize(
    ("name", "limit", "more"),
    [
        ("Mixtral", 1.005, {}),
        ("Olmoe", 1.01, {}),
        (
            "Qwen3Moe",
            1.01,
            {"num_attention_heads": 32, "head_dim": 128, "moe_intermediate_size": 768},
        ),
        ("DeepseekV3", 1.005, {"first_k_dense_replace": 1}),
        ("Glm4Moe", 1.01, {"first_k_dense_replace": 1}),
        ("Qwen2Moe", 1.01, {}),
        ("GptOss", 1.005, {}),  # adds a bias to its last product
    ],
)
def test_real_widths_reach_the_floor(name: str, limit: float, more: dict[str, Any]) -> None:
    """With head and loss; the rest are the numbers of rows, eight bytes each."""
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, use_cache=False, **more)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()
    ids = torch.zeros(1, 1024, dtype=torch.long)
    report = plan_patch(model, "exact", example_inputs={"input_ids": ids, "labels": ids})
    assert limit - 0.01 < report.above_floor <= limit  # docs/limits.md names them


def test_a_frozen_product_gives_its_rows_a_gradient() -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3)
    offsets = torch.tensor([2, 6], dtype=torch.int32)

    def multiply(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        return torch.cat((x[:2] @ weight[0], x[2:] @ weight[1]))

    sources = (x.detach(), torch.arange(6))  # neither is saved
    RecomputedMatmul(
        multiply, torch.index_select, x, ExpertWeight(weight), offsets, sources
    ).product().sum().backward()
    (wanted,) = torch.autograd.grad(multiply(x, weight, offs=offsets).sum(), x)
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_gets_a_gradient_of_its_layout(transposed: bool) -> None:
    """Autograd would copy any other."""
    weight = torch.randn(2, 8, 24, dtype=torch.bfloat16)
    if transposed:
        weight = weight.mT.contiguous().mT
    weight.requires_grad_()
    x, offsets = torch.randn(16, 8, dtype=torch.bfloat16), torch.tensor([8, 16], dtype=torch.int32)
    multiply = F.grouped_mm
    stock = torch.autograd.grad(multiply(x, weight, offs=offsets).square().sum(), weight)[0]
    product = RecomputedMatmul(
        multiply, lambda rows: rows, x, ExpertWeight(weight), offsets, (x,)
    ).product()
    found = torch.autograd.grad(product.square().sum(), weight)[0]
    assert torch.equal(found, stock)
    assert found.stride() == stock.stride() == weight.stride()


def test_a_product_holds_no_value_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd saves GPT-OSS' last product for the routing weights, and with it what made it."""
    model, stock = patched(experts("GptOss"))
    read: list[Any] = []
    product = RecomputedMatmul.product

    def noted(matmul: RecomputedMatmul) -> Tensor:
        read.append(matmul.x)
        return product(matmul)

    monkeypatch.setattr(RecomputedMatmul, "product", noted)
    model(**tokens())
    values = [x.held_values() for x in read if x.shape[-1] == INNER]
    assert values and set(values) == {None}
    assert_same(model, stock)

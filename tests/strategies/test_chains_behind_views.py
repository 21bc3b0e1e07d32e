"""Chains whose values Linears and experts read through views, and chains that begin with a repeat."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, saved_bytes
from tests.support.chained import CHAINS, chains_of, tokens
from tests.support.judge import assert_same_step
from tests.support.models import randomise
from tests.support.step import AUTOCAST, BF16, cast, step, warned
from tests.support.toys import WIDTH, rows

HEADS, SIZE, EXPERTS = 4, 6, 3
ROWS = len(rows())
WIDE = ROWS * HEADS * SIZE * 4  # bytes of what is gated


class Heads(nn.Module):
    """Heads that are gated by one number each, as some attentions do; ``body(self, heads)`` reads them."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, HEADS)
        self.down, self.other = (nn.Linear(HEADS * SIZE, WIDTH) for _ in range(2))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(-1, HEADS, SIZE)
        return x + self.body(self, heads * self.gate(x).view(-1, HEADS, 1).sigmoid())


def plain(net: Any, heads: Tensor) -> Tensor:
    return net.down(heads.reshape(len(heads), -1))


def flattened(net: Any, heads: Tensor) -> Tensor:
    return net.down(heads.flatten(1).unsqueeze(0)).squeeze(0)


def through_two_views(net: Any, heads: Tensor) -> Tensor:
    return net.down(heads.view(-1, 2, HEADS * SIZE // 2).view(-1, HEADS * SIZE))


def read_twice(net: Any, heads: Tensor) -> Tensor:
    flat = heads.reshape(len(heads), -1)
    return net.down(flat) + net.other(flat)


def read_otherwise(net: Any, heads: Tensor) -> Tensor:
    flat = heads.reshape(len(heads), -1)
    return net.down(flat) + flat.exp().sum(-1, keepdim=True) + heads.sum((1, 2))[:, None]


def multiplied(net: Any, heads: Tensor) -> Tensor:
    return net.down(heads.reshape(len(heads), -1) * 0.5)


def dropped(net: Any, heads: Tensor) -> Tensor:
    return net.down(F.dropout(heads.reshape(len(heads), -1), 0.3, net.training))


def transposed(net: Any, heads: Tensor) -> Tensor:
    return net.down(heads.transpose(1, 2).reshape(len(heads), -1))


def written(net: Any, heads: Tensor) -> Tensor:
    flat = heads.view(len(heads), -1)
    flat.mul_(2.0)
    return net.down(flat)


def hooked(net: Any, heads: Tensor) -> Tensor:
    flat = heads.view(len(heads), -1)
    flat.register_hook(lambda gradient: 3.0 * gradient)
    return net.down(flat)


def hooked_before(net: Any, heads: Tensor) -> Tensor:
    heads.register_hook(lambda gradient: 3.0 * gradient)
    return net.down(heads.view(len(heads), -1))


def retained(net: Any, heads: Tensor) -> Tensor:
    heads.retain_grad()
    y = net.down(heads.view(len(heads), -1))
    y.register_hook(lambda gradient: gradient * (heads.grad is None))
    return y


def checkpointed(net: Any, heads: Tensor) -> Tensor:
    return checkpoint(plain, net, heads, use_reentrant=False)


def checkpointed_reentrant(net: Any, heads: Tensor) -> Tensor:
    return checkpoint(plain, net, heads, use_reentrant=True)


BODIES = (
    plain, flattened, through_two_views, read_twice, read_otherwise, multiplied, dropped, transposed,
    written, hooked, hooked_before, retained, checkpointed, checkpointed_reentrant,
)  # fmt: skip
READ_BY_LINEARS = (plain, flattened, through_two_views, read_twice, transposed)


def network(body: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Heads(body), nn.Linear(WIDTH, 3))


def patched(model: Any) -> Any:
    return patch_model(model, CHAINS, example_inputs=(rows(),))


def saved(model: Any) -> int:
    with saved_bytes(model) as counted:
        model(rows())
    return counted.activations


@pytest.mark.parametrize("body", READ_BY_LINEARS)
def test_linears_behind_views_save_what_enters_the_chain(body: Any) -> None:
    model = network(body)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1"]
    assert saved(twin) - saved(model) == WIDE
    found, expected = (step(net, rows(), seed=7) for net in (model, twin))
    assert torch.equal(found.output, expected.output)
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("body", BODIES)
def test_any_use_of_a_view_is_right(body: Any) -> None:
    """Planned on the plain forward, so that each other one meets deferred tensors unforeseen."""
    model = network(plain)
    twin = copy.deepcopy(model)
    patched(model)
    model[1].body = twin[1].body = body
    if body is written:  # whose whole somebody holds
        with pytest.raises(RuntimeError, match="while others that share its memory"):
            model(rows())
        return
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("body", BODIES)
def test_plans_of_any_use_of_a_view_are_right(body: Any) -> None:
    model = network(body)
    twin = copy.deepcopy(model)
    with warned():
        patched(model)
    assert bool(chains_of(model)) is (body in READ_BY_LINEARS or body is checkpointed)
    assert_same_step(model, twin, rows())
    assert saved(model) <= saved(twin)


def test_a_write_into_the_whole_is_refused_where_a_view_is_held() -> None:
    def whole(net: Any, heads: Tensor) -> Tensor:
        flat = heads.view(len(heads), -1)
        heads.mul_(2.0)
        return net.down(flat)

    model = network(plain)
    patched(model)
    model[1].body = whole
    with pytest.raises(RuntimeError, match="while others that share its memory"):
        model(rows())


def test_a_write_into_a_view_of_what_nobody_holds() -> None:
    def alone(net: Any, heads: Tensor) -> Tensor:
        return net.down((heads * 2.0).view(len(heads), -1).mul_(2.0))

    model = network(plain)
    twin = copy.deepcopy(model)
    patched(model)
    model[1].body = twin[1].body = alone
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("mode", [BF16, AUTOCAST], ids=["bf16", "autocast"])
def test_views_in_low_precision(mode: Any) -> None:
    model = cast(network(plain), mode.weights)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode is AUTOCAST):
        patch_model(model, CHAINS, example_inputs=(rows().to(mode.weights),))
    assert chains_of(model)
    found, expected = (step(net, rows(), mode, seed=7, count=True) for net in (model, twin))
    assert torch.equal(found.output, expected.output) and found.saved < expected.saved
    assert_same_step(model, twin, rows(), mode)


def test_an_adapter_behind_a_view() -> None:
    model = network(plain).requires_grad_(False)
    config = LoraConfig(r=2, target_modules=["up", "gate", "down"], init_lora_weights=False)
    model = inject_adapter_in_model(config, model)
    twin = copy.deepcopy(model)
    patched(model)
    assert saved(model) < saved(twin)
    assert_same_step(model, twin, rows())


class Gated(nn.Module):
    """Laguna's attention: heads that are rotated, and gated by a number whose view ends its chain."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, HEADS)
        self.down = nn.Linear(HEADS * SIZE, WIDTH)
        self.angles = nn.Buffer(torch.linspace(0, 1, SIZE).expand(1, SIZE).clone())

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(-1, HEADS, SIZE) * self.angles.cos()
        flat = heads.flip(-1).exp().reshape(len(x), -1)
        gate = F.softplus(self.gate(x))
        gated = (flat.view(-1, HEADS, SIZE) * gate.unsqueeze(-1)).view(len(x), -1)
        return x + self.down(gated)


def test_a_product_alone_is_a_chain_where_linears_read_a_view_of_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(), nn.Linear(WIDTH, 3))
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1"]
    assert saved(twin) - saved(model) >= WIDE
    assert_same_step(model, twin, rows())


class Experts(nn.Module):
    """All experts for all rows, weighed by their scores, as Llama 4 runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.to_transpose = False

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid().t().reshape(-1, 1)
        if self.to_transpose:
            x = x.t().contiguous().t()
        rows = x.repeat(EXPERTS, 1) * scores
        return torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.weight).sum(0)


def experts() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 3))


def test_repeated_rows_are_saved_once() -> None:
    model = experts()
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1"]
    # neither the repeated rows nor their products
    assert saved(twin) - saved(model) == 2 * EXPERTS * ROWS * WIDTH * 4
    found, expected = (step(net, rows(), seed=7) for net in (model, twin))
    assert torch.equal(found.output, expected.output)
    assert_same_step(model, twin, rows())


def test_rows_that_lie_otherwise_are_repeated_right() -> None:
    model = experts()
    patched(model)
    twin = experts()
    model[1].to_transpose = twin[1].to_transpose = True
    assert_same_step(model, twin, rows())


class Uneven(nn.Module):
    """A chain of another shape than its sources: ``body(self, h)`` reads h ``[EXPERTS, N, WIDTH]``."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.router, self.down = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid().t().reshape(EXPERTS, -1, 1).contiguous()
        h = (x.repeat(EXPERTS, 1, 1) * scores).tanh().sin()
        return self.down(h).sum(0) + self.body(h).square().sum()


UNEVEN: dict[str, Any] = {
    "flatten": lambda h: h.flatten(1).softmax(-1),
    "view": lambda h: h.view(-1, WIDTH)[ROWS + 1],
    "transpose": lambda h: h.transpose(1, 2),
    "permute": lambda h: h.permute(2, 0, 1),
    "unsqueeze": lambda h: h.unsqueeze(3),
    "roll": lambda h: h.roll(1, 2).cumsum(2),
    "pad": lambda h: F.pad(h, (1, 1, 0, 0, 2, 0)),
    "row": lambda h: h[EXPERTS - 1],
    "mask": lambda h: h[torch.tensor([True, False, True])],
    "contiguous": lambda h: h.contiguous().exp(),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_moves_of_a_chain_of_another_shape_than_its_sources(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Uneven(UNEVEN[name]), nn.Linear(WIDTH, 3))
    twin = copy.deepcopy(model)
    patched(model)
    assert_same_step(model, twin, rows())


READS: tuple[Any, ...] = (
    lambda v: v[..., SIZE + 1],
    lambda v: v[:, HEADS + 1],
    lambda v: v.permute(1, 0),
    lambda v: v[v.detach() > 0],
)


@pytest.mark.parametrize("read", READS, ids=["channel", "head", "permute", "mask"])
def test_other_readers_of_a_view(read: Any) -> None:
    def body(net: Any, heads: Tensor) -> Tensor:
        flat = heads.reshape(len(heads), -1)
        return net.down(flat) + read(flat).square().sum()

    model = network(plain)
    twin = copy.deepcopy(model)
    patched(model)
    model[1].body = twin[1].body = body
    assert_same_step(model, twin, rows())


def test_sizes_that_are_changed_later() -> None:
    def body(net: Any, heads: Tensor) -> Tensor:
        sizes = [len(heads), -1]
        y = net.down(heads.reshape(sizes))
        sizes[0] = 2 * len(heads)
        return y

    model = network(body)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    assert_same_step(model, twin, rows())


def test_experts_of_llama_4_are_at_the_floor() -> None:
    config = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, intermediate_size_mlp=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_local_experts=EXPERTS, num_experts_per_tok=1, interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomise(transformers.Llama4ForCausalLM(config)).train()
    model.config.use_cache = False
    twin = copy.deepcopy(model)
    inputs = tokens()
    report = patch_model(model, "exact", example_inputs=inputs)._lowmem_patch_record.report
    assert [site for site in report.sites if site.kind == "chain" and site.patched]
    assert report.above_floor < 1.03  # numbers of the router, of which there are few
    assert_same_step(model, twin, inputs)

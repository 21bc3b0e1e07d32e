"""Blocks of diffusion transformers: modulated norms, and a concatenation in front of a Linear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.judge import assert_close, assert_same_step
from tests.support.lives import nodes_of
from tests.support.step import MODES, Mode, cast

WIDTH, ROWS, BATCH = 16, 6, 2
FULL = BATCH * ROWS * WIDTH * 4  # bytes of a tensor of the width
STATISTICS = BATCH * ROWS * 4
CONDITION = BATCH * WIDTH * 4


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, ROWS, WIDTH, generator=generator)
    return x, torch.randn(BATCH, WIDTH, generator=generator)


class Modulated(nn.Module):
    """``norm(x) * (1 + scale) + shift`` of a condition's Linear, as adaLN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.condition = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = self.condition(condition).chunk(3, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate[:, None]


class Attention(nn.Module):
    """Three Linears that read one value, and what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Single(nn.Module):
    """A block whose attention and MLP are concatenated; ``join(self, attention, hidden)`` reads both."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        self.modulated, self.attention = Modulated(), Attention()
        self.up, self.act = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh")
        self.out, self.other = (nn.Linear(5 * WIDTH, WIDTH) for _ in range(2))
        self.join = join

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y, gate = self.modulated(x, condition)
        hidden = self.act(self.up(y))
        return x + gate * self.join(self, self.attention(y), hidden)


def joined(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    return net.out(torch.cat([attention, hidden], dim=2))


def joined_by_other_words(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    return net.out(torch.concat(tensors=(attention, hidden), dim=-1))


def joined_after_more(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    return net.out(torch.cat([attention, hidden * 2.0 + 1.0], -1).tanh())


def read_twice(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    both = torch.cat([attention, hidden], 2)
    return net.out(both) + net.other(both)


def parts_read_as_well(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    both = torch.cat([attention, hidden], 2)
    return net.out(both) + hidden.sum(-1, keepdim=True) + attention.exp()


def one_part_twice(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    return net.out(torch.cat([hidden, hidden[..., :WIDTH]], 2)) + attention


def a_gated_part(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    gated = F.silu(hidden) * net.up(attention)
    return net.out(torch.cat([attention, gated], 2))


def of_two_dtypes(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    return net.out(torch.cat([attention.double(), hidden], 2).to(net.out.weight.dtype))


def written(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    both = torch.cat([attention, hidden], 2)
    both.mul_(0.5)
    return net.out(both)


def hooked(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    both = torch.cat([attention, hidden], 2)
    both.register_hook(lambda gradient: 2.0 * gradient)
    return net.out(both)


def sliced(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    both = torch.cat([attention, hidden], 2)
    return net.out(both.flip(1)[:, :3]).sum(1, keepdim=True) + attention


def checkpointed(net: Any, attention: Tensor, hidden: Tensor) -> Tensor:
    return checkpoint(joined, net, attention, hidden, use_reentrant=False)


JOINS: tuple[Callable[..., Tensor], ...] = (
    joined, joined_by_other_words, joined_after_more, read_twice, parts_read_as_well, one_part_twice,
    a_gated_part, of_two_dtypes, written, hooked, sliced, checkpointed,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self, join: Any = joined) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Single(join) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, condition)
        return x


def network(join: Any = joined) -> Any:
    torch.manual_seed(0)
    return Net(join)


def patched(model: Any, preset: Any = "exact") -> Any:
    return patch_model(model, preset, example_inputs=inputs())


def saved(model: Any) -> int:
    with saved_bytes(model) as counted:
        output = model(*inputs())
    assert output.requires_grad
    return counted.total


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_step_is_that_of_the_unpatched_model(mode: Mode) -> None:
    model = cast(network(), mode.weights)
    twin = copy.deepcopy(model)
    given = tuple(tensor.to(mode.weights) for tensor in inputs())
    patch_model(model, "exact", example_inputs=given)
    chains = {site.name for site in patch_report(model).sites if site.kind == "chain"}
    assert chains == {f"blocks.{i}{name}" for name in (".modulated", "") for i in range(2)}
    assert_same_step(model, twin, given, mode)


@pytest.mark.parametrize("join", JOINS)
def test_any_use_of_a_concatenation_is_right(join: Any) -> None:
    model = network(join)
    twin = copy.deepcopy(model)
    patched(model)
    assert_same_step(model, twin, inputs())


@pytest.mark.parametrize("join", JOINS)
def test_uses_that_the_plan_did_not_see_are_right(join: Any) -> None:
    model, twin = patched(network()), network(join)
    for block in model.blocks:
        block.join = join
    assert_same_step(model, twin, inputs())


def test_one_tensor_is_saved_for_a_modulated_norm_and_none_for_a_concatenation() -> None:
    block = {
        "z": FULL,
        "q, k, v and what is made of them": 4 * FULL,
        "hidden": 4 * FULL,
        "gated": FULL,
    }
    model = network()
    twin = copy.deepcopy(model)
    patched(model)
    small = 2 * (STATISTICS + CONDITION)
    expected = FULL + 2 * sum(block.values())
    assert expected <= saved(model) <= expected + 8 * small
    # the norm's input and the modulated output, and the concatenation
    assert saved(twin) - saved(model) >= 2 * (FULL + 5 * FULL)


def test_a_frozen_condition_leaves_one_tensor_as_well() -> None:
    model = network()
    for block in model.blocks:
        block.modulated.condition.requires_grad_(False)
    twin = copy.deepcopy(model)
    patched(model)
    # on a CPU attention saves nothing of its output, which the concatenation needs
    assert saved(twin) - saved(model) >= 2 * (FULL + 4 * FULL)
    assert_same_step(model, twin, inputs())


def with_adapters(model: Any, targets: list[str]) -> Any:
    model.requires_grad_(False)
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return inject_adapter_in_model(config, model)


@pytest.mark.parametrize("targets", [["q", "k", "v"], ["q", "k", "v", "up", "out", "condition"]])
def test_adapters_read_chains_in_one_op(targets: list[str]) -> None:
    model = with_adapters(network(), targets)
    twin = copy.deepcopy(model)
    patched(model)
    assert saved(twin) > saved(model)
    assert_same_step(model, twin, inputs())
    names = {type(node).__name__ for node in nodes_of(model(*inputs()))}
    # base, lora_A and lora_B are no nodes of their own, but in Linears without adapters
    if "out" in targets:
        assert not any(name.startswith(("AddmmBackward", "MmBackward")) for name in names)


def test_auto_stores_codes_where_a_frozen_linear_reads_the_concatenation() -> None:
    model = with_adapters(network(), ["q", "k", "v"])
    report = patch_report(patch_model(model, "auto", example_inputs=inputs()))
    strategies = {site.name: site.strategy for site in report.sites}
    assert strategies["blocks.1.act"] == "codes"  # nothing up to that of the first block trains
    other = with_adapters(network(), ["q", "k", "v", "out"])
    report = patch_report(patch_model(other, "auto", example_inputs=inputs()))
    assert "codes" not in {site.strategy for site in report.sites}


def test_products_called_alike_are_not_held_for_a_chain() -> None:
    """``gate * attention`` is called as ``norm(x) * scale`` is, but of no norm."""

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
            self.attention = Attention()
            self.scales = nn.Parameter(torch.ones(4, WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            scale, shift, gate, _ = self.scales
            return x + self.attention(self.norm(x) * scale + shift) * gate + shift

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Alike(), Alike())
    twin = copy.deepcopy(model)
    given = inputs()[:1]
    patch_model(model, "exact", example_inputs=given)
    sizes = []
    for one in (twin, model):
        with saved_bytes(one) as counted:
            one(*given)
        sizes.append(counted.total)
    assert sizes[0] - sizes[1] >= 2 * (FULL - STATISTICS)
    assert_same_step(model, twin, given)


def test_a_patched_block_evaluates_and_trains_on() -> None:
    model = network()
    twin = copy.deepcopy(model)
    patched(model)
    with torch.no_grad():
        assert_close(model.eval()(*inputs()), twin.eval()(*inputs()), "output")
    longer = tuple(torch.cat([tensor, tensor]) for tensor in inputs())
    assert_same_step(model.train(), twin.train(), longer)


@pytest.mark.parametrize(("rows", "functions"), [(ROWS, 3), (128, 2)])
def test_a_condition_that_is_small_beside_its_tokens_is_no_step(rows: int, functions: int) -> None:
    """``1 + scale`` has one row for each sample, and costs Python as much as a function of all tokens."""
    model = network()
    twin = copy.deepcopy(model)
    given = (torch.randn(BATCH, rows, WIDTH), inputs()[1])
    patch_model(model, "exact", example_inputs=given)
    reasons = {site.name: site.reason for site in patch_report(model).sites if site.kind == "chain"}
    assert f"input of {functions} elementwise functions" in reasons["blocks.0.modulated"]
    assert_same_step(model, twin, given)


def test_a_linear_reads_a_chain_without_a_view_for_autograd() -> None:
    model = patched(network())
    seen: list[str] = []
    for layer in (model.blocks[0].attention.q, model.blocks[0].out):
        layer.register_forward_hook(lambda _module, _args, y: seen.append(_nodes(y)))
    model(*inputs())
    assert seen == ["deferred", "deferred"]


def _nodes(y: Tensor) -> str:
    """The name of the node that made a Linear's input."""
    assert y.grad_fn is not None
    node = y.grad_fn.next_functions[0][0]
    assert node is not None
    return "deferred" if "Defer" in node.name() else node.name()

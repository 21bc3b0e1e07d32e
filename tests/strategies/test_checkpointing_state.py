"""checkpointing: a block runs again with the hooks, modes and adapters of its first run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from torch import Tensor, nn

from tests.support.checkpointed import LEVELS, patched_stack
from tests.support.judge import assert_equal
from tests.support.stacks import (
    PlainBlock,
    Stack,
    all_of,
    blocks_of,
    give_levels,
    patched,
    rows,
    stack,
)
from tests.support.step import Step, warned

Between = Callable[[Any], AbstractContextManager[None]]


def _linears(model: Any) -> list[nn.Module]:
    return [block.out for block in model.blocks]


@contextmanager
def hooked(model: Any) -> Any:
    handles = [
        module.register_forward_hook(lambda _m, _i, output: 1.5 * output)
        for module in _linears(model)
    ]
    handles += [
        module.register_forward_pre_hook(
            lambda _m, args, kwargs: ((0.5 * args[0],), kwargs), with_kwargs=True
        )
        for module in _linears(model)
    ]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def in_eval_mode(model: Any) -> Any:
    model.eval()
    yield
    model.train()


@contextmanager
def in_eval_mode_after(model: Any) -> Any:
    yield
    model.eval()


@contextmanager
def frozen_after(model: Any) -> Any:
    yield
    for module in _linears(model):
        module.requires_grad_(False)


@contextmanager
def frozen_before(model: Any) -> Any:
    for module in _linears(model):
        module.requires_grad_(False)
    yield
    for module in _linears(model):
        module.requires_grad_(True)


BETWEEN: dict[str, Between] = {
    "hooks that are removed": hooked,
    "eval mode in the forward": in_eval_mode,
    "eval mode behind it": in_eval_mode_after,
    "frozen behind it": frozen_after,
    "frozen in the forward": frozen_before,
}


def one_step(model: Any, x: Tensor, between: Between) -> Step:
    torch.manual_seed(0)
    with between(model), warned():
        loss = model(x).square().mean()
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found
    return Step([loss.detach()], found)


@functools.cache
def step_of_stack(between: str) -> Step:
    """Where no block runs again."""
    torch.manual_seed(0)
    return one_step(patched_stack()[0], rows(), BETWEEN[between])


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_set_after_the_forward_changes_no_second_run(level: str, between: str) -> None:
    (model, blocks), x = patched_stack(), rows()
    expected = step_of_stack(between)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    found = one_step(fitted, x, BETWEEN[between])
    assert_equal(found, expected)
    with BETWEEN[between](fitted):
        pass
    assert not any(module._forward_hooks for module in _linears(fitted))


class Counting(PlainBlock):
    """Counts its runs, and writes them down."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.log = 0, list[int]()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.runs += 1
        self.log.append(self.runs)
        return super().forward(x) * self.runs


@pytest.mark.parametrize("level", LEVELS)
def test_a_counter_counts_no_second_run(level: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(Counting() for _ in range(6)).train(), rows()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    models = (copy.deepcopy(model), give_levels(model, blocks, all_of(blocks, level)))
    for _ in range(2):
        expected, found = (one_step(each, x, lambda _: nullcontext()) for each in models)
        assert_equal(found, expected)
    logs: list[Any] = [[block.log for block in each.blocks] for each in models]
    assert logs[0] == logs[1]


@functools.cache
def patched_adapters(ranks: tuple[int, int]) -> tuple[Any, Any]:
    """A patched model with two adapters, of which each test takes copies, and its blocks."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {"target_modules": ["out", "qkv"], "init_lora_weights": False}
    model = get_peft_model(stack(), LoraConfig(r=ranks[0], **settings))
    model.add_adapter("other", LoraConfig(r=ranks[1], **settings))
    return patched(model, rows()), blocks_of(model, rows())


def exchanged(model: Any) -> Step:
    """A step of three forwards: with each adapter, and with none."""
    x = rows()
    torch.manual_seed(0)
    with warned():
        first = model(x).square().mean()
        model.set_adapter("other")
        second = model(x).square().mean()
        with model.disable_adapter():
            third = model(x).square().mean()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    (first + second + third).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any("default" in n for n in found) and any("other" in n for n in found)
    assert model.active_adapter == "other"
    return Step([first.detach(), second.detach(), third.detach()], found)


def scaled(model: Any) -> Step:
    """A step in whose forward the adapters have another scale than before and after it."""
    return one_step(model, rows(), lambda one: rescale_adapter_scale(one, 0.25))


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_have_the_scale_of_their_forward(level: str) -> None:
    model, blocks = patched_adapters((4, 4))
    expected = scaled(copy.deepcopy(model))
    assert_equal(scaled(give_levels(model, blocks, all_of(blocks, level))), expected)


class Settings(PlainBlock):
    """Has numbers in a dict, a tuple and a set."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name, self.pair, self.chosen = {"factor": 2.0}, (3.0, 1.0), {0.5}

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        # in front, where the saved tensors depend on it
        return super().forward(x * self.by_name["factor"] * self.pair[0] * sum(self.chosen))


@contextmanager
def set_anew(model: Any) -> Any:
    yield
    for block in model.blocks:
        block.by_name["factor"] = 1.0
        block.pair, block.chosen = (1.0, 1.0), {1.0}


@pytest.mark.parametrize("level", LEVELS)
def test_numbers_in_a_dict_a_tuple_or_a_set_are_those_of_the_forward(level: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(Settings() for _ in range(6)).train(), rows()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    expected, found = (one_step(copy.deepcopy(one), x, set_anew) for one in (model, fitted))
    assert_equal(found, expected)


@functools.cache
def exchanged_as_patched(ranks: tuple[int, int]) -> Step:
    """Where no block runs again."""
    return exchanged(copy.deepcopy(patched_adapters(ranks)[0]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ranks", [(4, 3), (4, 4)])
def test_adapters_that_are_exchanged_after_the_forward(level: str, ranks: tuple[int, int]) -> None:
    model, blocks = patched_adapters(ranks)
    expected = exchanged_as_patched(ranks)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    assert_equal(exchanged(fitted), expected)


@pytest.mark.parametrize("level", LEVELS[1:])  # which run blocks again
@pytest.mark.parametrize("name", ["out.bias", "qkv.weight", "norm.weight"])
def test_a_step_between_a_forward_and_its_backward_is_an_error(level: str, name: str) -> None:
    """Of a Linear's bias, too, which autograd saves in no forward."""
    (model, blocks), inputs = patched_stack(), rows()
    model = give_levels(model, blocks, all_of(blocks, level))
    model.requires_grad_(False)
    weight = model.blocks[2].get_parameter(name).requires_grad_()
    with warned():  # of what trains now
        first, second = model(inputs).sum(), model(2 * inputs).sum()
    first.backward()
    torch.optim.SGD([weight], 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()

"""Experts that overwrite rows with zeros, as transformers up to 5.17 does for those of other devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.strategies.test_experts import (
    ROWS,
    TOKENS,
    WIDTH,
    Block,
    assert_a_late_hook_is_refused,
)
from tests.support.judge import assert_same_step
from tests.support.models import randomise


def others(like: Tensor) -> Tensor:
    """Rows that an expert of another device computes."""
    return (torch.arange(len(like), device=like.device) % 5 == 3).unsqueeze(-1)


def masked(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As transformers up to 5.17."""
    rows, mask = h[index], others(weights)
    rows.masked_fill_(mask, 0.0)
    hidden = net.multiply(rows, net.up).masked_fill(mask, 0.0)
    return net.multiply(net.act(hidden), net.down).masked_fill(mask, 0.0) * weights


def masked_rows(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = h[index]
    rows.masked_fill_(others(weights), 0.0)
    # without an activation that makes zeros of zeros
    return net.multiply(net.act(net.multiply(rows, net.up) + 1.0), net.down) * weights


def masked_product(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    return y.masked_fill(others(weights), 0.0) * weights


def masked_weighed(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down) * weights
    return y.masked_fill_(others(weights), 0.0)


def masked_twice(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """By another mask the second time, and with numbers other than 0."""
    rows, mask = h[index], others(weights)
    rows.masked_fill_(mask, 0.0).masked_fill_(mask.roll(1, 0), 0).masked_fill_(mask.roll(2, 0), 0.5)
    y = net.multiply(net.act(net.multiply(rows, net.up)), net.down)
    return y.masked_fill(mask.roll(3, 0), 0.0).masked_fill(mask.roll(4, 0), 0.0) * weights


def masked_part(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    return y.masked_fill(torch.arange(WIDTH, device=h.device) > 3, 0.0) * weights


def masked_product_read_whole(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    return y.masked_fill(others(weights), 0.0) * weights + y * weights + y


def masked_product_hooked_before(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    y.register_hook(lambda gradient: gradient * 3.0)
    return y.masked_fill(others(weights), 0.0) * weights


def masked_product_hooked_between(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = net.multiply(net.act(net.multiply(h[index], net.up)), net.down)
    filled = y.masked_fill(others(weights), 0.0)
    y.register_hook(lambda gradient: gradient * 3.0)
    return filled * weights


def mask_written_between(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    mask, rows = others(weights), h[index]
    rows.masked_fill_(mask, 0.0)
    y = net.multiply(net.act(net.multiply(rows, net.up)), net.down)
    filled = y.masked_fill(mask.clone(), 0.0)
    return filled * weights.masked_fill(mask, 2.0)


BODIES = (
    masked, masked_rows, masked_product, masked_weighed, masked_twice, masked_part, masked_product_read_whole,
    masked_product_hooked_before, masked_product_hooked_between, mask_written_between,
)  # fmt: skip


def compared(body: Callable[..., Tensor], reentrant: bool | None = None, frozen: str = "-") -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    model = randomise(Block(body, reentrant))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, stock, x)


@pytest.mark.parametrize("body", BODIES)
def test_any_mask_of_rows_and_products_is_right(body: Callable[..., Tensor]) -> None:
    compared(body)


@pytest.mark.parametrize("reentrant", [True, False])
def test_masked_rows_that_are_checkpointed(reentrant: bool) -> None:
    compared(masked, reentrant)


@pytest.mark.parametrize("frozen", ["experts.up", "experts.down", "router", "norm", "enter"])
def test_whoever_trains(frozen: str) -> None:
    compared(masked, frozen=frozen)


@pytest.mark.parametrize("body", [masked, masked_weighed])
def test_rows_that_are_masked_are_not_saved(body: Callable[..., Tensor]) -> None:
    x = torch.randn(TOKENS, WIDTH)
    model = randomise(Block(body))
    stock = copy.deepcopy(model)
    report = patch_report(patch_model(model, "exact", example_inputs=x))
    held: list[int] = []
    for one in (stock, model):
        with saved_bytes(one) as saved:
            one(x)
        held.append(sum(item.shape == (ROWS, WIDTH) for item in saved.storages))
    assert held == [2, 0]  # rows and a product
    assert report.floor <= report.saved_after


def test_a_mask_that_is_written_after_it_was_read_is_an_error() -> None:
    def late(net: Any, h: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, mask = h[index], others(weights)
        rows.masked_fill_(mask, 0.0)
        y = net.multiply(net.act(net.multiply(rows, net.up)), net.down) * weights
        mask.logical_not_()
        return y

    model = patch_model(randomise(Block(late)), "exact", example_inputs=torch.randn(TOKENS, WIDTH))
    with pytest.raises(RuntimeError, match="written in place"):
        model(torch.randn(TOKENS, WIDTH)).sum().backward()


def test_a_hook_on_a_product_that_was_masked_and_weighed_is_an_error() -> None:
    assert_a_late_hook_is_refused(lambda y, weights: y.masked_fill(others(weights), 0.0) * weights)

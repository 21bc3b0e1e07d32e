"""What a compiled norm does where its output does not tell z, since gamma is 0 or became it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_patch import patch_model
from tests.life.test_gamma_checks import Block, assert_same_gradients, pair, rows, zero
from tests.support.judge import assert_within_budget

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(script_method|should not be inst):DeprecationWarning"
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_model_with_a_frozen_gamma_of_zero_is_right() -> None:
    torch.manual_seed(0)
    stock = Block().double()
    zero(stock)
    stock.norm.requires_grad_(False)
    patched = patch_model(copy.deepcopy(stock), "exact", example_inputs={"x": rows()})
    assert_same_gradients(patched, stock, lambda model: torch.compile(model, backend="aot_eager"))


def compiled_pair(norm: nn.Module | None = None) -> tuple[nn.Module, Any, Block]:
    """As `pair`, with a frozen gamma, and what was compiled of the patched block before gamma was written."""
    patched, stock = pair(frozen=True, norm=norm)
    run = torch.compile(patched, backend="aot_eager")
    assert_same_gradients(patched, stock, lambda model: run if model is patched else model)
    return patched, run, stock


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8)], ids=["layer_norm", "rms_norm"])
def test_gamma_set_to_zero_after_compilation_gives_no_number(norm: nn.Module) -> None:
    patched, run, _ = compiled_pair(norm)
    patched.zero_grad()
    zero(patched)
    run(rows()).square().sum().backward()
    assert patched.get_parameter("enter.weight").grad.isnan().all()


def test_gamma_of_zero_loaded_after_compilation_is_right() -> None:
    patched, run, stock = compiled_pair()
    zero(stock)
    patched.load_state_dict(stock.state_dict())
    assert_same_gradients(patched, stock, lambda model: run if model is patched else model)


@pytest.mark.slow
def test_compiled_post_norm_model_with_a_gamma_of_zero_under_autocast(
    make: Callable[[str], Any],
) -> None:
    stock = make("bert")
    gammas = [name for name, _ in stock.named_parameters() if name.endswith("LayerNorm.weight")]
    for name in gammas:
        stock.get_parameter(name).data[3] = 0
    inputs = {"input_ids": torch.randint(3, 20, (2, 8))}
    patched = patch_model(copy.deepcopy(stock), "exact", example_inputs=inputs)
    true = copy.deepcopy(stock).double()
    for model, run in (
        (true, true), (stock, stock), (patched, torch.compile(patched, backend="aot_eager"))
    ):  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, enabled=model is not true):
            hidden = run(**inputs)[0]
        hidden.backward(torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden))
    for name in gammas:
        own, theirs, exact = (m.get_parameter(name).grad for m in (patched, stock, true))
        assert_within_budget(own, theirs, exact, 2**-8 * exact.abs().max())

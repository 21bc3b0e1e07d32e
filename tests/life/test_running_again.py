"""Blocks that run again in backward: norms there save what they saved before, whatever is known of gamma."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from tests.support.judge import assert_close


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Two blocks that run again, and a head; its features may be asked for by themselves."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reentrant, self.runs_again = reentrant, False

    def features(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.runs_again else block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.features(x))
        return out


X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def pair(frozen: bool, reentrant: bool = False, preset: str = "exact") -> tuple[Model, Model]:
    """A patched model and its stock twin, whose blocks run again; float64.

    ``frozen``: of the Linears behind the norms, which then save as many tensors either way.
    """
    torch.manual_seed(0)
    stock = Model(reentrant).double()
    for block in stock.blocks:
        nn.init.uniform_(block.norm.weight, 0.5, 2.0)
        nn.init.uniform_(block.norm.bias)
        block.linear.requires_grad_(not frozen)
    patched = patch_model(copy.deepcopy(stock), preset, example_inputs={"x": X})
    stock.runs_again = patched.runs_again = True
    return patched, stock


def assert_same_gradients(
    models: tuple[Model, Model], loss: Callable[[Model], Tensor], tolerance: float = 1e-9
) -> None:
    for model in models:
        model.zero_grad()
        loss(model).backward()
    patched, stock = models
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            assert_close(patched.get_parameter(name).grad, parameter.grad, name, tolerance)


every_way = pytest.mark.parametrize(
    ("frozen", "reentrant"), list(itertools.product([False, True], [False, True]))
)


@pytest.mark.parametrize("preset", ["exact", "compact"])
@every_way
def test_a_part_called_beside_the_model_has_right_gradients(
    frozen: bool, reentrant: bool, preset: str
) -> None:
    models = pair(frozen, reentrant, preset)
    # 8-bit storage is approximate; what went wrong was wrong by a third
    tolerance = 0.05 if preset == "compact" else 1e-9
    assert_same_gradients(
        models, lambda m: m(X).square().sum() + m.features(2 * X).square().sum(), tolerance
    )


@every_way
def test_a_part_called_after_the_model_has_right_gradients(frozen: bool, reentrant: bool) -> None:
    models = pair(frozen, reentrant)
    assert_same_gradients(models, lambda m: m(X).square().sum())
    assert_same_gradients(models, lambda m: m.features(X).square().sum())


@pytest.mark.parametrize("frozen", [False, True])
def test_two_forwards_before_a_backward_have_right_gradients(frozen: bool) -> None:
    patched, stock = models = pair(frozen)
    with torch.no_grad():  # between what a forward that waits and one that expects ask of gamma
        for model in models:
            for block in model.blocks:
                block.norm.weight[3] = 0.01  # type: ignore[operator, union-attr, index]
                block.norm.bias.zero_()  # type: ignore[operator, union-attr]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-5, fused=True) for model in models]
    for _ in range(5):
        assert_same_gradients(models, lambda m: m(X).square().sum() + m(2 * X).square().sum())
        for optimizer in optimizers:
            optimizer.step()
        stock.load_state_dict(patched.state_dict())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_forward_with_other_weights_before_a_backward_has_right_gradients(frozen: bool) -> None:
    def loss(model: Model) -> Tensor:
        first = model(X).square().sum()
        model.runs_again = False
        fast = {name: 1.1 * value for name, value in model.named_parameters()}
        second: Tensor = functional_call(model, fast, X).square().sum()
        model.runs_again = True
        return first + second

    assert_same_gradients(pair(frozen), loss)


def stopped_forward(model: Model) -> None:
    """A forward that an error ends."""

    def stop(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.out.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(X)
    handle.remove()


@pytest.mark.parametrize("freezes", [False, True])
def test_gamma_written_after_a_stopped_forward_is_looked_at(freezes: bool) -> None:
    models = pair(frozen=False)
    for model in models:
        model.runs_again = False
        stopped_forward(model)
        model.blocks[0].norm.weight.data[3] = 0  # type: ignore[operator, union-attr, index]
        for block in model.blocks:
            block.norm.requires_grad_(not freezes)  # type: ignore[union-attr, operator]
    run = (lambda m: m(X).square().sum()) if freezes else (lambda m: m.features(X).square().sum())
    assert_same_gradients(models, run)


def test_gamma_written_before_a_part_runs_again_is_looked_at() -> None:
    models = pair(frozen=False, reentrant=True)
    assert_same_gradients(models, lambda m: m(X).square().sum())
    for model in models:
        model.blocks[0].norm.weight.data[3] = 0  # type: ignore[operator, union-attr, index]
    assert_same_gradients(models, lambda m: m.features(X).square().sum())


@pytest.mark.parametrize("writes", ["the norm's hook", "the Linear's hook"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_norms_output_written_in_a_block_that_runs_again_is_right_or_an_error(
    reentrant: bool, writes: str
) -> None:
    """Torch looks at no version of what its checkpoint computes again."""
    patched, stock = pair(False, reentrant)
    for model in (patched, stock):
        for block in model.blocks:
            if writes == "the norm's hook":
                block.norm.register_forward_hook(lambda _module, _args, y: y.mul_(1.5))  # type: ignore[union-attr]
            else:
                block.linear.register_forward_pre_hook(lambda _module, args: (args[0].add_(0.5),))  # type: ignore[union-attr]
    if reentrant:
        assert_same_gradients((patched, stock), lambda m: m(X).square().sum())
    else:
        with pytest.raises(RuntimeError, match="the output of a norm was written in place"):
            patched(X).square().sum().backward()

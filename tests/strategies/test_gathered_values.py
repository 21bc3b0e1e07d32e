"""A tensor of which `torch.gather` takes numbers is not saved: its backward needs the shape alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes
from lowmem_patch.functional import gather
from tests.support.judge import assert_same_step
from tests.support.step import AUTOCAST, BF16, cast, step
from tests.support.toys import WIDTH, rows

WIDE, TAKEN = 16 * WIDTH, 4


class Bias(nn.Module):
    """Takes a few numbers of each wide row, as a bias of relative positions does."""

    def __init__(self, take: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDE)
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(TAKEN).expand(len(x), -1) * 3
        return self.take(self, self.wide(x), index)


def method(net: Any, x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index)


def function(net: Any, x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, dim=1, index=index)


def several_times(net: Any, x: Tensor, index: Tensor) -> Tensor:
    """Numbers that are taken twice, and of a part."""
    return x.gather(1, index // 2) + x[:, 1:].gather(1, index)


TAKES = [method, function, several_times]


def network(take: Any = method) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Bias(take), nn.Linear(TAKEN, 3))


def patched(model: Any, config: Any = "exact") -> Any:
    return patch_model(model, config, example_inputs=(rows(),))


def held(model: Any) -> int:
    with saved_bytes(model) as saved:
        model(rows())
    return saved.activations


@pytest.mark.parametrize("preset", ["exact", "auto"])
@pytest.mark.parametrize("take", TAKES)
def test_the_tensor_is_not_saved(take: Any, preset: str) -> None:
    model = network(take)
    twin = copy.deepcopy(model)
    report = patch_report(patched(model, preset))
    assert "modules that gather numbers of a tensor, which is not saved: 1" in report.notes
    assert held(twin) - held(model) == len(rows()) * WIDE * 4
    assert held(model) == report.saved_after
    found, expected = (step(net, rows(), seed=7) for net in (model, twin))
    assert torch.equal(found.output, expected.output)
    assert all(torch.equal(found.gradients[key], one) for key, one in expected.gradients.items())
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("mode", [BF16, AUTOCAST], ids=["bf16", "autocast"])
def test_low_precision(mode: Any) -> None:
    model = cast(network(), mode.weights)
    twin, x = copy.deepcopy(model), rows().to(mode.weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode is AUTOCAST):
        patch_model(model, "exact", example_inputs=(x,))
    assert_same_step(model, twin, rows(), mode)
    found, expected = (step(net, rows(), mode, count=True) for net in (model, twin))
    assert found.saved < expected.saved


def twice(net: Any, x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index) * x.square().mean()


def without_gradients(net: Any, x: Tensor, index: Tensor) -> Tensor:
    return x.detach().gather(1, index) + x[:, :TAKEN]


def sparse(net: Any, x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, 1, index, sparse_grad=False)


def checkpointed(net: Any, x: Tensor, index: Tensor) -> Tensor:
    made: Tensor = checkpoint(method, net, x, index, use_reentrant=False)
    return made


@pytest.mark.parametrize("take", [twice, without_gradients, sparse, checkpointed])
def test_other_calls_are_torchs(take: Any) -> None:
    """Nothing is gained where somebody else saves the tensor."""
    plan = plan_patch(network(take), "exact", example_inputs=(rows(),))
    assert not [note for note in plan.notes if "gather" in note]
    model = network()
    patched(model)
    model[1].take = take  # unforeseen
    twin = network(take)
    assert_same_step(model, twin, rows())


def test_keep_switches_it_off() -> None:
    plan = plan_patch(network(), {"linear_inputs": "keep"}, example_inputs=(rows(),))
    assert not [note for note in plan.notes if "gather" in note]


def test_the_op_can_be_differentiated_twice() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 0], [4, 1], [2, 3]])
    assert torch.autograd.gradgradcheck(lambda t: gather(t, -1, index) ** 3, (x,))


class Narrow(nn.Module):
    """Takes numbers of a row that is narrow beside those of its other Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20)))
        self.narrow = Taken()

    def forward(self, x: Tensor) -> Tensor:
        return self.others(x) + self.narrow(x)


class Taken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.few(x).gather(-1, torch.zeros(len(x), 1, dtype=torch.int64))


@pytest.mark.parametrize("blocks", [2, 20])
def test_a_deep_model_is_patched_as_a_shallow_one(blocks: int) -> None:
    report = patch_report(patched(nn.Sequential(*(Narrow() for _ in range(blocks)))))
    said = f"modules that gather numbers of a tensor, which is not saved: {blocks}"
    assert said in report.notes


class _Masked(nn.Module):
    """Linears read the rows that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.first(x[mask]).sum() + self.second(x[~mask]).sum()


def test_rows_that_a_mask_chooses_are_not_gathered_again() -> None:
    """Which rows these are is known on data alone, and no reader asks."""
    x = torch.randn(8, 16, requires_grad=True)
    report = plan_patch(_Masked(), example_inputs=(x, torch.arange(8) % 3 > 0))
    assert not [note for note in report.notes if "gather rows" in note]

"""Blocks whose saved tensors wait in host memory, in other steps than the usual one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import unpatch_model
from lowmem_patch.nn import offloading
from lowmem_patch.nn.checkpointing import is_checkpointed
from tests.support.checkpointed import assert_same_bits, one_step
from tests.support.offloaded import COUNT, assert_equal, gradients, memory_of, offloaded, saving
from tests.support.stacks import WIDTH, Stack, patched, rows, stack
from tests.support.step import warned


@pytest.fixture(autouse=True)
def offload_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_LEAST", 0)


def run_twice(model: Any) -> None:
    loss = model(rows()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def run_two_forwards(model: Any) -> None:
    first, second = model(rows()), model(2 * rows())
    first.square().sum().backward()
    second.square().sum().backward()


def run_parts(model: Any) -> None:
    loss = model(rows()).square().sum()
    weight = model.blocks[3].second.weight
    (part,) = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward()
    assert torch.equal(part, weight.grad)


def run_after_a_failure(model: Any) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("stopped")

    handle = model.blocks[4].register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="stopped"):
        model(rows())
    handle.remove()
    model.eval()(rows())
    with torch.no_grad():
        model.train()(rows())
    model(rows()).square().sum().backward()


def run_checkpointed(model: Any) -> None:
    for reentrant in (False, True):
        x = rows().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()


def run_on_cpu(model: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        output = model(rows())
    output.square().sum().backward()


@pytest.mark.parametrize(
    "run",
    [
        run_twice, run_two_forwards, run_parts, run_after_a_failure, run_checkpointed, run_on_cpu,
    ],
)  # fmt: skip
def test_other_ways_to_run_a_step_give_the_same_bits(run: Callable[[Any], None]) -> None:
    plain = saving()
    model = offloaded(plain)
    run(plain)
    run(model)
    assert_equal(gradients(model), gradients(plain))
    assert memory_of(model).bytes == 0


def test_copies_and_pickles_of_a_model_have_their_own_memory() -> None:
    model = offloaded(patched(stack(COUNT, between=torch.relu), rows()))
    with warned():
        waiting = model(rows())
    other = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    del waiting
    for found in (other, loaded):
        assert memory_of(found) is not memory_of(model) and memory_of(found).bytes == 0
        assert is_checkpointed(found.blocks[0])
    first, second = one_step(other, rows()), one_step(loaded, rows())
    assert_same_bits(first, second)
    assert_same_bits(first, one_step(model, rows()))


def test_unpatching_takes_all_of_it_off() -> None:
    model = offloaded(patched(stack(COUNT), rows()))
    with warned():
        unpatch_model(model)
    assert not any("forward" in vars(module) for module in model.modules())


class Writing(nn.Module):
    """Writes into what sigmoid saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return torch.sigmoid(self.linear(x)).add_(1.0)


def test_a_saved_tensor_that_stays_and_is_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offloading, "_LEAST", 1 << 30)
    model = offloaded(Stack(Writing() for _ in range(COUNT)).train())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(rows().requires_grad_()).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("lag", [1, 2])
def test_streams_of_a_gpu_give_the_same_bits(lag: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 512, WIDTH, device="cuda", requires_grad=True)
    plain = patched(stack(12, between=lambda x: x), rows()).cuda()
    model = offloaded(patched(stack(12), rows()), lag).cuda()
    model.load_state_dict(plain.state_dict())
    for _ in range(4):  # buffers are reused
        torch.manual_seed(1)
        wanted = one_step(plain, x)
        torch.manual_seed(1)
        assert_same_bits(one_step(model, x), wanted)
    assert memory_of(model).bytes == 0


@pytest.mark.gpu
def test_a_write_into_what_leaves_a_gpu_is_an_error() -> None:
    model = offloaded(Stack(Writing() for _ in range(COUNT)).train(), 2).cuda()
    x = torch.randn(8, 512, WIDTH, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()

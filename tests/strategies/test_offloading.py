"""Blocks whose saved tensors wait in host memory: what leaves the device and when, whatever else happens."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch.nn import offloading
from lowmem_patch.nn.host_memory import HostCopy, HostMemory
from lowmem_patch.nn.segments import first_tensor
from tests.support.live import LiveBytes
from tests.support.offloaded import (
    COUNT,
    Saving,
    assert_equal,
    gradients,
    memory_of,
    offloaded,
    saving,
)
from tests.support.stacks import (
    BATCH,
    INPUT,
    LENGTH,
    WIDTH,
    Stack,
    patched,
    rows,
    stack,
)
from tests.support.step import warned


@pytest.fixture(autouse=True)
def offload_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_LEAST", 0)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_what_is_saved_leaves_before_the_awaiting_block(lag: int) -> None:
    gone: list[list[bool]] = []

    def between(x: Any) -> Any:
        gone.append([reference.expired() for reference in Saving.made])
        return x

    model = offloaded(saving(between), lag)
    Saving.made, gone[:] = [], []
    output = model(rows())
    assert len(gone) == COUNT
    for number, seen in enumerate(gone):
        # the last ones have no block that awaits them
        wanted = [n + lag <= number and n + lag < COUNT for n in range(number + 1)]
        assert seen == wanted
    del output


@pytest.mark.parametrize("lag", [1, 2])
def test_copies_back_begin_before_they_are_needed(
    lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming: list[bool] = []
    value = HostCopy.value

    def watched(self: HostCopy) -> Tensor:
        coming.append(self.coming is not None)
        return value(self)

    monkeypatch.setattr(HostCopy, "value", watched)
    model = offloaded(saving(), lag)
    model(rows().requires_grad_()).sum().backward()
    # sigmoid and both Linears of a block, and tanh
    assert len(coming) == 4 * (COUNT - lag) and all(coming)


@pytest.mark.parametrize("lag", [1, 2])
def test_each_memory_waits_once_and_is_given_back(lag: int) -> None:
    model, x = offloaded(saving(), lag), rows().requires_grad_()
    memory = memory_of(model)
    output = model(x)
    # the first input, and of each block the hidden rows and the output, which the next saves as well
    assert memory.bytes == INPUT * (1 + 2 * (COUNT - lag))
    output.sum().backward()
    del output
    assert memory.bytes == 0
    buffers = {id(buffer) for waiting in memory.free.values() for buffer in waiting}
    model(x)  # whose graph is dropped
    assert memory.bytes == 0
    assert {id(b) for waiting in memory.free.values() for b in waiting} == buffers  # reused


def test_weights_and_what_all_blocks_read_stay() -> None:
    model = offloaded(patched(stack(COUNT), rows()))
    memory = memory_of(model)
    shapes: list[tuple[int, ...]] = []
    keep = memory.keep_storage

    def watched(tensor: Tensor) -> HostCopy:
        shapes.append(tuple(tensor.shape))
        return keep(tensor)

    memory.keep_storage = watched  # type: ignore[method-assign]  # one of this object
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    with warned():
        held = model(rows().requires_grad_())
    assert shapes and held.requires_grad
    assert not parameters & set(memory.storages)
    assert (BATCH, LENGTH, WIDTH) in shapes and (WIDTH, WIDTH) not in shapes


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HostCopy]]:
    """Of all that is kept."""
    found: list[weakref.ref[HostCopy]] = []
    keep = HostMemory.keep_storage

    def watched(self: HostMemory, tensor: Tensor) -> HostCopy:
        copy = keep(self, tensor)
        if all(one() is not copy for one in found):
            found.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(HostMemory, "keep_storage", watched)
    return found


def alive(copies: list[weakref.ref[HostCopy]]) -> list[HostCopy]:
    return [copy for copy in (one() for one in copies) if copy is not None]


def test_weights_that_are_gathered_in_a_block_stay(copies: list[Any]) -> None:
    """As FSDP2 and ZeRO-3 do: their memory is given away again, and has other values in the next step."""
    plain = saving()
    model = offloaded(plain)
    for block in model.blocks:
        for linear in (block.first, block.second):
            linear.register_forward_pre_hook(
                lambda net, _: setattr(net.weight, "data", net.weight.data.clone())
            )
    x = rows().requires_grad_()
    for net in (plain, model):
        kept = net(x)  # whose graph stays
        net.zero_grad()
        net(x).square().sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
        net.zero_grad()
        net(x).square().sum().backward()
        assert kept.requires_grad
    assert_equal(gradients(model), gradients(plain))
    assert all(copy.size != WIDTH * WIDTH * 4 for copy in alive(copies))


class Dropping(Saving):
    """Makes something that it saves and drops."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        torch.tanh(self.first(x)).exp()
        return super().forward(x)


def test_what_is_made_behind_a_dropped_copy_leaves_as_well(copies: list[Any]) -> None:
    Saving.made = []
    model = offloaded(Stack(Dropping() for _ in range(COUNT)).train())
    output = model(rows().requires_grad_())
    assert alive(copies) and all(copy.leaving is None for copy in alive(copies))
    del output


def test_a_run_that_nobody_awaited_is_held_until_the_next(copies: list[Any]) -> None:
    model, x = offloaded(saving()), rows().requires_grad_()
    first = model.blocks[0](x)
    assert [copy for copy in alive(copies) if copy.leaving is not None]
    found = alive(copies)
    second = model.blocks[0](x)
    assert all(copy.leaving is None for copy in found)
    del first, second


def test_what_a_backward_does_not_need_goes_when_it_ends(copies: list[Any]) -> None:
    model = offloaded(saving())
    loss = model(rows()).square().sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, model.blocks[2].second.weight, retain_graph=True)
    assert alive(copies) and all(copy.coming is None for copy in alive(copies))
    loss.backward()


class Ending(nn.Module):
    """Ends in an activation, whose output the next block's Linear reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.act(self.linear(x))


def test_an_awaiting_block_saves_what_it_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_LEAST", 1 << 30)  # so that nothing leaves
    model, x = patched(Stack(Ending() for _ in range(COUNT)).train(), rows()), rows()
    found = []
    for net in (model, offloaded(model)):
        with warned():
            net(x)
        with LiveBytes() as live:
            live.ignore(*net.parameters(), x)
            output = net(x)
            found.append(live.settled())
        del output
    assert found[0] == found[1]


def test_many_lengths_share_few_buffers() -> None:
    model = offloaded(saving())
    for length in range(8, 48):
        model(torch.randn(BATCH, length, WIDTH)).sum().backward()
    held = sum(size * len(waiting) for (_, size), waiting in memory_of(model).free.items())
    longest = BATCH * 47 * WIDTH * 4
    assert held <= 4 * longest * (1 + 2 * (COUNT - 1))


def test_sparse_arguments_and_other_outputs_are_no_hindrance() -> None:
    model = offloaded(saving())
    output = model.blocks[0](rows().requires_grad_(), scale=torch.eye(3).to_sparse())
    output.sum().backward()
    assert first_tensor("text") is None and first_tensor(iter([rows()])) is None

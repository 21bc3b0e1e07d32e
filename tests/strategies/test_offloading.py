"""Blocks whose saved tensors wait in host memory: what leaves the device and when, whatever else happens."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lowmem_patch import unpatch_model
from lowmem_patch.nn import offloading
from lowmem_patch.nn.checkpointing import is_checkpointed
from lowmem_patch.nn.host_memory import HostCopy, HostMemory
from lowmem_patch.nn.segments import first_tensor
from tests.support.checkpointed import assert_same_bits, one_step
from tests.support.live import LiveBytes
from tests.support.stacks import (
    BATCH,
    INPUT,
    LENGTH,
    WIDTH,
    Stack,
    all_of,
    blocks_of,
    give_levels,
    patched,
    rows,
    stack,
)
from tests.support.step import warned

COUNT = 6


@pytest.fixture(autouse=True)
def offload_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_LEAST", 0)


class Saving(nn.Module):
    """Its Linear saves what the block is given, tanh what it gives."""

    made: list[StorageWeakRef]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = torch.sigmoid(self.first(x))
        self.made.append(StorageWeakRef(hidden.untyped_storage()))
        return torch.tanh(self.second(hidden))


def saving(between: Callable[[Any], Any] = lambda x: x) -> Any:
    torch.manual_seed(0)
    Saving.made = []
    return Stack((Saving() for _ in range(COUNT)), between).train()


def offloaded(model: Any, lag: int = 1, level: str = "offloaded") -> Any:
    blocks = blocks_of(model, rows())
    object.__setattr__(blocks, "lag", lag)
    return give_levels(model, blocks, all_of(blocks, level))


def memory_of(model: Any) -> HostMemory:
    memory: HostMemory = model.blocks[0].forward.args[1].host
    return memory


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


def gradients(model: Any) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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

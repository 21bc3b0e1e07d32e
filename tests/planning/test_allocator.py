"""What a GPU's allocator gives for the requests of a step: against an H200's own record, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_patch import plan_patch
from lowmem_patch.memory.caching_allocator import (
    Allocated,
    Block,
    CachingAllocator,
    allocated_in_step,
    margin_of,
)
from lowmem_patch.memory.model_states import ModelStates
from lowmem_patch.memory.timeline import Timeline, run_timeline
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import make_shadow
from tests.support.models import llama_of

MIB, UNIT = 2**20, 512
RECORD = Path(__file__).parents[1] / "support" / "h200_step.json"


def recorded(segments: list[Any]) -> tuple[CachingAllocator, dict[int, Block]]:
    """An allocator with these segments, and the blocks that are held, by address. Free sizes are negative."""
    allocator, held = CachingAllocator(), {}
    for start, sizes in segments:
        address, before = start * UNIT, None
        large = sum(map(abs, sizes)) * UNIT > 2 * MIB
        for size in sizes:
            block = Block(address, abs(size) * UNIT)
            block.before = before
            if before is not None:
                before.behind = block
            if size < 0:
                allocator._set_free(block, large)
            else:
                block.free, held[address] = False, block
                allocator.allocated += block.size
            address, before = address + block.size, block
    return allocator, held


def test_a_step_gets_the_blocks_that_an_h200_gave() -> None:
    """Whisper-small with 6 + 6 layers: 1,370 requests, each at the address where torch 2.11 put it.

    Made with ``torch.cuda.memory._snapshot()`` before a step and ``_record_memory_history`` during it.
    Addresses and sizes of blocks are in units of 512 bytes, from the first segment on.
    """
    record = json.loads(RECORD.read_text())
    allocator, held = recorded(record["segments"])
    assert allocator.allocated == record["held"]
    sizes = dict.fromkeys(held, 0)
    requests = 0
    for place, size in record["events"]:
        address = place * UNIT
        if size:
            block = allocator.take(size)
            assert block.address == address
            held[address], sizes[address] = block, size
            requests += 1
        else:
            block = held.pop(address)
            allocator.give_back(block, sizes.pop(address) or block.size)
    assert requests > 1000 and allocator.most == record["peak"]
    # it is about rounding: what was asked for is less
    assert max(running_sums(record["events"])) + record["held"] < record["peak"] - 20 * MIB


def running_sums(events: list[Any]) -> list[int]:
    now, alive, sums = 0, {}, []
    for number, size in events:
        now += size - (alive.pop(number, 0) if not size else 0)
        alive[number] = size
        sums.append(now)
    return sums


def test_blocks_are_split_and_joined() -> None:
    allocator = CachingAllocator()
    first, second = allocator.take(9 * MIB), allocator.take(9 * MIB)
    assert allocator.reserved == 20 * MIB and allocator.allocated == 18 * MIB
    small = allocator.take(1000)
    assert small.size == 1024 and allocator.reserved == 22 * MIB
    third = allocator.take(3 * MIB // 2)  # the rest, 2 MiB, cannot be split
    assert third.size == 2 * MIB and allocator.large == 3
    allocator.give_back(second, 9 * MIB)
    assert allocator.take(19 * MIB // 2).address >= 22 * MIB  # no free block is so large
    allocator.give_back(third, 3 * MIB // 2)
    allocator.give_back(first, 9 * MIB)
    assert allocator.take(11 * MIB).address == 0  # of the whole segment
    assert allocator.reserved == 42 * MIB and allocator.most == 41 * MIB // 2 + 1024
    assert allocator.large == 2


def test_a_training_is_played_from_its_beginning() -> None:
    states = ModelStates(held=(MIB,), of_gradients=(3 * MIB,), of_optimizer=(2 * MIB, 512))

    def played(*temporaries: int, accumulates: bool = False) -> Allocated:
        held = states.before_steps(accumulates)
        return allocated_in_step(held, states.of_optimizer, events, temporaries)

    events = [(0, 12 * MIB), (1, 3 * MIB), (0, 0)]  # an activation, a gradient
    found = played()
    assert (found.bytes, found.event) == ((1 + 2 + 12 + 3) * MIB + 512, 1)
    held = played(accumulates=True)
    assert held.bytes == found.bytes + 3 * MIB
    later = played(20 * MIB)
    assert (later.bytes, later.event) == ((1 + 2 + 3 + 20) * MIB + 512, len(events))


def test_the_margin_is_three_standard_deviations_of_what_blocks_lose() -> None:
    generator = torch.Generator().manual_seed(0)
    lost = torch.rand(20_000, 48, generator=generator, dtype=torch.float64).sum(1) * MIB
    assert margin_of(48) == pytest.approx(3 * lost.std().item(), rel=0.02)
    assert margin_of(0) == 0
    held = (3 * MIB,) * 12 + (MIB // 2,) * 50
    found = allocated_in_step(held, (), [(0, 512)])
    assert found.margin == margin_of(12)


def timeline_of(device: str) -> Timeline:
    """Residual streams and a tied head, whose gradients are sums."""
    model: Any = llama_of(tie_word_embeddings=True).to(device)
    tokens = torch.zeros(4, 32, dtype=torch.long, device=device)
    shadow = make_shadow(model, ExampleInputs((), {"input_ids": tokens}))
    return run_timeline(shadow, [f"model.layers.{number}" for number in range(2)])


def test_requests_are_what_is_counted() -> None:
    timeline = timeline_of("meta")
    sums = running_sums(list(timeline.events))
    assert max(sums) == timeline.peak[0]
    assert timeline.part_of(sums.index(max(sums))) == timeline.peak[1]
    # in a block no event is one of the loss
    assert {part for _, part in timeline.begins} <= set(timeline.parts)
    alive: dict[int, int] = {}
    for number, size in timeline.events:
        alive.pop(number, None) if not size else alive.update({number: size})
    loss = 4  # trainers hold it as long as the optimizer's step
    assert sum(alive.values()) == timeline.end - loss
    assert not timeline_of("cpu").events


def test_what_a_kernel_takes_for_a_while_is_asked_for() -> None:
    table = nn.Embedding(4096, 32).to("meta")
    tokens = torch.zeros(4, 1024, dtype=torch.long, device="meta")
    events = run_timeline(make_shadow(table, ExampleInputs((tokens,))), []).events
    parts = 409 + 4096  # of ten tokens, and of each row
    kernel = parts * 32 * 4 + (3 * 4096 + 2 * 4096 + parts) * 8
    taken = next(number for number, size in events if size == kernel)
    assert events[[*events].index((taken, kernel)) + 1] == (taken, 0)


class Sums(nn.Module):
    """Two gradients of one tensor meet; ``holds`` says whether somebody holds the first."""

    def __init__(self, holds: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024))
        self.held: list[torch.Tensor] = []
        self.holds = holds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        one, other = y.relu(), y.sin()
        for tensor in (one, other) if self.holds else ():
            assert tensor.grad_fn is not None
            tensor.grad_fn.register_hook(lambda gradients, _: self.held.extend(gradients))
        return one + other


def test_a_sum_of_gradients_stays_where_the_first_was() -> None:
    x, requests = torch.randn(1024, 1024, device="meta"), {}
    for holds in (False, True):
        timeline = run_timeline(make_shadow(Sums(holds).to("meta"), ExampleInputs((x,))), [])
        sums = running_sums(list(timeline.events))
        assert max(sums) == timeline.peak[0]
        requests[holds] = [size for _, size in timeline.events if size == 4 * MIB]
    assert len(requests[True]) > len(requests[False])  # a third tensor, where the first is held


def test_a_prediction_on_a_gpu_is_what_is_allocated_and_a_margin() -> None:
    batch = {"input_ids": torch.zeros(8, 512, dtype=torch.long)}
    fits = {}
    for device in ("cpu", "meta"):
        model = llama_of(hidden_size=256, intermediate_size=800, num_hidden_layers=3).to(device)
        fits[device] = plan_patch(model, "auto", example_inputs=batch, fit="1GiB").fit
    here, there = fits["cpu"], fits["meta"]
    assert here is not None and there is not None
    assert here.rounding == here.margin == here.reserved == 0 and "rounded" not in str(here)
    assert there.rounding > 0 and there.margin > 0
    assert there.reserved >= there.predicted - there.margin
    assert f"margin {there.margin / MIB:.2f} MiB" in str(there)

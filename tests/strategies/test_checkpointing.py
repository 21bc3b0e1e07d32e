"""Blocks that are run again: the same numbers, exactly the bytes that each level says, nothing twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch.functional import linear
from lowmem_patch.nn import offloading
from lowmem_patch.nn.checkpointing import is_checkpointed
from lowmem_patch.nn.host_memory import HostMemory, buffer_bytes
from tests.support.checkpointed import (
    LEVELS,
    MODELS,
    assert_same_bits,
    lora_with_dropout,
    one_step,
    prepared,
)
from tests.support.live import LiveBytes
from tests.support.models import FAMILIES
from tests.support.stacks import (
    BATCH,
    HEADS,
    INPUT,
    LENGTH,
    PlainBlock,
    Stack,
    all_of,
    blocks_of,
    give_levels,
    patched,
    rows,
    stack,
)
from tests.support.step import call, warned

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def offload_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_LEAST", 0)


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_every_level_gives_the_same_bits(name: str, level: str, steps: dict[str, Any]) -> None:
    model, blocks, inputs, wanted = prepared(name, steps)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    assert any(is_checkpointed(module) for module in fitted.modules())
    assert_same_bits(one_step(fitted, inputs), wanted)


def test_mixed_levels_give_the_same_bits(steps: dict[str, Any]) -> None:
    model, blocks, inputs, wanted = prepared("stack", steps)
    chosen = ("patched", "host", "segment", "attention", "checkpointed", "halves")
    levels = {block.site: level for block, level in zip(blocks.blocks, chosen, strict=True)}
    assert_same_bits(one_step(give_levels(model, blocks, levels), inputs), wanted)


def test_buffers_are_written_once(steps: dict[str, Any]) -> None:
    model, blocks, inputs, _ = prepared("stack", steps)
    plain = copy.deepcopy(model)
    one_step(plain, inputs)
    for level in LEVELS:
        fitted = give_levels(model, blocks, all_of(blocks, level))
        one_step(fitted, inputs)
        for (name, one), other in zip(fitted.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(one, other), name


# what is saved


def held(model: Any, x: Tensor) -> int:
    """Bytes that a forward leaves behind, its output included."""
    with warned():
        model(x)  # looks at gammas, and remembers them
        with LiveBytes() as live:
            live.ignore(*model.parameters(), *model.buffers(), x)
            output = model(x)
            assert output.requires_grad
            return live.settled()


def test_each_level_holds_exactly_its_bytes() -> None:
    model, x = stack(), rows().requires_grad_()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    count = len(blocks.blocks)
    output = BATCH * LENGTH * 3 * 4
    # the scale that all blocks read, the last block's output, which the head reads, and the output
    rest = 2 * INPUT + output
    found = {
        level: held(give_levels(model, blocks, all_of(blocks, level)), x) - rest
        for level in ("checkpointed", "attention", "segment", "halves")
    }
    inputs = (count - 1) * INPUT  # x itself is the first block's
    log_sum_exp = BATCH * HEADS * LENGTH * 4
    assert found["checkpointed"] == inputs
    assert found["attention"] == inputs + count * (INPUT + log_sum_exp)
    assert found["segment"] == found["halves"] == 0


def test_host_holds_each_input_in_host_memory() -> None:
    model, x = stack(), rows().requires_grad_()
    blocks = blocks_of(model, x)
    fitted = give_levels(patched(model, x), blocks, all_of(blocks, "host"))
    memory = fitted.blocks[0].forward.args[1].host
    on_device = 2 * INPUT + BATCH * LENGTH * 3 * 4
    with warned(), LiveBytes() as live:
        live.ignore(*fitted.parameters(), *fitted.buffers(), x)
        output = fitted(x)
        assert memory.bytes == len(blocks.blocks) * INPUT
        memory.release()  # two may still be on their way
        assert live.settled() == on_device + len(blocks.blocks) * buffer_bytes(INPUT)
        output.sum().backward()
    del output
    assert memory.bytes == 0 and not any(one() for one in memory.leaving)
    assert sum(map(len, memory.free.values())) == len(blocks.blocks)
    buffers = {id(buffer) for waiting in memory.free.values() for buffer in waiting}
    fitted(x).sum().backward()
    assert {id(b) for waiting in memory.free.values() for b in waiting} == buffers  # reused
    fitted(x)  # whose graph is dropped
    assert memory.bytes == 0 and not any(one() for one in memory.leaving)


def test_a_tensor_waits_once() -> None:
    memory, x = HostMemory(), rows().transpose(0, 1)
    first = memory.keep(x)
    assert memory.keep(x) is first and memory.bytes == INPUT
    x.mul_(2.0)
    second = memory.keep(x)
    assert second is not first
    assert torch.equal(second.value(), x) and torch.equal(first.value(), x / 2)
    assert first.value().stride() == x.stride()


@pytest.mark.slow
def test_segments_of_a_deep_stack_keep_two_square_roots_of_inputs() -> None:
    """64 blocks in 8 segments."""
    torch.manual_seed(0)
    model, x = Stack(PlainBlock() for _ in range(64)).train(), rows().requires_grad_()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    wanted = one_step(model, x)
    peaks = {}
    for level in ("checkpointed", "segment", "halves"):
        levels = all_of(blocks, level)
        if level == "segment":
            levels |= {block.site: "checkpointed" for block in blocks.blocks[::8]}
        fitted = give_levels(model, blocks, levels)
        assert_same_bits(one_step(fitted, x), wanted)
        fitted.requires_grad_(False)  # gradients of weights are not counted
        with warned(), LiveBytes() as live:
            live.ignore(*fitted.parameters(), x)
            output = fitted(x)
            after = live.settled()
            output.sum().backward()
            peaks[level] = after / INPUT, live.peak / INPUT
    one_segment = 8 + 12  # the inputs of its blocks, and a block that is run again
    assert peaks["segment"][0] <= 2 * 8 and peaks["segment"][1] <= 2 * 8 + one_segment
    assert peaks["halves"][0] <= 4 and peaks["halves"][1] <= 4 + 6 + 12  # log2(64)
    assert peaks["checkpointed"][0] > 60


# who else is there


class Counting(nn.Linear):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        return super().forward(x)


def count_runs(model: Any, inputs: Any) -> int:
    Counting.runs = 0
    with warned():
        output = call(model, inputs)
        (output if isinstance(output, Tensor) else output.logits).sum().backward()
    return Counting.runs


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_switch_of_the_library_is_not_doubled(library: str, level: str) -> None:
    family = FAMILIES["llama" if library == "transformers" else "timm-vit"]
    torch.manual_seed(0)
    model, inputs = family.build().train(), family.inputs()
    inputs = inputs if library == "transformers" else inputs["x"]
    blocks = blocks_of(model, inputs)
    model = patched(model, inputs)
    for name, module in list(model.named_modules()):
        if name.endswith(("o_proj", "attn.proj")):
            module.__class__ = Counting
    fitted = give_levels(model, blocks, all_of(blocks, level))
    alone = count_runs(fitted, inputs)
    assert alone == {"segment": 5, "halves": 5, "offloaded": 2}.get(level, 4)
    switched = getattr(fitted, "gradient_checkpointing_enable", None)
    for reentrant in (False, True):
        if switched is None:
            fitted.set_grad_checkpointing()
        else:
            switched(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            fitted.enable_input_require_grads()
        assert count_runs(fitted, inputs) == 4
    switch = getattr(fitted, "gradient_checkpointing_disable", None)
    fitted.set_grad_checkpointing(False) if switch is None else switch()
    assert count_runs(fitted, inputs) == alone


def test_the_last_product_of_a_block_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves what it reads before it computes."""
    inputs = FAMILIES["llama"].inputs()
    model = patched(lora_with_dropout().train(), inputs, "auto")
    wanted = one_step(model, inputs)
    base = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    products = []
    given = linear.linear_forward

    def counted(*arguments: Any, **more: Any) -> Any:
        products.append(torch._C._current_graph_task_id() != -1)
        return given(*arguments, **more)

    monkeypatch.setattr(linear, "linear_forward", counted)
    assert_same_bits(one_step(model, inputs), wanted)
    assert products.count(True) == 6 * len(base.model.layers)

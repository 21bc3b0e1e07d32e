"""Blocks that are run again: the same numbers, exactly the bytes that each level says, nothing twice."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache

from lowmem_patch import unpatch_model
from lowmem_patch.nn.checkpointing import is_checkpointed, keep_block
from lowmem_patch.nn.host_memory import HostMemory
from lowmem_patch.nn.own import Own
from tests.support.live import LiveBytes
from tests.support.models import FAMILIES, llama_of
from tests.support.stacks import (
    BATCH,
    HEADS,
    INPUT,
    LENGTH,
    WIDTH,
    AttentionBlock,
    PlainBlock,
    Stack,
    all_of,
    blocks_of,
    give_levels,
    patched,
    rows,
    stack,
)
from tests.support.step import Step, call, step, warned

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
LEVELS = ("attention", "checkpointed", "host", "segment", "halves")


def assert_same_bits(found: Step, wanted: Step) -> None:
    assert found.gradients.keys() == wanted.gradients.keys()
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert torch.equal(one, other)
    different = [n for n, g in wanted.gradients.items() if not torch.equal(g, found.gradients[n])]
    assert not different


def one_step(model: Any, inputs: Any) -> Step:
    with warned():  # of forwards that were given after the patch
        return step(model, inputs)


def lora_with_dropout() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(llama_of(attention_dropout=0.1).bfloat16(), config)


def t5_with_dropout() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, dropout_rate=0.2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def swin_with_paths() -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4),
        window_size=7, num_classes=3, drop_path_rate=0.3,
    )  # fmt: skip


MODELS: dict[str, tuple[Any, Any]] = {
    "stack": (stack, rows),
    "llama-lora-dropout": (lora_with_dropout, FAMILIES["llama"].inputs),
    "t5-dropout": (t5_with_dropout, FAMILIES["t5"].inputs),
    "swin-drop-path": (
        swin_with_paths,
        lambda: torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(1)),
    ),
    **{
        name: (FAMILIES[name].build, FAMILIES[name].inputs)
        for name in ("bert", "vit", "timm-swin-pads")
    },
}


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return {}


def prepared(name: str, steps: dict[str, Any]) -> Any:
    """The patched model in training mode, its blocks, its inputs, and its step without checkpointing."""
    if name not in steps:
        make, inputs = MODELS[name][0], MODELS[name][1]()
        torch.manual_seed(0)
        model = make().train()
        blocks = blocks_of(model, inputs)
        model = patched(model, inputs, "auto")
        steps[name] = model, blocks, inputs, one_step(model, inputs)
    return steps[name]


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
        assert live.settled() == on_device + memory.bytes
        output.sum().backward()
    del output
    assert memory.bytes == 0 and not memory.leaving
    assert sum(map(len, memory.free.values())) == len(blocks.blocks)
    buffers = {id(buffer) for waiting in memory.free.values() for buffer in waiting}
    fitted(x).sum().backward()
    assert {id(b) for waiting in memory.free.values() for b in waiting} == buffers  # reused
    fitted(x)  # whose graph is dropped
    assert memory.bytes == 0 and not memory.leaving


def test_a_tensor_waits_once() -> None:
    memory, x = HostMemory(), rows().transpose(0, 1)
    first = memory.keep(x)
    assert memory.keep(x) is first and memory.bytes == INPUT
    x.mul_(2.0)
    second = memory.keep(x)
    assert second is not first
    assert torch.equal(second.value(), x) and torch.equal(first.value(), x / 2)
    assert first.value().stride() == x.stride()


def test_segments_of_a_deep_stack_keep_two_square_roots_of_inputs() -> None:
    """256 blocks in 16 segments."""
    torch.manual_seed(0)
    model, x = Stack(PlainBlock() for _ in range(256)).train(), rows().requires_grad_()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    wanted = one_step(model, x)
    peaks = {}
    for level in ("checkpointed", "segment", "halves"):
        levels = all_of(blocks, level)
        if level == "segment":
            levels |= {block.site: "checkpointed" for block in blocks.blocks[::16]}
        fitted = give_levels(model, blocks, levels)
        assert_same_bits(one_step(fitted, x), wanted)
        fitted.requires_grad_(False)  # gradients of weights are not counted
        with warned(), LiveBytes() as live:
            live.ignore(*fitted.parameters(), x)
            output = fitted(x)
            after = live.settled()
            output.sum().backward()
            peaks[level] = after / INPUT, live.peak / INPUT
    one_segment = 16 + 12  # the inputs of its blocks, and a block that is run again
    assert peaks["segment"][0] <= 2 * 16 and peaks["segment"][1] <= 2 * 16 + one_segment
    assert peaks["halves"][0] <= 4 and peaks["halves"][1] <= 4 + 8 + 12  # log2(256)
    assert peaks["checkpointed"][0] > 250


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
    assert alone == (5 if level in ("segment", "halves") else 4)
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


def test_nothing_is_run_again_without_gradients() -> None:
    model, x = stack(), rows()
    blocks = blocks_of(model, x)
    fitted = give_levels(patched(model, x), blocks, all_of(blocks, "host"))
    with torch.no_grad(), warned():
        fitted(x)
    assert fitted.blocks[0].forward.args[1].host.kept == []


@pytest.mark.parametrize("level", ["checkpointed", "segment"])
def test_caches(level: str) -> None:
    torch.manual_seed(0)
    model, inputs = llama_of().train(), FAMILIES["llama"].inputs()
    blocks = blocks_of(model, inputs)
    model = patched(model, inputs)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    cached = {**inputs, "use_cache": True}
    assert_same_bits(one_step(fitted, cached), one_step(model, cached))
    with torch.no_grad():
        wanted = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
        assert torch.equal(
            fitted.eval().generate(**inputs, max_new_tokens=4, do_sample=False), wanted
        )
    # one that holds something is written once
    outputs = []
    for each in (model, fitted):
        cache = DynamicCache()
        with torch.no_grad():
            each(inputs["input_ids"], past_key_values=cache)
        each.zero_grad()
        each(inputs["input_ids"], past_key_values=cache).logits.sum().backward()
        assert cache.get_seq_length() == 2 * inputs["input_ids"].shape[1]
        outputs.append([parameter.grad for parameter in each.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_that_is_called_several_times(level: str) -> None:
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=64, hidden_size=32, embedding_size=16, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, hidden_dropout_prob=0.1,
    )  # fmt: skip
    model, inputs = AlbertModel(config, add_pooling_layer=False).train(), FAMILIES["bert"].inputs()
    blocks = blocks_of(model, inputs)
    assert len(blocks.blocks) == 1 and [run.block for run in blocks.runs] == [0] * 4
    model = patched(model, inputs)
    levels = {blocks.blocks[0].site: level}
    assert_same_bits(one_step(give_levels(model, blocks, levels), inputs), one_step(model, inputs))


@pytest.mark.parametrize(
    "between", [lambda x: x * 1.5, lambda x: x.mul_(1.5), lambda x: x[:, :]], ids=["new", "in place", "view"]
)  # fmt: skip
def test_what_lies_between_the_blocks_of_a_segment_is_computed(between: Any) -> None:
    model, x = stack(between=between), rows()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    fitted = give_levels(model, blocks, all_of(blocks, "segment"))
    assert_same_bits(one_step(fitted, x), one_step(model, x))


def test_outputs_of_blocks_that_are_returned() -> None:
    torch.manual_seed(0)
    model, inputs = llama_of(num_hidden_layers=4).train(), FAMILIES["llama"].inputs()
    blocks = blocks_of(model, inputs)
    model = patched(model, inputs)
    inputs = {**inputs, "output_hidden_states": True}
    fitted = give_levels(model, blocks, all_of(blocks, "segment"))
    assert_same_bits(one_step(fitted, inputs), one_step(model, inputs))


@pytest.mark.parametrize("level", ["checkpointed", "host", "segment", "halves"])
def test_backward_twice(level: str) -> None:
    model, x = stack(), rows()
    blocks = blocks_of(model, x)
    fitted = give_levels(patched(model, x), blocks, all_of(blocks, level))
    with warned():
        loss = fitted(x).square().sum()
    parameters = list(fitted.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, parameters)))


def test_an_input_that_is_written_before_backward_is_an_error() -> None:
    model, x = stack(), rows()
    blocks = blocks_of(model, x)
    fitted = give_levels(patched(model, x), blocks, all_of(blocks, "segment"))
    x = x.clone()
    with warned():
        loss = fitted(x).square().sum()
    x.zero_()
    with pytest.raises(RuntimeError, match=r"written in place|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_autocast_is_that_of_the_forward(level: str) -> None:
    model, x = stack(), rows()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    found = []
    for each in (model, fitted):
        torch.manual_seed(3)
        with warned(), torch.autocast("cpu", torch.bfloat16):
            loss = each(x).float().square().sum()
        loss.backward()
        found.append([parameter.grad for parameter in each.parameters()])
    assert all(map(torch.equal, *found))


# life


@pytest.mark.parametrize("level", LEVELS)
def test_copies_pickles_and_undoing(level: str) -> None:
    model, x = stack(), rows()
    blocks = blocks_of(model, x)
    keys = list(model.state_dict())
    model = patched(model, x)
    wanted = one_step(model, x)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    assert list(fitted.state_dict()) == keys
    stored = io.BytesIO()
    del fitted.between, model.between
    fitted.between = None
    torch.save(fitted.blocks, stored)
    stored.seek(0)
    read = torch.load(stored, weights_only=False)
    twin = copy.deepcopy(fitted)
    twin.blocks = read
    twin.between = fitted.between = lambda tensor: tensor
    assert all(is_checkpointed(block) and block.forward.args[0] is block for block in twin.blocks)
    assert_same_bits(one_step(twin, x), wanted)
    unpatch_model(fitted)
    assert not any(
        isinstance(value, Own) for module in fitted.modules() for value in vars(module).values()
    )
    keep_block(twin.blocks[0])
    assert not is_checkpointed(twin.blocks[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("level", LEVELS)
def test_compiled(level: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(PlainBlock() for _ in range(3)).train(), rows()
    blocks = blocks_of(model, x)
    model = patched(model, x)
    fitted = give_levels(model, blocks, all_of(blocks, level))
    wanted = one_step(model, x)
    torch._dynamo.reset()
    found = one_step(torch.compile(fitted, backend="aot_eager", fullgraph=True), x)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)


# which blocks there are


def test_blocks_of_stages_and_experts() -> None:
    swin = swin_with_paths()
    blocks = blocks_of(swin, MODELS["swin-drop-path"][1]())
    assert [b.site for b in blocks.blocks] == [
        f"layers.{s}.blocks.{b}" for s in (0, 1) for b in (0, 1)
    ]
    assert [run.links for run in blocks.runs] == [False, True, False, True]
    t5 = blocks_of(t5_with_dropout(), FAMILIES["t5"].inputs())
    names = [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(3)]
    assert [block.site for block in t5.blocks] == names

    class Experts(PlainBlock):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return x + sum(expert(x).relu() for expert in self.experts)

    blocks = blocks_of(Stack(Experts() for _ in range(2)), rows())
    assert [block.site for block in blocks.blocks] == ["blocks.0", "blocks.1"]


def test_blocks_that_do_not_train_and_foreign_forwards() -> None:
    model, x = Stack(PlainBlock() for _ in range(4)), rows()
    for block in list(model.blocks)[:2]:
        block.requires_grad_(False)
    model.blocks[3].forward = lambda x, scale: x + scale  # somebody else's
    found = blocks_of(model, x).blocks
    assert [block.site for block in found] == ["blocks.2", "blocks.3"]
    assert [bool(block.refusal) for block in found] == [False, True]


def test_attention_block_draws() -> None:
    """The dropout of the stack is no ornament: other numbers give other gradients."""
    model, x = Stack([AttentionBlock(), AttentionBlock()]).train(), rows()
    one, other = step(model, x, seed=1), step(model, x, seed=2)
    assert not torch.equal(one.output, other.output)

"""checkpointing: caches, copies, shared layers, switches, and other ways to run a model."""

from __future__ import annotations

import copy
import functools
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AlbertConfig, AlbertModel
from transformers.cache_utils import DynamicCache

from lowmem_patch import PatchError, patch_model, unpatch_model
from lowmem_patch.nn.checkpointing import is_checkpointed, keep_block
from lowmem_patch.nn.own import Own
from tests.support.checkpointed import (
    LEVELS,
    MODELS,
    assert_same_bits,
    one_step,
    patched_llama,
    patched_stack,
    swin_with_paths,
    t5_with_dropout,
)
from tests.support.models import FAMILIES, llama_of
from tests.support.stacks import (
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
from tests.support.step import step, warned
from tests.support.versions import cache_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def test_nothing_is_run_again_without_gradients() -> None:
    (model, blocks), x = patched_stack(), rows()
    fitted = give_levels(model, blocks, all_of(blocks, "host"))
    with torch.no_grad(), warned():
        fitted(x)
    assert fitted.blocks[0].forward.args[1].host.kept == []


@pytest.mark.parametrize("level", ["checkpointed", "segment"])
def test_caches(level: str) -> None:
    (model, blocks), inputs = patched_llama(), FAMILIES["llama"].inputs()
    fitted = give_levels(model, blocks, all_of(blocks, level))
    assert model.config.use_cache  # an empty one is made, and nobody reads it
    assert_same_bits(one_step(fitted, inputs), one_step(model, inputs))
    with torch.no_grad():
        wanted = model.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
        assert torch.equal(
            fitted.eval().generate(**inputs, max_new_tokens=4, do_sample=False), wanted
        )
    # one that holds something is written once
    outputs, name = [], cache_of(model)
    for each in (model, fitted):
        cache = DynamicCache()
        with torch.no_grad():
            each(inputs["input_ids"], **{name: cache})
        each.zero_grad()
        with warned() as texts:
            each(inputs["input_ids"], **{name: cache}).logits.sum().backward()
        assert (each is fitted) == any("use_cache=False" in text for text in texts)
        assert cache.get_seq_length() == 2 * inputs["input_ids"].shape[1]
        outputs.append([parameter.grad for parameter in each.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def _through_the_cache(model: Any, how: str, ids: Any) -> Any:
    """The loss of a second half that reads the keys and values of the first, with their gradients."""
    name, half = cache_of(model), ids.shape[1] // 2
    given = {name: DynamicCache()} if how == "given" else {"use_cache": True}
    past = model(ids[:, :half], **given).past_key_values
    assert past.get_seq_length() == half
    if how == "in the loss":
        return sum(layer.keys.square().mean() + layer.values.mean() for layer in past.layers)
    return model(ids[:, half:], labels=ids[:, half:], **{name: past}).loss


@pytest.mark.parametrize("level", ["checkpointed", "segment", "some"])
@pytest.mark.parametrize("how", ["asked for", "given", "in the loss"])
def test_a_cache_that_the_caller_asks_for_is_written(level: str, how: str) -> None:
    (model, blocks), inputs = patched_llama(torch.float64), FAMILIES["llama"].inputs()
    levels = all_of(blocks, "checkpointed" if level == "some" else level)
    if level == "some":
        levels.popitem()
    fitted = give_levels(model, blocks, levels)
    for each in (model, fitted):
        each.zero_grad()
        with warned() as texts:
            _through_the_cache(each, how, inputs["input_ids"]).backward()
        assert (each is fitted) == any("use_cache=False" in text for text in texts)
    for one, other in zip(fitted.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_withheld_cache_refuses_its_readers() -> None:
    (model, blocks), inputs = patched_llama(), FAMILIES["llama"].inputs()
    fitted = give_levels(model, blocks, all_of(blocks, "checkpointed"))
    ids = inputs["input_ids"]
    with warned():
        past = fitted(ids, labels=ids).past_key_values
    with pytest.raises(PatchError, match="Call the model with use_cache=True"), warned():
        fitted(ids, **{cache_of(model): past})
    fitted(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("level", ["checkpointed", "segment"])
def test_a_block_that_stands_twice_fills_its_cache(level: str) -> None:
    """Its second call reads the keys and values of its first."""
    model, inputs = llama_of().train(), {"input_ids": FAMILIES["llama"].inputs()["input_ids"]}
    model.model.layers[1] = model.model.layers[0]
    model = patched(model, inputs)
    fitted = give_levels(model, blocks := blocks_of(model, inputs), all_of(blocks, level))
    with warned() as texts:
        found = step(fitted, inputs)
    assert_same_bits(found, one_step(model, inputs))
    assert any("runs several times in one forward" in text for text in texts)
    without = dict(inputs) | {"use_cache": False}
    with warned() as texts:
        found = step(fitted, without)
    assert not any("cache" in text for text in texts)
    assert_same_bits(found, one_step(model, without))


def test_a_block_that_stands_twice_since_it_was_planned_is_refused() -> None:
    (model, blocks), inputs = patched_llama(), FAMILIES["llama"].inputs()
    fitted = give_levels(model, blocks, all_of(blocks, "checkpointed"))
    fitted.model.layers[1] = fitted.model.layers[0]
    for _ in range(2):
        with pytest.raises(PatchError, match="called twice in one forward"), warned():
            fitted(**inputs)
    with warned():
        fitted(**inputs, use_cache=False).logits.sum().backward()


@functools.cache
def patched_albert() -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=64, hidden_size=32, embedding_size=16, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, hidden_dropout_prob=0.1,
    )  # fmt: skip
    model, inputs = AlbertModel(config, add_pooling_layer=False).train(), FAMILIES["bert"].inputs()
    return patched(model, inputs), blocks_of(model, inputs)


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_that_is_called_several_times(level: str) -> None:
    (model, blocks), inputs = patched_albert(), FAMILIES["bert"].inputs()
    assert len(blocks.blocks) == 1 and [run.block for run in blocks.runs] == [0] * 4
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


@pytest.mark.parametrize("level", LEVELS)
def test_a_second_run_has_the_weights_and_buffers_of_a_functional_call(level: str) -> None:
    (model, blocks), x = patched_stack(), rows()
    model.eval()
    fitted = give_levels(model, blocks, all_of(blocks, level))
    weights = {name: 1.1 * p.detach() for name, p in model.named_parameters()}
    buffers = {name: b + 1 for name, b in model.named_buffers()}  # of batch norms
    found = []
    for each in (model, fitted):
        given = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        before = dict(each.named_parameters())
        with warned():
            torch.func.functional_call(each, given | buffers, (x,)).sum().backward()
        assert all(parameter is before[name] for name, parameter in each.named_parameters())
        found.append([weight.grad for weight in given.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


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
    (model, blocks), x = patched_stack(), rows()
    fitted = give_levels(model, blocks, all_of(blocks, level))
    with warned():
        loss = fitted(x).square().sum()
    parameters = list(fitted.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, parameters)))


@pytest.mark.parametrize("part", ["all", "a part"])
def test_attention_that_is_saved_for_one_backward_is_torchs_error_in_a_second(part: str) -> None:
    (model, blocks), x = patched_stack(), rows()
    fitted = give_levels(model, blocks, all_of(blocks, "attention"))
    with warned():
        loss = fitted(x).square().sum()
    parameters = list(fitted.parameters())
    wanted = parameters if part == "all" else parameters[:1]
    torch.autograd.grad(loss, wanted, retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        torch.autograd.grad(loss, parameters)


def test_an_input_that_is_written_before_backward_is_an_error() -> None:
    (model, blocks), x = patched_stack(), rows()
    fitted = give_levels(model, blocks, all_of(blocks, "segment"))
    x = x.clone()
    with warned():
        loss = fitted(x).square().sum()
    x.zero_()
    with pytest.raises(RuntimeError, match=r"written in place|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_autocast_is_that_of_the_forward(level: str) -> None:
    (model, blocks), x = patched_stack(), rows()
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
    keys = list(stack().state_dict())
    (model, blocks), x = patched_stack(), rows()
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
@pytest.mark.parametrize("level", ["offloaded", "checkpointed", "segment"])  # others are the second
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_with_caches() -> None:
    """An empty cache, which transformers makes in a training forward, is no break of the graph, and one that
    holds something is written once."""
    (model, blocks), inputs = patched_llama(), FAMILIES["llama"].inputs()
    fitted = give_levels(model, blocks, all_of(blocks, "checkpointed"))
    torch._dynamo.reset()
    compiled = torch.compile(fitted, backend="aot_eager", fullgraph=True)
    found, wanted = (one_step(each, inputs) for each in (compiled, model))
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)
    torch._dynamo.reset()
    outputs, name = [], cache_of(model)
    for each in (model, torch.compile(fitted, backend="aot_eager")):
        cache = DynamicCache()
        with torch.no_grad():
            each(inputs["input_ids"], **{name: cache})
        with warned():
            outputs.append(each(inputs["input_ids"], **{name: cache}).logits)
        outputs[-1].sum().backward()
        assert cache.get_seq_length() == 2 * inputs["input_ids"].shape[1]
    torch.testing.assert_close(*outputs)


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


class _WrittenInto(nn.Module):
    """An MLP whose output is written into, and then saved."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(self.act(self.up(x)))
        h += x
        return h.sigmoid()


def test_the_output_of_a_linear_that_saves_first_may_be_written_into() -> None:
    torch.manual_seed(0)
    model = patch_model(_WrittenInto(), "exact", example_inputs=(torch.randn(3, 8),))
    x = torch.randn(3, 8, requires_grad=True)
    grads = []
    for run in (model, partial(checkpoint, model, use_reentrant=False)):
        run(x).square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        x.grad = None
        model.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))

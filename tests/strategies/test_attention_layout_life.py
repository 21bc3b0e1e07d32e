"""The layout of attention's output in a model's life: copies, checkpointing, compilers, 8-bit storage."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.nn.own import is_own
from lowmem_patch.tracing.observers import FunctionObserver
from tests.strategies.test_attention_layout import (
    HEADS,
    LENGTH,
    Attention,
    Named,
    heads_first,
    language_model,
    notes,
    patched,
    rows,
)
from tests.support.checkpointed import LEVELS, assert_same_bits, one_step
from tests.support.configs import FUSED
from tests.support.judge import (
    assert_equal,
    assert_equal_steps,
    assert_same_outputs,
    assert_same_step,
)
from tests.support.stacks import all_of, blocks_of, give_levels
from tests.support.step import step, warned

# torch's compiler and transformers, of their own
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
SAVED = rows().nbytes  # the copy of the output


class Queries(FunctionObserver):
    """How the queries lie that fused attention gets."""

    def __init__(self) -> None:
        super().__init__()
        self.heads_first: list[bool] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            strides = args[0].stride()
            self.heads_first.append(strides[1] > strides[2])
        return func(*args, **kwargs)


class Other(Tensor):
    """A tensor of somebody else's class, with functions of its own."""


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model(rows())


def without_gradients_inside(model: Any) -> None:
    model.queries = lambda x: heads_first(x).detach()
    for one in (model.k, model.v):
        one.requires_grad_(False)
    with warned():
        model(rows())


def inferred(model: nn.Module) -> None:
    with torch.inference_mode():
        model(rows())


def transformed(model: nn.Module) -> None:
    torch.func.grad(lambda x: model(x).sum())(rows())


def jit_traced(model: nn.Module) -> None:
    torch.jit.trace(model, rows(), check_trace=False)


def of_another_class(model: Any) -> None:
    model.queries = lambda x: heads_first(x).as_subclass(Other)
    model(rows())


AS_BEFORE: dict[str, Callable[[Any], None]] = {
    "no_grad": without_gradients,
    "nothing trains": without_gradients_inside,
    "inference_mode": inferred,
    "torch.func": transformed,
    "torch.jit": jit_traced,
    "another class": of_another_class,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")  # torch's own: a FutureWarning since 2.15
@pytest.mark.parametrize("name", AS_BEFORE)
def test_queries_stay_as_they_are(name: str) -> None:
    model, _ = patched(Attention())
    with Queries() as queries:
        AS_BEFORE[name](model)
    assert queries.heads_first and all(queries.heads_first)


def test_only_where_gradients_are_wanted_each_call_is_looked_at() -> None:
    model, _ = patched(Attention())
    modes = []
    model.queries = lambda x: (modes.append(torch._C._len_torch_function_stack()), heads_first(x))[
        1
    ]
    for wanted in (False, True):
        with torch.set_grad_enabled(wanted):
            model(rows())
    assert modes == [0, 1]


@pytest.mark.parametrize("training", [True, False])
def test_queries_are_copied_in_training_and_evaluation(training: bool) -> None:
    model, _ = patched(Attention())
    with Queries() as queries:
        model.train(training)(rows())
    assert queries.heads_first == [False]


@pytest.mark.slow
def test_compiled_and_exported_attention_is_as_before() -> None:
    model, stock = patched(Attention())
    expected, x = step(stock, rows()), rows()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(step(compiled, x), expected)
    graphs = (torch.export.export(one, (x,)).graph for one in (model, stock))
    ours, theirs = (
        [str(node.target) for node in graph.nodes if node.op == "call_function"] for graph in graphs
    )
    assert ours == theirs


def test_a_model_of_which_a_part_is_compiled() -> None:
    model, stock = patched(Attention())
    model.q = torch.compile(model.q, backend="aot_eager")
    found, expected = step(model, rows()), step(stock, rows())
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.gradients["q._orig_mod.weight"], expected.gradients["q.weight"])


# copies, and what is taken off


@pytest.mark.parametrize("name", ["phi", "glm"])
def test_copies_and_pickles_save_the_same(name: str) -> None:
    """In Phi it stands around a rotation that runs as one op, which a pickle leaves behind."""
    model, inputs = language_model(name)
    stock = copy.deepcopy(model)
    patch_model(model, FUSED, example_inputs=inputs)
    expected = step(model, inputs, count=True)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert_equal(step(copied, inputs), expected)
    assert_same_step(loaded, stock, inputs)
    assert step(copied, inputs, count=True).saved == expected.saved
    # cos and sin are saved by both, in other parts
    outputs = [storages_of_outputs(one, inputs) for one in (loaded, model, stock)]
    assert outputs[0] == outputs[1] == outputs[2] - 2


def storages_of_outputs(model: Any, inputs: Any) -> int:
    """How many tensors of the output's size the output projections save that attention does not."""
    with saved_bytes(model) as saved:
        model(**inputs)
    first = (storage.savers[0] for storage in saved.storages)
    return sum(saver.module.endswith(("dense", "o_proj")) for saver in first)


def test_it_is_undone_and_done_again() -> None:
    model, inputs = language_model("phi")
    stock = copy.deepcopy(model)
    once = patch_report(patch_model(model, "exact", example_inputs=inputs)).saved_after
    assert any(is_own(vars(module).get("forward")) for module in model.modules())
    assert patch_report(patch_model(model, "exact", example_inputs=inputs)).saved_after == once
    unpatch_model(model)
    assert not any(is_own(vars(module).get("forward")) for module in model.modules())
    assert list(model.state_dict()) == list(stock.state_dict())
    assert assert_equal_steps(model, stock, inputs) == 0


def test_a_forward_that_is_set_over_it_is_named() -> None:
    model, inputs = language_model("glm")
    patch_model(model, FUSED, example_inputs=inputs)
    attention = model.model.layers[0].self_attn
    attention.forward = partial(type(attention).forward, attention)
    with pytest.warns(UserWarning, match=r"1 modules got a forward of .*self_attn"):
        model(**inputs)


def test_a_module_with_a_forward_of_somebody_else_is_left_alone() -> None:
    model = Attention()
    model.forward = partial(Attention.forward, model)  # type: ignore[method-assign]
    with warned() as texts:
        patch_model(model, FUSED, example_inputs=rows())
    assert "nothing was patched" in texts[0] and not is_own(model.forward)


# what runs again


class Around(nn.Module):
    """A user's own checkpoint: around the module, or in it, where the second run does not pass it."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = inside, reentrant
        self.first, self.attention = nn.Linear(32, 32), Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        run = Attention.forward.__get__(self.attention) if self.inside else self.attention
        read: Tensor = checkpoint(run, x, use_reentrant=self.reentrant)
        return read


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_checkpoint_of_the_user(inside: bool, reentrant: bool) -> None:
    """Where it is inside, the module of the call is the outer one."""
    model, stock = patched(Around(inside, reentrant=False))
    model.reentrant = stock.reentrant = reentrant
    assert_equal_steps(model, stock, rows())


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_that_run_again_give_the_same_bits(level: str) -> None:
    model, inputs = language_model("glm")
    blocks = blocks_of(model, inputs)
    model = patch_model(model, FUSED, example_inputs=inputs)
    wanted = one_step(model, inputs)
    assert_same_bits(one_step(give_levels(model, blocks, all_of(blocks, level)), inputs), wanted)


def test_with_a_budget_as_much_is_saved() -> None:
    model, inputs = language_model("glm")
    report = patch_report(patch_model(model, "exact", example_inputs=inputs, fit="1GiB"))
    assert step(model, inputs, count=True).saved == report.saved_after


def test_a_model_without_data_is_planned_as_one_with_data() -> None:
    model, inputs = language_model("glm")
    reports = [
        plan_patch(one, "exact", example_inputs=inputs)
        for one in (model, copy.deepcopy(model).to("meta"))
    ]
    assert notes(reports[1]) == notes(reports[0]) != []
    assert reports[1].saved_after == reports[0].saved_after


def test_retained_graphs_and_accumulated_gradients() -> None:
    model, stock = patched(nn.Sequential(Attention(), Named()))
    for one in (model, stock):
        loss = one(rows()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        one(rows()).square().mean().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)


# 8-bit storage


def test_eight_bits_are_stored_once_for_attention_and_the_linear() -> None:
    bits = {**FUSED, "storage": "eight_bit"}
    stock = Attention()
    kept, _ = patched(copy.deepcopy(stock), {**bits, "attention": "keep"})
    model, _ = patched(stock, bits)
    found, expected = (step(one, rows(), count=True) for one in (model, kept))
    numbers = rows().numel()
    groups = 2 * LENGTH * HEADS  # at least one scale of two bytes for so many numbers
    assert expected.saved - found.saved >= numbers
    assert expected.saved - found.saved <= numbers + 2 * groups
    assert torch.equal(found.output, expected.output)


def test_a_pickle_with_eight_bits_has_the_rotation_of_its_class() -> None:
    """Two forwards stand around the one that no file has."""
    model, inputs = language_model("phi")
    stock = copy.deepcopy(model)
    patch_model(model, {**FUSED, "storage": "eight_bit"}, example_inputs=inputs)
    loaded = pickle.loads(pickle.dumps(model))
    assert_same_outputs(loaded, stock, inputs)
    with saved_bytes(loaded) as saved:
        loaded(**inputs)
    assert torch.int8 in {storage.dtype for storage in saved.storages}

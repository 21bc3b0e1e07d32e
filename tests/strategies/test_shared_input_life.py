"""LoRA layers that add up one gradient, in the life of a model: failures, copies, checkpoints, hooks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from lowmem_patch.functional import shared_input
from lowmem_patch.functional.shared_input import GradientSum, SharedInput
from tests.strategies.test_shared_input import (
    WIDTH,
    Change,
    adapted,
    additions,
    assert_same,
    data,
    layers,
    leaf,
    pair,
    patched,
    train,
)
from tests.support.judge import assert_rounded, assert_same_step
from tests.support.models import FAMILIES, build, randomise
from tests.support.step import DOUBLE, step

__all__ = ["additions"]  # a fixture
# of transformers, which PEFT asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize("kept", ["hook", "retain_grad"])
def test_who_waits_for_the_inputs_gradient_gets_the_whole(kept: str) -> None:
    seen: list[Tensor] = []

    def run(model: Any, x: Tensor) -> None:
        inner = layers(model)
        h = inner.norm(x * 1.0)
        q = inner.q(h)
        if kept == "hook":
            h.register_hook(seen.append)
        else:
            h.retain_grad()
        (q * inner.k(h) + inner.v(h)).square().sum().backward()
        if kept != "hook":
            seen.append(h.grad)

    model, twin = pair()
    assert_same(model, twin, run)
    torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-9)


@contextmanager
def failing(model: Any) -> Iterator[None]:
    def fails(_: Any, x: Tensor) -> Tensor:
        raise KeyError("between")

    layers(model).between = fails
    yield
    layers(model).between = None


def test_a_failure_between_two_calls_leaves_nothing_behind() -> None:
    model, twin = pair()
    held: list[Any] = []
    hook = layers(model).q.register_forward_hook(
        lambda _m, args, output: held.extend(map(weakref.ref, (args[0], output)))
    )
    with failing(model):
        for _ in range(2):
            with suppress(KeyError):
                model(leaf())
    hook.remove()
    assert len(held) == 4 and not any(one() is not None for one in held)
    assert_same(model, twin, train)


def test_nothing_is_held_after_a_step() -> None:
    model = patched(adapted())
    held: list[Any] = []
    for name in "qkv":
        layers(model)._modules[name].register_forward_hook(
            lambda _m, args, output: held.extend(map(weakref.ref, (args[0], output)))
        )
    x = data().requires_grad_()
    gc.disable()
    try:
        model(x).sum().backward()
        assert held and not any(one() is not None for one in held)
    finally:
        gc.enable()


def test_no_gradient_is_held_where_a_graph_is(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    leave = GradientSum.leave

    def watched(self: GradientSum, *left: Tensor) -> None:
        begun.extend(map(weakref.ref, left))
        leave(self, *left)

    monkeypatch.setattr(GradientSum, "leave", watched)
    model = patched(adapted())
    loss = model(data().requires_grad_()).sum()
    loss.backward(retain_graph=True)
    assert len(begun) == 9 and not any(one() is not None for one in begun)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss, trained, retain_graph=True)  # where the input's gradient is dropped
    assert len(begun) == 18 and not any(one() is not None for one in begun[::3])
    loss.backward()


def _step(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.sub_(parameter.grad)


@pytest.mark.parametrize("rank", [4, 8])
def test_weights_may_be_stepped_as_soon_as_their_gradient_is_there(rank: int) -> None:
    """By hooks that train in the backward: later readers and the sum see what was saved."""
    model, twin = pair(r=rank)
    for one in (model, twin):
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_step)
    assert_same(model, twin, train)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_sum_that_autograd_made_is_not_written() -> None:
    """It may be read by others: a reader under a mode of torch returns a gradient of its own."""
    gradients = GradientSum()
    d_low, lora_A = torch.randn(3, 2), torch.randn(2, 4)
    gradients.leave(torch.zeros(3, 4), d_low, lora_A)
    dy = torch.randn(4, 3).t()
    before = dy.clone()
    torch.testing.assert_close(gradients.added_to(dy), before + d_low @ lora_A)
    assert torch.equal(dy, before)
    assert gradients.added_to(dy) is dy


def test_the_sum_is_completed_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[bool] = []
    added_to = GradientSum.added_to

    def watched(self: GradientSum, dy: Tensor) -> Tensor:
        place, found = dy.data_ptr(), added_to(self, dy)
        places.append(found.data_ptr() == place)
        return found

    monkeypatch.setattr(GradientSum, "added_to", watched)
    train(patched(adapted()), data().requires_grad_())
    assert places == [True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool, additions: list[bool]) -> None:
    model, twin = pair()

    def run(one: Any, x: Tensor) -> None:
        checkpoint(one, x, use_reentrant=reentrant).square().sum().backward()

    assert_same(model, twin, run)
    assert additions == [False, True, True]


def test_a_checkpoint_whose_second_run_has_a_hook_more() -> None:
    """The second run reads as the first did, whoever looks on."""
    model, twin = pair()

    def run(one: Any, x: Tensor) -> None:
        y = checkpoint(one, x, use_reentrant=False)
        layers(one).between = lambda _, h: h
        y.square().sum().backward()

    assert_same(model, twin, run)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_add_up_their_own(copied: Change, additions: list[bool]) -> None:
    model, twin = pair()
    train(model, leaf())
    other = copied(model)
    del additions[:]
    assert_same(other, twin, train)
    assert additions == [False, True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_gradients_are_the_same() -> None:
    torch._dynamo.reset()
    model, twin = pair()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(model, twin, lambda one, x: train(run if one is model else one, x))
    torch._dynamo.reset()


def hooked(model: Any) -> None:
    layers(model).k.register_forward_hook(lambda _m, _a, output: output * 2)


def pre_hooked(model: Any) -> None:
    layers(model).k.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))


def clamped(model: Any) -> None:
    def clamp(module: Any, _: Any) -> None:
        with torch.no_grad():
            module.lora_B["default"].weight.clamp_(-0.1, 0.1)

    layers(model).k.register_forward_pre_hook(clamp)


def backward_hooked(model: Any) -> None:
    layers(model).k.register_full_backward_hook(lambda _m, into, _o: (into[0] * 2,))


def base_hooked(model: Any) -> None:
    layers(model).v.base_layer.register_forward_hook(lambda _m, _a, output: output * 2)


def disabled(model: Any) -> None:
    layers(model).k.enable_adapters(False)


def merged(model: Any) -> None:
    layers(model).v.merge()


def replaced(model: Any) -> None:
    torch.manual_seed(5)
    layers(model).k = nn.Linear(WIDTH, WIDTH)


def exchanged(model: Any) -> None:
    layers(model).k, layers(model).v = layers(model).v, layers(model).k


def second_adapter(model: Any) -> None:
    torch.manual_seed(6)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


def frozen_base_trains(model: Any) -> None:
    layers(model).k.base_layer.weight.requires_grad_()


@pytest.mark.filterwarnings(
    "ignore:.*patch_model:UserWarning", "ignore:Full backward hook:UserWarning"
)
@pytest.mark.parametrize(
    "change",
    [
        hooked, pre_hooked, clamped, backward_hooked, base_hooked, disabled, merged, replaced, exchanged,
        second_adapter, frozen_base_trains,
    ],
)  # fmt: skip
def test_what_is_done_to_one_of_them_after_the_patch_is_right(change: Change) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    for one in (model, twin):
        change(one)
        one.double()
    for _ in range(2):
        steps = [step(one, leaf(), DOUBLE) for one in (model, twin)]
        assert_rounded(*steps)


@pytest.mark.gpu
def test_on_a_gpu_large_inputs_alone_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2048, 2048, device="cuda", requires_grad=True) * 1
    assert SharedInput.serves(x) and not SharedInput.serves(x[1:])
    monkeypatch.setattr(shared_input, "LEAST_BYTES", 0)
    family = FAMILIES["llama"]
    model = get_peft_model(build(family), LoraConfig(r=4, target_modules=family.linears))
    model = randomise(model).cuda()
    twin, inputs = copy.deepcopy(model), {n: t.cuda() for n, t in family.inputs().items()}
    patch_model(model, "exact", example_inputs=inputs)
    made: list[Any] = []
    through = GradientSum.added_to
    monkeypatch.setattr(
        GradientSum, "added_to", lambda self, dy: made.append(1) or through(self, dy)
    )
    assert_same_step(model, twin, inputs)
    assert made


@pytest.mark.gpu
def test_a_reader_on_another_stream_shares_nothing() -> None:
    x = data().cuda().requires_grad_() * 1
    shared = SharedInput(x)
    assert shared.is_of(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not shared.is_of(x)

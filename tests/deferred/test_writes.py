"""Writes in place, hooks and custom functions around what is deferred or kept: seen, or a clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation

from lowmem_patch import patch_report
from tests.support.configs import FOLD_AND_SHARE, SHARE
from tests.support.judge import (
    assert_accurate,
    assert_close,
    assert_near,
    assert_same_function,
    assert_same_outputs,
)
from tests.support.step import AUTOCAST, DOUBLE, FP32, step
from tests.support.toys import Toy, assert_same_steps, batch, patched_twin


class SquaredReLU(nn.Module):
    """Torch keeps the ReLU's output and not its input, which anybody may write into afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def strategies(model: Any) -> dict[str, str]:
    return {site.name: site.strategy for site in patch_report(model).sites}


def part_of_norm(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x)
    h[..., :4].mul_(2)
    return net.down(net.act(net.up(h)))


def transposed_norm(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x)
    h.transpose(-1, -2).mul_(2)
    return net.down(net.act(net.up(h)))


def data_of_norm(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x)
    h.data.mul_(2)
    return net.down(net.act(net.up(h)))


def data_of_activation(net: Any, x: Tensor) -> Tensor:
    a = net.act(net.up(net.norm(x)))
    a.data.mul_(2)
    return net.down(a)


def dropout_in_place(net: Any, x: Tensor) -> Tensor:
    h = F.dropout(net.norm(x), 0.5, training=True, inplace=True)
    return net.down(net.act(net.up(h)))


def input_of_activation(net: Any, x: Tensor) -> Tensor:
    h = net.up(net.norm(x))
    a = net.act(h)
    h += 1.0
    return net.down(a) + net.down(h)


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
@pytest.mark.parametrize(
    ("body", "left"),
    [
        (part_of_norm, "norm"), (transposed_norm, "norm"), (data_of_norm, "norm"),
        (dropout_in_place, "norm"), (data_of_activation, "act"), (input_of_activation, "act"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_what_a_forward_writes_into_is_left_alone(body: Any, left: str, config: Any) -> None:
    net = Toy(body)
    net.act = SquaredReLU()
    patched, twin, original = patched_twin(net, config)
    assert strategies(patched)[left] == "keep"
    reason = next(site.reason for site in patch_report(patched).sites if site.name == left)
    assert "written in place by" in reason
    for model in (patched, twin, original):
        model.train()
    assert_same_steps(patched, twin, original)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Viewed(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(*x.shape)


@pytest.mark.parametrize("function", [Reversed, Viewed])
def test_custom_function_on_an_untraced_path_is_right(function: Any) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        a = net.act(net.up(net.norm(x)))
        return net.down(function.apply(a) if hasattr(net, "later") else a)

    patched, twin, original = patched_twin(Toy(body), SHARE)
    for later in (False, True):
        for model in (patched, twin, original):
            if later:
                model.later = True
        assert_same_steps(patched, twin, original)


@pytest.mark.parametrize(
    ("act", "computed"),
    [(QuickGELUActivation(), False), (QuickGELUActivation(), True), (nn.GELU(), True)],
    ids=["waits", "read", "computed at once"],
)
def test_write_on_an_untraced_path_is_right_or_refused(act: nn.Module, computed: bool) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h = net.up(net.norm(x))
        a = net.act(h)
        if hasattr(net, "later"):
            if computed and not isinstance(act, nn.GELU):
                a.abs()
            h += 1.0
        return net.down(a)

    net = Toy(body)
    net.act = act
    patched, twin, original = patched_twin(net, SHARE)
    assert_same_steps(patched, twin, original)
    patched.later = True
    if computed:  # the value is right, and its gradient is refused, as without the patch
        original.later = True
        assert_same_outputs(patched, original, batch())
        said = "modified by an inplace operation|written in place after it was made"
        with pytest.raises(RuntimeError, match=said):
            patched(batch()).sum().backward()
    else:
        with pytest.raises(RuntimeError, match=r"input of a deferred activation.*written in place"):
            patched(batch())


def test_augmented_assignment_reaches_other_names_of_the_tensor() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        a = other = net.act(net.up(net.norm(x)))
        if hasattr(net, "later"):
            a += 1.0
            a *= 2.0
        return net.down(other)

    patched, twin, original = patched_twin(Toy(body), SHARE)
    for model in (patched, twin, original):
        model.later = True
    assert_same_steps(patched, twin, original)


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
@pytest.mark.parametrize("site", ["norm", "act"])
def test_tensor_hooks_in_a_forward_see_the_original_gradient(site: str, config: Any) -> None:
    seen: list[Tensor] = []

    def body(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        a = net.act(net.up(h))
        y: Tensor = net.down(a)
        (h if site == "norm" else a).register_hook(seen.append)
        return y

    patched, _, original = (model.double() for model in patched_twin(Toy(body), config))
    seen.clear()  # tracing may have registered some
    for model in (patched, original):
        step(model, batch(), DOUBLE)
    assert len(seen) == 2
    assert_close(seen[0], seen[1], site)


@pytest.mark.parametrize("attach", ["register_hook", "register_prehook"])
@pytest.mark.parametrize("gated", [False, True])
def test_hooks_on_the_node_of_a_deferred_tensor_are_called(attach: str, gated: bool) -> None:
    seen: list[Tensor] = []

    def body(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        a = net.act(net.up(h))
        a = a * net.gate(h) if gated else a
        if hasattr(net, "watch"):  # since the patch
            hook = lambda *gradients: seen.append(gradients[-1][0])  # noqa: E731
            getattr(a.grad_fn, attach)(hook)
        y: Tensor = net.down(a)
        return y

    patched, twin, _ = patched_twin(Toy(body), SHARE)
    for model in (patched, twin):
        model.watch = True
    assert_same_function(patched.double(), twin.double(), batch().double())
    assert_close(seen[0], seen[1], "act")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_part_of_a_gradient_is_not_given_for_the_whole() -> None:
    kept: list[Any] = []

    def body(net: Any, x: Tensor) -> Tensor:
        a = net.act(net.up(net.norm(x)))
        kept.append(a)
        y: Tensor = net.down(a) + a[..., :8]
        return y

    patched, _, _ = patched_twin(Toy(body), SHARE)
    kept.clear()
    patched(batch()).sum().backward(inputs=[*kept])
    with pytest.raises(RuntimeError, match="call retain_grad before the tensor is read"):
        _ = kept[0].grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_gradient_of_a_dropouts_output_is_given() -> None:
    kept: list[Any] = []

    def body(net: Any, x: Tensor) -> Tensor:
        a = nn.functional.dropout(net.act(net.up(net.norm(x))), 0.5)
        kept.append(a)
        y: Tensor = net.down(a)
        return y

    patched, twin, _ = patched_twin(Toy(body), SHARE)
    found = []
    for model in (patched.double(), twin.double()):
        kept.clear()
        torch.manual_seed(3)
        loss = model(batch().double()).square().sum()
        found.append(torch.autograd.grad(loss, kept)[0])
    assert_close(found[0], found[1], "dropout")


def test_a_view_of_a_gated_product_that_is_written_leaves_the_activation_alone() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        product = net.act(net.gate(h)) * net.up(h)
        product.view(12, 16).mul_(2)
        y: Tensor = net.down(product)
        return y

    patched, twin, _ = patched_twin(Toy(body), SHARE)
    assert_same_function(patched.double(), twin.double(), batch().double())
    (act,) = (site for site in patch_report(patched).left_alone if site.name == "act")
    assert act.reason.startswith("its gated product is written in place")


def test_retain_grad_after_the_linear_is_a_clear_error() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        a = net.act(net.up(net.norm(x)))
        y: Tensor = net.down(a)
        if hasattr(net, "later"):
            a.retain_grad()
        return y

    patched, _, _ = patched_twin(Toy(body), SHARE)
    patched.later = True
    with pytest.raises(RuntimeError, match="call retain_grad before the tensor is read"):
        patched(batch())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["drop", "down", "up"])
@pytest.mark.parametrize("body", ["mlp", "gated"])
def test_backward_hooks_of_readers_may_change_the_gradient(
    body: str, name: str, autocast: bool
) -> None:
    """They get, and may change, the gradient of an input in whose place a deferred tensor stands."""

    def through_dropout(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        a = net.act(net.up(h))
        return net.down(net.drop(a if body == "mlp" else a * net.gate(h)))

    net = Toy(through_dropout)
    net.drop = nn.Dropout(0.0)
    patched, _, original = patched_twin(net, SHARE)
    exact = copy.deepcopy(original).double()
    seen: list[Tensor] = []

    def double(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        seen.append(inputs[0])
        return (inputs[0] * 2,)

    mode, steps = AUTOCAST if autocast else FP32, []
    for model in (patched, original, exact):
        model.get_submodule(name).register_full_backward_hook(double)
        steps.append(step(model, batch().requires_grad_(), DOUBLE if model is exact else mode))
    assert_accurate(*steps, mode)
    assert_near(*seen, mode)


def test_hook_that_looks_in_inference_mode() -> None:
    def look(module: nn.Module, args: Any, output: Any) -> None:
        with torch.inference_mode():
            assert float(output.abs().mean()) > 0

    patched, twin, original = patched_twin(Toy(lambda net, x: net.down(net.act(net.up(x)))), SHARE)
    patched.act.register_forward_hook(look)
    assert_same_steps(patched, twin, original)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", [QuickGELUActivation(), nn.GELU()], ids=["waits", "at once"])
def test_values_that_are_exchanged_on_an_untraced_path(act: nn.Module, gated: bool) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        a = net.act(net.up(h))
        if gated and hasattr(net, "later"):
            a.data = a.detach() + 0.5
        if gated:
            a = a * net.gate(h)
        if hasattr(net, "later"):
            a.data = torch.full_like(a, 0.3)
        return net.down(a)

    net = Toy(body)
    net.act = act
    patched, twin, original = patched_twin(net, SHARE)
    for model in (patched, twin, original):
        model.later = True
    assert_same_steps(patched, twin, original)

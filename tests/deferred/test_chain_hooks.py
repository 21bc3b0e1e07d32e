"""Hooks on values within a chain of elementwise functions and at its end, and on modules around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_patch import unpatch_model
from tests.support.chained import (
    FORMULAS,
    chains_of,
    half,
    network,
    patched,
    plain,
    read_otherwise,
    read_twice,
)  # fmt: skip
from tests.support.judge import assert_close
from tests.support.toys import rows

Seen = dict[str, Any]
PLACES = ("first", "beside", "product", "sum", "last")


def steps(net: Any, x: Tensor) -> Tensor:
    """A chain whose value in one place gets a hook, before the next function reads it."""

    def at(place: str, value: Tensor) -> Tensor:
        net.steps[place] = value
        if place == getattr(net, "place", ""):
            net.hook(value, net.seen)
        return value

    net.steps = {}
    y = half(net, x)
    first = at("first", y.clamp(max=1.0))
    beside = at("beside", torch.exp(first * -1.7))
    product = at("product", first * beside)
    return at("last", at("sum", product + y.tanh()) * net.positive)


def _triples(value: Tensor, seen: Seen) -> None:
    value.register_hook(lambda gradient: 3 * gradient)


def _looks(value: Tensor, seen: Seen) -> None:
    value.register_hook(lambda gradient: seen.update(gradient=gradient.clone()))


def _retains(value: Tensor, seen: Seen) -> None:
    value.retain_grad()
    seen["retains"] = value


def _on_the_node(value: Tensor, seen: Seen) -> None:
    assert value.grad_fn is not None
    value.grad_fn.register_prehook(lambda gradients: tuple(2 * g for g in gradients))


def _of_several(value: Tensor, seen: Seen) -> None:
    register: Any = torch.autograd.graph.register_multi_grad_hook
    register([value], lambda gradients: seen.update(several=gradients[0].clone()))


HOOKS = (_triples, _looks, _retains, _on_the_node, _of_several)


def _hook_on_what_comes_out(module: Any, seen: Seen) -> None:
    module.register_forward_hook(lambda m, args, output: _triples(output, seen))


def _another_output(module: Any, seen: Seen) -> None:
    module.register_forward_hook(lambda m, args, output: 1.5 * output)


def _retains_what_comes_out(module: Any, seen: Seen) -> None:
    module.register_forward_hook(lambda m, args, output: _retains(output, seen))


def _writes_into_it(module: Any, seen: Seen) -> None:
    def hook(m: Any, args: Any, output: Tensor) -> None:
        with torch.no_grad():
            output.mul_(2.0)

    module.register_forward_hook(hook)


def _another_input(module: Any, seen: Seen) -> None:
    module.register_forward_pre_hook(lambda m, args: (1.1 * args[0],))


def _doubles_in_backward(module: Any, seen: Seen) -> None:
    module.register_full_backward_hook(lambda m, inputs, outputs: (2 * inputs[0],))


def _doubles_before_backward(module: Any, seen: Seen) -> None:
    module.register_full_backward_pre_hook(lambda m, outputs: (2 * outputs[0],))


def _looks_in_backward(module: Any, seen: Seen) -> None:
    module.register_full_backward_hook(
        lambda m, inputs, outputs: seen.update(inputs=inputs[0], outputs=outputs[0])
    )


MODULE_HOOKS = (
    _hook_on_what_comes_out, _another_output, _retains_what_comes_out, _writes_into_it, _another_input,
    _doubles_in_backward, _doubles_before_backward, _looks_in_backward,
)  # fmt: skip


def given(net: Any, place: str, hook: Callable[[Tensor, Seen], None]) -> Any:
    net[1].act.place, net[1].act.hook, net[1].act.seen = place, hook, {}
    return net


def gradients(net: Any, seen: Seen) -> dict[str, Tensor]:
    """Of a step: the output, and every gradient, those among them that hooks have seen."""
    seen.clear()
    net.zero_grad()
    x = rows().double().requires_grad_()
    output = net(x)
    output.square().sum().backward()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    kept = seen.pop("retains", None)
    held = {} if kept is None else {"retained": kept.grad}
    return {"output": output.detach(), "x": x.grad, **found, **held, **seen}


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert_close(ours[name], expected, name)


@pytest.mark.parametrize("body", [plain, read_twice, read_otherwise])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_gets_the_gradient_of_its_place(hook: Any, body: Any) -> None:
    model = network(steps, body).double()
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model) == ["1.act"]
    for place in PLACES:
        ours, theirs = (
            gradients(given(net, place, hook), net[1].act.seen) for net in (model, twin)
        )
        assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize("hook", [_triples, _retains, _of_several])
def test_a_hook_behind_the_next_step_is_an_error_and_at_the_end_is_none(hook: Any) -> None:
    model = patched(network(steps, plain))
    for place in PLACES[:-1]:
        model(rows())
        with pytest.raises(RuntimeError, match="its gradient goes past it"):
            hook(model[1].act.steps[place], {})
    model(rows())
    hook(model[1].act.steps["last"], {})


@pytest.mark.parametrize("order", ["before the patch", "behind it"])
@pytest.mark.parametrize("name", ["1.act", "1", "1.down"])
@pytest.mark.parametrize("attach", MODULE_HOOKS)
def test_hooks_of_modules_around_a_chain(attach: Any, name: str, order: str) -> None:
    model = network(FORMULAS["xielu"], read_twice).double()
    twin = copy.deepcopy(model)
    seen: list[Seen] = [{}, {}]
    attach(twin.get_submodule(name), seen[1])
    if order == "before the patch":
        attach(model.get_submodule(name), seen[0])
    patched(model)
    if order != "before the patch":
        attach(model.get_submodule(name), seen[0])
    for _ in range(2):
        assert_equal_gradients(gradients(model, seen[0]), gradients(twin, seen[1]))
    unpatch_model(model)
    assert_equal_gradients(gradients(model, seen[0]), gradients(twin, seen[1]))


def test_a_chain_whose_gradient_the_forward_asks_for_is_left_alone() -> None:
    def asks(net: Any, x: Tensor) -> Tensor:
        y = half(net, x)
        value = (y * 2 + 1) * torch.sigmoid(y)
        (gradient,) = torch.autograd.grad((value**3).sum(), value, retain_graph=True)
        return gradient.detach() + value

    model = network(asks)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patched(model)
    assert not chains_of(model)
    assert torch.equal(model(rows()), twin(rows()))

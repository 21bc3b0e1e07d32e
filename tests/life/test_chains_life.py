"""Chains of elementwise functions in the life of a model: hooks, writes, backwards, copies, transforms."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, unpatch_model
from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.nn import context
from tests.support.chained import (
    CHAINS,
    HIDDEN,
    Activation,
    Block,
    chains_of,
    clamped,
    half,
    network,
    patched,
    planned,
    saved,
    small,
    tokens,
)  # fmt: skip
from tests.support.judge import assert_equal_steps, assert_same_step
from tests.support.step import step
from tests.support.toys import rows


def test_the_value_may_be_returned() -> None:
    model = network(clamped)
    twin = copy.deepcopy(model)
    patched(model)
    outputs = []
    for net in (model, twin):
        x = torch.randn(5, 2 * HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = net[1].act(x)
        y.sum().backward()
        outputs.append((y.detach().clone(), x.grad))
    assert all(map(torch.equal, *outputs))


def test_hooks_inside_of_a_chain() -> None:
    """Of a value in the midst: before it is read on it takes part, and afterwards it would be missed."""

    def early(net: Any, x: Tensor) -> Tensor:
        gate = half(net, x).clamp(max=1.0)
        if net.hooks == "early":
            gate.register_hook(lambda gradient: 3.0 * gradient)
        y = gate * torch.exp(gate * -1.7)
        if net.hooks == "late":
            gate.register_hook(lambda gradient: 3.0 * gradient)
        return y

    Activation.hooks = ""  # type: ignore[attr-defined]
    model = network(early)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    model[1].act.hooks = twin[1].act.hooks = "early"
    assert_same_step(model, twin, rows())
    model[1].act.hooks = "late"
    with pytest.raises(RuntimeError, match="its gradient goes past it"):
        model(rows())


def test_a_source_that_is_written_later() -> None:
    def late(net: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        y = net.down(net.act(x))
        if net.writes:
            x.mul_(2.0)
        return y

    def early(net: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        y = net.act(x)
        if net.writes:
            x.mul_(2.0)
        return net.down(y)

    for body, error in (
        (late, "written in place after it was made"),
        (early, "written in place before"),
    ):
        Block.writes = True  # type: ignore[attr-defined]
        assert not planned(clamped, body)
        Block.writes = False  # type: ignore[attr-defined]
        model = patched(network(clamped, body))
        assert chains_of(model)
        Block.writes = True  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=error):
            model(rows()).sum().backward()


def test_backward_twice_and_no_second_derivative() -> None:
    model = network(clamped)
    twin = copy.deepcopy(model)
    patched(model)
    gradients = []
    for net in (model, twin):
        loss = net(rows()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([p.grad for p in net.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) is (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(model(rows()).square().sum(), [model[1].up.weight], create_graph=True)


def test_a_backward_that_stops_at_the_reader_holds_no_steps() -> None:
    model = patched(network(clamped))
    made: list[Any] = []
    model[1].down.register_forward_pre_hook(lambda _, args: made.append(args[0].op))
    loss = model(rows()).square().sum()
    torch.autograd.grad(loss, [model[1].down.weight])
    assert made[0]._graph is None


def test_steps_are_let_go_with_the_gradients_of_their_sources() -> None:
    model = patched(network(clamped))
    made: list[Any] = []
    model[1].down.register_forward_pre_hook(lambda _, args: made.append(args[0].op))
    loss = model(rows()).square().sum()
    graphs: list[Any] = []
    model[0].weight.register_hook(lambda _: graphs.append(made[0]._graph))
    loss.backward()
    assert graphs == [None]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_of_the_module(reentrant: bool) -> None:
    """Its second run is outside of the forward, and must save what the first one saves."""

    def inside(net: Any, x: Tensor) -> Tensor:
        run = net.run if hasattr(net, "run") else lambda function, *given: function(*given)
        y: Tensor = run(clamped, net, x)
        return y

    model = network(inside)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    model[1].act.run = twin[1].act.run = partial(checkpoint, use_reentrant=reentrant)
    assert_same_step(model, twin, rows())


def test_the_value_lies_as_torch_lays_it() -> None:
    def turned(net: Any, x: Tensor) -> Tensor:
        y = half(net, x)
        return x[..., HIDDEN:].t().contiguous().t() * (y + y.exp() * y)

    model = network(turned)
    twin = copy.deepcopy(model)
    patched(model)
    x = torch.randn(5, 2 * HIDDEN, requires_grad=True)
    assert model[1].act(x).stride() == twin[1].act(x).stride() == (1, 5)
    assert_same_step(model, twin, rows())


def test_copies_pickles_and_the_way_back() -> None:
    model = network(clamped)
    twin = copy.deepcopy(model)
    patched(model)
    for other in (copy.deepcopy(model), model):
        assert_same_step(other, twin, rows())
        assert saved(other) == saved(model)
    unpatch_model(model)
    assert saved(model) == saved(twin)
    assert_equal_steps(model, twin, rows())
    named = transformers.ApertusForCausalLM(small())
    patch_model(named, {**CHAINS, "head": "keep"}, example_inputs=tokens())
    again = pickle.loads(pickle.dumps(named))
    assert_same_step(again, unpatch_model(copy.deepcopy(named)), tokens())
    ours, theirs = (step(net, tokens(), count=True).saved for net in (again, named))
    assert ours == theirs


def test_torch_func_and_no_grad_run_the_forward_as_it_is() -> None:
    model = network(clamped)
    twin = copy.deepcopy(model)
    patched(model)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], net: Any) -> Tensor:
        return torch.func.functional_call(net, values, (rows(),)).sum()

    ours, theirs = (torch.func.grad(loss)(parameters, net) for net in (model, twin))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        assert torch.equal(model(rows()), twin(rows()))
    assert torch.equal(torch.export.export(model, (rows(),)).module()(rows()), twin(rows()))


def test_a_value_without_a_gradient_has_none() -> None:
    """A mask that is cast, or made numbers, asks for no gradient, whoever reads it."""

    def marked(net: Any, x: Tensor) -> Tensor:
        y = half(net, x)
        mask = (y > 0).to(y.dtype)
        sign = torch.where(y > 0, 1.0, -1.0)
        net.made = mask, sign
        return y * torch.exp(-y.abs()) * mask * sign

    def body(net: Any, x: Tensor) -> Tensor:
        y = net.act(x)
        mask, sign = net.act.made
        made: Tensor = net.down(y) + net.other(mask) + sign.sum(-1, keepdim=True)
        assert not (mask.requires_grad or sign.requires_grad) and mask.numpy().any()
        return made

    model = network(marked)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    model[1].body = twin[1].body = body
    assert_equal_steps(model, twin, rows())


def test_what_a_mask_is_of_gets_no_gradient() -> None:
    def marked(net: Any, x: Tensor) -> Tensor:
        y = half(net, x)
        y = y / (2 + y.abs())
        mask = (y > 0.1).to(y.dtype)
        if net.alone:
            return (1 - mask) * net.positive + mask * net.negative
        return y.log1p() * mask - net.positive / (1 + mask)

    Activation.alone = False  # type: ignore[attr-defined]
    model = network(marked)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    assert_equal_steps(model, twin, rows())
    model[1].act.alone = twin[1].act.alone = True
    assert_equal_steps(model, twin, rows())
    assert model[1].up.weight.grad is None


@pytest.mark.parametrize("turned", ["part", "whole"])
def test_a_broadcast_tensor_may_lay_the_value_out(turned: str) -> None:
    def wide(net: Any, x: Tensor) -> Tensor:
        y = half(net, x)
        part, whole = torch.ones(5, HIDDEN), torch.stack((y, y))
        if net.turned == "part":
            part = part.t().contiguous().t()
        elif net.turned == "whole":
            whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
        y = part * whole
        y = y * torch.exp(-y.abs())
        net.made = y.stride(), y.contiguous().view(-1).detach().clone()
        return y[0]

    Activation.turned = ""  # type: ignore[attr-defined]
    model = network(wide)
    twin = copy.deepcopy(model)
    patch_model(model, CHAINS, example_inputs=(rows()[:5],))
    assert chains_of(model)
    model[1].act.turned = twin[1].act.turned = turned
    assert_equal_steps(model, twin, rows()[:5])
    (strides, values), (expected, bits) = model[1].act.made, twin[1].act.made
    assert strides == expected and torch.equal(values, bits)


def _of_rows(net: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(partial(clamped, net))(x)


def _of_a_gradient(net: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: clamped(net, x).sum())(x)[..., :HIDDEN] + clamped(net, x)


def _of_a_tangent(net: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        made = clamped(net, forward_ad.make_dual(x, torch.ones_like(x)))
        value, tangent = forward_ad.unpack_dual(made)
    return value + tangent.detach()


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of torch's own forward mode
@pytest.mark.parametrize("inside", [_of_rows, _of_a_gradient, _of_a_tangent])
def test_transforms_inside_of_the_module(inside: Any) -> None:
    model = network(clamped)
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    model[1].act.formula = twin[1].act.formula = inside
    # the judge counts by hooks of saved tensors, which torch.func.grad refuses
    found, expected = (_gradients(net) for net in (model, twin))
    assert all(map(torch.equal, found, expected))


def _gradients(net: Any) -> list[Tensor]:
    net.zero_grad()
    y = net(rows())
    y.square().sum().backward()
    return [y, *(p.grad for p in net.parameters() if p.grad is not None)]


def test_transforms_inside_are_planned() -> None:
    model = network(lambda net, x: _of_rows(net, x * torch.exp(x) * x))
    twin = copy.deepcopy(model)
    patched(model)
    assert chains_of(model)
    assert_same_step(model, twin, rows())


class EndsInChain(torch.nn.Module):
    """A chain of whose parameter the storage is freed when the forward is over, as FSDP2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(16, 16), torch.nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z: Tensor = y * torch.sigmoid(y * 1.7) * self.scale
        return z


def test_a_parameter_that_fsdp_frees_behind_the_forward_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    block = EndsInChain()
    model = torch.nn.Sequential(block, torch.nn.Linear(16, 16))
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=rows())
    monkeypatch.setattr(context, "may_be_freed", lambda: True)
    values = block.scale.detach().clone()

    def free(*_: Any) -> None:
        block.scale.untyped_storage().resize_(0)

    def gather(*_: Any) -> None:
        storage = block.scale.untyped_storage()
        storage.resize_(values.nbytes)
        storage.copy_(values.untyped_storage())

    block.register_forward_hook(free)
    y = model(rows())
    gather()
    y.sum().backward()
    twin(rows()).sum().backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)  # float32's own

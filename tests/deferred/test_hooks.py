"""Hooks on what is read deferred, and writes into what comes out: as without the patch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, unpatch_model
from tests.support.configs import FOLD_AND_SHARE, ONE_COPY
from tests.support.judge import (
    assert_accurate,
    assert_close,
    assert_near,
    assert_same_function,
    assert_same_outputs,
    assert_same_step,
)
from tests.support.step import AUTOCAST, DOUBLE, step
from tests.support.toys import Toy, batch, gated, mlp, patched_twin

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
WIDTH = 16
Attach = Callable[[nn.Module, dict[str, Any]], Any]


class Net(nn.Module):
    """A residual block that writes its branch's result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.fc2(self.act(self.fc1(h)))
        y += h  # beside the Linear, a reader of the norm that wants it as it is
        return y


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def pair(adapters: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net()
    if adapters:
        config = LoraConfig(r=2, target_modules=["fc1", "fc2"], init_lora_weights=False)
        model = get_peft_model(model, config)
    twin = copy.deepcopy(model)
    return patch_model(model, "exact", example_inputs=data(2, 5, WIDTH)), twin


@pytest.mark.parametrize("shape", [(2, 5, WIDTH), (5, WIDTH), (2, 3, 5, WIDTH)])
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
def test_a_linears_output_may_be_written(adapters: bool, shape: tuple[int, ...]) -> None:
    model, twin = pair(adapters)
    assert_same_step(model, twin, data(*shape).requires_grad_())


def _doubles_gradient(module: nn.Module, seen: dict[str, Any]) -> None:
    module.register_forward_hook(
        lambda m, a, output: output.register_hook(lambda g: 2 * g) and None
    )


def _writes(module: nn.Module, seen: dict[str, Any]) -> None:
    def hook(m: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            output.mul_(2.0)

    module.register_forward_hook(hook)


def _sees_both_gradients(module: nn.Module, seen: dict[str, Any]) -> None:
    def hook(m: nn.Module, inputs: Any, outputs: Any) -> None:
        seen["inputs"], seen["outputs"] = inputs[0], outputs[0]

    module.register_full_backward_hook(hook)


@pytest.mark.parametrize("attach", [_doubles_gradient, _writes, _sees_both_gradients])
@pytest.mark.parametrize("part", ["", ".base_layer", ".lora_A.default", ".lora_B.default"])
def test_hooks_inside_an_adapter_layer(part: str, attach: Attach) -> None:
    model, twin = (one.double() for one in pair(adapters=True))
    seen: list[dict[str, Any]] = [{}, {}]
    for one, store in zip((model, twin), seen, strict=True):
        attach(one.get_submodule(f"base_model.model.fc1{part}"), store)
    assert_same_function(model, twin, data(2, 5, WIDTH).requires_grad_())
    assert set(seen[0]) == set(seen[1])
    for name, theirs in seen[1].items():
        assert_close(seen[0][name], theirs, name)


def _doubles_both(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda m, inputs, outputs: (2 * inputs[0],))


@pytest.mark.parametrize("when", ["before", "while patched", "then unpatched"])
@pytest.mark.parametrize("name", ["norm", "act"])
def test_full_backward_hooks_of_a_replaced_module(name: str, when: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), data(2, 5, WIDTH)
    twin = copy.deepcopy(model)
    _doubles_both(twin.get_submodule(name))
    if when == "before":
        _doubles_both(model.get_submodule(name))
    patch_model(model, "exact", example_inputs=x)
    if when != "before":
        _doubles_both(model.get_submodule(name))
    if when == "then unpatched":
        unpatch_model(model)
    assert_same_step(model, twin, x.requires_grad_())


def outputs_that_wait(modules: list[nn.Module]) -> list[Any]:
    """The outputs of the next forwards, in their order, which keep their gradients."""
    kept: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        output.retain_grad()
        kept.append(output)

    for module in modules:
        module.register_forward_hook(hook)
    return kept


def test_retain_grad_on_an_activation_gets_the_gradient() -> None:
    model, twin = (one.double() for one in pair(adapters=False))
    kept = outputs_that_wait([model.act, twin.act])
    assert_same_function(model, twin, data(2, 5, WIDTH).requires_grad_())
    assert_close(kept[0].grad, kept[1].grad, "act")


def test_a_norm_that_is_cast_gets_its_whole_gradient() -> None:
    model, twin = pair(adapters=False)
    exact, x = copy.deepcopy(twin).double(), data(2, 5, WIDTH).requires_grad_()
    kept = outputs_that_wait([model.norm, twin.norm, exact.norm])
    found, own = step(model, x, AUTOCAST), step(twin, x, AUTOCAST)
    assert_accurate(found, own, step(exact, x, DOUBLE), AUTOCAST)
    assert_near(*(output.grad for output in kept), AUTOCAST)


def test_autocast_leaves_float64_alone() -> None:
    model, twin = pair(adapters=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_function(model.double(), twin.double(), data(2, 5, WIDTH).requires_grad_())


class Square(nn.Module):
    """Attention over one image, whose matrices have no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.softmax = nn.Linear(WIDTH, WIDTH), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        scores = h @ h.transpose(-2, -1)
        y = self.softmax(scores.float()) @ h
        y += x
        return y


@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 5, WIDTH), (2, 3, 5, WIDTH)])
def test_a_softmax_of_any_rank_whose_product_is_written(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Square()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        patch_model(model, ONE_COPY, example_inputs=data(2, 5, WIDTH))
        assert model.softmax._forward_hooks
    assert_same_step(model, twin, data(*shape).requires_grad_(), AUTOCAST)


def _reads_values(output: Any) -> list[Any]:
    """What hooks do to activations; all must work on what a patched module returns."""
    return [
        output.detach().clone(), output.float().mean(), output[..., 0], output[0], output.shape,
        output.size(-1), output.dtype, output.device, output.dim(), len(output), output + 1, 1 - output,
        output / 2, output > 0,
        torch.cat([output, output]), torch.stack([output]), output.chunk(2, -1), torch.isnan(output).any(),
        output.detach().numpy(), output.max().item(), output.abs().sum().tolist(), output.norm(),
        torch.allclose(output, output), output.to(torch.float64), output.t() if output.dim() == 2 else None,
        output @ output.transpose(-1, -2), -output, output**2, output.flatten(0, 1), output.unbind(0),
        nn.functional.layer_norm(output, output.shape[-1:]), output.requires_grad, output.is_cuda,
    ]  # fmt: skip


@pytest.mark.parametrize("grad", [True, False], ids=["with-grad", "under-no-grad"])
@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
def test_hooks_that_read_activations_see_the_original_values(config: Any, grad: bool) -> None:
    found: list[list[Any]] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        with torch.set_grad_enabled(grad):
            found.append(_reads_values(output))

    def attach(model: Any) -> None:
        for module in (model.norm, model.act, model.last):
            module.register_forward_hook(hook)

    patched, twin, _ = (model.double() for model in patched_twin(Toy(gated), config))
    x = batch().double()
    attach(patched), attach(twin)
    with (
        pytest.warns(UserWarning, match="hook sees") if config["norms"] == "fold" else nullcontext()
    ):
        patched(x)
    twin(x)
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        for one, two in zip(ours, theirs, strict=True):
            if isinstance(two, Tensor) and two.is_floating_point():
                one = one if isinstance(one, Tensor) else one + 0  # a part may be deferred, too
                assert_close(one, two, "read")
            elif isinstance(two, Tensor):
                assert torch.equal(one, two)
            elif isinstance(two, tuple) and isinstance(two[0], Tensor):
                for part, right in zip(one, two, strict=True):
                    assert_close(part, right, "read")
            elif isinstance(two, (torch.Size, torch.dtype, torch.device, int)):
                assert one == two
    found.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_same_function(patched, twin, x)


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
@pytest.mark.parametrize("change", ["write", "replace"])
def test_hooks_that_change_activations_change_the_step(change: str, config: Any) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if change == "replace":
            return output * 2
        output[..., 1] = 0.5
        return None

    patched, twin, _ = patched_twin(Toy(mlp), config)
    for model in (patched, twin):
        model.act.register_forward_hook(hook)
    assert_same_step(patched, twin, batch())


def test_a_hook_may_write_into_a_cast_norm() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        return net.down(net.act(net.up(h))) + h

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            output.mul_(2.0)

    patched, twin, _ = patched_twin(Toy(body), "exact")
    for model in (patched, twin):
        model.norm.register_forward_hook(hook)
    assert_same_outputs(patched, twin, batch(), AUTOCAST)


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_backward_hooks_are_called_with_the_gradient(when: str, config: Any) -> None:
    seen: list[Tensor] = []

    def attach(model: Any) -> None:
        model.act.register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0]))

    net = Toy(mlp)
    if when == "before":
        attach(net)
    patched, twin, _ = patched_twin(net, config, attach if when == "after" else lambda model: None)
    if when == "after":
        attach(twin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for model in (patched, twin):
            step(model.double(), batch(), DOUBLE)
    assert len(seen) == 2
    assert_close(seen[0], seen[1], "act")

"""Norms over channels that wait, in the lives of a model: hooks, checkpoints, other inputs, other modules."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from tests.strategies.test_channel_norms import ACTIVATIONS, NORMS, Net, assert_as_unpatched, image


def hook_on_the_norm(model: nn.Module, x: Tensor) -> Tensor:
    model.blocks[0].norm.register_forward_hook(lambda m, i, o: o * 2)  # type: ignore[union-attr, index]
    return model(x)  # type: ignore[no-any-return]


def read_the_norm(model: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    model.blocks[1].norm.register_forward_hook(lambda m, i, o: seen.append(o))  # type: ignore[union-attr, index]
    output = model(x)
    return output + seen[0].mean() * seen[0].square().sum()  # type: ignore[no-any-return]


def full_hook(model: nn.Module, x: Tensor) -> Tensor:
    model.blocks[1].norm.register_full_backward_hook(lambda m, i, o: (i[0] * 3,))  # type: ignore[union-attr, index]
    return model(x)  # type: ignore[no-any-return]


def tensor_hook(model: nn.Module, x: Tensor) -> Tensor:
    def hook(module: nn.Module, given: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 2)

    model.blocks[1].norm.register_forward_hook(hook)  # type: ignore[union-attr, index]
    return model(x)  # type: ignore[no-any-return]


def twice(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + model(x * 2)  # type: ignore[no-any-return]


def in_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def in_reentrant_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]


def other_size(model: nn.Module, x: Tensor) -> Tensor:
    return model(x[:2, :, :7, :5])  # type: ignore[no-any-return]


def other_layout(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(memory_format=torch.channels_last))  # type: ignore[no-any-return]


def strided(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.transpose(2, 3))  # type: ignore[no-any-return]


def one_block(model: nn.Module, x: Tensor) -> Tensor:
    return model.blocks[0](model.stem(x)).mean((2, 3))  # type: ignore[operator, index, no-any-return]


def norm_alone(model: nn.Module, x: Tensor) -> Tensor:
    return model.blocks[0].norm(model.stem(x)).square().mean((2, 3))  # type: ignore[operator, union-attr, index, no-any-return]


def other_activation(model: nn.Module, x: Tensor) -> Tensor:
    warnings.filterwarnings("ignore", message=".*patched modules were replaced")
    model.blocks[1].act = nn.Tanh()  # type: ignore[union-attr, index]
    return model(x)  # type: ignore[no-any-return]


def in_place_behind(model: nn.Module, x: Tensor) -> Tensor:
    warnings.filterwarnings("ignore", message=".*patched modules were replaced")
    model.blocks[1].act = nn.ELU(inplace=True)  # type: ignore[union-attr, index]
    return model(x)  # type: ignore[no-any-return]


def written_activation(model: nn.Module, x: Tensor) -> Tensor:
    model.blocks[1].act.register_forward_hook(lambda m, i, o: o.mul_(2))  # type: ignore[union-attr, index]
    return model(x)  # type: ignore[no-any-return]


def with_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    return model(x) + found.mean()  # type: ignore[no-any-return]


def after_an_update(model: nn.Module, x: Tensor) -> Tensor:
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.zero_grad()
    return model(x)  # type: ignore[no-any-return]


def compiled(model: nn.Module, x: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager")(x)  # type: ignore[no-any-return]


def evaluated_before(model: nn.Module, x: Tensor) -> Tensor:
    before = model.eval()(x)
    return before + model.train()(x)  # type: ignore[no-any-return]


def moved(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(pickle.loads(pickle.dumps(model)))(x) + model(x)  # type: ignore[no-any-return]


LIVES = (
    hook_on_the_norm, read_the_norm, full_hook, tensor_hook, twice, in_checkpoint, in_reentrant_checkpoint,
    other_size, other_layout, strided, one_block, norm_alone, other_activation, in_place_behind,
    written_activation, with_input_gradient, after_an_update, compiled, moved, evaluated_before,
)  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize(("norm", "act"), [("batch", "silu"), ("group", "silu"), ("batch", "relu")])
def test_lives_are_those_of_the_unpatched_model(life: Any, norm: str, act: str) -> None:
    if life is written_activation and act == "relu":
        pytest.skip("torch's own ReLU refuses that")
    torch.manual_seed(0)
    model, x = Net(NORMS[norm], ACTIVATIONS[act]), image()
    assert_as_unpatched(model, x, lambda one: life(one, x.double()))


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
@pytest.mark.parametrize("act", ["relu in place", "silu in place"])
@pytest.mark.parametrize("late", [False, True])
def test_who_holds_a_norms_output_reads_what_an_activation_wrote_there(
    norm: str, act: str, late: bool
) -> None:
    seen: list[Tensor] = []

    def run(model: nn.Module) -> Tensor:
        if late:
            hang(model)
        seen.clear()
        output: Tensor = model(x.double())
        return output + seen[0].square().mean()

    def hang(model: Any) -> None:
        model.blocks[1].norm.register_forward_hook(lambda m, i, o: seen.append(o))

    torch.manual_seed(0)
    model, x = Net(NORMS[norm], ACTIVATIONS[act]), image()
    if not late:
        hang(model)
    assert_as_unpatched(model, x, run)


def test_a_bias_written_before_the_backward_is_an_error_that_says_so() -> None:
    model = patch_model(Net(), "exact", example_inputs=(image(),))
    loss = model(image()).sum()
    with torch.no_grad():
        model.blocks[1].norm.bias.add_(1)
    with pytest.raises(RuntimeError, match="weight or the bias of a norm over channels"):
        loss.backward()

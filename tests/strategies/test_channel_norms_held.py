"""Who looks at the output of a norm over channels before an activation or a sum writes there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import plan_patch
from tests.strategies.test_channel_norms import (
    ACTIVATIONS,
    NORMS,
    Net,
    assert_as_unpatched,
    image,
    patched,
)
from tests.strategies.test_residual_sums import residual_net

# what a hook on the norm does with the output; what it returns is added up in the loss
LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda o: o.mean((2, 3)),
    "clone": lambda o: o.clone(),
    "twice": lambda o: o * 2,
    "sum over the batch": lambda o: o.sum((0, 2, 3)),
    "number": lambda o: o.mean().item(),
    "hook": lambda o: o.register_hook(lambda gradient: gradient * 2),
    "retain_grad": lambda o: o.retain_grad(),
    "view": lambda o: o.view(-1),
    "row": lambda o: o[0],
    "row that is dropped": lambda o: o[0].sum().item(),
    "detached": lambda o: o.detach(),
    "numpy": lambda o: o.detach().cpu().numpy().sum(),
    "data": lambda o: o.data.sum().item(),
    "address": lambda o: o.data_ptr(),
    "storage": lambda o: o.untyped_storage().nbytes(),
    "node": lambda o: o.grad_fn,
    "text": repr,
    "list": lambda o: o.tolist(),
    "relu": torch.relu,
    "copy": lambda o: copy.deepcopy(o.detach()),
    "edge": torch.autograd.graph.get_gradient_edge,
}
MODELS: dict[str, Callable[[], Net]] = {
    "relu": lambda: Net(act=ACTIVATIONS["relu in place"]),
    "silu": lambda: Net(NORMS["group"], ACTIVATIONS["silu in place"]),
    "sum": lambda: residual_net("in place", act="relu"),
    "sum and relu": lambda: residual_net("by method", act="relu in place"),
    "two norms": lambda: residual_net("shortcut", act="silu in place"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("held", [False, True], ids=["looks", "holds"])
def test_values_and_gradients_are_those_of_the_unpatched_model(
    name: str, look: str, held: bool
) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), image()

    def run(one: Any) -> Tensor:
        seen: list[Tensor] = []

        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            made = LOOKS[look](output)
            seen.extend([made] if isinstance(made, Tensor) else [])
            seen.extend([output] if held else [])

        handle = one.blocks[2].norm.register_forward_hook(hook)
        found: Tensor = one(x.double()).sum(1)
        handle.remove()
        for tensor in seen:
            weights = torch.arange(tensor.numel()).sin().reshape(tensor.shape)
            found = found + (tensor * weights).sum()  # needs no values in backward
        return found

    assert_as_unpatched(model, x, run)


@pytest.mark.parametrize("name", MODELS)
def test_a_value_saved_before_the_write_is_an_error(name: str) -> None:
    model, x = MODELS[name](), image()
    for one in (model, patched(model, x)):
        seen: list[Tensor] = []
        hang(one, seen)
        with pytest.raises(RuntimeError, match="inplace operation"):
            (one(x).sum() + seen[0]).backward()


def hang(model: Any, seen: list[Tensor]) -> None:
    norm = model.blocks[2].norm
    norm.register_forward_hook(lambda m, i, o: seen.append(o.square().sum()))


def test_a_norm_that_no_kernel_reads_as_its_input_lies_leaves_its_activation_in_place() -> None:
    """Of groups, and with the channels last."""
    model = MODELS["silu"]().to(memory_format=torch.channels_last)
    x = image().to(memory_format=torch.channels_last)
    report = plan_patch(model, "exact", example_inputs=(x,))
    assert not [site.name for site in report.sites if site.patched and "norm" in site.kind]

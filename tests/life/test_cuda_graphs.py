"""Training steps of patched models captured in a CUDA graph, and replayed on other inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lowmem_patch import patch_model
from tests.support.models import FAMILIES
from tests.support.step import tensors_of

pytestmark = [
    pytest.mark.gpu,
    # PEFT reads a name that transformers has since deprecated
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
Make = Callable[[str], Any]
EPS = torch.finfo(torch.bfloat16).eps


def _weighted(output: Tensor) -> Tensor:
    weights = torch.arange(output.numel(), device=output.device).sin().reshape(output.shape)
    return (output * weights).mean()


def capturable_step(model: Any, inputs: dict[str, Tensor], *, autocast: bool = True) -> None:
    """Without a seed and copies of the inputs, which a graph could not replay."""
    model.zero_grad(set_to_none=False)
    device = next(iter(inputs.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        outputs = tensors_of(model(**inputs))
    # weighted, since the mean square behind a norm barely depends on the inputs
    sum((_weighted(t) for t in outputs), torch.zeros((), device=device)).backward()


def gradients(model: Any) -> Tensor:
    """Those of all parameters in one vector, in float64."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def exact_gradients(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Of the patched model in float64."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = copy.deepcopy(model).double()
    capturable_step(exact, wide, autocast=False)
    return gradients(exact)


@pytest.mark.parametrize("preset", ["exact", "auto"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "timm-vit", "bert", "timm-swin"])
def test_a_captured_step_gives_what_an_eager_one_gives(
    make: Make, name: str, lora: bool, preset: str
) -> None:
    family = FAMILIES[name]
    model = make(name).cuda()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=family.linears))
    model.train()
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    # a mask is looked at on the host, which waits for the device: no capture of it, patched or not
    inputs = {k: v.cuda() for k, v in family.inputs().items() if k != "attention_mask"}
    model = patch_model(model, preset, example_inputs=inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            capturable_step(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        capturable_step(model, inputs)

    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        for tensor in inputs.values():
            new = (
                torch.randn(tensor.shape, generator=generator)
                if tensor.is_floating_point()
                else torch.randint(3, 60, tensor.shape, generator=generator)
            )
            tensor.copy_(new)
        graph.replay()
        found = gradients(model)
        capturable_step(model, inputs)
        eager, exact = gradients(model), exact_gradients(model, inputs)
        # cuBLAS may add in another order in a capture, of a stock model as well
        error, allowed = ((g - exact).norm() for g in (found, eager))
        assert error <= 2 * allowed + EPS * exact.norm()

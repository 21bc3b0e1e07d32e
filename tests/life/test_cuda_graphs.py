"""Training steps of patched models captured in a CUDA graph, and replayed on other inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model
from tests.support.models import FAMILIES
from tests.support.stacks import all_of, blocks_of, give_levels
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


class _Loss(nn.Module):
    """A model and its loss, as positional tensors: what `torch.cuda.make_graphed_callables` takes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        if inputs.is_floating_point():
            return nn.functional.cross_entropy(self.model(inputs), labels)
        loss: Tensor = self.model(input_ids=inputs, labels=labels, use_cache=False).loss
        return loss


def _batches(name: str, number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(number):
        if name == "llama":
            inputs = torch.randint(3, 60, (2, 16), generator=generator)
            labels = inputs
        else:
            inputs = torch.randn(4, 3, 64, 64, generator=generator)
            labels = torch.randint(0, 10, (4,), generator=generator)
        batches.append((inputs.cuda(), labels.cuda()))
    return batches


def _built(name: str, make: Make) -> Any:
    if name.startswith("llama"):
        model = make("llama")
        if name == "llama-lora":
            return get_peft_model(model, LoraConfig(r=4, target_modules=FAMILIES["llama"].linears))
        return model
    sizes: dict[str, Any] = {}
    if name.startswith("vit"):
        sizes = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 2, "proj_drop_rate": 0.2}
    return timm.create_model(name, num_classes=10, **sizes)


def _trained(step: Any, parameters: list[nn.Parameter], batches: Any) -> Tensor:
    """The sum of all steps' updates, with plain SGD, in one vector."""
    before = [p.detach().double() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    torch.manual_seed(11)  # of the dropouts
    for inputs, labels in batches:
        optimizer.zero_grad(set_to_none=True)
        step(inputs, labels).backward()
        optimizer.step()
    return torch.cat(
        [(p.detach().double() - b).flatten() for p, b in zip(parameters, before, strict=True)]
    )


@pytest.mark.parametrize("preset", ["exact", "auto"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-lora", "vit_tiny_patch16_224", "resnet18", "efficientnet_b0"]
)
def test_a_graphed_model_trains_as_an_eager_one(
    make: Make, name: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.cuda.make_graphed_callables`, as the documents show it, with dropouts and running statistics."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    stock = _built(name, make).cuda().train()
    batches = _batches(name.partition("-")[0], 4)
    inputs, labels = batches[0]
    example = (
        {"input_ids": inputs, "labels": labels, "use_cache": False}
        if not inputs.is_floating_point()
        else inputs
    )
    eager = _Loss(patch_model(stock, preset, example_inputs=example))
    graphed = copy.deepcopy(eager)
    state = {key: value.clone() for key, value in graphed.state_dict().items()}
    step = torch.cuda.make_graphed_callables(graphed, (inputs, labels), allow_unused_input=True)
    graphed.load_state_dict(state)  # the warm-up has moved running statistics

    updates = [
        _trained(call, [p for p in model.parameters() if p.requires_grad], batches)
        for call, model in ((eager, eager), (step, graphed))
    ]
    assert updates[0].norm() > 0
    # the same kernels; but cuBLAS may add in another order in a capture, in each of some fifty products
    eps = torch.finfo(torch.float32).eps
    assert (updates[1] - updates[0]).norm() <= 50 * eps * updates[0].norm()
    buffers = zip(eager.buffers(), graphed.buffers(), strict=True)
    for one, other in buffers:
        torch.testing.assert_close(one, other)


# of a largest value's 8 bits, in each of two runs
_EIGHT_BITS = 2 * 2.0**-8
# of blocks; what waits in host memory cannot be captured: its copies are not over when the forward is
LEVELS = ("attention", "checkpointed", "segment", "halves")


@pytest.mark.parametrize("how", ["compact", "gradient checkpointing", *LEVELS])
def test_less_memory_than_the_floor_in_a_graph(make: Make, how: str) -> None:
    """8 bits, torch's checkpoints, and what a budget lets blocks do."""
    torch.manual_seed(0)
    stock = make("llama").cuda().train()
    batches = _batches("llama", 4)
    inputs, labels = batches[0]
    example = {"input_ids": inputs, "labels": labels, "use_cache": False}
    allowed = 50 * torch.finfo(torch.float32).eps
    if how == "compact":
        model, allowed = patch_model(stock, "compact", example_inputs=example), _EIGHT_BITS
    elif how == "gradient checkpointing":
        stock.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        model = patch_model(stock, "exact", example_inputs=example)
    else:
        blocks = blocks_of(stock, example)
        model = patch_model(stock, "exact", example_inputs=example)
        model = give_levels(model, blocks, all_of(blocks, how))
    eager = _Loss(model)
    graphed = copy.deepcopy(eager)
    step = torch.cuda.make_graphed_callables(graphed, (inputs, labels), allow_unused_input=True)
    updates = [
        _trained(call, [p for p in one.parameters() if p.requires_grad], batches)
        for call, one in ((eager, eager), (step, graphed))
    ]
    assert (updates[1] - updates[0]).norm() <= allowed * updates[0].norm()

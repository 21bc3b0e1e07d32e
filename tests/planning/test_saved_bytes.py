"""The paper's savings at real widths, counted on fake tensors: deterministic, and no memory is used."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from lowmem_patch import patch_model, plan_patch, saved_bytes
from lowmem_patch.errors import TraceError
from lowmem_patch.functional import packs_saved_tensors

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

LLAMA_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def vit() -> nn.Module:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", depth=2)
        return get_peft_model(
            model, LoraConfig(r=4, target_modules=r".*blocks.*\.(qkv|attn\.proj|fc1|fc2)")
        )


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, num_attention_heads=32
    )
    with torch.device("meta"):
        model = LlamaModel(config).to(torch.bfloat16)
        lora = LoraConfig(r=16, target_modules=LLAMA_LINEARS)
        # on meta PEFT leaves its adapters in float32
        return get_peft_model(model, lora, autocast_adapter_dtype=False).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("build", "inputs", "autocast", "block", "least"),
    [
        pytest.param(vit, (torch.empty(4, 3, 224, 224),), True, "blocks.1", 0.39, id="vit-b-16"),
        pytest.param(
            llama,
            {"input_ids": torch.ones(1, 2048, dtype=torch.int64)},
            False,
            "layers.1",
            0.29,
            id="llama-7b",
        ),
    ],
)
def test_a_block_saves_the_papers_share_less(
    build: Callable[[], Any], inputs: Any, autocast: bool, block: str, least: float
) -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = plan_patch(model, "paper", example_inputs=inputs)
    (counts,) = [(b, a) for name, b, a in report.blocks if name.endswith(block)]
    assert 1 - counts[1] / counts[0] >= least


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()  # saves its input


class Beside(nn.Module):
    """Computes something beside its input, or gets it from a part that does, and drops it or returns it."""

    def __init__(self, inside: nn.Module, drops: bool) -> None:
        super().__init__()
        self.inside, self.drops = inside, drops

    def forward(self, x: Tensor) -> Any:
        made = self.inside(x)
        # a product with a number saves nothing
        y, beside = made if isinstance(made, tuple) else (x * 1.0, made)
        return y if self.drops else (y, beside)


class Taken(Sine):
    saves_until_read = True  # as a patched activation


@pytest.mark.parametrize(("kind", "most"), [(Sine, 1), (Taken, 2)])
@pytest.mark.parametrize("around", [1, 2, 3])
def test_only_what_is_dropped_near_its_saver_is_not_counted(
    around: int, kind: type[nn.Module], most: int
) -> None:
    """By its caller, or, of a patched activation, by the module around that."""
    model = kind()
    for depth in range(1, around + 1):
        model = Beside(model, drops=depth == around)
    with saved_bytes(model) as saved:
        model(torch.randn(4, 8, requires_grad=True))
    assert saved.activations == (0 if around <= most else 4 * 8 * 4)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, self.linear(x), use_reentrant=False)
        return y


def test_a_checkpoint_that_fails_leaves_no_hooks_on() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("as asked")

    model, x = Checkpointed(Failing()), torch.randn(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="as asked") as held, saved_bytes(model):
        model(x)
    assert not packs_saved_tensors()
    with pytest.raises(TraceError, match="as asked") as told:
        patch_model(model, example_inputs=x)
    assert not packs_saved_tensors()
    assert held.traceback and told.traceback


class Gated(nn.Module):
    """A sigmoid saves what it gives."""

    made: StorageWeakRef

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(x))
        Gated.made = StorageWeakRef(gate.untyped_storage())
        return gate * x


def test_what_was_saved_is_freed_with_the_outputs() -> None:
    """Also without a backward: an output that is saved must not hold its own node."""
    model, x = Gated(), torch.randn(4, 8, requires_grad=True)
    with saved_bytes(model) as found:
        output = model(x)
    assert found.activations > 0 and not Gated.made.expired()
    del output
    assert Gated.made.expired()


def tensors() -> set[int]:
    gc.collect()
    return {id(item) for item in gc.get_objects() if type(item) is Tensor}


@pytest.mark.parametrize("fit", [None, "1GiB"])
def test_a_patch_leaves_no_tensors(fit: str | None) -> None:
    """Values that follow from the inputs, and a copy of these, lay on the GPU as long as the process."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
    )
    model, tokens = LlamaForCausalLM(config), torch.randint(0, 64, (2, 24))
    before = tensors()
    patch_model(model, example_inputs={"input_ids": tokens}, fit=fit)
    assert tensors() <= before | {id(tokens)}

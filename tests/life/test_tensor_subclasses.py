"""Weights of a tensor subclass (torchao's kind): they stay what they are, and all else is patched."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowmem_patch import patch_model, patch_report, unpatch_model
from tests.support.judge import assert_accurate, assert_close
from tests.support.models import FAMILIES, build
from tests.support.step import DOUBLE, step

FAMILY = FAMILIES["llama"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


class Halves(Tensor):
    """A weight kept in float16, read in float32 by any op of torch, and by no other op."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, inner.shape, dtype=torch.float32, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].inner))
        if func.namespace != "aten":
            raise NotImplementedError(f"Halves knows no {func}")
        args, kwargs = tree_map_only(cls, lambda t: t.inner.float(), (args, kwargs or {}))
        return func(*args, **kwargs)


def quantised() -> Any:
    """A LLaMA whose Linears in blocks are frozen and of such weights."""
    model = build(FAMILY).train()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            weight: Any = Halves(module.weight.detach().half())
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def with_lora(model: Any, seed: int = 2) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def plain(model: Any) -> Any:
    """A copy whose weights are ordinary tensors of the same values, in float64."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = parameter.inner if isinstance(parameter, Halves) else parameter.detach()
            setattr(module, name, nn.Parameter(value.double(), parameter.requires_grad))
    return model


def same_step(model: Any, twin: Any) -> tuple[int, int]:
    """The saved bytes of both, whose logits and gradients must agree."""
    inputs = FAMILY.inputs()
    found, own = (step(one, inputs, count=True) for one in (model, twin))
    assert_accurate(found, own, step(plain(twin), inputs, DOUBLE))
    return found.saved, own.saved


def test_frozen_model_trains_its_norms_the_same() -> None:
    model = quantised()
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=FAMILY.inputs())
    ours, theirs = same_step(model, twin)
    report = patch_report(model)
    assert (report.saved_before, report.saved_after) == (theirs, ours)
    assert ours < theirs
    assert any("Halves, which cannot be traced without data" in note for note in report.notes)


def test_weights_keep_their_class_and_their_place() -> None:
    model = quantised()
    before = dict(model.named_parameters())
    patch_model(model, "auto", example_inputs=FAMILY.inputs())
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    unpatch_model(model)
    assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("config", ["auto", "exact"])
def test_adapters_before_the_patch_train_the_same(config: str) -> None:
    model = with_lora(quantised())
    twin = copy.deepcopy(model)
    patch_model(
        model,
        {"activations": "recompute"} if config == "auto" else config,
        example_inputs=FAMILY.inputs(),
    )
    ours, theirs = same_step(model, twin)
    assert ours < theirs


def test_adapters_after_the_patch_train_the_same() -> None:
    base = quantised().requires_grad_(False)
    twin = with_lora(copy.deepcopy(base))
    with pytest.warns(UserWarning, match="no parameter trains"):
        patch_model(base, "exact", example_inputs=FAMILY.inputs())
    model = with_lora(base)
    with pytest.warns(UserWarning, match="adapter layers were added since the patch"):
        ours, theirs = same_step(model, twin)
    assert ours < theirs


@pytest.mark.parametrize("preset", ["auto", "paper", "compact"])
@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_nested_tensors_run_torchs_functions(norm: Any, act: Any, preset: str) -> None:
    torch.manual_seed(0)
    layers = (
        nn.Linear(16, 16),
        norm(16),
        nn.Dropout(0.0),
        nn.Linear(16, 32),
        act(),
        nn.Linear(32, 16),
    )
    stock = nn.Sequential(*layers).double()
    dense = torch.randn(4, 8, 16, dtype=torch.float64)
    patched = patch_model(copy.deepcopy(stock), preset, example_inputs=(dense,))
    ragged = torch.nested.nested_tensor([dense[0, :3], dense[1]], layout=torch.jagged)
    for model in (stock, patched):
        model(ragged).values().square().sum().backward()
    for (name, own), other in zip(patched.named_parameters(), stock.parameters(), strict=True):
        assert_close(own.grad, other.grad, name, 1e-12)

"""Liger, or who else gives modules forwards of their own: after the patch it is said, before it is seen.

Without a GPU a stand-in does to the modules what Liger does to them: a forward bound to the instance, and
another class's name.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from tests.support.judge import assert_same_step
from tests.support.models import FAMILIES, Inputs, build
from tests.support.step import MODES

FAMILY = FAMILIES["llama"]


def norm_forward(self: Any, x: Tensor) -> Tensor:
    """As an RMSNorm is, in plain operations."""
    wide = x.float()
    z = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
    out: Tensor = self.weight * z.to(x.dtype)
    return out


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """As LigerSwiGLUMLP is: the module's activation is not called."""
    out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
    return out


def bind(module: nn.Module, forward: Callable[..., Any], name: str) -> None:
    module.__dict__["forward"] = types.MethodType(forward, module)
    module.__dict__["_get_name"] = types.MethodType(lambda self: name, module)


def apply_to_instance(model: Any) -> None:
    """What ``_apply_liger_kernel_to_instance`` does to a LLaMA."""
    base = model.model
    for norm in (
        base.norm,
        *(n for b in base.layers for n in (b.input_layernorm, b.post_attention_layernorm)),
    ):
        norm.variance_epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
        bind(norm, norm_forward, "LigerRMSNorm")
    for block in base.layers:
        bind(block.mlp, mlp_forward, "LigerSwiGLUMLP")


@pytest.fixture
def llama() -> Any:
    return build(FAMILY).train()


@pytest.fixture
def inputs() -> Inputs:
    return FAMILY.inputs()


def texts_of_a_step(model: Any, inputs: Inputs) -> list[str]:
    """One training forward and backward; the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train()(**inputs).logits.square().mean().backward()
    return [str(warning.message) for warning in caught]


def test_liger_after_the_patch_warns_once_with_the_mend(llama: Any, inputs: Inputs) -> None:
    patch_model(llama, "exact", example_inputs=inputs)
    apply_to_instance(llama)
    (text,) = texts_of_a_step(llama, inputs)
    assert text.startswith("7 modules got a forward of tests since the patch")
    assert "LigerRMSNorm in model.layers.0.input_layernorm" in text
    assert "let tests set it before patch_model, or not at all" in text
    assert texts_of_a_step(llama, inputs) == []


def test_report_says_that_forwards_are_no_longer_ours(llama: Any, inputs: Inputs) -> None:
    patch_model(llama, "exact", example_inputs=inputs)
    before = patch_report(llama).notes
    apply_to_instance(llama)
    (added,) = patch_report(llama).notes[len(before) :]
    assert added.startswith("7 modules got a forward of tests")


def test_liger_after_the_patch_computes_the_same(llama: Any, inputs: Inputs) -> None:
    twin = copy.deepcopy(llama)
    patch_model(llama, "exact", example_inputs=inputs)
    for model in (llama, twin):
        apply_to_instance(model)
    assert len(texts_of_a_step(llama, inputs)) == 1
    llama.zero_grad()
    assert_same_step(llama, twin, inputs, MODES["fp32"])


def test_patching_again_saves_the_bytes_again(llama: Any, inputs: Inputs) -> None:
    patch_model(llama, "exact", example_inputs=inputs)
    patched = patch_report(llama).saved_after
    for block in llama.model.layers:
        bind(block.input_layernorm, norm_forward, "LigerRMSNorm")
    with saved_bytes(llama) as lost, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llama(**inputs)
    assert lost.activations > patched
    patch_model(llama, "exact", example_inputs=inputs)
    with saved_bytes(llama) as regained:
        llama(**inputs)
    assert regained.activations == patched == patch_report(llama).saved_after
    assert texts_of_a_step(llama, inputs) == []


@pytest.mark.parametrize(
    ("path", "forward", "warns"),
    [
        ("model.norm", norm_forward, True),
        ("model.layers.0.mlp.act_fn", lambda self, x: nn.functional.silu(x), True),
        ("model.layers.1.mlp", mlp_forward, True),
        ("model.layers.1.self_attn", "class", True),
        ("lm_head", lambda self, x: nn.functional.linear(x, self.weight), True),
    ],
)
def test_any_forward_in_the_place_of_ours_is_named(
    llama: Any, inputs: Inputs, path: str, forward: Any, warns: bool
) -> None:
    patch_model(llama, {"attention": "fused", "activations": "recompute"}, example_inputs=inputs)
    module = llama.get_submodule(path)
    if forward == "class":
        own = type(module).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

    bind(module, forward, "Other")
    texts = texts_of_a_step(llama, inputs)
    assert len(texts) == warns
    said = ("1 modules got a forward of tests", f"what was patched (Other in {path})")
    assert all(part in text for text in texts for part in said)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's own
def test_another_forward_of_a_lora_layer_is_named(inputs: Inputs) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(FAMILY), peft.LoraConfig(target_modules=["q_proj"]))
    patch_model(model, "exact", example_inputs=inputs)
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    own = type(model.get_submodule(path)).forward

    def forward(self: Any, x: Tensor) -> Any:
        return own(self, x)

    bind(model.get_submodule(path), forward, "Other")
    (text,) = texts_of_a_step(model, inputs)
    assert f"(Other in {path})" in text


def test_liger_before_the_patch_leaves_its_modules_alone(llama: Any, inputs: Inputs) -> None:
    llama.model.layers[1].mlp.__dict__["forward"] = types.MethodType(
        mlp_forward, llama.model.layers[1].mlp
    )
    for block in llama.model.layers:
        bind(block.input_layernorm, norm_forward, "LigerRMSNorm")
    twin = copy.deepcopy(llama)
    patch_model(llama, "exact", example_inputs=inputs)
    sites = {site.name: site for site in patch_report(llama).sites}
    assert {sites[f"model.layers.{i}.input_layernorm"].strategy for i in (0, 1)} == {"keep"}
    assert {sites[f"model.layers.{i}.post_attention_layernorm"].strategy for i in (0, 1)} == {
        "share"
    }
    assert texts_of_a_step(llama, inputs) == []
    llama.zero_grad()
    assert_same_step(llama, twin, inputs, MODES["fp32"])


def test_undo_after_liger_gives_the_stock_modules_back(llama: Any, inputs: Inputs) -> None:
    types_before = [type(module) for module in llama.modules()]
    patch_model(llama, "exact", example_inputs=inputs)
    for block in llama.model.layers:
        bind(block.input_layernorm, norm_forward, "LigerRMSNorm")
    unpatch_model(llama)
    assert [type(module) for module in llama.modules()] == types_before
    assert texts_of_a_step(llama, inputs) == []


def _liger_model(mode: str) -> Any:
    """A LLaMA on the GPU with Liger's kernels, on the instance or in the classes it is made of."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers import monkey_patch

    torch.manual_seed(1)
    model = build(FAMILY).to("cuda", torch.bfloat16)
    if mode == "instance":
        monkey_patch._apply_liger_kernel_to_instance(model=model)
    else:
        from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP

        config, base = model.config, model.model
        base.norm = _with_weights(LigerRMSNorm(config.hidden_size), base.norm)
        for block in base.layers:
            for name in ("input_layernorm", "post_attention_layernorm"):
                norm = _with_weights(LigerRMSNorm(config.hidden_size), getattr(block, name))
                setattr(block, name, norm)
            block.mlp = _with_weights(LigerSwiGLUMLP(config), block.mlp)
    return model.train()


def _with_weights(new: nn.Module, old: nn.Module) -> nn.Module:
    new.load_state_dict(old.state_dict())
    return new.to("cuda", torch.bfloat16)


@pytest.fixture
def stock_llama() -> Iterator[None]:
    """Liger exchanges names in transformers' file, for every model that is built later."""
    before, forward = dict(vars(modeling_llama)), LlamaForCausalLM.forward
    yield
    vars(modeling_llama).update(before)
    LlamaForCausalLM.forward = forward  # type: ignore[method-assign]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:nothing was patched")  # its kernels are in every site
@pytest.mark.parametrize("mode", ["instance", "classes"])
@pytest.mark.parametrize("config", ["auto", "exact"])
@pytest.mark.usefixtures("stock_llama")
def test_real_liger_before_the_patch_trains_the_same(mode: str, config: str) -> None:
    model = _liger_model(mode)
    twin = copy.deepcopy(model)
    tokens = FAMILY.inputs()["input_ids"].cuda()
    patch_model(model, config)
    report = patch_report(model)
    assert any("run kernels of their own" in note for note in report.notes)
    assert report.saved_after <= report.saved_before
    losses = [m(input_ids=tokens, labels=tokens).loss for m in (model, twin)]
    for loss in losses:
        loss.backward()
    one, two = (float(loss.detach()) for loss in losses)
    assert abs(one - two) <= 2**-8 * abs(two)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        # a bf16 gradient's rounding, a few of them in a row
        error = float(
            (ours.grad.double() - theirs.grad.double()).norm() / theirs.grad.double().norm()
        )
        assert error <= 8 * torch.finfo(torch.bfloat16).eps, (name, error)


@pytest.mark.gpu
@pytest.mark.usefixtures("stock_llama")
def test_real_liger_after_the_patch_is_named() -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers import monkey_patch

    model = build(FAMILY).to("cuda").train()
    patch_model(model, "exact")
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    tokens = FAMILY.inputs()["input_ids"].cuda()
    with pytest.warns(UserWarning, match="got a forward of liger_kernel.*LigerRMSNorm"):
        model(input_ids=tokens, labels=tokens)

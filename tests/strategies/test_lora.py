"""PEFT's LoRA before and after patching: adapters' gradients against an unpatched twin."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, unpatch_model
from tests.support.compiler import Graphs, skipped_where_torch_breaks_the_graph
from tests.support.judge import (
    assert_accurate,
    assert_close,
    assert_near,
    assert_same_outputs,
    assert_same_step,
)
from tests.support.models import FAMILIES, fill_adapters, randomise
from tests.support.saved import saved_storages
from tests.support.step import AUTOCAST, DOUBLE, MODES, cast, in_mode, step, truth_of, twin_of

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
Make = Callable[[str], Any]
NAMES = [
    "llama",
    "timm-vit",
    "bert",
    "timm-swin",
    "gemma",
    "vit",
    "swin-pads",
    "roberta",
    "t5",
    "phi3",
]


def adapt(model: Any, targets: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, **options))
    return fill_adapters(adapted).eval()


@pytest.mark.parametrize(
    ("targets", "mode_name"),
    [
        ("query-value", "autocast"),
        ("linears", "fp32"),
        ("linears", "bf16"),
        ("linears", "autocast"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "timm-vit", "bert", "timm-swin"])
def test_patched_after_peft_trains_the_same(
    name: str, targets: str, mode_name: str, make: Make
) -> None:
    family, mode = FAMILIES[name], MODES[mode_name]
    inputs = in_mode(family.inputs(), mode)
    names = family.query_value if targets == "query-value" else family.linears
    # PEFT itself makes adapters of a bf16 model float32
    model = adapt(cast(make(name), mode.weights), names)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        patched = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
    assert patch_report(patched).patched
    assert_same_step(patched, model, inputs, mode)


@pytest.mark.parametrize("name", NAMES)
def test_auto_after_peft_with_exact_activations(name: str, make: Make) -> None:
    """What auto does to norms and adapters, without its approximate derivatives."""
    config = {"norms": "auto", "activations": "recompute", "linear_inputs": "activation_dtype"}
    family, mode = FAMILIES[name], MODES["fp32"]
    inputs = family.inputs()
    model = adapt(make(name), family.linears)
    patched = patch_model(copy.deepcopy(model), config, example_inputs=inputs)
    assert not patch_report(patched).fold_steps  # adapters must stay valid for the unfolded model
    assert_same_step(patched, twin_of(model, patched), inputs, mode)


@pytest.mark.parametrize("mode_name", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", ["llama", "timm-vit"])
def test_patched_before_peft_trains_the_same(name: str, mode_name: str, make: Make) -> None:
    family, mode = FAMILIES[name], MODES[mode_name]
    inputs = in_mode(family.inputs(), mode)
    plain = cast(make(name), mode.weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        patched = patch_model(copy.deepcopy(plain), "exact", example_inputs=inputs)
    patched, twin = adapt(patched, family.linears), adapt(plain, family.linears)
    assert_same_step(patched, twin, inputs, mode)
    patch_model(patched, "exact", example_inputs=inputs)  # again, with the adapters in sight
    assert_same_step(patched, twin, inputs, mode)
    unpatch_model(patched)
    assert_same_step(patched, twin, inputs, mode)


def test_folded_before_peft_stays_folded_with_a_warning(make: Make) -> None:
    family, mode = FAMILIES["llama"], MODES["fp32"]
    inputs, plain = family.inputs(), make("llama")
    patched = patch_model(copy.deepcopy(plain), {"norms": "fold"}, example_inputs=inputs)
    plain.load_state_dict(patched.state_dict())
    patched, twin = adapt(patched, family.linears), adapt(plain, family.linears)
    with pytest.warns(UserWarning, match="stay folded"):
        unpatch_model(patched)
    assert_same_step(patched, twin, inputs, mode)  # norms that PEFT froze stay frozen


@pytest.mark.parametrize("order", ["peft-first", "patch-first"])
def test_norms_trained_through_modules_to_save(order: str, make: Make) -> None:
    family, mode = FAMILIES["llama"], MODES["fp32"]
    inputs, plain = family.inputs(), make("llama")
    options = {"modules_to_save": ["input_layernorm", "norm"]}
    twin = adapt(copy.deepcopy(plain), family.linears, **options)
    if order == "peft-first":
        patched = adapt(copy.deepcopy(plain), family.linears, **options)
        patch_model(patched, "exact", example_inputs=inputs)
    else:
        patched = patch_model(copy.deepcopy(plain), "exact", example_inputs=inputs)
        patched = adapt(patched, family.linears, **options)
    assert_same_step(patched, twin, inputs, mode)
    with torch.no_grad():
        for model in (patched, twin):
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter += 0.25  # as if trained
    unpatch_model(patched)
    assert {type(m).__name__ for m in patched.modules()} == {
        type(m).__name__ for m in twin.modules()
    }
    assert list(patched.state_dict()) == list(twin.state_dict())
    assert_same_step(patched, twin, inputs, mode)


@pytest.mark.parametrize("mode_name", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", ["llama", "timm-vit"])
def test_dropout_in_adapters_draws_the_same_mask(name: str, mode_name: str, make: Make) -> None:
    """The same random numbers are drawn in the same order, so training steps agree."""
    family, mode = FAMILIES[name], MODES[mode_name]
    inputs = in_mode(family.inputs(), mode)
    model = adapt(cast(make(name), mode.weights), family.linears, lora_dropout=0.3).train()
    for config in ("exact", {"norms": "auto", "activations": "recompute"}):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
            patched = patch_model(copy.deepcopy(model), config, example_inputs=inputs)
        assert_same_step(patched, twin_of(model, patched).train(), inputs, mode)


@pytest.mark.parametrize("preset", ["auto", "paper"])
def test_adapters_in_bf16_err_no_more_than_autocast(preset: str, make: Make) -> None:
    """auto computes float32 adapters in bf16, as autocast would: no worse than autocast's error."""
    family, mode = FAMILIES["llama"], MODES["bf16"]
    inputs = family.inputs()
    model = adapt(cast(make("llama"), torch.bfloat16), family.linears)
    truth = truth_of(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        own = step(model, inputs, mode)
    config = {"norms": "share", "activations": "recompute"}
    config["linear_inputs"] = "activation_dtype" if preset == "auto" else "keep"
    patched = patch_model(copy.deepcopy(model), config, example_inputs=inputs)
    found = step(patched, inputs, mode)
    assert_accurate(found, own, truth, mode)


def test_merging_and_unloading_keeps_the_function(make: Make) -> None:
    family = FAMILIES["llama"]
    inputs = family.inputs()
    patched = patch_model(make("llama"), {"norms": "fold"}, example_inputs=inputs)
    patched = cast(adapt(patched, family.linears), torch.float64)
    before = step(patched, inputs, DOUBLE, backward=False)
    merged = unpatch_model(patched.merge_and_unload())
    after = step(merged, inputs, DOUBLE, backward=False)
    assert_close(after.output, before.output, "logits")
    assert bool((merged.model.layers[0].input_layernorm.weight != 1).any())


def test_several_adapters_and_disabling_them(make: Make) -> None:
    family = FAMILIES["llama"]
    inputs = family.inputs()
    model = adapt(make("llama"), family.linears)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    randomise(model)
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
    for name in ("second", "default"):
        model.set_adapter(name), patched.set_adapter(name)
        assert_same_step(patched, model, inputs, MODES["fp32"])
    with patched.disable_adapter(), model.disable_adapter():
        assert_same_outputs(patched, model, inputs)


def ops_behind(tensor: torch.Tensor) -> set[str]:
    """Names of the autograd nodes from which ``tensor`` was computed."""
    names, pending = set(), [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None:
            names.add(node.name())
            pending.extend(parent for parent, _ in node.next_functions)
    return names


def test_base_and_adapter_are_one_op(make: Make) -> None:
    """No product, scale or sum of its own; a hook on the base layer gets its output and ends that."""
    family = FAMILIES["llama"]
    inputs = family.inputs()
    model = adapt(make("llama").double(), family.linears, lora_alpha=3).double()
    patched = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
    layer = patched.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    seen: list[torch.Tensor] = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.randn(2, 3, layer.base_layer.in_features).double().requires_grad_()
    assert ops_behind(layer(x)) == {"activation_linearBackward", "torch::autograd::AccumulateGrad"}
    assert type(seen[0]) is torch.Tensor
    plain = layer.base_layer(x) + layer.lora_B["default"](layer.lora_A["default"](x)) * 1.5
    assert_close(seen[0], plain, "layer")
    outputs: list[torch.Tensor] = []
    layer.base_layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    y = layer(x)
    assert_close(outputs[0], layer.base_layer(x), "base layer")  # not added to in place
    assert_close(y, plain, "layer")


@pytest.mark.parametrize("mode_name", ["fp32", "autocast"])
def test_two_adapters_at_once_and_a_mixed_batch(mode_name: str, make: Make) -> None:
    family, mode = FAMILIES["llama"], MODES[mode_name]
    inputs = family.inputs()
    model = adapt(make("llama"), family.linears)
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
    randomise(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        patched = patch_model(copy.deepcopy(model), "exact", example_inputs=inputs)
    for one in (model, patched):
        one.base_model.set_adapter(["default", "second"])
    assert_same_step(patched, model, inputs, mode)
    rows = len(inputs["input_ids"])
    names = {"adapter_names": ["default", "second", "__base__"][:rows]}
    exact = copy.deepcopy(model).double()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        logits = [one.eval()(**inputs, **names)[0] for one in (patched, model, exact)]
    assert_near(*logits, mode)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(script_method|should not be inst):DeprecationWarning")
def test_adapters_wider_than_the_model_compile(make: Make) -> None:
    """Their products wait for a cast, which the compiler must see."""
    inputs = FAMILIES["llama"].inputs()
    del inputs["attention_mask"]  # transformers looks into a mask, which breaks its own graph
    model = adapt(make("llama").bfloat16(), ["q_proj", "down_proj"])
    for name, parameter in model.named_parameters():
        assert (parameter.dtype == torch.float32) == ("lora_" in name)
    unpatched, truth = copy.deepcopy(model), truth_of(model, inputs)
    patch_model(model, "exact", example_inputs=inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    with skipped_where_torch_breaks_the_graph(unpatched, inputs):
        found = step(compiled, inputs)
    assert_accurate(found, step(model, inputs), truth, MODES["bf16"])


@pytest.mark.filterwarnings("ignore:.*(script_method|should not be inst):DeprecationWarning")
def test_short_products_of_adapters_are_left_to_the_compiler(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python calls no operator for them, and they save no more than the operator."""
    inputs = FAMILIES["llama"].inputs()
    del inputs["attention_mask"]  # transformers looks into a mask, which breaks its own graph
    model = adapt(make("llama").bfloat16(), ["q_proj", "gate_proj", "down_proj"])
    unpatched, truth = copy.deepcopy(model), truth_of(model, inputs)
    patch_model(model, example_inputs=inputs)
    saved = {}
    for longest in (0, 2**35):
        monkeypatch.setattr("lowmem_patch.functional.compiled.SHORT_PRODUCT", longest)
        graphs = Graphs(partition_fn=min_cut_rematerialization_partition)
        compiled = torch.compile(model, fullgraph=True, backend=graphs.backend)
        with skipped_where_torch_breaks_the_graph(unpatched, inputs):
            _, storages = saved_storages(functools.partial(compiled, **inputs))
            saved[longest] = sum(storages.values())
            found = step(compiled, inputs)
        assert_accurate(found, step(model, inputs), truth, MODES["bf16"])
        names = " ".join(str(node.target) for graph in graphs.made for node in graph.graph.nodes)
        assert ("activation_linear" in names) == (not longest)
    assert saved[2**35] <= saved[0]


class Between(nn.Module):
    """LoRA layers read a sum, a norm's output, or what a sigmoid saves, in float32 also under autocast."""

    def __init__(self, made: str, readers: int) -> None:
        super().__init__()
        self.made, self.norm, self.shift = made, nn.LayerNorm(32), nn.Parameter(torch.randn(32))
        self.readers = nn.ModuleList(nn.Linear(32, 32) for _ in range(readers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        if self.made == "norm":
            x = self.norm(x)[:, 1:]
        elif self.made == "sigmoid":
            x = torch.sigmoid(x)
        return torch.stack([read(x) for read in self.readers]).sum()


@pytest.mark.parametrize(
    ("made", "readers", "low"),
    [("sum", 1, True), ("sum", 3, True), ("norm", 1, False), ("sigmoid", 1, False)],
)
def test_an_input_that_adapters_alone_save_is_saved_in_autocasts_dtype(
    made: str, readers: int, low: bool
) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=r".*readers\.\d", init_lora_weights=False)
    model = get_peft_model(Between(made, readers), config).train()
    model.base_model.model.shift.requires_grad_()
    stock = copy.deepcopy(model)
    x = torch.randn(4, 64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        patch_model(model, "exact", example_inputs=(x,))
    ours, theirs = (step(one, (x,), AUTOCAST, count=True) for one in (model, stock))
    assert ours.saved <= theirs.saved
    patches = [m.__dict__["forward"].args[2] for m in model.modules() if "lora_A" in m._modules]
    assert patches == [low] * readers
    assert_same_step(model, stock, (x,), mode=AUTOCAST)

"""torch.export, torch.jit and ONNX of a patched model: plain ops, which run without this package."""

from __future__ import annotations

import copy
import io
from typing import Any

import peft
import pytest
import timm
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from tests.support.judge import assert_equal_steps, assert_same_outputs
from tests.support.models import FAMILIES, build, randomise
from tests.support.tiers import slow_but
from tests.support.versions import before

MODELS = ["llama", "lora", "bert", "vit"]
CONFIGS: list[Any] = ["exact", {"activations": "codes"}]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    # of transformers, with torch.export
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
]


class First(nn.Module):
    """A model as exporters want it: tensors in, one tensor out."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        if not self.names:
            out: Tensor = self.model(*tensors)
            return out
        first: Tensor = self.model(
            **dict(zip(self.names, tensors, strict=True)), return_dict=False
        )[0]
        return first


def made(name: str) -> tuple[First, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name == "vit":
        model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=3)
        return First(randomise(model), ()), (torch.randn(2, 3, 32, 32),)
    family = FAMILIES["llama" if name == "lora" else name]
    model = build(family)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if name == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    inputs = family.inputs()
    return First(model, tuple(inputs)), tuple(inputs.values())


def patched(name: str, config: Any, train: bool) -> tuple[First, tuple[Tensor, ...]]:
    net, inputs = made(name)
    example = dict(zip(net.names, inputs, strict=True)) if net.names else inputs
    patch_model(net.model, config, example_inputs=example)
    assert patch_report(net.model).patched
    return net.train(train), inputs


CASES = [(name, "exact", False, False) for name in MODELS]
CASES += [(name, CONFIGS[1], True, True) for name in MODELS]
CASES += [("llama", "exact", False, True), ("vit", "exact", True, False)]


@pytest.mark.parametrize(
    ("name", "config", "train", "strict"),
    slow_but(CASES, *(c for c in CASES if not c[3] or c[0] == "vit")),
)
def test_exported_graph_is_plain_and_computes_the_same(
    name: str, config: Any, train: bool, strict: bool
) -> None:
    net, inputs = patched(name, config, train)
    program = torch.export.export(net, inputs, strict=strict)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("aten.linear" in target for target in targets)
    assert not [target for target in targets if "lowmem_patch" in target or "checkpoint" in target]
    assert_same_outputs(program.module(), net, inputs)


def skip_what_jit_cannot(name: str) -> None:
    if name != "vit" and before("transformers", "5.7"):
        pytest.skip("torch.jit does not trace the masks of transformers 5.6, patched or not")


@pytest.mark.parametrize("config", CONFIGS, ids=["exact", "codes"])
@pytest.mark.parametrize("name", MODELS)
def test_jit_traced_graph_is_plain_and_computes_the_same(name: str, config: Any) -> None:
    skip_what_jit_cannot(name)
    net, inputs = patched(name, config, train=False)
    traced: Any = torch.jit.trace(net, inputs, check_trace=False)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "prim::PythonOp" not in kinds
    assert all(kind.startswith(("aten::", "prim::")) for kind in kinds)
    assert_same_outputs(traced, net, inputs)


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_onnx_knows_every_op(name: str, dynamo: bool) -> None:
    pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    net, inputs = patched(name, "exact", train=False)
    written = io.BytesIO()
    if dynamo:
        program: Any = torch.onnx.export(net, inputs, dynamo=True, verbose=False)
        assert not [node for node in program.model.graph if "lowmem" in node.domain]
    else:
        torch.onnx.export(net, inputs, written, dynamo=False)
        assert written.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_model_trains_as_before_once_it_was_exported(name: str) -> None:
    skip_what_jit_cannot(name)
    net, inputs = patched(name, "exact", train=True)
    twin = copy.deepcopy(net)
    torch.export.export(net, inputs, strict=False)
    torch.jit.trace(net.eval(), inputs, check_trace=False)
    net.train()
    assert assert_equal_steps(net, twin, inputs) == 0

"""What people try first with a model: each call does what they meant, or one sentence says what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.errors import BudgetError, NothingToPatchError, PatchError, TraceError
from lowmem_patch.planning.report import find_records
from tests.support.models import llama
from tests.support.toys import Toy, batch, gated

TOKENS = torch.arange(4, 12)[None]
# as torch's own compiler meets them, while it looks at tensors
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
)
FIRST = r"patch the model first and compile it after that.*torch\.compile\(patch_model\(model\)\)"


@pytest.mark.parametrize("given", [None, {"input_ids": TOKENS}], ids=["config", "given"])
def test_a_compiled_model_is_patched_before(given: Any) -> None:
    compiled: Any = torch.compile(llama())
    for call in (patch_model, plan_patch):
        with pytest.raises(PatchError, match=f"wraps this LlamaForCausalLM already.*{FIRST}"):
            call(compiled, example_inputs=given)
    assert not find_records(compiled)


def test_a_compiled_block_is_named() -> None:
    model = llama()
    model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(PatchError, match=f"LlamaDecoderLayer in model.layers.1 already.*{FIRST}"):
        patch_model(model)
    assert not find_records(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own: a FutureWarning since 2.15
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")  # likewise
def test_a_scripted_model_and_one_without_shapes_are_refused() -> None:
    layers: Any = [nn.LazyLinear(8), nn.GELU(), nn.Linear(8, 4)]
    lazy, x = nn.Sequential(*layers), torch.randn(3, 5)
    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(5, 8), *layers[1:]))
    traced: Any = torch.jit.trace(nn.Sequential(nn.Linear(5, 8), *layers[1:]), x)
    refused = {lazy: "0.weight has no shape"}
    refused |= {scripted: "torch.jit.script compiled", traced: "torch.jit.trace compiled"}
    for model, said in refused.items():
        for call in (patch_model, plan_patch):
            with pytest.raises(PatchError, match=said):
                call(model, example_inputs=x)
        assert not find_records(model)
        model(x).sum().backward()
    assert patch_report(patch_model(lazy, example_inputs=x)).sites


def test_a_patched_model_that_was_compiled_then_is_left_as_it_is() -> None:
    patched = patch_model(llama(), "exact")
    compiled: Any = torch.compile(patched)
    assert patch_model(compiled, "exact") is compiled
    assert patch_report(compiled) == patch_report(patched)


@pytest.mark.parametrize("order", ["patched first", "compiled first"])
def test_blocks_that_compile_in_place_run_patched(order: str) -> None:
    graphs: list[bool] = []
    run = lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(any("lowmem_patch" in str(node.target) for node in graph.graph.nodes))
        return run(graph, inputs)

    model = llama().train()
    if order == "patched first":
        patch_model(model, "exact")
    for block in model.model.layers:
        block.compile(backend=backend)
    if order != "patched first":
        patch_model(model, "exact")
    model(input_ids=TOKENS).logits.mean().backward()
    assert graphs and all(graphs)


def test_blocks_that_are_wrapped_after_the_patch_are_no_change() -> None:
    model = patch_model(llama().train(), "exact")
    for place, block in enumerate(model.model.layers):
        model.model.layers[place] = torch.compile(block, backend="eager")
    model(input_ids=TOKENS).logits.mean().backward()  # without a warning
    assert not any("since the patch" in note for note in patch_report(model).notes)


def test_a_number_without_a_unit_is_of_bytes() -> None:
    with pytest.raises(BudgetError, match=r'fit=24 is 24 bytes: did you mean fit="24GiB"\?'):
        plan_patch(Toy(gated), fit=24, example_inputs=batch())
    with pytest.raises(BudgetError) as error:
        plan_patch(Toy(gated), fit="24B", example_inputs=batch())
    assert "number of bytes" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [[TOKENS], [{"input_ids": TOKENS}], "a text", 4, iter([TOKENS]), {1, 2}],
    ids=lambda wrong: type(wrong).__name__,
)
def test_forms_of_example_inputs_are_named(wrong: Any) -> None:
    forms = (
        rf"a mapping of tensors .*, a tuple .*, or one tensor. This is a {type(wrong).__name__}:"
    )
    with pytest.raises(TraceError, match=forms):
        patch_model(llama(), example_inputs=wrong)


def test_that_nothing_trains_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="no parameter trains.*get_peft_model.*requires_grad_"):
        patch_model(model)
    report = patch_report(model)
    assert any("no parameter trains" in note for note in report.notes)
    monkeypatch.setenv("COLUMNS", "200")
    assert "sites patched, but no parameter trains" in str(report).splitlines()[0]
    with pytest.raises(NothingToPatchError, match="no parameter trains"):
        patch_model(llama().requires_grad_(False), strict=True)
    assert before.keys() == model.state_dict().keys()
    model.requires_grad_(True)
    assert patch_report(patch_model(model)).saved_after  # without a warning


def test_a_frozen_part_whose_input_has_a_gradient_is_patched_without_a_warning() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

        def forward(self, x: torch.Tensor) -> Any:
            return self.act(self.up(self.norm(x)))

    part = patch_model(
        Part().requires_grad_(False), example_inputs=torch.ones(2, 8).requires_grad_()
    )
    assert patch_report(part).saved_before


@pytest.mark.parametrize(
    ("surroundings", "said"),
    [(torch.inference_mode, "inference_mode"), (lambda: torch.device("meta"), "default device")],
    ids=["inference mode", "meta"],
)
def test_where_no_tensor_can_tell_anything(surroundings: Any, said: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(2, 4)
    for call in (patch_model, plan_patch):
        with pytest.raises(PatchError, match=said), surroundings():
            call(net, "exact", example_inputs=x)
    with torch.no_grad():
        assert patch_report(patch_model(net, "exact", example_inputs=x)).patched

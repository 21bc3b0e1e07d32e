"""QLoRA: a LoRA layer of bitsandbytes' 4 bits is one op, which unpacks its weight for each product."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from lowmem_patch.errors import DoubleBackwardError
from lowmem_patch.nn import adapters
from tests.support.judge import assert_accurate, assert_equal
from tests.support.models import llama_of
from tests.support.quantised import qlora, with_whole_weights
from tests.support.step import AUTOCAST, BF16, DOUBLE, FP32, Mode, step

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
bitsandbytes = pytest.importorskip("bitsandbytes")
from peft.tuners.lora import bnb  # noqa: E402 - its layers are there where bitsandbytes is

LAYERS = 7 * 2


def tokens(rows: int = 2, length: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(3, 60, (rows, length), generator=generator)}


def small(mode: Mode = FP32, dropout: float = 0.0, compute: Any = "mode", **sizes: Any) -> Any:
    """A LLaMA of 4 bits with adapters, whose Linears multiply in the dtype of ``mode``."""
    model = qlora("4bit", mode.weights, num_hidden_layers=2, **sizes)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif type(module).__name__ == "Linear4bit" and not hasattr(module, "base_layer"):
            module.compute_dtype = (mode.autocast or mode.weights) if compute == "mode" else compute
            module.compute_type_is_set = module.compute_dtype is not None
    return model


def patched(model: Any, preset: str = "auto", mode: Mode = FP32) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        return patch_model(copy.deepcopy(model), preset, example_inputs=tokens())


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each layer that ran as one op."""
    ran: list[int] = []
    computed = adapters._computed
    monkeypatch.setattr(adapters, "_computed", lambda *a: ran.append(1) or computed(*a))
    return ran


def test_peft_computes_what_the_op_stands_for() -> None:
    assert adapters.adds_products(bnb.Linear4bit.forward)
    assert not adapters.adds_products(bnb.Linear8bitLt.forward)


@pytest.mark.parametrize("preset", ["exact", "auto"])
@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
def test_a_step_is_as_accurate_as_the_unpatched_one(
    mode: Mode, preset: str, ops: list[int]
) -> None:
    model = small(mode)
    ours = patched(model, preset, mode)
    del ops[:]
    found, own = step(ours, tokens(), mode), step(model, tokens(), mode)
    # in `exact` float32 adapters of a bf16 model compute as PEFT does
    assert len(ops) == (0 if mode is BF16 and preset == "exact" else LAYERS)
    assert_accurate(found, own, step(with_whole_weights(model), tokens(), DOUBLE), mode)


@pytest.mark.gpu
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
def test_a_step_on_a_gpu_is_as_accurate(mode: Mode, again: bool, ops: list[int]) -> None:
    model = small(mode).cuda()
    given = {name: tensor.cuda() for name, tensor in tokens(4, 64).items()}
    truth = step(with_whole_weights(model).cuda(), given, DOUBLE)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    with torch.autocast("cuda", torch.bfloat16, enabled=mode.autocast is not None):
        ours = patch_model(copy.deepcopy(model), "auto", example_inputs=given)
    del ops[:]
    found, own = step(ours.train(), given, mode), step(model.train(), given, mode)
    assert len(ops) == (2 if again else 1) * LAYERS
    assert_accurate(found, own, truth, mode)


def test_no_unpacked_weight_is_saved_and_no_input_twice() -> None:
    model = small(BF16)
    ours, sizes = patched(model, mode=BF16), []

    def noted(tensor: Tensor) -> Tensor:
        sizes.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        ours(**tokens())
    config = model.config
    weights = {(config.intermediate_size, config.hidden_size), (config.hidden_size,) * 2}
    assert sizes and not any(shape in weights for shape, _ in sizes)
    assert not any(dtype == torch.uint8 for _, dtype in sizes)
    counted = []
    for one in (model, ours):
        with saved_bytes(one) as saved:
            one(**tokens())
        counted.append(saved.activations)
    assert counted[1] < 0.5 * counted[0]


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_layer_returns_the_dtype_of_its_input_under_autocast(given: torch.dtype) -> None:
    model = small(AUTOCAST)
    ours = patched(model, mode=AUTOCAST)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    x = torch.randn(2, 5, model.config.hidden_size, dtype=given)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (one.get_submodule(name)(x).dtype for one in (ours, model))
    assert found == expected == given


def _other_dtype(layer: Any) -> None:
    layer.base_layer.compute_dtype = torch.bfloat16


def _watched(layer: Any) -> None:
    layer.base_layer.register_forward_hook(lambda module, given, output: 2 * output)


def _of_a_cpu(layer: Any) -> None:
    layer.base_layer.weight.quant_state.packing_format_for_cpu = None
    layer.base_layer.__class__ = type("Linear4bit", (type(layer.base_layer),), {})


def _disabled(layer: Any) -> None:
    layer.enable_adapters(False)


@pytest.mark.parametrize("change", [_other_dtype, _watched, _of_a_cpu, _disabled])
def test_any_other_layer_is_left_to_its_class(
    change: Callable[[Any], None], ops: list[int]
) -> None:
    model = small()
    ours = patched(model)
    name = "base_model.model.model.layers.0.mlp.down_proj"
    layers = [one.get_submodule(name) for one in (ours, model)]
    x = torch.randn(2, 5, model.config.intermediate_size, requires_grad=True)
    del ops[:]
    layers[0](x)
    assert len(ops) == 1
    for layer in layers:
        change(layer)
    found, expected = (layer(x) for layer in layers)
    assert len(ops) == 1 and torch.equal(found, expected)


def test_the_report_names_layers_whose_linear_has_another_dtype() -> None:
    notes = " ".join(patch_report(patched(small(BF16, compute=torch.float32), mode=BF16)).notes)
    assert f"{LAYERS} of them run base and adapter one after the other" in notes
    assert "multiplies bfloat16 inputs in float32 (bnb_4bit_compute_dtype)" in notes
    for mode in (FP32, BF16, AUTOCAST):
        notes = " ".join(patch_report(patched(small(mode), mode=mode)).notes)
        assert "one after the other" not in notes


def test_a_linear_without_a_dtype_takes_that_of_its_input(ops: list[int]) -> None:
    model = small(BF16, compute=None)
    ours = patched(model, mode=BF16)
    del ops[:]
    found, own = step(ours, tokens(), BF16), step(model, tokens(), BF16)
    assert len(ops) == LAYERS
    assert_accurate(found, own, step(with_whole_weights(model), tokens(), DOUBLE), BF16)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_that_run_again_give_the_same(
    dropout: float, reentrant: bool, ops: list[int]
) -> None:
    model = small(dropout=dropout)
    model.enable_input_require_grads()
    once = patched(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = patched(model)
    del ops[:]
    expected = step(once.train(), tokens())
    assert_equal(step(again.train(), tokens()), expected)
    runs = 2 if reentrant else 3  # the first run of a reentrant checkpoint has no gradient
    assert len(ops) == (0 if dropout else runs * LAYERS)  # a dropout is left to the class


def test_a_gamma_that_comes_near_0_trains(ops: list[int]) -> None:
    """The norm saves z there, and the layers compute its output again."""
    model = small()
    for name, parameter in model.named_parameters():
        if name.endswith("input_layernorm.weight"):
            parameter.requires_grad_(True)
            parameter.data[::3] = 0.0
    ours = patched(model)
    del ops[:]
    found, own = step(ours, tokens()), step(model, tokens())
    assert len(ops) == LAYERS and any("layernorm" in name for name in found.gradients)
    assert_accurate(found, own, step(with_whole_weights(model), tokens(), DOUBLE))


def test_frozen_adapters_pass_the_gradient_on() -> None:
    model = small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name and "lora_" in name)
    found, own = step(patched(model), tokens()), step(model, tokens())
    assert found.gradients
    assert_accurate(found, own, step(with_whole_weights(model), tokens(), DOUBLE))


def test_a_second_derivative_is_an_error() -> None:
    ours = patched(small())
    loss = ours(**tokens()).logits.float().square().mean()
    trained = [p for p in ours.parameters() if p.requires_grad]
    with pytest.raises(DoubleBackwardError, match="no second derivative"):
        torch.autograd.grad(loss, trained, create_graph=True)


def test_copies_run_on_their_own_weights_and_undoing_ends_it(ops: list[int]) -> None:
    model = small()
    ours = patched(model)
    before = step(ours, tokens())
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    del ops[:]
    assert_equal(step(twin, tokens()), before)
    assert len(ops) == LAYERS
    assert_equal(step(unpatch_model(twin), tokens()), step(model, tokens()))
    assert len(ops) == LAYERS


def test_without_gradients_the_class_computes(ops: list[int]) -> None:
    ours = patched(small())
    del ops[:]
    with torch.no_grad():
        ours(**tokens())
    assert not ops


def test_a_weight_that_is_unpacked_to_a_wider_dtype_is_left_to_the_class(ops: list[int]) -> None:
    """Versions of bitsandbytes differ there: some round the weight on the way, others do not."""
    model = small(BF16, compute=torch.float32)
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()  # as prepare_model_for_kbit_training
    ours = patched(model, "exact")
    del ops[:]
    found, own = step(ours, tokens(), FP32), step(model, tokens(), FP32)
    assert not ops
    assert_accurate(found, own, step(with_whole_weights(model), tokens(), DOUBLE), FP32)


def test_the_class_casts_a_bias_and_the_op_runs_then(ops: list[int]) -> None:
    """bitsandbytes does so in place, and an optimizer makes its state for what it finds after one step."""
    model = small(AUTOCAST, attention_bias=True)
    ours = patched(model, mode=AUTOCAST)
    biases = {name for name, p in ours.named_parameters() if name.endswith("proj.base_layer.bias")}
    assert biases
    del ops[:]
    step(ours, tokens(), AUTOCAST)
    assert len(ops) == LAYERS - 2 * 4
    assert {ours.get_parameter(name).dtype for name in biases} == {torch.bfloat16}
    del ops[:]
    found, own = step(ours, tokens(), AUTOCAST), step(model, tokens(), AUTOCAST)
    assert len(ops) == LAYERS
    assert_accurate(found, own, step(with_whole_weights(model), tokens(), DOUBLE), AUTOCAST)


def test_other_memory_for_a_weight_leaves_a_backward_under_way_alone() -> None:
    model = small()
    given = []
    for other in (False, True):
        ours = patched(model)
        loss = ours(**tokens()).logits.square().mean()
        for module in ours.modules():
            if (
                other
                and type(module).__name__ == "Linear4bit"
                and not hasattr(module, "base_layer")
            ):
                module.weight.data = torch.zeros_like(module.weight.data)
        loss.backward()
        given.append([p.grad for p in ours.parameters() if p.grad is not None])
    assert given[0] and all(map(torch.equal, *given))


@pytest.mark.parametrize("saves", ["mm", "addmm", "addmm_"])
def test_selective_checkpoint_may_save_the_products(saves: str) -> None:
    model = small(attention_bias=True)
    model.enable_input_require_grads()
    once = patched(model)
    aten = torch.ops.aten
    kept = [getattr(aten, name).default for name in ("mm", "addmm", "addmm_", "bmm")]
    kept = kept[: kept.index(getattr(aten, saves).default) + 1]

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(kept)

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    again = patched(model)
    found, expected = step(again.train(), tokens()), step(once.train(), tokens())
    truth = step(with_whole_weights(once), tokens(), DOUBLE)
    assert_accurate(found, expected, truth)


def test_a_head_of_four_bits_with_an_adapter_computes_its_logits(ops: list[int]) -> None:
    torch.manual_seed(0)
    model = llama_of(num_hidden_layers=1)
    own = model.lm_head
    head = bitsandbytes.nn.Linear4bit(own.in_features, own.out_features, False, quant_type="nf4")
    head.weight = bitsandbytes.nn.Params4bit(own.weight.data, requires_grad=False, quant_type="nf4")
    model.lm_head = head
    model.to("cpu").requires_grad_(False)
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = get_peft_model(model, config).train()
    ours = patched(model)
    del ops[:]
    found, expected = step(ours, tokens()), step(model, tokens())
    assert len(ops) == 1
    assert_accurate(found, expected, step(with_whole_weights(model), tokens(), DOUBLE))

"""Dropout in front of a Linear: the unpatched model's numbers, and one bit kept for each element."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from tests.support.configs import RECOMPUTE
from tests.support.judge import assert_accurate, assert_equal, assert_equal_steps, assert_same_step
from tests.support.models import FAMILIES, build
from tests.support.step import MODES, cast, in_mode, step, truth_of
from tests.support.toys import ROWS, WIDTH, rows

# PEFT reads a name that transformers has since deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
P = 0.1


def lora(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = {"r": 2, "target_modules": family.linears, "lora_dropout": P}
    config |= {"init_lora_weights": False}
    return get_peft_model(cast(build(family), dtype), LoraConfig(**{**config, **options})).train()


@pytest.mark.parametrize("mode_name", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", ["llama", "timm-vit", "bert", "phi3"])
def test_adapters_with_dropout_keep_every_bit(name: str, mode_name: str) -> None:
    mode, config = MODES[mode_name], dict(RECOMPUTE)
    if mode_name != "fp32" and name in ("llama", "phi3"):
        config["activations"] = "keep"  # our gated product rounds less often
    model, inputs = lora(name, mode.weights), in_mode(FAMILIES[name].inputs(), mode)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode_name == "autocast"):
        patch_model(model, config, example_inputs=inputs)
    assert assert_equal_steps(model, twin, inputs, mode_name == "autocast") > 0
    unpatch_model(model)
    assert assert_equal_steps(model, twin, inputs, mode_name == "autocast") == 0


@pytest.mark.parametrize("p", [0.0, P])
def test_without_training_or_with_p_0_no_bits_are_kept(p: float) -> None:
    inputs = FAMILIES["llama"].inputs()
    model, plain = lora("llama", lora_dropout=p), lora("llama", lora_dropout=0.0)
    truth = truth_of(copy.deepcopy(plain).eval(), inputs)
    for one in (model, plain):
        patch_model(one, "exact", example_inputs=inputs)
        one.eval()
    found, expected = (step(one, inputs, count=True) for one in (model, plain))
    assert found.saved == expected.saved
    # planned with a dropout, base and adapter run one after the other, and so do layers of one input: sums
    # in another order
    assert_accurate(found, expected, truth)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_mask_again(reentrant: bool) -> None:
    inputs = FAMILIES["llama"].inputs()
    model = lora("llama")
    model.enable_input_require_grads()
    twin = copy.deepcopy(model)
    patch_model(model, RECOMPUTE, example_inputs=inputs)
    for one in (model, twin):
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal_steps(model, twin, inputs)


def test_several_adapters_with_dropouts_of_their_own() -> None:
    inputs = FAMILIES["llama"].inputs()
    model = lora("llama")
    for name, p, targets in (("second", 0.4, ["q_proj", "down_proj"]), ("third", 0.0, ["q_proj"])):
        options = {"target_modules": targets, "init_lora_weights": False}
        model.add_adapter(name, LoraConfig(r=3, lora_dropout=p, **options))
    model.base_model.set_adapter(["default", "second", "third"])
    twin = copy.deepcopy(model)
    patch_model(model, RECOMPUTE, example_inputs=inputs)
    assert assert_equal_steps(model, twin, inputs) > 0
    for one in (model, twin):
        one.base_model.set_adapter(["second"])
    assert_equal_steps(model, twin, inputs)
    with model.disable_adapter(), saved_bytes(model) as saved:
        model(**inputs)
    assert not any(item.dtype == torch.uint8 for item in saved.storages)
    model.merge_adapter(), twin.merge_adapter()
    with saved_bytes(model) as saved:
        merged = model(**inputs)[0]
    assert torch.equal(merged, twin(**inputs)[0])
    assert not any(item.dtype == torch.uint8 for item in saved.storages)


class Rows(nn.Module):
    """Two Linears that adapters wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x))


def adapted(**options: Any) -> tuple[Any, Any]:
    """A patched model and its twin."""
    torch.manual_seed(0)
    config = {"r": 2, "lora_dropout": 0.25, "init_lora_weights": False, **options}
    model = get_peft_model(Rows(), LoraConfig(target_modules=["enter", "leave"], **config)).train()
    return model, copy.deepcopy(model)


def patch_rows(model: Any, **config: Any) -> Any:
    return patch_model(model, {**RECOMPUTE, **config}, example_inputs=rows())


@pytest.mark.filterwarnings("ignore:nothing was patched")
def test_saved_bytes_of_adapters_by_hand() -> None:
    model, twin = adapted()
    patch_rows(model)
    report = patch_report(model)
    note = "2 of them keep one bit more for each element of it: the mask of their dropout of 0.25"
    assert note in report.notes
    assert assert_equal_steps(model, twin, rows()) == report.saved_before - report.saved_after
    x, bits, low = ROWS * WIDTH * 4, ROWS * WIDTH // 8, ROWS * 2 * 4
    assert report.saved_after == 2 * (x + bits + low) == report.floor
    # torch's own: what is dropped, and on the CPU the mask as floats; the first x has no gradient
    assert report.saved_before == 3 * x + 2 * low


def test_auto_draws_and_computes_in_the_activations_dtype() -> None:
    """A float32 adapter on a bf16 model is what an adapter in bf16 would be."""
    config = {**RECOMPUTE, "activations": "keep", "linear_inputs": "activation_dtype"}
    inputs = FAMILIES["llama"].inputs()
    model = lora("llama", torch.bfloat16)
    twin = cast(copy.deepcopy(model), torch.bfloat16)
    assert any(p.dtype == torch.float32 for p in model.parameters())
    patch_model(model, config, example_inputs=inputs)
    found, expected = step(model, inputs), step(twin, inputs)
    as_stored = {n: g.to(found.gradients[n].dtype) for n, g in expected.gradients.items()}
    assert_equal(found, expected._replace(gradients=as_stored))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:nothing was patched")
def test_a_gpu_draws_and_saves_the_same_mask() -> None:
    """The mask that the fused kernel draws; torch keeps it in bytes there."""
    model, _ = adapted()
    model, inputs = model.cuda(), rows().cuda()
    twin = copy.deepcopy(model)
    patch_model(model, RECOMPUTE, example_inputs=inputs)
    found, expected = (step(one, inputs, count=True) for one in (model, twin))
    # float64 draws another mask there: torch's own defaults are the measure
    torch.testing.assert_close(found.output, expected.output)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)
    before, after = expected.saved, found.saved
    report = patch_report(model)
    assert (report.saved_before, report.saved_after) == (before, after)
    x, mask, low = ROWS * WIDTH * 4, ROWS * WIDTH, ROWS * 2 * 4
    assert (before, after) == (2 * (x + low) + mask, 2 * (x + low + mask // 8))


class Own(nn.Module):
    """A dropout as somebody else may write it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


DROPOUTS: dict[str, Callable[[Any], Any]] = {
    "functional": lambda x: F.dropout(x, 0.3),
    "positional": lambda x: F.dropout(x, 0.3, True, False),
    "torch": lambda x: torch.dropout(x, 0.3, train=True),
    "in place": lambda x: F.dropout(x, 0.3, inplace=True),
    "all": lambda x: F.dropout(x, 1.0),
    "native": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature": lambda x: F.dropout1d(x[None], 0.3)[0],
    "twice": lambda x: F.dropout(F.dropout(x, 0.3), 0.2),
    "scaled": lambda x: F.dropout(x, 0.3) * 2 + x,
    "moved": lambda x: F.dropout(x, 0.3).view(2, 5, WIDTH).flatten(0, 1),
    "turned": lambda x: F.dropout(x.t().contiguous().t(), 0.3),
    "cast": lambda x: F.dropout(x.to(torch.bfloat16).float(), 0.3),
    "double": lambda x: F.dropout(x.to(torch.float64), 0.3).float(),
}
KEEPS_BITS = {"functional", "positional", "torch", "twice", "scaled", "moved"}


@pytest.mark.filterwarnings("ignore:nothing was patched")
@pytest.mark.parametrize("name", DROPOUTS)
def test_any_other_dropout_is_right(name: str) -> None:
    model, _ = adapted()
    for layer in (model.base_model.model.enter, model.base_model.model.leave):
        layer.lora_dropout["default"] = Own(DROPOUTS[name])
    twin = copy.deepcopy(model)
    patch_rows(model)
    saved = assert_equal_steps(model, twin, rows())
    kept = {item.bytes for item in _saved(model).storages if item.dtype == torch.uint8}
    assert kept == ({ROWS * WIDTH // 8} if name in KEEPS_BITS else set())
    assert saved > 0 if name in KEEPS_BITS else saved >= 0


@pytest.mark.filterwarnings("ignore:nothing was patched")
def test_an_idle_dropout_leaves_one_product() -> None:
    """Base and adapter are added in the order of that op, which is another one than PEFT's."""
    model, _ = adapted()
    for layer in (model.base_model.model.enter, model.base_model.model.leave):
        layer.lora_dropout["default"] = Own(lambda x: torch.dropout(x, 0.3, train=False))
    twin = copy.deepcopy(model)
    patch_rows(model)
    assert_same_step(model, twin, rows())
    assert step(model, rows(), count=True).saved <= step(twin, rows(), count=True).saved


def _saved(model: Any) -> Any:
    with saved_bytes(model) as saved:
        model(rows())
    return saved


def _doubles(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, a, output: output * 2)


def _doubles_gradient(module: nn.Module) -> None:
    module.register_forward_hook(
        lambda m, a, output: output.register_hook(lambda g: 2 * g) and None
    )


def _writes_result(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, a, output: output.add_(1))


def _writes_input(module: nn.Module) -> None:
    def hook(m: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            args[0].mul_(2.0)

    module.register_forward_hook(hook)


@pytest.mark.filterwarnings("ignore:nothing was patched")
@pytest.mark.parametrize("attach", [_doubles, _doubles_gradient, _writes_result, _writes_input])
def test_hooks_on_the_dropout_act_as_unpatched(attach: Callable[[nn.Module], None]) -> None:
    model, twin = adapted()
    patch_rows(model)
    for one in (model, twin):
        attach(one.base_model.model.leave.lora_dropout["default"])
    assert_equal_steps(model, twin, rows())


# compiled


@pytest.mark.filterwarnings("ignore:.*(script_method|should not be inst):DeprecationWarning")
@pytest.mark.filterwarnings("ignore:nothing was patched")
@pytest.mark.parametrize("preset", ["exact", "auto"])
def test_compiled_models_draw_as_torch_does(preset: str) -> None:
    model, twin = adapted()
    patch_model(model, preset, example_inputs=rows())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_same_step(compiled, twin, rows())

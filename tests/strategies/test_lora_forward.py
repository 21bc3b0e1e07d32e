"""The forward that a patched LoRA layer has: one op in the common case, and the class's in any other."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.nn import adapters, own
from lowmem_patch.nn.deferred import Deferred
from tests.support.judge import assert_near, assert_same_step
from tests.support.step import DOUBLE, FP32, step
from tests.support.toys import Around

WIDTH, RANK = 16, 4
Change = Callable[[Any], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.v(x)


def config(**options: Any) -> LoraConfig:
    return LoraConfig(r=RANK, target_modules=["q", "v"], init_lora_weights=False, **options)


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(Net(), config(**options)).train()


def data() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(4))


def patched(model: Any) -> Any:
    return patch_model(model, "exact", example_inputs=data())


def forwards(model: nn.Module) -> list[Any]:
    return [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each Linear inside a layer that runs as a module of its own."""
    ran: list[int] = []
    forward = nn.Linear.forward

    def counted(self: nn.Linear, input: Tensor) -> Tensor:
        ran.append(1)
        return forward(self, input)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    # else it would be another forward since the patch, which is run
    monkeypatch.setattr(own, "_OF_LINEAR", counted)
    return ran


def assert_same(model: Any, twin: Any) -> None:
    assert_same_step(model, twin, data().requires_grad_())


def runs_as_one(model: Any, parts: list[int]) -> bool:
    del parts[:]
    model(data())
    return not parts


def test_peft_computes_what_one_op_stands_for() -> None:
    assert adapters.adds_products(lora.Linear.forward)
    assert not adapters.adds_products(lora.Embedding.forward)


def test_the_common_case_is_one_op_and_no_modules_call(
    parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    ops: list[int] = []
    op = adapters.recast_linear
    for module in ("adapters", "stored"):
        name = f"lowmem_patch.nn.{module}.recast_linear"
        monkeypatch.setattr(name, lambda *arguments: ops.append(1) or op(*arguments))
    assert runs_as_one(model, parts) and len(ops) == 2
    assert_same(model, twin)
    model.eval()
    assert runs_as_one(model, parts)


def test_several_adapters_and_one_added_after_the_patch(parts: list[int]) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    for one in (model, twin):
        torch.manual_seed(1)
        one.add_adapter("second", config(lora_alpha=3))
    for active in ("second", ["default", "second"], ["second", "default"]):
        for one in (model, twin):
            one.base_model.set_adapter(active)
        assert runs_as_one(model, parts), active
        assert_same(model, twin)
    for one in (model, twin):
        one.delete_adapter("default")
    assert runs_as_one(model, parts)
    assert_same(model, twin)
    unloaded, plain = (one.merge_and_unload() for one in (model, twin))
    assert not forwards(unpatch_model(unloaded))
    torch.testing.assert_close(unloaded(data()), plain(data()))


def _part(name: str, attach: Change) -> Change:
    return lambda model: attach(model.get_submodule(f"base_model.model.q{name}"))


def _own_forward(module: nn.Module) -> None:
    module.forward = functools.partial(_twice, module)  # type: ignore[method-assign]


def _twice(module: nn.Module, x: Tensor) -> Any:
    return 2 * type(module).forward(module, x)


def _doubles(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: 2 * output)


def _doubles_input(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def _doubles_gradient(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))


def _doubles_gradient_first(module: nn.Module) -> None:
    module.register_full_backward_pre_hook(lambda module, outputs: (2 * outputs[0],))


def _adapter_with_dora(model: Any) -> None:
    torch.manual_seed(1)
    model.add_adapter("second", config(use_dora=True))
    model.base_model.set_adapter(["default", "second"])


def _scales_by_a_tensor(module: Any) -> None:
    module.scaling["default"] = torch.tensor(1.5)


_HOOKS = [_doubles, _doubles_input, _doubles_gradient, _doubles_gradient_first, _own_forward]
_PARTS = [".base_layer", ".lora_A.default", ".lora_B.default", ".lora_dropout.default"]


@pytest.mark.parametrize(
    "change",
    [
        *(_part(name, hook) for name in _PARTS for hook in _HOOKS),
        *(_part("", hook) for hook in (_doubles_gradient, _doubles_gradient_first)),
        _part("", _scales_by_a_tensor),
        lambda model: model.merge_adapter(),
        lambda model: model.base_model.disable_adapter_layers(),
        _adapter_with_dora,
    ],
)
def test_any_other_case_is_left_to_the_class(change: Change, parts: list[int]) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    change(model), change(twin)
    assert not runs_as_one(model, parts)
    if any(p.requires_grad for p in model.parameters()):
        assert_same(model, twin)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"lora_bias": True}])
def test_adapters_that_compute_more_are_left_to_the_class(
    options: dict[str, Any], parts: list[int]
) -> None:
    model = adapted(**options)
    twin = copy.deepcopy(model)
    patched(model)
    assert not runs_as_one(model, parts)
    assert_same(model, twin)
    model.eval(), twin.eval()
    assert runs_as_one(model, parts) == ("lora_dropout" in options)  # which passes now
    assert_same(model, twin)


def test_other_dtypes_arguments_and_no_gradient(parts: list[int]) -> None:
    model = adapted()
    layer = patched(model).base_model.model.q
    wanted = layer(data())
    names = {"adapter_names": ["default", "default"]}
    for found in (layer(x=data()), layer(data(), **names)):
        torch.testing.assert_close(found, wanted)
    assert parts
    for context in (torch.no_grad, torch.inference_mode):
        del parts[:]
        with context():
            torch.testing.assert_close(layer(data()), wanted)
        assert len(parts) == 3
    with pytest.raises(RuntimeError, match="dtype"):
        layer.base_layer.bfloat16()
        layer(data())


def _linear(result: Any) -> Any:
    """A hook of all modules that acts on Linears."""
    return lambda module, *given: result(*given) if type(module) is nn.Linear else None


_OF_ALL = {
    "forward": lambda args, output: 2 * output,
    "forward_pre": lambda args: (2 * args[0],),
    "full_backward": lambda inputs, outputs: (2 * inputs[0],),
    "full_backward_pre": lambda outputs: (2 * outputs[0],),
}


@pytest.mark.parametrize("kind", _OF_ALL)
def test_hooks_of_all_modules_see_the_parts(kind: str, parts: list[int]) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(0)
    model: Any = get_peft_model(
        plain,  # type: ignore[arg-type]
        LoraConfig(r=RANK, target_modules=["0", "2"], init_lora_weights=False),
    )
    twin = copy.deepcopy(model)
    patched(model)
    hook = getattr(nn.modules.module, f"register_module_{kind}_hook")(_linear(_OF_ALL[kind]))
    try:
        assert not runs_as_one(model, parts)
        assert_same(model, twin)
    finally:
        hook.remove()
    assert runs_as_one(model, parts)


def test_a_decorated_forward_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = lora.Linear.forward

    @functools.wraps(forward)
    def twice(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return 2 * forward(self, x, *args, **kwargs)

    monkeypatch.setattr(lora.Linear, "forward", twice)
    model = adapted()
    twin = copy.deepcopy(model)
    assert_same(patched(model), twin)


def test_a_class_forward_set_after_the_patch_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    for one in (model, twin):
        one.base_model.model.q.__class__ = Twice
    assert_same(model, twin)
    monkeypatch.setattr(lora.Linear, "forward", lambda self, x: 3 * self.base_layer(x))
    assert_same(model, twin)


class Twice(lora.Linear):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(x, *args, **kwargs)


def test_a_class_with_another_forward_computes_that(parts: list[int]) -> None:
    model = adapted()
    model.base_model.model.q.__class__ = Twice
    twin = copy.deepcopy(model)
    patched(model)
    assert any("1 of them (Twice) run base and adapter" in n for n in patch_report(model).notes)
    assert not runs_as_one(model, parts)
    assert_same(model, twin)


def test_hooks_on_the_layer_see_tensors() -> None:
    model, seen = adapted(), list[Any]()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend((*args, output))

    model.base_model.model.q.register_forward_hook(look)
    patched(model)
    model.base_model.model.v.register_forward_hook(look)
    del seen[:]
    model(data())
    assert [type(item) for item in seen] == [Tensor] * 4


def test_a_backward_hook_behind_an_activation_sees_both_gradients(
    parts: list[int],
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    options = LoraConfig(r=RANK, target_modules=["0", "2"], init_lora_weights=False)
    model: Any = get_peft_model(plain, options)  # type: ignore[arg-type]
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    patched(model)
    assert isinstance(model.base_model.model[1](data().requires_grad_()), Deferred)
    assert runs_as_one(model, parts)
    seen: list[Tensor] = []
    for one in (model, twin, exact):
        one.base_model.model[2].register_full_backward_hook(
            lambda module, inputs, outputs: seen.extend((inputs[0], outputs[0]))
        )
        step(one, data(), DOUBLE if one is exact else FP32)
    assert len(seen) == 6
    for found, plain_one, truth in zip(seen[:2], seen[2:4], seen[4:], strict=True):
        assert_near(found, plain_one, truth)


def test_copies_and_pickles_run_it_on_their_own_layers(parts: list[int]) -> None:
    model = adapted()
    wanted = patched(model)(data())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert runs_as_one(other, parts)
        assert torch.equal(other(data()), wanted)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(data()).any() and torch.equal(model(data()), wanted)
        del parts[:]
        assert not forwards(unpatch_model(other))
        other(data())
        assert len(parts) == 6
    assert len(forwards(model)) == 2 and not forwards(unpatch_model(model))


def test_a_forward_that_a_hook_wrapped_is_undone(parts: list[int]) -> None:
    model = adapted()
    patched(model)
    layers = [model.base_model.model.q, model.base_model.model.v]
    for layer in layers:
        add_hook_to_module(layer, ModelHook())
    assert runs_as_one(model, parts)
    unpatch_model(model)
    assert not runs_as_one(model, parts)
    remove_hook_from_submodules(model)
    assert not runs_as_one(model, parts)
    assert runs_as_one(patched(model), parts)


def test_a_forward_that_somebody_else_set_stays() -> None:
    model = adapted()
    layer = model.base_model.model.q
    layer.forward = own = functools.partial(type(layer).forward, layer)
    twin = copy.deepcopy(model)
    patched(model)
    notes = patch_report(model).notes
    assert "1 adapter layers are left alone: other code gave them a forward of their own" in notes
    assert_same(model, twin)
    assert layer.forward is own
    unpatch_model(model)
    assert layer.forward is own


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_behind_a_checkpoint_trains_the_same(reentrant: bool) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    behind, plain = Around(model, WIDTH), Around(twin, WIDTH)
    plain.load_state_dict(behind.state_dict())
    behind.call = lambda inner, x: checkpoint(inner, x, use_reentrant=reentrant)
    assert_same(behind, plain)

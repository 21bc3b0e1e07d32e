"""Undoing and planning anew, also after somebody took modules out of the model."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from lowmem_patch import patch_model, patch_report, unpatch_model, verify_model
from lowmem_patch.errors import PatchError, TraceError
from lowmem_patch.strategies.swap import is_replacement
from tests.support.configs import AUTO_WITHOUT_CODES, FOLD
from tests.support.judge import assert_close, assert_rounded, assert_same_function
from tests.support.models import FAMILIES, doubles
from tests.support.step import DOUBLE, bytes_of, step, warned
from tests.support.toys import Toy, batch, gated

Make = Callable[[str], Any]
CONFIGS = {"auto": AUTO_WITHOUT_CODES, "exact": "exact", "fold": FOLD}
ALL = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def assert_outputs_stay(model: Any, stock: Any, inputs: Any) -> None:
    found, expected = (step(net, inputs, DOUBLE, backward=False).outputs for net in (model, stock))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, "output")


@ALL
@pytest.mark.parametrize("which", ["first", "last"])
def test_unpatch_after_layers_were_cut(which: str, config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    stock = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    for net in (model, stock):
        net.model.layers = net.model.layers[:1] if which == "first" else net.model.layers[1:]
        net.model.layers[0].self_attn.layer_idx = 0
        net.config.num_hidden_layers = 1
        net.config.layer_types = None
    assert_outputs_stay(model, stock, inputs)
    unpatch_model(model)
    assert not any(map(is_replacement, model.modules()))
    for name, parameter in stock.named_parameters():
        assert_close(model.get_parameter(name).detach(), parameter.detach(), name)
        assert model.get_parameter(name).requires_grad
    assert_same_function(model, stock, inputs)


@ALL
def test_planning_anew_after_layers_were_cut(config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    stock = copy.deepcopy(model)
    patch_model(model, config, example_inputs=inputs)
    for net in (model, stock):
        net.model.layers = net.model.layers[:1]
    patch_model(model, config, example_inputs=inputs)
    assert not any("layers.1" in site.name for site in patch_report(model).sites)
    fresh = patch_model(copy.deepcopy(stock), config, example_inputs=inputs)
    assert bytes_of(model, inputs) == bytes_of(fresh, inputs)
    assert_outputs_stay(model, stock, inputs)
    if config is not FOLD:
        assert_same_function(model, stock, inputs)


def test_cut_layers_are_not_kept_alive(make: Make) -> None:
    model, inputs = doubles(make, "llama")
    patch_model(model, "exact", example_inputs=inputs)
    attention = sum(p.nbytes for p in model.model.layers[1].self_attn.parameters())
    model.model.layers = model.model.layers[:1]
    pickled = len(pickle.dumps(model))
    unpatch_model(model)
    assert pickled - len(pickle.dumps(model)) < attention


@pytest.mark.parametrize("to", ["shallower", "deeper"])
def test_norms_unfold_where_the_whole_is_gone(to: str, make: Make) -> None:
    """What PEFT's merge_and_unload returns has other names, and no record of the patch."""
    model, inputs = doubles(make, "llama")
    stock = copy.deepcopy(model)
    patch_model(model, FOLD, example_inputs=inputs)
    layers = model.model.layers
    outer = torch.nn.Module()
    outer.inner = torch.nn.Module()
    outer.inner.model = torch.nn.Module()
    outer.inner.model.layers = layers
    unpatch_model(layers if to == "shallower" else outer)
    assert not any(map(is_replacement, layers.modules()))
    for name, parameter in stock.model.layers.named_parameters():
        assert_close(layers.get_parameter(name).detach(), parameter.detach(), name)
    assert_same_function(unpatch_model(model), stock, inputs)


def test_undo_of_a_lost_linear_touches_nothing() -> None:
    net = patch_model(Toy(gated), FOLD, example_inputs=batch())
    up = net.up
    del net.up
    before = {name: parameter.clone() for name, parameter in net.named_parameters()}
    with pytest.raises(PatchError, match=r"norm was folded into up, .*put it back"):
        unpatch_model(net)
    assert is_replacement(net.norm)
    assert all(torch.equal(net.get_parameter(name), value) for name, value in before.items())
    net.up = up
    unpatch_model(net)
    assert not any(map(is_replacement, net.modules()))


@ALL
def test_new_example_inputs_plan_anew(config: Any, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    patch_model(model, config, example_inputs=inputs)
    first = patch_report(model)
    longer = {name: tensor.repeat(1, 2) for name, tensor in inputs.items()}
    patch_model(model, config, example_inputs=longer)
    assert patch_report(model).saved_after > first.saved_after
    assert "2x18" in patch_report(model).inputs


def test_check_of_a_patched_model_checks(make: Make) -> None:
    model, inputs = make("llama"), FAMILIES["llama"].inputs()
    patch_model(model, "exact", example_inputs=inputs)
    calls: list[Any] = []
    model.model.layers[0].register_forward_hook(lambda *args: calls.append(args[0].training))
    patch_model(model, "exact", example_inputs=inputs, check=True)
    assert calls.count(False) >= 2  # the original and the patched model ran
    with pytest.raises(TraceError):
        patch_model(model, "exact", example_inputs={"no_such_argument": torch.zeros(1)})


@dataclasses.dataclass
class Masked:
    scores: torch.Tensor


class Masking(torch.nn.Module):
    """Returns a dataclass, with infinities where a mask stands."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Masked:
        return Masked(self.out(self.norm(x)).masked_fill(x > 0, float("-inf")))


def test_check_of_outputs_with_infinities() -> None:
    x = torch.randn(4, 8)
    patched = patch_model(Masking(), "exact", example_inputs=(x,), check=True)
    assert patch_report(patched).patched
    assert verify_model(patched, example_inputs=(x,), dtypes=(torch.float32,), autocast=None).passed


def test_other_library_replaced_a_norm_is_said_once(make: Make) -> None:
    model, inputs = doubles(make, "llama")
    patch_model(model, "exact", example_inputs=inputs)
    model.model.layers[0].input_layernorm = torch.nn.RMSNorm(32).double()
    model.train()
    with warned() as texts:
        model(**inputs)
        model(**inputs)
    assert len(texts) == 1
    assert (
        "1 patched modules were replaced" in texts[0]
        and "call patch_model(model) again" in texts[0]
    )
    assert texts[0] in patch_report(model).notes
    patch_model(model, "exact")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(**inputs)
    assert is_replacement(model.model.layers[0].input_layernorm)


PATHS = {"input_layernorm": "model.layers.0.input_layernorm", "mlp": "model.layers.0.mlp"}


@pytest.mark.parametrize("of", ["norm", "mlp", "class"])
def test_foreign_forward_after_the_patch_is_said(of: str, make: Make, monkeypatch: Any) -> None:
    model, inputs = doubles(make, "llama")
    patch_model(model, "exact", example_inputs=inputs)
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].input_layernorm

    def foreign(self: Any, x: Any) -> Any:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    if of == "norm":
        norm.forward = lambda x: x
    elif of == "mlp":
        mlp.forward = foreign.__get__(mlp)
    else:
        monkeypatch.setattr(type(mlp), "forward", foreign)
    named = "input_layernorm" if of == "norm" else "mlp"
    model.train()
    with warned() as texts:
        model(**inputs)
    assert len(texts) == 1 and type(model.get_submodule(PATHS[named])).__name__ in texts[0]
    assert "got a forward of" in texts[0]
    assert texts[0] in patch_report(model).notes


def test_wrapped_forward_after_the_patch_is_no_news(make: Make) -> None:
    import functools

    model, inputs = doubles(make, "llama")
    patch_model(model, "exact", example_inputs=inputs)
    for module in model.modules():  # as accelerate does
        old = module.forward
        module.forward = functools.wraps(old)(lambda *args, old=old, **named: old(*args, **named))
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(**inputs)
    assert not [note for note in patch_report(model).notes if "patch_model" in note]


def test_the_look_at_each_forward_goes_with_the_patch(make: Make) -> None:
    model, inputs = doubles(make, "llama")
    patch_model(model, "exact", example_inputs=inputs)
    hooks = len(model._forward_pre_hooks)
    for _ in range(2):
        model.train()(**inputs)
        patch_model(model, "exact", example_inputs=inputs)
        assert len(model._forward_pre_hooks) == hooks
    unpatch_model(model)
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.filterwarnings("ignore:.*(script_method|should not be inst):DeprecationWarning")
def test_first_look_is_harmless_under_compile(make: Make) -> None:
    model, inputs = doubles(make, "timm-vit")
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=inputs)
    model.train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(**inputs), stock(**inputs), "output")
    torch._dynamo.reset()


def test_buffers_that_somebody_registered_stay_in_the_state_dict() -> None:
    model, x = Toy(gated), batch()
    for module in model.modules():
        if not list(module.children()):
            module.register_buffer("scale", torch.ones(2))
            module.register_buffer("passing", torch.ones(2), persistent=False)
    names = list(model.state_dict())
    patch_model(model, "exact", example_inputs=x)
    replaced = [module for module in model.modules() if is_replacement(module)]
    assert replaced and list(model.state_dict()) == names
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if "scale" in module._buffers:
            module.scale.fill_(3)
    assert list(model.state_dict()) == names
    unpatch_model(model)
    assert list(model.state_dict()) == names
    assert all(bool((b == 3).all()) for name, b in model.named_buffers() if name.endswith("scale"))
    assert all(b.dtype == torch.float64 for b in model.buffers())


def test_transformers_does_not_initialise_weights_again(make: Make) -> None:
    model, inputs = doubles(make, "llama")
    patch_model(model, "exact", example_inputs=inputs)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any((tensor != 1).any() for name, tensor in before.items() if "layernorm" in name)
    model.post_init()  # as a model does whose part this one becomes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@pytest.mark.parametrize("again", [False, True], ids=["unpatch", "patch again"])
def test_a_norm_that_was_parametrized_since_the_patch(again: bool, make: Make) -> None:
    model, inputs = doubles(make, "llama")
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=inputs)
    for net in (model, stock):
        parametrize.register_parametrization(net.model.norm, "weight", Doubled())
    trained = set(map(id, model.parameters()))  # an optimizer may hold them
    if again:
        patch_model(model, "exact", example_inputs=inputs)
    else:
        unpatch_model(model)
    assert set(map(id, model.parameters())) == trained
    # LLaMA's own norm rounds to float32, which the parametrized one is again
    assert_rounded(step(model, inputs, DOUBLE), step(stock, inputs, DOUBLE), tolerance=1e-6)
    for net in (model, stock):
        parametrize.remove_parametrizations(net.model.norm, "weight")
    assert_rounded(step(model, inputs, DOUBLE), step(stock, inputs, DOUBLE), tolerance=1e-6)


def doubled_on_load(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state.pop(f"{prefix}extra", None)
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
    module.loads = getattr(module, "loads", 0) + 1


def extra_on_save(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state[f"{prefix}extra"] = torch.ones(1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_a_norms_state_dict_run_patched_and_unpatched(when: str) -> None:
    def hook(norm: Any) -> None:
        norm.register_state_dict_pre_hook(lambda module, *_: calls.append(module))
        norm.register_state_dict_post_hook(extra_on_save)
        norm.register_load_state_dict_pre_hook(doubled_on_load)
        norm.register_load_state_dict_post_hook(lambda module, _: calls.append(module))

    model: Any = Toy(gated)
    calls: list[Any] = []
    if when == "before":
        hook(model.norm)
    patch_model(model, "exact", example_inputs=batch())
    assert is_replacement(model.norm)
    if when == "after":
        hook(model.norm)

    def assert_run(factor: float) -> None:
        state = model.state_dict()
        assert "norm.extra" in state
        model.load_state_dict(state)
        assert torch.equal(model.norm.weight, torch.full((8,), factor))
        assert calls == [model.norm] * 2
        calls.clear()

    assert_run(2)
    patch_model(model, "exact", example_inputs=batch())
    assert_run(4)
    model = copy.deepcopy(model)
    unpatch_model(model)
    assert not is_replacement(model.norm)
    assert_run(8)
    assert model.norm.loads == 3


@pytest.mark.parametrize("again", [False, True], ids=["unpatch", "patch again"])
def test_what_somebody_put_on_replacements_stays(again: bool) -> None:
    class Dropped(Toy):
        def __init__(self) -> None:
            super().__init__(lambda net, x: net.dropout(gated(net, x)))
            self.dropout = torch.nn.Dropout(0.1)

    model: Any = Dropped().train()
    model.norm.tag = "before"
    patch_model(model, "auto", example_inputs=batch())
    names = ("norm", "act", "dropout")
    for name in names:
        module: Any = model.get_submodule(name)
        assert is_replacement(module), name
        module.extra = torch.nn.Parameter(torch.ones(3))
        module.inner = torch.nn.Linear(2, 2)
        module.register_buffer("seen", torch.zeros(1))
        module.tag, module.list = "mine", [name]
        module.register_parameter("nothing", None)
        module.named = Named.named.__get__(module)
    model.dropout.inplace = True
    state = set(model.state_dict())
    if again:
        patch_model(model, "auto", example_inputs=batch())
        assert patch_report(model).patched
    else:
        unpatch_model(model)
        assert not any(map(is_replacement, model.modules()))
    assert set(model.state_dict()) == state
    for name in names:
        module = model.get_submodule(name)
        assert (module.tag, module.list) == ("mine", [name])
        assert module.named() is module
    assert model.dropout.inplace
    model(batch()).sum().backward()


class Named:
    def named(self) -> Any:
        return self

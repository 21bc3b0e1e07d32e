"""LoRA layers that read one tensor run as one op, and as their own wherever that would not be the same."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model
from lowmem_patch.nn import siblings as under_test
from lowmem_patch.nn.adapters import siblings_of
from tests.support.judge import assert_rounded, assert_same_step
from tests.support.models import FAMILIES, build, randomise
from tests.support.step import DOUBLE, bytes_of, step

# of transformers, which PEFT asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

WIDTH = 16
Change = Callable[[Any], Any]


class Attention(nn.Module):
    """q, k and v of one tensor; ``between`` runs behind q, on the module and x."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0  # no leaf, which may be written
        q = self.q(x)
        if self.between is not None:
            x = self.between(self, x)
        return q * self.k(x) + self.v(x)


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q", "k", "v"], init_lora_weights=False, **options)
    return get_peft_model(Attention(), config).train()


def data() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(4))


def layers(model: Any) -> Any:
    return model.base_model.model


def patched(model: Any) -> Any:
    return patch_model(model, example_inputs=data())


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each joint op computed."""
    ran: list[int] = []
    op = under_test.sibling_linears

    def counted(x: Tensor, linears: Any, *rest: Any) -> Any:
        ran.append(len(linears))
        return op(x, linears, *rest)

    monkeypatch.setattr(under_test, "sibling_linears", counted)
    return ran


def assert_same(model: Any, twin: Any) -> None:
    """In float64, where every gradient tells."""
    given = data().double().requires_grad_()
    first, second = (copy.deepcopy(one).double() for one in (model, twin))
    assert_rounded(step(first, given, DOUBLE), step(second, given, DOUBLE))


def test_they_are_known_in_the_order_of_their_calls() -> None:
    family = FAMILIES["llama"]
    model = get_peft_model(build(family), LoraConfig(r=4, target_modules=family.linears))
    patch_model(model, example_inputs=family.inputs())
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    found = {
        name: [names[layer] for layer in group.layers] if (group := siblings_of(module)) else []
        for module, name in names.items()
        if hasattr(module, "base_layer")
    }
    qkv, mlp = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]
    assert found == {
        **dict.fromkeys(qkv, qkv), **dict.fromkeys(mlp, mlp), "o_proj": [], "down_proj": [],
    }  # fmt: skip


@pytest.mark.parametrize("preset", ["auto", "exact", "compact"])
def test_they_run_as_one_op_and_save_no_more(
    ops: list[int], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["llama"]
    config = LoraConfig(r=4, target_modules=family.linears)
    model = randomise(get_peft_model(build(family), config))
    twin = copy.deepcopy(model)
    inputs = family.inputs()
    patch_model(model, preset, example_inputs=inputs)
    del ops[:]
    saved = bytes_of(model, inputs)
    assert sorted(ops) == sorted([3, 2] * model.config.num_hidden_layers)
    if preset != "compact":
        assert_same_step(model, twin, inputs)
    monkeypatch.setattr(under_test.Siblings, "output", lambda *_: None)
    assert bytes_of(model, inputs) == saved


def test_the_same_in_float64(ops: list[int]) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    assert_same(model, twin)
    assert ops and set(ops) == {3}


def write_x(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)  # as a leaf that nobody saved would be
    return x


def other_x(_: Any, x: Tensor) -> Tensor:
    return x * 2


def write_weight(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.k.base_layer.weight.mul_(3)
    return x


def rescale(module: Any, x: Tensor) -> Tensor:
    module.k.scaling["default"] = 5.0
    return x


def new_weight(module: Any, x: Tensor) -> Tensor:
    module.v.lora_B["default"].weight = nn.Parameter(module.v.lora_B["default"].weight.detach() * 2)
    return x


@pytest.mark.parametrize("change", [other_x, write_weight, rescale, new_weight])
def test_what_changes_between_two_calls_is_seen(change: Change, ops: list[int]) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    outputs = []
    for one in (model, twin):
        layers(one).between = change
        outputs.append(one(data()))
    assert ops[-1] == 3  # planned, and computed in vain for who changed
    torch.testing.assert_close(*outputs)


def test_a_write_into_the_input_behind_the_first_is_seen(ops: list[int]) -> None:
    """Of an input that nobody saves: q's adapter has a frozen A."""
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    twin = copy.deepcopy(model)
    patched(model)
    steps = []
    for one in (model, twin):
        layers(one).between = write_x
        steps.append(step(one.double(), data().double(), DOUBLE))
    assert 3 in ops
    assert_rounded(*steps)


def test_who_fetches_nothing_ends_it(ops: list[int]) -> None:
    """k reads another tensor in each step: after two steps q computes nothing for it."""
    model = patched(adapted())
    layers(model).between = other_x
    for _ in range(3):
        model(data()).sum().backward()
    del ops[:]
    model(data()).sum().backward()
    assert not ops


def hooked(model: Any) -> None:
    layers(model).k.register_forward_hook(lambda _m, _a, output: output * 2)


def pre_hooked(model: Any) -> None:
    layers(model).k.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))


def backward_hooked(model: Any) -> None:
    layers(model).k.register_full_backward_hook(lambda _m, into, _o: (into[0] * 2,))


def base_hooked(model: Any) -> None:
    layers(model).v.base_layer.register_forward_hook(lambda _m, _a, output: output * 2)


def disabled(model: Any) -> None:
    layers(model).k.enable_adapters(False)


def merged(model: Any) -> None:
    layers(model).v.merge()


def replaced(model: Any) -> None:
    torch.manual_seed(5)
    layers(model).k = nn.Linear(WIDTH, WIDTH)


def exchanged(model: Any) -> None:
    layers(model).k, layers(model).v = layers(model).v, layers(model).k


def second_adapter(model: Any) -> None:
    torch.manual_seed(6)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


def of_another_rank(model: Any) -> None:
    torch.manual_seed(6)
    model.add_adapter("second", LoraConfig(r=7, target_modules=["q", "k"], init_lora_weights=False))
    model.base_model.set_adapter("second")


def frozen_base_trains(model: Any) -> None:
    layers(model).k.base_layer.weight.requires_grad_()


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(layers(model).k.base_layer)


CHANGES: list[Change] = [
    hooked, pre_hooked, backward_hooked, base_hooked, disabled, merged, replaced, exchanged, second_adapter,
    of_another_rank, frozen_base_trains, parametrized,
]  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:.*patch_model:UserWarning", "ignore:Full backward hook:UserWarning"
)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_one_of_them_after_the_patch_is_right(change: Change) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    given = data().double().requires_grad_()
    for one in (model, twin):
        change(one)
        one.double()
    for _ in range(2):
        steps = [step(one, given, DOUBLE) for one in (model, twin)]
        assert_rounded(*steps)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_computes_with_its_own_layers(copied: Change, ops: list[int]) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    model(data())
    other = copied(model)
    with torch.no_grad():
        for one in (model, layers(model)):
            for parameter in one.parameters():
                parameter.zero_()
    del ops[:]
    assert_same(other, twin)
    assert ops and set(ops) == {3}


def test_a_failure_between_two_calls_leaves_the_model_right() -> None:
    def fails(_: Any, x: Tensor) -> Tensor:
        raise KeyError("between")

    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    layers(model).between = fails
    with pytest.raises(KeyError):
        model(data())
    layers(model).between = None
    assert_same(model, twin)
    copy.deepcopy(model)


@pytest.mark.parametrize("patched_first", [False, True])
def test_only_a_frozen_layers_output_needs_no_gradient(patched_first: bool) -> None:
    """The first layer's input needs none."""
    model = adapted()
    if patched_first:
        patched(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name and ".k." not in name)
    if not patched_first:
        patched(model)
    needed = []
    for name in "qkv":
        getattr(layers(model), name).register_forward_hook(
            lambda _m, _a, output: needed.append(output.requires_grad)
        )
    model(data())
    assert needed == [True, False, True]


def test_nothing_is_held_after_a_step() -> None:
    model = patched(adapted())
    x = data()
    held = []
    for name in "qkv":
        layers(model)._modules[name].register_forward_hook(
            lambda _m, args, output: held.extend(map(weakref.ref, (args[0], output)))
        )
    gc.disable()
    try:
        model(x).sum().backward()
        assert held and not any(one() is not None for one in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool, ops: list[int]) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    given = [data().requires_grad_() for _ in range(2)]
    for one, x in zip((model, twin), given, strict=True):
        checkpoint(one, x, use_reentrant=reentrant).square().sum().backward()
    assert ops
    torch.testing.assert_close(given[0].grad, given[1].grad)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_gradient_of_one_output_alone() -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    patched(model)
    found = []
    for one in (model, twin):
        x = data().requires_grad_()
        q, k, v = (getattr(layers(one), name)(x) for name in "qkv")
        (q.sum() * 0 + v.sum()).backward(retain_graph=True)
        found.append([x.grad, *torch.autograd.grad(k.square().sum(), x)])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_without_gradients_each_runs_by_itself(ops: list[int]) -> None:
    model = patched(adapted())
    del ops[:]
    with torch.no_grad():
        model(data())
    assert not ops

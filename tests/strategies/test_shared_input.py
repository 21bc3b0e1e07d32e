"""LoRA layers that read one tensor add up its gradient themselves, and do all else each by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.functional import LowRank, SharedInput, products_backward, recast_linear
from lowmem_patch.nn.own import given_forward
from tests.support.judge import assert_near, assert_same_step
from tests.support.models import FAMILIES, build, randomise
from tests.support.step import AUTOCAST, bytes_of, step

# of transformers, which PEFT asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

WIDTH = 16
Change = Callable[[Any], Any]


class Attention(nn.Module):
    """q, k and v of a norm's output; ``between`` runs behind q, on the module and that output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return q * k + v

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.norm(x * 1.0)
        q = self.q(x)
        if self.between is not None:
            x = self.between(self, x)
        return q, self.k(x), self.v(x)


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(
        **{"r": 4, **options}, target_modules=["q", "k", "v"], init_lora_weights=False
    )
    return get_peft_model(Attention(), config).train()


def data() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(4))


def leaf() -> Tensor:
    return data().double().requires_grad_()


def layers(model: Any) -> Any:
    return model.base_model.model


def patched(model: Any) -> Any:
    return patch_model(model, example_inputs=data().requires_grad_())


def pair(**options: Any) -> tuple[Any, Any]:
    """A patched model, and the same unpatched, in float64."""
    model = adapted(**options)
    twin = copy.deepcopy(model)
    return patched(model).double(), twin.double()


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each reader's backward, whether it added its gradient to another's."""
    seen: list[bool] = []
    gradient = products_backward._input_gradient

    def watched(*arguments: Any) -> Tensor:
        if arguments[-1] is not None:
            seen.append(arguments[-1].returned() is not None)
        return gradient(*arguments)

    monkeypatch.setattr(products_backward, "_input_gradient", watched)
    return seen


def gradients_of(model: Any, x: Tensor) -> list[Tensor | None]:
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_equal_gradients(model: Any, twin: Any, *given: Tensor) -> None:
    pairs = zip(gradients_of(model, given[0]), gradients_of(twin, given[1]), strict=True)
    for mine, other in pairs:
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def assert_same(model: Any, twin: Any, run: Callable[[Any, Tensor], Any]) -> None:
    """``run`` makes the same gradients of both, and None where the other has None."""
    given = [leaf(), leaf()]
    for one, x in zip((model, twin), given, strict=True):
        one.zero_grad()
        run(one, x)
    assert_equal_gradients(model, twin, *given)


def train(model: Any, x: Tensor) -> None:
    model(x).square().sum().backward()


def test_the_plan_knows_which_layers_read_one_tensor() -> None:
    family = FAMILIES["llama"]
    model = get_peft_model(build(family), LoraConfig(r=4, target_modules=family.linears))
    patch_model(model, example_inputs=family.inputs())
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            found[name.rpartition(".")[2]] = given_forward(module).args[-1]
    together = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert found == {**dict.fromkeys(together, True), "o_proj": False, "down_proj": False}


@pytest.mark.parametrize("preset", ["auto", "exact", "compact"])
def test_a_model_adds_its_gradients_up_and_saves_no_more(
    additions: list[bool], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["llama"]
    config = LoraConfig(r=4, target_modules=family.linears)
    model = randomise(get_peft_model(build(family), config))
    twin = copy.deepcopy(model)
    inputs = family.inputs()
    patch_model(model, preset, example_inputs=inputs)
    del additions[:]
    step(model, inputs)
    blocks = model.config.num_hidden_layers
    # the first block's q, k and v read what has no gradient
    assert sorted(additions) == [False] * (2 * blocks - 1) + [True] * (3 * blocks - 2)
    if preset != "compact":
        assert_same_step(model, twin, inputs)
    saved = bytes_of(model, inputs)
    monkeypatch.setattr(SharedInput, "serves", staticmethod(lambda _: False))
    assert bytes_of(model, inputs) == saved


def test_the_same_in_float64(additions: list[bool]) -> None:
    model, twin = pair()
    assert_same(model, twin, train)
    assert additions == [False, True, True]


def other_x(_: Any, x: Tensor) -> Tensor:
    return x * 2


def write_data(_: Any, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x


def write_weight(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.k.base_layer.weight.mul_(3)
    return x


def write_weights_data(module: Any, x: Tensor) -> Tensor:
    for part in (module.k.base_layer, module.v.lora_B["default"]):
        part.weight.data.mul_(3)
    return x


def rescale(module: Any, x: Tensor) -> Tensor:
    module.k.scaling["default"] = 5.0
    return x


def new_weight(module: Any, x: Tensor) -> Tensor:
    module.v.lora_B["default"].weight = nn.Parameter(module.v.lora_B["default"].weight.detach() * 2)
    return x


def freeze(module: Any, x: Tensor) -> Tensor:
    module.k.requires_grad_(False)
    return x


@pytest.mark.parametrize(
    "change",
    [other_x, write_data, write_weight, write_weights_data, rescale, new_weight, freeze],
)
def test_what_changes_between_two_calls_is_seen(change: Change) -> None:
    model, twin = pair()
    for one in (model, twin):
        layers(one).between = change
    assert_same(model, twin, train)


def test_autocast_around_one_layer_is_seen() -> None:
    def between(module: Any, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        return x

    model = adapted()
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    patched(model)
    truth = layers(exact).parts(data().double())
    outputs = []
    for one in (model, twin):
        layers(one).between = between
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            outputs.append(layers(one).parts(data().requires_grad_()))
    assert [one.dtype for one in outputs[0]] == [torch.float32, *[torch.bfloat16] * 2]
    for mine, other, whole in zip(*outputs, truth, strict=True):
        assert mine.dtype == other.dtype
        assert_near(mine, other, whole, AUTOCAST)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_write_into_the_input_behind_the_first_is_an_error(recorded: bool) -> None:
    """Of an input that nobody but the patched norm saves: every adapter has a frozen A."""

    def write(_: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(recorded):
            return x.mul_(2)

    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    patched(model)
    layers(model).between = write
    with pytest.raises(RuntimeError, match="lowmem_patch"):
        train(model, data().requires_grad_())


def in_two_backwards(model: Any, x: Tensor) -> None:
    """Of an input without a graph below it."""
    q, k, v = layers(model).parts(x)
    (q.square().sum() + v.sum()).backward(retain_graph=True)
    k.square().sum().backward()


def steps_between(model: Any, x: Tensor) -> None:
    q, k, v = layers(model).parts(x)
    (q.square().sum() + v.sum()).backward(retain_graph=True)
    with torch.no_grad():
        for parameter in layers(model).q.parameters():
            parameter.add_(1)
    k.square().sum().backward()


def reads_k_not(model: Any, x: Tensor) -> None:
    q, _, v = layers(model).parts(x)
    (q * v).sum().backward()


def k_without_gradient(model: Any, x: Tensor) -> None:
    inner = layers(model)
    h = inner.norm(x * 1.0)
    q = inner.q(h)
    with torch.no_grad():
        k = inner.k(h)
    (q * k + inner.v(h)).sum().backward()


def k_later(model: Any, x: Tensor) -> None:
    inner = layers(model)
    h = inner.norm(x * 1.0)
    inner.q(h).square().sum().backward(retain_graph=True)
    inner.k(h).square().sum().backward()


def twice_over_one_graph(model: Any, x: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def other_readers(model: Any, x: Tensor) -> None:
    """A norm's output that is read by others before, between and behind."""
    inner = layers(model)
    h = inner.norm(x * 1.0)
    y = h.square()
    y = y + inner.q(h) * h
    y = y + inner.k(h) * inner.q(h) + inner.v(h)
    (y + h.sin()).sum().backward()


def backward_in_backward(model: Any, x: Tensor) -> None:
    """A hook on k's gradient asks for gradients of the same graph."""
    q, k, v = layers(model).parts(x)
    loss, other = (q * k + v).square().sum(), (q * v).sum()
    found: list[Tensor] = []

    def look(_: Tensor) -> None:
        found.extend(torch.autograd.grad(other, x, retain_graph=True))

    k.register_hook(look)
    loss.backward(retain_graph=True)
    assert x.grad is not None
    x.grad += 3 * found[0]  # whose gradient is in which, must show


def gradient_of_one_part(model: Any, x: Tensor) -> None:
    """First of weights alone, for which the input's gradient is not asked."""
    loss = model(x).square().sum()
    asked = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, asked, retain_graph=True)
    loss.backward()
    for parameter, more in zip(asked, found, strict=True):
        assert parameter.grad is not None
        parameter.grad += more


@pytest.mark.parametrize(
    "run",
    [
        in_two_backwards, steps_between, reads_k_not, k_without_gradient, k_later, twice_over_one_graph,
        other_readers, backward_in_backward, gradient_of_one_part,
    ],
)  # fmt: skip
def test_backwards_of_any_kind_are_those_of_the_unpatched(
    run: Callable[[Any, Tensor], Any],
) -> None:
    model, twin = pair()
    for _ in range(2):
        assert_same(model, twin, run)


def test_a_gradient_in_another_dtype_is_added_by_autograd(additions: list[bool]) -> None:
    """float32 inputs, of which the products are in bf16."""
    weights = [torch.randn(size) for size in ((6, WIDTH), (4, WIDTH), (6, 4))]
    adapter = LowRank(*(weight.requires_grad_() for weight in weights[1:]), 1.0)
    found = []
    for shared in (True, False):
        x = data().requires_grad_()
        h = x * 1.0
        given = SharedInput(h).tensor if shared else h
        for _ in range(2):
            recast_linear(given, weights[0], None, torch.bfloat16, adapter).sum().backward(
                retain_graph=True
            )
        found.append(x.grad)
    assert torch.equal(*found) and not additions


def test_the_sum_is_as_accurate_in_bf16() -> None:
    model = adapted().to(torch.bfloat16)
    twin = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    patch_model(model, example_inputs=data().bfloat16().requires_grad_())
    errors = []
    for one in (model, twin):
        given = data().bfloat16().requires_grad_()
        truth = given.detach().double().requires_grad_()
        train(one, given)
        exact.zero_grad()
        train(exact, truth)
        assert given.grad is not None and truth.grad is not None
        errors.append(float((given.grad.double() - truth.grad).norm() / truth.grad.norm()))
    assert errors[0] <= 1.5 * errors[1]


def test_who_has_no_gradient_below_is_read_as_it_is() -> None:
    """A leaf would hold itself: its node of autograd holds it."""
    x = data()
    assert SharedInput.serves(x.requires_grad_() * 1)
    assert not SharedInput.serves(x) and not SharedInput.serves(x.detach())


def test_a_detached_input_can_be_copied() -> None:
    model = patched(adapted())
    h = layers(model).norm(data().requires_grad_() * 1)
    layers(model).q(h)
    assert h._shared is not None
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(h)
    assert torch.equal(copy.deepcopy(h.detach_()), h)


def test_who_is_written_is_read_anew() -> None:
    x = data().requires_grad_() * 1
    shared = SharedInput(x)
    assert shared.is_of(x)
    x.mul_(2)
    assert not shared.is_of(x)

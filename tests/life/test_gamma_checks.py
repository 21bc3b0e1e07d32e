"""Whether a norm's output tells z is checked anew whenever somebody may have written gamma or beta."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune

from lowmem_patch import patch_model, unpatch_model
from lowmem_patch.errors import PatchError, TraceError
from lowmem_patch.functional import limits_of
from lowmem_patch.nn.gamma_checks import GammaCheck, GammaChecks
from tests.support.configs import FOLD
from tests.support.judge import assert_close


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = norm or nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.enter(x)))
        return out


def pair(*, frozen: bool = False, norm: nn.Module | None = None) -> tuple[Block, Block]:
    """A patched block and its stock twin, in float64."""
    torch.manual_seed(0)
    stock = Block(norm).double()
    stock.norm.requires_grad_(not frozen)
    return patch_model(copy.deepcopy(stock), "exact", example_inputs={"x": rows()}), stock


def rows() -> Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_same_gradients(
    patched: nn.Module,
    stock: nn.Module,
    run: Any = None,
    tolerance: float = 1e-9,
    accumulate: bool = False,
) -> None:
    for model in (patched, stock):
        if not accumulate:
            model.zero_grad()
        (model if run is None else run(model))(rows()).square().sum().backward()
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            assert_close(patched.get_parameter(name).grad, parameter.grad, name, tolerance)


def zero(model: Block) -> None:
    model.norm.weight.data[3] = 0


def test_limits_in_backward_are_as_wide_as_those_before_a_forward() -> None:
    for saved_as, checks in (
        ("half", GammaChecks()),
        ("low", GammaChecks()),
        ("bits", GammaChecks(True, 1 / 16, 1.0)),
    ):
        ratio, shift = limits_of(saved_as)  # type: ignore[arg-type]  # mypy infers str
        assert shift == 2 * checks.largest_shift and ratio <= checks.smallest_ratio
    store = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 8))
    patched: Any = patch_model(store, "compact", example_inputs=(torch.randn(2, 128),))
    assert patched[0].gamma_checks.saved_as(torch.bfloat16) == "bits"
    assert (patched[0].gamma_checks.smallest_ratio, patched[0].gamma_checks.largest_shift) == (
        1 / 16,
        1.0,
    )


def test_gamma_written_unseen_before_it_is_frozen_is_looked_at() -> None:
    patched, stock = pair()
    patched(rows())
    for model in (patched, stock):
        zero(model)
        model.norm.requires_grad_(False)
    assert_same_gradients(patched, stock)


def test_another_gamma_at_the_same_address_is_looked_at() -> None:
    patched, stock = pair(frozen=True)
    assert_same_gradients(patched, stock)
    norm: Any = patched.norm
    old = norm.weight
    new = torch.empty(0, dtype=old.dtype).set_(old.untyped_storage(), 0, old.shape)
    new.data[3] = 0
    norm.weight = nn.Parameter(new, requires_grad=False)
    zero(stock)
    assert norm.weight.data_ptr() == old.data_ptr()
    assert_same_gradients(patched, stock)


def test_functional_call_with_another_gamma_is_looked_at() -> None:
    patched, stock = pair(frozen=True)
    given = stock.norm.weight.detach().clone()
    given[3] = 0

    def run(model: nn.Module) -> Any:
        return lambda x: functional_call(model, {"norm.weight": given}, (x,))

    assert_same_gradients(patched, stock, run)


def test_norm_whose_output_others_save_is_looked_at_without_the_root() -> None:
    class Returned(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.enter(x))
            out: Tensor = self.out(y) + y.sin()
            return out

    torch.manual_seed(0)
    stock = Returned().double()
    patched = patch_model(copy.deepcopy(stock), "exact", example_inputs={"x": rows()})
    patched(rows())
    for model in (patched, stock):
        zero(model)
    assert_same_gradients(patched, stock, lambda model: model.forward)


@pytest.mark.parametrize(
    "view", [lambda o: o.transpose(0, 1), lambda o: o[-1], lambda o: o.roll(1, 0)]
)
def test_reading_data_of_a_view_changes_no_gradient(view: Any) -> None:
    torch.manual_seed(0)
    stock = Block()
    stock.norm.requires_grad_(False)
    stock.out.requires_grad_(False)
    patched = copy.deepcopy(stock)
    x, found = torch.randn(3, 8), []

    def look(_module: nn.Module, _args: Any, output: Tensor) -> None:
        _ = view(output).data

    with torch.autocast("cpu", torch.bfloat16):
        patch_model(patched, "exact", example_inputs={"x": x})
        for watches in (False, True):
            patched.zero_grad()
            if watches:
                patched.norm.register_forward_hook(look)
            patched(x).float().square().sum().backward()
            found.append(patched.enter.weight.grad.clone())
    assert torch.equal(*found)


def test_gradient_of_a_norms_output_is_given() -> None:
    patched, stock = pair()
    gradients = []
    for model in (patched, stock):
        y = model.norm(model.enter(rows()))
        gradients.append(torch.autograd.grad(model.out(y).square().sum(), y)[0])
    assert_close(*gradients, "output")


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_eps_left_to_torch_is_that_of_the_dtype(scale: float) -> None:
    patched, stock = pair(norm=nn.RMSNorm(8))
    for model in (patched, stock):
        with torch.no_grad():
            model.enter.weight.mul_(scale), model.enter.bias.mul_(scale)
    assert_close(patched(rows()), stock(rows()), "output")


def test_undo_refuses_a_linear_that_stands_where_a_norm_was_folded_into_another() -> None:
    torch.manual_seed(0)
    last = (nn.LayerNorm(8), nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), *last)
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)
    patch_model(model, FOLD, example_inputs=torch.randn(2, 8))
    model[2] = nn.Linear(8, 8)
    with pytest.raises(PatchError, match="another module stands"):
        unpatch_model(model)


def test_undo_of_a_pruned_norm_leaves_no_replacement() -> None:
    patched, stock = pair()
    prune.l1_unstructured(patched.norm, "weight", amount=2)
    patched(rows()).sum().backward()
    unpatch_model(patched)
    assert type(patched.norm) is nn.LayerNorm
    prune.l1_unstructured(stock.norm, "weight", amount=2)
    assert_same_gradients(patched, stock)


def test_nobody_looks_at_gamma_under_torch_func() -> None:
    found = []
    for model in pair():

        def loss(given: Any, model: nn.Module = model) -> Tensor:
            out: Tensor = functional_call(model, given, (rows(),))
            return out.square().sum()

        found.append(torch.func.grad(loss)(dict(model.named_parameters())))
    patched, stock = found
    for name, gradient in stock.items():
        assert_close(patched[name], gradient, name)


def test_forward_that_takes_a_derivative_of_torch_func_is_refused_by_name() -> None:
    class Derivative(Block):
        def forward(self, x: Tensor) -> Tensor:
            slope: Tensor = torch.func.grad(lambda y: self.norm(self.enter(y)).sum())(x)
            out: Tensor = self.out(self.norm(slope))
            return out

    with pytest.raises(TraceError, match=r"calls torch.func.grad.*call patch_model for the parts"):
        patch_model(Derivative(), "exact", example_inputs=torch.ones(3, 8))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that answers after the forward, as a GPU does."""
    monkeypatch.setattr(GammaCheck, "is_known", lambda check: False)


def waits(patched: Block, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often one forward would wait for what a device finds of gamma."""
    asked: list[Any] = []
    was = GammaChecks.told
    monkeypatch.setattr(GammaChecks, "told", lambda *args: (asked.append(args), was(*args))[1])
    patched(rows())
    monkeypatch.setattr(GammaChecks, "told", was)
    return len(asked)


def train(*models: nn.Module, steps: int = 6, rate: float = 1e-3, fused: bool = False) -> None:
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), rate, fused=fused)
        for _ in range(steps):
            optimizer.zero_grad()
            model(rows()).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("fused", [False, True])  # a fused optimizer's writes leave no trace
def test_forward_of_a_steady_training_waits_for_no_look(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    patched, stock = pair()
    assert waits(patched, monkeypatch) == 1
    train(patched, stock, fused=fused)
    assert waits(patched, monkeypatch) == 0
    assert_same_gradients(patched, stock)


@pytest.mark.usefixtures("late")
def test_forward_with_accumulated_gradients_waits_for_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patched, stock = pair()
    train(patched, stock)
    assert_same_gradients(patched, stock)
    assert waits(patched, monkeypatch) == 0  # the gradients are still there, and nobody wrote


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
def test_gamma_set_to_zero_between_steps_gives_right_gradients(steps: int, fused: bool) -> None:
    patched, stock = pair()
    train(patched, stock, steps=steps, fused=fused)
    with torch.no_grad():
        for model in (patched, stock):
            model.norm.weight[3] = 0  # type: ignore[operator, union-attr, index]
    assert_same_gradients(patched, stock)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3])
def test_gamma_that_trains_through_zero_gives_right_gradients(rate: float) -> None:
    patched, stock = pair()
    signs = []
    for _ in range(30):
        for model in (patched, stock):
            model.zero_grad()
            model(rows()).square().sum().backward()
        for name, parameter in stock.named_parameters():
            assert_close(patched.get_parameter(name).grad, parameter.grad, name, 1e-9)
        with torch.no_grad():
            for model in (patched, stock):  # straight through 0, which it meets at one entry
                model.norm.weight -= rate * torch.arange(8) / 8  # type: ignore[operator, union-attr]
        signs.append(bool((stock.norm.weight < 0).any()))  # type: ignore[operator, union-attr]
    assert signs[-1]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("fused", [False, True])
def test_untraced_write_of_a_zero_into_gamma_is_refused_in_backward(fused: bool) -> None:
    patched, stock = pair()
    train(patched, stock, fused=fused)
    if not fused:
        assert_same_gradients(patched, stock)
    zero(patched)  # while gradients are accumulated or steps leave no trace, where nobody waits
    zero(stock)
    with pytest.raises(RuntimeError, match=r"gamma of a norm came near 0.*run this step again"):
        assert_same_gradients(patched, stock, accumulate=not fused)
    assert_same_gradients(patched, stock)  # as the message says


@pytest.mark.parametrize("fused", [False, True])
def test_untraced_write_of_a_zero_into_gamma_is_right_where_the_answer_is_there(
    fused: bool,
) -> None:
    patched, stock = pair()
    train(patched, stock, fused=fused)
    if not fused:
        assert_same_gradients(patched, stock)
    zero(patched)
    zero(stock)
    assert_same_gradients(patched, stock, accumulate=not fused)


@pytest.mark.usefixtures("late")
def test_norm_with_a_gamma_near_zero_saves_z_and_waits_for_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patched, stock = pair()
    with torch.no_grad():
        for model in (patched, stock):
            model.norm.weight[3] = 1e-3  # type: ignore[operator, union-attr, index]
    train(patched, stock)
    assert waits(patched, monkeypatch) == 0
    assert_same_gradients(patched, stock)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    ("beta", "dtype", "refused"),
    [
        (20.0, torch.float64, False),
        (2e3, torch.float64, True),
        (10.0, torch.bfloat16, False),
        (20.0, torch.bfloat16, True),
    ],
)
def test_backward_refuses_what_the_output_does_not_tell(
    beta: float, dtype: torch.dtype, refused: bool
) -> None:
    patched, stock = pair()
    train(patched, stock)
    checks = patched.norm.gamma_checks  # type: ignore[union-attr]
    assert_same_gradients(patched, stock)
    with torch.no_grad():
        for model in (patched, stock):
            model.norm.bias.data[3] = beta  # type: ignore[operator, union-attr, index]
    if dtype == torch.float64 and not refused:
        assert_same_gradients(patched, stock, accumulate=True)
        return
    patched(rows())
    check = checks.of_last_forward  # type: ignore[union-attr]
    with pytest.raises(RuntimeError) if refused else nullcontext():
        checks.confirm(check, dtype)  # type: ignore[union-attr, operator]

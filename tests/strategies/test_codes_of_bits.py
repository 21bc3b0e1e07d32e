"""Codes of 1 to 4 bits, one exact bit for ReLU and its kin, and what of them gains nothing."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import PatchConfig, patch_model, patch_report, plan_patch, saved_bytes
from lowmem_patch import unpatch_model as unpatch
from lowmem_patch.constants import STEP_BITS, STEP_TABLES
from lowmem_patch.errors import ConfigError
from lowmem_patch.nn.activations import CodesActivation

EXACT = {
    "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "relu6": nn.ReLU6, "hardsigmoid": nn.Hardsigmoid,
}  # fmt: skip
MODULES: dict[str, Any] = {
    **EXACT,
    "gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish, "softplus": nn.Softplus, "elu": nn.ELU,
    "selu": nn.SELU, "hardswish": nn.Hardswish, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh,
}  # fmt: skip
ROWS, WIDTH = 6, 16


class Mlp(nn.Module):
    """up, activation, down; ``down`` trains or not."""

    def __init__(self, act: nn.Module, trains: bool = False) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, WIDTH), act, nn.Linear(WIDTH, 4)
        self.down.requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(3 * self.up(x)))


class Gated(nn.Module):
    """act(gate) * up, read by a Linear that trains or is frozen."""

    def __init__(self, act: nn.Module, trains: bool) -> None:
        super().__init__()
        self.gate, self.up, self.act = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH), act
        self.down = nn.Linear(WIDTH, 4).requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def batch() -> Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))


def stepped(model: nn.Module) -> tuple[Tensor, list[Tensor], int]:
    with saved_bytes(model) as saved:
        y = model(batch())
    y.square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return y.detach(), found, saved.activations


def compare(model: nn.Module, config: Any) -> tuple[nn.Module, int]:
    """The patched model and how many bytes fewer it saves; forward and gradients are the stock model's."""
    stock = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing was patched")
        patch_model(model, config, example_inputs=batch())
    (y, gradients, saved), (expected, truth, before) = stepped(model), stepped(stock)
    assert torch.equal(y, expected)
    assert len(gradients) == len(truth) > 0
    for ours, theirs in zip(gradients, truth, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    return model, before - saved


@pytest.mark.parametrize("config", ["auto", "exact", "paper"])
@pytest.mark.parametrize("kind", EXACT)
def test_one_exact_bit_where_a_frozen_linear_reads(kind: str, config: str) -> None:
    model, less = compare(Mlp(EXACT[kind]()), config)
    assert less == 4 * ROWS * WIDTH - ROWS * WIDTH // 8
    (site,) = (site for site in patch_report(model).sites if site.name == "act")
    assert (site.kind, site.strategy, site.approximate) == (kind, "codes", False)
    saves = "output" if kind == "relu" else "input"
    assert site.reason.startswith(f"1-bit codes in place of its {saves}: exact")
    unpatch(model)
    assert type(model.act) is EXACT[kind]


@pytest.mark.parametrize("kind", ["relu", "leaky_relu", "relu6"])
@pytest.mark.parametrize("trains", [False, True])
def test_one_exact_bit_in_place(kind: str, trains: bool) -> None:
    model, less = compare(Mlp(EXACT[kind](inplace=True), trains), "exact")
    size = 4 * ROWS * WIDTH
    if kind != "relu6" and trains:  # in place these save their output, which the Linear keeps
        assert less == 0
        assert "nothing to gain" in patch_report(model).sites[0].reason
    elif trains:  # this one saves a copy of its input, and the Linear the output
        assert less == size
        assert patch_report(model).sites[0].strategy == "recompute"
    else:
        assert less == size - size // 32
        assert isinstance(model.act, CodesActivation) and model.act.in_place


@pytest.mark.parametrize("config", ["auto", "exact"])
@pytest.mark.parametrize("kind", MODULES)
def test_what_a_linear_that_trains_keeps_is_not_kept_twice(kind: str, config: str) -> None:
    model, less = compare(Mlp(MODULES[kind](), trains=True), config)
    (site,) = patch_report(model).sites
    assert site.kind == kind
    if kind in ("relu", "sigmoid", "tanh"):
        assert (site.strategy, less) == ("keep", 0)
        assert site.reason.startswith("nothing to gain")
    else:
        assert (site.strategy, site.approximate) == ("recompute", False)
        assert less == 4 * ROWS * WIDTH


@pytest.mark.parametrize("kind", MODULES)
def test_gates_are_recomputed(kind: str) -> None:
    model, less = compare(Gated(MODULES[kind](), trains=True), "auto")
    (site,) = patch_report(model).sites
    assert (site.kind, site.strategy) == (kind, "recompute")
    # of x and act(x) one is kept in any case; the product goes
    one = kind in ("relu", "sigmoid", "tanh")
    assert less == 4 * ROWS * WIDTH * (1 if one else 2)


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "tanh"])
def test_a_gate_before_a_frozen_linear_gains_nothing(kind: str) -> None:
    model, less = compare(Gated(MODULES[kind](), trains=False), "auto")
    assert less == 0
    assert patch_report(model).sites[0].reason.startswith("nothing to gain")


class Classifier(nn.Module):
    """A pooler: an activation and a dropout before a Linear that trains; behind a large body."""

    def __init__(self, act: nn.Module, trains: bool, width: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.pool, self.act, self.dropout = nn.Linear(8, width), act, nn.Dropout(0.1)
        self.out = nn.Linear(width, 3).requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(self.act(self.pool(self.body(x)[:1]))))


@pytest.mark.parametrize(("kind", "strategy"), [("relu", "codes"), ("tanh", "recompute")])
@pytest.mark.parametrize("config", ["auto", "exact"])
def test_what_a_dropout_makes_of_an_output_is_another_tensor(
    kind: str, strategy: str, config: str
) -> None:
    model = Classifier(MODULES[kind](), trains=True, width=64)
    report = plan_patch(model, config, example_inputs=batch())
    (site,) = (site for site in report.sites if site.name == "act")
    assert (site.strategy, site.kind, site.approximate) == (strategy, kind, False)
    kept = PatchConfig(activations="keep")
    assert report.saved_after < plan_patch(model, kept, example_inputs=batch()).saved_after


class Reused(nn.Module):
    """One ReLU at many places, of which all but the last are before a Linear that trains."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(places))
        self.act, self.last = nn.Hardsigmoid(), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = 4 * layer(x)
            kept = 2 * x if layer is self.layers[-1] else x.square()
            x = self.act(kept if layer is self.layers[-1] else x) + 0 * kept
        return self.last(x)


@pytest.mark.parametrize(("places", "strategy"), [(2, "codes"), (40, "keep")])
def test_codes_of_all_calls_may_cost_more_than_one_saves(places: int, strategy: str) -> None:
    model = Reused(places)
    report = plan_patch(model, {"activations": "codes"}, example_inputs=batch())
    (site,) = report.sites
    assert site.strategy == strategy
    assert strategy == "codes" or site.reason.startswith("nothing to gain")
    if strategy == "codes":
        assert report.saved_after < report.saved_before


def test_auto_leaves_a_small_tanh_exact() -> None:
    rows = torch.randn(2000, 8)
    for config, strategy in (("auto", "keep"), ({"activations": "codes"}, "codes")):
        report = plan_patch(Classifier(nn.Tanh(), trains=False), config, example_inputs=rows)
        (site,) = (site for site in report.sites if site.name == "act")
        assert site.strategy == strategy
        assert strategy == "codes" or "next to nothing to gain" in site.reason


@pytest.mark.parametrize("bits", STEP_BITS)
@pytest.mark.parametrize("kind", sorted(set(MODULES) - set(EXACT)))
def test_codes_take_the_bits_that_are_asked_for(kind: str, bits: int) -> None:
    model = Mlp(MODULES[kind]())
    twin = copy.deepcopy(model)
    config = {"norms": "keep", "activations": "codes", "bits": bits}
    patch_model(model, config, example_inputs=batch())
    (site,) = patch_report(model).sites
    assert (site.strategy, site.approximate) == ("codes", True)
    assert site.reason.startswith(f"{bits}-bit codes")
    _, _, before = stepped(twin)
    y, _, saved = stepped(model)
    assert before - saved == 4 * ROWS * WIDTH - ROWS * WIDTH * bits // 8
    # the gradient of the input, from the table
    inner = 3 * twin.up(batch())
    inner = inner.detach().requires_grad_()
    out = twin.down(twin.act(inner))
    assert torch.equal(out, y)
    dy = 2 * out.detach() @ twin.down.weight
    table = STEP_TABLES[kind][bits]  # type: ignore[index]  # kinds, as text
    levels = torch.tensor((*table.levels, table.levels[0]))
    slope = levels[torch.bucketize(inner.detach(), torch.tensor(table.thresholds))]
    expected = 3 * (dy * slope).t() @ batch()
    assert torch.allclose(model.up.weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_more_bits_are_nearer_to_the_gradient() -> None:
    errors = []
    for bits in STEP_BITS:
        torch.manual_seed(0)
        model = Mlp(nn.SiLU())
        truth = stepped(copy.deepcopy(model))[1]
        patch_model(model, {"activations": "codes", "bits": bits}, example_inputs=batch())
        errors.append(float((stepped(model)[1][0] - truth[0]).norm() / truth[0].norm()))
    # of SiLU, one bit is as good as two: both tables jump at 0, where inputs are (docs/step-tables.md)
    assert errors[3] < 0.5 * errors[2] < 0.25 * errors[1]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.LeakyReLU(0.1), "LeakyReLU(negative_slope=0.1)"),
        (nn.LeakyReLU(0.01001), "LeakyReLU(negative_slope=0.01001)"),
        (nn.ELU(0.5), "ELU(alpha=0.5)"),
        (nn.Softplus(beta=2), "Softplus(beta=2"),
        (nn.Hardtanh(), "Hardtanh(min_val=-1.0"),
        (nn.CELU(1.5), "CELU(alpha=1.5)"),
        (nn.RReLU(), "RReLU("),
    ],
)
def test_other_parameters_are_another_activation(module: nn.Module, name: str) -> None:
    for config in ("auto", "exact", "paper"):
        (site,) = plan_patch(Mlp(module), config, example_inputs=batch()).sites
        assert (site.kind, site.strategy) == ("other", "keep")
        if not isinstance(module, nn.RReLU) or "step table" in site.reason:
            assert f"no step table for {name}" in site.reason


@pytest.mark.slow
def test_bits_do_not_change_what_auto_decides() -> None:
    def rows(bits: int) -> list[tuple[str, str]]:
        config = PatchConfig(bits=bits)
        models = [Mlp(make(), trains) for make in MODULES.values() for trains in (False, True)]
        plans = [plan_patch(model, config, example_inputs=batch()) for model in models]
        return [(site.kind, site.strategy) for plan in plans for site in plan.sites]

    assert rows(1) == rows(2) == rows(4)


@pytest.mark.parametrize("bits", [0, 5, "2", 2.0, True, None])
def test_bits_are_1_to_4(bits: Any) -> None:
    with pytest.raises(ConfigError, match=r"bits: .* is not one of 1, 2, 3, 4"):
        PatchConfig(bits=bits)


@pytest.mark.parametrize("kind", ["relu", "hardswish", "tanh"])
def test_shapes_and_dtypes_that_are_easily_wrong(kind: str) -> None:
    """Nothing at all, strides, half precision, autocast."""
    module = CodesActivation(kind, 3)  # type: ignore[arg-type]  # kinds, as text
    stock = MODULES[kind]()
    for x in (
        torch.randn(0, 4), torch.randn(4, 5).t(), torch.randn(3, 4, 5).permute(2, 0, 1)[::2],
        torch.randn(5, 1).expand(5, 7), torch.randn(()), torch.randn(9).half(), torch.randn(9).bfloat16(),
    ):  # fmt: skip
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        y, expected = module(ours), stock(theirs)
        assert torch.equal(y, expected) and y.dtype == x.dtype
        y.sum().backward()
        assert ours.grad.shape == x.shape and bool(ours.grad.isfinite().all())
        if kind == "relu":
            expected.sum().backward()
            assert torch.equal(ours.grad, theirs.grad)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == stock(x).dtype == torch.float32

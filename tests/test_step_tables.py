"""`fit_step_table` and ``tables``: the best steps of any activation, or why there are none."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner, Result

pytest.importorskip("scipy")

from lowmem_patch import fit_step_table
from lowmem_patch.cli import app
from lowmem_patch.constants import STEP_TABLES
from lowmem_patch.errors import FitError, LowmemPatchError
from lowmem_patch.tables import search
from lowmem_patch.tables.expression import function_names, parse_activation
from lowmem_patch.tables.function import make_curve


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["tables", *map(str, arguments)])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["gelu", "tanh", "relu6"])
def test_fitting_finds_the_shipped_table(kind: str, bits: int) -> None:
    begin = time.monotonic()
    table = fit_step_table(kind, bits)
    assert time.monotonic() - begin < 30  # of seconds; a fraction of that on a machine at rest
    assert bits != 3 or table == fit_step_table(kind, bits)
    shipped = STEP_TABLES[kind][bits]  # type: ignore[index]  # kinds, as text
    assert table.thresholds == pytest.approx(shipped.thresholds, abs=1e-8)
    assert table.levels == pytest.approx(shipped.levels, abs=1e-8)


@pytest.mark.parametrize("kind", STEP_TABLES)
def test_a_bit_more_is_never_worse(kind: str) -> None:
    """By the objective, in which a table of more bits may have the steps of one with fewer."""
    tables = [STEP_TABLES[kind][bits] for bits in (1, 2, 3, 4)]  # type: ignore[index]
    for fewer, more in pairwise(tables):
        assert more == fewer if fewer.exact else more.squared_distance < fewer.squared_distance


def test_functions_modules_and_expressions_are_the_same() -> None:
    named = fit_step_table("mish", 2)
    for given in (
        F.mish,
        nn.Mish(),
        nn.Mish().half(),
        "x * tanh(softplus(x))",
        lambda x: F.mish(x),
    ):
        found = fit_step_table(given, 2)
        assert found.thresholds == pytest.approx(named.thresholds, abs=1e-7), given
        assert found.squared_distance == pytest.approx(named.squared_distance, rel=1e-9)


def test_parameters_and_in_place_functions_are_taken_as_they_are() -> None:
    assert fit_step_table(nn.LeakyReLU(0.2, inplace=True), 3).levels == (0.2, 1.0)
    assert fit_step_table("leaky_relu(x, 0.2)").levels == (0.2, 1.0)
    assert fit_step_table(nn.PReLU(init=0.25)).levels == (0.25, 1.0)
    table = fit_step_table("hardtanh(x, -2, 3)")
    assert (table.thresholds, table.levels, table.exact) == ((-2.0, 3.0), (0.0, 1.0), True)


def test_pieces_that_need_more_bits_are_exact_with_these() -> None:
    staircase = "relu(x) - 0.5 * relu(x - 1) + 0.25 * relu(x - 2)"
    assert not fit_step_table(staircase, 1).exact
    table = fit_step_table(staircase, 4)
    assert (table.bits, table.exact) == (2, True)
    assert table.thresholds == pytest.approx((0, 1, 2), abs=1e-12)
    assert table.levels == pytest.approx((0, 1, 0.5, 0.75), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gelu", "elu", "sigmoid", "hardswish", "mish"])
@pytest.mark.parametrize("bits", [2, 3])
def test_no_start_of_many_leads_to_less(kind: str, bits: int) -> None:
    curve = make_curve(kind)
    best = STEP_TABLES[kind][bits]  # type: ignore[index]  # kinds, as text
    random = np.random.default_rng(0)
    low, high = curve.edges[0] / 3, curve.edges[-1] / 3
    for _ in range(6):
        places = np.sort(random.uniform(low, high, len(best.thresholds)))
        start = search._chain(curve, places, curve(places))
        assert search._polished(curve, start).distance >= best.squared_distance * (1 - 1e-9)


def test_the_gradient_of_the_distance_is_its_derivative() -> None:
    curve, step = make_curve("mish"), 1e-6
    knots, heights = np.array([-3.0, -1.0, 0.5, 2.0]), np.array([0.0, -0.2, 0.3, 0.0])
    _, by_place, by_height = search.distance_and_gradient(curve, knots, heights)
    for number in range(4):
        moved = knots[None, :] + np.array([[-step], [step]]) * (np.arange(4) == number)
        below, above = (search.distance_and_gradient(curve, k, heights)[0] for k in moved)
        assert (above - below) / (2 * step) == pytest.approx(by_place[number], rel=1e-6)
    for number in (1, 2):
        moved = heights[None, :] + np.array([[-step], [step]]) * (np.arange(4) == number)
        below, above = (search.distance_and_gradient(curve, knots, h)[0] for h in moved)
        assert (above - below) / (2 * step) == pytest.approx(by_height[number - 1], rel=1e-6)


@pytest.mark.slow
def test_the_bound_holds_for_normal_inputs() -> None:
    x = torch.linspace(-12, 12, 2_400_001, dtype=torch.float64, requires_grad=True)
    density = torch.exp(-x.detach().square() / 2) / math.sqrt(2 * math.pi)
    for kind, tables in STEP_TABLES.items():
        (slope,) = torch.autograd.grad(parse_activation(kind)(x).sum(), x)
        for table in tables.values():
            levels = torch.tensor((*table.levels, table.levels[0]), dtype=torch.float64)
            steps = levels[torch.bucketize(x.detach(), torch.tensor(table.thresholds).double())]
            error = float(torch.trapezoid((slope - steps) * density, x.detach()))
            assert abs(error) <= table.mean_derivative_bound + 1e-6, kind


REFUSED: list[tuple[Any, str]] = [
    (lambda x: torch.softmax(x, -1), "not elementwise"),
    (lambda x: x.cumsum(-1), "not elementwise"),
    (lambda x: x.mean(), "not elementwise"),
    (nn.Dropout(0.5).train().forward, "not elementwise"),
    (nn.LayerNorm(7), "could not be run"),
    (nn.PReLU(3), "could not be run"),
    (lambda x: (x, x), "not elementwise"),
    ("log(x)", "log(x) is not finite at x = 0"),
    ("1 / x", "not finite at x = 0"),
    ("sqrt(x)", "is not finite at x = -"),
    ("exp(x)", "no limit at +infinity"),
    ("x * x", "no limit at -infinity"),
    ("relu_squared", "no limit at +infinity"),
    ("sin(x)", "no limit at -infinity"),
    ("softsign", "distance from a straight line"),
    ("sign(x)", "not continuous: it jumps at x = 0"),
    ("where(x > 0.3, x, 0)", "not continuous: it jumps at x = 0.3"),
    ("2 * x + 1", "straight line"),
    (3, "int is no activation"),
    ("relu3", "is not known: write x, pi or e (functions abs, "),
]


@pytest.mark.parametrize(("function", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_no_activation_is_told_why(function: Any, why: str) -> None:
    with pytest.raises(FitError) as caught:
        fit_step_table(function)
    assert why in str(caught.value)
    assert isinstance(caught.value, LowmemPatchError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("bits", [0, 5, 2.5, True, "2"])
def test_bits_are_1_to_4(bits: Any) -> None:
    with pytest.raises(ValueError, match="bits must be 1, 2, 3 or 4"):
        fit_step_table("gelu", bits)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "x.data", "x[0]", "(lambda: x)()", "[x for x in x]",
        "x if x else x", "open('x')", "getattr(x, 'data')", "x := 3", "x; x", "f'{x}'", "exec('1')",
        "y", "1 + 1", "sigmoid", "sigmoid(x, out=x)", "x and x", "not x", "'x'", "x @ x", "True", "x + 1j",
        "", "x" * 1001, "(" * 300, "~x", "9 ** 9 ** 9 ** 9 * x", "(-1) ** 0.5 * x", "elu(x, x)", "exp()",
        "x > 0",
    ],
)  # fmt: skip
def test_only_expressions_of_x_are_read(text: str) -> None:
    if text == "sigmoid":  # a name alone is the function
        assert torch.equal(parse_activation(text)(torch.zeros(1)), torch.full((1,), 0.5))
        return
    with pytest.raises(FitError):
        parse_activation(text)(torch.linspace(-1, 1, 5, dtype=torch.float64))


def test_expressions_compute_what_they_say() -> None:
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    pairs: list[tuple[str, Tensor]] = [
        ("-x ** 2 / (1 + abs(x)) * pi", -(x**2) / (1 + x.abs()) * math.pi),
        ("where(x > 0, x, 0.1 * (exp(x) - 1))", torch.where(x > 0, x, 0.1 * (x.exp() - 1))),
        ("maximum(minimum(x, 2), -e)", x.clamp(-math.e, 2)),
        ("clamp(x, -1, 2.5)", x.clamp(-1, 2.5)),
        ("celu(x, 0.5)", F.celu(x, 0.5)),
        ("gelu_tanh(x)", F.gelu(x, approximate="tanh")),
    ]
    for text, expected in pairs:
        assert torch.allclose(parse_activation(text)(x), expected, rtol=1e-14, atol=1e-14), text
    for name in set(function_names()) - {"clamp", "maximum", "minimum", "where"}:
        assert parse_activation(name)(x + 4).shape == x.shape


def test_the_command_gives_the_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = call("fit", "mish", "--bits", "2", "--json", "--plot", tmp_path / "mish.png")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["thresholds"] == pytest.approx(STEP_TABLES["mish"][2].thresholds, abs=1e-8)
    assert (tmp_path / "mish.png").read_bytes().startswith(b"\x89PNG")
    text = call("fit", "relu6", "--bits", "4").stdout
    assert "relu6: 1 bit an element" in text and "exact" in text
    assert call("fit", "mish", "--bits", "5").exit_code == 2


def test_the_command_refuses_in_one_line() -> None:
    result = call("fit", "exp(x)")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: exp(x) has no limit at +infinity")
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_command_lists_what_ships() -> None:
    lines = call("list").stdout.splitlines()
    assert {line.split()[0] for line in lines[1:]} == set(STEP_TABLES)
    assert set(json.loads(call("list", "--json").stdout)["tables"]) == set(STEP_TABLES)


def test_without_scipy_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "lowmem_patch.tables.search")
    monkeypatch.delattr("lowmem_patch.tables.search")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(FitError, match=r"lowmem-patch\[tables\]"):
        fit_step_table("mish")

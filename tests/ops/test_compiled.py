"""The formulas that torch.compile sees: same values and gradients, and the partitioner keeps to the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import ACTIVATION_KINDS, NormSettings
from lowmem_patch.functional import compiled
from tests.ops.conftest import INTERPRETED
from tests.support.judge import assert_within_budget
from tests.support.saved import saved_storages, storage_of

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="no kernel takes part"),
    # what torch's own compiler does to torch
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
ROWS, COLUMNS = 24, 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_and_count(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> tuple[Tensor, int]:
    """The result of the compiled function, and the bytes kept that are no input."""
    # decomposed and cut as for inductor, but run eagerly
    run = torch.compile(function, fullgraph=True, backend="aot_eager_decomp_partition")
    run(*inputs)
    y, saved = saved_storages(lambda: run(*inputs))
    given = {storage_of(t) for t in inputs}
    return y, sum(size for storage, size in saved.items() if storage not in given)


def check(
    function: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> int:
    y, kept = compile_and_count(function, inputs)
    theirs = plain(*inputs)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    exact = plain(*wide)
    unit = torch.finfo(min((y.dtype, *(t.dtype for t in inputs)), key=lambda d: d.itemsize)).eps
    assert y.dtype == theirs.dtype
    assert_within_budget(y, theirs, exact.detach(), unit * exact.detach().abs().max())
    dy = torch.randn_like(y)
    for mine, other, true in zip(
        torch.autograd.grad(y, inputs, dy),
        torch.autograd.grad(theirs, inputs, dy),
        torch.autograd.grad(exact, wide, dy.to(exact.dtype)),
        strict=True,
    ):
        assert_within_budget(mine, other, true, unit * true.abs().max())
    return kept


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_activation_is_recomputed_for_a_linear(kind: Any) -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(compiled.activation(x * 2, kind), weight)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(reference.activate(x * 2, kind), weight)

    kept = check(run, plain, (leaf(ROWS, COLUMNS), leaf(5, COLUMNS)))
    assert kept == 0  # of x * 2 too, which x gives again


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_gated_product_is_recomputed_for_a_linear(kind: Any) -> None:
    def run(x: Tensor, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return F.linear(compiled.activation(F.linear(x, gate), kind, F.linear(x, up)), weight)

    def plain(x: Tensor, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return F.linear(reference.activate(F.linear(x, gate), kind) * F.linear(x, up), weight)

    inputs = (leaf(ROWS, 8), leaf(COLUMNS, 8), leaf(COLUMNS, 8), leaf(5, COLUMNS))
    assert check(run, plain, inputs) == 2 * 4 * ROWS * COLUMNS  # gate and up


@pytest.mark.parametrize("saved_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saves_z", [False, True], ids=["output", "z"])
@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_saves_one_tensor(
    dtype: torch.dtype,
    affine: bool,
    centered: bool,
    saves_z: bool,
    saved_dtype: torch.dtype | None,
) -> None:
    if saved_dtype is not None and (saved_dtype == dtype or saves_z):
        pytest.skip("nothing lower, or an output that would be computed from it")
    settings = NormSettings(1e-5, 0.0 if centered else 1.0, centered)

    def vectors(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        if not affine:
            return None, None
        return rest[0], rest[1] if centered else None

    low = dtype if saved_dtype is None else saved_dtype

    def run(x: Tensor, linear: Tensor, *rest: Tensor) -> Tensor:
        saved_as: Any = None if saves_z else "wide"
        y = compiled.norm(x.sin(), *vectors(rest), settings, dtype, low, saved_as)
        return F.linear(y.to(low), linear)

    def plain(x: Tensor, linear: Tensor, *rest: Tensor) -> Tensor:
        y, *_ = reference.norm_forward(x.sin(), *vectors(rest), settings, x.dtype)
        return F.linear(y.to(linear.dtype), linear)

    weight = (torch.rand(COLUMNS) + 0.5).to(dtype).requires_grad_()
    rest = (weight, leaf(COLUMNS, dtype=dtype))[: (2 if centered else 1) if affine else 0]
    inputs = (leaf(ROWS, COLUMNS, dtype=dtype), leaf(5, COLUMNS, dtype=low), *rest)
    kept = check(run, plain, inputs)
    one = ROWS * COLUMNS * low.itemsize + 4 * ROWS
    # z may be computed from x again, which costs the compiler nothing here
    assert kept <= one if saves_z else kept == one


def test_linear_keeps_no_casts() -> None:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return compiled.linear(x, weight, bias, torch.bfloat16)

    x, weight, bias = leaf(ROWS, COLUMNS), leaf(5, COLUMNS), leaf(5)
    y, kept = compile_and_count(run, (x, weight, bias))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = F.linear(x, weight, bias)
    assert kept == 0 and torch.equal(y, theirs)
    dy = torch.randn_like(y)
    for mine, other in zip(
        torch.autograd.grad(y, (x, weight, bias), dy),
        torch.autograd.grad(theirs, (x, weight, bias), dy),
        strict=True,
    ):
        assert torch.equal(mine, other)

"""Whether the gradients of a candidate are those of a norm or an activation, in training mode.

A ``detach()`` inside, a straight-through estimator or a hook that clips leaves values as they are. So the
gradients of inputs and parameters are compared with float64's, for rows and gradients of many sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch import reference
from lowmem_patch.constants import NormSettings
from lowmem_patch.formulas import FORWARD
from lowmem_patch.functional import ActivationKind
from lowmem_patch.tracing.isolation import NoForeignKernels

GRID = torch.linspace(-9, 9, 721)
# an activation may be another one far out (GELU clipped at 10)
FAR = torch.tensor([-1e4, -300.0, -30.0, -11.0, 11.0, 30.0, 300.0, 1e4])
NEAR = torch.tensor([-1e-2, -1e-3, -1e-4, 1e-4, 1e-3, 1e-2])  # a threshold beside 0
SMALL = 0.1
# relative to the largest output; candidates compute in float32 whatever they are given
_TOLERANCE = 2e-5
# between the points of the grid: at a kink (0, 3, 6) each code has a slope of its own
_SLOPE_INPUTS = torch.cat((GRID[:-1] + 0.0125, FAR, NEAR))
_STARTS = torch.tensor([1.0, -1.0, 1e3, -1e3, 1e-3, -1e-3])  # gradients may be clipped
_SLOPE_TOLERANCE = 5e-5  # of the slope in float32 that errs most, of tanh-GELU: 1.03e-5
# of rows, which may be clipped far out, and of their gradients
_SIZES = ((1.0, 1.0), (2.0, 1e3), (8.0, 1.0), (50.0, 1e-3), (1000.0, 1e3))
_OUTLIER = 100.0  # of one channel of a row, as language models have


def is_close(actual: Tensor | None, expected: Tensor, least: float = 1e-30) -> bool:
    """Whether they differ by little beside the largest value expected, or ``least``."""
    if actual is None:
        return False
    scale = expected.abs().max().clamp_min(least)
    return bool(((actual.double() - expected).abs().max() / scale) < _TOLERANCE)


def with_gradients(
    function: Callable[..., Any],
    given: Iterable[Tensor],
    parameters: Iterable[Tensor],
    start: Tensor,
) -> list[Tensor] | None:
    """The value of a function, or of a module in training mode, and the gradients of what it is given and of
    its parameters, where ``start`` is the value's; None where one is missing."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    if isinstance(function, nn.Module):
        function.train()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            torch.random.fork_rng(devices=()),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            NoForeignKernels(),
        ):
            y = function(*(leaf.clone() for leaf in leaves))  # it may write into them
            gradients = torch.autograd.grad(y, [*leaves, *parameters], start)
    except Exception:  # a module that cannot run on plain rows, or does not use one of them
        return None
    finally:
        if isinstance(function, nn.Module):
            function.eval()
    return [y.detach(), *gradients]


def has_gradients_of(
    formula: Callable[..., Tensor],
    module: nn.Module,
    given: Sequence[Tensor],
    parameters: Sequence[Tensor],
    start: Tensor,
    least: float = 1e-30,
) -> bool:
    """Whether a module has the value and the gradients of a formula in float64, which gets the parameters as
    well; the last two arguments as of `with_gradients` and `is_close`."""
    found = with_gradients(module, given, parameters, start)
    wide = [tensor.detach().double() for tensor in (*given, *parameters)]
    wanted = with_gradients(formula, wide, (), start.double())
    if found is None or wanted is None:
        return False
    return all(is_close(*pair, least) for pair in zip(found, wanted, strict=True))


def rows_and_starts(rows: Tensor) -> Iterator[tuple[float, Tensor, float, Tensor]]:
    """Rows to probe, after their size, and the gradients of their values, after theirs."""
    # of no order: of a row of nearly equal ones a LayerNorm's gradient is what their rounding leaves
    start = torch.randn(rows.shape, generator=torch.Generator().manual_seed(3))
    for size, scale in _SIZES:
        yield size, rows * size, scale, start * scale
    outlier = rows.clone()
    outlier[..., -1, 0] *= _OUTLIER
    yield 1.0, outlier, 1.0, start


def has_gradients_of_norm(
    module: nn.Module, rows: Tensor, names: tuple[str, str], settings: NormSettings
) -> bool:
    """Whether a module with these names of gamma and beta has the values and the gradients of this norm, for
    rows ``[..., N]``, float32, of any size."""
    vectors = [getattr(module, name, None) for name in names]
    present = [vector is not None for vector in vectors]
    own = [vector for vector in vectors if vector is not None]

    def formula(x: Tensor, *given: Tensor) -> Tensor:
        taken = iter(given)
        weight, bias = (next(taken) if one else None for one in present)
        return reference.norm(x, weight, bias, settings, torch.float64)[0]

    # a norm of two channels has next to no gradient
    return all(
        has_gradients_of(formula, module, [x], own, start, least=scale / size)
        for size, x, scale, start in rows_and_starts(rows)
    )


def has_slope_of(function: Callable[[Tensor], Any], kind: ActivationKind) -> bool:
    """Whether a function has this activation's gradient where it has a finite one."""
    count = len(_SLOPE_INPUTS)
    start = _STARTS.repeat(-(-count // len(_STARTS)))[:count]
    found = with_gradients(function, [_SLOPE_INPUTS], (), start)
    wanted = with_gradients(FORWARD[kind], [_SLOPE_INPUTS.double()], (), start.double())
    if found is None or wanted is None:
        return False
    slope, expected = found[1].double() / start, wanted[1] / start
    known = slope.isfinite()  # exp(x) overflows far out
    error = (slope - expected).abs() / expected.abs().clamp_min(SMALL)
    return bool(known.any()) and bool((error[known] <= _SLOPE_TOLERANCE).all())

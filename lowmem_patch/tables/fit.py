"""The step table of any activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from lowmem_patch.constants import STEP_BITS, StepTable
from lowmem_patch.errors import FitError
from lowmem_patch.tables.function import Array, Curve, make_curve

if TYPE_CHECKING:
    from lowmem_patch.tables import search  # needs scipy

_DIGITS = 12  # of thresholds; float32, in which they are compared, has 7


def fit_step_table(function: str | Callable[[Tensor], Tensor], bits: int = 2) -> StepTable:
    """The best step function for the derivative of an activation, for codes of so many bits.

    Minimised is the L2 distance of the activation h to h~, whose derivative the step function is, among
    those h~ that are equal to h at both ends (arXiv 2406.16282, section 4). The search is global (dynamic
    programming, then a quasi-Newton method) and gives the same result each time; it takes seconds and needs
    scipy.

    Example:
        >>> fit_step_table("mish", bits=2).thresholds
        >>> fit_step_table(lambda x: x * torch.sigmoid(1.5 * x), bits=3).squared_distance

    Args:
        function: a name (``"mish"``), an expression of x (``"x * tanh(softplus(x))"``, see
            `lowmem_patch.tables.expression`), a function of a float64 tensor, or a module.
        bits: 1 to 4.

    Returns:
        the thresholds, the levels between them, and the distance that is left.

    Raises:
        FitError: the function is not elementwise, not finite, not continuous, or does not become a straight
            line at an end; the error says which.
        ValueError: ``bits`` is not 1, 2, 3 or 4.
    """
    return table_of(make_curve(function), bits)


def table_of(curve: Curve, bits: int) -> StepTable:
    """`fit_step_table` of a curve."""
    if bits not in STEP_BITS or isinstance(bits, bool):
        raise ValueError(f"fit_step_table: bits must be 1, 2, 3 or 4, got {bits!r}")
    try:
        from lowmem_patch.tables import search
    except ImportError as error:
        raise FitError(
            "a step table is fitted with scipy: pip install 'lowmem-patch[tables]'"
        ) from error
    cyclic = curve.left.slope == curve.right.slope
    for fewer in range(1, bits + 1):
        exact = search.exact_chain(curve, 2**fewer - (not cyclic))
        if exact is not None:
            return _table(curve, exact, 0.0)
    found = search.best_chain(curve, 2**bits - (not cyclic))
    return _table(curve, found, found.distance)


def derivative_at(table: StepTable, x: Array) -> Array:
    """h~'(x)."""
    # a cyclic table comes to its first level again
    levels = np.array((*table.levels, table.levels[0]))
    found: Array = levels[np.searchsorted(np.array(table.thresholds), x)]
    return found


def primitive_at(table: StepTable, curve: Curve, x: Array) -> Array:
    """h~(x)."""
    value = curve.left(x)
    for threshold, slope in zip(table.thresholds, table.slopes, strict=True):
        value = value + slope * np.maximum(x - threshold, 0.0)
    return value


def _table(curve: Curve, chain: search.Chain, distance: float) -> StepTable:
    inner = np.diff(chain.heights) / np.diff(chain.knots)
    levels = (curve.left.slope, *np.round(inner, 15).tolist(), curve.right.slope)
    if curve.left.slope == curve.right.slope:
        levels = levels[:-1]
    thresholds = np.round(chain.knots, _DIGITS) + 0.0  # no -0.0
    table = StepTable(tuple(thresholds.tolist()), levels, distance, 0.0)
    if table.exact:
        return table
    # the peaks are at the thresholds, or between them
    x = np.union1d(np.linspace(curve.edges[0], curve.edges[-1], 200_001), thresholds)
    largest = float(np.abs(curve(x) - primitive_at(table, curve, x)).max())
    return dataclasses.replace(table, largest_difference=largest)

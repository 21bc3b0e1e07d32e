"""An activation as numbers: evaluated in float64, with its straight lines at both ends; or why it is none."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowmem_patch.errors import FitError
from lowmem_patch.tables.expression import parse_activation

Array = NDArray[np.float64]

_FAR = (256.0, 512.0, 1024.0)  # where an activation must have become a straight line
_SLOPE_TOLERANCE = 1e-4
_LINE_TOLERANCE = 1e-9
# closer to its line than this, relative to the largest distance, nothing is left to fit
_NEGLIGIBLE = 1e-14
_SMALLEST_CELL = 1e-7
_LARGEST_STEP = 1e-3  # across such a cell
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclasses.dataclass(frozen=True)
class Line:
    """slope x + intercept."""

    slope: float
    intercept: float

    def __call__(self, x: Array) -> Array:
        return self.slope * x + self.intercept


@dataclasses.dataclass(frozen=True)
class Curve:
    """An activation that becomes a straight line at both ends.

    Attributes:
        function: of a float64 array.
        left, right: the lines.
        edges: a mesh of the part between, so fine that 16 nodes a cell integrate the function.
    """

    function: Callable[[Array], Array]
    left: Line
    right: Line
    edges: Array

    def __call__(self, x: Array) -> Array:
        return self.function(x)

    def nodes(self, knots: Array) -> tuple[Array, Array]:
        """Nodes and weights of Gauss and Legendre's rule, for integrands with kinks at ``knots``."""
        edges = np.unique(np.concatenate((self.edges, knots)))
        centre, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
        nodes = centre[:, None] + half[:, None] * _NODES
        return nodes.ravel(), (half[:, None] * _WEIGHTS).ravel()


def make_curve(function: str | Callable[[Tensor], Tensor]) -> Curve:
    """The curve of a named activation, an expression of x, a torch function or a module.

    Raises:
        FitError: it cannot be run, is not elementwise, not finite or not continuous, or does not become
            a straight line at an end; the error says which.
    """
    name, run = _runnable(function)

    def evaluate(x: Array) -> Array:
        return _run(run, name, torch.from_numpy(np.ascontiguousarray(x))).numpy()

    _check_elementwise(run, name)
    _check_finite(evaluate, name)
    left, right = (_line(evaluate, name, end) for end in (-1.0, 1.0))
    edges = _mesh(evaluate, name, left, right)
    return Curve(evaluate, left, right, edges)


def _runnable(function: str | Callable[[Tensor], Tensor]) -> tuple[str, Callable[[Tensor], Tensor]]:
    if isinstance(function, str):
        return function.strip(), parse_activation(function)
    if isinstance(function, nn.Module):
        return str(function), copy.deepcopy(function).double().cpu().eval()
    if not callable(function):
        raise FitError(
            f"{type(function).__name__} is no activation: give a name, an expression of x, a function or "
            "a module"
        )
    return getattr(function, "__name__", type(function).__name__), function


def _run(run: Callable[[Tensor], Tensor], name: str, x: Tensor) -> Tensor:
    """``run(x)`` in float64; ``x`` is a copy, which a function may overwrite."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = run(x.clone())
    except FitError:
        raise
    except Exception as error:  # of a foreign function: the user is told which and why
        raise FitError(f"{name} could not be run on a float64 tensor: {error}") from error
    if not isinstance(y, Tensor) or y.shape != x.shape:
        given = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise FitError(
            f"{name} is not elementwise: a tensor of shape {tuple(x.shape)} gave {given}"
        )
    return y.detach().to(torch.float64)


def _check_elementwise(run: Callable[[Tensor], Tensor], name: str) -> None:
    """Each element alone, at another place and in another shape must give what it gave before."""
    x = torch.linspace(-7, 7, 240, dtype=torch.float64)
    order = torch.arange(x.numel()).view(-1, 8).t().reshape(-1)
    whole = _run(run, name, x)
    found = (
        _run(run, name, x),  # the same again: not random
        _run(run, name, x[order])[order.argsort()],
        _run(run, name, x.view(2, 3, 40)).view(-1),
        torch.cat([_run(run, name, part) for part in x.view(6, 40)]),
    )
    for other in found:
        if not torch.allclose(whole, other, rtol=1e-12, atol=1e-12, equal_nan=True):
            raise FitError(
                f"{name} is not elementwise: an element's result depends on its neighbours, its place or "
                "chance"
            )


def _check_finite(function: Callable[[Array], Array], name: str) -> None:
    x = np.linspace(-32, 32, 6401)
    bad = x[~np.isfinite(function(x))]
    if bad.size:
        raise FitError(f"{name} is not finite at x = {bad[np.argmin(np.abs(bad))]:.6g}")


def _line(function: Callable[[Array], Array], name: str, end: float) -> Line:
    """What the function becomes at an end, -1 or 1."""
    where = "-infinity" if end < 0 else "+infinity"
    x = end * np.array(_FAR)
    with np.errstate(all="ignore"):
        y = function(x)
        first, slope = np.diff(y) / np.diff(x)
    if not (np.isfinite(y).all() and abs(slope - first) <= _SLOPE_TOLERANCE * max(1.0, abs(slope))):
        raise FitError(
            f"{name} has no limit at {where}: its derivative is {first:.6g} between x = {x[0]:.0f} and "
            f"{x[1]:.0f} and {slope:.6g} between {x[1]:.0f} and {x[2]:.0f}, which no step function follows"
        )
    intercepts = y - slope * x
    intercept = float(intercepts[1])
    scale = max(1.0, abs(slope))
    if np.ptp(intercepts) > _LINE_TOLERANCE * max(scale, abs(intercept)):
        raise FitError(
            f"{name} has no limit at {where}: between x = {x[0]:.0f} and {x[2]:.0f} its distance from a "
            f"straight line still changes by {abs(intercepts[0] - intercepts[2]):.2g}"
        )
    slope = float(slope) if abs(slope) > 1e-12 else 0.0
    return Line(slope, intercept if abs(intercept) > 1e-11 * scale else 0.0)


def _mesh(function: Callable[[Array], Array], name: str, left: Line, right: Line) -> Array:
    """Edges of cells from where the function leaves its left line to where it has reached the right one."""
    x = np.linspace(-_FAR[0], _FAR[0], 2 * int(_FAR[0]) * 8 + 1)
    y = function(x)
    off_left, off_right = np.abs(y - left(x)), np.abs(y - right(x))
    smallest = _NEGLIGIBLE * np.maximum(1.0, np.abs(y))  # a straight line has rounding errors, too
    begin = x[off_left > smallest]
    end = x[off_right > smallest]
    if not begin.size or not end.size:
        raise FitError(f"{name} is a straight line: its derivative needs no bits")
    low, high = min(float(begin[0]), float(end[-1])), max(float(begin[0]), float(end[-1]))
    edges = np.arange(np.floor(low) - 1, np.ceil(high) + 1.5, 0.5)
    _check_continuous(function, name, edges - _SMALLEST_CELL / 2, edges + _SMALLEST_CELL / 2)
    return _refined(function, name, edges)


def _check_continuous(
    function: Callable[[Array], Array], name: str, low: Array, high: Array
) -> None:
    """Refuse a function that jumps within one of these small cells."""
    jumps = np.abs(function(high) - function(low)) > _LARGEST_STEP
    if jumps.any():
        place = float((low + high)[jumps][0]) / 2
        raise FitError(f"{name} is not continuous: it jumps at x = {place:.6g}")


def _refined(function: Callable[[Array], Array], name: str, edges: Array) -> Array:
    """Cells are halved until 16 nodes integrate the function over each: finely where it has kinks."""
    done: list[Array] = [edges]
    low, high = edges[:-1], edges[1:]
    while low.size:
        middle, half = (low + high) / 2, (high - low) / 2
        whole = half * (function(middle[:, None] + half[:, None] * _NODES) @ _WEIGHTS)
        quarter = half / 2
        parts = sum(
            quarter * (function(centre[:, None] + quarter[:, None] * _NODES) @ _WEIGHTS)
            for centre in (middle - quarter, middle + quarter)
        )
        scale = np.maximum(1.0, np.abs(function(middle)))
        rough = np.abs(whole - parts) > 1e-13 * scale * np.minimum(1.0, 2 * half)
        rough &= half > _SMALLEST_CELL / 2
        small = half <= _SMALLEST_CELL
        _check_continuous(function, name, low[small], high[small])
        middle = middle[rough]
        done.append(middle)
        low, high = np.concatenate((low[rough], middle)), np.concatenate((middle, high[rough]))
    return np.unique(np.concatenate(done))

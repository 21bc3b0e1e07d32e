"""The best piecewise linear function with n kinks, for an activation that is a straight line at both ends.

h~ is a chain of straight pieces with knots c_1 < ... < c_n. Before c_1 it is the activation's left line,
behind c_n the right one, so that h - h~ vanishes at both ends by construction; free are the places c_i and
the heights of the inner knots. Minimised is the integral of (h - h~)^2.

The distance is a sum over the pieces, so that the best chain whose knots lie on a grid of places and heights
is found by dynamic programming: the shortest path through the grid. No start can be a bad one then. From the
best paths of several grids a quasi-Newton method goes on, and a root of the gradient ends it.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from lowmem_patch.tables.function import Array, Curve, Line

_PLACES = 110
_HEIGHTS = 15
# largest distances of a grid's heights from the activation, as parts of its distance from its two lines
_REACHES = (0.5, 0.15, 0.05, 0.015, 0.005)
_EXACT = 1e-20
_SMALLEST_GAP = 1e-7


@dataclasses.dataclass(frozen=True)
class Chain:
    """Knots ``[n]`` ascending, their heights ``[n]``, and the integral of (h - h~)^2."""

    knots: Array
    heights: Array
    distance: float


def _crossing(first: Line, second: Line) -> float:
    return (first.intercept - second.intercept) / (second.slope - first.slope)


def exact_chain(curve: Curve, most: int) -> Chain | None:
    """The activation itself, where it is made of straight pieces with at most ``most`` knots between."""
    x = np.linspace(curve.edges[0], curve.edges[-1], 8193)
    y = curve(x)
    bends = np.flatnonzero(np.abs(np.diff(y, 2)) > 1e-10 * (1 + np.abs(y[1:-1]))) + 1
    groups = np.split(bends, np.flatnonzero(np.diff(bends) > 1) + 1)
    if len(groups) > most or any(not 1 <= group.size <= 3 for group in groups):
        return None
    lines = [curve.left]
    for before, behind in pairwise(groups):
        low, high = before[-1] + 1, behind[0] - 1  # the piece between two kinks
        if high <= low:
            return None
        slope = float((y[high] - y[low]) / (x[high] - x[low]))
        lines.append(Line(slope, float(y[low] - slope * x[low])))
    lines.append(curve.right)
    if any(one.slope == two.slope for one, two in pairwise(lines)):
        return None
    knots = np.array([_crossing(*pair) for pair in pairwise(lines)])
    knots = np.round(knots, 12) + 0.0  # no -0.0
    chain = _chain(curve, knots, np.concatenate((curve.left(knots[:1]), curve(knots[1:]))))
    return chain if chain.distance < _EXACT else None


def best_chain(curve: Curve, knots: int) -> Chain:
    """The chain of so many knots with the smallest distance; one knot lies where the two lines meet."""
    if knots == 1:
        place = np.array([_crossing(curve.left, curve.right)])
        return _chain(curve, place, curve.left(place))
    grid = _Grid(curve)
    starts = [
        grid.shortest(knots, reach * grid.reach) for reach in _REACHES[: 1 if knots == 2 else None]
    ]
    starts.sort(key=lambda chain: chain.distance)
    return min((_polished(curve, start) for start in starts[:3]), key=lambda chain: chain.distance)


def distance_and_gradient(curve: Curve, knots: Array, heights: Array) -> tuple[float, Array, Array]:
    """The integral of (h - h~)^2 and its derivatives by places and inner heights ``[n]``, ``[n - 2]``.

    The heights of the outer knots follow from their places.
    """
    heights = _on_lines(curve, knots, heights)
    x, weights = curve.nodes(knots)
    piece = np.searchsorted(knots, x)
    chain = np.interp(x, knots, heights)
    chain = np.where(piece == 0, curve.left(x), chain)
    chain = np.where(piece == knots.size, curve.right(x), chain)
    rest = curve(x) - chain
    distance = float(weights @ rest**2)
    slopes, by_height, by_place = np.diff(heights) / np.diff(knots), *np.zeros((2, knots.size))
    inner = (piece > 0) & (piece < knots.size)
    index = piece[inner] - 1
    part = (x[inner] - knots[index]) / (knots[index + 1] - knots[index])
    pull = -2 * weights[inner] * rest[inner]
    # a knot that moves to the right takes its height along: the pieces beside it sink by their slopes
    for side, share in ((index, 1 - part), (index + 1, part)):
        by_height += np.bincount(side, pull * share, knots.size)
        by_place -= np.bincount(side, pull * share * slopes[index], knots.size)
    by_place[0] += by_height[0] * curve.left.slope
    by_place[-1] += by_height[-1] * curve.right.slope
    return distance, by_place, by_height[1:-1]


def _on_lines(curve: Curve, knots: Array, heights: Array) -> Array:
    return np.concatenate((curve.left(knots[:1]), heights[1:-1], curve.right(knots[-1:])))


def _chain(curve: Curve, knots: Array, heights: Array) -> Chain:
    if knots.size == 1:
        x, weights = curve.nodes(knots)
        line = np.where(x < knots[0], curve.left(x), curve.right(x))
        return Chain(knots, heights, float(weights @ (curve(x) - line) ** 2))
    heights = _on_lines(curve, knots, heights)
    return Chain(knots, heights, distance_and_gradient(curve, knots, heights)[0])


class _Grid:
    """Places on the axis, closer where the activation bends, and what pieces between two of them cost."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        x = np.linspace(curve.edges[0], curve.edges[-1], 20001)
        y = curve(x)
        off = np.minimum(np.abs(y - curve.left(x)), np.abs(y - curve.right(x)))
        self.reach = float(off.max())
        used = np.flatnonzero(off > 1e-6 * self.reach)
        x, y = x[used[0] : used[-1] + 1], y[used[0] : used[-1] + 1]
        bend = np.abs(np.gradient(np.gradient(y, x), x)) ** 0.4
        density = bend / bend.sum() + 0.25 / bend.size
        total = np.cumsum(density)
        self.places = np.interp(np.linspace(total[0], total[-1], _PLACES), total, x)
        self._moments()

    def _moments(self) -> None:
        """The integrals of r^2, r (1 - t) and r t for each pair of places, with r = h - chord, t in 0..1."""
        curve, p = self.curve, self.places
        x, weights = curve.nodes(p)
        h, cell = curve(x), np.searchsorted(p, x)

        def until(values: Array) -> Array:
            return np.cumsum(np.bincount(cell, weights * values, p.size + 1))

        of_h, of_xh, of_hh = (until(values)[: p.size] for values in (h, x * h, h * h))
        u, w = curve(p)[:, None], curve(p)[None, :]
        with np.errstate(all="ignore"):  # of a place with itself
            self.length = p[None, :] - p[:, None]
            whole = of_h[None, :] - of_h[:, None]
            falling = (of_xh[None, :] - of_xh[:, None] - p[:, None] * whole) / self.length
            rising = whole - falling
        square = self.length * (u * u + u * w + w * w) / 3
        self.square = of_hh[None, :] - of_hh[:, None] - 2 * (u * rising + w * falling) + square
        self.before = rising - self.length * (u / 3 + w / 6)
        self.behind = falling - self.length * (u / 6 + w / 3)
        for costs in (self.square, self.before, self.behind):
            costs[self.length <= 0] = np.inf
        tails = until((h - curve.left(x)) ** 2), until((h - curve.right(x)) ** 2)
        self.left_tail, self.right_tail = tails[0][:-1], tails[1][-1] - tails[1][:-1]

    def _costs(self, first: Array, second: Array) -> Array:
        """``[p, i, q, j]``: the piece from height ``first[p, i]`` above h to ``second[q, j]``."""
        a, b = first[:, :, None, None], second[None, None, :, :]
        square, before, behind, length = (
            pairs[:, None, :, None]
            for pairs in (self.square, self.before, self.behind, self.length)
        )
        with np.errstate(invalid="ignore"):
            costs = square - 2 * (a * before + b * behind) + length * (a * a + a * b + b * b) / 3
        costs[np.broadcast_to(length <= 0, costs.shape)] = np.inf
        flat: Array = costs.reshape(first.size, second.size)
        return flat

    def shortest(self, knots: int, reach: float) -> Chain:
        """The best chain of so many knots, at least 2, on places and heights of the grid."""
        p, curve = self.places, self.curve
        h = curve(p)
        start, end = (curve.left(p) - h)[:, None], (curve.right(p) - h)[:, None]
        inner = np.broadcast_to(np.linspace(-reach, reach, _HEIGHTS), (p.size, _HEIGHTS))
        total, came_from = self.left_tail, list[NDArray[np.intp]]()
        stages = [start, *[inner] * (knots - 2), end]
        costs: Array | None = None
        for number, (one, two) in enumerate(pairwise(stages)):
            if costs is None or one is not stages[number - 1] or two is not stages[number]:
                costs = self._costs(one, two)
            sums = total[:, None] + costs
            came_from.append(np.argmin(sums, axis=0))
            total = np.min(sums, axis=0)
        at = int(np.argmin(total + self.right_tail))
        states = [at]
        for back in reversed(came_from):
            at = int(back[at])
            states.insert(0, at)
        places = np.array(
            [p[state // stage.shape[1]] for state, stage in zip(states, stages, strict=True)]
        )
        above = np.array(
            [stage.ravel()[state] for state, stage in zip(states, stages, strict=True)]
        )
        return _chain(curve, places, curve(places) + above)


def _polished(curve: Curve, start: Chain) -> Chain:
    """The minimum next to a chain."""
    n = start.knots.size

    def split(z: Array) -> tuple[Array, Array]:
        gaps = np.exp(np.clip(z[1:n], -30, 10)) + _SMALLEST_GAP  # so that knots stay in order
        knots = z[0] + np.concatenate(([0.0], np.cumsum(gaps)))
        return knots, np.concatenate(([0.0], z[n:], [0.0]))

    def objective(z: Array) -> tuple[float, Array]:
        knots, heights = split(z)
        distance, by_place, by_height = distance_and_gradient(curve, knots, heights)
        behind = np.cumsum(by_place[::-1])[::-1]  # a gap moves every knot behind it
        by_gap = behind[1:] * np.exp(np.clip(z[1:n], -30, 10))
        gradient = np.concatenate((behind[:1], by_gap, by_height))
        return distance / start.distance, gradient / start.distance

    gaps = np.log(np.maximum(np.diff(start.knots) - _SMALLEST_GAP, 1e-12))
    z = np.concatenate((start.knots[:1], gaps, start.heights[1:-1]))
    found = optimize.minimize(
        objective, z, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000}
    )
    knots, heights = split(found.x)
    chain = _chain(curve, knots, heights)
    root = optimize.root(
        lambda z: (
            np.concatenate(distance_and_gradient(curve, z[:n], np.pad(z[n:], 1))[1:])
            / start.distance
        ),
        np.concatenate((chain.knots, chain.heights[1:-1])),
        options={"xtol": 1e-14},
    )
    knots, heights = root.x[:n], np.pad(root.x[n:], 1)
    if (np.diff(knots) > 0).all():
        exact = _chain(curve, knots, heights)
        # where rounding alone tells the two apart, the stationary one
        if exact.distance <= chain.distance * (1 + 1e-9):
            return exact
    return chain

"""Recompute the step tables of `lowmem_patch.constants` with a plain optimiser (seconds, needs scipy).

For an activation h, the function whose derivative takes four values is h~(x) = sum_i a_i relu(x - c_i),
i = 1..3. It follows h at both ends only if sum a_i = 1 and sum a_i c_i = 0, and its distance to h is
the integral of (h - h~)^2 over the real line (arXiv 2406.16282, section 4).

h(x) - relu(x) is even for GELU and SiLU, and the search over all four free parameters ends at a
symmetric table. With c = (-t, 0, t) and a = (s, 1 - 2s, s) both constraints hold by construction and
two free parameters are left.

Usage: python scripts/derive_step_tables.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import pi, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

Array = NDArray[np.float64]

NODES, WEIGHTS = np.polynomial.legendre.leggauss(400)


def gelu(x: Array) -> Array:
    return x * special.ndtr(x)


def gelu_tanh(x: Array) -> Array:
    return x * special.expit(2.0 * sqrt(2.0 / pi) * (x + 0.044715 * x**3))


def silu(x: Array) -> Array:
    return x * special.expit(x)


# function, start of the search, and how far beyond the last threshold |h - relu| is above 1e-16
SEARCHES: dict[str, tuple[Callable[[Array], Array], tuple[float, float], float]] = {
    "gelu": (gelu, (3.0, -0.05), 12.0),
    "gelu_tanh": (gelu_tanh, (3.0, -0.05), 12.0),
    "silu": (silu, (6.0, -0.04), 60.0),
}


def squared_distance(
    h: Callable[[Array], Array],
    thresholds: tuple[float, ...],
    slopes: tuple[float, ...],
    tail: float,
) -> float:
    """Integral of (h - h~)^2, piece by piece so that each piece is smooth (Gauss-Legendre)."""
    edges = (thresholds[0] - tail, *thresholds, thresholds[-1] + tail)
    total = 0.0
    for low, high in pairwise(edges):
        x = 0.5 * (high - low) * NODES + 0.5 * (high + low)
        pieces = zip(slopes, thresholds, strict=True)
        approximation = sum(a * np.maximum(x - c, 0.0) for a, c in pieces)
        total += 0.5 * (high - low) * float(np.sum(WEIGHTS * (h(x) - approximation) ** 2))
    return total


def derive(name: str) -> tuple[float, float, float]:
    """The outer threshold t, the outer slope step s and the distance reached, for one activation."""
    h, start, tail = SEARCHES[name]

    def objective(parameters: Array) -> float:
        t, s = float(parameters[0]), float(parameters[1])
        return squared_distance(h, (-t, 0.0, t), (s, 1.0 - 2.0 * s, s), tail)

    options = {"xatol": 1e-12, "fatol": 1e-18, "maxiter": 10_000, "maxfev": 10_000}
    found = optimize.minimize(objective, start, method="Nelder-Mead", options=options)
    return float(found.x[0]), float(found.x[1]), float(found.fun)


if __name__ == "__main__":
    for activation in SEARCHES:
        threshold, step, distance = derive(activation)
        print(f"{activation:10s} t={threshold:.7f} s={step:.8f} distance={distance:.9f}")

"""Data that several layers need: a norm's settings, the activations and their step tables. The only copy.

A codes activation runs the framework's function forward and, backward, the derivative of

    h~(x) = sum_i a_i relu(x - c_i),    i = 1..3,    c_1 < c_2 < c_3,

which takes four values and needs two bits per element (arXiv 2406.16282, section 4). h~ follows the
activation h at both ends only if sum a_i = 1 and sum a_i c_i = 0; among those, the tables below
minimise the L2 distance, the integral of (h - h~)^2 over the real line. h(x) - relu(x) is even for
GELU and SiLU and the optimum is symmetric: c = (-t, 0, t), a = (s, 1 - 2s, s), so that both
constraints hold by construction. `scripts/derive_step_tables.py` recomputes t and s in seconds:

    activation   t           s             distance reached
    gelu         3.1713098   -0.04957521   0.0095069
    gelu_tanh    3.1628801   -0.04978613   0.0095522
    silu         6.3199334   -0.04052429   0.0399413

quick_gelu(x) = x sigmoid(1.702 x) = silu(1.702 x) / 1.702, so its optimum is SiLU's with x scaled.
relu_squared(x) = relu(x)^2 has no table: its derivative has no bound that four levels could reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

__all__ = [
    "ACTIVATION_KINDS",
    "CODES_PER_WORD",
    "QUICK_GELU_SCALE",
    "STEP_TABLES",
    "TANH_CUBIC",
    "TANH_SCALE",
    "ActivationKind",
    "NormSettings",
    "StepTable",
    "padded_rank",
]

ActivationKind = Literal["gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared"]
ACTIVATION_KINDS: Final[tuple[ActivationKind, ...]] = get_args(ActivationKind)

QUICK_GELU_SCALE: Final = 1.702
# gelu_tanh(x) = x sigmoid(2 u) with u = TANH_SCALE (x + TANH_CUBIC x^3); the scale is sqrt(2 / pi)
TANH_SCALE: Final = 0.7978845608028654
TANH_CUBIC: Final = 0.044715

# Codes lie two bits each, first element lowest, in int16 words; only the last word is padded. Read
# as bytes (little endian) this is four codes per byte, so wider words show the same bits.
CODES_PER_WORD: Final = 8


@dataclass(frozen=True)
class StepTable:
    """The derivative of h~: four levels cut at three thresholds.

    Args:
        thresholds: (c_1, c_2, c_3), ascending.
        slopes: (a_1, a_2, a_3), the steps of the derivative at the thresholds.
    """

    thresholds: tuple[float, float, float]
    slopes: tuple[float, float, float]

    @classmethod
    def symmetric(cls, threshold: float, step: float) -> StepTable:
        """The table c = (-t, 0, t), a = (s, 1 - 2s, s)."""
        return cls((-threshold, 0.0, threshold), (step, 1.0 - 2.0 * step, step))

    def scaled(self, scale: float) -> StepTable:
        """The table of h(scale * x) / scale."""
        first, second, third = self.thresholds
        return StepTable((first / scale, second / scale, third / scale), self.slopes)

    @property
    def levels(self) -> tuple[float, float, float, float]:
        """The derivative for codes 0..3: (0, a_1, a_1 + a_2, 1)."""
        first, second, _ = self.slopes
        return (0.0, first, first + second, 1.0)


_SILU: Final = StepTable.symmetric(6.3199334, -0.04052429)

STEP_TABLES: Final[dict[ActivationKind, StepTable]] = {
    "gelu": StepTable.symmetric(3.1713098, -0.04957521),
    "gelu_tanh": StepTable.symmetric(3.1628801, -0.04978613),
    "silu": _SILU,
    "quick_gelu": _SILU.scaled(QUICK_GELU_SCALE),
}


class NormSettings(NamedTuple):
    """What a norm computes over the last dimension, made once for each module.

        z = (x - mean) / sqrt(variance + eps),    y = z gamma + bias,    gamma = weight + weight_offset

    Attributes:
        eps: added to the variance (mean square).
        weight_offset: 1.0 where the norm multiplies by (1 + weight), else 0.0.
        centered: the mean is subtracted (LayerNorm) or not (RMSNorm).
    """

    eps: float
    weight_offset: float = 0.0
    centered: bool = True

    @property
    def identity_weight(self) -> float:
        """The weight whose gamma is 1."""
        return 1.0 - self.weight_offset

    def gamma_of(self, weight: Tensor) -> Tensor:
        """The factor of z, in the dtype of ``weight``; ``weight`` itself where that is the factor."""
        return weight + self.weight_offset if self.weight_offset else weight

    def weight_of(self, gamma: Tensor) -> Tensor:
        """The inverse of `gamma_of`."""
        return gamma - self.weight_offset if self.weight_offset else gamma


def padded_rank(rank: int, dtype: torch.dtype) -> int:
    """The rank with which an adapter's products are computed: tensor cores want 16 bytes at a time."""
    return -(-rank // 8) * 8 if dtype.itemsize == 2 else rank

"""Data that several layers need: a norm's settings, the activations and their step tables. The only copy.

A codes activation runs the framework's function h forward and, backward, the derivative of a chain of
straight lines h~ (arXiv 2406.16282, section 4). That is a step function: it takes 2^k values, which k bits an
element tell apart. h~ is equal to h at both ends, far out, and among those the tables of `step_tables.json`
minimise the L2 distance, the integral of (h - h~)^2 over the real line. `scripts/derive_step_tables.py` finds
all of them again (`lowmem_patch.tables`). The paper's own are those of GELU and SiLU with 2 bits.

relu_squared(x) = relu(x)^2 has no table: its derivative has no limit that a step function could reach.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

# those with parameters (a slope, an alpha) are meant with torch's default values
ActivationKind = Literal[
    "gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared", "relu", "leaky_relu", "relu6",
    "hardsigmoid", "hardswish", "sigmoid", "tanh", "elu", "selu", "softplus", "mish",
]  # fmt: skip
ACTIVATION_KINDS: Final[tuple[ActivationKind, ...]] = get_args(ActivationKind)

STOCK_NAMES: Final = ("weight", "bias")  # of a norm's gamma and beta in torch's own

QUICK_GELU_SCALE: Final = 1.702
# gelu_tanh(x) = x sigmoid(2 u) with u = TANH_SCALE (x + TANH_CUBIC x^3); the scale is sqrt(2 / pi)
TANH_SCALE: Final = 0.7978845608028654
TANH_CUBIC: Final = 0.044715
SELU_ALPHA: Final = 1.6732632423543772
SELU_SCALE: Final = 1.0507009873554805

# Codes are stored for eight elements at a time, which one thread loads as 16 bytes of a half tensor, and
# which make whole bytes for any number of bits; only the last group is padded.
CODES_PER_GROUP: Final = 8
STEP_BITS: Final = (1, 2, 3, 4)

# In 8-bit storage so many neighbours in memory share a scale; the largest of them is about so many steps.
EIGHT_BIT_GROUP: Final = 128
EIGHT_BIT_LEVELS: Final = 127


class ChannelNormInput(NamedTuple):
    """What a norm over channels, the residual sum and the activation h behind it are computed of.

    Attributes:
        x: ``[B, C, ...]`` without gaps.
        mean, rstd: ``[C]``, or ``[B groups]`` where there are groups; float32, or float64 for such an x.
        weight, bias: ``[C]`` or None.
        groups: of channels, of each sample; 0: BatchNorm, whose channels are those of all samples.
        kind: of h; None for the norm or the sum itself.
        residual: what is added to the norm before h, in the shape and strides of x; None for no sum.
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    groups: int
    kind: ActivationKind | None
    residual: Tensor | None = None


class EightBits(NamedTuple):
    """Some columns of a matrix in 8 bits, whose rows are whole groups.

    Attributes:
        integers: ``[..., F]`` int8; strided where the matrix has more columns.
        scales: bfloat16, those of the whole matrix, group by group.
        dtype: of the values.
        first_group: of a row's groups, the one in which these columns begin.
    """

    integers: Tensor
    scales: Tensor
    dtype: torch.dtype
    first_group: int = 0

    def columns(self, part: slice) -> EightBits:
        """Some of these columns, whole groups."""
        first = self.first_group + part.start // EIGHT_BIT_GROUP
        return self._replace(integers=self.integers[..., part], first_group=first)


def codes_bytes(elements: int, bits: int) -> int:
    """Bytes of the codes of so many elements."""
    return -(-elements // CODES_PER_GROUP) * bits


@dataclass(frozen=True)
class StepTable:
    """The derivative of h~, which stands for that of an activation h: one value between two thresholds.

    The code of x is the number of thresholds below x. Where both ends have the same slope, the first and the
    last interval share code 0: there are as many thresholds as levels then, and from the last one on
    (x >= c) the code is 0 again.

    Attributes:
        thresholds: c_1 < c_2 < ..., values of x.
        levels: the derivative for each code, 2^bits values, or 2 where these are exact.
        squared_distance: the integral of (h - h~)^2 over the real line; 0 where the derivative is exact.
        largest_difference: of h and h~ at any x.
    """

    thresholds: tuple[float, ...]
    levels: tuple[float, ...]
    squared_distance: float
    largest_difference: float

    @property
    def bits(self) -> int:
        """Bits that a code takes."""
        return (len(self.levels) - 1).bit_length()

    @property
    def cyclic(self) -> bool:
        """Whether the interval behind the last threshold has code 0."""
        return len(self.thresholds) == len(self.levels)

    @property
    def exact(self) -> bool:
        """Whether the steps are the activation's own derivative."""
        return self.squared_distance == 0

    @property
    def mean_derivative_bound(self) -> float:
        """What |E h'(x) - E h~'(x)| can be at most for standard normal x.

        With the density p of x, integration by parts and Cauchy's inequality: |integral of (h' - h~') p| =
        |integral of (h - h~) p'| is at most the L2 norm of h - h~ times that of p'.
        """
        return math.sqrt(self.squared_distance / (4 * math.sqrt(math.pi)))

    @property
    def slopes(self) -> tuple[float, ...]:
        """The steps of the derivative at the thresholds."""
        levels = (*self.levels, self.levels[0]) if self.cyclic else self.levels
        return tuple(behind - before for before, behind in pairwise(levels))


def _shipped_tables() -> dict[ActivationKind, dict[int, StepTable]]:
    source = resources.files("lowmem_patch") / "step_tables.json"
    kinds = json.loads(source.read_text(encoding="utf-8"))
    return {
        kind: {
            int(bits): StepTable(tuple(row.pop("thresholds")), tuple(row.pop("levels")), **row)
            for bits, row in rows.items()
        }
        for kind, rows in kinds.items()
    }


# By the number of bits that a user asks for. A derivative that takes two values is exact with 1 bit, and that
# table stands for 2 to 4 bits as well.
STEP_TABLES: Final[Mapping[ActivationKind, Mapping[int, StepTable]]] = _shipped_tables()


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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 and float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32

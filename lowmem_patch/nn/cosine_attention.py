"""Cosine attention: normalised queries and keys, and scores times a scale that trains, saved once.

`F.normalize` saves its input, and the matmul behind it the output. The input's gradient follows from the
output and the length of each row: this is an RMS norm with a gamma of D^-0.5, in all but rows shorter than
1e-11. The scores that a scale multiplies are saved for the scale alone, which
`lowmem_patch.functional.scaled_scores` does without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import NormSettings, ms_norm, scaled_scores
from lowmem_patch.nn.context import autocast_dtype, is_foreign, needs_gradient
from lowmem_patch.nn.deferred import Deferred, value_of
from lowmem_patch.nn.modes import ForwardMode, is_running
from lowmem_patch.nn.op import Op
from lowmem_patch.nn.stored import attach
from lowmem_patch.tracing.call_arguments import normalized_rows
from lowmem_patch.tracing.op_roles import Role, names_with, role_of

# not float16, in which the product of a gradient and a key may be too large without the scale, or too small
_DTYPES = frozenset((torch.bfloat16, torch.float32, torch.float64))


class Scores(Op):
    """The product of two tensors, which are the sources."""

    def times(self, h: Deferred, other: Any) -> Any:
        if not isinstance(other, Tensor) or not other.requires_grad or not scales(h, other):
            return NotImplemented
        if is_foreign(value_of(other)):
            return NotImplemented
        h.was_bypassed = True
        return scaled_scores(h.detached(), value_of(other), *h.sources)


def scales(scores: Tensor, scale: Tensor) -> bool:
    """Whether a tensor has one number for all scores, or one for each head or window."""
    dims = scale.dim()
    if not scale.is_floating_point() or dims > scores.dim():
        return False
    leading = zip(scale.shape[:-2], scores.shape[scores.dim() - dims : -2], strict=True)
    fits = all(own in (1, size) for own, size in leading)
    return scale.numel() == 1 or (dims > 2 and scale.shape[-2:] == (1, 1) and fits)


class CosineAttention(ForwardMode):
    """Saves normalised rows once, and no scores for a scale.

    Args:
        rows: what `F.normalize` gives is read by matmuls alone.
        scores: the products of matmuls are multiplied with a scale.
        autocast: it was on where this was planned; matmuls may be told to run without.
    """

    names = names_with(Role.MATMUL | Role.UNIT_ROWS)

    def __init__(self, module: nn.Module, rows: bool, scores: bool, autocast: bool) -> None:
        super().__init__(module)
        self.rows, self.scores, self.autocast = rows, scores, autocast

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.packs_alike():
            return NotImplemented
        if role_of(func.__name__).has(Role.UNIT_ROWS):
            found = normalized_rows(args, kwargs) if self.rows else None
            if found is None or not self._takes(found[0]):
                return NotImplemented
            return _unit(*found)
        if not self.scores or kwargs or len(args) != 2 or not all(map(self._takes, args)):
            return NotImplemented
        y = self.onward(func, args, kwargs)
        return attach(y, Scores(), args, watched=True) if _multiplies(y, *args) else y

    def _takes(self, x: Any) -> bool:
        """Whether this is a plain tensor that trains, in the module's own forward."""
        if is_foreign(x) or not needs_gradient(x) or not is_running(self.module):
            return False
        return self.autocast or autocast_dtype(x.device.type, x.dtype) is None


def _multiplies(y: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether both factors are saved as they are: no cast, and no copy that is expanded."""
    dtypes = {y.dtype, a.dtype, b.dtype}
    return len(dtypes) == 1 and dtypes <= _DTYPES and a.dim() > 2 and a.shape[:-2] == b.shape[:-2]


def _unit(x: Tensor, eps: float) -> Tensor:
    """``[..., D]``, in the dtype in which matmuls read it."""
    size = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    gamma = x.new_full((size,), size**-0.5, dtype=wide)
    low = autocast_dtype(x.device.type, x.dtype)
    settings = NormSettings(eps * eps / size, 0.0, False)
    return ms_norm(x, gamma, None, settings, low or x.dtype, trains=True)[0]

"""One number in the memory of a whole tensor: what a compiled graph has in the place of values that wait.

    full((), nan).as_strided(shape, (0, 0, ...))

An operator, since the compiler makes an expanded tensor that leaves its graph again from its one number, and
loses a write into it. An operator's result has a memory of its own, and strides that tell of a write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowmem_patch.functional._library import Operator


def _one_number(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    number = like.new_full((), torch.nan, dtype=dtype)
    # as expand, which gives sizes of one other strides
    return number.as_strided(shape, (0,) * len(shape))


placeholder = Operator(
    "placeholder(Tensor like, SymInt[] shape, ScalarType dtype) -> Tensor",
    _one_number,
    lambda like, shape, dtype: like.new_empty_strided(shape, (0,) * len(shape), dtype=dtype),
)


def is_written(tensor: Tensor) -> bool:
    """Whether a placeholder that has left its graph holds anything else."""
    # a graph that is run as it is writes in place
    return any(tensor.stride()) or tensor._version > 0

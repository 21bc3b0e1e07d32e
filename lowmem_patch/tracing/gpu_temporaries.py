"""Memory that a GPU's kernel takes for itself while it runs, and that no op returns."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["temporary_bytes"]

_UNSORTED = 3072  # so many rows of a table are added without an order
_ROWS = 10  # of one token that are added up at a time


def temporary_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Of one op on a GPU, as far as it is large and known.

    The gradient of a table is made of sorted tokens: parts of its rows are added in float32 first
    (torch's ``EmbeddingBackwardKernel.cu``).
    """
    if func is not torch.ops.aten.embedding_dense_backward.default:
        return 0
    gradient, tokens, rows, _, by_frequency = args
    count, width = tokens.numel(), gradient.shape[-1]
    if count <= _UNSORTED and not by_frequency:
        return 0
    different = min(count, rows)
    parts = count // _ROWS + different
    # sorted tokens, their places, where each begins; how many parts it has, its first; where a part begins
    numbers = (4 if by_frequency else 3) * count + 2 * different + parts
    sums = parts * width * max(4, gradient.element_size())
    return int(sums + numbers * tokens.element_size())

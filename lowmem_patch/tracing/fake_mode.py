"""The mode that makes fake tensors: torch's own, and grouped products in the dtypes that its kernels take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config  # torch does not import it by itself
from torch._subclasses.fake_tensor import FakeTensorMode

# torch's kernels take these beside bfloat16, of which alone it knows the shape of a product
_GROUPED = frozenset((torch.float16, torch.float32))
_NOTHING: Mapping[str, object] = {}


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # of torch
    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
    ) -> object:
        grouped = func is torch.ops.aten._grouped_mm.default
        if grouped and args[0].dtype == args[1].dtype and args[0].dtype in _GROUPED:
            return self._grouped_product(*args, **kwargs)
        return super().dispatch(func, types, args, kwargs)

    def _grouped_product(
        self,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """``[M, K] x [E, K, N] -> [M, N]``, ``[E, M, K] x [K, N] -> [M, N]``,
        ``[M, K] x [K, N] -> [E, M, N]`` and ``[E, M, K] x [E, K, N] -> [E, M, N]``."""
        shape = [a.shape[-2], b.shape[-1]]
        if a.dim() == b.dim():
            groups = a.shape[0] if offs is None or a.dim() == 3 else offs.shape[0]
            shape = [groups, *shape]
        with self:
            return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def make_fake_mode() -> FakeTensorMode:
    """A mode whose tensors give no address to C++ either: an extension called with one raises."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return _FakeMode(allow_non_fake_inputs=True)

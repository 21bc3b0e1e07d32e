"""A LoRA layer's base Linear and adapter as one op, found as the layer's own forward runs.

PEFT computes ``base(x) + B(A(x)) * scale`` in eager steps: two more passes over the output for the
product, two for the scale, three for the sum, and in backward three more over the input's gradient.
Here each step only notes what it was asked for, and the sum computes all of it
(`lowmem_patch.functional.linear`). A step that is not of this form (dropout, a variant such as DoRA, a
second adapter) asks for the value, and gets it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch.functional import LowRank, kept_linear
from lowmem_patch.nn.deferred import Deferred, Lowered, Projection

__all__ = ["AdapterInput", "parts_of", "runs_one_product"]


def parts_of(layer: nn.Module) -> list[nn.Module]:
    """A LoRA layer and the modules that its forward calls, the base layer first of these."""
    children: Any = layer._modules  # past nn.Module's search by name: this runs in each forward
    parts = [layer, children["base_layer"]]
    for table in ("lora_A", "lora_B", "lora_dropout"):
        if table in children:
            parts += children[table]._modules.values()
    return parts


def runs_one_product(layer: nn.Module, parts: list[nn.Module]) -> bool:
    """Whether this forward of a LoRA layer is one base Linear plus products that add to it.

    A hook on one of its ``parts`` may write into what it sees, or wait for its gradient.
    """
    if type(parts[1]) is not nn.Linear or layer.disable_adapters or layer.merged:
        return False
    return not any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])


class AdapterInput(Deferred):
    """The input of a LoRA layer: it tells the layer's own weights from others."""

    watches = False
    parent: Deferred

    def __init__(self, parent: Deferred, layer: Any) -> None:
        super().__init__(parent.sources, parent.dtype, parent.lowers)
        self.parent = parent
        self.layer = layer
        self.base: _BaseProduct | None = None

    def compute(self) -> Tensor:
        if self.base is not None:
            # no longer one op: whoever reads the value may write into it, and gradients shall be
            # summed in the order of unpatched code
            self.base.value()
        return self.parent.value()

    def moved(self, sources: tuple[Tensor, ...]) -> Deferred:
        return self.parent.moved(sources)

    def dropped(self, whole: Deferred, p: float) -> Any:
        return self.parent.dropped(whole, p)

    def linear(self, to: Projection, dtype: torch.dtype) -> Any:
        children = self.layer._modules
        if to.weight is children["base_layer"].weight:
            self.base = _BaseProduct(self.parent, to, dtype)
            return self.base
        if to.bias is None:
            for down in children["lora_A"]._modules.values():
                if to.weight is down.weight:
                    return _Down(self.parent, to.weight, dtype)
        return self.parent.linear(to, dtype)


class _Product(Deferred):
    """Base of the products, whose shape is not that of their source."""

    watches = False
    parent: Deferred

    def __init__(self, parent: Deferred, dtype: torch.dtype) -> None:
        super().__init__((), dtype, parent.lowers)
        self.parent = parent

    def _known(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super()._known(func, name, args, kwargs) if name == "linear" else None

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "device", "ndim", "layout", "is_cuda", "requires_grad", "names"):
            return getattr(self.value(), name)
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dtype={self.dtype})"


class _BaseProduct(_Product):
    """The base Linear's output, which waits for the adapter."""

    def __init__(self, parent: Deferred, to: Projection, dtype: torch.dtype) -> None:
        super().__init__(parent, dtype)
        self.to_output = to

    def compute(self) -> Tensor:
        y: Tensor = self.parent.linear(self.to_output, self.dtype)
        return y

    def linear(self, to: Projection, dtype: torch.dtype) -> Any:
        return F.linear(self.value(), to.weight, to.bias)

    def plus(self, other: Any) -> Any:
        one = isinstance(other, _Up) and other.parent is self.parent and other.narrow == self.dtype
        if isinstance(other, Lowered):  # behind a dropout, say
            return other.plus(self.value())
        if not one or self._value is not None:
            return super().plus(other)
        return self.parent.linear(self.to_output._replace(adapter=other.adapter), self.dtype)


class _Down(_Product):
    """x A^T, on its way to B."""

    def __init__(self, parent: Deferred, down: Tensor, narrow: torch.dtype) -> None:
        super().__init__(parent, narrow)
        self.down = down
        self.narrow = narrow

    def seen_in(self, dtype: torch.dtype) -> _Down:
        """The same, computed in the narrow dtype where unpatched code holds this one."""
        self.dtype = dtype
        return self

    def compute(self) -> Tensor:
        y: Tensor = self.parent.linear(Projection(self.down, None), self.narrow)
        return y.to(self.dtype)

    def linear(self, to: Projection, dtype: torch.dtype) -> Any:
        if to.bias is None and dtype == self.dtype:
            return _Up(self, LowRank(self.down, to.weight, 1.0))
        return F.linear(self.value(), to.weight, to.bias)


class _Up(_Product):
    """s x A^T B^T, on its way to the base Linear's output."""

    def __init__(self, source: _Down, adapter: LowRank) -> None:
        super().__init__(source.parent, source.dtype)
        self.source = source
        self.narrow = source.narrow
        self.adapter = adapter

    def compute(self) -> Tensor:
        return self._product().to(self.dtype)

    def _product(self) -> Tensor:
        low: Tensor = self.parent.linear(Projection(self.adapter.down, None), self.narrow)
        product = kept_linear(low, self.adapter.up, None, self.narrow)
        return product if self.adapter.scale == 1.0 else product * self.adapter.scale

    def linear(self, to: Projection, dtype: torch.dtype) -> Any:
        return F.linear(self.value(), to.weight, to.bias)

    def times(self, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return super().times(other)
        return _Up(self.source, self.adapter._replace(scale=self.adapter.scale * other))

    def plus(self, other: Any) -> Any:
        if isinstance(other, Tensor) and other.dtype == self.narrow:
            return other + self._product()
        return super().plus(other)

"""Deferred tensors: an elementwise op whose value the consumer computes, so that it is not kept.

An activation or norm slot may return a ``Deferred`` in place of a tensor. It stands for
``op(*sources)`` and behaves like that tensor: every torch function that does not know better gets
the computed value, so a consumer that nobody foresaw (an adapter added later, a hook, a print) is
always right. Five uses are known better:

- a row move (view, permute, roll, window partition) is applied to the sources instead;
- ``activation * up`` becomes one deferred gated product;
- ``F.linear`` computes with the value, but what autograd keeps for the weight's gradient are the
  sources, from which the value is recomputed in backward by one elementwise kernel;
- a cast to another floating dtype waits too, so that ``F.linear`` repeats it in backward and keeps
  no second copy (PEFT's float32 adapters, autocast);
- a dropout draws its mask at once, and keeps that in bits.

It is a plain object and not a tensor subclass: code that bypasses ``__torch_function__`` fails
loudly on it and never reads a pre-activation by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.dropouts import dropout_call
from lowmem_patch.functional import LowRank, is_sharded, kept_linear
from lowmem_patch.nn.context import LOST, autocast_dtype, in_inference_mode, refuse_custom_functions
from lowmem_patch.rows import function_name, moves_rows

__all__ = [
    "Deferred",
    "DeferredCast",
    "Lowered",
    "Projection",
    "value_of",
]

_WRITTEN_SOURCE = (
    "the input of a deferred activation or norm was written in place before its output was read: call "
    "patch_model with example_inputs that take this path of the forward, or leave this module alone"
)
_PASSED_ON = (
    "a Linear or a view was given this deferred activation before, and its gradient would be missing: "
    "call it right after the activation"
)
_METADATA = frozenset(
    ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "names")
)
_METADATA_METHODS = frozenset(
    ("size", "dim", "numel", "ndimension", "is_floating_point", "element_size")
)


class Projection(NamedTuple):
    """What a value is multiplied with: a Linear's weight and bias, and the adapter beside it."""

    weight: Tensor
    bias: Tensor | None
    adapter: LowRank | None = None


class Deferred:
    """Base: an op that is computed when somebody needs its value.

    Args:
        sources: the tensors it is computed from; ``sources[0]`` has the value's shape.
        dtype: the value's dtype.
        lowers: a Linear behind a cast to a wider dtype computes in the dtype from before the cast,
            as it would under autocast (adapters with float32 weights on a bf16 model).
    """

    # whether a hook (or retain_grad) on the value would miss the gradient of readers of the sources
    bypassed = True
    # whether a write into a source would be missed: else the value is the source, or the parent knows
    watches = True
    parent: Deferred | None = None  # the deferred op that this one is computed from

    # attributes of the class until they are set: a step makes hundreds of these
    _value: Tensor | None = None
    _alone: Tensor | None = None
    _version = 0
    _versions: list[int] | None = None  # of the sources that are watched
    _spoiled = False
    _passed_on = False  # sources went to a reader, past the value

    def __init__(
        self, sources: tuple[Tensor, ...], dtype: torch.dtype, lowers: bool = False
    ) -> None:
        self.sources, self.dtype, self.lowers = sources, dtype, lowers
        if self.watches and not torch.compiler.is_compiling():
            self._versions = [source._version for source in sources]

    def compute(self) -> Tensor:
        raise NotImplementedError

    def moved(self, sources: tuple[Tensor, ...]) -> Deferred:
        raise NotImplementedError

    def linear(self, to: Projection, dtype: torch.dtype) -> Any:
        """The projection computed in ``dtype``, keeping as little as possible."""
        raise NotImplementedError

    def grouped(self, func: Callable[..., Any], weight: Tensor, offsets: Tensor) -> Any:
        """A grouped matmul that keeps as little as possible, or None for the plain one."""
        return None

    def dropped(self, whole: Deferred, p: float) -> Any:
        """What a dropout makes of ``whole``, which is this or a cast of it, or None for the plain one."""
        return None

    def times(self, other: Any) -> Any:
        return self.value() * value_of(other)

    def plus(self, other: Any) -> Any:
        return self.value() + value_of(other)

    def value(self) -> Tensor:
        """The tensor that this stands for, computed once."""
        if in_inference_mode():
            with torch.inference_mode(False):
                return self.value()
        refuse_custom_functions()
        if self._value is None:
            if self.stale:
                raise RuntimeError(_WRITTEN_SOURCE)
            # a hook that only looks, under no_grad, must not cut the graph
            with torch.enable_grad():
                self._value = self.compute()
            if not torch.compiler.is_compiling():
                self._version = self._value._version
        return self._value

    def value_alone(self) -> Tensor:
        """The same without a gradient, for ops that take the gradient to the sources themselves."""
        if self._value is not None:
            return self._value.detach()
        if self._alone is None:
            with torch.no_grad():
                self._alone = self.compute()
        return self._alone

    def is_written(self) -> bool:
        """Whether readers must read the value: somebody wrote into it, or waits for its gradient."""
        op: Deferred | None = self
        while op is not None:
            if op._spoiled or (op._versions is not None and op.stale):
                return True
            value = op._value
            if value is not None and not torch.compiler.is_compiling():
                if op.bypassed and (value._backward_hooks or value.retains_grad):
                    return True
                if value._version != op._version:
                    return True
            op = op.parent
        return False

    @property
    def stale(self) -> bool:
        """Whether somebody wrote into a source since, so that the value cannot be computed from it."""
        # a compiler's tensors count no versions
        if self._versions is None or torch.compiler.is_compiling():
            return False
        return [source._version for source in self.sources] != self._versions

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        if func is F.linear and len(args) == 3 and isinstance(first, Deferred):
            refuse_custom_functions()  # ahead of all names: a step calls hundreds of Linears
            return first._linear(args[1], args[2])
        kwargs, name = kwargs or {}, function_name(func)
        if name == "addmm" and len(args) == 3 and not kwargs and isinstance(args[1], Deferred):
            bias, hidden, weight = args  # GPT-2's Conv1D: a Linear whose weight lies transposed
            if isinstance(bias, Tensor) and bias.dim() == 1 and isinstance(weight, Tensor):
                return hidden._linear(weight.t(), bias)
        if isinstance(first, Deferred):
            refuse_custom_functions()
            if name[-1] == "_" and (name[-2:] != "__" or name == "__setitem__"):
                first._spoiled = True  # written in place
            if name in ("register_hook", "retain_grad") and first._passed_on and first.bypassed:
                raise RuntimeError(f"{name}: {_PASSED_ON}")
            known = first._known(func, name, args, kwargs)
            if known is not None:
                return known
        if name in ("mul", "__mul__", "__rmul__") and len(args) == 2 and not kwargs:
            left, right = args
            return left.times(right) if isinstance(left, Deferred) else right.times(left)
        if name in ("add", "__add__", "__radd__") and len(args) == 2 and not kwargs:
            left, right = args
            return left.plus(right) if isinstance(left, Deferred) else right.plus(left)
        return func(*(value_of(a) for a in args), **{key: value_of(v) for key, v in kwargs.items()})

    def _known(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in _MOVES:
            return None if self.is_written() else self._move(func, name, args, kwargs)
        if name == "linear":
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return self._linear(weight, bias)
        if name in ("grouped_mm", "_grouped_mm") and len(args) == 2 and not self.is_written():
            given = {key: item for key, item in kwargs.items() if item is not None}
            return self.grouped(func, args[1], given["offs"]) if set(given) == {"offs"} else None
        if name == "dropout":
            p, in_place = dropout_call(args, kwargs)
            if p == 0:
                return self
            waits = 0 < p < 1 and not in_place and not self.is_written() and torch.is_grad_enabled()
            waits &= bool(self.sources[0].numel()) and not is_sharded(self.sources[0])
            return self.dropped(self, p) if waits else None
        if name in _METADATA_METHODS:
            return func(self.sources[0], *args[1:], **kwargs)
        if name in ("to", "float"):
            dtype = torch.float32 if name == "float" else _only_dtype(args[1:], kwargs)
            if dtype is not None and dtype.is_floating_point:
                return self if dtype == self.dtype else DeferredCast(self, dtype)
        return None

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError(LOST)
        if self.is_written():
            return F.linear(self.value(), weight, bias)
        narrow = autocast_dtype(weight.device.type, self.dtype)
        if narrow is not None:
            return self.linear(Projection(weight, bias), narrow)
        if weight.dtype != self.dtype:
            return F.linear(self.value(), weight, bias)  # torch's own error for mixed dtypes
        return self.linear(Projection(weight, bias), self.dtype)

    def _move(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The deferred op behind a row move, or None when this call of ``func`` is none."""
        source = self.sources[0]
        if name == "view":
            func = torch.Tensor.reshape  # a source may be strided where the value is contiguous
        output = func(source, *args[1:], **kwargs)
        if not isinstance(output, Tensor) or not moves_rows(
            func, (source, *args[1:]), kwargs, source, output
        ):
            return None
        rest = tuple(func(other, *args[1:], **kwargs) for other in self.sources[1:])
        self._passed_on = True
        return self.moved((output, *rest))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _METADATA:
            return getattr(self.sources[0], name)
        attribute = getattr(torch.Tensor, name)
        if not callable(attribute):
            return getattr(self.value(), name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return Deferred.__torch_function__(attribute, (), (self, *args), kwargs)

        return method

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.sources[0].shape)}, dtype={self.dtype})"

    def __len__(self) -> int:
        return int(self.shape[0])

    def __mul__(self, other: Any) -> Any:
        return self.times(other)

    def __add__(self, other: Any) -> Any:
        return self.plus(other)

    __rmul__ = __mul__
    __radd__ = __add__


_MOVES = frozenset(
    (
        "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "permute",
        "transpose", "roll", "pad", "__getitem__",
    )
)  # fmt: skip


def value_of(item: Any) -> Any:
    if isinstance(item, Deferred):
        return item.value()
    if isinstance(item, (tuple, list)) and any(isinstance(i, Deferred) for i in item):
        return type(item)(value_of(i) for i in item)
    return item


def _operator(name: str, writes: bool = False) -> Callable[..., Any]:
    def apply(self: Deferred, *others: Any) -> Any:
        self._spoiled |= writes
        return getattr(self.value(), name)(*(value_of(other) for other in others))

    return apply


def _index(self: Deferred, index: Any) -> Any:
    return Deferred.__torch_function__(Tensor.__getitem__, (), (self, index), {})


# Python looks operators up on the class, so __getattr__ does not see them.
for _name in (
    "sub", "rsub", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "abs", "eq",
    "ne", "lt", "le", "gt", "ge", "iter", "bool", "float", "int",
):  # fmt: skip
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("setitem", "iadd", "isub", "imul", "itruediv"):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__", writes=True))
setattr(Deferred, "__getitem__", _index)  # noqa: B010  # set like the operators above
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]  # __eq__ is elementwise, as a tensor's


def _only_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a ``.to`` that changes nothing else."""
    given = [*args, *kwargs.values()]
    return given[0] if len(given) == 1 and isinstance(given[0], torch.dtype) else None


class DeferredCast(Deferred):
    """Another deferred op in another floating dtype."""

    watches = False
    parent: Deferred

    def __init__(self, parent: Deferred, dtype: torch.dtype) -> None:
        super().__init__(parent.sources, dtype, parent.lowers)
        self.parent = parent

    def compute(self) -> Tensor:
        return self.parent.value().to(self.dtype)

    def moved(self, sources: tuple[Tensor, ...]) -> Deferred:
        return DeferredCast(self.parent.moved(sources), self.dtype)

    def dropped(self, whole: Deferred, p: float) -> Any:
        if isinstance(self.parent, DeferredCast):
            return None  # the rounding between the casts would be lost
        if not self.lowers or self.parent.dtype.itemsize >= self.dtype.itemsize:
            return self.parent.dropped(whole, p)
        narrow = self.parent.dropped(self.parent, p)
        if narrow is None:
            return Lowered(F.dropout(self.parent.value(), p), self.dtype)
        return DeferredCast(narrow, self.dtype)

    def linear(self, to: Projection, dtype: torch.dtype) -> Any:
        self._passed_on = True
        narrow = self.parent.dtype
        if self.lowers and dtype == self.dtype and narrow.itemsize < dtype.itemsize:
            return Lowered(value_of(self.parent.linear(to, narrow)), dtype)
        return self.parent.linear(to, dtype)


class Lowered(Deferred):
    """A narrow tensor where unpatched code holds a wide one: an adapter's path in bf16, as under autocast.

    It stays narrow through Linears, scaling and the addition to a narrow tensor; anything else gets
    it in the wide dtype.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        super().__init__((tensor,), dtype, lowers=True)

    def compute(self) -> Tensor:
        return self.sources[0].to(self.dtype)

    def moved(self, sources: tuple[Tensor, ...]) -> Deferred:
        return Lowered(sources[0], self.dtype)

    def linear(self, to: Projection, dtype: torch.dtype) -> Any:
        tensor = self.sources[0]
        narrow = tensor.dtype if dtype == self.dtype else dtype
        y = kept_linear(tensor, to.weight, to.bias, narrow, to.adapter)
        return Lowered(y, dtype) if dtype == self.dtype else y

    def times(self, other: Any) -> Any:
        if isinstance(other, (int, float)):
            return Lowered(self.sources[0] * other, self.dtype)
        return super().times(other)

    def plus(self, other: Any) -> Any:
        if isinstance(other, Tensor) and other.dtype == self.sources[0].dtype:
            return other + self.sources[0]
        return super().plus(other)

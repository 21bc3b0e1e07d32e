"""The mode that makes fake tensors: torch's own, which knows values that follow from the example inputs, and
makes grouped products in the dtypes that torch's kernels take.

Where a model places images among words, or splits them by their sizes, shapes depend on values of its inputs,
which fake tensors lack. So what is computed from inputs and small buffers alone (masks, positions, numbers of
patches) is computed on their data as well, and an op whose output's shape is unknown is asked there.

Some forwards look for infinities among their activations: there are none in a trace. Some skip a layer where
a number drawn from [0, 1) is small (layerdrop): in a trace it is the largest, and all layers run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config  # torch does not import it by itself
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lowmem_patch.tracing.saved_bytes import storage_key

# torch's kernels take these beside bfloat16, of which alone it knows the shape of a product
_GROUPED = frozenset((torch.float16, torch.float32))
_NOTHING: Mapping[str, object] = {}
# Bytes of one value: masks of long sequences, on which no shape depends, are larger.
_LARGEST = 16 << 20
_FEW = 1 << 10
_LARGEST_DRAW = 1 - 2.0**-24  # float32's

_aten = torch.ops.aten


def make_fake_mode() -> FakeTensorMode:
    """A mode whose tensors give no address to C++ either: an extension called with one raises."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    # of this one mode: torch's higher-order operators (flex attention) know no class derived from its own
    own: Any = mode
    own.values = KnownValues(mode)
    own.dispatch = own.values.dispatch
    return mode


def values_of(mode: FakeTensorMode) -> KnownValues:
    """The known values of the tensors of a mode that `make_fake_mode` made."""
    found: KnownValues = mode.values  # type: ignore[attr-defined]  # set above
    return found


class KnownValues:
    """The values of the fake tensors of one mode, as far as they are known."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = weakref.ref(mode)  # which holds this
        self._values: Any = WeakIdKeyDictionary()  # has no types
        self._memories: set[int] = set()  # of tensors whose values are known, or were
        # values into which nobody has written yet, by their memory
        self._blank: dict[int, Tensor] = {}

    def give(self, fake: Tensor, tensor: Tensor) -> None:
        """``fake`` has the values that ``tensor`` has now, which lies in memory as it does."""
        if not _is_small(tensor) or tensor.is_meta or is_fake(tensor):
            return
        value, strides = tensor.detach(), tensor.stride()
        if all(strides):  # else it is expanded, and nobody writes into it
            there = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=fake.device)
            value = there.copy_(value)
        self._add(fake, value)

    def _add(self, fake: Tensor, value: Tensor) -> None:
        if _is_small(value) and not value.is_meta:
            self._values[fake] = value
            self._memories.add(storage_key(fake))

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
    ) -> object:
        """What the mode does with an op: on fake tensors, and on their values where all are known."""
        mode: Any = self._mode()  # which lives, as it calls this
        if func is _aten.embedding.default and args[1].is_floating_point():
            # torch looks at data alone
            raise TypeError(f"an embedding is indexed by integers, and got {args[1].dtype}")
        grouped = func is _aten._grouped_mm.default
        if grouped and args[0].dtype != args[1].dtype:  # as on data; torch 2.15 computes a shape
            raise RuntimeError(
                "the factors of a grouped product must have the same dtype, got "
                f"{args[0].dtype} and {args[1].dtype}"
            )
        if grouped and args[0].dtype in _GROUPED:
            with mode:
                return _grouped_product(*args, **kwargs)
        run = partial(FakeTensorMode.dispatch, mode, func, types, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return run()
        if func is _aten.empty.memory_format:
            return self._blank_of(run())
        known = self._are_known(func, args, kwargs)
        try:
            output = run()
        except (DataDependentOutputException, DynamicOutputShapeException):
            made = self._made_by_values(mode, func, args, kwargs, known)
            if made is None:
                raise
            return made
        if known:
            self._follow(func, args, kwargs, output)
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        elif (found := _certain_value(func, args)) is not None and isinstance(output, FakeTensor):
            value = torch.tensor(found, dtype=output.dtype, device=output.device)
            self._add(output, value.expand(output.shape))
        return output

    def _are_known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the op computes known values, or views of those into which nobody has written yet."""
        blank = bool(self._blank and args and self._is_blank(args[0]))
        given = (*(args[1:] if blank else args), *kwargs.values())
        if not all(map(self._is_known, _tensors(given))):
            return False
        # other values each time: random ones, or memory as it is
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or "empty" in func.overloadpacket.__name__:
            return False
        writes = func._schema.is_mutable
        if blank and writes:
            del self._blank[storage_key(self._values[args[0]])]
        return not blank or writes or func.is_view

    def _is_known(self, tensor: Tensor) -> bool:
        constant = type(tensor) is Tensor and _is_small(tensor)
        return constant or (tensor in self._values and not self._is_blank(tensor))

    def _is_blank(self, tensor: Any) -> bool:
        value = self._values.get(tensor) if isinstance(tensor, Tensor) else None
        return value is not None and storage_key(value) in self._blank

    def _blank_of(self, fake: Any) -> object:
        """An empty tensor of a few integers (sizes of a detector's levels) is known once it is written."""
        if not fake.is_floating_point() and fake.nbytes <= _FEW and fake.device.type != "meta":
            with _disable_current_modes():
                value = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
            self._add(fake, value)
            self._blank[storage_key(value)] = value
        return fake

    def _follow(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: object
    ) -> None:
        """Compute the values of ``output``, or write where the op wrote."""
        writes = func._schema.is_mutable
        if not writes and not all(map(_is_small, _tensors((output,)))):
            return
        try:
            values = self._computed(func, args, kwargs)
        except (RuntimeError, NotImplementedError):  # a dtype that the device does not compute in
            if writes:
                self._forget(func, args, kwargs)
            return
        for fake, value in zip(tree_leaves(output), tree_leaves(values), strict=True):
            if isinstance(fake, FakeTensor) and isinstance(value, Tensor):
                self._add(fake, value)

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def value(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            known = self._values.get(item)
            return item.clone() if known is None else known  # nobody writes into a constant

        with _disable_current_modes(), torch.no_grad():
            return func(*tree_map(value, args), **tree_map(value, kwargs))

    def _made_by_values(
        self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, known: bool
    ) -> object:
        """What an op makes whose shape depends on values, as far as these suffice; else None."""

        def fake_of(value: Tensor) -> Tensor:
            with mode:
                fake = value.new_empty_strided(value.shape, value.stride())
            self._add(fake, value)
            return fake

        if known:
            return tree_map_only(Tensor, fake_of, self._computed(func, args, kwargs))
        if func is _aten.masked_select.default and self._is_known(args[1]):
            with mode:
                given = args[:2]
                tensor, mask = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]  # of torch
                return tensor[mask]
        if func is _aten._ctc_loss.Tensor and self._is_known(args[3]):
            # losses [N], and what backward reads of [T, N, C]: [N, T, 2 longest + 1]
            longest = int(self._values.get(args[3], args[3]).max())
            length, rows, _ = args[0].shape
            return args[0].new_empty(rows), args[0].new_empty(rows, length, 2 * longest + 1)
        return None

    def _forget(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Something unknown was written, perhaps into what shares its memory with known values."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for written in _tensors((given,)):
                    self.forget(written)

    def forget(self, written: Tensor) -> None:
        """Something unknown was written into a tensor's memory."""
        memory = storage_key(written)
        if memory in self._memories:
            self._memories.discard(memory)
            for fake in [fake for fake in self._values if storage_key(fake) == memory]:
                del self._values[fake]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor's values may be followed; those of a sparse one are not."""
    return tensor.layout is torch.strided and tensor.nbytes < _LARGEST


def _certain_value(func: Any, args: Sequence[Any]) -> bool | float | None:
    """What each element of an op's output is, whatever values the op reads; None where it depends on them."""
    if func.overloadpacket is _aten.rand and math.prod(args[0]) == 1:
        return _LARGEST_DRAW
    if func is _aten.isinf.default or func is _aten.isnan.default:
        return False
    finite = (func is _aten.ne.Scalar and args[1] == math.inf) or (
        func is _aten.eq.Tensor and args[0] is args[1]
    )
    return True if finite else None


def _grouped_product(
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
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)

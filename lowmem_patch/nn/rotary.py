"""An attention module whose rotary embedding runs as one op.

transformers' modules call a function of their file for it, in five elementwise passes over q and k, and as
many backward. The module gets a copy of its class's forward that looks that one name up elsewhere: neither
the class nor the file is touched. Decorators around that forward (transformers' `deprecate_kwarg`) are copied
with it. What else the file holds is as it was at the patch. A pickled model has its class's forward again.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.functional import below_modes, is_exporting, is_sharded, is_transformed, turned
from lowmem_patch.nn.context import autocast_dtype, is_foreign
from lowmem_patch.nn.own import give_forward
from lowmem_patch.nn.turned_norms import note_turned

Tensors = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A rotation by halves, ``x cos + rotate_half(x) sin``, of q and k, as a function of a module's file.

    Some files have a function of one tensor, which forward calls for each: :class:`RotationOfOne`.

    Attributes:
        name: under which forward looks it up.
        function: ``function(q, k, cos, sin, *optional)``.
        optional: names of its other parameters, of ``position_ids`` and ``unsqueeze_dim``.
        heads_dim: the dimension of the heads where ``unsqueeze_dim`` is not given, 1 or 2.
        unbatched: the same of tensors without a batch, counted as if they had one; 0 where it takes none.
        partial: cos and sin may be shorter than q; what they do not reach stays as it is.
        keeps_dtype: results have the dtype of q and k, else the promoted one.
        feeds_autocast: of q and of k: all readers are ops that autocast casts: it takes autocast's dtype.
    """

    name: str
    function: Callable[..., Any]
    optional: tuple[str, ...]
    heads_dim: int
    unbatched: int
    partial: bool
    keeps_dtype: bool
    feeds_autocast: tuple[bool, bool] = (False, False)

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any
    ) -> Any:
        """As ``function``, which runs itself where the op does not apply."""
        made = self._turned((q, k), cos, sin, rest, named)
        return self.function(q, k, cos, sin, *rest, **named) if made is None else made

    def _turned(
        self, xs: Tensors, cos: Tensor, sin: Tensor, rest: tuple[Any, ...], named: dict[str, Any]
    ) -> Tensors | None:
        """The op's results for a call of ``function``; None where that is to run itself."""
        given = named | dict(zip(self.optional, rest, strict=False))
        usual = self.heads_dim if xs[0].dim() == 4 else self.unbatched
        heads_dim = given.get("unsqueeze_dim", usual)
        if xs[0].dim() == 3 and heads_dim is not usual:  # counted from the front, without a batch
            return None
        chosen = given.get("position_ids") is not None  # rows of cos and sin, in some files
        if chosen or is_transformed() or is_exporting():
            return None
        foreign = any(map(is_foreign, (*xs, cos, sin)))  # to which torch functions may matter
        run = self._turn if foreign else partial(below_modes, self._turn)
        made: Tensors | None = run(xs, cos, sin, heads_dim)
        return made

    def _turn(self, xs: Tensors, cos: Tensor, sin: Tensor, heads_dim: Any) -> Tensors | None:
        """The op's results; None where it does not apply."""
        if not self._takes(xs, cos, sin, heads_dim):
            return None
        batched = xs[0].dim() == 4
        if not batched:
            xs = tuple(x.unsqueeze(0) for x in xs)
            cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
        found = []
        for x, dtype in zip(xs, self._result_dtypes(xs[0], cos), strict=False):
            made = turned(x, cos, sin, heads_dim, dtype)
            note_turned(x, made, cos, sin, heads_dim)
            found.append(made if batched else made.squeeze(0))
        return tuple(found)

    def _result_dtypes(self, q: Tensor, cos: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """The function's, or the smaller one in which autocast's ops would read that."""
        own = q.dtype if self.keeps_dtype else torch.promote_types(q.dtype, cos.dtype)
        low = autocast_dtype(q.device.type, own)
        if low is None or low.itemsize >= own.itemsize or not torch.is_grad_enabled():
            return own, own
        of_q, of_k = self.feeds_autocast
        return (low if of_q else own), (low if of_k else own)

    def _takes(self, xs: Tensors, cos: Tensor, sin: Tensor, heads_dim: Any) -> bool:
        """Whether the op computes the rotation of these tensors."""
        q, k = xs[0], xs[-1]
        dtype, angles = q.dtype, cos.dtype
        return (
            dtype.is_floating_point
            and angles.is_floating_point
            and dtype == k.dtype
            and angles == sin.dtype
            and (dtype == angles or angles != torch.float64)
            and self._have_shapes_of_op(q, k, cos, sin, heads_dim)
            and not (cos.requires_grad or sin.requires_grad)
            and not is_sharded(q, k, cos, sin)
        )

    def _have_shapes_of_op(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: Any
    ) -> bool:
        """``[B, H, S, D]`` or ``[B, S, H, D]`` and ``[B or 1, S, R]``, or all without B."""
        queries, keys, angles = q.shape, k.shape, cos.shape
        dims = len(queries)
        if dims not in (3, 4) or heads_dim not in (1, 2):
            return False
        if len(keys) != dims or len(angles) != dims - 1 or angles != sin.shape:
            return False
        if dims == 4 and not (queries[0] == keys[0] and angles[0] in (1, queries[0])):
            return False
        length = dims - 1 - heads_dim
        rotated, columns = angles[-1], queries[-1]
        return (
            queries[length] == keys[length] == angles[-2]
            and columns == keys[-1]
            and rotated % 2 == 0
            and (rotated == columns or (self.partial and 0 < rotated < columns))
        )


class RotationOfOne(Rotation):
    """The same by ``function(x, cos, sin, *optional)``, which forward calls for q, and for k (Gemma 4)."""

    def __call__(  # type: ignore[override]  # one tensor fewer
        self, x: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any
    ) -> Any:
        made = self._turned((x,), cos, sin, rest, named)
        return self.function(x, cos, sin, *rest, **named) if made is None else made[0]


def forward_of_class(module: nn.Module) -> types.FunctionType | None:
    """The class's forward beneath its decorators; None where one of them keeps it outside of a closure."""
    forward: Any = type(module).forward
    while isinstance(forward, types.FunctionType):
        inner = vars(forward).get("__wrapped__")  # which `functools.wraps` leaves
        if inner is None:
            return forward
        if not any(_holds(cell, inner) for cell in forward.__closure__ or ()):
            return None
        forward = inner
    return None


def _holds(cell: types.CellType, inner: Any) -> bool:
    try:
        return cell.cell_contents is inner
    except ValueError:  # an empty one
        return False


def _names(function: types.FunctionType, rotation: Rotation) -> dict[str, Any]:
    names = {**function.__globals__, rotation.name: rotation}
    # by which a compiler would look names up in the module's own file
    names.pop("__name__", None)
    return names


@cache
def _forward(function: types.FunctionType, rotation: Rotation) -> types.FunctionType:
    """The function with ``rotation`` in the place of what it looks up under that name."""
    inner: Any = vars(function).get("__wrapped__")
    if inner is None:
        return _copy(function, _names(function, rotation), function.__closure__)
    copied = types.CellType(_forward(inner, rotation))
    cells = (copied if _holds(cell, inner) else cell for cell in function.__closure__ or ())
    copy = _copy(function, function.__globals__, tuple(cells))
    vars(copy)["__wrapped__"] = copied.cell_contents
    return copy


def _copy(
    function: types.FunctionType, names: dict[str, Any], cells: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__annotations__, copy.__dict__["copied"] = function.__annotations__, True
    return copy


def use_rotary(module: nn.Module, rotation: Rotation) -> None:
    """Give one module a forward of its own, in which ``rotation`` runs as one op."""
    function: Any = type(module).forward
    copy = _forward(function, rotation)
    # somebody may have put other functions into the file since
    names = inspect.unwrap(copy).__globals__
    wanted = _names(inspect.unwrap(function), rotation)
    if any(names.get(n) is not v for n, v in wanted.items()):
        _forward.cache_clear()
        copy = _forward(function, rotation)
    give_forward(module, copy)

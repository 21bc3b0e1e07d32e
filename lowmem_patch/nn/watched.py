"""The output of a norm that the norm saves, and that somebody may write into without a trace."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.functional import SharedInput, register_plain, save_copy

_DATA: Any = Tensor.data


class Watched(Tensor):
    """An ordinary tensor, of which its norm saves a copy when somebody asks for its ``.data``.

    Torch functions are not told of it, which would cost each Linear that reads it 3 us and more; what they
    return is an ordinary tensor.
    """

    _shared: SharedInput | None = None  # what several Linears read in its place
    _node: Any = None  # the norm's, where this is a view of its output
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:
        save_copy(self._node or self.grad_fn)
        found: Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        save_copy(self._node or self.grad_fn)
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: Any) -> Tensor:
        # ordinary, of the same gradient: torch's own copy, or its error where this is no leaf
        return copy.deepcopy(
            self.as_subclass(Tensor) if self.grad_fn is not None else self.plain(), memo
        )

    def plain(self) -> Tensor:
        """The values as an ordinary tensor that is a leaf."""
        return self.detach().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.plain()
        return plain.__reduce_ex__(protocol)


register_plain(Watched)


def mark(y: Any) -> None:
    """Say that a norm made ``y``, and saves it."""
    y._is_of_norm = True


def marked_as(y: Tensor, moved: Tensor) -> Tensor:
    """``moved``, a view of all of ``y``, marked and watched as that is."""
    if is_of_norm(y):
        mark(moved)
    if type(y) is Watched:
        view: Any = watch(moved)
        view._node = y.grad_fn
    return moved


def is_of_norm(tensor: Tensor) -> bool:
    """Whether a norm made this very tensor, and saves it."""
    return getattr(tensor, "_is_of_norm", False)


def watch(y: Tensor) -> Tensor:
    """``y``, a norm's output that nobody else has yet."""
    if type(y) is Tensor:
        y.__class__ = Watched  # as torch's lazy parameters do
    return y


def unwatched(y: Tensor) -> Tensor:
    """``y`` as an ordinary tensor in the same memory, whose gradient is y's: torch's compiler takes one. No
    user may get it, since the norm does not notice when ``.data`` is asked of this one."""
    return y.as_subclass(Tensor) if type(y) is Watched else y

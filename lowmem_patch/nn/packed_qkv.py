"""q, k and v that leave one Linear together, on their way to being three.

The Linear's output is followed through views and permutations to the ``unbind`` that takes it apart, so
that its gradient can be joined in one pass. It is a tensor of a subclass and no stand-in: whatever else is
done with it is done to the very tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lowmem_patch.functional import (
    in_compiler,
    is_worth_python,
    unbind_permuted,
    without_torch_function,
)
from lowmem_patch.nn.context import needs_gradient
from lowmem_patch.tracing.op_roles import Role, function_name, names_with

VIEWS = names_with(Role.RESHAPE | Role.PERMUTE | Role.TRANSPOSE)
_HOOKS = names_with(Role.HOOK)

_PASSED = (
    "the gradients of q, k and v go past this view, since it was unbound before: call it before unbind, "
    "or patch with attention: keep"
)


class PackedOutput(Tensor):
    """The output of a Linear, or a view of that.

    Attributes:
        source: what this is a view of, None for the output itself.
    """

    source: PackedOutput | None
    _passed = False  # parts were given out, whose gradients go past this view

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, function_name(func)
        with without_torch_function():
            this = args[0] if args else None
            if not isinstance(this, PackedOutput):
                return func(*args, **kwargs)
            if name == "unbind" and (whole := this._unwatched()) is not None:
                parts = unbind_permuted(whole, this, *args[1:], **kwargs)
                view: PackedOutput | None = this
                while view is not None and view is not whole:
                    view._passed, view = True, view.source
                return parts
            if this._passed and name in _HOOKS:
                raise RuntimeError(f"{name}: {_PASSED}")
            result = func(*args, **kwargs)
            # a reshape may have made a copy, and a view of another dtype is another reading
            same = name in VIEWS and result.data_ptr() == this.data_ptr()
            return _packed(result, this) if same and result.dtype == this.dtype else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)

    def _unwatched(self) -> PackedOutput | None:
        """The output, unless somebody waits for a gradient on the way, which would not be made."""
        view = self
        while view.source is not None:
            if view._backward_hooks or view.retains_grad:
                return None
            view = view.source
        return view


def _packed(tensor: Tensor, source: PackedOutput | None) -> PackedOutput:
    packed = tensor.as_subclass(PackedOutput)
    packed.source = source
    return packed


def follow_packed(module: nn.Module, args: tuple[Any, ...], output: Any) -> PackedOutput | None:
    """Forward hook of a Linear: its output is followed to where it is taken apart."""
    if in_compiler() or type(output) is not Tensor:
        return None
    if not needs_gradient(output) or not output.is_contiguous() or not output.numel():
        return None
    if not is_worth_python(output):
        return None
    return _packed(output, None)

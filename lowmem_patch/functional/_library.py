"""How an op is registered: schema, implementation, fake, autograd.

Each op is one torch.library operator, opaque to torch.compile: its tracers see the operator and the
tensors that its autograd formula saves, so no partitioner turns a recompute back into a save. In
eager mode the formula (a `torch.autograd.Function`) is applied directly and calls the implementation
directly (`is_eager`): small models are bound by Python, and each pass through the dispatcher costs as
much as a small kernel. Both ways run the same Function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_fake

from lowmem_patch.errors import DoubleBackwardError

__all__ = [
    "attach_autograd",
    "below_autograd",
    "define",
    "first_order",
    "in_forward_mode",
    "is_eager",
    "is_exporting",
    "is_transformed",
    "refuse_second_order",
    "register_plain",
    "saved_tensors",
    "wants_gradient",
    "without_autocast",
]

_NAMESPACE = "lowmem_patch"
# torch ships no types for Library; Any says so once
_make_library: Any = Library
_library: Any = _make_library(_NAMESPACE, "DEF")

# the arguments of an operator, where no tensor is of a subclass that would want to see the operator
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype}


class without_autocast:
    """Inside, an op casts on its own: autocast would contradict its fake.

    As ``torch.autocast(device, enabled=False)``, in a tenth of its time.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._enabled = torch.is_autocast_enabled(device)

    def __enter__(self) -> None:
        if self._enabled:
            torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            torch.set_autocast_enabled(self._device, True)


# what torch.library itself wraps around the forward of an op with an autograd formula
below_autograd = torch._C._AutoDispatchBelowAutograd


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register ``lowmem_patch::<schema>`` and return its overload.

    Args:
        schema: ``name(arguments) -> results`` without default values.
        implementation: computes it, on every backend.
        fake: gives results of the right shape, dtype and strides from fake tensors.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    return getattr(torch.ops.lowmem_patch, name).default


def attach_autograd(op: Any, function: Any, outputs: int = 1) -> Callable[..., Any]:
    """Register ``function`` as autograd formula of ``op``; return the leanest differentiable call.

    ``function`` is a `torch.autograd.Function` whose forward takes ``direct`` and the arguments of
    ``op``. Where ``direct`` is false it calls ``op`` inside `below_autograd` and returns what ``op``
    returns; where it is true it calls the implementation and returns the first ``outputs`` results.

    Args:
        op: the operator, as `define` returned it.
        function: its formula.
        outputs: how many results callers see; the others are kept for backward alone.

    Returns:
        a function of the arguments of ``op`` that returns its first ``outputs`` results.
    """

    def autograd_kernel(_keyset: Any, *args: Any) -> Any:
        if wants_gradient(*args):
            return function.apply(False, *args)
        with below_autograd():
            return op(*args)

    _library.impl(op._schema.name.partition("::")[2], autograd_kernel, "Autograd", with_keyset=True)
    # Function.apply without its search for torch.func's wrappers, which `call` refuses
    apply = super(torch.autograd.Function, function).apply

    def first(results: Any) -> Any:
        if not isinstance(results, tuple):
            return results
        return results[0] if outputs == 1 else results[:outputs]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return first(op(*args))
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"{op} does not compose with torch.func.grad and its relatives; use torch.autograd, "
                "or leave this module unpatched"
            )
        if is_eager(*args):
            return apply(True, *args)
        return first(function.apply(False, *args))

    return call


def is_eager(*args: Any) -> bool:
    """Whether nobody but autograd looks at these tensors, so that no operator need be seen.

    False while a compiler or tracer runs, under a dispatch mode (fake tensors, counters), and for
    tensor subclasses.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
    ):
        return False
    return _PLAIN.issuperset(map(type, args))


def register_plain(kind: type) -> None:
    """Say that a subclass of Tensor holds its values as any tensor does, so that a kernel may read them."""
    _PLAIN.add(kind)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way: a kernel would drop a tangent without a word,
    while a `Function` refuses it."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is under way, of which no op here knows."""
    if torch.compiler.is_compiling():
        return False
    return in_forward_mode() or torch._C._are_functorch_transforms_active()


def is_exporting() -> bool:
    """Whether torch.export, torch.jit or torch.onnx write down what runs, for places where nobody knows
    this package: plain ops then, and nothing deferred."""
    # the flag and not torch.compiler.is_exporting, which is true in all that torch 2.11 compiles
    if torch.compiler.is_compiling():
        return bool(getattr(torch.compiler, "_is_exporting_flag", False))
    return bool(torch._C._is_tracing())


def wants_gradient(*args: Any) -> bool:
    """Whether autograd would record an op on these arguments, and it is run to train."""
    if torch.is_grad_enabled():
        # a loop, not any(): this runs at each call of each op
        for argument in args:
            if isinstance(argument, Tensor) and argument.requires_grad:
                return not is_exporting()
    return False


def first_order(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a Function's backward whose result must not be differentiated again.

    With create_graph=True the gradients carry a node that raises `DoubleBackwardError` when
    somebody differentiates them; codes and recovered inputs would give a wrong second derivative.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def guarded(ctx: Any, *gradients: Tensor | None) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            apply: Any = _FirstOrder.apply
            return tuple(
                None if result is None else apply(result.requires_grad_(), name)
                for result in results
            )

        return guarded

    return decorate


def refuse_second_order(tensor: Tensor, name: str) -> Tensor:
    """``tensor``, whose derivative is a `DoubleBackwardError` where a second one is being prepared."""
    if not torch.is_grad_enabled():
        return tensor
    apply: Any = _FirstOrder.apply
    guarded: Tensor = apply(tensor.requires_grad_(), name)
    return guarded


def saved_tensors(ctx: Any, what: str) -> tuple[Any, ...]:
    """``ctx.saved_tensors``; who wrote into one of them meanwhile is told what it was."""
    try:
        saved: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"lowmem_patch: {what} was written in place after it was made, and backward needs it as it was: "
            "write into a copy, or call patch_model again with example_inputs that take this path"
        ) from error
    return saved


class _FirstOrder(torch.autograd.Function):
    """Identity whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, name: str) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        raise DoubleBackwardError(
            f"lowmem_patch::{ctx.name} has no second derivative: it keeps too little from the "
            "forward. Leave this module unpatched where double backward is needed."
        )

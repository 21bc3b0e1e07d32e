"""How an op is registered: schema, implementation, fake, autograd.

Each op is one torch.library operator, opaque to torch.compile: its tracers see the operator and the
tensors that its autograd formula saves, so no partitioner turns a recompute back into a save. In
eager mode the formula (a `torch.autograd.Function`) is applied directly and calls the implementation
directly (`is_eager`): small models are bound by Python, and each pass through the dispatcher costs as
much as a small kernel. Both ways save and differentiate by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.library import Library, register_autograd
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

from lowmem_patch.constants import NormSettings
from lowmem_patch.errors import DoubleBackwardError

_NAMESPACE = "lowmem_patch"
# torch ships no types for Library; Any says so once
_make_library: Any = Library
_library: Any = _make_library(_NAMESPACE, "DEF")

# the arguments of an op, where no tensor is of a subclass that would want to see the operator; in a tuple or
# list no op takes tensors
_PLAIN = {
    Tensor, torch.nn.Parameter, NormSettings, type(None), bool, int, float, str, tuple, list, torch.dtype,
}  # fmt: skip

# further classes of tensors that our operators may be given
_KNOWN: set[type] = {FakeTensor}

# whether a compiler traces what runs: the one place where torch is asked
in_compiler = torch.compiler.is_compiling
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY  # has no types
_WITHOUT_TORCH_FUNCTIONS: Any = torch._C.DisableTorchFunction
# a context in which subclasses run torch functions as if they were ordinary tensors
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
# of the backward that runs; -1 outside of one
backward_number: Any = torch._C._current_graph_task_id


def compilers_output() -> Any:
    """What the compiler makes of the code that it compiles, for functions that are constants to it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow, and there by now

    return InstructionTranslator.current_tx().output


def without_autocast(device: str) -> Any:
    """Inside, an op casts on its own: autocast would contradict its fake.

    As ``torch.autocast(device, enabled=False)``, which is what a compiler knows, in a tenth of its time.
    """
    return torch.autocast(device, enabled=False) if in_compiler() else _WithoutAutocast(device)


class _WithoutAutocast:
    def __init__(self, device: str) -> None:
        self._device = device
        self._enabled = torch.is_autocast_enabled(device)

    def __enter__(self) -> None:
        if self._enabled:
            torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            torch.set_autocast_enabled(self._device, True)


class without_grad:
    """As ``torch.no_grad``, in a third of its time."""

    def __enter__(self) -> None:
        self._enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._enabled)


class Operator:
    """One op: called directly where nobody but autograd looks on, elsewhere as an operator of torch.library.

    Calling it computes the results without a gradient; `differentiable` gives the call with one.

    Args:
        schema: ``name(arguments) -> results`` without default values. A `NormSettings` is a ``float[]``.
        implementation: computes it, on every backend; None in the place of an absent result, which the
            operator gives as an empty tensor.
        fake: the same from fake tensors: results of the right shape, dtype and strides.
    """

    def __init__(
        self, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
    ) -> None:
        self.name = schema.partition("(")[0]
        self.implementation = implementation
        _library.define(schema)
        _library.impl(self.name, _without_none(implementation), "CompositeExplicitAutograd")
        # no register_fake, whose tensors are fake ones, each with a dispatch of its own: these are of torch's
        # device without data, and one dispatch makes them fake
        _library.impl(self.name, _without_none(fake), "Meta")
        # the operator, of the same arguments; absent results are empty tensors
        self.traced: Any = getattr(torch.ops.lowmem_patch, self.name).default

    def __call__(self, *args: Any) -> Any:
        return self.implementation(*args) if is_eager(*args) else self.traced(*args)

    def differentiable(
        self,
        save: Callable[..., None],
        backward: Callable[..., Any],
        forward: Callable[..., Any] | None = None,
        outputs: int = 1,
        with_gradient: int = 1,
    ) -> Callable[..., Any]:
        """Register the autograd formula; return the leanest differentiable call.

        Args:
            save: ``save(ctx, inputs, output)`` as the ``setup_context`` of `torch.library.register_autograd`.
            backward: ``backward(ctx, *gradients)``, which gives one gradient for each argument; decorated
                with `first_order`, or else it may get an undefined gradient, None.
            forward: ``forward(ctx, *arguments)`` of a `torch.autograd.Function`, where that is more than the
                implementation and ``save``.
            outputs: how many results the call returns; the others are saved for backward alone.
            with_gradient: how many of them have one.
        """

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            if isinstance(output, tuple):
                ctx.mark_non_differentiable(*output[with_gradient:])
            save(ctx, inputs, output)

        def visible(results: Any) -> Any:
            if not isinstance(results, tuple):
                return results
            return results[0] if outputs == 1 else results[:outputs]

        implementation = self.implementation

        def compute(ctx: Any, *arguments: Any) -> Any:
            ctx.set_materialize_grads(False)
            output = implementation(*arguments)
            save(ctx, arguments, output)
            return output[0] if type(output) is tuple else output

        register_autograd(self.traced, backward, setup_context=setup_context, lib=_library)
        members = {"forward": staticmethod(forward or compute), "backward": staticmethod(backward)}
        function: Any = type(self.name, (torch.autograd.Function,), members)
        apply = direct_call(function)

        def call(*args: Any) -> Any:
            eager = is_eager(*args)
            if not eager and in_compiler():
                return visible(self.traced(*args))
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    f"{self.traced} does not compose with torch.func.grad and its relatives; use "
                    "torch.autograd, or leave this module unpatched"
                )
            # a Function refuses forward mode, of which an operator knows nothing
            if eager or in_forward_mode():
                return apply(*args)
            return visible(self.traced(*args))

        return call


def traced_through(schema: str, function: Callable[..., Any]) -> Any:
    """An op that Dynamo passes on and that runs as this Python where the rest of a compiler traces.

    There autograd is at work, and tensors know whose views they are.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.lowmem_patch, name).default


def _without_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the results of an operator."""

    def run(*args: Any) -> Any:
        results = function(*args)
        if isinstance(results, tuple):
            return tuple(results[0].new_empty(0) if r is None else r for r in results)
        return results

    return run


class Function(torch.autograd.Function):
    """Torch's, with a type for what gives one tensor."""

    apply: Callable[..., Tensor]


def direct_call(function: Any) -> Callable[..., Any]:
    """``Function.apply`` without its search for torch.func's wrappers, which nothing here meets."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply  # type: ignore[no-any-return]  # torch leaves it untyped


def below_modes(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, unseen by torch function modes, in which each look at a tensor's attribute is a
    call of Python; where somebody traces, it is seen."""
    modes = not in_compiler() and torch._C._len_torch_function_stack()
    if not modes or torch._C._len_torch_dispatch_stack():
        return function(*args)
    with _WITHOUT_TORCH_FUNCTIONS():
        return function(*args)


def is_eager(*args: Any) -> bool:
    """Whether nobody but autograd looks at these tensors, so that no operator need be seen.

    False while a compiler or tracer runs, under a dispatch mode (fake tensors, counters), and for
    tensor subclasses.
    """
    if in_compiler() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return False
    return _PLAIN.issuperset(map(type, args))


def is_ordinary() -> bool:
    """Whether neither a compiler nor a tracer nor a transform of torch.func nor forward mode is under way.

    In one call: patched modules ask each time.
    """
    return not (
        in_compiler()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_plain(*args: Any) -> bool:
    """As `is_eager`, for arguments of which modes may see other ops than the operator; fake tensors count."""
    return all(type(argument) in _PLAIN or type(argument) is FakeTensor for argument in args)


def knows_no_operators(*args: Any) -> bool:
    """Whether one of them is of a class of tensors that knows none of our operators (DTensor, nested
    tensors): torch's own functions run on it."""
    if in_compiler():
        return False
    return not all(type(argument) in _KNOWN or type(argument) in _PLAIN for argument in args)


def is_traced() -> bool:
    """Whether a tracer writes down what runs, of which `in_compiler` does not know (torch.jit, make_fx)."""
    return torch._C._is_tracing() or torch._C._get_dispatch_mode(_PROXY) is not None


def finds_results() -> bool:
    """Whether torch's selective checkpoint runs a block again: it finds what operators gave in the first run,
    and needs the same operators in the same order."""
    return _is_under("_CachedTorchDispatchMode")


def keeps_results() -> bool:
    """Whether torch's selective checkpoint runs a block, and may keep what any operator gives: nobody may
    write into that afterwards."""
    return _is_under("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")


def _is_under(*names: str) -> bool:
    """Whether a dispatch mode whose class has one of these names sees the ops."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(mode).__name__ in names for mode in dispatch_modes())


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees the ops: selective checkpoint would take them for the block's."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def register_plain(kind: type) -> None:
    """Say that a kernel may read what an argument of this class holds: a subclass of Tensor whose values lie
    as any tensor's, or no tensor."""
    _PLAIN.add(kind)


def register_known(kind: type) -> None:
    """Say that tensors of this class run our operators by themselves."""
    _KNOWN.add(kind)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way: a kernel would drop a tangent without a word,
    while a `Function` refuses it."""
    return not in_compiler() and forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is under way, of which no op here knows."""
    if in_compiler():
        return False
    return in_forward_mode() or torch._C._are_functorch_transforms_active()


def is_exporting() -> bool:
    """Whether torch.export, torch.jit or torch.onnx write down what runs, for places where nobody knows
    this package: plain ops then, and nothing deferred."""
    # the flag and not torch.compiler.is_exporting, which is true in all that torch 2.11 compiles
    if in_compiler():
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


def see_undefined(ctx: Any) -> None:
    """In a Function's forward: let its backward see a gradient that is undefined as None, not as zeros.

    Torch's own ops hand it on, and a parameter behind them gets no gradient: of zeros an optimizer would
    make states, and apply weight decay. A graph has none, and its compiler knows no such call.
    """
    if not in_compiler():
        ctx.set_materialize_grads(False)


def first_order(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a Function's backward that no second derivative follows: codes and recovered inputs would give
    a wrong one. With create_graph=True it raises `DoubleBackwardError`. Where no gradient is defined
    (`see_undefined`), it gives none.

    At once: ``torch.autograd.grad`` with inputs would never run a node whose own backward is the error, since
    no path leads from it to the inputs. A part of the second derivative would be missing without a word.
    """
    # not torch's once_differentiable, which has such a node

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def guarded(ctx: Any, *gradients: Tensor | None) -> Any:
            refuse_second_order(name)
            if gradients[0] is None and all(gradient is None for gradient in gradients):
                return (None,) * len(ctx.needs_input_grad)
            return backward(ctx, *gradients)

        return guarded

    return decorate


def refuse_second_order(name: str) -> None:
    """Raise in a backward with create_graph=True.

    Raises:
        DoubleBackwardError: a second derivative is being prepared.
    """
    if torch.is_grad_enabled() and backward_number() != -1:
        raise DoubleBackwardError(
            f"lowmem_patch::{name} has no second derivative, for which create_graph=True asks: it saves too "
            "little in the forward. Leave the model unpatched where double backward is needed: call "
            "unpatch_model"
        )


def saved_tensors(ctx: Any, what: str) -> tuple[Any, ...]:
    """``ctx.saved_tensors``; who wrote into one of them meanwhile is told what it was."""
    try:
        saved: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise written(what) from error
    return saved


def written(what: str) -> RuntimeError:
    """The error where somebody wrote into what is saved."""
    return RuntimeError(
        f"lowmem_patch: {what} was written in place after it was made, and backward needs it as it was: "
        "write into a copy, or call patch_model again with example_inputs that take this path"
    )

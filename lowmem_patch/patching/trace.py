"""Run one forward and record who makes and who reads each tensor.

The forward runs on a shadow (`lowmem_patch.patching.shadow`). Where a model's control flow needs data, the
model itself runs once on the example inputs instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem_patch.dropouts import dropout_call
from lowmem_patch.errors import TraceError
from lowmem_patch.patching.fakes import ADDRESSES, running_fake
from lowmem_patch.patching.gpu_dropout import GpuDropouts
from lowmem_patch.patching.shadow import Shadow, attributes_of
from lowmem_patch.rows import function_name
from lowmem_patch.saved import SavedBytes, module_stack, saved_bytes, storage_key

__all__ = [
    "FOREIGN_KERNEL",
    "Call",
    "Op",
    "Trace",
    "describe",
    "trace_forward",
]

FOREIGN_KERNEL = "a kernel of its own"  # the name of an op that is none of torch's


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One torch function call; ``module`` is the innermost module that was running.

    ``opaque`` says that it ran where a deferred tensor would lose its gradient: in a custom autograd
    function, in a scripted one, in a reentrant checkpoint, under no_grad, or that it waits for the
    tensor's gradient. ``autocast`` says that autocast was on.
    """

    name: str
    func: Callable[..., Any]
    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    writes: bool
    opaque: bool = False
    autocast: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its tensor inputs and outputs, and the ops it ran (as a range)."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: int
    first_op: int
    last_op: int
    autocast: bool = False


@dataclasses.dataclass
class Trace:
    """Facts of one forward. Tensors are identified by ``id``; the trace keeps them alive."""

    ops: list[Op] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    readers: dict[int, list[Op]] = dataclasses.field(default_factory=dict)
    outputs: set[int] = dataclasses.field(default_factory=set)
    parameters: dict[int, str] = dataclasses.field(default_factory=dict)
    saved: SavedBytes = dataclasses.field(default_factory=SavedBytes)
    fake: bool = True
    keep_alive: list[Any] = dataclasses.field(default_factory=list)


# These return their very input when there is nothing to do, which is no write.
_MAY_RETURN_INPUT = frozenset(
    (
        "contiguous", "to", "type_as", "type", "float", "half", "bfloat16", "double", "dropout", "expand",
        "requires_grad_", "squeeze", "reshape", "view", "flatten", "cpu", "cuda", "expand_as", "permute",
    )
)  # fmt: skip


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _autocast() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


class _Recorder(TorchFunctionMode):
    def __init__(self, trace: Trace, stack: list[str]) -> None:
        super().__init__()
        self.trace = trace
        self.stack = stack
        self.running = False
        self.given: list[tuple[Op, Tensor]] = []  # to kernels, with sums over what they were given
        self.flowing = {storage_key(tensor) for tensor in _tensors(trace.keep_alive)}

    def add(self, op: Op) -> None:
        self.trace.ops.append(op)
        if not torch._C._are_functorch_transforms_active():  # whose tensors have no storage
            self.flowing.update(map(storage_key, op.outputs))
        for key in {id(tensor) for tensor in _tensors((op.args, op.kwargs))}:
            self.trace.readers.setdefault(key, []).append(op)

    def _sums(self, tensor: Tensor) -> Tensor:
        self.running = True  # what runs here is no part of the forward
        with torch.no_grad():
            wide = tensor.detach().double()
            sums = torch.stack((wide.sum(), wide.square().sum()))
        self.running = False
        return sums

    def find_writes(self) -> None:
        """Tell which kernels wrote into what they were given: torch knows nothing of it."""
        for op, before in self.given:
            if not torch.equal(self._sums(op.args[0]), before):
                written = dataclasses.replace(op, writes=True)
                for ops in (self.trace.ops, self.trace.readers[id(op.args[0])]):
                    ops[ops.index(op)] = written

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.running = True  # what it dispatches is part of it
        try:
            output = func(*args, **kwargs)
        finally:
            self.running = False
        name = function_name(func)
        module = self.stack[-1] if self.stack else ""
        if name in ADDRESSES and storage_key(args[0]) in self.flowing:  # no weight alone
            op = Op(FOREIGN_KERNEL, func, module, args, kwargs, (), False, True, _autocast())
            self.given.append((op, self._sums(args[0])))
            self.add(op)
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        same = bool(inputs) and any(o is i for o in outputs for i in inputs[:1])
        writes = (
            name == "__setitem__" or (same and name not in _MAY_RETURN_INPUT) or "out" in kwargs
        )
        if name == "dropout" and same:
            call = dropout_call(args, kwargs)
            writes = call.in_place and call.p > 0
        waits = name in ("register_hook", "retain_grad")
        if inputs and (writes or waits or (outputs and not same)):
            opaque = waits or not torch.is_grad_enabled()
            self.add(
                Op(name, func, module, args, kwargs, tuple(outputs), writes, opaque, _autocast())
            )
        return output


# torch ships no types for this class; Any says so once
_DispatchMode: Any = TorchDispatchMode


class _ScriptRecorder(_DispatchMode):  # type: ignore[misc]  # a base without types
    """Records what no torch function announces: the ops inside scripted functions."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self.recorder.running and func.namespace != "prim":  # prim asks for metadata
            stack = self.recorder.stack
            module, outputs = stack[-1] if stack else "", tuple(_tensors(output))
            writes = bool(func._schema.is_mutable)
            self.recorder.add(
                Op(str(func), func, module, args, kwargs, outputs, writes, True, _autocast())
            )
        return output


def _record_custom_functions(trace: Trace) -> None:
    """Add the readers that only autograd knows: custom functions whose kernels are no torch ops."""
    tensors = {
        (tensor.grad_fn, tensor.output_nr): tensor
        for op in trace.ops
        for tensor in op.outputs
        if tensor.grad_fn is not None
    }
    pending: list[Any] = [tensor.grad_fn for tensor in _tensors(trace.keep_alive)]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        for parent, number in node.next_functions:
            pending.append(parent)
            tensor = tensors.get((parent, number)) if custom else None
            known = trace.readers.setdefault(id(tensor), []) if tensor is not None else []
            if tensor is not None and not any(op.opaque for op in known):
                op = Op(node.name(), node.apply, "", (tensor,), {}, (), False, True)
                trace.ops.append(op)
                known.append(op)


@contextlib.contextmanager
def _record_calls(model: nn.Module, trace: Trace) -> Iterator[None]:
    starts: list[tuple[int, Any, Any, bool]] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            starts.append((len(trace.ops), args, kwargs, _autocast()))

        def leave(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            first, args, kwargs, autocast = starts.pop()
            inputs, outputs = tuple(_tensors((args, kwargs))), tuple(_tensors(output))
            trace.keep_alive.append((inputs, outputs))
            arguments = sum(value is not None for value in (*args, *kwargs.values()))
            last = len(trace.ops)
            trace.calls.append(Call(name, inputs, outputs, arguments, first, last, autocast))

        handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Trace in training mode, so that dropout is seen; every module's own flag is put back."""
    flags = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def trace_forward(shadow: Shadow, *, structure: bool = True) -> Trace:
    """Run the forward with gradients on, and record the dataflow and what autograd saves.

    Args:
        structure: False records the saved bytes only.

    Raises:
        TraceError: the forward fails; the cause is chained.
    """
    model, inputs = shadow.model, shadow.inputs
    trace = Trace(fake=shadow.mode is not None)
    parameters = dict(model.named_parameters())  # offloading exchanges them in the forward
    trace.parameters.update((id(parameter), name) for name, parameter in parameters.items())
    trace.keep_alive.append((model, parameters, inputs))
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(_training(model))
        contexts.enter_context(torch.enable_grad())
        if shadow.mode is not None:
            contexts.enter_context(running_fake(shadow.mode))
        if shadow.elsewhere:
            contexts.enter_context(GpuDropouts())
        saved = contexts.enter_context(saved_bytes(model))
        if structure:
            stack = contexts.enter_context(module_stack(model))
            contexts.enter_context(_record_calls(model, trace))
            recorder = contexts.enter_context(_Recorder(trace, stack))
            contexts.enter_context(_ScriptRecorder(recorder))
        try:
            output = model(*inputs.args, **inputs.kwargs)
        except (
            Exception
        ) as error:  # whatever a foreign forward raises, the user is told which model and why
            raise TraceError(
                f"{type(model).__name__} could not be run on the example inputs ({inputs}): "
                f"{_place(error, model)}: {type(error).__name__}: {error}"
            ) from error
    kept = [_plain(output), *(attributes_of(module) for module in model.modules())]
    trace.outputs = {id(tensor) for tensor in _tensors(kept)}
    trace.keep_alive.append(kept)
    if structure:
        recorder.find_writes()
        _record_custom_functions(trace)
    trace.saved = saved
    return trace


def _place(error: BaseException, model: nn.Module) -> str:
    """The innermost module in which an error was raised, as a report names it."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost: nn.Module = model
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and id(running) in names:
            innermost = running
    return describe(innermost, names[id(innermost)])


def describe(module: nn.Module, name: str) -> str:
    """``LigerRMSNorm in model.norm``: the class as the module prints it, which others may change."""
    kind = module._get_name()  # type: ignore[no-untyped-call]  # of torch
    return f"{kind} in {name or 'the model itself'}"


def _plain(output: Any) -> Any:
    """ModelOutput, other mappings and dataclasses as lists, so that every tensor in them is found."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "values") and callable(output.values):
        return [_plain(value) for value in output.values()]
    if isinstance(output, (tuple, list)):
        return [_plain(value) for value in output]
    if dataclasses.is_dataclass(output) or type(output).__name__ == "SimpleNamespace":
        return [_plain(value) for value in vars(output).values()]
    return output

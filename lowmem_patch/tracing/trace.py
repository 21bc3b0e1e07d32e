"""Run one forward and record who makes and who reads each tensor.

The forward runs on a shadow (`lowmem_patch.tracing.shadow`). Where a model's control flow needs data, the
model itself runs once on the example inputs instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.call_arguments import dropout_call
from lowmem_patch.tracing.inputs import about_arguments
from lowmem_patch.tracing.isolation import in_training_mode
from lowmem_patch.tracing.observers import DispatchObserver, FunctionObserver, observed_calls
from lowmem_patch.tracing.op_roles import NEVER_WRITES, Role, function_name, role_of
from lowmem_patch.tracing.saved_bytes import SavedBytes, saved_bytes, storage_key
from lowmem_patch.tracing.shadow import Shadow, attributes_of, node_of, output_tensors, tensors_in

FOREIGN_KERNEL = "a kernel of its own"  # the name of an op that is none of torch's


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One call of a torch function.

    Attributes:
        module: the path of the innermost module that was running.
        writes: it writes in place.
        opaque: it ran where a deferred tensor would lose its gradient (in a custom autograd function, in a
            scripted one, in a reentrant checkpoint, under no_grad), or it waits for the tensor's gradient.
        compiled: it ran in a function that torch.compile compiled.
        autocast: autocast was on.
        role: what a function of this name does.
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
    compiled: bool = False

    @cached_property
    def role(self) -> Role:
        return role_of(self.name)

    @cached_property
    def reads(self) -> list[Tensor]:
        """Every tensor among its arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def place(self) -> str:
        """As a report names it."""
        name = self.name
        if name == FOREIGN_KERNEL and isinstance(self.args[0], FakeTensor):
            name += " (which may write there, or only read)"
        return f"{name} in {self.module}" if self.module else name


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its tensor inputs and outputs, how many arguments are not None and how many are
    given, and the ops it ran (as a range)."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: int
    first_op: int
    last_op: int
    autocast: bool = False
    given: int = 1

    @property
    def takes_one(self) -> bool:
        """Whether it is a call with one tensor and nothing else."""
        return len(self.inputs) == self.arguments == 1


class CustomFunction(NamedTuple):
    """A custom autograd function that makes one tensor of another of the same shape, and saves such a one.

    Attributes:
        module: the path of the module whose forward calls it, as far as torch's own functions inside tell.
        place: of a call among the trace's ops.
        saved: bytes, of all calls.
    """

    module: str
    place: int
    saved: int


@dataclasses.dataclass
class Trace:
    """Facts of one forward. Tensors are identified by ``id``; the trace keeps them alive.

    Attributes:
        ops, calls: in the order of the forward; a call stands where it ends.
        consumers: the ops that read a tensor, by its id.
        outputs: what the model returns or leaves on its modules.
        parameters: their names in the model.
        saved: what autograd holds after the forward.
        custom: functions that may be activations, and whose derivatives nobody sees, as a report names them.
    """

    ops: list[Op] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    consumers: dict[int, list[Op]] = dataclasses.field(default_factory=dict)
    outputs: set[int] = dataclasses.field(default_factory=set)
    parameters: dict[int, str] = dataclasses.field(default_factory=dict)
    saved: SavedBytes = dataclasses.field(default_factory=SavedBytes)
    custom: dict[str, CustomFunction] = dataclasses.field(default_factory=dict)
    keep_alive: list[Any] = dataclasses.field(default_factory=list)


def _autocast() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _is_compiled() -> bool:
    """Whether a function that torch.compile compiled runs as it is written: its wrapper is in the stack."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not trace_forward.__code__:
        if frame.f_code.co_qualname.startswith("_TorchDynamoContext.__call__."):
            return True
        frame = frame.f_back
    return False


class _Recorder(FunctionObserver):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        # the modules that are running: names, the op that was next, arguments, whether autocast was on
        self.stack: list[tuple[str, int, Any, Any, bool]] = []
        self.running = False
        self.given: list[tuple[Op, Tensor]] = []  # to kernels, with sums over what they were given
        self.flowing = {storage_key(tensor) for tensor in tensors_in(trace.keep_alive)}

    def of_calls(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside, calls of modules are recorded as well."""
        trace, stack = self.trace, self.stack

        def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.append((name, len(trace.ops), args, kwargs, _autocast()))

        def leave(name: str, module: nn.Module, output: Any) -> None:
            _, first, args, kwargs, autocast = stack.pop()
            inputs, outputs = tuple(tensors_in((args, kwargs))), tuple(tensors_in(output))
            trace.keep_alive.append((inputs, outputs))
            arguments = sum(value is not None for value in (*args, *kwargs.values()))
            last, given = len(trace.ops), len(args) + len(kwargs)
            call = Call(name, inputs, outputs, arguments, first, last, autocast, given)
            trace.calls.append(call)

        return observed_calls(model, enter, leave, only_looks=False)

    def add(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[Tensor, ...] = (),
        writes: bool = False,
        opaque: bool = True,
    ) -> Op:
        module, compiled = self.stack[-1][0] if self.stack else "", _is_compiled()
        op = Op(name, func, module, args, kwargs, outputs, writes, opaque, _autocast(), compiled)
        self.trace.ops.append(op)
        if not torch._C._are_functorch_transforms_active():  # whose tensors have no storage
            self.flowing.update(map(storage_key, op.outputs))
        for key in {id(tensor) for tensor in op.reads}:
            self.trace.consumers.setdefault(key, []).append(op)
        return op

    def _add_kernel(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A kernel gets a tensor's memory: what it does there is seen on data alone."""
        fake = isinstance(args[0], FakeTensor)
        op = self.add(FOREIGN_KERNEL, func, args, kwargs, writes=fake)
        if not fake:
            self.given.append((op, self._sums(args[0])))

    def _sums(self, tensor: Tensor) -> Tensor:
        self.running = True  # what runs here is no part of the forward
        with torch.no_grad():
            values = tensor.detach().double()
            sums = torch.stack((values.sum(), values.square().sum()))
        self.running = False
        return sums

    def find_writes(self) -> None:
        """Tell which kernels wrote into what they were given: torch knows nothing of it."""
        for op, before in self.given:
            if not torch.equal(self._sums(op.args[0]), before):
                written = dataclasses.replace(op, writes=True)
                for ops in (self.trace.ops, self.trace.consumers[id(op.args[0])]):
                    ops[ops.index(op)] = written

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.running = True  # what it dispatches is part of it
        try:
            output = func(*args, **kwargs)
        finally:
            self.running = False
        name = function_name(func)
        role = role_of(name)
        if role.has(Role.ADDRESS) and storage_key(args[0]) in self.flowing:  # and not a weight
            self._add_kernel(func, args, kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tuple(tensors_in(output))
        same = any(tensor is inputs[0] for tensor in outputs) if inputs else False
        writes = _writes(role, args, kwargs, same)
        if writes and role.has(Role.ACTIVATION) and output is inputs[0]:
            # another object, so that who reads it later can be told from who reads the input
            self.running = True
            output = output.view_as(output)
            self.running, outputs = False, (output,)
        if inputs and (writes or role.has(Role.HOOK) or (outputs and not same)):
            opaque = role.has(Role.HOOK | Role.GRADIENT) or not torch.is_grad_enabled()
            self.add(name, func, args, kwargs, outputs, writes, opaque)
        return output


def _writes(role: Role, args: tuple[Any, ...], kwargs: dict[str, Any], same: bool) -> bool:
    """Whether a function wrote in place; ``same``: it returned its first tensor."""
    if role.has(Role.DROPOUT) and same:
        call = dropout_call(args, kwargs)
        return call.in_place and call.p > 0
    return (
        role.has(Role.WRITE)
        or (same and not role.has(NEVER_WRITES))
        or kwargs.get("out") is not None
    )


class _ScriptRecorder(DispatchObserver):
    """Records what no torch function announces: the ops inside scripted functions."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if not self.recorder.running and func.namespace != "prim":  # prim asks for metadata
            outputs, writes = tuple(tensors_in(output)), bool(func._schema.is_mutable)
            self.recorder.add(str(func), func, args, kwargs, outputs, writes)
        return output


def _record_custom_functions(trace: Trace) -> None:
    """Add the consumers that only autograd knows: custom functions whose kernels are no torch ops."""
    # a deferred tensor that was read refuses to tell torch functions
    with torch._C.DisableTorchFunctionSubclass():
        tensors = {
            (node, tensor.output_nr): tensor
            for op in trace.ops
            for tensor in op.outputs
            if (node := node_of(tensor)) is not None
        }
    pending: list[Any] = [node_of(tensor) for tensor in tensors_in(trace.keep_alive)]
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
            if tensor is None:
                continue
            known = trace.consumers.setdefault(id(tensor), [])
            if _may_be_activation(node, tensor):
                _add_custom(trace, node, next((op for op in known if op.opaque), None))
            if not any(op.opaque for op in known):
                op = Op(node.name(), node.apply, "", (tensor,), {}, (), False, True)
                trace.ops.append(op)
                known.append(op)


def _add_custom(trace: Trace, node: Any, inside: Op | None) -> None:
    """``inside``: a torch function that it calls."""
    module = inside.module if inside else ""
    place = trace.ops.index(inside) if inside else len(trace.ops)
    name = f"{module}.{node.name()}".removeprefix(".").removesuffix("Backward") + "()"
    saved = sum(tensor.nbytes for tensor in node.saved_tensors if tensor is not None)
    before = trace.custom.get(name)
    trace.custom[name] = CustomFunction(module, place, saved + (before.saved if before else 0))


def _may_be_activation(node: Any, tensor: Tensor) -> bool:
    """Whether a custom function of this one tensor makes another of its shape, and saves one of its shape."""
    given = [parent for parent, _ in node.next_functions if parent is not None]
    made = node._input_metadata
    if len(given) != 1 or len(made) != 1 or tuple(made[0].shape) != tuple(tensor.shape):
        return False
    # torch's own checkpoint is one
    if type(node)._forward_cls.__module__.startswith("torch."):
        return False
    return any(t is not None and t.shape == tensor.shape for t in node.saved_tensors)


def trace_forward(shadow: Shadow, *, structure: bool = True) -> Trace:
    """Run the forward with gradients on, and record the dataflow (``structure``) and what autograd saves.

    Raises:
        TraceError: the forward fails; the cause is chained.
    """
    model, inputs = shadow.model, shadow.inputs
    trace = Trace()
    parameters = dict(model.named_parameters())  # offloading exchanges them in the forward
    trace.parameters.update((id(parameter), name) for name, parameter in parameters.items())
    trace.keep_alive.append((model, parameters, inputs))
    with (
        in_training_mode(model),
        torch.enable_grad(),
        shadow.running(),
        saved_bytes(model) as trace.saved,
        contextlib.ExitStack() as contexts,
    ):
        if structure:
            recorder = _Recorder(trace)
            contexts.enter_context(recorder.of_calls(model))
            contexts.enter_context(recorder)
            contexts.enter_context(_ScriptRecorder(recorder))
        try:
            output = model(*inputs.args, **inputs.kwargs)
        except Exception as error:  # of a foreign forward: the user is told which model and why
            takes = about_arguments(model, inputs, error)
            raise TraceError(
                f"{type(model).__name__} could not be run on the example inputs "
                f"({str(inputs) or 'no tensors'}): {_module_of(error, model)}: {_text_of(error)}{takes}"
            ) from error
    given = [output_tensors(output), *(attributes_of(module) for module in model.modules())]
    trace.outputs = {id(tensor) for tensor in tensors_in(given)}
    trace.keep_alive.append(given)
    if structure:
        recorder.find_writes()
        _record_custom_functions(trace)
    return trace


def _text_of(error: BaseException) -> str:
    """What a report says of an error; torch's own about its transforms names nothing that can be done."""
    if "saved tensor hooks" in str(error) and "torch.func" in str(error):
        return (
            "the forward calls torch.func.grad or another of its derivatives, in which torch lets nobody see "
            "what is saved: call patch_model for the parts of the model that do not"
        )
    return f"{type(error).__name__}: {error}"


def _module_of(error: BaseException, model: nn.Module) -> str:
    """The innermost module in which an error came up, as a report names it."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost: nn.Module = model
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and id(running) in names:
            innermost = running
    return describe(innermost, names[id(innermost)])


def describe(module: nn.Module, name: str) -> str:
    """``LigerRMSNorm in model.norm``: the class as the module prints it, which others may change."""
    label = module._get_name()  # type: ignore[no-untyped-call]  # of torch
    return f"{label} in {name or 'the model itself'}"

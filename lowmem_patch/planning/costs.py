"""The time of each run of a block: products and traffic of its ops on a device, or a clock.

The model: an op takes the longer of its floating-point operations at the device's rate and its bytes at the
bandwidth. On a GPU forwards are timed, which scales the model's times block by block.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowmem_patch.strategies.checkpointing import Blocks
from lowmem_patch.strategies.protocol import Facts, Patch
from lowmem_patch.tracing.call_arguments import attention_call, weight_matmul
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.isolation import preserved
from lowmem_patch.tracing.observers import observed_calls
from lowmem_patch.tracing.op_roles import MATMULS, REARRANGES, SELECTS, WEIGHT_MATMULS, Role
from lowmem_patch.tracing.trace import Op

_SAVES_NOTHING = REARRANGES | SELECTS | Role.EXPAND | Role.CAST | Role.SUM
_ATTENTION = Role.FUSED_ATTENTION | Role.FLEX_ATTENTION
_COPIED = 1 << 25  # bytes of a copy that is timed
_VIEWS = (REARRANGES | SELECTS | Role.EXPAND) & ~(Role.CONTIGUOUS | Role.CLONE)


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device does in a second, as far as kernels of usual sizes reach it.

    Attributes:
        name: as a report prints it.
        products: floating-point operations in 16 bits; in 32 bits a quarter of it.
        traffic: bytes of its memory.
        host: bytes between it and the host, one way.
        launch: seconds that no op is shorter than.
        apart: its memory is another than the host's, and copies run beside the computation.
    """

    name: str
    products: float
    traffic: float
    host: float
    launch: float = 5e-6
    apart: bool = True

    def seconds(self, operations: float, moved: float, width: int) -> float:
        rate = self.products if width <= 2 else self.products / 4
        return max(operations / rate, moved / self.traffic, self.launch)


# 65 % of the data sheets' dense products and 80 % of their bandwidth; PCIe 4 or 5
_DEVICES = (
    Device("B200", 1460e12, 6.4e12, 50e9),
    Device("H200", 640e12, 3.8e12, 50e9),
    Device("H100", 640e12, 2.7e12, 50e9),
    Device("A100", 200e12, 1.3e12, 22e9),
    Device("L40", 118e12, 0.7e12, 22e9),
    Device("4090", 107e12, 0.8e12, 22e9),
    Device("3090", 46e12, 0.75e12, 22e9),
    Device("T4", 42e12, 0.25e12, 11e9),
)
_OTHER_GPU = Device("a GPU like the A100", 200e12, 1.3e12, 22e9)
_CPU = Device("the CPU", 2e11, 2e10, 2e10, apart=False)


def device_of(model: nn.Module) -> Device:
    """That of the model's weights; a model on the meta device will run on a GPU."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "cpu":
        return _CPU
    if not parameter.is_cuda:  # copies beside the computation are CUDA's here
        return dataclasses.replace(_OTHER_GPU, apart=parameter.is_meta)
    return _device_named(torch.cuda.get_device_name(parameter.device))


def _device_named(name: str) -> Device:
    # a T400 is no T4, and an RTX A1000 no A100; an L40S is counted as an L40
    found = (device for device in _DEVICES if re.search(rf"{device.name}(?!\d)", name))
    return next(found, _OTHER_GPU)


@dataclasses.dataclass(frozen=True)
class RunSeconds:
    """Seconds of one run of a block.

    Attributes:
        forward, backward: of these.
        attention: of the fused attention in its forward.
        last: of what its forward computes when all is saved: a second run ends before it.
    """

    forward: float
    attention: float
    backward: float
    last: float = 0.0

    @property
    def again(self) -> float:
        """Seconds of a second run in backward."""
        return self.forward - self.last


def _of_attention(op: Op) -> float:
    """Floating-point operations of attention, with the products of ``multi_head_attention_forward``."""
    within = op.role.has(Role.HOLDS_LINEARS)
    call = attention_call(op.name, op.args, op.kwargs)
    q, k, width = call.query, call.key, call.query.shape[-1]
    keys = k.shape[0] if within else k.shape[-2]  # [length, batch, width], or without a batch
    pairs = float(math.prod(q.shape[:-1])) * keys
    products = 4 * (q.numel() + k.numel()) * width if within else 0
    return float(4 * pairs * width * (0.5 if call.is_causal else 1.0) + products)


def _operations(op: Op) -> float:
    """Floating-point operations of a forward."""
    out = op.outputs[0]
    if op.role.has(_ATTENTION):
        return _of_attention(op)
    known = weight_matmul(op.name, op.args, op.kwargs)
    if known is not None:
        return float(2 * out.numel() * known.input.shape[-1])
    if op.role.has(Role.CONVOLUTION):
        weights = [argument for argument in op.args[1:] if isinstance(argument, Tensor)]
        return float(2 * out.numel() * (math.prod(weights[0].shape[1:]) if weights else 1))
    if op.role.has(MATMULS):
        factors = [argument for argument in op.args if isinstance(argument, Tensor)]
        return float(2 * out.numel() * (factors[0].shape[-1] if factors else 1))
    return 0.0


def _given(op: Op) -> list[Tensor]:
    return [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, Tensor)]


def _op_seconds(op: Op, device: Device) -> tuple[float, float]:
    """Seconds of the forward and of the backward."""
    if not op.outputs or op.role.has(_VIEWS):
        return 0.0, 0.0
    given = _given(op)
    tensors = (*given, *op.outputs)
    if op.role.has(Role.CAST) and op.outputs[0] is tensors[0]:
        return 0.0, 0.0
    moved = float(sum(tensor.nbytes for tensor in tensors))
    operations, width = _operations(op), op.outputs[0].element_size()
    forward = device.seconds(operations, moved, width)
    if not op.outputs[0].requires_grad:
        return forward, 0.0
    gradients = sum(tensor.requires_grad for tensor in given)
    if op.role.has(_ATTENTION):
        return forward, 2.5 * forward
    return forward, forward * max(1, min(gradients, 2))


def run_seconds(
    facts: Facts, blocks: Blocks, device: Device, patches: Iterable[Patch] = ()
) -> tuple[RunSeconds, ...]:
    """The times of the runs by the model of the device, in the order of the forward.

    Counted are the unpatched ops. A LoRA layer that runs as one op takes hardly longer than its base
    Linear: only that Linear counts.
    """
    joined = tuple(f"{patch.site}." for patch in patches if patch.strategy == "lora")
    free = {
        name
        for name in facts.modules
        if f"{name}.".startswith(joined) and ".base_layer." not in f"{name}."
    }
    sites = {block.site for block in blocks.blocks}
    calls = sorted((c for c in facts.trace.calls if c.name in sites), key=lambda c: c.first_op)
    found = []
    for call in calls:
        forward = attention = backward = 0.0
        ops = facts.trace.ops[call.first_op : call.last_op]
        for op in ops:
            ahead, back = (0.0, 0.0) if op.module in free else _op_seconds(op, device)
            forward, backward = forward + ahead, backward + back
            if op.role.has(Role.FUSED_ATTENTION):
                attention += ahead
        found.append(RunSeconds(forward, attention, backward, _last_seconds(ops, device)))
    return tuple(found)


def _last_seconds(ops: Sequence[Op], device: Device) -> float:
    """Seconds of ops whose results no op of the block saves: a Linear saves what it reads, and computes."""
    saved: set[int] = set()  # identities of tensors
    seconds = 0.0
    for op in reversed(ops):
        given = _given(op)
        linear = op.role.has(WEIGHT_MATMULS)
        passes = op.role.has(_SAVES_NOTHING) or (op.role.has(Role.PRODUCT) and len(given) == 1)
        if (linear or passes) and saved.isdisjoint(map(id, op.outputs)):
            seconds += _op_seconds(op, device)[0]
            if passes:
                continue
        saved.update(map(id, given))
    return seconds


def timed_forward(
    model: nn.Module, inputs: ExampleInputs, sites: Sequence[str]
) -> tuple[float, ...]:
    """Seconds of each run of the blocks in a forward, by a clock: the least of three.

    Autograd records it, as in training, and saves nothing. Nothing of it stays on the model.
    """
    device = next(model.parameters()).device
    starts: list[Any] = []
    pairs: list[tuple[Any, Any]] = []
    wanted = frozenset(sites)

    def enter(name: str, args: Any, kwargs: Any) -> None:
        if name in wanted:
            starts.append(time_mark(device))

    def leave(name: str, module: nn.Module, output: Any) -> None:
        if name in wanted:
            pairs.append((starts.pop(), time_mark(device)))

    nothing_saved: Any = saved_tensors_hooks(_nothing, _nothing)
    best: list[float] = []
    for _ in range(4):  # the first warms up
        pairs.clear()
        observed = observed_calls(model, enter, leave)
        with preserved(model), torch.enable_grad(), nothing_saved, observed:
            model(*inputs.args, **inputs.kwargs)
        seconds = [seconds_between(*pair) for pair in pairs]
        best = [min(pair) for pair in zip(best, seconds, strict=True)] if best else seconds
    return tuple(best)


def _nothing(_: Any) -> Any:
    return None


def time_mark(device: torch.device) -> Any:
    """A point of time, on a GPU in its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    make: Any = torch.cuda.Event  # has no types
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds from one mark to another."""
    if isinstance(end, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def with_measured_host(device: Device, place: torch.device) -> Device:
    """``device`` with the speed of copies between a GPU and pinned host memory, by a clock: the slower
    direction, the best of three. A CPU has none."""
    if place.type != "cuda":
        return device
    there = torch.empty(_COPIED, dtype=torch.uint8, device=place)
    here = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    slowest = 0.0
    for to, source in ((here, there), (there, here)):
        pairs = []
        for _ in range(4):  # the first warms up
            start = time_mark(place)
            to.copy_(source, non_blocking=True)
            pairs.append((start, time_mark(place)))
        slowest = max(slowest, min(seconds_between(*pair) for pair in pairs[1:]))
    return dataclasses.replace(device, host=_COPIED / slowest)


def scaled(model: Sequence[RunSeconds], measured: Sequence[float]) -> tuple[RunSeconds, ...]:
    """The model's times with the measured forwards, if there is one for each run."""
    if len(model) != len(measured):
        return tuple(model)
    found = []
    for one, seconds in zip(model, measured, strict=True):
        factor = seconds / one.forward if one.forward else 1.0
        times = (one.attention, one.backward, one.last)
        found.append(RunSeconds(seconds, *(factor * part for part in times)))
    return tuple(found)

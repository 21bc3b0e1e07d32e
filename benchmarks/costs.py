"""What ops cost beside the bandwidth of kernels: the time of a tiny call, an adapter beside a Linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import DTYPE, Call, Timer, tensor, wall_microseconds
from torch import Tensor

from lowmem_patch import kernels
from lowmem_patch.constants import EIGHT_BIT_GROUP
from lowmem_patch.functional import (
    LowRank,
    NormSettings,
    activation,
    activation_linear,
    codes_activation,
    ms_norm,
    recast_linear,
    recast_matmul,
)

EPS = 1e-5
LAYER, RMS = NormSettings(EPS), NormSettings(EPS, centered=False)
TINY = (1, 128, 768)
# rows, input and output features of Linears of LLaMA-7B, four sequences of 2048
LORA_SHAPES = ((8192, 4096, 4096), (8192, 4096, 11008), (8192, 11008, 4096))
LORA_RANK = 16
# rows and classes of a head: one chunk of 300 MiB of the two larger vocabularies
LOSS_SHAPES = ((8192, 32000), (1024, 128256), (1024, 151936))


class _Nothing(torch.autograd.Function):
    """What any op written in Python costs before it computes: it saves three tensors, and allocates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(y, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        _, weight, bias = ctx.saved_tensors
        return torch.empty_like(dy), torch.empty_like(weight), torch.empty_like(bias)


def lora_calls(rows: int, columns: int, outputs: int) -> dict[str, tuple[Call, Call]]:
    """A frozen Linear alone, and with an adapter beside it: (forward, backward) of each.

    ``eager`` is what PEFT runs where adapters have the model's dtype.
    """
    x = tensor(rows, columns, grad=True)
    weight = tensor(outputs, columns)
    adapter = LowRank(
        tensor(LORA_RANK, columns, grad=True), tensor(outputs, LORA_RANK, grad=True), 2.0
    )
    dy = tensor(rows, outputs)

    def eager() -> Tensor:
        low = F.linear(x, adapter.lora_A)
        return F.linear(x, weight) + F.linear(low, adapter.lora_B) * adapter.scale

    forwards: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "plain": (lambda: F.linear(x, weight), [x]),
        "ours": (
            lambda: recast_linear(x, weight, None, DTYPE, adapter),
            [x, adapter.lora_A, adapter.lora_B],
        ),
        "eager": (eager, [x, adapter.lora_A, adapter.lora_B]),
    }
    calls = {}
    for by, (forward, wanted) in forwards.items():
        y = forward()
        calls[by] = (
            forward,
            lambda y=y, wanted=wanted: torch.autograd.grad(y, wanted, dy, retain_graph=True),
        )
    return calls


def lora_costs(timer: Timer) -> list[dict[str, Any]]:
    """Device time of LoRA Linears, and of the frozen Linear without its adapter."""
    print(f"\n{'LoRA Linear, r=16, us':28s} {'forward':>9s} {'x':>5s} {'backward':>9s} {'x':>5s}")
    costs = []
    for shape in LORA_SHAPES:
        times = {
            by: [timer.microseconds([call]) for call in pair_of_calls]
            for by, pair_of_calls in lora_calls(*shape).items()
        }
        name = "x".join(map(str, shape))
        for by, (forward, backward) in times.items():
            ratios = [
                t / plain for t, plain in zip((forward, backward), times["plain"], strict=True)
            ]
            print(
                f"{name:20s} {by:7s} {forward:9.1f} {ratios[0]:5.2f} {backward:9.1f} {ratios[1]:5.2f}"
            )
            costs.append({"shape": name, "by": by, "forward": forward, "backward": backward})
        torch.cuda.empty_cache()
    return costs


def launch_costs() -> list[dict[str, Any]]:
    """Wall time per call at a tiny size, ours and torch's: forward, and forward with backward."""
    columns = TINY[-1]
    x, up = (tensor(*TINY, grad=True) for _ in range(2))
    weight, bias = (tensor(columns, grad=True) for _ in range(2))
    square = tensor(1, TINY[1], TINY[1], dtype=torch.float32, grad=True)
    frozen, shift = weight.detach(), bias.detach()
    size, dy = (columns,), tensor(*TINY)
    ops: dict[str, list[Callable[[], Tensor]]] = {
        "layer_norm": [
            lambda: ms_norm(x, weight, bias, LAYER)[0],
            lambda: F.layer_norm(x, size, weight, bias, EPS),
        ],
        "layer_norm (frozen)": [
            lambda: ms_norm(x, frozen, shift, LAYER)[0],
            lambda: F.layer_norm(x, size, frozen, shift, EPS),
        ],
        "rms_norm": [
            lambda: ms_norm(x, weight, None, RMS)[0],
            lambda: F.rms_norm(x, size, weight, EPS),
        ],
        "gelu -> 2 bits": [lambda: codes_activation(x, "gelu"), lambda: F.gelu(x)],
        "silu * up": [lambda: activation(x, "silu", up), lambda: F.silu(x) * up],
    }
    apply: Any = _Nothing.apply
    ops["nothing (layer_norm)"] = [lambda: apply(x, weight, bias), ops["layer_norm"][1]]
    ops["layer_norm (folded)"] = [
        lambda: ms_norm(x, None, None, LAYER)[0],
        ops["layer_norm (frozen)"][1],
    ]
    matrix = tensor(columns, columns, grad=True)
    base, lora_A, lora_B = (
        matrix.detach(),
        tensor(16, columns, grad=True),
        tensor(columns, 16, grad=True),
    )
    ops["gelu, Linear"] = [
        lambda: activation_linear(F.gelu(x.detach()), (x,), matrix, bias, "gelu", DTYPE),
        lambda: F.linear(F.gelu(x), matrix, bias),
    ]
    ops["silu * up, Linear"] = [
        lambda: activation_linear(
            activation(x.detach(), "silu", up.detach()), (x, up), matrix, None, "silu", DTYPE
        ),
        lambda: F.linear(F.silu(x) * up, matrix),
    ]
    ops["LoRA Linear"] = [
        lambda: recast_linear(x, base, None, DTYPE, LowRank(lora_A, lora_B, 2.0)),
        lambda: F.linear(x, base) + F.linear(F.linear(x, lora_A), lora_B) * 2.0,
    ]
    ops["matmul of a wide matrix"] = [
        lambda: recast_matmul(square, x, DTYPE),
        lambda: square.to(DTYPE) @ x,
    ]
    leaves = (x, up, weight, bias, matrix, lora_A, lora_B, square)

    def step(call: Callable[[], Tensor]) -> None:
        call().backward(dy)
        for leaf in leaves:
            leaf.grad = None

    costs = []
    print(
        f"\n{'launch cost, us per call':28s} {'forward':>8s} {'torch':>8s} {'both':>8s} {'torch':>8s}"
    )
    for op, pair_of_calls in ops.items():
        times = [wall_microseconds(call) for call in pair_of_calls]
        times += [wall_microseconds(lambda c=call: step(c)) for call in pair_of_calls]
        print(f"{op:28s}" + "".join(f" {t:8.1f}" for t in times), f" x{times[2] / times[3]:.2f}")
        names = ("forward", "torch_forward", "both", "torch_both")
        costs.append({"op": op, **dict(zip(names, times, strict=True))})
    return costs


def eight_bit_calls(rows: int, columns: int) -> Iterator[tuple[str, int, list[Call]]]:
    """Storing an input of a Linear in 8 bits and reading it again: op, bytes that it moves, calls.

    Two inputs take turns: of a down_proj, each is larger than a second-level cache.
    """
    elements = rows * columns
    nbytes = elements * (DTYPE.itemsize + 1) + 2 * elements // EIGHT_BIT_GROUP
    xs = [tensor(elements) for _ in range(2)]
    yield "eight bits store", nbytes, [lambda x=x: kernels.to_eight_bits(x) for x in xs]
    parts = [kernels.to_eight_bits(x) for x in xs]
    yield "eight bits read", nbytes, [lambda p=p: kernels.from_eight_bits(*p, DTYPE) for p in parts]


def loss_calls() -> Iterator[tuple[tuple[int, int], int, Call]]:
    """Shape, bytes and call of the head's kernel: losses of rows, whose logits become their gradient."""
    factor = torch.ones((), device="cuda")
    for rows, classes in LOSS_SHAPES:
        logits = tensor(rows, classes)
        given = (logits, torch.randint(classes, (rows,), device="cuda"), None, factor)
        call = partial(kernels.cross_entropy_forward, *given, -100, 0.0, 1.0, 0.0, True)
        yield (rows, classes), 2 * logits.nbytes, call

"""Time of each kernel as a share of the copy bandwidth measured in the same run; launch cost of each op.

Share = bytes that the op must move / time / copy bandwidth. Calls are queued behind a long copy, so that
the device runs them back to back and Python's time does not count. Each call takes the next of several
input sets and keeps its result until its set comes up again, so that the second-level cache holds
neither. A copy of a tensor of the same size is timed too: small tensors do not reach the bandwidth of
large ones. Launch cost is wall time per call of a tiny op, where nothing but Python counts. Peers are
timed where they are installed.

Usage: python benchmarks/op_speed.py [--only norm] [--json PATH]
       python benchmarks/op_speed.py --only bit [--json PATH]    # codes of 1 to 4 bits alone
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from costs import TINY, eight_bit_calls, launch_costs, lora_costs, loss_calls
from timing import DTYPE, Call, Timer, tensor
from torch import Tensor

from lowmem_patch import kernels
from lowmem_patch.bench import environment
from lowmem_patch.constants import STEP_TABLES, codes_bytes
from lowmem_patch.functional import NormSettings, unbind_permuted

NORM_SHAPES = ((32768, 4096), (16384, 8192), (8192, 16384), (50432, 768), (12608, 768))
# under autocast: x and dx float32, y and dy bfloat16
AUTOCAST_SHAPE = (25216, 768)
CODES_SHAPE = (8, 4096, 14336)
GLU_SHAPE = (8192, 11008)
ROTARY_SHAPE = (4, 32, 2048, 128)
UNBIND_SHAPE = (128, 197, 12, 64)
CACHE_BYTES = 256 * 2**20  # more than any second-level cache
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One op of one implementation, and the inputs that it is timed on."""

    op: str
    shape: tuple[int, ...]
    by: str
    nbytes: int
    calls: list[Call]


@dataclass(frozen=True)
class Result:
    op: str
    shape: str
    by: str
    microseconds: float
    share: float


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def input_sets(nbytes: int) -> range:
    return range(max(2, min(16, -(-CACHE_BYTES // nbytes))))


def backward_calls(forwards: list[Callable[[], Tensor]], inputs: list[Any]) -> list[Any]:
    """Calls of autograd's backward through graphs that are built once."""
    calls = []
    for forward, wanted in zip(forwards, inputs, strict=True):
        y = forward()
        dy = torch.randn_like(y)
        calls.append(
            lambda y=y, dy=dy, wanted=wanted: torch.autograd.grad(y, wanted, dy, retain_graph=True)
        )
    return calls


def pair(
    op: str, shape: tuple[int, ...], by: str, sizes: tuple[int, int], sets: list[tuple[Any, Any]]
) -> Iterator[Case]:
    """Forward and backward of something differentiable; ``sets`` holds (call, wanted gradients)."""
    forwards = [call for call, _ in sets]
    yield Case(f"{op} forward", shape, by, sizes[0], forwards)
    yield Case(
        f"{op} backward", shape, by, sizes[1], backward_calls(forwards, [w for _, w in sets])
    )


def copy_cases(shape: tuple[int, int]) -> Iterator[Case]:
    pairs = [(tensor(*shape), tensor(*shape)) for _ in input_sets(shape[0] * shape[1] * 4)]
    calls = [lambda p=p: p[0].copy_(p[1]) for p in pairs]
    yield Case("copy", shape, "torch", shape[0] * shape[1] * 4, calls)


def our_norm_cases(shape: tuple[int, int], centered: bool, wide: torch.dtype) -> Iterator[Case]:
    """Trained, frozen and folded (no affine); ``wide`` is the dtype of x, dx and parameters."""
    rows, columns = shape
    op = "layer_norm" if centered else "rms_norm"
    if wide != DTYPE:
        op += f" {str(wide).removeprefix('torch.')}"
    element = wide.itemsize + DTYPE.itemsize
    forward_bytes = rows * (columns * element + 4)
    backward_bytes = rows * (columns * (element + DTYPE.itemsize) + 4)
    weight, bias = tensor(columns, dtype=wide), tensor(columns, dtype=wide)
    affine = (weight, bias if centered else None)
    settings = NormSettings(EPS, centered=centered)
    xs = [tensor(*shape, dtype=wide) for _ in input_sets(rows * columns * 2)]
    for name, vectors in (("", affine), (" (folded)", (None, None))):
        calls = [
            lambda x=x, vectors=vectors: kernels.norm_forward(x, *vectors, settings, DTYPE)
            for x in xs
        ]
        yield Case(f"{op} forward{name}", shape, "ours", forward_bytes, calls)
    saved = [(tensor(*shape), *call()[:2]) for call in calls]
    for name, vectors, needs in (
        ("", affine, (True, True, centered)),
        (" (frozen)", affine, (True, False, False)),
        (" (folded)", (None, None), (True, False, False)),
    ):
        calls = [
            lambda s=s, vectors=vectors, needs=needs: kernels.norm_backward(
                *s, *vectors, settings, wide, needs
            )
            for s in saved
        ]
        yield Case(f"{op} backward{name}", shape, "ours", backward_bytes, calls)


def norm_cases(shape: tuple[int, int], centered: bool) -> Iterator[Case]:
    rows, columns = shape
    op = "layer_norm" if centered else "rms_norm"
    size = rows * columns * 2
    sizes = (2 * size + rows * 4, 3 * size + rows * 4)
    with torch.no_grad():
        yield from our_norm_cases(shape, centered, DTYPE)
    weight = tensor(columns, grad=True)
    bias = tensor(columns, grad=True) if centered else None
    wanted = [t for t in (weight, bias) if t is not None]
    xs = [tensor(*shape, grad=True) for _ in input_sets(size)]
    if centered:
        torch_norm = [lambda x=x: F.layer_norm(x, (columns,), weight, bias, EPS) for x in xs]
    else:
        torch_norm = [lambda x=x: F.rms_norm(x, (columns,), weight, EPS) for x in xs]
    sets = list(zip(torch_norm, ([x, *wanted] for x in xs), strict=True))
    yield from pair(op, shape, "torch", sizes, sets)
    if installed("liger_kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def liger(x: Tensor) -> Call:
            if centered:
                return lambda: LigerLayerNormFunction.apply(x, weight, bias, EPS)
            # not in place: a gradient that is written over would be timed on other numbers
            return lambda: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)

        sets = [(liger(x), [x, *wanted]) for x in xs]
        yield from pair(op, shape, "liger", sizes, sets)
    if installed("lomem"):
        from lomem.functional import layer_norm, rms_norm

        function = layer_norm if centered else rms_norm
        sets = [(lambda x=x: function(x, (columns,), EPS), [x]) for x in xs]
        yield from pair(op, shape, "lomem", sizes, sets)


def codes_cases(kind: str) -> Iterator[Case]:
    """Codes of each number of bits that the activation has a table for; an exact table is one bit."""
    size = torch.Size(CODES_SHAPE).numel() * 2
    xs = [tensor(*CODES_SHAPE) for _ in input_sets(size)]
    tables = STEP_TABLES[kind]
    for bits in sorted({table.bits for table in tables.values()}):
        nbytes = 2 * size + codes_bytes(xs[0].numel(), bits)
        op = f"{kind} -> {bits} bit{'s' * (bits > 1)}"
        with torch.no_grad():
            forwards = [lambda x=x, bits=bits: kernels.codes_forward(x, kind, bits) for x in xs]
            yield Case(f"{op} forward", CODES_SHAPE, "ours", nbytes, forwards)
            saved = [(torch.randn_like(x), kernels.codes_forward(x, kind, bits)[1]) for x in xs]
            backwards = [
                lambda s=s, bits=bits: kernels.codes_backward(*s, kind, bits, DTYPE) for s in saved
            ]
            yield Case(f"{op} backward", CODES_SHAPE, "ours", nbytes, backwards)
            del saved, forwards, backwards


def activation_cases(kind: str) -> Iterator[Case]:
    elements = torch.Size(CODES_SHAPE).numel()
    size, codes = elements * 2, elements // 4
    op, sizes = f"{kind} -> 2 bits", (2 * size + codes, 2 * size + codes)
    xs = [tensor(*CODES_SHAPE, grad=True) for _ in input_sets(size)]
    with torch.no_grad():
        forwards = [lambda x=x: kernels.activation_forward(x, None, kind) for x in xs]
        yield Case(f"{kind} forward", CODES_SHAPE, "ours", 2 * size, forwards)
        dys = [torch.randn_like(x) for x in xs]
        backwards = [
            lambda x=x, dy=dy: kernels.activation_backward(dy, x, None, kind)
            for x, dy in zip(xs, dys, strict=True)
        ]
        yield Case(f"{kind} backward", CODES_SHAPE, "ours", 3 * size, backwards)
        # as a Linear behind the activation calls it: the value again, in the place of its gradient
        backwards = [
            lambda x=x, dy=dy: kernels.activation_backward(dy, x, None, kind, dy)
            for x, dy in zip(xs, dys, strict=True)
        ]
        yield Case(f"{kind} backward and value", CODES_SHAPE, "ours", 4 * size, backwards)
        del dys, backwards
    function = {"gelu": F.gelu, "silu": F.silu}[kind]
    sets = [(lambda x=x: function(x), [x]) for x in xs]
    yield from pair(kind, CODES_SHAPE, "torch", (2 * size, 3 * size), sets)
    if installed("lomem"):
        from lomem.functional import regelu2, resilu2

        peer = {"gelu": regelu2, "silu": resilu2}[kind]
        sets = [(lambda x=x: peer(x), [x]) for x in xs]
        yield from pair(op, CODES_SHAPE, "lomem", sizes, sets)


def glu_cases(packed: bool) -> Iterator[Case]:
    rows, columns = GLU_SHAPE
    size = rows * columns * 2
    op, sizes = "silu * up (packed)" if packed else "silu * up", (3 * size, 5 * size)
    halves = []
    for _ in input_sets(3 * size):
        gate, up = tensor(rows, 2 * columns).chunk(2, -1)
        if not packed:
            gate, up = gate.contiguous(), up.contiguous()
        halves.append((gate.requires_grad_(), up.requires_grad_()))
    with torch.no_grad():
        forwards = [lambda h=h: kernels.activation_forward(*h, "silu") for h in halves]
        yield Case(f"{op} forward", GLU_SHAPE, "ours", sizes[0], forwards)
        dys = [tensor(rows, columns) for _ in halves]
        backwards = [
            lambda h=h, dy=dy: kernels.activation_backward(dy, *h, "silu")
            for h, dy in zip(halves, dys, strict=True)
        ]
        yield Case(f"{op} backward", GLU_SHAPE, "ours", sizes[1], backwards)
        backwards = [
            lambda h=h, dy=dy: kernels.activation_backward(dy, *h, "silu", dy)
            for h, dy in zip(halves, dys, strict=True)
        ]
        yield Case(f"{op} backward and value", GLU_SHAPE, "ours", 6 * size, backwards)
    sets = [(lambda h=h: F.silu(h[0]) * h[1], list(h)) for h in halves]
    yield from pair(op, GLU_SHAPE, "torch", sizes, sets)
    if installed("liger_kernel") and not packed:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        # its backward overwrites what it saved, so that only the forward can be repeated
        calls = [lambda h=h: LigerSiLUMulFunction.apply(*h) for h in halves]
        yield Case(f"{op} forward", GLU_SHAPE, "liger", sizes[0], calls)


def rotary_cases() -> Iterator[Case]:
    """The queries alone; the keys are a second call."""
    batches, heads, positions, columns = ROTARY_SHAPE
    phase = torch.randn(1, positions, columns // 2, device="cuda").repeat(1, 1, 2)
    cos, sin = phase.cos().to(DTYPE), phase.sin().to(DTYPE)
    size = torch.Size(ROTARY_SHAPE).numel() * 2
    nbytes = 2 * size + cos.nbytes + sin.nbytes

    def queries(count: int = heads) -> Tensor:
        return tensor(batches, positions, count, columns).transpose(1, 2).requires_grad_()

    qs = [queries() for _ in input_sets(size)]
    with torch.no_grad():
        for name, direction in (("forward", "forward"), ("backward", "transposed")):
            calls = [
                lambda q=q, direction=direction: kernels.rotate(
                    q, cos, sin, 1, direction, None, DTYPE
                )
                for q in qs
            ]
            yield Case(f"rotary {name}", ROTARY_SHAPE, "ours", nbytes, calls)

    def eager(q: Tensor) -> Tensor:
        first, second = q[..., : columns // 2], q[..., columns // 2 :]
        return q * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    sets = [(lambda q=q: eager(q), [q]) for q in qs]
    yield from pair("rotary", ROTARY_SHAPE, "torch", (nbytes, nbytes), sets)
    if installed("liger_kernel"):
        from liger_kernel.ops.rope import LigerRopeFunction

        # It wants keys too, so they have one head, which does not count. It turns queries, and in
        # backward their gradients, in place: again and again, which keeps their size.
        key = queries(1)
        sets = [(lambda q=q: LigerRopeFunction.apply(q, key, cos, sin)[0], [q]) for q in qs]
        yield from pair("rotary", ROTARY_SHAPE, "liger", (nbytes, nbytes), sets)


def unbind_cases() -> Iterator[Case]:
    """The gradients of q, k and v, as flash attention leaves them, on the way to their Linear."""
    batches, positions, heads, columns = UNBIND_SHAPE
    nbytes = 2 * 3 * torch.Size(UNBIND_SHAPE).numel() * DTYPE.itemsize
    for by in ("ours", "torch"):
        calls = []
        for _ in input_sets(nbytes):
            x = tensor(batches, positions, 3 * heads * columns).requires_grad_()
            view = x.view(batches, positions, 3, heads, columns).permute(2, 0, 3, 1, 4)
            parts = unbind_permuted(x, view) if by == "ours" else view.unbind(0)
            seeds = [tensor(*UNBIND_SHAPE).transpose(1, 2) for _ in parts]
            calls.append(
                lambda x=x, parts=parts, seeds=seeds: torch.autograd.grad(
                    parts, x, seeds, retain_graph=True
                )
            )
        yield Case("unbind q, k, v backward", UNBIND_SHAPE, by, nbytes, calls)


def eight_bit_cases() -> Iterator[Case]:
    for op, nbytes, calls in eight_bit_calls(*GLU_SHAPE):
        yield Case(op, GLU_SHAPE, "ours", nbytes, calls)


def loss_cases() -> Iterator[Case]:
    for shape, nbytes, call in loss_calls():
        yield Case("cross entropy and gradient", shape, "ours", nbytes, [call])


def all_cases() -> Iterator[Callable[[], Iterator[Case]]]:
    for shape in NORM_SHAPES:
        yield lambda shape=shape: copy_cases(shape)
    yield lambda: torch.no_grad()(our_norm_cases)(AUTOCAST_SHAPE, True, torch.float32)
    for shape, centered in itertools.product(NORM_SHAPES, (True, False)):
        yield lambda shape=shape, centered=centered: norm_cases(shape, centered)
    for kind in STEP_TABLES:
        yield lambda kind=kind: codes_cases(kind)
    for kind in ("gelu", "silu"):
        yield lambda kind=kind: activation_cases(kind)
    for packed in (False, True):
        yield lambda packed=packed: glu_cases(packed)
    yield rotary_cases
    yield unbind_cases
    yield eight_bit_cases
    yield loss_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="run the ops whose name contains this, and no more"
    )
    parser.add_argument("--json", type=Path, help="write the results and the machine here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    timer = Timer()
    bandwidth = timer.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, {DTYPE}")
    print(f"{'op':32s} {'shape':18s} {'by':6s} {'us':>9s} {'share':>6s}")
    results = []
    for cases in all_cases():
        for case in cases():
            if arguments.only not in case.op:
                continue
            microseconds = timer.microseconds(case.calls)
            share = case.nbytes / (microseconds * 1e-6) / bandwidth
            shape = "x".join(map(str, case.shape))
            results.append(Result(case.op, shape, case.by, microseconds, share))
            row = f"{case.op:32s} {shape:18s} {case.by:6s} {microseconds:9.1f} {share:6.0%}"
            print(row, flush=True)
        torch.cuda.empty_cache()
    lora, costs = ({}, {}) if arguments.only else (lora_costs(timer), launch_costs())
    if arguments.json:
        found = environment("cuda")
        record = {
            "gpu": found["machine"],
            "driver": found.get("driver", "unknown"),
            "lowmem-patch": found["lowmem-patch"],
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "copy_bytes_per_second": bandwidth,
            "dtype": str(DTYPE),
            "results": [asdict(result) for result in results],
            "lora_microseconds": lora,
            "launch_shape": list(TINY),
            "launch_microseconds": costs,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the kernels for a GPU that need not be there: python compiled_for.py cuda 90 bfloat16

A process of its own, because Triton is told which GPU to compile for once and for all. With a fourth
argument, ``widths``, the norms are compiled for each width, rotary for each layout that has a kernel of
its own, and products and codes for each activation; without, for a width that one program holds and one
that it does not, and for one activation (for AMD, whose functions are others, for each). Prints a JSON
list: for each compiled kernel its name, what it was compiled for, and (with ``widths``) the bytes of
stack a thread needs, which are registers that did not fit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lowmem_patch import kernels
from lowmem_patch.constants import (
    ACTIVATION_KINDS,
    STEP_TABLES,
    ChannelNormInput,
    EightBits,
    NormSettings,
)
from lowmem_patch.kernels._launch import Launch

PLATFORM, ARCHITECTURE = sys.argv[1], sys.argv[2]
DTYPE = getattr(torch, sys.argv[3])
EVERY_WIDTH = sys.argv[4:] == ["widths"]
# the last is longer than a program holds
COLUMNS = (768, 4096, 16384, 20000) if EVERY_WIDTH else (768, 20000)
# kinds with every number of bits, of a table that is cyclic and of one that is not: others differ in numbers,
# and so does the second for a GPU that another of its maker stands for
CODED = ("gelu", "sigmoid") if EVERY_WIDTH or PLATFORM == "hip" else ("gelu",)
LAYOUTS = ((32, 128, 128), (8, 128, 128), (1, 64, 16), (12, 80, 20))
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Absent:
    """Stands in for the driver of a GPU."""

    def get_current_target(self) -> GPUTarget:
        if PLATFORM == "hip":
            return GPUTarget("hip", ARCHITECTURE, 64)
        return GPUTarget("cuda", int(ARCHITECTURE), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def activations() -> Iterator[Any]:
    x = torch.ones(2, 1024, dtype=DTYPE)
    for number, kind in enumerate(ACTIVATION_KINDS):
        if kind in CODED:
            yield kernels.activation_forward(x, None, kind)
            yield kernels.activation_backward(x, x, None, kind)
            yield kernels.activation_forward(x, x, kind)
            yield kernels.activation_backward(x, x, x, kind)
        if kind in CODED or EVERY_WIDTH:
            yield kernels.activation_backward(x, x, x, kind, torch.ones_like(x))
        if kind in CODED or PLATFORM == "hip":
            # the value, and what the derivative makes of a gradient: less than a product's, which is above
            yield kernels.activation_backward(x, x, None, kind, torch.ones_like(x))
        tables = STEP_TABLES.get(kind, ())
        for bits in tables if kind in CODED else [1 + number % 4] if tables and EVERY_WIDTH else ():
            _, codes = kernels.codes_forward(x, kind, bits)
            yield kernels.codes_backward(x, codes, kind, bits, DTYPE)
        if kind in CODED and EVERY_WIDTH:  # the other half format has instructions of its own
            yield kernels.codes_forward(x.to(torch.float16), kind, 2)


def norms() -> Iterator[Any]:
    for columns in COLUMNS:
        x, vector = torch.ones(2, columns, dtype=DTYPE), torch.ones(columns, dtype=DTYPE)
        for weight, bias in ((None, None), (vector, None), (vector, vector)):
            centered = bias is not None
            settings = NormSettings(1e-5, centered=centered)
            y, *_, rstd = kernels.norm_forward(x, weight, bias, settings, DTYPE)
            yield kernels.norm_forward_in_eight_bits(x, weight, bias, settings, DTYPE)
            given = (x, y, rstd, weight, bias, settings, DTYPE)
            for trains in {False, weight is not None}:
                yield kernels.norm_backward(*given, (True, trains, trains and centered))
            if weight is not None:
                yield kernels.norm_backward(*given, (False, True, centered))


def affines() -> Iterator[Any]:
    z, vector = torch.ones(2, 768, dtype=DTYPE), torch.ones(768, dtype=DTYPE)
    for weight, bias in ((vector, None), (vector, vector)):
        settings = NormSettings(1e-5, centered=bias is not None)
        yield kernels.affine(z, weight, bias, settings, DTYPE)
        _, _, z, rstd = kernels.norm_forward(z, weight, bias, settings, DTYPE, None, DTYPE)
        needs = (True, True, bias is not None)
        yield kernels.norm_backward(z, z, rstd, weight, bias, settings, DTYPE, needs, True)


def adapters() -> Iterator[Any]:
    for rank in (4, 8, 12):
        weights = torch.ones(rank, 64), torch.ones(32, rank)
        yield kernels.adapter_weights(*weights, DTYPE)


def scales() -> Iterator[Any]:
    products, weight = torch.ones(4, 768), torch.ones(4, 768, dtype=DTYPE)
    for dtype in (DTYPE, None):
        yield kernels.scaled_gradients(products, weight, torch.ones(4, dtype=DTYPE), dtype)


def dropouts() -> Iterator[Any]:
    for elements in (1024, 1023):
        bits = kernels.pack_bool(torch.ones(elements, dtype=torch.bool))
        yield kernels.drop(torch.ones(elements, dtype=DTYPE), bits, 1.25, DTYPE, DTYPE)


def channel_norms() -> Iterator[Any]:
    image, vector = torch.ones(2, 32, 16, 16, dtype=DTYPE), torch.ones(32, dtype=DTYPE)
    for groups, x in ((0, image), (0, image.to(memory_format=torch.channels_last)), (4, image)):
        with mock.patch.object(
            torch.ops.aten, "native_batch_norm_backward", lambda *_: (vector,) * 3
        ):
            mean, rstd = kernels.channel_statistics(x, groups, 1e-5, None, None, 0.0)
            given = ChannelNormInput(x, mean, rstd, vector, vector, groups, "silu")
            yield kernels.channel_norm_forward(given, DTYPE)
            yield kernels.channel_norm_backward(x, given)
            summed = given._replace(residual=x)
            yield kernels.channel_norm_forward(summed, DTYPE)
            yield kernels.channel_sum_gradient(x, summed)


def eight_bits() -> Iterator[Any]:
    for elements in (1024, 1023):
        parts = kernels.to_eight_bits(torch.ones(elements, dtype=DTYPE))
        yield kernels.from_eight_bits(*parts, DTYPE)
    integers, scales = kernels.to_eight_bits(torch.ones(4 * 256, dtype=DTYPE))
    stored, dy = EightBits(integers.view(4, 256), scales, DTYPE), torch.ones(4, 256, dtype=DTYPE)
    yield kernels.activation_backward(dy, stored, None, "gelu", torch.ones_like(dy))
    yield kernels.activation_backward(dy, stored, stored, "silu", torch.ones_like(dy))


def rotary() -> Iterator[Any]:
    for heads, columns, size in LAYOUTS if EVERY_WIDTH else LAYOUTS[-1:]:
        x = torch.ones(1, 2, heads, columns, dtype=DTYPE).transpose(1, 2)
        for angles in (torch.ones(1, 2, size, dtype=dtype) for dtype in (DTYPE, torch.float32)):
            for direction in ("forward", "transposed", "inverse"):
                yield kernels.rotate(x, angles, angles, 1, direction, None, DTYPE)


def heads() -> Iterator[Any]:
    target, factor = torch.zeros(2, dtype=torch.int64), torch.ones(())
    for classes, labelled, weighted, smoothing, scale, cap in (
        (32000, False, False, 0.0, 1.0, 0.0),
        (32000, True, False, 0.0, 1.0, 0.0),
        (32000, True, True, 0.1, 0.5, 30.0),
        (131072, True, True, 0.1, 0.5, 30.0),  # more threads
    ):
        logits = torch.ones(2, classes, dtype=DTYPE)
        given = (target if labelled else None, torch.ones(classes) if weighted else None)
        _, sums = kernels.cross_entropy_forward(
            logits, *given, factor, -100, smoothing, scale, cap, True
        )
        rest = (-100, smoothing, scale, cap)
        yield kernels.cross_entropy_backward(logits, sums, sums, *given, *rest)
    yield kernels.scale_in_place(logits, factor)


def stack_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return int(stack)


def main() -> None:
    compiled = {}

    def compile_only(self: Any, grid: Any, tensors: Any, *numbers: Any) -> None:
        arguments = (*tensors, *(value for group in numbers for value in group))
        kernel = self._kernel.warmup(*arguments, grid=grid, **self._keywords)
        compiled[kernel.hash] = (self._kernel.__name__, self._keywords, kernel)

    driver.set_active(Absent())
    in_pairs = PLATFORM == "cuda" and int(ARCHITECTURE) >= 90
    with (
        mock.patch.object(Launch, "__call__", compile_only),
        mock.patch.object(kernels.codes, "_compares_pairs", lambda device: in_pairs),
    ):
        for _ in (
            *activations(),
            *adapters(),
            *scales(),
            *norms(),
            *affines(),
            *dropouts(),
            *channel_norms(),
            *eight_bits(),
            *rotary(),
            *heads(),
        ):
            pass
    print(
        json.dumps(
            [
                {
                    "kernel": name,
                    "constants": {key: str(value) for key, value in constants.items()},
                    "stack": stack_bytes(kernel.asm["cubin"]) if EVERY_WIDTH else 0,
                }
                for name, constants, kernel in compiled.values()
            ]
        )
    )


if __name__ == "__main__":
    main()

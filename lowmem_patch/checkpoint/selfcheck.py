"""The check of a written checkpoint: stock transformers or timm loads it and computes the same outputs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_patch.checkpoint.compare import TensorCheck, check_outputs, in_float64, named_outputs
from lowmem_patch.checkpoint.load import build_meta_model, load_model
from lowmem_patch.checkpoint.source import Source, resolve
from lowmem_patch.checkpoint.weights import stored_dtype
from lowmem_patch.errors import CheckpointError
from lowmem_patch.planning.budget import available_host_bytes
from lowmem_patch.tracing.example_inputs import make_example_inputs
from lowmem_patch.tracing.inputs import ExampleInputs

# float64 weights, the stored ones while they load, and activations of a small input
_BYTES_PER_PARAMETER = 14


class SelfCheckError(CheckpointError):
    """The written checkpoint computes another function than its source; it was removed."""


def self_check(
    source: Source, folder: Path, dtype: torch.dtype | None
) -> tuple[tuple[TensorCheck, ...], tuple[str, ...]]:
    """Compare the outputs of a written checkpoint with its source's, against float64, on the CPU.

    Returns:
        A check per output, and notes: why nothing was checked when the models do not fit in memory.

    Raises:
        SelfCheckError: the written checkpoint's error is more than rounding explains.
    """
    shape = build_meta_model(source)
    needed = _BYTES_PER_PARAMETER * sum(p.numel() for p in shape.parameters())
    free = _free_memory()
    if free is not None and free < needed:
        note = (
            f"not compared with the source: {needed / 1e9:.0f} GB of memory are needed and "
            f"{free / 1e9:.0f} GB are free; run `lowmem-patch verify` on a larger machine"
        )
        return (), (note,)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = make_example_inputs(shape, batch_size=2, device="cpu")
    written = resolve(folder, trust_remote_code=source.trust_remote_code)
    truth = _outputs(load_model(source, torch.float64), inputs, float64=True)
    # a folded weight is rounded to the dtype it is stored in, so that dtype sets the budget
    used = dtype or stored_dtype(source.files)
    own = _outputs(load_model(source, used), inputs)
    checks = check_outputs(
        truth, own, _outputs(load_model(written, used), inputs), torch.finfo(used).eps
    )
    failed = [check for check in checks if not check.passed]
    if failed:
        raise SelfCheckError(
            f"self-check failed: {failed[0].name} of the converted {source.name} is off by "
            f"{failed[0].error:.1e} (allowed {failed[0].limit:.1e}); nothing was "
            "written, please report this model"
        )
    return checks, ()


@torch.no_grad()
def _outputs(model: Any, inputs: ExampleInputs, *, float64: bool = False) -> dict[str, Tensor]:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    # rounded to bfloat16, which every dtype here can hold: their rounding is no error of a model
    cast = inputs.map(lambda t: t.to(torch.bfloat16).to(dtype) if t.is_floating_point() else t)
    with in_float64() if float64 else contextlib.nullcontext():
        output = model(*cast.args, **cast.kwargs)
    return {name: t.double() for name, t in named_outputs(output)}


def _free_memory() -> int | None:
    """Bytes that a new allocation can have, or None where the system does not say."""
    try:
        known = available_host_bytes()
        return known or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None

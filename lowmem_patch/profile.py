"""Measure a real training step: saved bytes by module and kind, and the peak on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from lowmem_patch.api import patch_model, patch_report, unpatch_model
from lowmem_patch.config import PatchConfig
from lowmem_patch.memory.step import run_step
from lowmem_patch.planning.report import block_rows, by_block
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.saved_bytes import SavedBytes, saved_bytes


@dataclasses.dataclass(frozen=True)
class Measured:
    """One real step.

    Attributes:
        saved: held by autograd after the forward, without a loss.
        peak_allocated, peak_reserved: bytes on the GPU during the step, with parameters and
            gradients; None on the CPU.
    """

    saved: SavedBytes
    peak_allocated: int | None = None
    peak_reserved: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "saved": self.saved.activations,
            "weight_copies": self.saved.weight_copies,
            "by_kind": self.saved.by_kind,
            "by_module": self.saved.by_module,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
        }


@dataclasses.dataclass(frozen=True)
class ProfileResult:
    """A step before and after the patch.

    Attributes:
        patched: the number of sites that were patched.
        wide_masks: dropouts ran on a CPU, which saves a number for each element where a GPU saves a bool.
    """

    before: Measured
    after: Measured
    device: str
    patched: int
    wide_masks: bool = False

    def to_dict(self) -> dict[str, Any]:
        steps = {"before": self.before.to_dict(), "after": self.after.to_dict()}
        data = {"device": self.device, "patched": self.patched, "blocks": self.blocks}
        return {**data, "wide_masks": self.wide_masks, **steps}

    @property
    def blocks(self) -> tuple[tuple[str, int, int], ...]:
        """Saved bytes before and after by block, as a plan gives them."""
        return block_rows(by_block(self.before.saved), by_block(self.after.saved))


def materialise(model: nn.Module) -> nn.Module:
    """Give adapters on the meta device small random values, in place; returns the model."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = 0.02 * torch.randn(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(value, parameter.requires_grad)
    return model


def measure_step(model: nn.Module, inputs: ExampleInputs) -> Measured:
    """One forward under the counter, then one whole step; gradients are cleared afterwards.

    The model's mode (training or not), its device and the active autocast are the caller's.
    """
    with saved_bytes(model) as saved:
        output = model(*inputs.args, **inputs.kwargs)
    del output
    device = next(model.parameters()).device
    try:
        if device.type != "cuda":
            run_step(model, inputs)
            return Measured(saved)
        run_step(model, inputs)  # kernels are compiled and chosen in the first step
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        run_step(model, inputs)
        torch.cuda.synchronize(device)
        return Measured(
            saved, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        )
    finally:
        model.zero_grad(set_to_none=True)


def profile_model(model: nn.Module, config: PatchConfig, inputs: ExampleInputs) -> ProfileResult:
    """Measure a step, patch the model, measure again, and put the model back.

    Raises:
        TraceError, PatchError: as in :func:`lowmem_patch.patch_model`.
    """
    before = measure_step(model, inputs)
    patch_model(model, config, example_inputs=inputs)
    try:
        after = measure_step(model, inputs)
        report = patch_report(model)
    finally:
        unpatch_model(model)
    device = next(model.parameters()).device
    dropouts = any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in model.modules())
    wide_masks = dropouts and device.type == "cpu"
    return ProfileResult(before, after, str(device), len(report.patched), wide_masks)

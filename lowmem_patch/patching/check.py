"""The guard behind ``patch_model(check=True)``: the patched model must compute the same outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowmem_patch.errors import PatchError
from lowmem_patch.patching.inputs import ExampleInputs

__all__ = ["check_outputs", "preserved", "run_real"]

# A wrong fold or a misread norm differs by its own size; rounding differs by far less than this share.
# `lowmem-patch verify` is the judge of rounding, against float64.
_LARGEST_ERROR = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.bfloat16: 0.05,
    torch.float16: 0.02,
}


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back what a forward in training mode changes: buffers, training flags, random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    flags = [(module, module.training) for module in model.modules()]
    devices = sorted({b.device.index for b in model.parameters() if b.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for module, flag in flags:
                module.training = flag


def run_real(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    """Floating-point outputs of one forward in eval mode with gradients on, so patched paths are taken."""
    with preserved(model), torch.enable_grad():
        model.eval()
        output = model(*inputs.args, **inputs.kwargs)
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    return [
        leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def check_outputs(before: list[Tensor], after: list[Tensor], model: nn.Module) -> None:
    """Compare the outputs of the original and the patched model.

    Raises:
        PatchError: an output differs by more than rounding.
    """
    if len(before) != len(after):
        raise PatchError(
            f"the patched model returns {len(after)} tensors, the original {len(before)}"
        )
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.shape != new.shape:
            raise PatchError(
                f"output {index} changed its shape from {tuple(old.shape)} to {tuple(new.shape)}"
            )
        difference = (new.double() - old.double()).norm()
        error = float(difference / old.double().norm().clamp_min(1e-30))
        worst = max(
            (old.dtype, *(p.dtype for p in model.parameters())),
            key=lambda d: _LARGEST_ERROR.get(d, 0),
        )
        if not error <= _LARGEST_ERROR.get(worst, 0.05):
            raise PatchError(
                f"output {index} of the patched {type(model).__name__} differs from the original's by "
                f"{error:.2e} (relative L2), more than rounding explains: the patch was undone; "
                "please report this model"
            )

"""torch.compile must not wrap what is patched; and behind ``patch_model(check=True)``, the patched model must
compute the same outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_patch.errors import PatchError
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.own import within_compiled
from lowmem_patch.tracing.inputs import ExampleInputs, as_example_inputs
from lowmem_patch.tracing.isolation import preserved
from lowmem_patch.tracing.observers import observed_calls
from lowmem_patch.tracing.shadow import finite_parts, output_tensors
from lowmem_patch.tracing.trace import describe

# A wrong fold or a misread norm differs by its own size; rounding differs by far less than this share.
# `lowmem-patch verify` is the judge of rounding, against float64.
_LARGEST_ERROR = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.bfloat16: 0.05,
    torch.float16: 0.02,
}


@dataclasses.dataclass(frozen=True)
class RealRun:
    """Outputs of one forward, and in the order of their ends a few sums over each module's output."""

    outputs: list[Tensor]
    modules: list[tuple[str, Tensor]]


def _named(module: nn.Module, name: str) -> str:
    """``this LlamaForCausalLM``, or a module of the model with its path."""
    return describe(module, name) if name else f"this {type(module).__name__}"


def refuse_unready(model: nn.Module) -> None:
    """Refuse a model that nobody can look at or change.

    Raises:
        PatchError: torch.compile or FSDP1 wraps it or a part of it, torch.jit compiled it, it has
            weights that only its first forward makes, or tensors made here have no history or no data.
    """
    if torch.is_inference_mode_enabled():
        raise PatchError(
            "torch.inference_mode() is on, in which autograd saves nothing, so that nothing can be planned: "
            "patch the model outside of it"
        )
    if torch.get_default_device().type == "meta":
        raise PatchError(
            "torch's default device is meta, where tensors have no data: patch the model outside of "
            'torch.device("meta"); the model itself may lie there'
        )
    for name, module in model.named_modules():
        # a patch inside would break its graphs; ``module.compile()`` wraps nothing, and makes graphs later
        if (inner := within_compiled(module)) is not None:
            raise PatchError(
                f"torch.compile wraps {_named(inner, name)} already: patch the model first and "
                "compile it after that, as in model = torch.compile(patch_model(model))"
            )
        inner = dict(module.named_children()).get("_fsdp_wrapped_module")
        if inner is not None:
            raise PatchError(
                f"FSDP (FullyShardedDataParallel) wraps {_named(inner, name)} already, and holds its "
                "weights in flat shards: patch the model first, and wrap it after that"
            )
    if isinstance(model, torch.jit.ScriptModule):
        made = "trace" if "Traced" in type(model).__name__ else "script"
        raise PatchError(
            f"torch.jit.{made} compiled this model, and nothing in it can be exchanged: patch the model of "
            "which it was made"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise PatchError(
                f"{name} has no shape before the first forward: run the model on a batch once, and patch it "
                "then"
            )


def run_real(model: nn.Module, inputs: ExampleInputs) -> RealRun:
    """One forward in eval mode with gradients on, so that patched paths are taken."""
    with preserved(model), torch.enable_grad(), _watched(model) as modules:
        model.eval()
        output = model(*inputs.args, **inputs.kwargs)
    tensors = output_tensors(output)
    outputs = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    return RealRun(outputs, modules)


def run_unpatched(model: nn.Module, inputs: ExampleInputs) -> RealRun:
    """As :func:`run_real`; PatchError where the model itself fails, as it does on inputs of another dtype."""
    try:
        return run_real(model, inputs)
    except Exception as error:  # of a foreign forward
        raise PatchError(
            f"{type(model).__name__} is unpatched, as it fails on the example inputs without a patch, too: "
            f"{type(error).__name__}: {error}; give inputs that it takes"
        ) from error


def runs_on_data(model: nn.Module, example_inputs: Any) -> bool:
    """Whether a forward works on inputs that a user gave; None stands for inputs made from the config."""
    if example_inputs is None:
        return True
    try:
        run_real(model, as_example_inputs(example_inputs))
    except Exception:  # of a foreign forward
        return False
    return True


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Sums over the output of each module, but for folded norms (whose output must differ) and what
    returns their very output."""
    found: list[tuple[str, Tensor]] = []
    folded: list[Tensor] = []  # held, so that no other tensor takes their place in memory

    def leave(name: str, module: nn.Module, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if isinstance(module, MSNorm) and module.folded:
            folded.append(output)
        elif not any(output is tensor for tensor in folded):
            found.append((name, _sums(output.detach())))

    with observed_calls(model, lambda *_: None, leave):
        yield found


def _sums(tensor: Tensor) -> Tensor:
    """Norm, norm of every other row, and sum: 3 numbers that a wrong patch moves."""
    tensor = tensor.masked_fill(tensor.isinf(), 0.0)
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in (rows, rows[::2])]
    # divided by what a sum of random signs grows by, so that all three are of one size
    return torch.stack((*norms, rows.sum(dtype=torch.float64) / max(1, rows.numel()) ** 0.5))


def check_outputs(before: RealRun, model: nn.Module, inputs: ExampleInputs) -> None:
    """Compare the outputs of the original with those of the patched ``model``.

    Raises:
        PatchError: an output differs by more than rounding; names the first module that does.
    """
    after = run_real(model, inputs)
    if len(before.outputs) != len(after.outputs):
        raise PatchError(
            f"the patched model returns {len(after.outputs)} tensors, the original "
            f"{len(before.outputs)}"
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    for index, (old, new) in enumerate(zip(before.outputs, after.outputs, strict=True)):
        if old.shape != new.shape:
            raise PatchError(
                f"output {index} changed its shape from {tuple(old.shape)} to {tuple(new.shape)}"
            )
        parts = finite_parts(old.double(), new.double())
        error = math.inf
        if parts is not None:
            error = float((parts[1] - parts[0]).norm() / parts[0].norm().clamp_min(1e-30))
        allowed = max(_LARGEST_ERROR.get(dtype, 0.05) for dtype in {old.dtype, *dtypes})
        if not error <= allowed:
            raise PatchError(
                f"output {index} of the patched {type(model).__name__} differs from the original's by "
                f"{error:.2e} (relative L2), more than rounding explains; "
                f"{_first_difference(before, after, allowed)}: the patch was undone; please report this "
                "model"
            )


def _first_difference(before: RealRun, after: RealRun, allowed: float) -> str:
    """The first module that differs, of those that returned tensors in both runs, call by call."""
    calls: dict[str, list[Tensor]] = {}
    for name, sums in before.modules:
        calls.setdefault(name, []).append(sums)
    for name, sums in after.modules:
        if not calls.get(name):
            continue
        old = calls[name].pop(0)
        if not bool((sums - old).abs().max() <= allowed * old[0]):
            return f"the first module whose output differs is {name or 'the model itself'}"
    return "no single module's output does"

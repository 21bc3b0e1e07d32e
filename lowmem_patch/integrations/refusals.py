"""What cannot be used beside a patch, and why: refused before the model is touched."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import nn

from lowmem_patch.errors import ConfigError
from lowmem_patch.tracing.base_model import base_model

# Kernels that write gradients over what others save, by the beginning of their module's name, and the mend.
_OVERWRITE = {
    "unsloth": "load the model with transformers, or use Unsloth without lowmem-patch",
    "axolotl.kernels.lora": "set lora_mlp_kernel, lora_qkv_kernel and lora_o_kernel to false",
}
# Liger's switches of the loss alone: they leave the modules of the model as they are
_LOSS_OF_LIGER = {"cross_entropy", "fused_linear_cross_entropy"}


def refuse_model(model: nn.Module) -> None:
    """Refuse a model that other code computes in a way that a patch would break, or would be undone by.

    Raises:
        ConfigError: kernels of Unsloth or Axolotl's for LoRA are in the model, or ZeRO-3 has taken its
            weights apart.
    """
    for name, module in model.named_modules():
        forward = inspect.unwrap(module.__dict__.get("forward", type(module).forward))
        origin = str(getattr(forward, "__module__", ""))
        for library, mend in _OVERWRITE.items():
            if origin.startswith(library):
                raise ConfigError(
                    f"{library} computes {name or 'the model'} with kernels that write gradients over the "
                    f"tensors that a patched norm saves: {mend}"
                )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            "DeepSpeed ZeRO-3 has taken the weights apart while the model was loaded, so no forward can be "
            "traced: load the model before the TrainingArguments are made, or use ZeRO-2 or FSDP2, so that "
            "it is taken apart after the patch"
        )


def refuse_arguments(args: Any, model: nn.Module, *, fit: Any) -> None:
    """Refuse arguments of a transformers or TRL trainer that would undo the patch, or do its work twice.

    Args:
        args: TrainingArguments, or a config of TRL.
        model: the model that the trainer holds.
        fit: the memory budget, if there is one.

    Raises:
        ConfigError: names the argument and what to set instead.
    """
    if getattr(args, "use_liger_kernel", False):
        over = _liger_over_patch(model, getattr(args, "liger_kernel_config", None) or {})
        if over:
            off = ", ".join(f'"{name}": False' for name in over)
            raise ConfigError(
                f"use_liger_kernel=True sets Liger's {', '.join(over)} over the patched modules when "
                "training begins, and the patch would be undone: set use_liger_kernel=False, or leave Liger "
                f"its loss alone with liger_kernel_config={{{off}}}"
            )
    if fit is None:
        return
    if _checkpoints(args):
        raise ConfigError(
            f"fit={fit!r} decides itself which blocks are recomputed, and gradient_checkpointing=True "
            "recomputes all: set gradient_checkpointing=False, or leave fit out"
        )
    if getattr(args, "activation_offloading", False):
        raise ConfigError(
            f"fit={fit!r} decides itself what goes to host memory, and activation_offloading=True sends "
            "everything: set activation_offloading=False, or leave fit out"
        )


def notes_on_arguments(args: Any) -> list[str]:
    """What arguments of a trainer mean for a patched model that works together with them."""
    notes = []
    if _checkpoints(args):
        notes.append(
            "gradient_checkpointing=True keeps a block's input alone, so the patch saves within the block "
            "that is being recomputed; without it a step is faster, if it fits"
        )
    if getattr(args, "torch_compile", False):
        notes.append(
            "torch_compile=True: norms save their normalised input (z), since compiled code looks at no gamma"
        )
    return notes


def _checkpoints(args: Any) -> bool:
    names = ("gradient_checkpointing", "activation_checkpointing")
    return any(getattr(args, name, False) for name in names)


def _liger_over_patch(model: Any, config: dict[str, Any]) -> list[str]:
    """Liger's switches that are on for this model and set forwards of its modules; none where Liger does
    not know the model, or is not installed, which the trainer says itself.
    """
    model_type = getattr(getattr(base_model(model), "config", None), "model_type", None)
    try:
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError:
        return []
    apply = liger.MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if apply is None:
        return []
    switches = {
        name: config.get(name, parameter.default)
        for name, parameter in inspect.signature(apply).parameters.items()
        if isinstance(parameter.default, bool)
    }
    return [name for name, on in switches.items() if on and name not in _LOSS_OF_LIGER]

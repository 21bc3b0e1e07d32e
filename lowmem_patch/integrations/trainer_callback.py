"""transformers' Trainer and all that is built on it: TRL, sentence-transformers, Axolotl, ms-swift."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from lowmem_patch.config import ConfigLike
from lowmem_patch.errors import ConfigError
from lowmem_patch.integrations.patching import Patching, reports_of, summary, write_reports
from lowmem_patch.planning.report import find_records
from lowmem_patch.tracing.base_model import base_model

# below "transformers", so that the trainer's own verbosity and handlers hold
_LOGGER: Any = logging.get_logger("transformers.lowmem_patch")

# ``optim`` of TrainingArguments: the optimizer whose state and temporaries a budget counts.
_OPTIMIZERS = {
    "adamw_torch": "adamw_foreach",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "paged_adamw_32bit": "paged_adamw",
    "paged_adamw_8bit": "paged_adamw8bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
}
# Liger's switches of the loss alone: they leave the modules of the model as they are
_LOSS_OF_LIGER = {"cross_entropy", "fused_linear_cross_entropy"}


class LowmemTrainerCallback(TrainerCallback):
    """Patches the model of a Trainer when the Trainer is complete.

    By then TRL has loaded the model and added adapters, and neither DDP, FSDP nor ZeRO has wrapped it. What
    was done is logged by the trainer's logger, and written to ``lowmem_patch.json`` in ``output_dir`` when
    training begins.

    Args:
        preset: ``auto``, ``exact``, ``compact``, ``paper``, a YAML path, a mapping or a PatchConfig; default:
            that of an earlier patch, else ``auto``.
        fit: a memory budget such as ``"24GiB"``; it counts the state of the arguments' ``optim``.
        example_inputs: one batch, for a model that says nothing of its inputs.
        sequence_length: tokens per row, for which the report counts bytes; ``fit`` needs them where the
            trainer has no ``max_length``.

    Raises:
        ConfigError: an unknown preset; in the trainer, an argument that cannot be used beside the patch.

    Example:
        >>> trainer = SFTTrainer(model="org/name", ..., callbacks=[LowmemTrainerCallback()])
        >>> trainer.train()
    """

    def __init__(
        self,
        preset: ConfigLike | None = None,
        *,
        fit: str | int | None = None,
        example_inputs: Any = None,
        sequence_length: int | None = None,
    ) -> None:
        self.patching = Patching(preset, fit, example_inputs, sequence_length)

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Patch the model, and say so."""
        if model is None:
            return
        _refuse_arguments(args, model, fit=self.patching.fit)
        optimizer = None if kwargs.get("optimizer") is not None else _OPTIMIZERS.get(args.optim)
        reports = self.patching.patch(
            model,
            batch_size=args.per_device_train_batch_size,
            sequence_length=getattr(args, "max_length", None),
            autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            accumulation=args.gradient_accumulation_steps,
            gpus=_sharing_gpus(),
            optimizer=optimizer or "adamw",
        )
        if state.is_world_process_zero:
            lines = [*map(summary, reports), *_notes_on_arguments(args)]
            if self.patching.fit is not None and optimizer is None:
                lines.append(_UNKNOWN_OPTIMIZER)
            # a warning, since the default verbosity shows nothing less
            self.patching.say("\n  ".join(lines), _LOGGER.warning)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the report; patch what ``model_init`` has made anew."""
        if model is None:
            return
        if not find_records(model):
            self.on_init_end(args, state, control, model)
        if state.is_world_process_zero:
            write_reports(Path(str(args.output_dir)), reports_of(model), self.patching)


_UNKNOWN_OPTIMIZER = (
    "the budget counts AdamW's state and no temporaries of its step, since the trainer has an optimizer of "
    f"its own or an optim that is none of {', '.join(_OPTIMIZERS)}: where yours holds more, make the budget "
    "smaller by that"
)


def _sharing_gpus() -> int:
    """Over how many GPUs the trainer's accelerate will shard the model by FSDP2; 1: it will not, or other
    ways of sharing are mixed with it, so that the number is not known."""
    library = sys.modules.get("accelerate.state")
    if library is None or not library.is_initialized():
        return 1
    state = library.AcceleratorState()
    mixed = getattr(state, "parallelism_config", None) is not None
    return int(state.num_processes) if getattr(state, "is_fsdp2", False) and not mixed else 1


def _refuse_arguments(args: Any, model: nn.Module, *, fit: Any) -> None:
    """Refuse arguments of a transformers or TRL trainer that would undo the patch, or do its work twice."""
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


def _notes_on_arguments(args: Any) -> list[str]:
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

"""Lightning: a callback that patches the models inside a LightningModule before a strategy wraps it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem_patch.config import ConfigLike
from lowmem_patch.integrations.patching import Patching, reports_of, summary, write_reports
from lowmem_patch.planning.report import find_records
from lowmem_patch.tracing.example_inputs import inner_models

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities import rank_zero_info
else:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import rank_zero_info

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class LowmemLightningCallback(Callback):  # type: ignore[misc]  # Lightning need not be installed
    """Patches what trains in a LightningModule when a fit is set up.

    Meant are the transformers, timm and diffusers models inside the module; where there are none, the module
    itself, with its own ``example_input_array``. A model that ``setup`` or ``configure_model`` makes is
    patched when the fit starts. What was done is logged by Lightning, and written to ``lowmem_patch.json``
    beside the checkpoints.

    Args:
        preset: ``auto``, ``exact``, ``compact``, ``paper``, a YAML path, a mapping or a PatchConfig; default:
            that of an earlier patch, else ``auto``.
        fit: a memory budget such as ``"24GiB"``; it needs ``batch_size``, and for text ``sequence_length``.
            With ``ModelParallelStrategy`` it is that of each GPU over which the data are parallel.
        example_inputs: arguments of the module's forward; the module is then patched as a whole.
        sequence_length: tokens per row.
        batch_size: rows of a training step on one device.

    Raises:
        ConfigError: an unknown preset; in the fit, what cannot be used beside the patch.
        TraceError: in the fit, a module that says nothing of its inputs.
        PatchError: in the fit, a model that ``configure_model`` has sharded already.

    Example:
        >>> Trainer(callbacks=[LowmemLightningCallback()]).fit(module, data)
    """

    def __init__(
        self,
        preset: ConfigLike | None = None,
        *,
        fit: str | int | None = None,
        example_inputs: Any = None,
        sequence_length: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.patching = Patching(preset, fit, example_inputs, sequence_length, batch_size)

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Patch what is there before ``configure_model``."""
        if stage == "fit" and inner_models(pl_module) != [pl_module]:
            self._patch(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Patch what was made since, and write the report."""
        if not find_records(pl_module):
            self._patch(trainer, pl_module)
        checkpoints = getattr(trainer, "checkpoint_callback", None)
        # in every process: ``log_dir`` is broadcast, and one that asks alone waits forever
        folder = (
            getattr(checkpoints, "dirpath", None) or trainer.log_dir or trainer.default_root_dir
        )
        if trainer.is_global_zero:
            write_reports(Path(str(folder)), reports_of(pl_module), self.patching)

    def _patch(self, trainer: Any, module: Any) -> None:
        example = self.patching.example_inputs
        if example is None and inner_models(module) == [module]:
            example = getattr(module, "example_input_array", None)
        reports = self.patching.patch(
            module, example_inputs=example, autocast=_AUTOCAST.get(str(trainer.precision)),
            accumulation=trainer.accumulate_grad_batches, gpus=sharing_gpus(trainer.strategy),
        )  # fmt: skip
        for report in reports:
            self.patching.say(summary(report), rank_zero_info)


def sharing_gpus(strategy: Any) -> int:
    """Over how many GPUs ``configure_model`` can shard the model by FSDP2; 1: over none, or Linears are cut
    over several as well, so that a budget of each is not known."""
    if not any(base.__name__ == "ModelParallelStrategy" for base in type(strategy).__mro__):
        return 1
    mesh = strategy.device_mesh  # there before ``setup`` is called
    cut = mesh["tensor_parallel"].size() > 1
    return 1 if cut else int(mesh["data_parallel"].size())

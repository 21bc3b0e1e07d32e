"""Axolotl: a plugin that is found by itself and does nothing until its keys stand in the YAML file.

lowmem_patch_preset: auto      # or exact, paper, a path
lowmem_patch_fit: 24GiB        # optional
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from lowmem_patch.integrations.trainer_callback import LowmemTrainerCallback

if TYPE_CHECKING:
    BasePlugin = object
else:
    from axolotl.integrations.base import BasePlugin


class LowmemAxolotlArguments(BaseModel):
    """The keys of the YAML file.

    Attributes:
        lowmem_patch_preset: ``auto``, ``exact``, ``compact``, ``paper``, or the path of a YAML file.
        lowmem_patch_fit: a memory budget such as ``24GiB``.
    """

    lowmem_patch_preset: str | None = None
    lowmem_patch_fit: str | None = None


class LowmemAxolotlPlugin(BasePlugin):
    """Adds ``LowmemTrainerCallback`` to the trainer where the YAML file asks for it."""

    def get_input_args(self) -> str:
        """The class of the keys, for Axolotl to check the YAML file with."""
        return f"{__name__}.{LowmemAxolotlArguments.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The callback, which acts when the trainer holds the model with its adapters."""
        preset, budget = cfg.get("lowmem_patch_preset"), cfg.get("lowmem_patch_fit")
        if preset is None and budget is None:
            return []
        length = cfg.get("sequence_len")
        return [LowmemTrainerCallback(preset, fit=budget, sequence_length=length)]

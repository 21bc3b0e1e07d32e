"""What all integrations share: which model is patched and how, and what is reported of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lowmem_patch.api import patch_model, patch_report
from lowmem_patch.config import ConfigLike, given_config, load_config
from lowmem_patch.errors import ConfigError
from lowmem_patch.planning.budget import checked_budget
from lowmem_patch.planning.names import fewer_or_more
from lowmem_patch.planning.planner import SMALL
from lowmem_patch.planning.report import PatchReport, find_records
from lowmem_patch.tracing.example_inputs import inner_models, make_example_inputs, reads_tokens
from lowmem_patch.tracing.isolation import preserved

REPORT_FILE = "lowmem_patch.json"
_PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "lightning", "timm", "diffusers")
# Kernels that write gradients over what others save, by the beginning of their module's name, and the mend.
_OVERWRITE = {
    "unsloth": "load the model with transformers, or use Unsloth without lowmem-patch",
    "axolotl.kernels.lora": "set lora_mlp_kernel, lora_qkv_kernel and lora_o_kernel to false",
}


@dataclasses.dataclass(frozen=True)
class Patching:
    """How models are patched that a trainer hands over.

    Args:
        preset: as ``config`` of :func:`lowmem_patch.patch_model`.
        fit: a memory budget such as ``"24GiB"``, as in :func:`lowmem_patch.patch_model`.
        example_inputs: as in :func:`lowmem_patch.patch_model`; default: made from the model's config.
        sequence_length, batch_size: tokens per row and rows of a training step on one device, which ``fit``
            needs where the trainer does not tell them; given, the report counts bytes for them.

    Raises:
        ConfigError: an unknown preset, key or value.
    """

    preset: ConfigLike | None = None
    fit: str | int | None = None
    example_inputs: Any = None
    sequence_length: int | None = None
    batch_size: int | None = None

    # how a user writes them
    names: ClassVar[dict[str, str]] = {
        "batch_size": "batch_size=",
        "sequence_length": "sequence_length=",
        "example_inputs": ", or example_inputs= (one batch)",
    }

    def __post_init__(self) -> None:
        load_config(given_config(self.preset, None))  # a mistake is said before a model is loaded
        if self.fit is not None:
            checked_budget(self.fit)
        for name in ("sequence_length", "batch_size"):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                raise ConfigError(f"{name} {size!r} is no number of tokens or rows: 1 or more")

    def patch(
        self,
        model: nn.Module,
        *,
        example_inputs: Any = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        autocast: torch.dtype | None = None,
        accumulation: int = 1,
        gpus: int = 1,
        optimizer: str = "adamw",
    ) -> list[PatchReport]:
        """Patch every model that trains in ``model``, and return their reports.

        Args:
            model: a model, or a module that holds some (a SentenceTransformer, a LightningModule).
            example_inputs: instead of the settings' own.
            batch_size, sequence_length: of a training step, if the trainer knows them.
            autocast: the dtype in which the trainer will run it, where that is another than the weights'.
            accumulation: batches of a step, whose gradients a budget counts.
            gpus: over which FSDP2 will shard the model; each has the whole budget.
            optimizer: whose state and temporaries a budget counts, as in `patch_model`.

        Raises:
            ConfigError: the model cannot be patched together with what else was asked for.
            TraceError, PatchError: as :func:`lowmem_patch.patch_model`; the model was not touched.
        """
        given = self.example_inputs if example_inputs is None else example_inputs
        found = [model] if given is not None else inner_models(model)
        for part in found:
            _refuse_model(part)
        for part in found:
            inputs = self._inputs(part, batch_size, sequence_length) if given is None else given
            with _autocast(part, autocast):
                # ``fit`` is passed on where it was given
                budget: dict[str, Any] = {}
                if self.fit is not None:
                    budget = {"fit": self.fit, "accumulation": accumulation}
                    budget |= {"optimizer": optimizer} if optimizer != "adamw" else {}
                    budget |= {"gpus": gpus} if gpus > 1 else {}
                patch_model(part, self.preset, example_inputs=inputs, **budget)
        return [self._report(part, batch_size) for part in found]

    def _report(self, model: nn.Module, rows: int | None) -> PatchReport:
        """The report, with a note on what counts the bytes of a real step where it counts an example's."""
        report = patch_report(model)
        unknown = ["batch_size"] if rows is None else []
        if reads_tokens(model):
            unknown.append("sequence_length")
        if not unknown or not report.inputs.endswith(SMALL):
            return report
        names = " and ".join(self.names[name] for name in unknown)
        note = f"bytes are those of that example; give {names} to count those of a step"
        return dataclasses.replace(report, notes=(note, *report.notes))

    def say(self, text: str, log: Callable[[str], object]) -> None:
        """Say what was done, by the trainer's own ``log``."""
        log(f"lowmem-patch: {text}")

    def _inputs(self, model: nn.Module, rows: int | None, length: int | None) -> Any:
        """Inputs of a real step for a budget, else of the settings; None where ``patch_model`` makes them."""
        if self.fit is None and self.sequence_length is self.batch_size is None:
            return None
        length, rows = self.sequence_length or length, self.batch_size or rows
        if self.fit is None:
            return _drawn(model, rows or 2, length)
        unknown = ["batch_size"] if rows is None else []
        if length is None and reads_tokens(model):
            unknown.append("sequence_length")
        if rows is None or unknown:
            raise ConfigError(
                f"fit={self.fit!r} needs the size of a training step, which this trainer does not tell: give "
                f"{' and '.join(self.names[name] for name in unknown)}{self.names['example_inputs']}"
            )
        return _drawn(model, rows, length)


def _refuse_model(model: nn.Module) -> None:
    """Refuse a model that other code computes in a way that a patch would break, or would be undone by."""
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


def _drawn(model: nn.Module, rows: int, length: int | None) -> Any:
    """Inputs, for which the trainer's own random numbers stay as they are."""
    with preserved(model):
        return make_example_inputs(model, batch_size=rows, sequence_length=length)


def _autocast(
    model: nn.Module, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    if dtype is None:
        return contextlib.nullcontext()
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None or parameter.is_meta else parameter.device.type
    return torch.autocast(device, dtype)


def reports_of(model: nn.Module) -> list[PatchReport]:
    """The reports of all patched models in ``model``, with what has changed since the patch."""
    return [patch_report(holder) for holder, _ in find_records(model)]


def summary(report: PatchReport) -> str:
    """A report in one line, and its notes below."""
    text = (
        f"{report.model}, preset {report.config.name}: {len(report.patched)} of {len(report.sites)} sites "
        "patched"
    )
    if report.saved_before and report.saved_after:
        text += (
            f"; saved activation bytes {report.saved_before:,} -> {report.saved_after:,} "
            f"({fewer_or_more(report.saved_before, report.saved_after)}) for {report.inputs}"
        )
    if report.approximate:
        text += (
            f"; gradients are approximate at {len(report.approximate)} sites "
            f"({report.approximate[0].name}, ...): preset exact has none"
        )
    fitted = () if report.fit is None else map(str.strip, report.fit.head)
    return "\n  ".join([text, *fitted, *report.notes])


def write_reports(folder: Path, reports: Sequence[PatchReport], settings: Patching) -> Path:
    """Write ``lowmem_patch.json`` with every site of every model into ``folder``, and return its path."""
    versions = {}
    for package in ("lowmem-patch", *_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    data = {
        "versions": versions,
        "fit": settings.fit,
        "models": [report.to_dict() for report in reports],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT_FILE
    # a dtype or path in a report is best read as its text
    path.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
    return path

"""Run an unmodified script with its models patched: what ``lowmem-patch run`` does.

In this process alone, four places of libraries hand their models over: the end of ``transformers.Trainer()``
(and so of all trainers built on it), ``Accelerator.prepare``, Lightning's ``Trainer.fit`` and
``timm.create_model``. Everything is put back when the script has ended.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from lowmem_patch.errors import LowmemPatchError, PatchError, TraceError
from lowmem_patch.integrations.patching import Patching, summary
from lowmem_patch.planning.changes import no_longer_as_patched
from lowmem_patch.planning.report import PatchReport, find_records

_PLACES = "transformers.Trainer, accelerate's Accelerator.prepare, Lightning's Trainer.fit, timm.create_model"
_OWN_CALLBACK = (
    "the trainer has a callback of its own that patches: the options of this command are not used"
)
# they hand the model on to a trainer, or build it for another model
_BUILDERS = ("timm", "transformers")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class ScriptPatching(Patching):
    """Patches what a script's libraries hand over, and remembers it.

    Args:
        strict: a model that cannot be patched ends the script; else it is left as it is, and named.
    """

    strict: bool = False
    reports: dict[int, PatchReport] = dataclasses.field(default_factory=dict)
    left_alone: dict[str, None] = dataclasses.field(default_factory=dict)

    # as options of `run`, which takes no example inputs
    names: ClassVar[dict[str, str]] = {
        "batch_size": "--batch-size",
        "sequence_length": "--seq-len",
        "example_inputs": " before the script",
    }

    def patch(self, model: nn.Module, **details: Any) -> list[PatchReport]:
        """As :meth:`Patching.patch`; nothing where a model cannot be patched, unless ``strict``."""
        try:
            reports = super().patch(model, **details)
        except (TraceError, PatchError) as error:
            if self.strict:
                raise
            self.leave_alone(f"{type(model).__name__} is left as it is: {error}")
            return []
        self.reports.update((id(model) + place, report) for place, report in enumerate(reports))
        return reports

    def leave_alone(self, reason: str) -> None:
        """Say, once, what this command does not patch, and why."""
        if reason not in self.left_alone:
            _say(reason)
        self.left_alone[reason] = None

    def say(self, text: str, log: Callable[[str], object]) -> None:
        """Say it on standard error, as all that the command says, whatever the script does with its logs."""
        _say(text)

    def account(self) -> str:
        """How many models were patched in the end; what was done was said then."""
        if self.reports:
            listed = [
                f"{report.model} ({len(report.patched)} of {len(report.sites)} sites)"
                for report in self.reports.values()
            ]
            return (
                f"{len(listed)} model{'s' if len(listed) > 1 else ''} patched: {', '.join(listed)}"
            )
        why = "; ".join(self.left_alone) or (
            f"no model that trains came to any of {_PLACES}, or the script had patched it before. In a loop "
            "of your own, call lowmem_patch.patch_model(model) before the optimizer is made"
        )
        return f"nothing was patched by this command: {why}"


def run_script(
    script: str, arguments: Sequence[str], patching: ScriptPatching, *, as_module: bool = False
) -> None:
    """Run a script as ``python script arguments`` would, in this process.

    What was patched is said on standard error, by the first process where there are several.

    Args:
        script: a path, or with ``as_module`` a module's name, as of ``python -m``.
        arguments: for the script.

    Raises:
        SystemExit: the script's own, as every error of the script.
        LowmemPatchError: what was asked for cannot be done with a model of the script.
    """
    argv, search = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path.cwd() if as_module else Path(script).resolve().parent)
    refused = False
    _say(f"in this process alone, models are patched that are given to {_PLACES}")
    try:
        with contextlib.ExitStack() as replaced, _AfterImport(patching, replaced):
            if as_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except LowmemPatchError:  # it says itself why nothing was patched
        refused = True
        raise
    finally:
        sys.argv, sys.path[:] = argv, search
        if not refused:
            _say(patching.account())


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("lowmem-patch run: " + text.replace("\n", "\n  ") + "\n")
        sys.stderr.flush()


def _replace(replaced: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until all that was replaced is put back."""
    replaced.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _at_trainer(patching: ScriptPatching, replaced: contextlib.ExitStack, module: Any) -> None:
    """Add the callback at the end of ``Trainer.__init__``, when callbacks are told so."""
    original = module.Trainer.__init__

    @functools.wraps(original)
    def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
        from lowmem_patch.integrations.trainer_callback import LowmemTrainerCallback

        original(trainer, *args, **kwargs)
        present = trainer.callback_handler.callbacks
        if _has_callback(present, LowmemTrainerCallback, patching):
            return
        callback = LowmemTrainerCallback(patching.preset)
        callback.patching = patching
        trainer.add_callback(callback)
        callback.on_init_end(trainer.args, trainer.state, trainer.control, trainer.model)

    _replace(replaced, module.Trainer, "__init__", __init__)


def _has_callback(callbacks: Iterable[Any], kind: Any, patching: ScriptPatching) -> bool:
    """Whether one of them patches; one of the script's own is named."""
    found = [callback for callback in callbacks if isinstance(callback, kind)]
    if any(callback.patching is not patching for callback in found):
        patching.leave_alone(_OWN_CALLBACK)
    return bool(found)


def _at_prepare(patching: ScriptPatching, replaced: contextlib.ExitStack, module: Any) -> None:
    """Patch the models that train before ``Accelerator.prepare`` wraps or shards them."""
    original = module.Accelerator.prepare

    @functools.wraps(original)
    def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        autocast = _AUTOCAST.get(str(accelerator.mixed_precision))
        for model in args:
            if isinstance(model, nn.Module) and _wants(model):
                for report in patching.patch(model, autocast=autocast):
                    _say(f"at Accelerator.prepare: {summary(report)}")
        return original(accelerator, *args, **kwargs)

    _replace(replaced, module.Accelerator, "prepare", prepare)


def _wants(model: nn.Module) -> bool:
    """Whether something trains, and is not patched as it is now."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    records = find_records(model)
    return not records or any(no_longer_as_patched(holder) for holder, _ in records)


def _at_fit(patching: ScriptPatching, replaced: contextlib.ExitStack, module: Any) -> None:
    """Add a callback, which sees to the rest, when Lightning's ``Trainer.fit`` begins."""
    original = module.Trainer.fit

    @functools.wraps(original)
    def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        from lowmem_patch.integrations.lightning_callback import LowmemLightningCallback

        if not _has_callback(trainer.callbacks, LowmemLightningCallback, patching):
            callback = LowmemLightningCallback(patching.preset)
            callback.patching = patching
            trainer.callbacks.insert(0, callback)
        return original(trainer, *args, **kwargs)

    _replace(replaced, module.Trainer, "fit", fit)


def _at_create_model(patching: ScriptPatching, replaced: contextlib.ExitStack, module: Any) -> None:
    """Patch what ``timm.create_model`` makes where a script, and no library, calls it."""
    original = module.create_model

    @functools.wraps(original)
    def create_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] not in _BUILDERS and _wants(model):
            for report in patching.patch(model):
                _say(f"at timm.create_model: {summary(report)}")
        return model

    # copies of the name where timm was imported before
    for other in list(sys.modules.values()):
        if (
            str(getattr(other, "__name__", "")).startswith("timm")
            and vars(other).get("create_model") is original
        ):
            _replace(replaced, other, "create_model", create_model)


# what is done to each library's module once it is there
_ACTIONS = {
    "transformers.trainer": _at_trainer,
    "accelerate.accelerator": _at_prepare,
    "lightning.pytorch.trainer.trainer": _at_fit,
    "pytorch_lightning.trainer.trainer": _at_fit,
    "timm.models._factory": _at_create_model,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Does what `_ACTIONS` say: at once where a module is imported already, else after its import."""

    def __init__(self, patching: ScriptPatching, replaced: contextlib.ExitStack) -> None:
        self.details = patching, replaced

    def __enter__(self) -> _AfterImport:
        for name, action in _ACTIONS.items():
            if name in sys.modules:
                action(*self.details, sys.modules[name])
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with the action behind its loader."""
        if name not in _ACTIONS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                loader: Any = copy.copy(spec.loader)  # a zip file's loads other modules, too
                loader.exec_module = functools.partial(self._execute, name, loader.exec_module)
                spec.loader = loader
                return spec
        return None

    def _execute(self, name: str, execute: Callable[[ModuleType], None], module: Any) -> None:
        execute(module)
        _ACTIONS[name](*self.details, module)

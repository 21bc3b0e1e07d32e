"""The variants that are compared; each changes a copy of the model, and that copy alone."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowmem_patch.api import patch_model
from lowmem_patch.errors import ConfigError, VariantError
from lowmem_patch.memory import base_model, switch_checkpointing_on
from lowmem_patch.tracing.inputs import ExampleInputs

__all__ = ["VARIANTS", "Variant", "compiled", "find_variant", "unpatched"]

# Takes a model, on its device and in its mode, and the inputs of a step; returns the model to train.
# Raises VariantError or NothingToPatchError where it does not apply to this model or machine.
Variant = Callable[[Any, ExampleInputs], Any]


def unpatched(model: Any, _inputs: ExampleInputs) -> Any:
    """The model as it is."""
    return model


def _preset(name: str) -> Variant:
    def patched(model: Any, inputs: ExampleInputs) -> Any:
        return patch_model(model, name, example_inputs=inputs, strict=True)

    return patched


def _checkpointing(model: Any, _inputs: ExampleInputs) -> Any:
    if not switch_checkpointing_on(model):
        raise VariantError(f"{type(base_model(model)).__name__} has no gradient checkpointing")
    return model


def compiled(variant: Variant, **options: Any) -> Variant:
    """The variant under ``torch.compile`` with these options."""

    def compiling(model: Any, inputs: ExampleInputs) -> Any:
        return torch.compile(variant(model, inputs), **options)

    return compiling


def _liger(model: Any, _inputs: ExampleInputs) -> Any:
    """Liger's norms, gated MLP and fused loss, where it knows the type of the model.

    Its rotary embedding and its plain cross entropy can only be replaced for all models at once.
    """
    try:
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise VariantError("liger-kernel is not installed") from error
    base = base_model(model)
    model_type = getattr(getattr(base, "config", None), "model_type", None)
    if model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise VariantError(f"liger-kernel has nothing for {model_type or type(base).__name__}")
    has_head = base.get_output_embeddings() is not None
    with _restored_names(type(base).__module__):
        liger._apply_liger_kernel_to_instance(
            base, rope=False, cross_entropy=False, fused_linear_cross_entropy=has_head
        )
    return model


@contextlib.contextmanager
def _restored_names(module: str) -> Iterator[None]:
    """Undoes Liger's replacements of classes in a module, which would reach all later models."""
    names = vars(sys.modules[module])
    before = dict(names)
    try:
        yield
    finally:
        names.clear()
        names.update(before)


VARIANTS: dict[str, Variant] = {
    "unpatched": unpatched,
    "paper": _preset("paper"),
    "exact": _preset("exact"),
    "auto": _preset("auto"),
    "checkpointing": _checkpointing,
    "liger": _liger,
    "compile": compiled(unpatched),
    "auto+compile": compiled(_preset("auto")),
}


def find_variant(name: str) -> Variant:
    """The variant of a name, or of names joined by ``+``: checkpointing is switched on first, and the
    compiler comes last, wherever they stand (``auto+checkpointing``).

    Raises:
        ConfigError: there is no such variant.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    words = name.split("+")
    unknown = [word for word in words if word not in VARIANTS]
    if unknown or len(set(words)) < len(words):
        known = ", ".join(word for word in VARIANTS if "+" not in word)
        raise ConfigError(f"variant {name!r} is none of {known}, nor several of them joined by +")
    order = ["checkpointing", *(word for word in words if word not in ("checkpointing", "compile"))]
    order.append("compile")

    def combined(model: Any, inputs: ExampleInputs) -> Any:
        for word in order:
            if word in words:
                model = VARIANTS[word](model, inputs)
        return model

    return combined

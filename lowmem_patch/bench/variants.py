"""The variants that are compared; each changes a copy of the model, and that copy alone."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lowmem_patch.api import patch_model, plan_patch
from lowmem_patch.config import preset_names
from lowmem_patch.errors import BudgetError, ConfigError, VariantError
from lowmem_patch.memory import parse_bytes
from lowmem_patch.memory.blocks import repeated_blocks
from lowmem_patch.planning.names import size_text
from lowmem_patch.tracing.base_model import base_model, switch_checkpointing_on
from lowmem_patch.tracing.inputs import ExampleInputs

# Takes a model, on its device and in its mode, and the inputs of a step; returns the model to train.
# Raises VariantError or NothingToPatchError where it does not apply to this model or machine.
Variant = Callable[[Any, ExampleInputs], Any]

# of the memory between the least budget and what a patched step takes
_CURVE_SHARES = (0.7, 0.4, 0.2, 0.1, 0.02)
_CURVE_EVERY = (4, 2, 1)


def unpatched(model: Any, _inputs: ExampleInputs) -> Any:
    """The model as it is."""
    return model


def _patched(model: Any, inputs: ExampleInputs, *, preset: str, **settings: Any) -> Any:
    try:
        return patch_model(model, preset, example_inputs=inputs, **settings)
    except BudgetError as error:
        raise VariantError(str(error).split(": parameters ")[0]) from error


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


_PRESETS = {
    name: partial(_patched, preset=name, strict=True)
    for name in ("paper", "exact", "auto", "compact")
}
VARIANTS: dict[str, Variant] = {
    "unpatched": unpatched,
    **_PRESETS,
    "checkpointing": _checkpointing,
    "liger": _liger,
    "compile": compiled(unpatched),
    "auto+compile": compiled(_PRESETS["auto"]),
}


def _every(count: str) -> Variant:
    """Torch's checkpoint around every n-th of the repeated blocks, as is done by hand."""
    if not count.isdecimal() or not int(count):
        raise ConfigError(f"variant 'every={count}': the number of blocks must be 1 or more")

    def checkpointed(model: Any, _inputs: ExampleInputs) -> Any:
        path = repeated_blocks(model, least=2)
        if path is None:
            raise VariantError(f"{type(base_model(model)).__name__} has no list of equal blocks")
        config: Any = getattr(base_model(model), "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # a second run would write into the cache again
        for block in list(model.get_submodule(path).children())[:: int(count)]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model

    return checkpointed


def _of_word(word: str, words: list[str]) -> Variant:
    kind, _, value = word.partition("=")
    if kind == "fit":
        if value == "auto":
            raise ConfigError(
                "variant 'fit=auto': other variants run on the GPU, so name a size: fit=24GiB"
            )
        parse_bytes(value)
        preset = next((w for w in words if w in preset_names()), "auto")
        return partial(
            _patched, preset=preset, fit=value
        )  # weights and the optimizer's state included
    if kind == "every":
        return _every(value)
    return VARIANTS[word]


def find_variant(name: str) -> Variant:
    """The variant of a name, or of names joined by ``+``: checkpointing is switched on first, and the
    compiler comes last, wherever they stand (``auto+checkpointing``).

    ``fit=24GiB`` is the preset ``auto`` within a budget (``exact+fit=24GiB`` another preset), ``every=2``
    checkpoints every second block.

    Raises:
        ConfigError: there is no such variant.
    """
    words = name.split("+") if name not in VARIANTS else [name]
    if len(set(words)) < len(words) or not all(map(_is_known, words)):
        known = ", ".join(word for word in VARIANTS if "+" not in word)
        raise ConfigError(
            f"variant {name!r} is none of {known}, fit=24GiB, every=2, nor several of them joined by +"
        )
    chosen = {word: _of_word(word, words) for word in words}
    if any(word.startswith("fit=") for word in words):  # which patches with the preset
        chosen = {word: variant for word, variant in chosen.items() if word not in preset_names()}
    found = [chosen[word] for word in sorted(chosen, key=_order)]

    def combined(model: Any, inputs: ExampleInputs) -> Any:
        for variant in found:
            model = variant(model, inputs)
        return model

    return combined if len(found) > 1 else found[0]


def _is_known(word: str) -> bool:
    return word in VARIANTS or word.startswith(("fit=", "every="))


def _order(word: str) -> int:
    """What wraps blocks comes before the patch, which sees it, and the compiler last."""
    if word == "checkpointing" or word.startswith("every="):
        return 0
    return 2 if "compile" in word else 1


def curve_variants(model: Any, inputs: ExampleInputs) -> dict[str, Variant]:
    """The preset ``auto`` at several budgets, with checkpointing of every k-th block, and what is common
    today: the unpatched model, Liger's, and both with checkpointing.

    Args:
        model: unpatched, as it will train. All of it is moved to where the inputs are: its adapters may have
            been made elsewhere.
        inputs: of a step.

    Raises:
        TraceError: the model cannot be planned on the inputs.
    """
    model.to(inputs.tensors[0].device)
    sizes = [size_text(size).replace(" ", "") for size in _budgets(model, inputs)]
    names = ["auto", *(f"fit={size}" for size in sizes)]
    names += [f"auto+every={count}" for count in _CURVE_EVERY]
    for peer in ("unpatched", "liger"):
        names += [peer, *(f"{peer}+every={count}" for count in _CURVE_EVERY)]
    return {name: find_variant(name) for name in names}


def _budgets(model: Any, inputs: ExampleInputs) -> list[int]:
    """Bytes of several budgets, the largest first."""
    most = plan_patch(model, "auto", example_inputs=inputs, fit="1024TiB").fit
    assert most is not None
    try:
        plan_patch(model, "auto", example_inputs=inputs, fit=most.parameters)
    except BudgetError as error:
        least = error.least or most.parameters
        return [least + int(share * (most.predicted - least)) for share in _CURVE_SHARES]
    return []

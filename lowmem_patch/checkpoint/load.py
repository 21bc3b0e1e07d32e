"""Building a checkpoint's model: on the meta device from its config alone, or with its weights."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from lowmem_patch.checkpoint.compare import cast_parameters
from lowmem_patch.checkpoint.source import Source, first_line
from lowmem_patch.checkpoint.weights import read_weights
from lowmem_patch.errors import CheckpointError
from lowmem_patch.tracing.base_model import output_head

# transformers and timm report a broken checkpoint with whatever their parsing met first
_LIBRARY_ERRORS = (
    OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError,
    StrictDataclassError,
)  # fmt: skip


@contextlib.contextmanager
def _naming(source: Source, task: str) -> Iterator[None]:
    """An error of the library names the checkpoint and the task that failed."""
    try:
        yield
    except _LIBRARY_ERRORS as error:
        reason = f"{source.library} cannot {task}: {first_line(error)}"
        raise CheckpointError(f"{source.name}: {reason}") from error


def refuse_quantised(source: Source) -> None:
    """Packed weights can be neither folded nor compared in float64.

    Raises:
        CheckpointError: config.json has a quantization_config.
    """
    if source.quantised:
        config = source.config["quantization_config"]
        method = config.get("quant_method", "unknown") if isinstance(config, dict) else "unknown"
        raise CheckpointError(
            f"{source.name} is quantised ({method}), and commands read full-precision checkpoints alone: "
            "name that one, and quantise the result of convert. A quantised model that is loaded takes "
            "patch_model, verify_model and saved_bytes"
        )


def build_meta_model(source: Source, dtype: torch.dtype | None = None) -> Any:
    """The model on the meta device, from its config alone; no weight is read.

    Args:
        dtype: of the parameters; None takes the one that config.json names.

    Raises:
        CheckpointError: the architecture is unknown, or needs code that was not trusted.
    """
    if source.library == "timm":
        model = _timm_model(source)
    else:
        config = _transformers_config(source)
        cls = _transformers_class(source, config)
        with _naming(source, f"build {cls.__name__} from its config"), torch.device("meta"):
            model = cls(config)
            model.tie_weights()
        if dtype is None:
            named = source.config.get("dtype") or source.config.get("torch_dtype")
            dtype = getattr(torch, str(named), None) if named else None
    if isinstance(dtype, torch.dtype):
        cast_parameters(model, dtype)
    return model.eval()


def load_model(source: Source, dtype: torch.dtype | None = None) -> Any:
    """The model with its weights, on the CPU, in eval mode, as stock transformers or timm loads it.

    Args:
        dtype: of the parameters; None takes the one that the library would.

    Raises:
        CheckpointError: the weights are broken, or do not fit the class.
    """
    refuse_quantised(source)
    read_weights(source.files)  # names broken files, before a library words it in its own way
    if source.library == "timm":
        return cast_parameters(_timm_model(source, pretrained=True), dtype).eval()
    config = _transformers_config(source)
    cls = _transformers_class(source, config)
    with _naming(source, f"load it into {cls.__name__}"):
        model, info = cls.from_pretrained(
            source.folder, config=config, dtype=dtype or "auto", output_loading_info=True,
            local_files_only=True,
        )  # fmt: skip
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{source.name} lacks {len(missing)} weights of {cls.__name__}, such as {missing[0]}: "
            "they would be random; is config.json of another model?"
        )
    return model.eval()


def _transformers_config(source: Source) -> Any:
    import transformers

    own_code = "AutoConfig" in (source.config.get("auto_map") or {})
    known = source.config.get("model_type") in transformers.CONFIG_MAPPING
    if own_code and not known and not source.trust_remote_code:
        raise CheckpointError(
            f"{source.name} brings its own Python code: read it, and add --trust-remote-code to run it"
        )
    with _naming(source, "read its config"):
        return transformers.AutoConfig.from_pretrained(
            source.files, trust_remote_code=source.trust_remote_code, local_files_only=True
        )


def _transformers_class(source: Source, config: Any) -> Any:
    import transformers

    names = source.config.get("architectures") or []
    if not names:
        if type(config) in transformers.MODEL_MAPPING:
            return transformers.MODEL_MAPPING[type(config)]
        raise CheckpointError(
            f"{source.name}: config.json names no architectures: add the class to it"
        )
    name = str(names[0])
    if hasattr(transformers, name):
        return getattr(transformers, name)
    auto_map = source.config.get("auto_map") or {}
    reference = next((str(r) for r in auto_map.values() if str(r).rpartition(".")[2] == name), None)
    if reference is None:
        raise CheckpointError(
            f"{source.name}: transformers {transformers.__version__} has no class {name}: update transformers"
        )
    if not source.trust_remote_code:
        raise CheckpointError(
            f"{source.name} brings its own Python code for {name}: read it, and add "
            "--trust-remote-code to run it"
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    with _naming(source, f"import {reference} from the checkpoint"):
        return get_class_from_dynamic_module(reference, source.files, local_files_only=True)


def _timm_model(source: Source, *, pretrained: bool = False) -> nn.Module:
    import timm

    name = source.config["architecture"] if source.folder is None else f"local-dir:{source.folder}"
    architecture = str(source.config["architecture"]).partition(".")[0]
    if not timm.is_model(architecture):
        raise CheckpointError(
            f"{source.name}: timm {timm.__version__} has no architecture {architecture}: update timm"
        )
    device = torch.device("cpu" if pretrained else "meta")
    with _naming(source, f"build {architecture}"), device:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    return model


def stored_names(model: Any, stored: Sequence[str]) -> dict[str, str]:
    """State-dict entry of the (meta) model to the stored tensor that becomes it, one to one.

    Follows the renamings that transformers applies on loading; a tensor that is merged with others,
    split or reshaped by them has no entry.
    """
    own = model.state_dict()
    if not hasattr(model, "base_model_prefix"):
        return {name: name for name in stored if name in own}
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions = mapping.get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, loading.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, loading.WeightConverter)]
    prefix = model.base_model_prefix
    names: dict[str, str] = {}
    for name in stored:
        target, converter = loading.rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, converter = loading.rename_source_key(name, [], [], prefix, own)
        if target in own and converter is None:
            names[target] = name
    return names


def add_lora(model: Any, target_modules: Sequence[str] | None = None, *, rank: int = 8) -> Any:
    """Wrap a meta model with PEFT's LoRA; the base model is frozen.

    Args:
        target_modules: ends of module names; None takes every Linear but the model's head.

    Raises:
        CheckpointError: peft is not installed, or no module has such a name.
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise CheckpointError(
            "--train lora needs peft: pip install 'lowmem-patch[peft]'"
        ) from error
    everything = "all-linear" if hasattr(model, "base_model_prefix") else _all_linears(model)
    targets: Any = list(target_modules) if target_modules else everything
    paths = [f".{path}" for path, _ in model.named_modules()]
    unknown = [
        name for name in target_modules or () if not any(p.endswith(f".{name}") for p in paths)
    ]
    if unknown:
        linears = sorted({name.rpartition(".")[2] for name in _all_linears(model)})
        raise CheckpointError(
            f"--train lora: nothing is called {', '.join(unknown)}; "
            f"Linears here are {', '.join(linears)}"
        )
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    try:
        return peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:  # a module that is no Linear, for example
        raise CheckpointError(f"--train lora: {error}") from error


def _all_linears(model: Any) -> list[str]:
    head = output_head(model)
    if head is None and hasattr(model, "get_classifier"):
        head = model.get_classifier()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and "classifier" not in name
    ]

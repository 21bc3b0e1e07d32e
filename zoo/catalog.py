"""What there is to judge: every model type of transformers with its class, and variants of timm families."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from zoo.overrides import OVERRIDES


def model_types() -> list[str]:
    """Every model type of the auto mappings."""
    return sorted(CONFIG_MAPPING_NAMES)


def config_class_of(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type]


def model_class_of(model_type: str) -> Any:
    """The class that runs a model type: of AutoModel, of another auto mapping, or of its own file.

    Raises:
        LookupError: no class of the installed transformers takes this config.
    """
    names = ["MODEL_MAPPING_NAMES"]
    names += sorted(n for n in dir(modeling_auto) if n.endswith("MAPPING_NAMES") and n not in names)
    names.remove("CONFIG_MAPPING_NAMES")
    entries = [getattr(modeling_auto, name).get(model_type) for name in names]
    firsts = [entry if isinstance(entry, str) else entry[0] for entry in entries if entry]
    for first in (OVERRIDES.get(model_type, {}).get("class"), *firsts):
        found = getattr(transformers, first, None) if first else None
        if found is not None and found.forward is not torch.nn.Module.forward:
            return found
    return _from_own_file(config_class_of(model_type))


def _from_own_file(config_class: Any) -> Any:
    """A model class of the config's package that declares this very config."""
    package = config_class.__module__.rpartition(".")[0]
    folder = Path(str(inspect.getfile(config_class))).parent
    candidates = []
    for file in sorted(folder.glob("modeling_*.py")):
        path = f"{package}.{file.stem}"
        for _, found in inspect.getmembers(importlib.import_module(path), inspect.isclass):
            if found.__module__ == path and _takes(found, config_class):
                candidates.append(found)
    if not candidates:
        name = config_class.__name__
        users = _users(config_class)
        part = f", which is a part of {', '.join(users)}" if users else ""
        raise LookupError(f"no model class of {package} with a forward takes a {name}{part}")
    plain = [c for c in candidates if c.__name__.endswith(("Model", "Encoder", "Decoder"))]
    return (plain or candidates)[0]


def _users(config_class: Any) -> list[str]:
    """Model types whose configs hold a config of this class."""
    return [
        name
        for name in model_types()
        if config_class in (getattr(config_class_of(name), "sub_configs", None) or {}).values()
    ]


def _takes(found: Any, config_class: Any) -> bool:
    if not issubclass(found, transformers.PreTrainedModel) or "forward" not in vars(found):
        return False
    parameter = inspect.signature(found.__init__).parameters.get("config")
    annotation = getattr(parameter, "annotation", None)
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None)
    return getattr(found, "config_class", None) is config_class or name == config_class.__name__

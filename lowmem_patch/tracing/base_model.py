"""What is a model, a leaf, the model inside a PEFT wrapper, its head, and the config of what reads text."""

from __future__ import annotations

from os import PathLike
from types import FunctionType
from typing import Any

from torch import nn

from lowmem_patch.errors import ConfigError


def checked_model(model: object, call: str) -> None:
    """Raises ConfigError where ``model``, an argument of ``call``, is no module."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, (str, PathLike)):
        raise ConfigError(
            f"{call} takes a model that is loaded, and {str(model)!r} is a name: load it first, such as "
            f"model = AutoModelForCausalLM.from_pretrained({str(model)!r})"
        )
    if isinstance(model, type):
        raise ConfigError(
            f"{call} takes a model, and {model.__name__} is a class: make a model of it"
        )
    mend = "give the model that it holds, such as trainer.model or pipeline.unet"
    if model is None or isinstance(model, (tuple, list, FunctionType)):
        mend = "give one model"
    elif hasattr(model, "model_type"):
        mend = "make a model of it, such as AutoModelForCausalLM.from_config(config)"
    raise ConfigError(f"{call} takes a torch.nn.Module, and got a {type(model).__name__}: {mend}")


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no other inside."""
    return next(module.children(), None) is None


def base_model(model: Any) -> Any:
    """The model that PEFT wraps, or the model itself."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    if not hasattr(model, "peft_config"):
        return model
    # a PeftMixedModel has no such method, and a model with transformers' own adapters no such part
    tuner: Any = dict(model.named_children()).get("base_model")
    return model if tuner is None else tuner.model


def text_config(config: Any) -> Any:
    """The part of a transformers config that is of the text model; the config itself where it has no parts.

    Raises:
        ValueError: there are several text models.
    """
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def output_head(model: Any) -> Any:
    """The module that makes a language model's logits, or None."""
    get_head = getattr(base_model(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()


def has_dropouts(model: nn.Module) -> bool:
    """Whether a module of it drops elements in training."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def switch_checkpointing_on(model: Any) -> bool:
    """The model's own activation checkpointing, layer by layer, non-reentrant; False where it has none."""
    base = base_model(model)
    if hasattr(base, "set_grad_checkpointing"):
        base.set_grad_checkpointing(True)
    elif getattr(base, "supports_gradient_checkpointing", False):
        # transformers' newer name, where it has it
        enable = getattr(base, "activation_checkpointing_enable", None)
        (enable or base.gradient_checkpointing_enable)({"use_reentrant": False})
    else:
        return False
    return True

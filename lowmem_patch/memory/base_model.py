"""The model inside a PEFT wrapper, and its head."""

from __future__ import annotations

from typing import Any

__all__ = ["base_model", "output_head"]


def base_model(model: Any) -> Any:
    """The model that PEFT wraps, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: Any) -> Any:
    """The module that makes a language model's logits, or None."""
    get_head = getattr(base_model(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()

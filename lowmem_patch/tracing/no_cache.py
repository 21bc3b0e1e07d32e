"""A transformers model that keeps no cache of keys and values runs on fake tensors as it runs on data."""

from __future__ import annotations

import inspect
import sys
from typing import Any, get_args

from torch import Tensor, nn

from lowmem_patch.nn.caches import STANDS_FOR_NONE
from lowmem_patch.tracing.base_model import base_model
from lowmem_patch.tracing.inputs import ExampleInputs

# what transformers calls the cache of keys and values: since 5.24, and before
_CACHES = ("cache", "past_key_values")


def as_on_data(model: nn.Module, inputs: ExampleInputs) -> ExampleInputs:
    """Fake inputs that take the same way through a transformers model as data.

    A model without a cache of keys and values looks whether positions tell of packed sequences. On fake
    tensors, whose values nobody knows, it makes an attention mask for them, and repeats the keys and values
    of grouped heads (`transformers.masking_utils.find_packed_sequence_indices`). It does not look where it
    gets a cache: this one holds nothing, of keys and values as of states of recurrent layers.
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    takes = inspect.signature(base.forward).parameters
    cache = next((name for name in _CACHES if name in takes), None)
    given = {name for name, value in inputs.kwargs.items() if value is not None}
    adapters = getattr(model, "peft_config", {}).values()  # a trained prefix is a cache itself
    has_prompt = any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)
    # transformers' own checkpointing turns the cache off
    checkpointed = any(vars(module).get("gradient_checkpointing") for module in base.modules())
    asked = inputs.kwargs.get("use_cache", getattr(config, "use_cache", None))
    if (
        not (checkpointed or asked is False)
        or getattr(config, "is_encoder_decoder", False)
        or cache is None
        or has_prompt
        or given & {"attention_mask", "position_ids", *_CACHES}
    ):
        return inputs
    library = sys.modules.get("transformers.cache_utils")
    if library is None or _is_of_own_kind(takes[cache].annotation, library.DynamicCache):
        return inputs

    class NothingCached(library.DynamicCache):  # type: ignore[name-defined, misc]  # of a module found late
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

        def has_previous_state(self, *_: Any, **__: Any) -> bool:
            return False

        def get_conv_state(self, *_: Any, **__: Any) -> None:
            return None

        def update_conv_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
            return states

        get_recurrent_state, update_recurrent_state = get_conv_state, update_conv_state

    setattr(NothingCached, STANDS_FOR_NONE, True)
    return ExampleInputs(inputs.args, {**inputs.kwargs, cache: NothingCached()})


def _is_of_own_kind(annotation: Any, common: type) -> bool:
    """Whether a cache is said to be of a class that the common one does not stand for (xLSTM's states)."""
    kinds = [kind for kind in get_args(annotation) if isinstance(kind, type)]
    named = [kind for kind in kinds if kind.__module__.startswith("transformers.")]
    return not all(issubclass(common, kind) for kind in named)

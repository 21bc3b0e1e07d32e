"""A transformers model that keeps no cache of keys and values runs on fake tensors as it runs on data."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import Tensor, nn

from lowmem_patch.tracing.base_model import base_model
from lowmem_patch.tracing.inputs import ExampleInputs

# what transformers calls the cache of keys and values: since 5.24, and before
_CACHES = ("cache", "past_key_values")


def as_on_data(model: nn.Module, inputs: ExampleInputs) -> ExampleInputs:
    """Fake inputs that take the same way through a transformers model as data.

    A model without a cache of keys and values looks whether positions tell of packed sequences. On fake
    tensors, whose values nobody knows, it makes an attention mask for them, and repeats the keys and values
    of grouped heads (`transformers.masking_utils.find_packed_sequence_indices`). It does not look where it
    gets a cache: this one holds nothing.
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    takes = inspect.signature(base.forward).parameters
    cache = next((name for name in _CACHES if name in takes), None)
    given = {name for name, value in inputs.kwargs.items() if value is not None}
    # transformers' own checkpointing turns the cache off
    checkpointed = any(vars(module).get("gradient_checkpointing") for module in base.modules())
    asked = inputs.kwargs.get("use_cache", getattr(config, "use_cache", None))
    if (
        not (checkpointed or asked is False)
        or getattr(config, "is_encoder_decoder", False)
        or cache is None
        or given & {"attention_mask", "position_ids", *_CACHES}
    ):
        return inputs
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return inputs

    class NothingCached(library.DynamicCache):  # type: ignore[name-defined, misc]  # of a module found late
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    return ExampleInputs(inputs.args, {**inputs.kwargs, cache: NothingCached()})

"""What a prediction assumes, in words: the head of ``inspect``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_patch.memory import Training
    from lowmem_patch.tracing.inputs import ExampleInputs

LONGEST = 4096  # tokens, unless told
_NAMED = 8


def default_length(model: Any) -> int:
    """As many tokens as the model has positions for, at most ``LONGEST``."""
    from lowmem_patch.memory import most_positions

    return min(most_positions(model) or LONGEST, LONGEST)


def assumptions(
    model: Any,
    inputs: ExampleInputs,
    training: Training,
    *,
    batches: int,
    given_length: bool,
    solved: Collection[str] = (),
    fit: str | int | None = None,
) -> dict[str, str]:
    """Name to text, of what the prediction depends on; ``solved`` names the sizes that ``fit`` gave."""
    from lowmem_patch.memory import OPTIMIZERS, most_positions
    from lowmem_patch.tracing.base_model import has_dropouts, output_head

    largest = f"the largest within {fit}: --solve"
    found = {"inputs": f"{inputs} ({largest if 'batch' in solved else '--batch-size'})"}
    tokens = inputs.kwargs.get("input_ids")
    if tokens is not None:
        source = "--seq-len" if given_length else f"the model's, at most {LONGEST}; --seq-len"
        source = largest if "length" in solved else source
        length, positions = tokens.shape[1], most_positions(model)
        if length == positions and "length" in solved:
            source += "; the model has no more positions"
        if positions is not None and length > positions:
            source += f"; the model's positions reach {positions}"
        found["length"] = f"{length} tokens ({source})"
    found |= model_settings(model)
    if has_dropouts(model):
        found["dropout"] = (
            "as a GPU saves it: a byte for each element, no probabilities of attention"
        )
    found["optimizer"] = OPTIMIZERS[training.optimizer]
    if batches > 1:
        found["accumulation"] = f"{batches} batches a step, whose gradients are held between them"
    else:
        found["accumulation"] = "none: gradients are freed between steps (--accumulation)"
    own = output_head(model) is not None
    loss = "the model's own" if own else "the mean square of the output"
    found["loss"] = f"{loss}; the outputs are released before the backward, as trainers do"
    found["checkpointing"] = "the model's own, each layer" if training.checkpointing else "none"
    if training.gpus > 1:
        found["gpus"] = (
            f"{training.gpus}: FSDP2 shards model states block by block; bytes are of one"
        )
    return found


def model_settings(model: Any) -> dict[str, str]:
    """Name to text, of what a model was loaded with: dtypes, attention, adapters."""
    from lowmem_patch.planning.names import listed
    from lowmem_patch.tracing.base_model import base_model

    found = {"parameters": ", ".join(_dtypes(model))}
    attention = getattr(getattr(base_model(model), "config", None), "_attn_implementation", None)
    if attention is not None:
        found["attention"] = str(attention)
    for adapter in getattr(model, "peft_config", {}).values():
        targets = sorted(adapter.target_modules)
        found["adapters"] = f"LoRA, rank {adapter.r} (--lora-rank), on {listed(targets, _NAMED)}"
    return found


def _dtypes(model: Any) -> list[str]:
    """The dtypes of the parameters, with who has which where there are several."""
    frozen, trains = (
        dict.fromkeys(
            str(p.dtype).removeprefix("torch.")
            for p in model.parameters()
            if p.requires_grad is wanted
        )
        for wanted in (False, True)
    )
    if not frozen or list(frozen) == list(trains):
        return list(trains or frozen)
    return [
        f"{', '.join(frozen)} (frozen)",
        *([f"{', '.join(trains)} (trained)"] if trains else []),
    ]

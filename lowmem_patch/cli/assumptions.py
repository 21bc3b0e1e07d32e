"""What ``inspect`` is asked: what a step shall fit into, and in words what its prediction assumes."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from lowmem_patch.errors import ConfigError

if TYPE_CHECKING:
    from lowmem_patch.memory import Training
    from lowmem_patch.tracing.inputs import ExampleInputs

LONGEST = 4096  # tokens, unless told
_NAMED = 8
_NONE = re.compile(r"0+\s*([KMGT](i?B)?|B)?", re.IGNORECASE)  # other sizes are above 0


Solve = enum.StrEnum("Solve", ("batch", "length"))  # the size that is looked for


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of ``inspect`` that say of which step memory is predicted, and what it shall fit into."""

    batch_size: int
    length: int | None
    batches: int
    memory: str | None
    fit: str | int | None
    host_memory: str | None
    solve: Solve | None

    def check(self, checkpointing: bool) -> None:
        """Refuse options that need another one, or exclude one another."""
        if self.solve is not None and self.memory is None and self.fit is None:
            raise ConfigError("--solve needs --memory or --fit: say into how much it shall fit")
        if self.solve is not None and self.memory is not None and self.fit is not None:
            raise ConfigError(
                "--solve looks for a size within --fit or within --memory: leave one of the two out"
            )
        if self.fit is not None and checkpointing:
            raise ConfigError("--fit decides what runs again: leave --checkpointing out")
        if self.fit is None and self.host_memory is not None:
            raise ConfigError("--host-memory needs --fit, which offloads to it")

    def host(self, gpus: int) -> int:
        """Bytes of host memory for what the blocks on one of several GPUs offload."""
        from lowmem_patch.memory import parse_bytes
        from lowmem_patch.planning.budget import free_host_bytes

        if self.host_memory is None:
            return free_host_bytes() // gpus
        if _NONE.fullmatch(self.host_memory.strip()):
            return 0
        return parse_bytes(self.host_memory) // gpus

    def about_host(self, host: int, gpus: int) -> str:
        """What is assumed of host memory, in words."""
        from lowmem_patch.planning.names import human_bytes

        given = self.host_memory is not None
        source = (
            "--host-memory" if given else "half of what this machine has available; --host-memory"
        )
        shared = f" for each of {gpus} GPUs" if gpus > 1 else ""
        return f"{human_bytes(host)}{shared} for what blocks offload ({source})"


def default_length(model: Any) -> int:
    """As many tokens as the model has positions for, at most ``LONGEST``."""
    from lowmem_patch.memory import most_positions

    return min(most_positions(model) or LONGEST, LONGEST)


def assumptions(
    model: Any,
    inputs: ExampleInputs,
    training: Training,
    asked: Asked,
    solved: Collection[str],
    host: int,
) -> dict[str, str]:
    """Name to text, of what the prediction depends on; ``solved`` names the sizes that ``--fit`` gave, and
    ``host`` are bytes of host memory."""
    from lowmem_patch.memory import OPTIMIZERS, most_positions
    from lowmem_patch.tracing.base_model import has_dropouts, output_head

    largest = f"the largest within {asked.fit}: --solve"
    found = {"inputs": f"{inputs} ({largest if 'batch' in solved else '--batch-size'})"}
    tokens = inputs.kwargs.get("input_ids")
    if tokens is not None:
        source = "--seq-len" if asked.length else f"the model's, at most {LONGEST}; --seq-len"
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
    if asked.batches > 1:
        found["accumulation"] = (
            f"{asked.batches} batches a step, whose gradients are held between them"
        )
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
    if asked.fit is not None:
        found["host memory"] = asked.about_host(host, training.gpus)
    return found


def model_settings(model: Any) -> dict[str, str]:
    """Name to text, of what a model was loaded with: dtypes, attention, adapters."""
    from lowmem_patch.planning.names import listed
    from lowmem_patch.tracing.base_model import base_model

    found = {"parameters": _dtypes(model)}
    attention = getattr(getattr(base_model(model), "config", None), "_attn_implementation", None)
    if attention is not None:
        found["attention"] = str(attention)
    for adapter in getattr(model, "peft_config", {}).values():
        targets = sorted(adapter.target_modules)
        found["adapters"] = f"LoRA, rank {adapter.r} (--lora-rank), on {listed(targets, _NAMED)}"
    return found


def _dtypes(model: Any) -> str:
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
        return ", ".join(trains or frozen)
    named = {"frozen": frozen, "trained": trains}
    return ", ".join(f"{', '.join(dtypes)} ({name})" for name, dtypes in named.items() if dtypes)

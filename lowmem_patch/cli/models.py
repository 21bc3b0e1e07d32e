"""The model that a command line names, with the adapters that it asks for."""

from __future__ import annotations

from typing import Any

from lowmem_patch.cli.options import StoredDtype, torch_dtype
from lowmem_patch.errors import CheckpointError

_RANK = 8


def meta_model(name: str, revision: str | None, trusted: bool, dtype: StoredDtype) -> Any:
    """The model on the meta device, without weights.

    Raises:
        CheckpointError: the checkpoint is quantised, or there is none.
    """
    from lowmem_patch import checkpoint

    source = checkpoint.resolve(name, revision=revision, trust_remote_code=trusted, weights=False)
    if source.quantised:
        raise CheckpointError(f"{name} is quantised: inspect the full-precision checkpoint instead")
    return checkpoint.build_meta_model(source, torch_dtype(dtype))


def real_model(name: str, revision: str | None, trusted: bool, dtype: StoredDtype) -> Any:
    """The model with its weights, on the CPU.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    from lowmem_patch import checkpoint

    source = checkpoint.resolve(name, revision=revision, trust_remote_code=trusted)
    return checkpoint.load_model(source, torch_dtype(dtype))


def with_adapters(
    model: Any, targets: list[str] | None, rank: int | None, *, real: bool = False
) -> Any:
    """The model with LoRA on ``targets``, of rank 8 unless told; unchanged where they are None.

    Adapters are on the meta device, or hold random values where ``real``.
    """
    from lowmem_patch import checkpoint
    from lowmem_patch.profile import materialise

    if targets is None:
        return model
    adapted = checkpoint.add_lora(model, targets, rank=rank or _RANK)
    return materialise(adapted) if real else adapted

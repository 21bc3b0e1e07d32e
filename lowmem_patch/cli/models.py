"""The model that a command line names, with the adapters that it asks for; and which options do nothing for
that model."""

from __future__ import annotations

from typing import Any

from lowmem_patch.cli.options import StoredDtype, torch_dtype
from lowmem_patch.cli.runtime import print_note
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


def name_unused(
    model: Any, *, train: str, rank: int | None = None, length: int | None = None
) -> None:
    """Say on standard error that a rank without adapters, or a length without tokens, does nothing.

    Args:
        rank, length: as they were given; None where they were not.
    """
    if rank is not None and train == "full":
        print_note("--lora-rank does nothing here: with --train full there are no adapters")
    if length is not None and not _reads_tokens(model):
        print_note(f"--seq-len does nothing here: {type(model).__name__} reads no tokens")


def _reads_tokens(model: Any) -> bool:
    """Whether another length makes other inputs."""
    from lowmem_patch.tracing.example_inputs import make_example_inputs

    shorter, longer = (
        str(make_example_inputs(model, batch_size=1, sequence_length=n, device="meta"))
        for n in (8, 9)
    )
    return shorter != longer

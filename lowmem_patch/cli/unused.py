"""Options that were given and do nothing here: each is named."""

from __future__ import annotations

from typing import Any

from lowmem_patch.cli.runtime import print_note


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

"""What the scripts of these tests have in common: a model, its batches, and a file for what happened.

The models compute in float64, in which two trainings agree to the last digits or are different.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tests.life.distributed_models import SavedBytes

STEPS, ROWS, CLASSES = 3, 4, 5


def parse() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--fsdp2", action="store_true")
    return parser.parse_args()


def images(rank: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7 + rank)
    return [
        (
            torch.randn(ROWS, 3, 32, 32, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (ROWS,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def fit(model: Any, optimizer: Any, batches: Any, backward: Any = torch.Tensor.backward) -> Any:
    """A loop of one's own: the losses, and the bytes that the first forward saves."""
    losses, saved = [], 0
    for pixels, labels in batches:
        with SavedBytes(model) as bytes_of_step:
            output = model(pixels)
        saved = saved or bytes_of_step.count
        loss = torch.nn.functional.cross_entropy(getattr(output, "logits", output), labels)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, saved


def leave(arguments: Any, model: Any, losses: list[float], saved: int) -> None:
    """The result, for the test to read."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save({"losses": losses, "saved": saved, "weights": weights}, arguments.out)

"""The peak memory of training, predicted from fake tensors and arithmetic."""

from lowmem_patch.memory.predict import (
    Footprint,
    MemoryReport,
    largest_that_fits,
    most_positions,
    predict_memory,
)
from lowmem_patch.memory.standing import OPTIMIZERS, Standing, parse_bytes, standing_bytes
from lowmem_patch.memory.step import StepBytes, run_step, step_bytes

__all__ = [
    "OPTIMIZERS",
    "Footprint",
    "MemoryReport",
    "Standing",
    "StepBytes",
    "largest_that_fits",
    "most_positions",
    "parse_bytes",
    "predict_memory",
    "run_step",
    "standing_bytes",
    "step_bytes",
]

"""The peak memory of training, predicted from fake tensors and arithmetic."""

from lowmem_patch.memory.few_blocks import make_plans
from lowmem_patch.memory.model_states import Training, model_state_bytes, parse_bytes
from lowmem_patch.memory.optimizers import OPTIMIZERS
from lowmem_patch.memory.predict import (
    MemoryReport,
    largest_size,
    largest_that_fits,
    most_positions,
    predict_memory,
)
from lowmem_patch.memory.step import MOMENTS, run_step

__all__ = [
    "MOMENTS",
    "OPTIMIZERS",
    "MemoryReport",
    "Training",
    "largest_size",
    "largest_that_fits",
    "make_plans",
    "model_state_bytes",
    "most_positions",
    "parse_bytes",
    "predict_memory",
    "run_step",
]

"""Checkpoints: find a model, build or load it, and fold its norms into a stock checkpoint."""

from lowmem_patch.checkpoint.convert import ConvertResult, NormOutcome, convert
from lowmem_patch.checkpoint.load import add_lora, build_meta_model, load_model
from lowmem_patch.checkpoint.record import read_fold_steps
from lowmem_patch.checkpoint.selfcheck import SelfCheckError
from lowmem_patch.checkpoint.source import Source, resolve
from lowmem_patch.checkpoint.weights import stored_dtype

__all__ = [
    "ConvertResult",
    "NormOutcome",
    "SelfCheckError",
    "Source",
    "add_lora",
    "build_meta_model",
    "convert",
    "load_model",
    "read_fold_steps",
    "resolve",
    "stored_dtype",
]

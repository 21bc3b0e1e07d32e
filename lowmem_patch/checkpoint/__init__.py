"""Checkpoints: find a model, build or load it, and fold its norms into a stock checkpoint."""

from lowmem_patch.checkpoint.convert import convert as convert
from lowmem_patch.checkpoint.load import add_lora as add_lora
from lowmem_patch.checkpoint.load import build_meta_model as build_meta_model
from lowmem_patch.checkpoint.load import load_model as load_model
from lowmem_patch.checkpoint.record import read_fold_steps as read_fold_steps
from lowmem_patch.checkpoint.selfcheck import SelfCheckError as SelfCheckError
from lowmem_patch.checkpoint.source import Source as Source
from lowmem_patch.checkpoint.source import resolve as resolve
from lowmem_patch.checkpoint.weights import stored_dtype as stored_dtype

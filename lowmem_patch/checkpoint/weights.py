"""Map the tensors of a checkpoint, and refuse broken files."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowmem_patch.errors import CheckpointError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_DTYPES = frozenset((
    "BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2",
))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint, on the CPU as stored; a file is mapped, and read where a tensor is.

    Attributes:
        tensors: by name, in the order of the files.
        metadata: of the safetensors header.
        index_metadata: of the index of a sharded checkpoint.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    index_metadata: dict[str, Any]


def stored_dtype(folder: Path) -> torch.dtype:
    """The least precise floating-point dtype that the matrices of a checkpoint are stored in.

    Raises:
        CheckpointError: as in :func:`read_weights`.
    """
    tensors = read_weights(folder).tensors.values()
    known = [t.dtype for t in tensors if t.dim() > 1 and t.is_floating_point()]
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def read_weights(folder: Path) -> Weights:
    """The tensors of the safetensors files of a checkpoint, or of its pickle files (``weights_only=True``).

    Raises:
        CheckpointError: no weights, a missing shard, a corrupt or truncated file, or a pickle that
            holds more than tensors.
    """
    files, index = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for path in files:
        read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
        found, header = read(path)
        tensors.update(found)
        metadata.update(header)
    absent = [name for name in index.get("weight_map", {}) if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{folder}: the index lists {absent[0]}, which is in no shard ({len(absent)} such): "
            "download it again"
        )
    return Weights(tensors, metadata or {"format": "pt"}, index.get("metadata") or {})


def find_weights(folder: Path) -> Path | None:
    """The weight file of a checkpoint, or the index of its shards; None where it has neither."""
    names = (f"{file}{suffix}" for file in WEIGHT_FILES for suffix in ("", ".index.json"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_index(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The content of a shard index, and the names of the shards.

    Raises:
        CheckpointError: it is broken, or names files in other folders.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is broken ({error}): restore it from the source") from error
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(f"{path} names no shards beside it: restore it from the source")
    return index, names


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    found = find_weights(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} holds no weights: neither {' nor '.join(WEIGHT_FILES)}, whole or sharded"
        )
    if found.suffix != ".json":
        return [found], {}
    index, names = read_index(found)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]} is listed in {found.name} but absent "
            f"({len(missing)} of {len(names)} shards): download it again"
        )
    return [folder / name for name in names], index


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                stored = handle.get_slice(name).get_dtype()
                if stored not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: {name} has dtype {stored}, which is not supported"
                    )
                tensors[name] = handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is corrupt or truncated ({error}): download it again"
        ) from error
    return tensors, metadata


def _read_pickle(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is a pickle that holds more than tensors, and loading it could run code: "
            "get a safetensors checkpoint"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is corrupt, truncated or in the old pickle format: {error}"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise CheckpointError(f"{path} holds no plain state dict: get a safetensors checkpoint")
    return content, {}

"""Read the tensors of a checkpoint one by one, and refuse broken files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowmem_patch.errors import CheckpointError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        return self.numel * (dtype or self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint: described at once, read on demand.

    Attributes:
        tensors: name to description, in the order of the files.
        metadata: of the safetensors header.
        index_metadata: of the index of a sharded checkpoint.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    index_metadata: dict[str, Any]
    _read: Callable[[str], Tensor]

    def read(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU."""
        return self._read(name)


def stored_dtype(folder: Path) -> torch.dtype:
    """The least precise floating-point dtype that the matrices of a checkpoint are stored in.

    Raises:
        CheckpointError: as in :func:`open_weights`.
    """
    with open_weights(folder) as weights:
        matrices = [t.dtype for t in weights.tensors.values() if len(t.shape) > 1]
    known = [dtype for dtype in matrices if dtype.is_floating_point]
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """Open the safetensors files of a checkpoint, or its pickle files with ``weights_only=True``.

    Raises:
        CheckpointError: no weights, a missing shard, a corrupt or truncated file, or a pickle that
            holds more than tensors.
    """
    with contextlib.ExitStack() as stack:
        files, index = _weight_files(folder)
        if files[0].suffix == ".safetensors":
            yield _open_safetensors(files, index, stack)
        else:
            yield _open_pickles(files, index)


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


def _open_safetensors(
    files: list[Path], index: dict[str, Any], stack: contextlib.ExitStack
) -> Weights:
    tensors: dict[str, StoredTensor] = {}
    owners: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for path in files:
        try:
            handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            metadata.update(handle.metadata() or {})
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                part = handle.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: {name} has dtype {dtype}, which is not supported"
                    )
                tensors[name] = StoredTensor(tuple(part.get_shape()), _DTYPES[dtype])
                owners[name] = handle
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is corrupt or truncated ({error}): download it again"
            ) from error
    _compare_with_index(tensors, index, files[0].parent)

    def read(name: str) -> Tensor:
        tensor: Tensor = owners[name].get_tensor(name)
        return tensor

    return Weights(tensors, metadata or {"format": "pt"}, index.get("metadata") or {}, read)


def _open_pickles(files: list[Path], index: dict[str, Any]) -> Weights:
    loaded: dict[str, Tensor] = {}
    for path in files:
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
        if not isinstance(content, dict) or not all(
            isinstance(t, Tensor) for t in content.values()
        ):
            raise CheckpointError(f"{path} holds no plain state dict: get a safetensors checkpoint")
        loaded.update(content)
    tensors = {name: StoredTensor(tuple(t.shape), t.dtype) for name, t in loaded.items()}
    _compare_with_index(tensors, index, files[0].parent)
    return Weights(tensors, {"format": "pt"}, index.get("metadata") or {}, loaded.__getitem__)


def _compare_with_index(
    tensors: dict[str, StoredTensor], index: dict[str, Any], folder: Path
) -> None:
    absent = [name for name in index.get("weight_map", {}) if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{folder}: the index lists {absent[0]}, which is in no shard ({len(absent)} such): "
            "download it again"
        )

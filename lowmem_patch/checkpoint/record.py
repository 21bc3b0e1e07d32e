"""The description of a converted checkpoint: lowmem_patch.json, its model card, copied files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import yaml

from lowmem_patch.checkpoint.source import Source
from lowmem_patch.errors import CheckpointError
from lowmem_patch.strategies.fold_weights import FoldStep
from lowmem_patch.tracing.consumers import LinearRef

RECORD_NAME = "lowmem_patch.json"
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe"}
_LEFT_BEHIND = {RECORD_NAME, "config.json", "README.md", "trainer_state.json"}


def _version() -> str:
    try:
        return metadata.version("lowmem-patch")
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"


def write_record(
    folder: Path,
    source: Source,
    steps: Sequence[FoldStep],
    unfolded: Mapping[str, str],
    dtype: torch.dtype | None,
) -> None:
    """Write the record: the folds, the norms left as they are with the reasons, source and version."""
    record = {
        "format": 1,
        "lowmem_patch": _version(),
        "source": source.name,
        "revision": source.revision,
        "library": source.library,
        "dtype": str(dtype).removeprefix("torch.") if dtype else "as stored",
        "folded": [dataclasses.asdict(step) for step in steps],
        "kept": dict(unfolded),
    }
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_fold_steps(folder: Path) -> tuple[FoldStep, ...]:
    """The folds of a converted checkpoint; none for any other checkpoint.

    Raises:
        CheckpointError: its lowmem_patch.json is broken.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        return ()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return tuple(
            FoldStep(
                **{**step, "linears": tuple(LinearRef(**linear) for linear in step["linears"])}
            )
            for step in record["folded"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is broken ({error}): convert the original again") from error


def write_card(folder: Path, source: Source, steps: Sequence[FoldStep]) -> None:
    """Write a short model card with the licence, the language and the name of the source."""
    header: dict[str, Any] = {}
    if source.folder is not None and (source.folder / "README.md").is_file():
        # a source's card may hold any YAML; without a readable header there is nothing to keep
        with contextlib.suppress(ValueError, yaml.YAMLError, OSError):
            header = dict(huggingface_hub.metadata_load(source.folder / "README.md") or {})
    copied = ("license", "license_name", "license_link", "language")
    fields: dict[str, Any] = {key: header[key] for key in copied if key in header}
    if source.repository is not None:
        fields["base_model"] = source.repository
    fields["library_name"] = source.library
    origin = Path(source.name).name if source.revision is None else source.name
    text = (
        f"---\n{yaml.safe_dump(fields, sort_keys=True)}---\n\n# {origin}, norms folded\n\n"
        f"The same function as `{origin}`: gamma and beta of {len(steps)} norms were folded into the\n"
        f"Linears that read them, and these norms are identities now. Stock {source.library} loads it.\n"
        f"Written by `lowmem-patch convert`; `{RECORD_NAME}` lists every folded norm.\n"
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def copy_description(source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy the config, tokenizer, processor, generation config, chat templates and licence."""
    origin = source.files
    for path in _description_files(origin, with_code="auto_map" in source.config):
        shutil.copyfile(path, folder / path.name)
    for name in _description_folders(origin):
        shutil.copytree(origin / name, folder / name)
    config = dict(source.config)
    if dtype is None or source.library == "timm":
        shutil.copyfile(origin / "config.json", folder / "config.json")
        return
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _description_files(origin: Path, *, with_code: bool) -> list[Path]:
    suffixes = _SUFFIXES | ({".py"} if with_code else set())
    return [
        path
        for path in sorted(origin.iterdir())
        if path.is_file()
        and path.name not in _LEFT_BEHIND
        and not path.name.endswith(".index.json")
        and (path.suffix in suffixes or path.name.upper().startswith(("LICENSE", "NOTICE")))
    ]


def _description_folders(origin: Path) -> list[str]:
    folders = ["additional_chat_templates"]
    modules = origin / "modules.json"  # sentence-transformers: the layers behind the transformer
    if modules.is_file():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            folders += [
                str(entry.get("path", ""))
                for entry in json.loads(modules.read_text(encoding="utf-8"))
            ]
    return [
        name for name in folders if name and Path(name).name == name and (origin / name).is_dir()
    ]

"""Where a model comes from: a local folder, a hub repository or a timm name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lowmem_patch.checkpoint.weights import WEIGHT_FILES, find_weights, read_index
from lowmem_patch.config import did_you_mean
from lowmem_patch.errors import CheckpointError

# The small files of a hub repository: the description of the model, without its weights.
_DESCRIPTION = [
    "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "LICENSE*", "NOTICE*", "*.tiktoken",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that was found; only its description was read.

    Attributes:
        name: the model as the user named it.
        folder: of its files; None for a timm name whose weights were not asked for.
        library: the library that builds the model.
        revision: the commit that a hub repository was read at.
        config: the content of config.json.
        trust_remote_code: whether Python files of the checkpoint may run.
        repository: that of the hub which holds its files, where it came from there.
    """

    name: str
    folder: Path | None
    library: Literal["transformers", "timm"]
    revision: str | None
    config: dict[str, Any]
    trust_remote_code: bool = False
    repository: str | None = None

    @property
    def files(self) -> Path:
        """The folder.

        Raises:
            CheckpointError: the source was resolved without its files.
        """
        if self.folder is None:
            raise CheckpointError(f"{self.name} was resolved without its files")
        return self.folder

    @property
    def quantised(self) -> bool:
        return bool(self.config.get("quantization_config"))


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> Source:
    """Find a model; files that are not in the hub's cache are downloaded (``HF_HUB_OFFLINE`` is honoured).

    Args:
        model: a folder, ``org/name``, ``hf://org/name@revision``, ``timm/name`` or a timm name.
        revision: branch, tag or commit of a hub repository.
        trust_remote_code: whether Python files of the checkpoint may run.
        weights: False downloads no weights, and a timm name then needs no network at all.

    Raises:
        CheckpointError: there is no such model, it is gated, or its config.json is missing or broken.
    """
    name = str(model)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(name, folder, None, trust_remote_code)
    if folder.is_file():
        raise CheckpointError(
            f"{name} is a file: give the folder that holds it and its config.json"
        )
    repository, _, tag = name.removeprefix("hf://").removeprefix("hf-hub:").partition("@")
    revision = revision or tag or None
    if (
        isinstance(model, Path)
        or name.startswith(("/", "./", "../", "~"))
        or repository.count("/") > 1
    ):
        raise CheckpointError(f"{name}: there is no such folder")
    timm_name = _timm_name(repository)
    if timm_name is not None:
        if not weights:
            return Source(name, None, "timm", None, {"architecture": timm_name}, trust_remote_code)
        repository = _timm_repository(timm_name)
    return _from_hub(name, repository, revision, trust_remote_code, weights)


def _from_folder(name: str, folder: Path, revision: str | None, trust: bool) -> Source:
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{name} holds an adapter, and no model: give its base ({_base_of(folder)}), or load both "
                "with PEFT, merge them (merge_and_unload), and give the folder that save_pretrained wrote"
            )
        raise CheckpointError(
            f"{name} has no config.json: give a transformers or timm checkpoint folder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}): restore it from the source"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object: restore it from the source")
    is_timm = "architecture" in config and "model_type" not in config
    if not is_timm and "model_type" not in config and "auto_map" not in config:
        raise CheckpointError(
            f"{path} names neither a model_type (transformers) nor an architecture (timm): "
            "give a transformers or timm checkpoint"
        )
    return Source(name, folder, "timm" if is_timm else "transformers", revision, config, trust)


def _base_of(folder: Path) -> str:
    """The base model that an adapter's file names."""
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return str(found.get("base_model_name_or_path") or "which its file does not name")
    except (OSError, ValueError, AttributeError):
        return "which its file does not name"


def _timm_name(repository: str) -> str | None:
    """The timm registry's name behind ``timm/name`` or ``name``, or None when it is none."""
    name = repository.removeprefix("timm/")
    if "/" in name:
        return None
    import timm  # only here: its import takes a second

    return name if timm.is_model(name.partition(".")[0]) else None


def _timm_repository(name: str) -> str:
    import timm

    try:
        config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"timm has no weights for {name}: see timm.list_pretrained()"
        ) from error
    if config is None or not config.hf_hub_id:
        raise CheckpointError(f"timm has no hub weights for {name}: see timm.list_pretrained()")
    return str(config.hf_hub_id)


def _from_hub(
    name: str, repository: str, revision: str | None, trust: bool, weights: bool
) -> Source:
    folder = _snapshot(name, repository, revision, _DESCRIPTION)
    if weights:
        _download_weights(name, repository, revision, folder)
    commit = folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision
    return dataclasses.replace(_from_folder(name, folder, commit, trust), repository=repository)


def _download_weights(name: str, repository: str, revision: str | None, folder: Path) -> None:
    found = find_weights(folder)
    if found is None:
        for file in WEIGHT_FILES:
            _snapshot(name, repository, revision, [file])
            if (folder / file).is_file():
                return
    elif found.suffix == ".json":
        _snapshot(name, repository, revision, read_index(found)[1])


def _snapshot(name: str, repository: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=patterns
            )
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its terms on https://huggingface.co/{repository} "
            "and run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name} has no revision {revision!r}: see its branches and tags on the hub"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(f"{name} is neither a folder nor a hub id (org/name)") from error
    except (OfflineModeIsEnabled, EntryNotFoundError) as error:
        raise CheckpointError(_unreachable(name)) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name} is neither a folder nor a model on the hub (or it is private: run `hf auth login`)"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"{name} could not be downloaded: {first_line(error)}") from error


def _meant(name: str) -> str:
    """A question for the name of timm that is spelt most like this one."""
    import timm

    # names of timm are much alike
    return did_you_mean([name.removeprefix("timm/")], timm.list_models(), cutoff=0.8)


def _unreachable(name: str) -> str:
    missing = (
        f"{name} is neither a folder, nor in the local hub cache, nor a model name that timm knows"
        f"{_meant(name)}"
    )
    if _timm_name(name) is not None:
        missing = f"the weights of {name}, whose name timm knows, are not in the local hub cache"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return f"{missing}, and HF_HUB_OFFLINE is set: unset it to download"
    return f"{missing}, and the hub cannot be reached: check the network"


def first_line(error: BaseException) -> str:
    """What an error says; with the second line, where the first one leads to it."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])

"""Fold the norms of a checkpoint into its Linears, one tensor at a time, into a stock checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lowmem_patch.api import plan_patch
from lowmem_patch.checkpoint.compare import TensorCheck
from lowmem_patch.checkpoint.load import build_meta_model, refuse_quantised, stored_names
from lowmem_patch.checkpoint.record import copy_description, write_card, write_record
from lowmem_patch.checkpoint.selfcheck import SelfCheckError, self_check
from lowmem_patch.checkpoint.source import Source
from lowmem_patch.checkpoint.stage import check_output, check_space, staged_folder
from lowmem_patch.checkpoint.weights import Weights, open_weights
from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import CheckpointError
from lowmem_patch.planning.report import Site
from lowmem_patch.strategies.fold_weights import FoldStep, fold_tensors, identity_affine
from lowmem_patch.tracing.example_inputs import make_example_inputs

__all__ = ["ConvertResult", "NormOutcome", "SelfCheckError", "convert"]

_FOLD_ONLY = PatchConfig(norms="fold", activations="keep", name="convert")
# config, tokenizer and record beside the weights
_ROOM_FOR_THE_REST = 64_000_000

Progress = Callable[[str, int, int], None]
Edit = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class NormOutcome:
    """What happens to one norm: folded into Linears, or left alone for a reason."""

    norm: str
    folded: bool
    reason: str
    linears: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ConvertResult:
    """What ``convert`` did, or with ``dry_run`` would do.

    Attributes:
        out: the checkpoint that was written; None for a dry run, or when nothing can be folded.
        files: weight files, by name.
        bytes: of all tensors.
        checks: outputs of the converted model against the source's; empty when not checked.
        notes: what a user should know, such as why the check was left out.
    """

    source: str
    revision: str | None
    out: str | None
    dry_run: bool
    norms: tuple[NormOutcome, ...]
    files: tuple[str, ...] = ()
    bytes: int = 0
    checks: tuple[TensorCheck, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def folded(self) -> tuple[NormOutcome, ...]:
        return tuple(norm for norm in self.norms if norm.folded)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "folded": len(self.folded)}

    def __str__(self) -> str:
        lines = [f"{norm.norm}: {norm.reason}" for norm in self.norms]
        lines.append(
            f"{len(self.folded)} of {len(self.norms)} norms folded, written to {self.out or 'nowhere'}"
        )
        return "\n".join([*lines, *self.notes])


def convert(
    source: Source,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    dry_run: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write ``source`` as a stock checkpoint whose foldable norms are identities.

    Weights are read one tensor at a time and written shard by shard, so memory stays near one shard.
    ``out`` is written aside and renamed at the end; when nothing can be folded it is not written.

    Args:
        dtype: of the floating-point tensors; None keeps each as stored.
        max_shard_size: such as ``"5GB"``; timm checkpoints are always one file.
        dry_run: plan only; without local weights, whether a beta is 0 is not known.
        check: compare outputs of the written checkpoint with the source's before it is put in place.

    Raises:
        CheckpointError: the source is broken, quantised or of an unknown form; ``out`` is in use; there
            is no space.
        SelfCheckError: the written checkpoint computed something else; it was removed.
        TraceError: the model cannot be run to see who reads its norms.
    """
    out = Path(out).expanduser()
    refuse_quantised(source)
    check_output(out, source.folder, overwrite=overwrite)
    shard_bytes = _parse_size(max_shard_size)
    _tell(progress, "plan", 0, 1)
    model = build_meta_model(source)
    inputs = make_example_inputs(model, batch_size=1, sequence_length=8)
    sites = [
        site
        for site in plan_patch(model, _FOLD_ONLY, example_inputs=inputs).sites
        if _is_norm(site)
    ]
    outcomes = {site.name: _outcome(site) for site in sites}
    planned = [site.fold for site in sites if site.strategy == "fold" and site.fold is not None]
    _tell(progress, "plan", 1, 1)
    if source.folder is None or (dry_run and not _has_weights(source.folder)):
        note = "no weights were read: a norm that is already an identity counts as folded here"
        return ConvertResult(
            source.name, source.revision, None, True, tuple(outcomes.values()), notes=(note,)
        )
    with open_weights(source.folder) as weights:
        names = stored_names(model, list(weights.tensors))
        steps = _foldable(planned, names, weights, model, outcomes)
        notes = _unknown_tensors(source, weights, names)
        norms = tuple(outcomes.values())
        size = sum(
            tensor.bytes(_target(tensor.dtype, dtype)) for tensor in weights.tensors.values()
        )
        if dry_run or not steps:
            return ConvertResult(
                source.name, source.revision, None, dry_run, norms, bytes=size, notes=notes
            )
        check_space(_existing(out.parent), size + _ROOM_FOR_THE_REST)
        edits = _edits(steps, names, weights)
        with staged_folder(out) as folder:
            limit = shard_bytes if source.library == "transformers" else size + 1
            files = _write_weights(folder, weights, edits, dtype, limit, progress)
            copy_description(source, folder, dtype)
            kept = {norm.norm: norm.reason for norm in norms if not norm.folded}
            write_record(folder, source, steps, kept, dtype)
            write_card(folder, source, steps)
            checks: tuple[TensorCheck, ...] = ()
            if check:
                _tell(progress, "self-check", 0, 1)
                checks, remarks = self_check(source, folder, dtype)
                notes += remarks
                _tell(progress, "self-check", 1, 1)
            else:
                notes += ("the written checkpoint was not compared with the source (--no-check)",)
    return ConvertResult(
        source.name, source.revision, str(out), False, norms, files, size, checks, notes
    )


def _is_norm(site: Site) -> bool:
    return site.kind.endswith("norm") or (site.kind == "other" and "norm" in site.name.lower())


def _outcome(site: Site) -> NormOutcome:
    fold = site.fold if site.strategy == "fold" else None
    linears = tuple(linear.module for linear in fold.linears) if fold is not None else ()
    return NormOutcome(
        site.name, fold is not None, site.reason.removeprefix("cannot fold: "), linears
    )


def _has_weights(folder: Path) -> bool:
    return any(
        (folder / name).is_file()
        for stem in ("model.safetensors", "pytorch_model.bin")
        for name in (stem, f"{stem}.index.json")
    )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())


def _parse_size(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    try:
        size = int(float(text.strip()[:-2]) * units[text.strip()[-2:].upper()])
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"--max-shard-size {text!r} is no size such as 5GB or 500MB"
        ) from error
    if size <= 0:
        raise CheckpointError(f"--max-shard-size {text!r} must be more than 0")
    return size


def _target(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and stored.is_floating_point else stored


def _keys(step: FoldStep) -> list[str]:
    linears = [name for linear in step.linears for name in (linear.weight, linear.bias)]
    return [name for name in (step.weight, step.bias, *linears) if name is not None]


def _foldable(
    planned: Sequence[FoldStep],
    names: dict[str, str],
    weights: Weights,
    model: Any,
    outcomes: dict[str, NormOutcome],
) -> list[FoldStep]:
    """The steps that the stored values allow; the plan on the meta device saw no values."""
    own = model.state_dict()
    steps = []
    for step in planned:
        for key in _keys(step):
            if key not in names:
                raise CheckpointError(
                    f"the checkpoint does not store {key} by itself, as {type(model).__name__} reads it: "
                    "load and save it again with its library, or use patch_model after loading"
                )
            stored = weights.tensors[names[key]].shape
            if stored != tuple(own[key].shape):
                raise CheckpointError(
                    f"{names[key]} is stored as {stored}, and {type(model).__name__} reads "
                    f"{tuple(own[key].shape)}: does config.json belong to these weights?"
                )
        gamma, beta = (
            weights.read(names[key]) if key else None for key in (step.weight, step.bias)
        )
        refusal = None
        if identity_affine(gamma, beta, step.weight_offset):
            refusal = "already an identity"
        elif beta is not None and bool((beta != 0).any()):
            bare = next((linear.module for linear in step.linears if linear.bias is None), None)
            refusal = None if bare is None else f"beta is not 0 and {bare} has no bias to take it"
        if refusal is None:
            steps.append(step)
        else:
            outcomes[step.norm] = NormOutcome(step.norm, False, refusal)
    return steps


def _unknown_tensors(source: Source, weights: Weights, names: dict[str, str]) -> tuple[str, ...]:
    left = set(weights.tensors) - set(names.values())
    strangers = sorted(name for name in left if weights.tensors[name].dtype.is_floating_point)
    if not strangers:
        return ()
    return (
        f"{len(strangers)} tensors, such as {strangers[0]}, are not read one to one by the class of "
        f"{source.name}: copied as stored",
    )


@dataclasses.dataclass(frozen=True)
class _Fill:
    value: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, self.value)


@dataclasses.dataclass(frozen=True)
class _FoldWeight:
    gamma: Tensor | None
    weight_offset: float
    transposed: bool

    def __call__(self, weight: Tensor) -> Tensor:
        wide = weight.double()
        return fold_tensors(
            wide, None, self.gamma, None, self.weight_offset, transposed=self.transposed
        )[0]


@dataclasses.dataclass(frozen=True)
class _FoldBias:
    """The bias takes W beta, with W as stored: unfolded."""

    beta: Tensor
    read_weight: Callable[[], Tensor]
    transposed: bool

    def __call__(self, bias: Tensor) -> Tensor:
        weight = self.read_weight().double()
        folded = fold_tensors(weight, bias.double(), None, self.beta, transposed=self.transposed)[1]
        assert folded is not None
        return folded


def _edits(steps: Sequence[FoldStep], names: dict[str, str], weights: Weights) -> dict[str, Edit]:
    """What is done to each stored tensor; each in float64, to be rounded once."""
    edits: dict[str, Edit] = {}

    def add(key: str, edit: Edit) -> None:
        if names[key] in edits:
            raise CheckpointError(f"{names[key]} would be folded twice: please report this model")
        edits[names[key]] = edit

    for step in steps:
        gamma, beta = (
            weights.read(names[key]) if key else None for key in (step.weight, step.bias)
        )
        if step.weight is not None:
            add(step.weight, _Fill(1.0 - step.weight_offset))
        if step.bias is not None:
            add(step.bias, _Fill(0.0))
        for linear in step.linears:
            stored = names[linear.weight]
            add(linear.weight, _FoldWeight(gamma, step.weight_offset, linear.transposed))
            if linear.bias is not None and beta is not None:
                add(linear.bias, _FoldBias(beta, partial(weights.read, stored), linear.transposed))
    return edits


def _write_weights(
    folder: Path,
    weights: Weights,
    edits: dict[str, Edit],
    dtype: torch.dtype | None,
    limit: int,
    progress: Progress | None,
) -> tuple[str, ...]:
    described = {
        name: torch.empty(tensor.shape, dtype=_target(tensor.dtype, dtype), device="meta")
        for name, tensor in weights.tensors.items()
    }
    split = huggingface_hub.split_torch_state_dict_into_shards(
        described, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    done = 0
    for file, names in split.filename_to_tensors.items():
        shard = {}
        for name in names:
            shard[name] = _write_one(name, weights, edits.get(name), described[name].dtype)
            done += 1
            _tell(progress, f"write {file}", done, len(described))
        try:
            save_file(shard, folder / file, metadata=weights.metadata)
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} could not be written ({error}): is the disk full?"
            ) from error
    if split.is_sharded:
        index = {
            "metadata": {**weights.index_metadata, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tuple(split.filename_to_tensors)


def _write_one(name: str, weights: Weights, edit: Edit | None, dtype: torch.dtype) -> Tensor:
    tensor = weights.read(name)
    result = (tensor if edit is None else edit(tensor)).to(dtype).contiguous()
    if edit is not None and not bool(torch.isfinite(result).all()):
        raise CheckpointError(
            f"{name} is not finite in {dtype} once gamma is folded in: choose a wider --dtype"
        )
    # pickled tensors may share memory with others, which safetensors refuses
    return (
        result.clone()
        if result.untyped_storage().nbytes() != result.nbytes or result is tensor
        else result
    )


def _tell(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)

"""Fold the norms of a checkpoint into its Linears, one tensor at a time, into a stock checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
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
from lowmem_patch.checkpoint.selfcheck import self_check
from lowmem_patch.checkpoint.source import Source
from lowmem_patch.checkpoint.stage import check_output, check_space, staged_folder
from lowmem_patch.checkpoint.weights import Weights, find_weights, read_weights
from lowmem_patch.config import PatchConfig
from lowmem_patch.constants import NormSettings
from lowmem_patch.errors import CheckpointError, ConfigError
from lowmem_patch.memory import parse_bytes
from lowmem_patch.planning.report import Site
from lowmem_patch.strategies.fold_weights import FoldStep, fold_tensors, identity_affine
from lowmem_patch.tracing.example_inputs import make_example_inputs

_FOLD_ONLY = PatchConfig(norms="fold", activations="keep", name="convert")
# config, tokenizer and record beside the weights
_ROOM_FOR_THE_REST = 64_000_000
_UNREAD = ("no weights were read: a norm that is already an identity counts as folded here",)
_UNCHECKED = ("the written checkpoint was not compared with the source (--no-check)",)

# Takes the tensor as stored; returns one of the same shape in float64, which the caller rounds once.
Edit = Callable[[Tensor], Tensor]
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class NormOutcome:
    """One norm: folded into Linears, or skipped for a reason."""

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
        notes: remarks for the user, such as the reason for a missing check.
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

    @property
    def unfolded(self) -> dict[str, str]:
        return {norm.norm: norm.reason for norm in self.norms if not norm.folded}

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
        max_shard_size: such as ``"5GB"``, ``"5GiB"`` or ``"5g"``; timm checkpoints are always one file.
        dry_run: plan only; without local weights, whether a beta is 0 is not known.
        check: compare outputs of the written checkpoint with the source's before it is put in place.

    Raises:
        CheckpointError: the source is broken, quantised or of an unknown form; ``out`` is in use; there
            is no space.
        SelfCheckError: the written checkpoint computed something else; it was removed.
        TraceError: the model cannot be run to see who reads its norms.
    """
    out = Path(out).expanduser()
    tell = progress or (lambda *_: None)
    refuse_quantised(source)
    check_output(out, source.folder, overwrite=overwrite)
    shard_bytes = _shard_bytes(max_shard_size)
    tell("plan", 0, 1)
    model, planned, outcomes = _plan(source)
    tell("plan", 1, 1)
    result = ConvertResult(source.name, source.revision, None, dry_run, tuple(outcomes.values()))
    if source.folder is None or (dry_run and find_weights(source.folder) is None):
        return dataclasses.replace(result, dry_run=True, notes=_UNREAD)
    weights = read_weights(source.folder)
    names = stored_names(model, list(weights.tensors))
    stored = {key: weights.tensors[name] for key, name in names.items()}
    steps = _foldable(planned, names, stored, model, outcomes)
    described = {name: _described(tensor, dtype) for name, tensor in weights.tensors.items()}
    size = sum(tensor.nbytes for tensor in described.values())
    notes, norms = _unknown_tensors(source, weights, names), tuple(outcomes.values())
    result = dataclasses.replace(result, norms=norms, bytes=size, notes=notes)
    if dry_run or not steps:
        return result
    check_space(out.parent, size + _ROOM_FOR_THE_REST)
    limit = shard_bytes if source.library == "transformers" else size + 1
    with staged_folder(out) as folder:
        edits = _fold_edits(steps, names, stored)
        files = _write_weights(folder, weights, edits, described, limit, tell)
        copy_description(source, folder, dtype)
        write_record(folder, source, steps, result.unfolded, dtype)
        write_card(folder, source, steps)
        checks, remarks = _checked(source, folder, dtype, tell) if check else ((), _UNCHECKED)
    notes += remarks
    return dataclasses.replace(result, out=str(out), files=files, checks=checks, notes=notes)


def _plan(source: Source) -> tuple[Any, list[FoldStep], dict[str, NormOutcome]]:
    """The model on the meta device, the folds that its structure allows, and every norm's outcome."""
    model = build_meta_model(source)
    inputs = make_example_inputs(model, batch_size=1, sequence_length=8)
    sites = plan_patch(model, _FOLD_ONLY, example_inputs=inputs).sites
    norms = [
        site
        for site in sites
        if site.kind.endswith("norm") or (site.kind == "other" and "norm" in site.name.lower())
    ]
    outcomes = {site.name: _outcome(site) for site in norms}
    return model, [site.fold for site in norms if site.fold is not None], outcomes


def _checked(
    source: Source, folder: Path, dtype: torch.dtype | None, tell: Progress
) -> tuple[tuple[TensorCheck, ...], tuple[str, ...]]:
    tell("self-check", 0, 1)
    found = self_check(source, folder, dtype)
    tell("self-check", 1, 1)
    return found


def _outcome(site: Site) -> NormOutcome:
    linears = () if site.fold is None else tuple(linear.module for linear in site.fold.linears)
    reason = site.reason
    if site.strategy == "share":  # how it would be shared is no answer here
        reason = reason.partition("not folded: ")[2] or reason
    return NormOutcome(site.name, site.fold is not None, reason, linears)


def _shard_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise CheckpointError(f"--max-shard-size: {error}") from error


def _described(stored: Tensor, wanted: torch.dtype | None) -> Tensor:
    """The tensor that is written, without data."""
    dtype = wanted if wanted is not None and stored.is_floating_point() else stored.dtype
    return torch.empty(stored.shape, dtype=dtype, device="meta")


def _keys(step: FoldStep) -> list[str]:
    linears = [name for linear in step.linears for name in (linear.weight, linear.bias)]
    return [name for name in (step.weight, step.bias, *linears) if name is not None]


def _foldable(
    planned: Sequence[FoldStep],
    names: dict[str, str],
    stored: dict[str, Tensor],
    model: Any,
    outcomes: dict[str, NormOutcome],
) -> list[FoldStep]:
    """The steps that the stored values allow; the plan on the meta device saw no values.

    ``outcomes`` gets the reason of each other step.
    """
    _check_stored([key for step in planned for key in _keys(step)], names, stored, model)
    steps = []
    for step in planned:
        refusal = _fold_refusal(step, stored)
        if refusal is None:
            steps.append(step)
        else:
            outcomes[step.norm] = NormOutcome(step.norm, False, refusal)
    return steps


def _check_stored(
    keys: Sequence[str], names: dict[str, str], stored: dict[str, Tensor], model: Any
) -> None:
    own = model.state_dict()
    for key in keys:
        if key not in stored:
            raise CheckpointError(
                f"the checkpoint does not store {key} by itself, as {type(model).__name__} reads it: "
                "load and save it again with its library, or use patch_model after loading"
            )
        if stored[key].shape != own[key].shape:
            raise CheckpointError(
                f"{names[key]} is stored as {tuple(stored[key].shape)}, and {type(model).__name__} reads "
                f"{tuple(own[key].shape)}: does config.json belong to these weights?"
            )


def _unknown_tensors(source: Source, weights: Weights, names: dict[str, str]) -> tuple[str, ...]:
    left = set(weights.tensors) - set(names.values())
    unknown = sorted(name for name in left if weights.tensors[name].is_floating_point())
    if not unknown:
        return ()
    return (
        f"{len(unknown)} tensors, such as {unknown[0]}, are not read one to one by the class of "
        f"{source.name}: copied as stored",
    )


def _fold_refusal(step: FoldStep, stored: Mapping[str, Tensor]) -> str | None:
    """Why the stored values cannot be folded, or None; ``stored`` as in :func:`_fold_edits`."""
    gamma, beta = _affine(step, stored)
    if identity_affine(gamma, beta, step.settings):
        return "already an identity"
    if beta is None or not bool((beta != 0).any()):
        return None
    without_bias = next((linear.module for linear in step.linears if linear.bias is None), None)
    if without_bias is None:
        return None
    return f"beta is not 0 and {without_bias} has no bias to take it"


def _affine(step: FoldStep, stored: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """gamma and beta, each None where the norm has none."""
    return stored.get(step.weight or ""), stored.get(step.bias or "")


def _fold_edits(
    steps: Sequence[FoldStep], names: Mapping[str, str], stored: Mapping[str, Tensor]
) -> dict[str, Edit]:
    """Edits by the names of the stored tensors; other tensors are copied.

    Args:
        names: state-dict entry to the stored tensor's name, for every parameter of ``steps``.
        stored: state-dict entry to the stored tensor.

    Raises:
        CheckpointError: two folds change one tensor.
    """
    edits: dict[str, Edit] = {}

    def add(key: str, edit: Edit) -> None:
        if names[key] in edits:
            raise CheckpointError(f"{names[key]} would be folded twice: please report this model")
        edits[names[key]] = edit

    for step in steps:
        gamma, beta = _affine(step, stored)
        if step.weight is not None:
            add(step.weight, partial(torch.full_like, fill_value=step.settings.identity_weight))
        if step.bias is not None:
            add(step.bias, torch.zeros_like)
        for linear in step.linears:
            add(linear.weight, partial(_fold_weight, gamma, step.settings, linear.transposed))
            if linear.bias is not None and beta is not None:
                weight = stored[linear.weight]
                add(linear.bias, partial(_fold_bias, beta, weight, linear.transposed))
    return edits


def _fold_weight(
    gamma: Tensor | None, settings: NormSettings, transposed: bool, weight: Tensor
) -> Tensor:
    return fold_tensors(weight.double(), None, gamma, None, settings, transposed=transposed)[0]


def _fold_bias(beta: Tensor, weight: Tensor, transposed: bool, bias: Tensor) -> Tensor:
    """Adds W beta to the bias, with W as stored (not folded)."""
    folded = fold_tensors(weight.double(), bias.double(), None, beta, transposed=transposed)[1]
    assert folded is not None
    return folded


def _write_weights(
    folder: Path,
    weights: Weights,
    edits: Mapping[str, Edit],
    described: dict[str, Tensor],
    max_shard_size: int,
    tell: Progress,
) -> tuple[str, ...]:
    """Write all tensors, shard by shard; returns the names of the files."""
    split = huggingface_hub.split_torch_state_dict_into_shards(
        described, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    done = itertools.count(1)
    for file, names in split.filename_to_tensors.items():
        shard = {}
        for name in names:
            stored, dtype = weights.tensors[name], described[name].dtype
            shard[name] = _converted(name, stored, edits.get(name), dtype)
            tell(f"write {file}", next(done), len(described))
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


def _converted(name: str, tensor: Tensor, edit: Edit | None, dtype: torch.dtype) -> Tensor:
    result = (tensor if edit is None else edit(tensor)).to(dtype).contiguous()
    if edit is not None and not bool(torch.isfinite(result).all()):
        raise CheckpointError(
            f"{name} is not finite in {dtype} once gamma is folded in: choose a wider --dtype"
        )
    # pickled tensors may share memory with others, which safetensors refuses
    shared = result is tensor or result.untyped_storage().nbytes() != result.nbytes
    return result.clone() if shared else result

"""Arguments and options that several commands share, and the models that they name."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli.runtime import print_note
from lowmem_patch.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

_RANK = 8

Dtype = enum.StrEnum("Dtype", ("float32", "bfloat16", "float16"))
StoredDtype = enum.StrEnum("StoredDtype", ("auto", "float32", "bfloat16", "float16"))
Device = enum.StrEnum("Device", ("auto", "cpu", "cuda"))

TrainOption = Annotated[
    str,
    typer.Option(help="What trains: full, lora, lora:q_proj,v_proj, qlora or qlora:q_proj,v_proj."),
]
RealTrainOption = Annotated[str, typer.Option(help="What trains: full, lora, lora:q_proj,v_proj.")]
_MODEL = typer.Argument(
    metavar="MODEL", help="A folder, a hub id (org/name) or a timm name (timm/...)."
)
ModelArgument = Annotated[str, _MODEL]
OptionalModelArgument = Annotated[str | None, _MODEL]


def _preset_names() -> list[str]:
    from lowmem_patch.config import preset_names  # torch stands behind it

    return [*preset_names()]


_PRESET = typer.Option(
    help="auto, exact, compact, paper, or the path of a YAML file.", autocompletion=_preset_names
)
PresetOption = Annotated[str, _PRESET]
OptionalPresetOption = Annotated[str | None, _PRESET]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that the checkpoint brings (dangerous)."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Rows of the example input.")]
LengthOption = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per row, for models that read tokens. [default: 16]"),
]
DtypeOption = Annotated[StoredDtype, typer.Option(help="Of the parameters; auto: the config's.")]
RankOption = Annotated[int | None, typer.Option(min=1, help="Rank of the adapters. [default: 8]")]
AutocastOption = Annotated[bool, typer.Option("--autocast", help="Under bfloat16 autocast.")]
DeviceOption = Annotated[Device, typer.Option(help="auto: a GPU if there is one.")]


def lora_targets(train: str, *, real: bool = False) -> list[str] | None:
    """None for full fine-tuning, the target modules (all when empty) for LoRA.

    Raises:
        ConfigError: ``train`` is none of the forms, or 4-bit for a command that runs a real model.
    """
    method, colon, targets = train.partition(":")
    if train == "full":
        return None
    names = [name.strip() for name in targets.split(",") if name.strip()]
    if method not in ("lora", "qlora") or bool(colon) != bool(names):
        raise ConfigError(
            f"--train {train!r} is none of full, lora, lora:NAME,NAME, qlora, qlora:NAME,NAME"
        )
    if real and method == "qlora":
        raise ConfigError("what is measured here is run, and has no 4-bit weights: use lora")
    return names


def torch_device(device: Device) -> str:
    """``cpu`` or ``cuda``, as an option asks.

    Raises:
        ConfigError: there is no CUDA device.
    """
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device here")
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def torch_dtype(dtype: Dtype | StoredDtype | None) -> torch.dtype | None:
    """The torch dtype of an option; None for auto or nothing."""
    import torch

    found = None if dtype is None else getattr(torch, dtype.value, None)
    return found if isinstance(found, torch.dtype) else None


def meta_model(name: str, revision: str | None, trusted: bool, dtype: StoredDtype) -> Any:
    """The model on the meta device, without weights.

    Raises:
        CheckpointError: the checkpoint is quantised, or there is none.
    """
    from lowmem_patch import checkpoint

    source = checkpoint.resolve(name, revision=revision, trust_remote_code=trusted, weights=False)
    if source.quantised:
        raise CheckpointError(f"{name} is quantised: inspect the full-precision checkpoint instead")
    return checkpoint.build_meta_model(source, torch_dtype(dtype))


def real_model(name: str, revision: str | None, trusted: bool, dtype: StoredDtype) -> Any:
    """The model with its weights, on the CPU.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    from lowmem_patch import checkpoint

    source = checkpoint.resolve(name, revision=revision, trust_remote_code=trusted)
    return checkpoint.load_model(source, torch_dtype(dtype))


def with_adapters(
    model: Any,
    targets: list[str] | None,
    rank: int | None,
    length: int | None,
    *,
    real: bool = False,
) -> Any:
    """The model in training mode, with LoRA on ``targets``, of rank 8 unless told; none where they are None.

    Adapters are on the meta device, or hold random values where ``real``. A rank without adapters and a
    length without tokens are named on standard error; None: they were not given.
    """
    from lowmem_patch import checkpoint
    from lowmem_patch.profile import materialise

    if targets is not None:
        model = checkpoint.add_lora(model, targets, rank=rank or _RANK)
        model = materialise(model) if real else model
    elif rank is not None:
        print_note("--lora-rank does nothing here: with --train full there are no adapters")
    name_unused_length(model.train(), length)
    return model


def name_missing_positions(model: Any, length: int | None) -> None:
    """Say on standard error where rows are longer than the model has positions."""
    from lowmem_patch.memory import most_positions

    positions = most_positions(model)
    if length is not None and positions is not None and length > positions:
        print_note(
            f"--seq-len {length} is more than the {positions} positions of {type(model).__name__} "
            "(max_position_embeddings): it may not run, or run badly"
        )


def name_unused_length(model: Any, length: int | None) -> None:
    """Say on standard error where a length was given, and another would make no other inputs."""
    from lowmem_patch.tracing.example_inputs import make_example_inputs

    if length is None:
        return
    shorter, longer = (
        str(make_example_inputs(model, batch_size=1, sequence_length=n, device="meta"))
        for n in (8, 9)
    )
    if shorter == longer:
        print_note(f"--seq-len does nothing here: {type(model).__name__} reads no tokens")

"""The commands about memory: ``inspect`` predicts from the config alone, ``profile`` measures."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli import options
from lowmem_patch.cli.assumptions import assumptions, default_length
from lowmem_patch.cli.light_imports import freeze_imports, light_imports
from lowmem_patch.cli.models import meta_model, real_model, with_adapters
from lowmem_patch.cli.runtime import ExitCode, command, print_json, print_result, quiet_libraries
from lowmem_patch.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from lowmem_patch.config import PatchConfig
    from lowmem_patch.memory import MemoryReport, Training
    from lowmem_patch.planning.report import PatchReport
    from lowmem_patch.tracing.inputs import ExampleInputs

__all__ = ["inspect", "profile"]


class Optimizer(enum.StrEnum):
    """Optimizers whose state is known."""

    adamw = "adamw"
    adamw_foreach = "adamw_foreach"
    adamw8bit = "adamw8bit"
    paged_adamw = "paged_adamw"
    paged_adamw8bit = "paged_adamw8bit"
    sgd = "sgd"
    adafactor = "adafactor"


class Solve(enum.StrEnum):
    """What ``--memory`` is solved for."""

    batch = "batch"
    length = "length"


OptimizerOption = Annotated[
    Optimizer, typer.Option(help="Whose state and temporaries are counted; adamw is the fused one.")
]
MemoryOption = Annotated[
    str | None, typer.Option(help="Say what fits into this much, such as 24GiB.")
]
SolveOption = Annotated[Solve, typer.Option(help="With --memory: the largest batch, or length.")]
PlotOption = Annotated[Path | None, typer.Option(help="Write saved bytes by kind as a picture.")]
AccumulationOption = Annotated[
    int, typer.Option(min=1, help="Batches of a step; above 1, gradients are held between them.")
]
CheckpointingOption = Annotated[
    bool, typer.Option("--checkpointing", help="With the model's own activation checkpointing.")
]
GpusOption = Annotated[
    int, typer.Option(min=1, help="Shard model states over so many, as FSDP2 does.")
]
InspectLengthOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens per row; the model's length, at most 4096.")
]


def inspect(
    model: options.ModelArgument,
    preset: options.PresetOption = "auto",
    train: options.TrainOption = "full",
    lora_rank: options.RankOption = 8,
    batch_size: options.BatchOption = 2,
    seq_len: InspectLengthOption = None,
    dtype: options.DtypeOption = options.StoredDtype.auto,
    autocast: options.AutocastOption = False,
    optimizer: OptimizerOption = Optimizer.adamw,
    accumulation: AccumulationOption = 1,
    checkpointing: CheckpointingOption = False,
    gpus: GpusOption = 1,
    memory: MemoryOption = None,
    solve: SolveOption = Solve.batch,
    plot: PlotOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustOption = False,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Show what a patch would do to MODEL, what it would save, and what fits; reads no weights.

    Saved bytes and the peak come from the model run on fake tensors. The CUDA context (about 0.5 GiB)
    and fragmentation come on top. qlora is arithmetic: base Linears in 4 bits, doubly quantised.
    """
    with command(debug):
        from lowmem_patch.config import load_config
        from lowmem_patch.memory import Training, parse_bytes

        config = load_config(preset)
        if solve == Solve.length and memory is None:
            raise ConfigError("--solve length needs --memory: say into how much it shall fit")
        adapters = options.lora_targets(train)
        limit = None if memory is None else parse_bytes(memory)
        if plot is not None:
            from lowmem_patch.plot import require_matplotlib

            require_matplotlib()
        with light_imports(model), quiet_libraries():
            built = meta_model(model, revision, trust_remote_code, dtype)
            built = with_adapters(built, adapters, lora_rank).train()
            freeze_imports()
            quantised = train.startswith("qlora")
            training = Training(optimizer.value, quantised, accumulation > 1, checkpointing, gpus)
            found = _look(
                built, config, training, batch_size=batch_size, length=seq_len, batches=accumulation,
                autocast=autocast, limit=limit, solve=solve.value,
            )  # fmt: skip
        _show(found, model, train, plot, as_json)
        raise typer.Exit(ExitCode.DONE if found.plan.patched else ExitCode.NOTHING_TO_DO)


@dataclasses.dataclass(frozen=True)
class _Look:
    """What is known of a model, and why no peak was predicted where none was."""

    plan: PatchReport
    assumed: dict[str, str]
    memory: MemoryReport | None
    failed: str | None


def _look(
    model: Any, config: PatchConfig, training: Training, *, batch_size: int, length: int | None,
    batches: int, autocast: bool, limit: int | None, solve: str,
) -> _Look:  # fmt: skip
    """The plan, and the predicted peak; a peak that cannot be predicted is an error only where something
    is to fit."""
    from lowmem_patch.memory import base_model, make_plans, predict_memory
    from lowmem_patch.tracing.example_inputs import make_example_inputs

    def make(batch: int, size: int | None) -> ExampleInputs:
        return make_example_inputs(model, batch_size=batch, sequence_length=size, device="meta")

    config_of: Any = getattr(base_model(model), "config", None)
    if hasattr(config_of, "use_cache"):
        # without a cache transformers looks whether sequences are packed; fake positions do not tell, so
        # that it makes masks, which real ones do not
        config_of.use_cache = True
    inputs = make(batch_size, length or default_length(model))
    assumed = assumptions(model, inputs, training, batches=batches, given_length=length is not None)
    tokens = inputs.kwargs.get("input_ids")
    with _autocast("cpu", autocast):
        plans = make_plans(model, config, inputs)
        try:
            memory = predict_memory(
                model, config, make, batch_size=batch_size, training=training, limit=limit, solve=solve,
                length=None if tokens is None else int(tokens.shape[1]), plans=plans,
            )  # fmt: skip
        except TraceError as error:
            if limit is not None:
                raise
            return _Look(plans.report, assumed, None, f"no peak was predicted: {error}")
    return _Look(plans.report, assumed, memory, None)


def _show(found: _Look, model: str, train: str, plot: Path | None, as_json: bool) -> None:
    from lowmem_patch import report

    plan, memory = found.plan, found.memory
    title = f"{model}: {plan.model}, preset {plan.config.name}, train {train}, {plan.inputs}"
    if plot is not None:
        from lowmem_patch.plot import plot_saved_bytes

        plot_saved_bytes(plan, plot, title)
    if as_json:
        data = {"model": model, "train": train, "assumptions": found.assumed, **plan.to_dict()}
        print_json({**data, "memory": None if memory is None else memory.to_dict()})
        return
    report.print_plan(plan, title, found.assumed)
    if memory is not None:
        report.print_memory(memory, train)
    if found.failed is not None:
        report.print_error(found.failed)


def _autocast(device: str, enabled: bool) -> Any:
    import torch

    return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)


def profile(
    model: options.ModelArgument,
    preset: options.PresetOption = "auto",
    train: options.RealTrainOption = "full",
    lora_rank: options.RankOption = 8,
    batch_size: options.BatchOption = 2,
    seq_len: options.LengthOption = None,
    dtype: options.DtypeOption = options.StoredDtype.auto,
    autocast: options.AutocastOption = False,
    device: options.DeviceOption = options.Device.auto,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustOption = False,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Measure a real training step of MODEL with random inputs, before and after a patch.

    Saved bytes by module and by kind, and on a GPU the peak of allocated and reserved memory.
    """
    with command(debug):
        import torch

        from lowmem_patch import report
        from lowmem_patch.config import load_config
        from lowmem_patch.profile import profile_model
        from lowmem_patch.tracing.example_inputs import make_example_inputs

        config = load_config(preset)
        adapters = options.lora_targets(train, real=True)
        wanted = options.torch_device(device)
        with quiet_libraries():
            built = real_model(model, revision, trust_remote_code, dtype)
            built = with_adapters(built, adapters, lora_rank, real=True).to(wanted).train()
            torch.manual_seed(0)
            inputs = make_example_inputs(built, batch_size=batch_size, sequence_length=seq_len)
            with _autocast(wanted, autocast):
                result = profile_model(built, config, inputs)
        title = f"{model}: preset {config.name}, train {train}, {inputs}"
        data = {"model": model, "train": train, **result.to_dict()}
        print_result(as_json, data, report.print_profile, result, title)
        raise typer.Exit(ExitCode.DONE if result.patched else ExitCode.NOTHING_TO_DO)

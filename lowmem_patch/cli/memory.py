"""The commands about memory: ``inspect`` predicts from the config alone, ``profile`` measures."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli import options
from lowmem_patch.cli.models import meta_model, real_model, with_adapters
from lowmem_patch.cli.runtime import ExitCode, command, print_json, print_result, quiet_libraries
from lowmem_patch.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from lowmem_patch.config import PatchConfig
    from lowmem_patch.memory import MemoryReport
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


OptimizerOption = Annotated[Optimizer, typer.Option(help="Whose state is counted.")]
MemoryOption = Annotated[
    str | None, typer.Option(help="Say what fits into this much, such as 24GiB.")
]
SolveOption = Annotated[Solve, typer.Option(help="With --memory: the largest batch, or length.")]
PlotOption = Annotated[Path | None, typer.Option(help="Write saved bytes by kind as a picture.")]


def inspect(
    model: options.ModelArgument,
    preset: options.PresetOption = "auto",
    train: options.TrainOption = "full",
    lora_rank: options.RankOption = 8,
    batch_size: options.BatchOption = 2,
    seq_len: options.LengthOption = None,
    dtype: options.DtypeOption = options.StoredDtype.auto,
    autocast: options.AutocastOption = False,
    optimizer: OptimizerOption = Optimizer.adamw,
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
        from lowmem_patch import report
        from lowmem_patch.config import load_config
        from lowmem_patch.memory import make_plans, parse_bytes
        from lowmem_patch.tracing.example_inputs import make_example_inputs

        config = load_config(preset)
        if solve == Solve.length and memory is None:
            raise ConfigError("--solve length needs --memory: say into how much it shall fit")
        adapters = options.lora_targets(train)
        limit = None if memory is None else parse_bytes(memory)
        if plot is not None:
            from lowmem_patch.plot import plot_saved_bytes, require_matplotlib

            require_matplotlib()
        with quiet_libraries():
            built = meta_model(model, revision, trust_remote_code, dtype)
            built = with_adapters(built, adapters, lora_rank).train()
            inputs = make_example_inputs(built, batch_size=batch_size, sequence_length=seq_len)
            with _autocast("cpu", autocast):
                plans = make_plans(built, config, inputs)
                plan = plans.report
                predicted, failed = _predict(
                    built, config, inputs, batch_size=batch_size, optimizer=optimizer.value,
                    quantised=train.startswith("qlora"), limit=limit, solve=solve.value, plans=plans,
                )  # fmt: skip
        title = f"{model}: {plan.model}, preset {config.name}, train {train}, {plan.inputs}"
        if plot is not None:
            plot_saved_bytes(plan, plot, title)
        if as_json:
            prediction = None if predicted is None else predicted.to_dict()
            print_json({"model": model, "train": train, **plan.to_dict(), "memory": prediction})
        else:
            report.print_plan(plan, title)
            if predicted is not None:
                report.print_memory(predicted, train)
            if failed is not None:
                report.print_error(failed)
        raise typer.Exit(ExitCode.DONE if plan.patched else ExitCode.NOTHING_TO_DO)


def _predict(
    model: Any, config: PatchConfig, inputs: ExampleInputs, *, limit: int | None, **settings: Any
) -> tuple[MemoryReport | None, str | None]:
    """The predicted peak, or why there is none: an error only where something is to fit."""
    from lowmem_patch.memory import predict_memory
    from lowmem_patch.tracing.example_inputs import make_example_inputs

    def make(batch: int, length: int | None) -> ExampleInputs:
        return make_example_inputs(model, batch_size=batch, sequence_length=length, device="meta")

    tokens = inputs.kwargs.get("input_ids")
    length = None if tokens is None else int(tokens.shape[1])
    try:
        return predict_memory(model, config, make, length=length, limit=limit, **settings), None
    except TraceError as error:
        if limit is not None:
            raise
        return None, f"no peak was predicted: {error}"


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

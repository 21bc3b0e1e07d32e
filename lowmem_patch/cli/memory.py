"""The commands about memory: ``inspect`` predicts from the config alone, ``profile`` measures."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer  # noqa: TID251 - the command line is what typer is for

from lowmem_patch.cli.models import meta_model, real_model, with_adapters
from lowmem_patch.cli.options import (
    TRAIN,
    TRAIN_REAL,
    BatchOption,
    DebugOption,
    Device,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LengthOption,
    ModelArgument,
    PresetOption,
    RankOption,
    RevisionOption,
    StoredDtype,
    TrustOption,
    lora_targets,
    torch_device,
)
from lowmem_patch.cli.runtime import DONE, NOTHING_TO_DO, command, print_json, quiet_libraries
from lowmem_patch.errors import ConfigError, TraceError

__all__ = ["inspect", "profile"]


class Optimizer(enum.StrEnum):
    """Optimizers whose state is known."""

    adamw = "adamw"
    adamw8bit = "adamw8bit"
    sgd = "sgd"
    adafactor = "adafactor"


class Solve(enum.StrEnum):
    """What ``--memory`` is solved for."""

    batch = "batch"
    length = "length"


AutocastOption = Annotated[bool, typer.Option("--autocast", help="Under bfloat16 autocast.")]


def inspect(
    model: ModelArgument,
    preset: PresetOption = "auto",
    train: Annotated[str, typer.Option("--train", help=TRAIN)] = "full",
    lora_rank: RankOption = 8,
    batch_size: BatchOption = 2,
    seq_len: LengthOption = None,
    dtype: DtypeOption = StoredDtype.auto,
    autocast: AutocastOption = False,
    optimizer: Annotated[
        Optimizer, typer.Option("--optimizer", help="Whose state is counted.")
    ] = Optimizer.adamw,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Say what fits into this much, such as 24GiB.")
    ] = None,
    solve: Annotated[
        Solve, typer.Option("--solve", help="With --memory: the largest batch, or length.")
    ] = Solve.batch,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write saved bytes by kind as a picture.")
    ] = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a patch would do to MODEL, what it would save, and what fits; reads no weights.

    Saved bytes and the peak come from the model run on fake tensors. The CUDA context (about 0.5 GiB)
    and fragmentation come on top. qlora is arithmetic: base Linears in 4 bits, doubly quantised.
    """
    with command(debug):
        import torch

        from lowmem_patch import plan_patch, report
        from lowmem_patch.config import load_config
        from lowmem_patch.memory import parse_bytes, predict_memory
        from lowmem_patch.tracing.example_inputs import make_example_inputs

        config = load_config(preset)
        if solve == Solve.length and memory is None:
            raise ConfigError("--solve length needs --memory: say into how much it shall fit")
        adapters = lora_targets(train)
        limit = None if memory is None else parse_bytes(memory)
        if plot is not None:
            from lowmem_patch.plot import plot_saved_bytes, require_matplotlib

            require_matplotlib()
        with quiet_libraries():
            built = meta_model(model, revision, trust_remote_code, dtype)
            built = with_adapters(built, adapters, lora_rank).train()
            inputs = make_example_inputs(built, batch_size=batch_size, sequence_length=seq_len)
            tokens = inputs.kwargs.get("input_ids")

            def make(batch: int, length: int | None) -> Any:
                return make_example_inputs(
                    built, batch_size=batch, sequence_length=length, device="meta"
                )

            predicted, failed = None, None
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                plan = plan_patch(built, config, example_inputs=inputs)
                try:
                    predicted = predict_memory(
                        built, config, make, batch_size=batch_size,
                        length=None if tokens is None else int(tokens.shape[1]),
                        optimizer=optimizer.value, quantised=train.startswith("qlora"),
                        limit=limit, solve=solve.value,
                    )  # fmt: skip
                except TraceError as error:
                    if limit is not None:
                        raise
                    failed = f"no peak was predicted: {error}"
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
        raise typer.Exit(DONE if plan.patched else NOTHING_TO_DO)


def profile(
    model: ModelArgument,
    preset: PresetOption = "auto",
    train: Annotated[str, typer.Option("--train", help=TRAIN_REAL)] = "full",
    lora_rank: RankOption = 8,
    batch_size: BatchOption = 2,
    seq_len: LengthOption = None,
    dtype: DtypeOption = StoredDtype.auto,
    autocast: AutocastOption = False,
    device: DeviceOption = Device.auto,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
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
        adapters = lora_targets(train, real=True)
        wanted = torch_device(device)
        with quiet_libraries():
            built = real_model(model, revision, trust_remote_code, dtype)
            built = with_adapters(built, adapters, lora_rank, real=True).to(wanted).train()
            torch.manual_seed(0)
            inputs = make_example_inputs(built, batch_size=batch_size, sequence_length=seq_len)
            with torch.autocast(wanted, dtype=torch.bfloat16, enabled=autocast):
                result = profile_model(built, config, inputs)
        if as_json:
            print_json({"model": model, "train": train, **result.to_dict()})
        else:
            report.print_profile(result, f"{model}: preset {config.name}, train {train}, {inputs}")
        raise typer.Exit(DONE if result.patched else NOTHING_TO_DO)

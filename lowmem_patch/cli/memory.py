"""The commands about memory: ``inspect`` predicts from the config alone, ``profile`` measures."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli import options
from lowmem_patch.cli.assumptions import Asked, Solve, assumptions, default_length, model_settings
from lowmem_patch.cli.light_imports import light_imports, one_thread, uncollected_imports
from lowmem_patch.cli.runtime import ExitCode, command, print_json, print_result, quiet_libraries
from lowmem_patch.errors import TraceError

if TYPE_CHECKING:
    from lowmem_patch.config import PatchConfig
    from lowmem_patch.memory import MemoryReport, Training
    from lowmem_patch.planning.report import PatchReport
    from lowmem_patch.planning.suggestions import Suggestion
    from lowmem_patch.tracing.inputs import ExampleInputs


# `lowmem_patch.memory.OPTIMIZERS`, for whose import --help shall not wait
Optimizer = enum.StrEnum(
    "Optimizer",
    ("adamw", "adamw_foreach", "adamw8bit", "paged_adamw", "paged_adamw8bit", "sgd", "adafactor"),
)
OptimizerOption = Annotated[
    Optimizer, typer.Option(help="Whose state and temporaries are counted; adamw is the fused one.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Say what fits into this much, such as 23GiB for a card of 24, and what would help."
    ),
]
FitOption = Annotated[
    str | None,
    typer.Option(
        help="Choose which blocks run again so that a step fits into this much, such as 23GiB; "
        "auto: what the GPU here has free."
    ),
]
SolveOption = Annotated[
    Solve | None,
    typer.Option(
        help="The largest batch, or length: with --fit, where blocks may run again, which takes minutes; "
        "with --memory, where none does. [default: batch with --memory]"
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option(
        help="With --fit: host memory that blocks may offload to, for all GPUs together, such as 64GiB, or "
        "0GiB for none; give at most half of what the machine that trains has available. [default: half of "
        "what this machine has available]"
    ),
]
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
    int | None,
    typer.Option(min=1, help="Tokens per row. [default: the model's length, at most 4096]"),
]


def inspect(
    model: options.ModelArgument,
    preset: options.PresetOption = "auto",
    train: options.TrainOption = "full",
    lora_rank: options.RankOption = None,
    batch_size: options.BatchOption = 2,
    seq_len: InspectLengthOption = None,
    dtype: options.DtypeOption = options.StoredDtype.auto,
    autocast: options.AutocastOption = False,
    optimizer: OptimizerOption = Optimizer.adamw,
    accumulation: AccumulationOption = 1,
    checkpointing: CheckpointingOption = False,
    gpus: GpusOption = 1,
    memory: MemoryOption = None,
    fit: FitOption = None,
    host_memory: HostOption = None,
    solve: SolveOption = None,
    plot: PlotOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustOption = False,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Show what a patch would do to MODEL, what it would save, and what fits; reads no weights.

    Saved bytes and the peak come from the model run on fake tensors (without data). The CUDA context (about
    0.5 GiB) comes on top: for a card of 24 GiB ask for 23GiB. Fragmentation comes on top of the peak as well;
    --memory and --fit keep 3 % free for it. qlora counts the weights of base Linears in 4 bits, and their
    scales in 8.

    Exits with 4 where --fit or --memory is too small for everything that was looked at.
    """
    with command(debug, as_json), uncollected_imports() as imports_done:
        import torch

        from lowmem_patch.config import load_config
        from lowmem_patch.memory import Training

        config = load_config(preset)
        # a preset file's auto is what a GPU has free
        into = config.fit if fit is None and config.fit != "auto" else fit
        asked = Asked(batch_size, seq_len, accumulation, memory, into, host_memory, solve)
        asked.check(checkpointing)
        adapters = options.lora_targets(train)
        if plot is not None:
            from lowmem_patch.plot import require_matplotlib

            require_matplotlib()
        with light_imports(model), quiet_libraries():
            built = options.meta_model(model, revision, trust_remote_code, dtype)
            built = options.with_adapters(built, adapters, lora_rank, seq_len)
            imports_done()
            quantised = train.startswith("qlora")
            training = Training(optimizer.value, quantised, accumulation > 1, checkpointing, gpus)
            with one_thread(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = _look(built, config, training, asked)
        _show(found, model, train, plot, as_json)
        if found.fits is False:
            raise typer.Exit(ExitCode.DOES_NOT_FIT)
        raise typer.Exit(ExitCode.DONE if found.plan.patched else ExitCode.NOTHING_TO_DO)


@dataclasses.dataclass(frozen=True)
class _Look:
    """What is known of a model, and why no peak was predicted where none was."""

    plan: PatchReport
    assumed: dict[str, str]
    memory: MemoryReport | None
    failed: str | None
    suggestions: tuple[Suggestion, ...]
    device: str
    solved: dict[str, int]
    positions: int | None

    @property
    def fits(self) -> bool | None:
        """Whether a row of the suggestions does, or any size of the step; None where nobody asked."""
        if self.memory is None or self.memory.limit is None or not self.suggestions:
            return None
        limit = self.memory.limit
        return bool(self.memory.largest_after) or any(s.total <= limit for s in self.suggestions)


def _look(model: Any, config: PatchConfig, training: Training, asked: Asked) -> _Look:
    """The plan, and the predicted peak; a peak that cannot be predicted is an error only where something
    is to fit."""
    from lowmem_patch.memory import make_plans, most_positions, predict_memory
    from lowmem_patch.planning.budget import make_budget
    from lowmem_patch.planning.costs import device_of
    from lowmem_patch.planning.fit_model import fit_planned
    from lowmem_patch.planning.planner import plan_model
    from lowmem_patch.planning.suggestions import find_suggestions
    from lowmem_patch.tracing.base_model import base_model

    config_of: Any = getattr(base_model(model), "config", None)
    if hasattr(config_of, "use_cache"):
        # without a cache transformers looks whether sequences are packed; fake positions do not tell, so
        # that it makes masks, which real ones do not
        config_of.use_cache = True
    budget = None if asked.memory is None else make_budget(asked.memory, model)
    host = 0 if asked.fit is None else asked.host(training.gpus)
    asked, solved = _solved(model, config, training, asked, host)
    make = _maker(model)
    inputs = make(asked.batch_size, asked.length or default_length(model))
    options.name_missing_positions(model, asked.length)
    assumed = assumptions(model, inputs, training, asked, solved, host)
    plans = make_plans(model, config, inputs)
    report = plans.report
    if asked.fit is not None:
        fitted = fit_planned(
            model, plan_model(model, config, inputs), asked.fit, training, host=host
        )
        report = dataclasses.replace(report, fit=fitted.report.fit)
    tokens = inputs.kwargs.get("input_ids")
    predicted = failed = None
    try:
        predicted = predict_memory(
            model, config, make, batch_size=asked.batch_size, training=training,
            solve=(asked.solve or Solve.batch).value, limit=None if budget is None else budget.bytes,
            plans=plans, fragments=0.0 if budget is None else budget.fragments,
            length=None if tokens is None else int(tokens.shape[1]),
        )  # fmt: skip
    except TraceError as error:
        if budget is not None:
            raise
        failed = f"no peak was predicted: {error}"
    suggestions = find_suggestions(model, config, inputs, training, budget) if budget else ()
    return _Look(
        report, assumed, predicted, failed, suggestions, device_of(model).name, solved,
        most_positions(model),
    )  # fmt: skip


def _maker(model: Any) -> Callable[[int, int | None], ExampleInputs]:
    from lowmem_patch.tracing.example_inputs import make_example_inputs

    def make(batch: int, size: int | None) -> ExampleInputs:
        return make_example_inputs(model, batch_size=batch, sequence_length=size, device="meta")

    return make


def _solved(
    model: Any, config: PatchConfig, training: Training, asked: Asked, host: int
) -> tuple[Asked, dict[str, int]]:
    """What is asked with the largest size within ``--fit``, and that size, where ``--solve`` asks for one.
    Where not even 1 fits it is 1: the budget's error tells what that lacks."""
    from lowmem_patch.memory import largest_size
    from lowmem_patch.planning.budget import checked_budget, make_budget
    from lowmem_patch.planning.largest import largest_fit

    if asked.fit is None or asked.solve is None:
        return asked, {}
    make, batch, length = _maker(model), asked.batch_size, asked.length or default_length(model)
    of_batch = asked.solve == Solve.batch
    tokens = make(batch, length).kwargs.get("input_ids")
    budget = make_budget(asked.fit, model)
    found = largest_fit(
        model, config, (lambda size: make(size, length)) if of_batch else (lambda size: make(batch, size)),
        budget, training, start=batch if of_batch else length, host=host,
        bound=largest_size(model, asked.solve.value, None if tokens is None else length),
    )  # fmt: skip
    size = max(found, 1)
    # auto: what is free may change
    fit = budget.bytes if checked_budget(asked.fit) is None else asked.fit
    if of_batch:
        return dataclasses.replace(asked, fit=fit, batch_size=size), {"batch": size}
    return dataclasses.replace(asked, fit=fit, length=size), {"length": size}


def _show(found: _Look, model: str, train: str, plot: Path | None, as_json: bool) -> None:
    from lowmem_patch.report.fit import print_fit, print_largest, print_suggestions, print_verdict
    from lowmem_patch.report.layout import print_error
    from lowmem_patch.report.results import print_memory, print_plan

    plan, memory = found.plan, found.memory
    title = f"{model}: {plan.model}, preset {plan.config.name}, train {train}, {plan.inputs}"
    if plot is not None:
        from lowmem_patch.plot import plot_saved_bytes

        plot_saved_bytes({title: plan}, plot)
    if as_json:
        data = {"model": model, "train": train, "assumptions": found.assumed, **plan.to_dict()}
        data["suggestions"] = [dataclasses.asdict(suggestion) for suggestion in found.suggestions]
        data["fits"], data["largest"] = found.fits, found.solved
        print_json({**data, "memory": None if memory is None else memory.to_dict()})
        return
    print_plan(plan, title, found.assumed)
    if memory is not None:
        print_memory(memory, train)
        if found.suggestions and memory.limit is not None:
            print_suggestions(found.suggestions, memory.limit, found.device)
            print_verdict(found.suggestions, memory)
    if plan.fit is not None:
        print_fit(plan.fit)
        print_largest(found.solved, plan.fit, found.positions)
    if found.failed is not None:
        print_error(found.failed)


def profile(
    model: options.ModelArgument,
    preset: options.PresetOption = "auto",
    train: options.RealTrainOption = "full",
    lora_rank: options.RankOption = None,
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
    with command(debug, as_json):
        import torch

        from lowmem_patch.config import load_config
        from lowmem_patch.profile import profile_model
        from lowmem_patch.report.results import print_profile
        from lowmem_patch.tracing.example_inputs import make_example_inputs

        config = load_config(preset)
        adapters = options.lora_targets(train, real=True)
        wanted = options.torch_device(device)
        with quiet_libraries():
            built = options.real_model(model, revision, trust_remote_code, dtype)
            built = options.with_adapters(built, adapters, lora_rank, seq_len, real=True).to(wanted)
            torch.manual_seed(0)
            inputs = make_example_inputs(built, batch_size=batch_size, sequence_length=seq_len)
            with torch.autocast(wanted, torch.bfloat16, enabled=autocast):
                result = profile_model(built, config, inputs)
        settings = model_settings(built)
        title = f"{model}: preset {config.name}, train {train}, {inputs}"
        title += "".join(f"; {name}: {text}" for name, text in settings.items())
        data = {"model": model, "train": train, "settings": settings, **result.to_dict()}
        print_result(as_json, data, print_profile, result, title)
        raise typer.Exit(ExitCode.DONE if result.patched else ExitCode.NOTHING_TO_DO)

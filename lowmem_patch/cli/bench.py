"""The command ``bench``: training variants of one model side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer  # noqa: TID251 - the command line is what typer is for

from lowmem_patch.cli.models import real_model, with_adapters
from lowmem_patch.cli.options import (
    TRAIN_REAL,
    DebugOption,
    Device,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LengthOption,
    RankOption,
    RevisionOption,
    StoredDtype,
    TrustOption,
    lora_targets,
    torch_device,
    torch_dtype,
)
from lowmem_patch.cli.runtime import (
    DONE,
    FAILED,
    NOTHING_TO_DO,
    command,
    print_json,
    quiet_libraries,
)
from lowmem_patch.errors import ConfigError

__all__ = ["bench"]

# A checkpoint is run on so much unless told; a few tokens would measure how fast kernels are launched.
_BATCH, _LENGTH = 4, 512


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A folder, a hub id (org/name) or a timm name (timm/...)."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Instead of MODEL, random weights of llama-7b, llama-3-8b, vit-b, roberta-base or swin-t.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Of a --shape; of a LLaMA 4 unless told.")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            help="Of unpatched,paper,exact,auto,checkpointing,liger,compile,auto+compile; "
            "all unless told, but on the CPU none that compiles.",
        ),
    ] = None,
    train: Annotated[str, typer.Option("--train", help=TRAIN_REAL)] = "full",
    lora_rank: RankOption = 8,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Rows of a step; 4, or the shape's.")
    ] = None,
    seq_len: LengthOption = None,
    dtype: DtypeOption = StoredDtype.auto,
    autocast: Annotated[
        bool | None,
        typer.Option("--autocast/--no-autocast", help="Under bfloat16 autocast; or as the shape."),
    ] = None,
    device: DeviceOption = Device.auto,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Turns of each variant.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of a turn.")] = 3,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write memory against speed as a picture.")
    ] = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure memory and step time of MODEL unpatched, patched, checkpointed and compiled, in turn.

    Random inputs; forward and backward, no optimizer. On a GPU act, peak and reserved memory; on the CPU
    act is what autograd holds. Exits with 1 when every variant failed, with 3 when none could be tried.
    """
    with command(debug):
        import torch

        from lowmem_patch import report
        from lowmem_patch.bench import SHAPES, compare, environment
        from lowmem_patch.tracing.example_inputs import make_example_inputs

        if (model is None) == (shape is None):
            raise ConfigError("give either MODEL or --shape: a checkpoint, or random weights")
        if shape is not None and shape not in SHAPES:
            raise ConfigError(f"--shape {shape!r} is none of {', '.join(SHAPES)}")
        if layers is not None and (shape is None or SHAPES[shape].layers is None):
            raise ConfigError(f"--layers: the depth of {model or shape} is fixed; leave it out")
        targets = lora_targets(train, real=True)
        wanted = torch_device(device)
        chosen = _chosen(variants, wanted)
        if plot is not None:
            from lowmem_patch.plot import require_matplotlib

            require_matplotlib()
        with quiet_libraries(), report.progress_bar(quiet=as_json) as progress:
            torch.manual_seed(0)
            if shape is not None:
                known = SHAPES[shape]
                with torch.device(wanted):
                    built: Any = known.build(layers or known.layers or 0)
                autocast = known.autocast if autocast is None else autocast
                batch_size, seq_len = batch_size or known.batch, seq_len or known.length
                built = built.to(torch_dtype(dtype))
            else:
                assert model is not None
                built = real_model(model, revision, trust_remote_code, dtype)
                batch_size, seq_len = batch_size or _BATCH, seq_len or _usual_length(built)
            built = with_adapters(built, targets, lora_rank, real=True).train()
            inputs = make_example_inputs(built, batch_size=batch_size, sequence_length=seq_len)
            inputs = inputs.map(lambda tensor: tensor.to(wanted))
            result = compare(
                built, inputs, chosen, rounds=rounds, steps=steps, autocast=bool(autocast),
                progress=progress,
            )  # fmt: skip
        name = shape or model
        title = f"{name}: train {train}, {inputs}" + (", autocast bfloat16" if autocast else "")
        measured = [row for row in result.rows if row.measured]
        if plot is not None and measured:
            _plot(result, plot, title)
        if as_json:
            settings = {"model": name, "train": train, "inputs": str(inputs), "autocast": autocast}
            print_json({**settings, "environment": environment(wanted), **result.to_dict()})
        else:
            report.print_bench(result, title)
        if not measured:
            failed = any(row.failed for row in result.rows)
            raise typer.Exit(FAILED if failed else NOTHING_TO_DO)
        raise typer.Exit(DONE)


def _chosen(names: str | None, device: str) -> dict[str, Any]:
    from lowmem_patch.bench import VARIANTS

    if names is None:  # compiling for the CPU takes minutes, and a C++ compiler
        return {n: v for n, v in VARIANTS.items() if device == "cuda" or "compile" not in n}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in VARIANTS:
            raise ConfigError(f"--variants {name!r} is none of {', '.join(VARIANTS)}")
    return {name: VARIANTS[name] for name in wanted}


def _usual_length(model: Any) -> int:
    from lowmem_patch.memory import most_positions

    return min(_LENGTH, most_positions(model) or _LENGTH)


def _plot(result: Any, path: Path, title: str) -> None:
    """Of the peak; where there is none, of what autograd holds."""
    from lowmem_patch.plot import Point, plot_tradeoff

    rows = [row for row in result.rows if row.measured]
    on_gpu = all(row.peak is not None for row in rows)
    points = [
        Point(row.name, row.peak if on_gpu else row.act, 1000 * result.work / row.quartiles[1])
        for row in rows
    ]
    memory = "peak memory of a step, above rest" if on_gpu else "saved activation bytes"
    plot_tradeoff(points, path, title, memory=memory, rate=f"{result.unit} / s")

"""The command ``bench``: training variants of one model side by side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli import options
from lowmem_patch.cli.assumptions import model_settings
from lowmem_patch.cli.runtime import ExitCode, command, print_note, print_result, quiet_libraries
from lowmem_patch.errors import ConfigError

if TYPE_CHECKING:
    from lowmem_patch.bench import Comparison
    from lowmem_patch.tracing.inputs import ExampleInputs

# A checkpoint is run on so much unless told; a few tokens would measure how fast kernels are launched.
_BATCH, _LENGTH = 4, 512


ShapeOption = Annotated[
    str | None,
    typer.Option(
        help="Instead of MODEL, random weights of llama-3.1-8b, qwen2.5-0.5b (with head and loss), "
        "llama-7b, llama-3-8b (blocks alone), vit-b, roberta-base or swin-t."
    ),
]
LayersOption = Annotated[
    int | None, typer.Option(min=1, help="Of a --shape; all, but 4 where it is of blocks alone.")
]
VariantsOption = Annotated[
    str | None,
    typer.Option(
        help="Of unpatched,paper,exact,auto,compact,checkpointing,liger,compile,auto+compile; others joined "
        "by +; all unless told, but on the CPU none that compiles. fit=24GiB: within a budget, weights and "
        "optimizer included; every=2: every second block checkpointed."
    ),
]
CurveOption = Annotated[
    bool,
    typer.Option(
        "--curve",
        help="Memory against time: auto at several budgets, and blocks checkpointed by hand.",
    ),
]
RowsOption = Annotated[int | None, typer.Option(min=1, help="Rows of a step; 4, or the shape's.")]
TokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens per row; 512, or the shape's.")
]
AutocastOption = Annotated[
    bool | None,
    typer.Option("--autocast/--no-autocast", help="Under bfloat16 autocast; or as the shape."),
]
RoundsOption = Annotated[int, typer.Option(min=2, help="Turns of each variant.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")]
PlotOption = Annotated[Path | None, typer.Option(help="Write memory against speed as a picture.")]


def bench(
    model: options.OptionalModelArgument = None,
    shape: ShapeOption = None,
    layers: LayersOption = None,
    variants: VariantsOption = None,
    curve: CurveOption = False,
    train: options.RealTrainOption = "full",
    lora_rank: options.RankOption = None,
    batch_size: RowsOption = None,
    seq_len: TokensOption = None,
    dtype: options.DtypeOption = options.StoredDtype.auto,
    autocast: AutocastOption = None,
    device: options.DeviceOption = options.Device.auto,
    rounds: RoundsOption = 5,
    steps: StepsOption = 3,
    plot: PlotOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustOption = False,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Measure memory and step time of MODEL unpatched, patched, checkpointed and compiled, in turn.

    Random inputs; forward, loss, backward and a fused AdamW. On a GPU act, peak and reserved memory above
    what rests between steps; on the CPU act is what autograd holds. Exits with 1 when every variant failed,
    with 3 when none could be tried.
    """
    with command(debug, as_json):
        import torch

        from lowmem_patch.bench import compare
        from lowmem_patch.plot import require_matplotlib
        from lowmem_patch.report.layout import progress_bar

        _check_names(model, shape, layers)
        targets = options.lora_targets(train, real=True)
        wanted = options.torch_device(device)
        chosen = _chosen(variants, wanted, curve=curve)
        if plot is not None:
            require_matplotlib()
        with quiet_libraries(), progress_bar(quiet=as_json) as progress:
            torch.manual_seed(0)
            setup = _shape_setup(shape, layers, wanted, dtype) if shape else None
            setup = setup or _checkpoint_setup(model or "", revision, trust_remote_code, dtype)
            built = options.with_adapters(setup.model, targets, lora_rank, seq_len, real=True)
            inputs = _inputs(built, batch_size or setup.batch_size, seq_len or setup.length, wanted)
            autocast = setup.autocast if autocast is None else autocast
            with torch.autocast(wanted, torch.bfloat16, enabled=bool(autocast)):
                chosen = chosen or _curve(built, inputs, rounds)
            result = compare(
                built, inputs, chosen, rounds=rounds, steps=steps, autocast=bool(autocast),
                share_frozen=curve, progress=progress,
            )  # fmt: skip
        settings = {
            "model": shape or model, "train": train, "inputs": str(inputs), "autocast": autocast,
            "part": setup.part, "settings": model_settings(built),
        }  # fmt: skip
        _show(result, settings, wanted, plot, as_json)
        raise typer.Exit(_exit_code(result))


def _curve(model: Any, inputs: ExampleInputs, rounds: int) -> dict[str, Any]:
    from lowmem_patch.bench import curve_variants

    chosen = curve_variants(model, inputs)
    print_note(f"--curve measures {len(chosen)} variants in {rounds} rounds, which takes minutes")
    return chosen


def _exit_code(result: Comparison) -> ExitCode:
    if any(row.measured for row in result.rows):
        return ExitCode.DONE
    return ExitCode.FAILED if any(row.failed for row in result.rows) else ExitCode.NOTHING_TO_DO


def _check_names(model: str | None, shape: str | None, layers: int | None) -> None:
    from lowmem_patch.bench import SHAPES

    if (model is None) == (shape is None):
        raise ConfigError("give MODEL (a checkpoint) or --shape (random weights), and not both")
    if shape is not None and shape not in SHAPES:
        raise ConfigError(f"--shape {shape!r} is none of {', '.join(SHAPES)}")
    if layers is not None and (shape is None or SHAPES[shape].layers is None):
        raise ConfigError(f"--layers: the depth of {model or shape} is fixed; leave it out")


@dataclasses.dataclass(frozen=True)
class _Setup:
    """A model, and how it is run unless an option says otherwise."""

    model: Any
    batch_size: int
    length: int | None
    autocast: bool | None = None
    part: str = "the whole model"


def _shape_setup(shape: str, layers: int | None, device: str, dtype: options.StoredDtype) -> _Setup:
    import torch

    from lowmem_patch.bench import SHAPES

    known = SHAPES[shape]
    if device == "cpu" and layers is None:
        less = "; --layers 1 runs less of it" if known.layers else ""
        print_note(f"{shape} runs on the CPU, where a step takes long{less}")
    with torch.device(device):
        model: Any = known.build(layers or known.layers or 0)
    model = model.to(options.torch_dtype(dtype))
    return _Setup(model, known.batch, known.length, known.autocast, known.part(layers))


def _checkpoint_setup(
    name: str, revision: str | None, trusted: bool, dtype: options.StoredDtype
) -> _Setup:
    from lowmem_patch.memory import most_positions

    model = options.real_model(name, revision, trusted, dtype)
    return _Setup(model, _BATCH, min(_LENGTH, most_positions(model) or _LENGTH))


def _inputs(model: Any, batch_size: int, length: int | None, device: str) -> ExampleInputs:
    from lowmem_patch.tracing.example_inputs import make_example_inputs

    inputs = make_example_inputs(model, batch_size=batch_size, sequence_length=length)
    return inputs.map(lambda tensor: tensor.to(device))


def _chosen(names: str | None, device: str, *, curve: bool) -> dict[str, Any]:
    """The variants of a command; none for a curve, whose budgets are known with the model."""
    from lowmem_patch.bench import VARIANTS, find_variant

    if curve and names is not None:
        raise ConfigError("--curve has variants of its own: leave --variants out")
    if curve:
        return {}
    if names is None:  # compiling for the CPU takes minutes, and a C++ compiler
        return {n: v for n, v in VARIANTS.items() if device == "cuda" or "compile" not in n}
    wanted = [name.strip() for name in names.split(",")]
    return {name: find_variant(name) for name in wanted}


def _show(
    result: Comparison, settings: dict[str, Any], device: str, plot: Path | None, as_json: bool
) -> None:
    """Print the result, and draw it where a plot was asked for and anything was measured."""
    from lowmem_patch.bench import environment
    from lowmem_patch.report.bench import print_bench

    title = (
        f"{settings['model']} ({settings['part']}): train {settings['train']}, {settings['inputs']}"
    )
    title += ", autocast bfloat16" if settings["autocast"] else ""
    title += "".join(f"; {name}: {text}" for name, text in settings["settings"].items())
    if plot is not None and any(row.measured for row in result.rows):
        _plot(result, plot, title)
    data = {**settings, "environment": environment(device), **result.to_dict()}
    print_result(as_json, data, print_bench, result, title)


def _plot(result: Comparison, path: Path, title: str) -> None:
    """Draw the peak against the rate; on the CPU, which counts no peak, the saved bytes."""
    from lowmem_patch.plot import Point, plot_tradeoff

    rows = [row for row in result.rows if row.measured]
    on_gpu = all(row.peak is not None for row in rows)
    points = [
        Point(
            row.name, (row.peak if on_gpu else row.act) or 0, 1000 * result.work / row.quartiles[1]
        )
        for row in rows
    ]
    memory = "peak memory of a step, above rest" if on_gpu else "saved activation bytes"
    plot_tradeoff(points, path, title, memory=memory, rate=f"{result.unit} / s")

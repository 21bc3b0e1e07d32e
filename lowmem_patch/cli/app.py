"""The command line: parse, call, render, exit code. The only importer of typer.

Exit codes: 0 done, 1 verification failed, 2 bad input, 3 nothing to do, 4 does not fit. Heavy imports wait
until a command runs, so that ``--help`` and ``--version`` answer at once.
"""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TID251 - only the command line imports typer

import lowmem_patch
from lowmem_patch.cli import options
from lowmem_patch.cli.bench import bench
from lowmem_patch.cli.memory import inspect, profile
from lowmem_patch.cli.run import RUN_SETTINGS, run
from lowmem_patch.cli.runtime import (
    ExitCode,
    JsonErrors,
    command,
    print_json,
    print_note,
    print_result,
    quiet_libraries,
)
from lowmem_patch.cli.tables import tables

if TYPE_CHECKING:
    import torch

    from lowmem_patch.verify import VerifyResult

app = typer.Typer(
    cls=JsonErrors,
    help="Fine-tune transformers and timm models with less activation memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 verify or bench failed, 2 bad input, 3 nothing to do, 4 does not fit.",
)

_PACKAGES = (
    "torch", "triton", "transformers", "timm", "peft", "safetensors", "huggingface_hub", "typer", "rich",
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowmem-patch {lowmem_patch.__version__}")
        raise typer.Exit(ExitCode.DONE)


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Fine-tune transformers and timm models with less activation memory."""


@app.command(epilog="Example: lowmem-patch convert meta-llama/Llama-3.1-8B llama-folded")
def convert(
    model: options.ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    revision: options.RevisionOption = None,
    dtype: Annotated[
        options.StoredDtype, typer.Option(help="auto keeps each tensor's.")
    ] = options.StoredDtype.auto,
    max_shard_size: Annotated[str, typer.Option(help="Such as 5GB.")] = "5GB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint at OUT.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be folded; write nothing.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Compare OUT with MODEL before it is put in place."
        ),
    ] = True,
    trust_remote_code: options.TrustOption = False,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Fold the norms of MODEL into its Linears; OUT is a stock checkpoint of the same function.

    Exits with 3 and writes nothing when no norm can be folded into a stock checkpoint.
    """
    with command(debug, as_json):
        from lowmem_patch import checkpoint
        from lowmem_patch.checkpoint.stage import check_output
        from lowmem_patch.report import layout, results

        if dry_run and overwrite:
            print_note("--overwrite does nothing here: a dry run writes nothing")
        with quiet_libraries(), layout.progress_bar(quiet=as_json) as progress:
            # before gigabytes are downloaded
            folder = Path(model).expanduser()
            check_output(out.expanduser(), folder if folder.is_dir() else None, overwrite=overwrite)
            source = checkpoint.resolve(
                model, revision=revision, trust_remote_code=trust_remote_code, weights=not dry_run
            )
            result = checkpoint.convert(
                source, out, dtype=options.torch_dtype(dtype), max_shard_size=max_shard_size,
                overwrite=overwrite, dry_run=dry_run, check=check, progress=progress,
            )  # fmt: skip
        print_result(as_json, result.to_dict(), results.print_conversion, result)
        raise typer.Exit(ExitCode.DONE if result.folded else ExitCode.NOTHING_TO_DO)


@app.command(epilog="Example: lowmem-patch verify meta-llama/Llama-3.2-1B --preset exact")
def verify(
    original: Annotated[
        str, typer.Argument(metavar="ORIGINAL", help="A folder, hub id or timm name.")
    ],
    converted: Annotated[
        str | None, typer.Argument(metavar="[CONVERTED]", help="Compare with this checkpoint.")
    ] = None,
    preset: options.OptionalPresetOption = None,
    dtype: Annotated[list[options.Dtype] | None, typer.Option(help="May be repeated.")] = None,
    autocast: Annotated[
        bool, typer.Option("--autocast/--no-autocast", help="Also under bfloat16 autocast.")
    ] = True,
    batch_size: options.BatchOption = 2,
    seq_len: options.LengthOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustOption = False,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Prove CONVERTED against ORIGINAL, or ORIGINAL patched with --preset against itself.

    Outputs may be off from float64 by at most 2 times the unpatched model's own error in the same
    dtype and 4 times its epsilon, gradients by 3 times, and 4 epsilons; exits with 1 if not. Gradients of
    codes are compared with those of the step tables, and 8 bits may add 0.14. The dtypes are float32
    and bfloat16, with CONVERTED the one that it is stored in and bfloat16: folded weights were rounded
    to it.
    """
    with command(debug, as_json):
        import torch

        from lowmem_patch import checkpoint
        from lowmem_patch.config import load_config
        from lowmem_patch.report import layout, results
        from lowmem_patch.tracing.example_inputs import make_example_inputs
        from lowmem_patch.verify import verify_model

        config = load_config(preset or "auto")
        if preset is not None and converted is not None:
            print_note("--preset does nothing here: CONVERTED is compared, and nothing is patched")
        dtypes = [found for found in map(options.torch_dtype, dtype or []) if found is not None]
        with quiet_libraries(), layout.progress_bar(quiet=as_json) as progress:
            source = checkpoint.resolve(
                original, revision=revision, trust_remote_code=trust_remote_code
            )
            # float32 holds the values of any checkpoint; config.json may name a less precise dtype
            model = checkpoint.load_model(source, torch.float32)
            options.name_unused_length(model, seq_len)
            torch.manual_seed(0)
            inputs = make_example_inputs(model, batch_size=batch_size, sequence_length=seq_len)
            settings: dict[str, Any] = {"example_inputs": inputs, "progress": progress}
            settings["autocast"] = torch.bfloat16 if autocast else None
            if converted is None:
                settings["dtypes"] = dtypes or (torch.float32, torch.bfloat16)
                result = verify_model(model, config, **settings)
            else:
                result = _verify_converted(model, converted, trust_remote_code, dtypes, settings)
        print_result(as_json, result.to_dict(), results.print_verification, result)
        if converted is None and not result.patched_sites:
            raise typer.Exit(ExitCode.NOTHING_TO_DO)
        raise typer.Exit(ExitCode.DONE if result.passed else ExitCode.FAILED)


def _verify_converted(
    model: Any, converted: str, trusted: bool, dtypes: list[torch.dtype], settings: dict[str, Any]
) -> VerifyResult:
    """The verdict against the checkpoint; without ``dtypes`` in the one that it is stored in and bfloat16."""
    import torch

    from lowmem_patch import checkpoint
    from lowmem_patch.verify import verify_checkpoints

    other = checkpoint.resolve(converted, trust_remote_code=trusted)
    stored = checkpoint.stored_dtype(other.files)
    dtypes = dtypes or list(dict.fromkeys([stored, torch.bfloat16]))
    steps = checkpoint.read_fold_steps(other.files)
    loaded = checkpoint.load_model(other, torch.float32)
    result = verify_checkpoints(model, loaded, steps, dtypes=dtypes, **settings)
    finer = any(torch.finfo(dtype).eps < torch.finfo(stored).eps for dtype in dtypes)
    if result.passed or not finer:
        return result
    name = str(stored).removeprefix("torch.")
    note = (
        f"the folded weights are stored in {name}, and rounded to it: leave --dtype out, or convert with "
        "--dtype float32"
    )
    return dataclasses.replace(result, notes=(*result.notes, note))


app.command(
    epilog="Example: lowmem-patch inspect meta-llama/Llama-3.1-8B --train lora --memory 23GiB"
)(inspect)
app.command(epilog="Example: lowmem-patch profile timm/vit_base_patch16_224 --batch-size 32")(
    profile
)
app.command(epilog="Example: lowmem-patch bench --shape llama-3.1-8b --layers 4 --train lora")(
    bench
)
app.add_typer(tables, name="tables")
app.command(
    context_settings=RUN_SETTINGS,
    epilog="Example: lowmem-patch run --preset exact train.py --epochs 3",
)(run)


@app.command(epilog="Example: lowmem-patch demo --plot demo.png")
def demo(
    plot: Annotated[Path | None, typer.Option(help="Write the bars as a picture.")] = None,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Show on two bundled models what a patch saves, that they train alike, and prove it; works offline.

    Times are left out: a CPU has none of the kernels that make a patched model fast.
    """
    with command(debug, as_json):
        from lowmem_patch import demo as demonstration
        from lowmem_patch.cli.demo import run_demo_task
        from lowmem_patch.plot import plot_saved_bytes, require_matplotlib

        if plot is not None:
            require_matplotlib()
        results: dict[str, Any] = {}
        plans = {}
        passed = True
        for task in demonstration.demo_tasks():
            results[task.name], plans[task.name], good = run_demo_task(task, as_json)
            passed = passed and good
        if plot is not None:
            plot_saved_bytes(plans, plot)
        if as_json:
            print_json({"tasks": results})
        raise typer.Exit(ExitCode.DONE if passed else ExitCode.FAILED)


@app.command(epilog="Example: lowmem-patch env --json")
def env(as_json: options.JsonOption = False) -> None:
    """Print versions, for a bug report."""
    import torch

    from lowmem_patch.bench.environment import package_versions

    data = {"lowmem-patch": lowmem_patch.__version__, "python": platform.python_version()}
    data |= dict.fromkeys(_PACKAGES, "not installed") | package_versions(_PACKAGES)
    data["platform"] = platform.platform()
    data["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    data["cuda"] = str(torch.version.cuda or "none")
    if as_json:
        print_json(data)
    else:
        for key, value in data.items():
            typer.echo(f"{key}: {value}")

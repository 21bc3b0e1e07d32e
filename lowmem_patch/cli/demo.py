"""One bundled model in ``lowmem-patch demo``, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch import checkpoint, plan_patch, report
from lowmem_patch import demo as demonstration
from lowmem_patch.cli.runtime import quiet_libraries
from lowmem_patch.verify import verify_checkpoints

__all__ = ["run_demo_task"]


def run_demo_task(task: Any, out: Path, as_json: bool) -> tuple[dict[str, Any], bool]:
    """Inspect, convert, verify and fine-tune; returns the results as plain data, and whether all is well."""
    folder = demonstration.LLAMA_FOLDER if task.name == "tiny-llama" else demonstration.VIT_FOLDER
    source = checkpoint.resolve(folder)

    def show(title: str, render: Any, *arguments: Any) -> None:
        if not as_json:
            report.print_title(f"{task.name}: {title}")
            render(*arguments)
            typer.echo()

    with quiet_libraries():
        plan = plan_patch(
            checkpoint.build_meta_model(source).train(), "auto", example_inputs=task.example_inputs
        )
    show("lowmem-patch inspect", report.print_plan, plan, f"preset auto, {plan.inputs}")
    with quiet_libraries(), report.progress_bar(quiet=as_json) as progress:
        # the bundled weights are in half precision; float32 shows that nothing but rounding changes
        conversion = checkpoint.convert(source, out, dtype=torch.float32, progress=progress)
    show("lowmem-patch convert", report.print_conversion, conversion)
    with quiet_libraries(), report.progress_bar(quiet=as_json) as progress:
        converted = checkpoint.load_model(checkpoint.resolve(out), torch.float32)
        steps = checkpoint.read_fold_steps(out)
        verdict = verify_checkpoints(task.load(), converted, steps, progress=progress)
    show("lowmem-patch verify", report.print_verification, verdict)
    with quiet_libraries():
        compared = demonstration.compare(task, "exact")
    rows = [
        (
            label, run.saved.activations, run.saved.weight_copies, run.score_before,
            run.score_after, run.seconds,
        )
        for label, run in (("stock", compared.stock), ("patched", compared.patched))
    ]  # fmt: skip
    show(
        f"fine-tuning on {task.data}, preset exact", report.print_fine_tuning, rows, task.score_name
    )
    keys = ("saved_bytes", "weight_copies", "score_before", "score_after", "seconds")
    tuning = {row[0]: dict(zip(keys, row[1:], strict=True)) for row in rows}
    data = {
        "plan": plan.to_dict(),
        "convert": conversion.to_dict(),
        "verify": verdict.to_dict(),
        "fine_tuning": {"data": task.data, "score": task.score_name, **tuning},
    }
    return data, verdict.passed

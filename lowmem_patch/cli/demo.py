"""One bundled model in ``lowmem-patch demo``: its memory, its training, and the proof."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch import demo as demonstration
from lowmem_patch import verify_model
from lowmem_patch.cli.runtime import quiet_libraries
from lowmem_patch.planning.report import PatchReport
from lowmem_patch.report import layout, results

_STEPS = 16  # as many as a minute allows on two cores


def run_demo_task(task: Any, as_json: bool) -> tuple[dict[str, Any], PatchReport, bool]:
    """Memory, fine-tuning, proof; returns the results as plain data, the report, and whether all is well."""

    def show(title: str, render: Any, *arguments: Any) -> None:
        if not as_json:
            layout.print_title(f"{task.name}: {title}")
            render(*arguments)
            typer.echo()

    task = dataclasses.replace(task, train_batches=task.train_batches[:_STEPS])
    with quiet_libraries(), layout.spinner(f"{task.name}: {_STEPS} steps unpatched and patched"):
        compared = demonstration.compare(task, "auto")
    plan = compared.report
    bars = {"unpatched": plan.saved_before, "patched": plan.saved_after, "floor": plan.floor}
    show(f"memory, preset auto, {plan.inputs}", results.print_bars, bars)
    tuning = {
        label: {
            "first_loss": run.losses[0], "last_loss": run.losses[-1], "score_before": run.score_before,
            "score_after": run.score_after, "saved_bytes": run.saved.activations,
        }
        for label, run in (("unpatched", compared.stock), ("patched", compared.patched))
    }  # fmt: skip
    title = f"{len(compared.stock.losses)} steps of fine-tuning on {task.data}"
    show(title, results.print_fine_tuning, tuning, task.score_name)
    with quiet_libraries(), layout.progress_bar(quiet=as_json) as progress:
        verdict = verify_model(
            task.load(), "auto", dtypes=[torch.float32], autocast=None, progress=progress
        )
    show("gradients against float64", results.print_verification, verdict)
    data = {
        "plan": plan.to_dict(),
        "verify": verdict.to_dict(),
        "fine_tuning": {"data": task.data, "score": task.score_name, **tuning},
    }
    return data, plan, verdict.passed

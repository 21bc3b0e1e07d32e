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
    plan, stock, patched = compared.report, compared.stock, compared.patched
    bars = {"unpatched": plan.saved_before, "patched": plan.saved_after, "floor": plan.floor}
    show(f"memory, preset auto, {plan.inputs}", results.print_bars, bars)
    rows = [
        (label, run.losses[0], run.losses[-1], run.score_before, run.score_after)
        for label, run in (("unpatched", stock), ("patched", patched))
    ]  # fmt: skip
    title = f"{len(stock.losses)} steps of fine-tuning on {task.data}"
    show(title, results.print_fine_tuning, rows, task.score_name)
    with quiet_libraries(), layout.progress_bar(quiet=as_json) as progress:
        verdict = verify_model(
            task.load(), "auto", dtypes=[torch.float32], autocast=None, progress=progress
        )
    show("gradients against float64", results.print_verification, verdict)
    keys = ("first_loss", "last_loss", "score_before", "score_after")
    tuning: dict[str, dict[str, Any]] = {r[0]: dict(zip(keys, r[1:], strict=True)) for r in rows}
    for run, name in ((stock, "unpatched"), (patched, "patched")):
        tuning[name]["saved_bytes"] = run.saved.activations
    data = {
        "plan": plan.to_dict(),
        "verify": verdict.to_dict(),
        "fine_tuning": {"data": task.data, "score": task.score_name, **tuning},
    }
    return data, plan, verdict.passed

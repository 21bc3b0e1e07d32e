"""The loss heads of every architecture: ``python -m zoo.heads [model types...]``.

Each model type of transformers that has a class with a language model's head is built as in the zoo, and
makes its own loss from labels, unpatched and patched with ``exact``: the loss and all gradients must agree,
and the logits must never be computed whole. Results are lines of zoo/results/heads.jsonl, and the table
docs/heads.md is made of them.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from lowmem_patch import patch_model, patch_report
from lowmem_patch.tracing.inputs import ExampleInputs
from zoo.build import Built, CannotBuild, CannotRun, NoModel, build_transformers
from zoo.catalog import model_types
from zoo.pool import quiet_worker, run_all
from zoo.result import Result
from zoo.store import RESULTS

FILE = RESULTS / "heads.jsonl"
TABLE = Path(__file__).parents[1] / "docs" / "heads.md"
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
# of float32 gradients that were added up in another order, beside the largest of the tensor
TOLERANCE = 2e-3
NEVER, WHOLE, NONE, WRONG = "never whole", "whole", "no head found", "wrong loss or gradient"


def head_class_of(model_type: str) -> Any:
    """The first class with a language model's head.

    Raises:
        LookupError: there is none.
    """
    for name in MAPPINGS:
        entry = getattr(modeling_auto, name, {}).get(model_type)
        first = entry if isinstance(entry, str) or entry is None else entry[0]
        if first is not None and hasattr(transformers, first):
            return getattr(transformers, first)
    raise LookupError("no class with a language model's head")


def judge_head(model_type: str) -> Result:
    """For worker processes; ``status`` says whether logits were ever whole, ``reason`` why."""
    quiet_worker()
    try:
        built = build_transformers(model_type, head_class_of)
    except NoModel as error:
        return Result(model_type, "no head", str(error))
    except (CannotBuild, CannotRun) as error:
        return Result(model_type, "not built", str(error))
    return _judged(built)


def _judged(built: Built) -> Result:
    name, model = built.name, built.model.train()
    inputs = labelled(model, built.inputs)
    if inputs is None:
        return Result(name, "no loss", "its forward takes no labels beside tokens")
    patched = copy.deepcopy(model)  # before a forward, of which some models keep a state
    try:
        own = _step(model, inputs)
    except Exception as error:  # whatever a foreign forward raises
        return Result(name, "no loss", f"{type(error).__name__}: {str(error)[:160]}")
    if own is None:
        return Result(name, "no loss", "its output has no loss that needs a gradient")
    patch_model(patched, "exact", example_inputs=built.inputs)
    found = _step(patched, inputs)
    assert found is not None
    report = patch_report(patched)
    wide = [note for note in report.notes if "are computed only when read" in note]
    whole = [note for note in report.notes if "computed whole" in note or "at once" in note]
    status = WHOLE if whole else NEVER if wide else NONE
    if status == NONE:
        whole = ["no Linear that is twice as wide as its input gives logits to the caller"]
    wrong = _differences(own, found)
    status, reason = (WRONG, "; ".join(wrong)) if wrong else (status, "; ".join(whole))
    sizes = (built.parameters, built.shrink, built.feed)
    return Result(name, status, reason, *sizes)


def labelled(model: Any, inputs: ExampleInputs) -> dict[str, Any] | None:
    """The inputs with their tokens as labels; None where the forward takes none beside tokens."""
    kwargs = dict(inputs.kwargs)
    tokens = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
    takes = "labels" in inspect.signature(type(model).forward).parameters
    if inputs.args or not takes or not isinstance(tokens, Tensor) or tokens.dim() != 2:
        return None
    return {**kwargs, "labels": tokens.clone()}


def _step(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor] | None:
    torch.manual_seed(0)
    model.zero_grad()
    loss = getattr(model(**copy.deepcopy(inputs)), "loss", None)
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return None
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _differences(own: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    if set(own) != set(found):
        return [f"other gradients: {sorted(set(own) ^ set(found))[:3]}"]
    largest = max(float(tensor.abs().max()) for tensor in own.values() if tensor.numel())
    wrong = []
    for name, exact in own.items():
        size = max(float(exact.abs().max()), 1e-3 * largest) if exact.numel() else 1.0
        error = float((found[name] - exact).abs().max()) / size if exact.numel() else 0.0
        if not error <= TOLERANCE and not (exact.isnan().any() and found[name].isnan().any()):
            wrong.append(f"{name}: {error:.1e}")
    return wrong[:5]


def _write_table(results: list[Result]) -> None:
    counts = Counter(result.status for result in results)
    rows = [r for r in results if r.status in (WHOLE, NONE, WRONG)]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    lines = [
        "# Loss heads",
        "",
        "Which architectures of transformers, once patched, make their own loss without ever computing",
        f"their logits whole; made by `python -m zoo.heads` ({versions}, float32, one step, `exact`).",
        "",
        "| outcome | model types |",
        "|---|---|",
        *(f"| {status} | {count} |" for status, count in sorted(counts.items())),
        "",
        "*No head*: transformers has no class of this type with a language model's head. *No loss*: its",
        "forward takes no labels, or gives no loss. *Not built*: its default config makes no model that",
        "runs.",
        "",
        "Model types whose logits are computed whole, or of whose head nothing was found, and why:",
        "",
        "| model type | outcome | why |",
        "|---|---|---|",
        *(f"| {r.name} | {r.status} | {r.reason} |" for r in rows),
    ]
    TABLE.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo.heads", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; default: all")
    parser.add_argument("--workers", type=int, default=2, help="models at a time, one core each")
    parser.add_argument("--time-limit", type=float, help="seconds after which to stop")
    arguments = parser.parse_args()
    names = arguments.names or model_types()
    results: dict[str, Result] = {}
    if FILE.exists():
        lines = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
        results = {row["name"]: Result.from_dict(row) for row in lines}
    for result in run_all(judge_head, names, arguments.workers, arguments.time_limit):
        results[result.name] = result
        print(f"{result.name}: {result.status} {result.reason[:120]}", flush=True)
    ordered = [results[name] for name in sorted(results)]
    rows = (json.dumps(result.to_dict(), sort_keys=True) for result in ordered)
    FILE.write_text("\n".join(rows) + "\n", encoding="utf-8")
    _write_table(ordered)
    print(dict(Counter(result.status for result in ordered)))
    return 1 if any(result.status == WRONG for result in ordered) else 0


if __name__ == "__main__":
    sys.exit(main())

"""``benchmarks/whole.py`` on a CPU, with tiny widths: every row is what a step of that model is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_patch.bench import SHAPES, find_variant
from lowmem_patch.bench.measure import Step
from lowmem_patch.errors import ConfigError
from lowmem_patch.tracing.inputs import ExampleInputs

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "whole.py"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def whole() -> Any:
    spec = importlib.util.spec_from_file_location("whole", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["whole"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_rows_of_a_trial(whole: Any, number: int) -> None:
    case, trial = whole.CASES[number], whole.Trial(2, 64, 512, 2, 16)
    rows = {
        name: whole.measure(case, name, trial, "cpu", 2)
        for name in ("unpatched", "exact", "auto+checkpointing")
    }
    for row in rows.values():
        assert "error" not in row, row
        assert row["step_ms"] > 0 and row["step_peak_mib"] is None
        assert row["tokens_per_second"] == pytest.approx(1000 * 2 * 16 / row["step_ms"])
        assert row["first_loss"] == pytest.approx(rows["unpatched"]["first_loss"], rel=1e-3)
        # the rate is too small for bfloat16 weights to move
        assert row["last_loss"] == pytest.approx(row["first_loss"], rel=1e-3)
    assert rows["exact"]["act_mib"] < rows["unpatched"]["act_mib"]
    assert rows["exact"]["predicted_mib"] < rows["unpatched"]["predicted_mib"]
    assert rows["auto+checkpointing"]["predicted_mib"] <= rows["exact"]["predicted_mib"]


def test_what_a_case_is_of_stands_in_its_title(whole: Any) -> None:
    llama, qwen = whole.CASES
    assert whole.title(llama, whole.Trial()) == (
        "Llama-3.1-8B LoRA all, 2 x 4096 tokens (all 32 layers of Llama-3.1-8B, with its head)"
    )
    assert "4 of the 24 layers of Qwen2.5-0.5B, with its head" in whole.title(qwen, whole.Trial(4))
    assert "other widths" in whole.title(qwen, whole.Trial(width=64))


def test_the_shapes_are_those_of_the_models() -> None:
    with torch.device("meta"):
        models = {
            n: SHAPES[n].build(SHAPES[n].layers or 0) for n in ("llama-3.1-8b", "qwen2.5-0.5b")
        }
    for model in models.values():
        model.tie_weights()  # transformers 5.0 does not on the meta device
    sizes = {n: sum(p.numel() for p in model.parameters()) for n, model in models.items()}
    # as their cards say; Qwen's head is its embedding
    assert sizes == {"llama-3.1-8b": 8_030_261_248, "qwen2.5-0.5b": 494_032_768}
    assert {p.dtype for model in models.values() for p in model.parameters()} == {torch.bfloat16}
    assert SHAPES["llama-7b"].part() == "4 of the 32 layers of LLaMA-7B, without a head"
    assert SHAPES["swin-t"].part() == "all of Swin-T, with its head"


def test_a_step_is_whole_and_leaves_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    step = Step(model, ExampleInputs((torch.ones(2, 4),)), autocast=False)
    before = step.loss().detach()
    assert step.run() == before
    states = [state["step"] for state in step.optimizer.state.values()]
    assert len(states) == 4 and all(state == 1 for state in states)
    assert all(parameter.grad is None for parameter in model.parameters())
    step.move("cpu")
    assert step.run() == pytest.approx(float(before), rel=1e-6)


def test_words_are_joined_in_the_order_in_which_they_work() -> None:
    from tests.support.models import llama_of

    model, inputs = llama_of().train(), ExampleInputs((), {"input_ids": torch.ones(2, 9).long()})
    made = find_variant("auto+checkpointing")(model, inputs)
    assert made is model and made.model.layers[0].gradient_checkpointing
    for name in ("fastest", "auto+fastest", "auto+auto", ""):
        with pytest.raises(ConfigError, match="joined by"):
            find_variant(name)


@pytest.mark.slow
def test_the_command_writes_what_it_measured(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variant is measured in a process of its own, which runs the script; one that is not there, here."""
    out, apart = tmp_path / "out.json", whole.run_apart

    def run(case: Any, variant: str, options: Any) -> Any:
        if variant == "unpatched":
            return apart(case, variant, options)
        return whole.measure(case, variant, whole.Trial(1, 64, 64, 1, 8), "cpu", 2)

    monkeypatch.setattr(whole, "run_apart", run)
    sizes = [
        "--layers",
        "1",
        "--width",
        "64",
        "--vocabulary",
        "64",
        "--batch",
        "1",
        "--length",
        "8",
    ]
    command = [str(SCRIPT), "--device", "cpu", "--case", "qwen", "--steps", "2", *sizes]
    variants = ["--variants", "unpatched", "unsloth", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, *variants])
    whole.main()
    data = json.loads(out.read_text())
    (rows,) = data["cases"].values()
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and rows["unpatched"]["step_ms"] > 0
    assert "skipped: unsloth is not installed" in shown and "unsloth" not in rows
    assert data["environment"]["torch"] and "AdamW" in data["environment"]["step"]
    monkeypatch.setattr(sys, "argv", [*command, "--variants", "fastest"])
    with pytest.raises(SystemExit) as end:
        whole.main()
    assert end.value.code == 2 and "fastest" in capsys.readouterr().err

"""Variants within a budget, blocks checkpointed by hand, and the curve of both."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lowmem_patch import patch_report
from lowmem_patch.bench import compare, curve_variants, find_variant
from lowmem_patch.cli import app
from lowmem_patch.errors import ConfigError
from lowmem_patch.tracing.inputs import as_example_inputs
from tests.support.fitted import made, planned_once, tokens
from tests.support.models import llama_of
from tests.support.step import step, warned

ASSETS = Path(__file__).parent.parent / "lowmem_patch" / "assets"
pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_budget_is_a_variant() -> None:
    model, inputs = llama_of(num_hidden_layers=2).train(), {"input_ids": tokens()}
    given = as_example_inputs(inputs)
    names = ("exact", "exact+fit=1g", "exact+fit=1KiB", "fit=1g")
    with planned_once():
        rows = compare(model, given, {n: find_variant(n) for n in names}, rounds=2, steps=1).rows
    plain, large, small, auto = rows
    assert plain.act == large.act and large.measured and auto.measured
    assert small.skipped is not None and "least budget" in small.skipped and not small.failed
    with warned():
        found = patch_report(find_variant("exact+fit=1g")(copy.deepcopy(model), given))
    assert found.config.name == "exact" and found.fit is not None and found.fit.asked == "1g"


def test_every_nth_block_is_checkpointed_and_computes_the_same() -> None:
    torch.manual_seed(0)
    model, inputs = llama_of(num_hidden_layers=3).train(), {"input_ids": tokens()}
    wanted = step(copy.deepcopy(model), inputs)
    names = ("unpatched", "every=3", "every=1", "exact", "exact+every=1")
    given = as_example_inputs(inputs)
    rows = compare(model, given, {n: find_variant(n) for n in names}, rounds=2, steps=1).rows
    assert all(row.measured for row in rows), rows
    acts = {row.name: row.act or 0 for row in rows}
    assert acts["unpatched"] > acts["every=3"] > acts["every=1"]
    assert acts["exact+every=1"] < acts["exact"]
    other = find_variant("every=2")(copy.deepcopy(model), given)
    found = step(other, inputs)
    assert all(torch.equal(g, wanted.gradients[n]) for n, g in found.gradients.items())


@pytest.mark.parametrize(
    "name", ["fit=", "fit=lots", "every=0", "every=two", "fit=1g+fit=2g+often"]
)
def test_what_is_no_variant(name: str) -> None:
    with pytest.raises(ConfigError, match=r"variant|size"):
        find_variant(name)


def test_auto_is_no_budget_of_a_comparison() -> None:
    with pytest.raises(ConfigError, match="name a size: fit=24GiB"):
        find_variant("fit=auto")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_curve_is_planned_where_the_inputs_are() -> None:
    """Adapters that were made on the CPU for a model elsewhere go there: the meta device stands for a GPU."""
    model, inputs = made("llama-lora")
    meta = as_example_inputs(inputs).map(lambda tensor: tensor.to("meta"))
    model.to("meta")
    for name, module in model.named_modules():
        if name.endswith(("lora_A.default", "lora_B.default")):
            module.to_empty(device="cpu")
    assert {p.device.type for p in model.parameters()} == {"cpu", "meta"}
    names = curve_variants(model, meta)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert len([name for name in names if name.startswith("fit=")]) == 5


def test_the_curve_and_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("adjustText")
    picture = tmp_path / "curve.png"
    arguments = (
        "bench", str(ASSETS / "tiny-vit"), "--curve", "--batch-size", "8", "--rounds", "2", "--steps", "1",
        "--device", "cpu", "--plot", str(picture), "--json",
    )  # fmt: skip
    with planned_once():
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["variants"]
    fitted = [row for name, row in rows.items() if name.startswith("fit=")]
    assert len(fitted) == 5 and any("step_ms" in row for row in fitted)
    acts = [row["act_mib"] for row in (rows["auto"], *fitted) if "act_mib" in row]
    assert acts == sorted(acts, reverse=True) and acts[-1] < acts[0]
    assert {"unpatched", "auto+every=1", "liger"} <= rows.keys() and picture.stat().st_size > 1000
    refused = CliRunner().invoke(app, [*arguments, "--variants", "auto"])
    assert refused.exit_code == 2 and "--curve" in refused.stderr

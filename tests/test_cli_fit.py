"""Budgets on the command line and in configs: the suggestions, the choice, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from lowmem_patch import plan_patch
from lowmem_patch.cli import app
from lowmem_patch.cli.assumptions import Asked
from lowmem_patch.config import load_config
from lowmem_patch.errors import BudgetError, ConfigError
from lowmem_patch.memory import Training, steps
from lowmem_patch.memory.timeline import RunBytes, Timeline
from lowmem_patch.planning.budget import Budget, make_budget
from lowmem_patch.planning.choices import input_sizes
from lowmem_patch.planning.suggestions import Suggestion, find_suggestions
from lowmem_patch.report.fit import print_suggestions
from lowmem_patch.tracing.inputs import as_example_inputs
from tests.support.models import llama_of
from tests.support.stacks import rows, stack

LAYERS = 8  # more than are run


def written(folder: Path, layers: int) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("models") / "llama", LAYERS)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("models") / "shallow", 1)


@pytest.fixture(autouse=True, scope="module")
def no_workspaces() -> Iterator[None]:
    """These models are far smaller than cuBLAS's workspaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        patch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
        yield


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


@pytest.fixture(scope="module")
def known() -> dict[Any, Any]:
    """Steps on fake tensors that were run, by what they are of."""
    return {}


@pytest.fixture
def each_step_once(known: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one command with one model, whose limits differ, run each step on fake tensors once."""
    run_each_step_once(known, monkeypatch)


def run_each_step_once(known: dict[Any, Any], patch: pytest.MonkeyPatch) -> None:
    run_levels = steps.run_levels

    def of(model: Any) -> tuple[Any, ...]:
        weights = ((name, p.shape, p.requires_grad) for name, p in model.named_parameters())
        # as it is or patched, and with checkpointing switched on
        return (
            *weights,
            *((type(module), *vars(module)) for module in model.modules()),
            str([getattr(module, "gradient_checkpointing", None) for module in model.modules()]),
        )

    def levels_once(shadow: Any, blocks: Any, levels: Any, **how: Any) -> Any:
        given = shadow.inputs if how["inputs"] is None else how["inputs"]
        others = sorted((name, str(how[name])) for name in how if name != "inputs")
        key = (of(shadow.model), str(sorted(levels.items())), blocks.lag, str(given), str(others))
        if key not in known:
            known[key] = run_levels(shadow, blocks, levels, **how)
        return known[key]

    patch.setattr(steps, "run_levels", levels_once)


@pytest.fixture(scope="module")
def found(llama: Path, known: dict[Any, Any]) -> Any:
    """What is said of a model, its suggestions and its budget."""
    with pytest.MonkeyPatch.context() as patch:
        run_each_step_once(known, patch)
        result = call(llama, "--memory", "9MiB", "--fit", "9m", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_accumulation_is_in_the_budget(shallow: Path) -> None:
    once, twice = (
        json.loads(
            call(shallow, "--fit", "64MiB", "--accumulation", n, "--seq-len", "64", "--json").stdout
        )
        for n in (1, 2)
    )
    assert (once["fit"]["accumulates"], twice["fit"]["accumulates"]) == (False, True)
    more = twice["fit"]["predicted"] - once["fit"]["predicted"]
    assert 0 < more <= once["fit"]["gradients"]
    # as the step that `inspect` predicts without a budget, where it rounds no activation up
    wanted = [one["memory"]["after"]["total"] for one in (once, twice)]
    found = [one["fit"] for one in (once, twice)]
    requested = [fit["predicted"] - fit["rounding"] - fit["margin"] for fit in found]
    assert requested == pytest.approx(wanted, rel=0.01)


@pytest.mark.slow
def test_the_suggestions_and_the_choice(found: Any) -> None:
    names = [suggestion["name"] for suggestion in found["suggestions"]]
    totals = [suggestion["total"] for suggestion in found["suggestions"]]
    assert names[:4] == [
        "patched, and no block runs again", "all blocks run again, their attention is saved",
        "all blocks run again", "all blocks run again, their inputs in host memory",
    ]  # fmt: skip
    assert names[4:] == [
        "256 tokens a row, not 512", "a batch of 1, not 2",
        "QLoRA: weights in 4 bits, adapters of rank 8 train",
        "adamw8bit, an 8-bit optimizer, not adamw", "FSDP over 2 GPUs, bytes of each",
    ]  # fmt: skip
    assert [suggestion["on_top"] for suggestion in found["suggestions"]] == [False] * 4 + [True] * 5
    assert totals[0] > totals[1] >= totals[2] >= totals[3] > max(totals[4:6])
    seconds = [suggestion["seconds"] for suggestion in found["suggestions"]]
    assert seconds[0] < seconds[1] <= seconds[2] <= seconds[3] and seconds[4] < seconds[0]
    # what few blocks tell is what the whole model takes, and 3 % for fragmentation
    after = found["memory"]["after"]
    states = after["parameters"] + after["optimizer"]
    assert totals[0] - states == pytest.approx((after["total"] - states) / 0.97, rel=0.01)
    fit = found["fit"]
    assert totals[2] < fit["predicted"] <= fit["budget"] == 9 * 2**20 < totals[0]
    assert len(fit["blocks"]) == LAYERS and 0 < fit["extra_seconds"] < seconds[3] - seconds[0]


@pytest.mark.slow
def test_both_are_shown(shallow: Path) -> None:
    fits = call(shallow, "--memory", "9MiB", "--seq-len", "256").stdout
    assert "to fit in 9.0 MiB" in fits and "with one change more" not in fits
    shown = call(shallow, "--memory", "1MiB", "--fit", "9MiB", "--seq-len", "256").stdout
    assert "to fit in 1.0 MiB" in shown and "GPU like the A100" in shown
    lines = shown.splitlines()
    ways = next(n for n, line in enumerate(lines) if line.startswith("patched, and no block"))
    heading = next(n for n, line in enumerate(lines) if line.startswith("the last row above"))
    assert ways < heading and any(line.startswith("a batch of 1") for line in lines[heading:])
    assert not any(line.startswith("a batch of 1") for line in lines[:heading])
    assert "fit 9MiB" in shown and "predicted peak" in shown
    # each table explains its columns, in the command line's words
    for column in ("before, after: ", "as patched, held: ", "more ms: ", "step ms: ", "total: "):
        assert shown.count(column) == 1, column
    assert "accumulation" in shown and "accumulation=" not in shown
    (header,) = (line for line in lines if line.startswith("saved bytes in"))
    assert header.endswith("x floor")


def suggestions_of(*blocks: nn.Module, rows: torch.Tensor) -> list[str]:
    model = nn.Sequential(*blocks)
    budget, inputs = make_budget("1GiB", model), as_example_inputs((rows,))
    suggestions = find_suggestions(model, load_config("auto"), inputs, Training(), budget)
    return [suggestion.name for suggestion in suggestions]


def test_the_suggestions_name_what_the_model_has() -> None:
    def convolutions() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    images = torch.randn(2, 4, 8, 8)
    names = suggestions_of(convolutions(), convolutions(), nn.Linear(8, 2), rows=images)
    linears = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)]
    of_linears = suggestions_of(*linears, rows=torch.randn(2, 8))
    for found in (names, of_linears):
        assert "all blocks run again" in found and not any("attention" in name for name in found)
    assert [any("QLoRA" in name for name in found) for found in (names, of_linears)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("layers", "asked"),
    [
        *((2, one) for one in ({}, {"accumulation": 2}, {"gpus": 4}, {"optimizer": "adafactor"})),
        *(
            pytest.param(LAYERS, one, marks=pytest.mark.slow)
            for one in ({"gpus": 4}, {"accumulation": 2, "optimizer": "adafactor"})
        ),
    ],
)
def test_totals_of_the_suggestions_are_those_of_a_budget(
    layers: int, asked: dict[str, Any]
) -> None:
    """Of many blocks few are run: what the allocator rounds up for activations is missing there."""
    with torch.device("meta"):
        model = llama_of(num_hidden_layers=layers)
    inputs = as_example_inputs({"input_ids": torch.empty(2, 64, dtype=torch.long, device="meta")})
    optimizer, gpus = asked.get("optimizer", "adamw"), asked.get("gpus", 1)
    training = Training(optimizer, accumulates="accumulation" in asked, gpus=gpus)
    suggestions = find_suggestions(model, load_config("auto"), inputs, training, Budget(2**30, ""))
    fit = plan_patch(model, "auto", example_inputs=inputs, fit="1GiB", **asked).fit
    assert fit is not None and not any(block.seconds for block in fit.blocks)
    rounded = fit.rounding + fit.margin if layers == LAYERS else 0
    assert suggestions[0].name == "patched, and no block runs again"
    assert suggestions[0].total == fit.predicted - rounded


def test_what_goes_to_the_host_is_what_the_run_before_gave() -> None:
    runs = [RunBytes(1, size, True, 1 + size, 1 + size) for size in (3, 5, 7)]
    assert input_sizes(Timeline(tuple(runs), {}, 0, 0)) == [3, 3, 5]


def test_a_budget_as_the_suggestions_print_it_is_no_smaller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_suggestions([Suggestion("patched", 2**30 + 1, 1.0)], 2**30, "a GPU")
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("patched"))
    assert "1.01 GiB" in row and row.split()[3] == "no"


@pytest.mark.parametrize(
    ("options", "text"),
    [(("--fit", "24"), "write 24GiB, or 24B for bytes"),
     (("--memory", "25769803776"), "write 25769803776B"), (("--fit", "24 apples"), "24 apples"),
     (("--fit", "auto"), "GPU"),
     (("--fit", "9MiB", "--checkpointing"), "--checkpointing out")],
)  # fmt: skip
def test_what_is_refused(shallow: Path, options: tuple[str, ...], text: str) -> None:
    result = call(shallow, "--seq-len", "32", *options)
    assert result.exit_code == 2 and text in result.stderr


def test_too_small_a_budget_has_an_exit_code_of_its_own(shallow: Path) -> None:
    result = call(shallow, "--seq-len", "32", "--fit", "1KiB")
    assert result.exit_code == 4 and "least budget" in result.stderr
    failed = json.loads(call(shallow, "--seq-len", "32", "--fit", "1KiB", "--json").stdout)
    assert failed["error"]["exit_code"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("each_step_once")
def test_the_verdict_says_whether_anything_fits(
    llama: Path, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the totals of the suggestions: at each of them the next row begins to fit."""
    monkeypatch.setenv("COLUMNS", "300")  # one line, as wide as it is

    def look(limit: int) -> tuple[str, int]:
        shown = call(llama, "--memory", f"{limit}B")
        return shown.stdout.splitlines()[-1], shown.exit_code

    totals = [suggestion["total"] for suggestion in found["suggestions"]]
    line, code = look(totals[0])
    assert line.endswith("patched, and no block needs to run again") and code == 0
    line, code = look(totals[3])
    assert "where blocks run again" in line and code == 0
    line, code = look(totals[3] - 1)
    assert (
        re.search(r"each of these alone suffices: 5\d\d tokens a row, not 512; ", line)
        and code == 0
    )
    assert "FSDP over 2 GPUs, bytes of each" in line
    line, code = look(2**10)
    assert line.startswith("nothing fits in 1.0 KiB: the least of all rows above is ")
    assert code == 4
    data = [json.loads(call(llama, *more, "--json").stdout) for more in ((), ("--memory", "1KiB"))]
    assert [each["fits"] for each in data] == [None, False]
    assert not any("FSDP" in suggestion["name"] for suggestion in data[1]["suggestions"])


@pytest.mark.slow
def test_a_length_that_is_no_row_of_the_suggestions_fits(shallow: Path) -> None:
    smallest = json.loads(call(shallow, "--memory", "1KiB", "--solve", "length", "--json").stdout)[
        "memory"
    ]["least_after"]
    limit = f"{int(1.1 * smallest)}B"
    shown = call(
        shallow, "--memory", limit, "--solve", "length", "--seq-len", "512", "--batch-size", "8"
    )
    assert shown.exit_code == 0 and "the largest length is " in shown.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_largest_size_within_a_budget_is_what_is_shown(shallow: Path) -> None:
    options = ("--fit", "1MiB", "--solve", "length", "--batch-size", "3", "--host-memory", "1GiB")
    data = json.loads(call(shallow, *options, "--json").stdout)
    length = data["largest"]["length"]
    assert 1 < length < 512 and f"input_ids 3x{length}" in data["assumptions"]["inputs"]
    assert data["fit"]["inputs"] == f"input_ids 3x{length}"
    assert 0.95 * 2**20 < data["fit"]["predicted"] <= 2**20
    shown = call(shallow, *options).stdout
    assert f"length: {length} tokens (the largest within 1MiB: --solve)" in shown
    answer = f"largest length within 1MiB: {length} (input_ids 3x{length}); a size 1 or 2 % larger may fit"
    assert " ".join(shown.split()).endswith(f"{answer} as well")
    most = call(shallow, "--fit", "1GiB", *options[2:]).stdout
    assert "length: 512 tokens (the largest within 1GiB: --solve; the model has no more" in most
    answer = "largest length within 1GiB: 512 (input_ids 3x512); the model has no more positions"
    assert most.splitlines()[-1].startswith(answer)
    assert "host memory: 1.0 GiB for what blocks offload (--host-memory)" in most
    none = call(shallow, "--fit", "1KiB", "--solve", "batch", "--seq-len", "64")
    assert none.exit_code == 4 and "for input_ids 1x64 and adamw" in none.stderr


def test_host_memory_is_shared_among_gpus_and_may_be_none() -> None:
    def host(text: str, gpus: int) -> int:
        return Asked(1, None, 1, None, "1GiB", text, None).host(gpus)

    assert host("8GiB", 1) == 4 * host("8GiB", 4) == 2**33
    assert host("0GiB", 2) == host("0", 1) == host(" 0 mb", 1) == 0
    with pytest.raises(ConfigError, match="no size of memory"):
        host("0 apples", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("each_step_once")
def test_the_suggestions_count_the_gpus_that_were_asked_for(llama: Path, found: Any) -> None:
    four = json.loads(call(llama, "--memory", "9MiB", "--gpus", 4, "--json").stdout)
    assert four["suggestions"][0]["total"] < found["suggestions"][0]["total"]
    after = four["memory"]["after"]
    assert four["suggestions"][0]["total"] == pytest.approx(after["total"], rel=0.1)
    assert [suggestion["name"] for suggestion in four["suggestions"]][4:] == [
        "256 tokens a row, not 512",
        "a batch of 1, not 2",
        "FSDP over 8 GPUs, bytes of each",
    ]


@pytest.mark.slow
def test_qlora_of_a_model_without_data_has_workspaces(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the error of a budget says of QLoRA is what the suggestions say."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    size = ("--batch-size", "1", "--seq-len", "16")
    (said,) = re.findall(r"QLoRA.*: ([\d.]+) MiB", call(llama, "--fit", "3MiB", *size).stderr)
    suggestions = json.loads(call(llama, "--memory", "3MiB", *size, "--json").stdout)["suggestions"]
    (shown,) = (suggestion["total"] for suggestion in suggestions if "QLoRA" in suggestion["name"])
    assert float(said) * 2**20 == pytest.approx(shown, rel=0.05)


def test_a_config_names_the_budget(tmp_path: Path) -> None:
    model, x = stack(), rows()
    file = tmp_path / "small.yaml"
    file.write_text("norms: share\nfit: 1GiB\n")
    found = plan_patch(model, file, example_inputs=x)
    assert found.fit is not None and found.fit.asked == "1GiB" and found.config.name == "small"
    with pytest.raises(BudgetError, match="fit 1KiB"):
        plan_patch(model, file, example_inputs=x, fit="1KiB")  # the call's own comes first
    with pytest.raises(ConfigError, match="fit"):
        load_config({"fit": 2.5})
    assert plan_patch(model, "auto", example_inputs=x).fit is None


def test_a_preset_file_names_the_budget_of_inspect(shallow: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    size = ("--batch-size", "1", "--seq-len", "16", "--preset", str(file))
    file.write_text("fit: 1GiB\n")
    assert "fit 1GiB" in call(shallow, *size).stdout
    assert "fit 2GiB" in call(shallow, *size, "--fit", "2GiB").stdout  # the option comes first
    file.write_text("fit: 1KiB\n")
    assert call(shallow, *size).exit_code == 4
    file.write_text("fit: auto\n")  # what a GPU has free, and there is none
    assert call(shallow, *size).exit_code == 0


def test_an_empty_config_is_said_to_be_empty(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"empty\.yaml is empty: it must hold keys"):
        load_config(file)

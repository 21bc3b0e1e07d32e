"""Variants side by side: what a row holds, whose turn it is, what fails alone, the command and its files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import lowmem_patch
from lowmem_patch import patch_model, saved_bytes
from lowmem_patch.bench import SHAPES, VARIANTS, Comparison, compare, compiled, unpatched
from lowmem_patch.bench.environment import commit
from lowmem_patch.cli import app
from lowmem_patch.config import load_config
from lowmem_patch.errors import VariantError
from lowmem_patch.plot import Point, pareto
from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support.models import llama, tokens

ROOT = Path(__file__).parent.parent
# transformers renames a method; timm and the tests' oldest transformers know the old name alone
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
FIELDS = {
    "act_mib",
    "peak_mib",
    "reserved_mib",
    "step_ms",
    "step_spread_ms",
    "kernels_ms",
    "per_second",
}


class Plain(nn.Module):
    """A Linear that says when it runs."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.log = log
        self.label = ""
        self.fails_at = 10**6

    def __deepcopy__(self, memo: dict[int, Any]) -> Plain:
        other = Plain(self.log)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(self.label)
        if self.log.count(self.label) == self.fails_at:
            raise RuntimeError("out of something\nand " + "more " * 100)
        return self.linear(x)


def labelled(label: str, fails_at: int = 10**6) -> Any:
    def variant(model: Plain, _inputs: ExampleInputs) -> Plain:
        model.label, model.fails_at = label, fails_at
        return model

    return variant


ROWS = ExampleInputs((torch.randn(3, 8),))


def test_variants_take_turns() -> None:
    log: list[str] = []
    told: list[tuple[str, int, int]] = []
    variants = {name: labelled(name) for name in "abc"}
    result = compare(
        Plain(log), ROWS, variants, rounds=2, steps=2, progress=lambda *a: told.append(a)
    )
    order = [label for label, before in zip(log, [None, *log], strict=False) if label != before]
    assert order == ["a", "b", "c"] * 3  # first steps, then two rounds
    assert [(row.name, len(row.times)) for row in result.rows] == [(n, 4) for n in "abc"]
    assert (result.work, result.unit, result.device, result.parked) == (3, "rows", "cpu", False)
    assert [done for _, done, _ in told] == list(range(9)) and {n for _, _, n in told} == {9}


@pytest.mark.parametrize("fails_at", [1, 5], ids=["first steps", "a round"])
def test_a_variant_that_fails_stops_no_other(fails_at: int) -> None:
    log: list[str] = []
    variants = {"a": labelled("a"), "bad": labelled("bad", fails_at), "c": labelled("c")}
    result = compare(Plain(log), ROWS, variants, rounds=3, steps=1)
    a, bad, c = result.rows
    assert bad.failed and not bad.measured
    assert (
        bad.failed.startswith("RuntimeError: out of something and more") and len(bad.failed) < 330
    )
    assert a.measured and c.measured and len(c.times) == 3
    assert log.count("bad") == fails_at
    assert result.to_dict()["variants"]["bad"] == {"error": bad.failed}


def test_a_variant_without_sense_is_skipped_with_the_reason() -> None:
    def absent(model: Any, _inputs: ExampleInputs) -> Any:
        raise VariantError("not installed")

    variants = {"absent": absent, "auto": VARIANTS["auto"]}
    rows = compare(Plain([]), ROWS, variants, rounds=2, steps=1).rows
    assert rows[0].skipped == "not installed" and not rows[0].failed
    assert rows[1].skipped and "nothing was patched in Plain" in rows[1].skipped


def test_copies_share_frozen_weights_and_none_may_write_them() -> None:
    model, seen = llama(), {}
    model.requires_grad_(False).lm_head.requires_grad_(True)
    kept = {name: value.clone() for name, value in model.state_dict().items()}

    def noted(name: str, writes: bool = False) -> Any:
        def variant(copied: Any, _inputs: ExampleInputs) -> Any:
            seen[name] = copied
            if writes:
                with torch.no_grad():
                    copied.model.norm.weight.add_(0.0)
            return copied

        return variant

    variants = {"a": noted("a"), "b": noted("b"), "writer": noted("writer", writes=True)}
    result = compare(model, tokens(), variants, rounds=2, steps=1, share_frozen=True)
    assert seen["a"].model.norm.weight is seen["b"].model.norm.weight is model.model.norm.weight
    assert len({id(copied.lm_head.weight) for copied in (*seen.values(), model)}) == 4
    assert [row.measured for row in result.rows] == [True, True, False]
    assert "wrote into frozen weights" in str(result.rows[2].failed)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    compare(model, tokens(), {"a": noted("a")}, rounds=2, steps=1)
    assert seen["a"].model.norm.weight is not model.model.norm.weight


@pytest.mark.slow
def test_rows_of_a_real_model() -> None:
    model, inputs = llama(), tokens()
    names = ("unpatched", "paper", "exact", "auto", "compact", "checkpointing")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = compare(model, inputs, {n: VARIANTS[n] for n in names}, rounds=2, steps=2)
    acts = {row.name: row.act for row in result.rows}
    assert None not in acts.values() and [row.failed for row in result.rows] == [None] * 6
    labels = {**inputs.kwargs, "labels": inputs.kwargs["input_ids"]}
    for name in names[:5]:  # with the model's own loss
        own = VARIANTS[name](llama(), inputs)
        with saved_bytes(own) as saved:
            output = own(**labels)
        del output
        assert acts[name] == saved.total, name
    assert acts["checkpointing"] < acts["auto"] < acts["unpatched"]  # type: ignore[operator]
    data = result.to_dict()
    assert set(data["variants"]) == set(names) and data["unit"] == "tokens"
    for row in data["variants"].values():
        assert set(row) == FIELDS and row["peak_mib"] is None
        assert row["per_second"] == pytest.approx(
            1000 * inputs.kwargs["input_ids"].numel() / row["step_ms"]
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.model.gradient_checkpointing
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside its compiler
def test_what_a_compiled_model_holds_is_seen() -> None:
    # a compiled head computes its logits whole
    config = {**load_config("auto").to_dict(), "head": "keep"}

    def patched(model: Any, inputs: Any) -> Any:
        return patch_model(model, config, example_inputs=inputs)

    variants = {
        "auto": patched,
        "compile": compiled(unpatched, backend="aot_eager_decomp_partition"),
        "auto+compile": compiled(patched, backend="aot_eager_decomp_partition"),
    }
    auto, plain, both = compare(llama(), tokens(), variants, rounds=2, steps=1).rows
    torch.compiler.reset()
    assert (plain.failed, both.failed) == (None, None)
    assert auto.act and plain.act and both.act
    assert both.act <= 1.05 * auto.act < plain.act


def test_liger_touches_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(VariantError, match="not installed"):
        VARIANTS["liger"](llama(), tokens())
    asked: dict[str, Any] = {}

    def apply(model: Any, **options: Any) -> None:
        asked.update(options, model=model)
        modeling_llama.LlamaRMSNorm = object  # as Liger does, also when it is given a model
        modeling_llama.left_behind = True  # type: ignore[attr-defined]

    fake = types.ModuleType("liger_kernel.transformers.monkey_patch")
    fake.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    fake._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    names, model = dict(vars(modeling_llama)), llama()
    assert VARIANTS["liger"](model, tokens()) is model
    assert asked["model"] is model and asked["fused_linear_cross_entropy"]
    assert not asked["rope"] and not asked["cross_entropy"]
    assert vars(modeling_llama) == names
    VARIANTS["liger"](model.model, tokens())
    assert not asked["fused_linear_cross_entropy"]  # that model has no head
    with pytest.raises(VariantError, match="nothing for Plain"):
        VARIANTS["liger"](Plain([]), ROWS)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_can_be_built(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = shape.build(1)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10**6
    assert (shape.length is None) == hasattr(model, "patch_embed")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


QUICK = ("--device", "cpu", "--rounds", "2", "--steps", "1", "--batch-size", "1")


def test_the_table_and_the_picture(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("adjustText")
    picture = tmp_path / "out.png"
    result = call(folder, *QUICK, "--seq-len", "8", "--plot", picture, "--train", "lora")
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert set(lines) >= {"variant", *VARIANTS} - {"compile", "auto+compile"}
    head = result.stdout.splitlines()
    assert any("tokens" in line for line in head) and not any(
        "peak" in line.split() for line in head[:3]
    )
    assert ("1.00x" in lines["unpatched"] and "MiB" in lines["auto"]) or "KiB" in lines["auto"]
    assert "skipped: liger-kernel" in result.stdout or "x" in lines["liger"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(layers: int) -> Any:  # steps of a ViT-B take long on a CPU
        return timm.create_model("vit_tiny_patch16_224", depth=layers)

    monkeypatch.setitem(SHAPES, "vit-b", dataclasses.replace(SHAPES["vit-b"], build=narrow))
    result = call(
        "--shape",
        "vit-b",
        "--layers",
        "1",
        *QUICK,
        "--json",
        "--variants",
        "auto,unpatched",
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["model"] == "vit-b" and data["autocast"] is True and data["unit"] == "images"
    assert list(data["variants"]) == ["auto", "unpatched"]
    assert data["environment"]["torch"] and data["environment"]["date"]
    assert data["environment"]["lowmem-patch"].startswith(lowmem_patch.__version__)
    assert data["variants"]["auto"]["act_mib"] < data["variants"]["unpatched"]["act_mib"]


@pytest.mark.parametrize(("shape", "way"), [("vit-b", "; --layers 1 runs less"), ("swin-t", "")])
def test_a_shape_on_a_cpu_says_that_it_takes_long(shape: str, way: str) -> None:
    found = call("--shape", shape, "--device", "cpu", "--train", "lora:nonsense").stderr
    assert f"note: {shape} runs on the CPU, where a step takes long{way}" in found
    assert way or "--layers" not in found


def test_a_failure_is_in_the_table_and_exit_codes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: Any, _inputs: ExampleInputs) -> Any:
        raise ValueError("no compiler")

    def absent(model: Any, _inputs: ExampleInputs) -> Any:
        raise VariantError("not here")

    monkeypatch.setitem(VARIANTS, "compile", broken)
    monkeypatch.setitem(VARIANTS, "liger", absent)
    more = (*QUICK, "--seq-len", "8", "--variants")
    result = call(folder, *more, "unpatched,compile,liger")
    assert result.exit_code == 0, result.output
    assert "failed: ValueError: no compiler" in result.stdout and "1.00x" in result.stdout
    assert "skipped: not here" in result.stdout
    assert call(folder, *more, "compile,liger").exit_code == 1
    assert call(folder, *more, "liger").exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "naming"),
    [
        ((), "MODEL (a checkpoint) or --shape"),
        (("x", "--shape", "vit-b"), "MODEL (a checkpoint) or --shape"),
        (("--shape", "gpt-5"), "llama-3-8b"),
        (("--shape", "swin-t", "--layers", "2"), "--layers"),
        (("x", "--layers", "2"), "--layers"),
        (("--shape", "vit-b", "--variants", "fastest"), "joined by +"),
        (("--shape", "vit-b", "--train", "qlora"), "4-bit"),
        (("--shape", "vit-b", "--layers", "1", "--train", "lora:nonsense"), "qkv"),
        (("/nowhere/at/all",), "no such folder"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], naming: str) -> None:
    result = call(*arguments, "--device", "cpu")
    assert result.exit_code == 2 and naming in result.stderr, result.output
    assert len(result.stderr.strip().splitlines()) == 1 and not result.stdout


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = call("--shape", "vit-b", "--plot", "out.png", "--device", "cpu")
    assert result.exit_code == 2 and "lowmem-patch[plot]" in result.stderr


def test_pareto() -> None:
    points = [
        Point("a", 4, 9),
        Point("b", 2, 5),
        Point("c", 3, 4),
        Point("d", 2, 3),
        Point("e", 5, 9),
    ]
    assert [point.label for point in pareto(points)] == ["b", "a"]


@pytest.mark.gpu
def test_memory_on_a_gpu_depends_on_no_other_variant() -> None:
    inputs = tokens().map(lambda tensor: tensor.cuda())
    model = llama().cuda()

    def measured(*names: str) -> Comparison:
        return compare(model, inputs, {n: VARIANTS[n] for n in names}, rounds=2, steps=1)

    alone, beside = measured("auto").rows[0], measured("unpatched", "paper", "auto").rows[2]
    assert alone.act == beside.act and alone.peak == beside.peak
    assert alone.act and alone.peak and alone.reserved is not None and alone.act <= alone.peak


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # the compiler's advice
def test_models_that_wait_may_lie_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem_patch.bench import compare as function

    module = sys.modules[function.__module__]
    inputs = tokens().map(lambda tensor: tensor.cuda())
    model = llama().cuda()
    chosen = {n: VARIANTS[n] for n in ("unpatched", "auto", "compile")}
    here = compare(model, inputs, chosen, rounds=2, steps=1)
    monkeypatch.setattr(module, "_needs_host_memory", lambda *_: True)
    parked = compare(model, inputs, chosen, rounds=2, steps=1)
    torch.compiler.reset()
    assert parked.parked and not here.parked
    for a, b in zip(here.rows, parked.rows, strict=True):
        assert a.failed is None and (a.act, a.peak) == (b.act, b.peak)


def test_a_result_names_the_commit_of_its_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(
            ["git", "-C", str(tmp_path), *name, *arguments], check=True, capture_output=True
        )

    assert commit(tmp_path) == ""
    git("init")
    assert commit(tmp_path) == ""  # no commit yet
    file = tmp_path / "file"
    file.write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = commit(tmp_path)
    assert len(clean) >= 7 and not clean.endswith("+")
    file.write_text("two")
    assert commit(tmp_path) == f"{clean}+"

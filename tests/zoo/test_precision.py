"""bf16, autocast and GPUs in the zoo: what is judged turns red when it is broken, and the page tells it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.nn import norms
from lowmem_patch.nn.activations import RecomputedActivation
from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support import toy_blocks as models
from zoo import judge as zoo_judge
from zoo import store, table
from zoo.build import Built, randomise
from zoo.errors import compare_outputs
from zoo.judge import judge
from zoo.pool import Limits
from zoo.precision import AUTOCAST, BF16, FLOAT32, GPU_BF16, GPU_FLOAT32, Precision, in_dtype
from zoo.products import products
from zoo.result import PresetResult, Result
from zoo.steps import Step, jittered

LOW = pytest.mark.parametrize("precision", [BF16, AUTOCAST], ids=lambda precision: precision.name)
Break = Callable[[pytest.MonkeyPatch], None]


class Mixed(models.ReturnedNorm):
    """Returns a norm's output; in bf16 one Linear and a table of frequencies stay in float32."""

    _keep_in_fp32_modules = ("router",)

    def build(self) -> None:
        super().build()
        self.router, self.act = nn.Linear(models.WIDTH, 4), nn.GELU()
        self.register_buffer("inv_freq", torch.linspace(0.1, 1, models.WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.embed(x))
        scores = self.router(y.to(self.router.weight.dtype))
        return self.head(self.final(self.act(self.inner(y)))), y, scores


def judged(precision: Precision, break_it: Break | None = None) -> Result:
    network, args = models.built(Mixed)
    built = Built("mixed", randomise(network), ExampleInputs(args), "", "", 0)
    with pytest.MonkeyPatch.context() as patch:
        if break_it is not None:
            break_it(patch)
        return judge(built, precision=precision)


def norm_dtype(patch: pytest.MonkeyPatch) -> None:
    """A norm that nobody but the caller would see: what Linears read keeps its dtype."""
    forward = Mixed.forward

    def wrong(self: Any, x: Tensor) -> Any:
        out, y, scores = forward(self, x)
        other = torch.float64 if isinstance(self.norm, norms.MSNorm) else y.dtype
        return out, y.to(other), scores

    patch.setattr(Mixed, "forward", wrong)


def product_dtype(patch: pytest.MonkeyPatch) -> None:
    """The router has one more product, in float16, and nothing that the model returns says so."""
    forward = Mixed.forward

    def wrong(self: Any, x: Tensor) -> Any:
        out, y, scores = forward(self, x)
        if isinstance(self.norm, norms.MSNorm):
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                torch.matmul(y.half(), self.router.weight.half().t())
        return out, y, scores

    patch.setattr(Mixed, "forward", wrong)


def gradient(patch: pytest.MonkeyPatch) -> None:
    forward = RecomputedActivation.forward
    patch.setattr(
        RecomputedActivation, "forward", lambda self, x: forward(self, x + 0.2 * (x - x.detach()))
    )


def output(patch: pytest.MonkeyPatch) -> None:
    normed = norms.MSLayerNorm.normed
    patch.setattr(
        norms.MSLayerNorm, "normed", lambda self, x, dtype=None: normed(self, x, dtype) * 1.05
    )


def undo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(zoo_judge, "unpatch_model", lambda model: None)


def more_bytes(patch: pytest.MonkeyPatch) -> None:
    def kept(module: Any, args: Any, y: Tensor) -> Tensor:
        for _ in range(20):
            y = y * torch.ones_like(y)
        return y

    def greedy(model: Any, *args: Any, **kwargs: Any) -> None:
        patch_model(model, *args, **kwargs)
        model.embed.register_forward_hook(kept)

    patch.setattr(zoo_judge, "patch_model", greedy)


# what is broken, and the first words of what the judge says
BROKEN: list[tuple[Break, str]] = [
    (norm_dtype, "dtype: output 1 is torch.float64, unpatched"),
    (product_dtype, "products"),
    (gradient, "gradient"),
    (output, "forward"),
    (undo, "unpatch leaves"),
    (more_bytes, "keeps"),
]


@LOW
def test_nothing_broken_is_right(precision: Precision) -> None:
    result = judged(precision)
    assert result.status == "judged", result.reason
    assert not result.wrong, result.wrong
    assert list(result.presets) == ["exact", "auto"]
    for preset in result.presets.values():
        assert preset.strategies["recompute"] and preset.strategies["share"]
        _, own = preset.errors["forward"]
        assert own > 1e-4  # not float32's


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [GPU_BF16, GPU_FLOAT32], ids=lambda precision: precision.name)
def test_models_are_judged_on_a_gpu(precision: Precision) -> None:
    result = judged(precision)
    assert result.status == "judged", result.reason
    assert not result.wrong, result.wrong
    for break_it, words in ((gradient, "gradient"), (output, "forward")):
        for preset in judged(precision, break_it).presets.values():
            assert any(problem.startswith(words) for problem in preset.problems), preset.problems


def test_a_gpu_driver_maps_more_than_the_limit() -> None:
    assert Limits.of("cpu").memory and Limits.of("cuda").memory is None


@LOW
@pytest.mark.parametrize(("break_it", "words"), BROKEN, ids=[case[0].__name__ for case in BROKEN])
def test_broken_is_wrong(break_it: Break, words: str, precision: Precision) -> None:
    for name, preset in judged(precision, break_it).presets.items():
        assert any(problem.startswith(words) for problem in preset.problems), (
            name,
            preset.problems,
        )


@pytest.mark.parametrize(
    "error", [MemoryError("std::bad_alloc"), RuntimeError("can't allocate memory")]
)
def test_the_limit_of_memory_is_no_finding(error: Exception) -> None:
    def no_memory(patch: pytest.MonkeyPatch) -> None:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            raise error

        patch.setattr(zoo_judge, "patch_model", wrong)

    with pytest.raises(MemoryError):
        judged(BF16, no_memory)


def test_what_stays_in_float32() -> None:
    model = in_dtype(models.built(Mixed)[0], torch.bfloat16)
    kept = {name for name, t in model.state_dict().items() if t.dtype == torch.float32}
    assert kept == {"router.weight", "router.bias", "inv_freq"}


@LOW
def test_products_are_counted_by_dtype(precision: Precision) -> None:
    """Each once: autocast calls an op again in its dtype, and `addmm` is called by name here."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.addmm(self.first.bias, x, self.first.weight.t())
            with torch.autocast("cpu", enabled=False):
                return torch.mm(h.float(), self.second.weight.float().t())

    model = Added().to(precision.weights)
    x = torch.randn(3, 8, dtype=precision.weights)
    found = products(model, ExampleInputs((x,)), precision)
    assert found == {"BFloat16": 3 * 8 * 4, "float": 3 * 4 * 2}


@LOW
def test_a_jitter_is_one_unit_of_the_precision(precision: Precision) -> None:
    model = nn.Linear(64, 64).to(precision.weights)
    moved = jittered(model, 0, precision)
    change = ((moved.weight.double() - model.weight) / model.weight.double()).abs().max()
    assert 0.5 * precision.eps < change <= 1.5 * precision.eps  # bf16 rounds the product once more


def test_a_budget_is_that_of_the_precision() -> None:
    """An error of two bf16 roundings on what the unpatched model hits exactly is one too many."""
    exact = Step([torch.ones(4, dtype=torch.float64)], {}, 0, {})
    for precision, rounding in ((FLOAT32, 2.0**-24), (BF16, 2.0**-8), (AUTOCAST, 2.0**-8)):
        near, far = (Step([exact.outputs[0] + n * rounding], {}, 0, {}) for n in (1, 20))
        assert compare_outputs(precision, near, exact, exact, []).right
        assert not compare_outputs(precision, far, exact, exact, []).right


def test_results_of_a_precision_have_files_of_their_own(tmp_path: Path) -> None:
    preset = PresetResult(notes=["rotary"], errors={"forward": (0.0123456, 0.01)}, saved_after=3)
    row = Result("llama", "judged", presets={"auto": preset}, inputs="input_ids 2x16")
    store.add(row, tmp_path)
    store.add(row, tmp_path, "bf16")
    store.add(Result("llama", "slow", "why"), tmp_path, "autocast")
    store.tidy(tmp_path)
    for precision in ("bf16", "autocast"):
        store.note_environment({"torch": precision}, precision, tmp_path)
    assert store.environments(tmp_path)["bf16"] == {"torch": "bf16"}
    assert store.load("transformers", tmp_path)["llama"].inputs == "input_ids 2x16"
    low = store.load("transformers", tmp_path, "bf16")["llama"]
    assert low.presets["auto"] == PresetResult(errors={"forward": [0.012, 0.01]}, saved_after=3)  # type: ignore[dict-item]
    assert len((tmp_path / "transformers-bf16.jsonl").read_text().splitlines()) == 1
    assert store.load("transformers", tmp_path, "autocast")["llama"].reason == "why"


def test_the_page_tells_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PAGE", tmp_path / "coverage.md")
    bad = PresetResult("wrong", ["dtype: output 0 is torch.float32, unpatched torch.bfloat16"])
    unbuilt = Result("gone", "not built", "no config")
    in_float32 = {name: Result(name, "judged") for name in ("bad", "good", "late")}
    low = {
        "bad": Result("bad", "judged", presets={"exact": bad}),
        "good": Result("good", "judged"),
        "gone": unbuilt,
        "late": Result("late", "no reference", "mat1 and mat2"),
    }
    results = {"float32": {**in_float32, "gone": unbuilt}, "bf16": low, "autocast": {}}
    made = {"bf16": {"machine": "a GPU", "torch": "2.11.0"}}
    table.write_table([("transformers model types", results)], made)
    text = (tmp_path / "coverage.md").read_text(encoding="utf-8")
    assert "| transformers model types, bf16 | 4 of 4 | 2 | 1 | 0 | 1 | 2 |" in text
    assert "- bf16: machine a GPU, torch 2.11.0" in text
    assert "- bad, bf16: wrong: exact: dtype: output 0 is torch.float32" in text
    assert "- late, bf16: no reference: mat1 and mat2" in text
    assert "good, bf16" not in text and "gone, bf16" not in text and "autocast |" not in text


def test_outputs_of_other_shapes() -> None:
    """They are wrong, unless a rounding moves the unpatched model's as well: it picks other points."""

    def outputs(rows: int) -> Step:
        return Step([torch.ones(rows, 2)], {}, 0, {})

    wrong = compare_outputs(BF16, outputs(3), outputs(4), outputs(4), [])
    assert not wrong.right
    undecided = compare_outputs(BF16, outputs(3), outputs(5), outputs(4), [])
    assert undecided.right and undecided.jumps == undecided.tensors == 1


def test_a_model_without_products_has_none() -> None:
    model, x = nn.LayerNorm(4), torch.randn(2, 4)
    assert not products(model, ExampleInputs((x,)), FLOAT32)

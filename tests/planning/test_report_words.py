"""What a report says in words: gradients, what is planned and what was done, and why a site saves nothing."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertModel

from lowmem_patch import patch_model, patch_report, plan_patch
from lowmem_patch.integrations.patching import summary
from tests.support.models import FAMILIES
from tests.support.toys import Toy, batch, mlp

Make = Callable[[str], Any]


def test_a_report_ends_with_whether_gradients_are_exact(make: Make) -> None:
    inputs = FAMILIES["llama"].inputs()
    model = make("llama")
    lines = {
        preset: str(plan_patch(model, preset, example_inputs=inputs)).splitlines()
        for preset in ("exact", "paper", "compact")
    }
    assert lines["exact"][-1] == "gradients: exact up to rounding, no site is approximate"
    text = " ".join(" ".join(lines["paper"]).split())
    assert "gradients: approximate at 2 sites: 2 activations (silu) keep codes of 2 bits;" in text
    assert "Linears and attentions store in 8 bits" in " ".join(" ".join(lines["compact"]).split())
    toy = Toy(mlp).requires_grad_(False)
    toy.down.requires_grad_(True)
    one = " ".join(plan_patch(toy, "compact", example_inputs=batch()).about_gradients)
    assert "approximate at 1 site: 1 Linear or attention stores in 8 bits" in one
    nothing = plan_patch(copy.deepcopy(model).requires_grad_(False), example_inputs=inputs)
    assert not nothing.about_gradients


def test_more_bytes_than_before_are_said_to_be_more() -> None:
    report = patch_report(patch_model(Toy(mlp), "exact", example_inputs=batch()))
    for after, said in ((50, "50.0 % fewer"), (109, "9.0 % more")):
        changed = dataclasses.replace(report, saved_before=100, saved_after=after)
        assert f"({said}) for " in str(changed) and f"({said}) for " in summary(changed)


def test_a_plan_says_what_would_be_patched(make: Make) -> None:
    inputs = FAMILIES["llama"].inputs()
    model = make("llama")
    plan = plan_patch(model, example_inputs=inputs)
    assert str(plan).splitlines()[0].endswith("7 of 7 sites would be patched") and not plan.applied
    report = patch_report(patch_model(model, example_inputs=inputs))
    assert str(report).splitlines()[0].endswith("7 of 7 sites patched") and report.applied


def test_a_plan_says_what_a_cpu_saves_of_dropout() -> None:
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=64
    )  # fmt: skip
    inputs = {"input_ids": torch.ones(2, 8).long()}
    note = (
        "for dropout a CPU saves the probabilities of attention, which runs as matmuls, and (unpatched) a "
        "mask as wide as the tensor: a GPU saves fewer bytes, as inspect counts"
    )
    here = plan_patch(BertModel(config), example_inputs=inputs)
    elsewhere = plan_patch(BertModel(config).to("meta"), example_inputs=inputs)
    why = "attention runs as matmuls here"
    stored = plan_patch(BertModel(config), "compact", example_inputs=inputs)
    assert [site.kind for site in stored.sites if why in site.reason] == ["attention"]
    assert note in here.notes and here.saved_before > elsewhere.saved_before
    assert not [note for note in elsewhere.notes if "dropout a CPU" in note]
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    without = plan_patch(BertModel(config), "compact", example_inputs=inputs)
    assert not [site for site in without.sites if why in site.reason]
    assert not [note for note in without.notes if "dropout a CPU" in note]


def test_a_frozen_reader_leaves_no_exact_way() -> None:
    net = Toy(mlp)
    net.down.requires_grad_(False)
    site = next(
        s for s in plan_patch(net, "exact", example_inputs=batch()).sites if s.name == "act"
    )
    assert site.reason.startswith("no exact way saves bytes: down is frozen")

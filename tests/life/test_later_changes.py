"""What other code does to a patched model between its training forwards is said, each kind of it once."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowmem_patch import patch_model, patch_report
from lowmem_patch.planning import changes
from tests.support.models import EVERY_FAMILY, build
from tests.support.step import warned

IDS = torch.arange(2 * 9).view(2, 9) % 60


def trained_once(preset: str = "exact", name: str = "llama", head_alone: bool = False) -> Any:
    """A patched model that has seen a training forward, without a word."""
    model = build(EVERY_FAMILY[name]).train()
    if head_alone:
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)
    patch_model(model, preset, example_inputs={"input_ids": IDS, "labels": IDS})
    assert said(model) == []
    return model


def said(model: Any, steps: int = 2) -> list[str]:
    with warned() as texts:
        for _ in range(steps):
            model.zero_grad()
            model(input_ids=IDS, labels=IDS).loss.backward()
    return texts


def test_weights_that_are_unfrozen_later_are_said() -> None:
    model = trained_once("auto", "gpt2", head_alone=True)
    model.requires_grad_(True)
    (text,) = said(model)
    assert "parameters train now that did not train at the patch" in text
    sites = len(patch_report(model).approximate)
    assert sites > 0 and f"with approximate gradients at {sites} sites" in text
    patch_model(model, "auto")
    assert said(model) == []


def replaced_head(model: Any) -> None:
    model.resize_token_embeddings(70, mean_resizing=False)


def replaced_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.SiLU()


def replaced_norm(model: Any) -> None:
    model.model.norm = nn.RMSNorm(32)


def replaced_layer(model: Any) -> None:
    stock = build(EVERY_FAMILY["llama"]).train()
    model.model.layers[0] = stock.model.layers[0]


@pytest.mark.parametrize(
    ("replace", "site"),
    [
        (replaced_head, "lm_head"),
        (replaced_activation, "model.layers.1.mlp.act_fn"),
        (replaced_norm, "model.norm"),
        (replaced_layer, "model.layers.0"),
    ],
)
def test_modules_that_are_replaced_later_are_said(
    replace: Callable[[Any], None], site: str
) -> None:
    model = trained_once()
    replace(model)
    (text,) = said(model)
    assert "patched modules were replaced since the patch" in text and site in text
    assert text in patch_report(model).notes
    patch_model(model, "exact")
    assert said(model) == []


def test_a_kind_of_change_is_said_once() -> None:
    model = trained_once(head_alone=True)
    for number in (0, 1):
        model.model.layers[number].requires_grad_(True)
    assert len(said(model)) == 1
    model.model.norm.requires_grad_(True)
    assert said(model) == []
    replaced_norm(model)
    (text,) = said(model)
    assert text.startswith("1 patched modules were replaced")


def test_who_freezes_later_is_told_nothing() -> None:
    """It loses nothing that it had; the first training forward says it of what was frozen before."""
    model = trained_once()
    model.model.layers[0].requires_grad_(False)
    assert said(model) == []


def test_who_freezes_in_turns_is_looked_at_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the two halves of a GAN."""
    looks: list[Any] = []
    find = changes._changes
    monkeypatch.setattr(changes, "_changes", lambda *given: looks.append(given) or find(*given))
    model = trained_once()
    for number in range(10):
        model.model.layers[0].requires_grad_(number % 2 == 0)
        said(model, steps=1)
    assert len(looks) == 2  # the first forward, and the first with a frozen block


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_looked_at_by_itself(copied: Callable[[Any], Any]) -> None:
    model = trained_once()
    twin = copied(model)
    replaced_norm(twin)
    assert len(said(twin)) == 1
    assert said(model) == []


def test_what_is_taken_out_of_the_model_is_freed() -> None:
    model = trained_once()
    layer = model.model.layers[0]
    held = [weakref.ref(layer), *(weakref.ref(one) for one in layer.mlp.parameters())]
    del layer
    model.model.layers = model.model.layers[1:]
    gc.collect()
    assert all(one() is None for one in held)


def test_a_look_that_finds_nothing_new_takes_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_once()

    def refused(*_: Any) -> Any:
        raise AssertionError("the modules were walked again")

    monkeypatch.setattr(changes, "_changes", refused)
    assert said(model) == []

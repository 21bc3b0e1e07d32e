"""What the trace must understand: right whatever is patched, and patched where a trace can know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_patch import patch_model, plan_patch
from lowmem_patch.tracing.inputs import ExampleInputs
from tests.support import toy_blocks as models
from tests.support import toy_gates as gates
from tests.support import toy_norms as norms
from tests.support.judge import assert_close
from zoo.build import Built, randomise
from zoo.judge import judge

# strategies of sites under `auto` with norms folded; words of the reason where a site is kept or not folded
EXPECTED: list[tuple[type[models.TokenModel], dict[str, tuple[str, str]]]] = [
    (models.ParallelBlock, {"norm": ("fold", ""), "act": ("recompute", "down")}),
    (models.CrossAttention, {"norm": ("fold", "")}),
    (models.QueryNorm, {"norm": ("fold", ""), "query_norm": ("share", "also read by")}),
    (models.SandwichNorm, {"norm": ("fold", ""), "after": ("keep", "nothing to gain")}),
    (models.PostNorm, {"norm": ("share", "also read by add")}),
    (models.ReturnedNorm, {"norm": ("share", "returned by the model")}),
    (models.SharedBlock, {"norm": ("fold", ""), "act": ("recompute", "down")}),
    (models.ShiftedWindows, {"norm": ("share", "zeros may be padded")}),
    (models.PaddedWindows, {"norm": ("keep", "nothing to gain")}),
    (models.SlicedTokens, {"norm": ("fold", "")}),
    (models.SlicedChannels, {"norm": ("share", "read by chunk")}),
    (norms.WithScale, {"norm": ("fold", "affine"), "bare": ("fold", "identity")}),
    (norms.T5Norm, {"norm": ("fold", "")}),
    (norms.PlusOneNorm, {"norm": ("fold", "")}),
    (norms.PlusOneCentered, {"norm": ("fold", "")}),
    (norms.NoWeight, {"norm": ("fold", "identity")}),
    (norms.WeightIsBuffer, {"norm": ("recompute", "elementwise functions")}),
    (models.CachedTable, {"norm": ("fold", "")}),
    (
        norms.GatedNorm,
        {"norm": ("fold", ""), "gated": ("share", "their product and the norm recomputed")},
    ),
    (
        models.OtherDimensions,
        {"norm": ("fold", ""), "two": ("share", ""), "group": ("keep", "over the channels")},
    ),
    (models.TransposedWeight, {"norm": ("fold", "")}),
    (models.PackedAttention, {"norm": ("share", "also read by")}),
    (
        models.EncoderLayers,
        {
            "layers.0.norm1": ("share", "also read by"),
            "layers.0.norm2": ("fold", ""),
            "layers.1.norm1": ("share", "also read by add"),
        },
    ),
    (models.Experts, {"norm": ("share", "also read by"), "act": ("recompute", "")}),
    (models.NormTwice, {"norm": ("share", "also used by")}),
    (models.TwoNormsOneLinear, {"norm": ("share", "used by"), "other": ("share", "used by")}),
    (models.TiedEmbedding, {"norm": ("share", "also used by embedding")}),
    (models.FunctionalCalls, {"norm": ("share", "in place of the input")}),
    (models.ViewedChannels, {"norm": ("share", "a reshape before merge")}),
    (gates.Glu, {"norm": ("fold", ""), "act": ("recompute", "gate and up")}),
    (gates.SeparateGlu, {"norm": ("fold", ""), "act": ("recompute", "gate and up")}),
    (gates.PackedGeglu, {"norm": ("fold", "")}),
    (gates.SwappedGlu, {"act": ("recompute", "gate and up")}),
    (gates.InterleavedGlu, {"act": ("recompute", "gate and up")}),
    (gates.ClampedGlu, {"norm": ("fold", "")}),
    (gates.ClampedModuleGlu, {}),
    (gates.InPlace, {"norm": ("fold", ""), "act": ("keep", "works in place")}),
    (gates.ReusedGate, {}),
]


def made(model: type[models.TokenModel]) -> Built:
    network, args = models.built(model)
    randomise(network)
    return Built(model.__name__, network, ExampleInputs(args), "", "", 0)


@pytest.mark.parametrize(
    ("model", "expected"), EXPECTED, ids=[model.__name__ for model, _ in EXPECTED]
)
def test_every_model_is_understood_and_right(
    model: type[models.TokenModel], expected: dict[str, tuple[str, str]]
) -> None:
    built = made(model)
    assert not plan_patch(built.model, "auto", example_inputs=built.inputs).fold_steps
    report = plan_patch(built.model, {"norms": "fold"}, example_inputs=built.inputs)
    found = {site.name: (site.strategy, site.reason) for site in report.sites}
    for name, (strategy, words) in expected.items():
        assert found[name][0] == strategy, found[name]
        assert words in found[name][1]
    result = judge(built)
    assert not result.wrong, result.wrong


@pytest.mark.parametrize("preset", [{"norms": "fold"}, "auto", "exact"], ids=str)
def test_torch_layers_that_read_a_folded_norm_themselves(preset: Any) -> None:
    """Without gradients torch's encoder layer calls no norm module: it reads weight, bias and eps."""
    built = made(models.EncoderLayers)
    network, args = built.model.double(), tuple(tensor.double() for tensor in built.inputs.args)
    with torch.no_grad():
        before = network(*args)
        patch_model(network, preset, example_inputs=args)
        after = network(*args)
    assert_close(after, before, "output")


def test_function_calls_are_named() -> None:
    built = made(models.FunctionalCalls)
    report = plan_patch(built.model, "auto", example_inputs=built.inputs)
    note = next(note for note in report.notes if "called as functions" in note)
    assert note.endswith(
        "left alone: 2 (F.layer_norm in the model itself, F.gelu in the model itself)"
    )


def test_no_fake_tensor_stays_in_a_cache() -> None:
    models.positions.cache_clear()
    built = made(models.CachedTable)
    plan_patch(built.model, "auto", example_inputs=built.inputs)
    assert type(models.positions(16)) is Tensor
    built.model(*built.inputs.args)


def test_modules_are_not_named_as_function_calls() -> None:
    built = made(gates.Glu)
    report = plan_patch(built.model, "auto", example_inputs=built.inputs)
    assert not any("called as functions" in note for note in report.notes)

"""rotary beneath decorators of a forward, as transformers has them since 5.24."""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers.models.llama import modeling_llama

from lowmem_patch import patch_model, plan_patch, unpatch_model
from tests.strategies.test_rotary import calls, llama, tokens
from tests.support.configs import FUSED
from tests.support.judge import assert_accurate
from tests.support.step import step, truth_of

__all__ = ["calls"]  # a fixture


def renames(forward: Any) -> Any:
    """As transformers' deprecate_kwarg, which decorates forwards since 5.24."""

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        renamed_calls.append(1)
        return forward(*args, **kwargs)

    return renamed


def hidden(forward: Any) -> Any:
    """A decorator that finds what it decorates elsewhere than in its closure."""
    held = [forward]

    @functools.wraps(forward)
    def found(*args: Any, **kwargs: Any) -> Any:
        return held[0](*args, **kwargs)

    return found


renamed_calls: list[int] = []


def decorated(*decorators: Any) -> Any:
    """A LLaMA whose attention has a decorated forward."""
    forward = modeling_llama.LlamaAttention.forward
    for decorate in decorators:
        forward = decorate(forward)
    model = llama()
    for layer in model.model.layers:
        of_class = {"forward": forward}
        layer.self_attn.__class__ = type("Decorated", (modeling_llama.LlamaAttention,), of_class)
    return model


def test_beneath_a_decorator_it_is_one_op_and_the_decorator_runs(calls: list[int]) -> None:
    model, inputs = decorated(renames, renames), tokens()
    truth, expected = truth_of(model, inputs), step(model, inputs)
    patch_model(model, FUSED, example_inputs=inputs)
    del calls[:], renamed_calls[:]
    found = step(model, inputs)
    layers = len(model.model.layers)
    assert len(calls) == 2 * layers and len(renamed_calls) == 2 * layers
    assert_accurate(found, expected, truth)
    del calls[:]
    step(copy.deepcopy(model), inputs)
    assert len(calls) == 2 * layers
    unpatch_model(model)
    assert "forward" not in vars(model.model.layers[0].self_attn)


def test_beneath_a_decorator_that_hides_it_a_forward_is_left_alone_and_named() -> None:
    notes = plan_patch(decorated(hidden), FUSED, example_inputs=tokens()).notes
    assert any("left alone" in note and "layers.0.self_attn" in note for note in notes)
    assert not any("run as one op" in note for note in notes)

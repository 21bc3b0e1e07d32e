"""causal mask: compiled attention without a mask that says no more than is_causal."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import DogeConfig, DogeForCausalLM, MistralConfig, MistralForCausalLM

from lowmem_patch import patch_model, unpatch_model
from lowmem_patch.nn.causal_mask import drop_causal_mask
from tests.support.compiler import Graphs, skipped_where_torch_breaks_the_graph
from tests.support.heads import IDS, SIZES, Loss, llama, run, truth
from tests.support.judge import assert_accurate
from tests.support.models import randomise

# what torch's own compiler does to torch
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
LENGTH = IDS.shape[1]
PADDED = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 5]])).long()
PACKED = (torch.arange(LENGTH) % (LENGTH // 2)).expand_as(IDS)


def mistral() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_key_value_heads=2, sliding_window=4)
    return randomise(MistralForCausalLM(config)).train()


def masks(graphs: Graphs) -> list[bool]:
    """Of each attention in the forward: whether it has a mask."""
    return [
        node.kwargs.get("attn_mask") is not None
        for node in graphs.made[0].graph.nodes
        if "scaled_dot_product" in str(node.target)
    ]


def loss_with(**given: Any) -> Loss:
    return lambda model: model(input_ids=IDS, labels=IDS, **given).loss


@pytest.mark.parametrize(
    ("model", "given", "masked"),
    [
        (llama(layers=1), {}, False),
        pytest.param(llama(layers=1), {"use_cache": True}, False, marks=pytest.mark.slow),
        pytest.param(llama(layers=1), {"attention_mask": PADDED}, True, marks=pytest.mark.slow),
        pytest.param(llama(layers=1), {"position_ids": PACKED}, True, marks=pytest.mark.slow),
        (mistral(), {}, True),
    ],
    ids=["plain", "with a cache", "padded", "packed", "sliding window"],
)
def test_a_mask_is_dropped_where_it_is_the_causal_one(
    model: Any, given: dict[str, Any], masked: bool
) -> None:
    patched, graphs, loss = patch_model(copy.deepcopy(model), "exact"), Graphs(), loss_with(**given)
    patched.compile(fullgraph=True, backend=graphs.backend)
    with skipped_where_torch_breaks_the_graph(model, {"input_ids": IDS, "labels": IDS, **given}):
        found = run(patched, loss)
    assert_accurate(found, run(model, loss), truth(model, loss))
    assert masks(graphs) == [masked] * model.config.num_hidden_layers


@pytest.mark.slow
def test_a_mask_of_any_length_is_kept() -> None:
    patched, graphs = patch_model(llama(layers=1), "exact"), Graphs()
    expected = loss_with()(patched).item()
    patched.compile(dynamic=True, fullgraph=True, backend=graphs.backend)
    with skipped_where_torch_breaks_the_graph(llama(layers=1), {"input_ids": IDS, "labels": IDS}):
        found = loss_with()(patched).item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert masks(graphs) == [True]


def test_it_is_undone() -> None:
    model = llama(layers=1)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = {name: len(state["_forward_pre_hooks"]) for name, state in before.items()}
    patch_model(model, "exact")
    attention = model.model.layers[0].self_attn
    assert len(attention._forward_pre_hooks) == len(attention._forward_pre_hooks_with_kwargs) == 1
    unpatch_model(model)
    assert hooks == {name: len(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert not attention._forward_pre_hooks_with_kwargs


def test_an_attention_that_makes_another_mask_keeps_the_one_it_is_given() -> None:
    """Doge's attention adds to the mask that it gets, also to the causal one."""
    torch.manual_seed(0)
    config = DogeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 64, (2, 16))
    model = patch_model(DogeForCausalLM(config).train(), "exact", example_inputs={"input_ids": ids})
    attention = model.model.layers[0].self_attn
    hooks = attention._forward_pre_hooks.values()
    assert not [hook for hook in hooks if getattr(hook, "func", None) is drop_causal_mask]
    dropped = llama()
    patch_model(dropped, "exact")
    hooks = dropped.model.layers[0].self_attn._forward_pre_hooks.values()
    assert [hook for hook in hooks if getattr(hook, "func", None) is drop_causal_mask]


def test_a_decorator_around_the_forward_hides_no_attention() -> None:
    model = llama(layers=1)
    attention = model.model.layers[0].self_attn
    forward = type(attention).forward

    @functools.wraps(forward)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    attention.__class__ = type("Decorated", (type(attention),), {"forward": decorated})
    patch_model(model, "exact")
    assert [hook.func for hook in attention._forward_pre_hooks.values()] == [drop_causal_mask]

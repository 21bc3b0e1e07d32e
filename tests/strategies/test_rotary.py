"""Rotary embeddings that run as one op: the same numbers and bytes, and nothing but one model touched."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXModel
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.olmo import modeling_olmo
from transformers.models.qwen2_vl import modeling_qwen2_vl

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.config import PatchConfig
from lowmem_patch.errors import NothingToPatchError
from lowmem_patch.nn import rotary
from lowmem_patch.nn.rotary import Rotation
from lowmem_patch.strategies.rotary import _match, find
from tests.support.compiler import skipped_where_torch_breaks_the_graph
from tests.support.configs import FUSED, KEEP
from tests.support.judge import assert_accurate, assert_near
from tests.support.models import FAMILIES, MORE_FAMILIES, build
from tests.support.step import AUTOCAST, BF16, cast, step, truth_of


def neox() -> nn.Module:
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        rotary_pct=0.5, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPTNeoXModel(config)


def llama() -> Any:
    return build(FAMILIES["llama"])


def tokens() -> dict[str, Tensor]:
    return FAMILIES["llama"].inputs()


MODELS = {
    **{name: lambda name=name: build(FAMILIES[name]) for name in ("llama", "gemma", "phi3")},
    "qwen3": lambda: build(MORE_FAMILIES["qwen3"]),
    "neox": neox,
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call of the op."""
    seen: list[int] = []
    original = rotary.turned

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(rotary, "turned", counted)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_one_op_keeps_numbers_and_bytes(name: str, calls: list[int]) -> None:
    model, inputs = MODELS[name]().train(), tokens()
    truth, expected = truth_of(model, inputs), step(model, inputs)
    patch_model(model, FUSED, example_inputs=inputs)
    del calls[:]
    found = step(model, inputs)
    layers = sum("Attention" in type(module).__name__ for module in model.modules())
    assert len(calls) == 2 * layers
    assert f"rotary embeddings that run as one op, for speed: {layers}" in patch_report(model).notes
    assert_accurate(found, expected, truth)
    report = patch_report(model)
    assert report.saved_after <= report.saved_before


@pytest.mark.parametrize("autocast", [False, True])
def test_rounding_is_no_more_than_before(autocast: bool) -> None:
    inputs = tokens()
    model = llama().train()
    truth, mode = truth_of(model, inputs), AUTOCAST if autocast else BF16
    model = model if autocast else cast(model, torch.bfloat16)

    def errors(patched: Any) -> list[float]:
        found = step(patched, inputs, mode)
        pairs = [(found.output, truth.output)]
        pairs += [(found.gradients[name], exact) for name, exact in truth.gradients.items()]
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    before = errors(copy.deepcopy(model))
    after = errors(patch_model(model, FUSED, example_inputs=inputs))
    assert sum(after) <= 1.05 * sum(before)
    assert all(a <= 2 * b for a, b in zip(after, before, strict=True))


def test_the_library_and_other_models_are_not_touched(calls: list[int]) -> None:
    function, forward = (
        modeling_llama.apply_rotary_pos_emb,
        modeling_llama.LlamaAttention.forward,
    )
    other, model, inputs = llama(), llama(), tokens()
    patch_model(model, FUSED, example_inputs=inputs)
    del calls[:]
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    other(**inputs)
    assert not calls
    unpatch_model(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(**inputs)
    assert not calls


def test_copies_turn_by_the_op_and_pickles_by_the_class(calls: list[int]) -> None:
    model, inputs = llama().eval(), tokens()
    patch_model(model, FUSED, example_inputs=inputs)
    wanted, truth = model(**inputs)[0], truth_of(llama(), inputs)
    del calls[:]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(**inputs)[0], wanted) and calls
    bound = [m.__dict__["forward"] for m in copied.modules() if "forward" in m.__dict__]
    assert all(any(own.args[0] is m for m in copied.modules()) for own in bound)
    unpatch_model(copied)
    assert not any("forward" in module.__dict__ for module in copied.modules())
    del calls[:]
    loaded = pickle.loads(pickle.dumps(model))
    assert_near(loaded(**inputs)[0], wanted, truth.output)
    assert not calls
    patch_model(unpatch_model(loaded), FUSED, example_inputs=inputs)
    del calls[:]
    assert torch.equal(loaded(**inputs)[0], wanted) and calls


def test_keep_leaves_them_alone_and_rotary_alone_is_a_patch(calls: list[int]) -> None:
    model, inputs = llama(), tokens()
    with pytest.raises(NothingToPatchError):
        patch_model(model, {**KEEP, "attention": "keep"}, example_inputs=inputs, strict=True)
    patch_model(model, "paper", example_inputs=inputs)
    model(**inputs)
    assert not calls
    patch_model(model, FUSED, example_inputs=inputs, strict=True)
    del calls[:]
    model(**inputs)
    assert calls


def test_a_forward_that_somebody_else_set_stays(calls: list[int]) -> None:
    model, inputs = llama(), tokens()
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    own = attention.forward
    notes = plan_patch(model, FUSED, example_inputs=inputs).notes
    assert any("left alone" in note and "layers.0.self_attn" in note for note in notes)
    patch_model(model, FUSED, example_inputs=inputs)
    unpatch_model(model)
    assert attention.forward is own


def test_a_forward_that_a_hook_wrapped_is_undone(calls: list[int]) -> None:
    model, inputs = llama(), tokens()
    patch_model(model, FUSED, example_inputs=inputs)
    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, ModelHook())
    del calls[:]
    model(**inputs)
    assert calls
    unpatch_model(model)
    remove_hook_from_submodules(model)
    del calls[:]
    model(**inputs)
    assert not calls
    patch_model(model, FUSED, example_inputs=inputs)
    del calls[:]
    model(**inputs)
    assert calls


def test_other_functions_put_into_the_file_between_two_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = tokens()
    patch_model(llama(), FUSED, example_inputs=inputs)
    seen = []
    original = modeling_llama.eager_attention_forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", watched)
    model = llama()
    model.set_attn_implementation("eager")
    patch_model(model, FUSED, example_inputs=inputs)
    del seen[:]
    model(**inputs)
    assert seen


_steps = 0


class Counts(nn.Module):
    """Counts in its file."""

    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        global _steps
        _steps += 1
        return modeling_llama_rotary(q, q, cos, sin)[0]


modeling_llama_rotary = modeling_llama.apply_rotary_pos_emb


def test_a_forward_that_writes_into_its_file_stays() -> None:
    facts: Any = SimpleNamespace(calls={"counts": []}, modules={"counts": Counts()}, answers={})
    assert not find(facts, PatchConfig()).patches


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own: a FutureWarning since 2.15
@pytest.mark.filterwarnings("ignore:.*no parameter trains")
@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_and_functional_transforms(trained: bool) -> None:
    inputs = tokens()
    model = llama().double().requires_grad_(trained)
    model.set_attn_implementation("eager")
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()

    def run(x: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=x, use_cache=False).logits
        return logits

    def found() -> list[Tensor]:
        return [
            torch.func.jvp(run, (embedded,), (embedded.cos(),))[1],
            torch.func.grad(lambda x: run(x).square().sum())(embedded),
            torch.func.vmap(run)(embedded.unsqueeze(0)),
        ]

    wanted = found()
    patch_model(model, FUSED, example_inputs=inputs)
    for a, b in zip(found(), wanted, strict=True):
        torch.testing.assert_close(a, b)


def apply_rotary_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns neighbours, and not halves."""

    def turned(x: Tensor) -> Tensor:
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos.unsqueeze(1) + pairs * sin.unsqueeze(1)

    return turned(q), turned(k)


def test_what_is_not_matched() -> None:
    assert _match("apply_rotary_pairs", apply_rotary_pairs) is None
    assert _match("apply_rotary_pos_emb", modeling_cohere.apply_rotary_pos_emb) is None
    assert _match("rotary", lambda q, k, cos, sin: (q, k)) is None
    assert _match("rotary", lambda q, k, cos, sin, scale=1: (q, k)) is None
    assert _match("rotary", lambda x, cos, sin: x) is None


def matched(name: str, module: Any) -> Rotation:
    found = _match(name, getattr(module, name))
    assert found is not None
    return found


LLAMA = matched("apply_rotary_pos_emb", modeling_llama)
NEOX = matched("apply_rotary_pos_emb", modeling_gpt_neox)
OLMO = matched("apply_rotary_pos_emb", modeling_olmo)
VISION = matched("apply_rotary_pos_emb_vision", modeling_qwen2_vl)


def example(heads_dim: int = 1, rotated: int = 8, batches: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return [q, k, torch.randn(batches, 5, rotated), torch.randn(batches, 5, rotated)]


@pytest.mark.parametrize(
    ("rotation", "arguments", "named", "uses"),
    [
        (LLAMA, example(), {}, True),
        (LLAMA, example(batches=1), {}, True),
        (LLAMA, example(2), {"unsqueeze_dim": 2}, True),
        (LLAMA, [*example(2), 2], {}, True),
        (LLAMA, [*example(), -3], {}, False),
        (LLAMA, [t.bfloat16() for t in example()], {}, True),
        (LLAMA, [t.bfloat16() if i < 2 else t for i, t in enumerate(example())], {}, True),
        (OLMO, [t.bfloat16() if i < 2 else t for i, t in enumerate(example())], {}, True),
        (NEOX, example(rotated=4), {}, True),
        (NEOX, example(rotated=0), {}, False),
        (VISION, [t[0] for t in example(2)], {}, True),
        (VISION, example(2), {}, True),
        (LLAMA, [t[0] for t in example(2)], {}, True),
        (LLAMA, [t[0] for t in example()], {"unsqueeze_dim": 0}, False),
        # as many heads as positions: shapes do not tell
        (LLAMA, [torch.randn(5, 5, 8), torch.randn(5, 5, 8), *(t[0] for t in example()[2:])], {}, True),
    ],
)  # fmt: skip
def test_each_way_to_call_it(
    rotation: Rotation, arguments: list[Any], named: dict[str, int], uses: bool, calls: list[int]
) -> None:
    wanted = rotation.function(*arguments, **named)
    found = rotation(*arguments, **named)
    assert bool(calls) == uses
    doubled = [a.double() if isinstance(a, Tensor) else a for a in arguments]
    for a, b, exact in zip(found, wanted, rotation.function(*doubled, **named), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        error, before = ((y.double() - exact).norm() for y in (a, b))
        assert error <= 1.01 * before or error <= 1e-7 * exact.norm()


def picks(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """As older files have it: position_ids picks rows of cos and sin."""
    if position_ids is not None:
        cos, sin = cos[:, position_ids], sin[:, position_ids]
    turned: tuple[Tensor, Tensor] = modeling_llama_rotary(q, k, cos, sin, unsqueeze_dim)
    return turned


def test_positions_are_picked(calls: list[int]) -> None:
    rotation = _match("rotary", picks)
    assert rotation is not None
    reverse = torch.arange(4, -1, -1)
    for found, wanted in zip(
        rotation(*example(), position_ids=reverse), picks(*example(), reverse), strict=True
    ):
        assert torch.equal(found, wanted)
    assert not calls
    rotation(*example())
    assert calls


def test_float64_angles_of_narrower_queries() -> None:
    arguments = [t.double() if i > 1 else t for i, t in enumerate(example())]
    for found, wanted in zip(LLAMA(*arguments), LLAMA.function(*arguments), strict=True):
        assert torch.equal(found, wanted)


def test_angles_that_train_keep_their_gradient(calls: list[int]) -> None:
    q, k, cos, sin = example()
    LLAMA(q, k, cos.requires_grad_(), sin)[0].sum().backward()
    assert not calls and cos.grad is not None


def test_compiled_in_one_graph_trains_the_same() -> None:
    model, inputs = llama().train(), tokens()
    del inputs["attention_mask"]  # transformers looks into a mask, which breaks its own graph
    unpatched, truth = copy.deepcopy(model), truth_of(model, inputs)
    patch_model(model, FUSED, example_inputs=inputs)
    expected = step(model, inputs)
    torch.compiler.reset()
    with skipped_where_torch_breaks_the_graph(unpatched, inputs):
        found = step(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    torch.compiler.reset()
    assert_accurate(found, expected, truth)


class Tagged(Tensor):
    """Of somebody else's class, which torch functions keep."""


@pytest.mark.parametrize("mode", [False, True])
def test_foreign_tensors_stay_foreign_under_a_mode(mode: bool) -> None:
    q, *rest = example()
    with torch.device("cpu") if mode else nullcontext():  # a torch function mode
        turned, _ = matched("apply_rotary_pos_emb", modeling_llama)(q.as_subclass(Tagged), *rest)
    assert type(turned) is Tagged

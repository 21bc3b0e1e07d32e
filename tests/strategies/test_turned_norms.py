"""Norms of queries and keys save what the rotary embedding makes of them (Qwen3, OLMo 2, GLM-4.5)."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3 import modeling_qwen3

from lowmem_patch import patch_model, patch_report, saved_bytes
from lowmem_patch.functional import turned, turned_back
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.turned_norms import NormOutput
from tests.support.judge import assert_accurate, assert_same_step
from tests.support.lives import assert_backwards_add_up, assert_trains_alike, nodes_of
from tests.support.models import randomise
from tests.support.step import AUTOCAST, BF16, FP32, Mode, cast, step, truth_of

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "use_cache": False,
}  # fmt: skip
HALF: dict[str, Any] = {
    "head_dim": 8, "use_qk_norm": True, "first_k_dense_replace": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
MODELS: dict[str, Any] = {
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, head_dim=8)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**SIZES)),
    "glm4": lambda: hf.Glm4MoeForCausalLM(
        hf.Glm4MoeConfig(**SIZES, **HALF)
    ),  # turns half of a head
}
ROWS = 2 * 6


def ids() -> dict[str, Tensor]:
    found = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": found, "labels": found}


def made(name: str = "qwen3") -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    randomise(model)
    return model.train()


def saved(model: Any) -> int:
    with saved_bytes(model) as counted:
        outputs = model(**ids())
    del outputs
    return counted.activations


@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_accurate(name: str, mode: Mode) -> None:
    model = cast(made(name), mode.weights)
    ours = patch_model(copy.deepcopy(model), "exact", example_inputs=ids())
    assert sum(m.use.turned for m in ours.modules() if isinstance(m, MSNorm)) == 4
    found, own = (step(one, ids(), mode) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, ids()), mode)


@pytest.mark.parametrize("name", MODELS)
def test_neither_queries_nor_keys_are_saved_twice(name: str) -> None:
    ours = patch_model(made(name), "exact", example_inputs=ids())
    report, now = patch_report(ours), saved(ours)
    assert 0 <= report.saved_after - now <= ROWS * 4
    # cos and sin of each position, and labels
    assert report.floor <= report.saved_after <= report.floor + 48 * ROWS
    for module in ours.modules():
        if isinstance(module, MSNorm):
            module.use = dataclasses.replace(module.use, turned=False)
    width = 4 * 8 if name != "olmo2" else 16
    assert saved(ours) - now == 2 * ROWS * (width + width // 2) * 4


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_the_copy_is_held_that_attention_reads(name: str, use_cache: bool) -> None:
    inputs: Any = {**ids(), "use_cache": use_cache}
    with torch.autocast("cpu", torch.bfloat16):
        ours = patch_model(made(name), "exact", example_inputs=inputs)
        with saved_bytes(ours) as now:
            outputs = ours(**inputs)
        for module in ours.modules():
            if isinstance(module, MSNorm):
                module.use = dataclasses.replace(module.use, turned=False)
        with saved_bytes(ours) as without:
            outputs = ours(**inputs)
    del outputs
    width = 4 * 8 if name != "olmo2" else 16
    size = (
        4 if name in ("qwen3", "glm4") else 2
    )  # the others' norms give the dtype that they are given
    # a cache holds keys in float32, and a norm what was copied for it
    keys = 0 if use_cache else width // 2
    assert without.activations - now.activations == 2 * ROWS * (width + keys) * size
    report = patch_report(ours)
    assert abs(report.saved_after - now.activations) <= ROWS * 4


def test_the_inverse_gives_what_was_turned() -> None:
    q, k = (
        torch.randn(2, 3, 5, 8, dtype=torch.float64),
        torch.randn(2, 1, 5, 8, dtype=torch.float64),
    )
    phase = torch.randn(1, 5, 3, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = 1.3 * phase.cos(), 1.3 * phase.sin()
    for x in (q, k):
        back = turned_back(turned(x, cos, sin), cos, sin, 1, x.stride(), torch.float64)
        torch.testing.assert_close(back, x, rtol=1e-12, atol=1e-12)
    other, another = (torch.rand(1, 5, 6, dtype=torch.float64) + 0.5 for _ in "cs")  # halves differ
    back = turned_back(turned(q, other, another), other, another, 1, q.stride(), q.dtype)
    torch.testing.assert_close(back, q, rtol=1e-12, atol=1e-12)
    nothing = turned_back(q, cos * 0, sin * 0, 1, q.stride(), torch.float64)
    assert torch.equal(nothing[..., :6], torch.zeros(2, 3, 5, 6, dtype=torch.float64))


class Attention(nn.Module):
    """As of Qwen3; ``use`` does something to queries and keys, and in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.out = nn.Linear(16, 16)
        self.use = "plainly"
        phase = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(3)).repeat(1, 1, 2)
        self.phase = nn.Buffer(phase)

    def forward(self, x: Tensor) -> Tensor:
        shape, use = (*x.shape[:-1], 2, 8), self.use
        q = self.q_norm(self.q(x).view(shape))
        k = self.k_norm(self.k(x).view(shape))
        if use == "written in front":
            q.mul_(2)
        if use == "read in front":
            k = k + 0.1 * q.square()
        v = self.v(x).view(shape).transpose(1, 2)
        cos, sin = self.phase.cos(), self.phase.sin()
        if use == "no rotation":
            cos = cos * torch.arange(1.0, 9.0)
        if use == "halves":
            cos = cos.sign() * torch.arange(4.0, 12.0)
        if use == "zeros":
            cos, sin = cos.clone(), sin.clone()
            cos[:, 2] = sin[:, 2] = 0
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if use == "a part":
            q, k, v, cos, sin = (t[..., :5, :] for t in (q, k, v, cos, sin))
        if use == "no grad":
            with torch.no_grad():
                apply_rotary_pos_emb(q, k, cos, sin)
        first = q
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if use == "twice":
            q = q + apply_rotary_pos_emb(first, k, cos, sin)[0]
        if use == "repeated":
            k = k + 0
        if use == "written behind":
            q.mul_(2)
        if use == "alone":
            return self.out(q.transpose(1, 2).flatten(2))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


apply_rotary_pos_emb = modeling_qwen3.apply_rotary_pos_emb


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.block = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.block:
            found: Tensor = checkpoint(self.attention, x, use_reentrant=self.block == "reentrant")
            return found
        y: Tensor = self.attention(x)
        return y


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    randomise(model)
    with torch.no_grad():  # far from 0, or z is saved
        for norm in (model.attention.q_norm, model.attention.k_norm):
            norm.weight.uniform_(0.5, 1.5)
    return model.train()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))


def patched(model: Net) -> Net:
    ours = patch_model(copy.deepcopy(model), "exact", example_inputs=(batch(),))
    assert ours.attention.q_norm.use.turned
    return ours


USES = (
    "plainly", "read in front", "no rotation", "halves", "zeros", "a part", "no grad", "twice", "alone",
    "repeated",
)  # fmt: skip


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("use", USES)
def test_every_use_computes_the_same(use: str, traced: bool) -> None:
    model = net()
    if traced:
        model.attention.use = use
    ours = patch_model(copy.deepcopy(model), "exact", example_inputs=(batch(),))
    for one in (model, ours):
        one.attention.use = use
    assert_same_step(ours, model, batch())


def test_a_rotation_may_become_another() -> None:
    model = net()
    ours = patched(model)
    for use in ("plainly", "halves", "zeros", "plainly"):
        for one in (model, ours):
            one.attention.use = use
        assert_same_step(ours, model, batch())


@pytest.mark.parametrize("use", ["written in front", "written behind"])
def test_a_write_is_refused(use: str) -> None:
    ours = patched(net())
    ours.attention.use = use
    with pytest.raises(RuntimeError, match="was written in place"):
        ours(batch()).sum().backward()


def test_a_write_that_was_traced_is_right() -> None:
    model = net()
    model.attention.use = "written behind"
    ours = patch_model(copy.deepcopy(model), "exact", example_inputs=(batch(),))
    assert not ours.attention.q_norm.use.turned
    assert ours.attention.k_norm.use.turned
    assert_same_step(ours, model, batch())


@pytest.mark.parametrize("block", ["reentrant", "not reentrant"])
def test_a_checkpointed_block_computes_the_same(block: str) -> None:
    model = net()
    ours = patched(model)
    for one in (model, ours):
        one.block = block
    assert_same_step(ours, model, batch().requires_grad_())


def test_what_is_saved_may_wait_in_host_memory() -> None:
    model = net()
    ours = patched(model)
    with torch.autograd.graph.save_on_cpu():
        loss = ours(batch()).square().sum()
    model(batch()).square().sum().backward()
    loss.backward()
    for own, found in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad)


def test_two_backwards_of_one_graph_add_up() -> None:
    model = net()
    assert_backwards_add_up(patched(model), model, batch())


def test_nothing_is_held_when_the_backward_is_over() -> None:
    loss = patched(net())(batch()).sum()
    held = [node.saved_as() for node in nodes_of(loss) if hasattr(node, "saved_as")]
    assert [type(h) for h in held] == [NormOutput, NormOutput]
    assert all(h._value is None and h.held_values() is h.sources[0] for h in held)
    alive = [weakref.ref(h) for h in held]
    del held
    assert all(reference() is not None for reference in alive)
    loss.backward()
    assert all(reference() is None for reference in alive)


def test_keys_that_attention_repeats_are_held_and_counted() -> None:
    ours = patched(net())
    with saved_bytes(ours) as before:
        ours(batch())
    ours.attention.use = "repeated"
    with saved_bytes(ours) as after:
        ours(batch())
    # attention saves a copy of the keys, and the norm what the copy was made of
    assert after.activations == before.activations + batch().nbytes


def test_copies_and_pickles_compute_the_same() -> None:
    model = net()
    ours = patched(model)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same_step(copied, model, batch())


def test_several_steps_end_alike() -> None:
    model = net()
    assert_trains_alike(patched(model), model, batch)


@pytest.mark.parametrize("gamma", [0.0, 1e-30])
def test_a_gamma_near_0_saves_z(gamma: float) -> None:
    model = net()
    ours = patched(model)
    with torch.no_grad():
        for one in (model, ours):
            one.attention.q_norm.weight[::3] = gamma
    assert_same_step(ours, model, batch())


def held(model: Net) -> list[bool]:
    """Of queries and keys: whether the norm saves its output, and not what a rotation made of it."""
    loss = model(batch()).sum()
    found = [node.saved_as() for node in nodes_of(loss) if hasattr(node, "saved_as")]
    return [h is None or not h.sources for h in found]


@pytest.mark.parametrize("gamma", [0.5, 0.01])
def test_a_gamma_far_below_that_of_its_pair_keeps_the_output(gamma: float) -> None:
    model = net()
    ours = patched(model)
    for one in (model, ours):
        for norm in (one.attention.q_norm, one.attention.k_norm):
            with torch.no_grad():
                norm.weight.fill_(1.0)[5] = gamma
    assert held(ours) == [gamma < 0.1] * 2
    assert_same_step(ours, model, batch())
    with torch.no_grad():  # a pair that is small for itself
        for one in (model, ours):
            for norm in (one.attention.q_norm, one.attention.k_norm):
                norm.weight[1] = gamma
    assert held(ours) == [False] * 2
    assert_same_step(ours, model, batch())


def test_a_frozen_norm_saves_its_input_no_longer() -> None:
    model = net()
    model.attention.q_norm.requires_grad_(False)
    before = saved_of(model)
    ours = patched(model)
    # the inputs of both norms, and the Linear's copy of what attention gives
    assert before - saved_of(ours) == 3 * batch().nbytes
    assert_same_step(ours, model, batch())


def saved_of(model: Net) -> int:
    with saved_bytes(model) as counted:
        y = model(batch())
    del y
    return counted.activations


@pytest.mark.parametrize("gamma", [0.5, 0.01, 1e-6])
def test_the_report_knows_the_gammas(gamma: float) -> None:
    model = net()
    with torch.no_grad():
        model.attention.q_norm.weight.fill_(1.0)[5] = gamma
    ours = patched(model)
    assert patch_report(ours).saved_after == saved_of(ours)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("gamma", [0.1, 0.01, 1e-3])
@pytest.mark.parametrize("name", MODELS)
def test_gammas_of_many_sizes_are_accurate(name: str, gamma: float, trains: bool) -> None:
    model = cast(made(name), BF16.weights)
    with torch.no_grad():
        for module in model.modules():
            for norm in (getattr(module, "q_norm", None), getattr(module, "k_norm", None)):
                if norm is not None:
                    sizes = gamma ** torch.rand(norm.weight.shape)
                    sizes[0], sizes[2], sizes[4] = 1.0, gamma, gamma  # pairs of heads of 4 and of 8
                    norm.weight.copy_(sizes - (1.0 if name == "gemma3" else 0.0))
                    norm.weight.requires_grad_(trains)
    ours = patch_model(copy.deepcopy(model), "exact", example_inputs=ids())
    assert_same_step(ours, model, ids(), BF16)

"""How the output of fused attention lies in memory: as the Linear behind it reads it, and saved once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import PatchReport, patch_model, patch_report, saved_bytes
from lowmem_patch.nn.modes import has_heads_first
from lowmem_patch.strategies.attention_layout import _saves_once
from lowmem_patch.tracing.categories import Saver
from lowmem_patch.tracing.trace import Op
from tests.support.configs import FUSED, SHARE
from tests.support.judge import assert_equal, assert_equal_steps, assert_same_step
from tests.support.models import llama_of, randomise
from tests.support.step import AUTOCAST, MODES, cast, step, warned

# PEFT asks transformers by an old name
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
BATCH, LENGTH, WIDTH, HEADS = 2, 9, 32, 4
COLUMNS = WIDTH // HEADS
Read = Callable[[Tensor], Tensor]


def rows() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, COLUMNS)).transpose(1, 2)


def heads_first(x: Tensor) -> Tensor:
    """Some columns are rotated, and others are passed (Phi, GLM): a new tensor with the heads first."""
    rotated, passed = heads_of(x).split(COLUMNS // 2, -1)
    return torch.cat((rotated.flip(-1), passed), -1)


def merged(attended: Tensor) -> Tensor:
    return attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)


class Attention(nn.Module):
    """Attention whose queries and readers are given."""

    def __init__(self, queries: Read = heads_first, read: Read = merged, **settings: Any) -> None:
        super().__init__()
        self.queries, self.read, self.settings = queries, read, settings
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        attended = F.scaled_dot_product_attention(q, k, v, **self.settings)
        read: Tensor = self.out(self.read(attended))
        return read


class Named(Attention):
    """All arguments by their names, keys and values of fewer heads, and a gate (Qwen3-Next)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(self.q(x)), heads_of(self.k(x))[:, :2], heads_of(self.v(x))[:, :2]
        attended = F.scaled_dot_product_attention(value=v, key=k, query=q, enable_gqa=True)
        read: Tensor = self.out(merged(attended) * self.v(x).sigmoid())
        return read


class Cross(Attention):
    """Queries of one input, keys and values of another length, heads of which are read one by one."""

    def forward(self, x: Tensor) -> Tensor:
        other = x[:, :5]
        k, v = heads_of(self.k(other)), heads_of(self.v(other))
        attended = F.scaled_dot_product_attention(heads_first(self.q(x)), k, v)
        merged_heads = attended.transpose(1, 2).contiguous().view(BATCH, LENGTH, WIDTH)
        read: Tensor = self.out(F.dropout(merged_heads, 0.0))
        return read


class WithoutGradients(Attention):
    """Another attention that saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_first(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        with torch.no_grad():
            other = F.scaled_dot_product_attention(q, k, v).view(-1, LENGTH, COLUMNS).mean()
        read: Tensor = self.out(merged(F.scaled_dot_product_attention(q, k, v))) + other
        return read


def masked(**settings: Any) -> Attention:
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH)
    mask[1, :, :, -3:] = -torch.inf
    return Attention(attn_mask=mask, **settings)


FOUND: dict[str, Callable[[], nn.Module]] = {
    "queries that are joined": Attention,
    "queries that are made contiguous": lambda: Attention(lambda x: heads_of(x).contiguous()),
    "causal": lambda: Attention(is_causal=True),
    "masked": masked,
    "named, fewer keys, a gate": Named,
    "cross attention": Cross,
    "another without gradients": WithoutGradients,
}


def cloned(attended: Tensor) -> Tensor:
    return attended.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(-2)


class Packed(Attention):
    """q, k and v in one memory with the heads first: attention saves all of it whatever q becomes."""

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.stack([heads_of(one(x)) for one in (self.q, self.k, self.v)])
        read: Tensor = self.out(merged(F.scaled_dot_product_attention(*joined)))
        return read


class Squared(Attention):
    """Queries that somebody else saves, too."""

    def forward(self, x: Tensor) -> Tensor:
        q = heads_first(self.q(x))
        attended = F.scaled_dot_product_attention(q, heads_of(self.k(x)), heads_of(self.v(x)))
        return self.out(merged(attended)) * q.square().mean()


class Flat(Attention):
    """Batch and heads are one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.flatten(0, 1) for one in (heads_first(self.q(x)), *self.keys_values(x)))
        attended = F.scaled_dot_product_attention(q, k, v)
        read: Tensor = self.out(merged(attended.unflatten(0, (BATCH, HEADS))))
        return read

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return heads_of(self.k(x)), heads_of(self.v(x))


def viewed(attended: Tensor) -> Tensor:
    """Batch and heads as one dimension, which heads that lie behind the tokens cannot be."""
    return merged(attended) + attended.view(-1, LENGTH, COLUMNS).mean()


class Twice(Attention):
    """A second attention whose output is read so."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_first(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        other = F.scaled_dot_product_attention(q + 1, k, v).view(-1, LENGTH, COLUMNS)
        read: Tensor = self.out(merged(F.scaled_dot_product_attention(q, k, v))) + other.mean()
        return read


def frozen() -> Attention:
    model = Attention()
    model.out.requires_grad_(False)
    return model


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "heads last already": lambda: Attention(heads_of),
    "computed by matmuls": lambda: Attention(dropout_p=0.1),
    "read head by head": lambda: Attention(read=lambda y: y.flatten(1, 2).view(BATCH, LENGTH, -1)),
    "read token by token": lambda: Attention(read=lambda y: merged(y).transpose(0, 1).contiguous()),
    "read with the batch last": lambda: Attention(read=lambda y: y.permute(2, 0, 1, 3).flatten(-2)),
    "copied in any case": lambda: Attention(read=cloned),
    "three dimensions": Flat,
    "a frozen Linear": frozen,
    "a view of batch and heads": lambda: Attention(read=viewed),
    "a view of another attention's": Twice,
    "one memory for q, k and v": Packed,
    "queries that others save": Squared,
}


def patched(model: nn.Module, config: Any = FUSED, x: Tensor | None = None) -> tuple[Any, Any]:
    """The model and a copy of it from before the patch."""
    stock = copy.deepcopy(randomise(model).train())
    with warned():  # where nothing is patched
        return patch_model(model, config, example_inputs=rows() if x is None else x), stock


def notes(patched: Any) -> list[str]:
    """Of a report, or of a model's."""
    report = patched if isinstance(patched, PatchReport) else patch_report(patched)
    return [note for note in report.notes if "lies as the Linear" in note]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", FOUND)
def test_every_bit_of_a_step_stays_and_the_output_is_saved_once(name: str, autocast: bool) -> None:
    model, stock = patched(FOUND[name]())
    assert notes(model) == [
        "attention whose output lies as the Linear behind it reads it, for memory: 1"
    ]
    # matmuls of bf16 add up in an order that depends on how their operands lie
    x, size = rows(), 2 if autocast else 4
    if not autocast:
        assert_equal_steps(model, stock, x)
    assert_same_step(model, stock, x, MODES["autocast" if autocast else "fp32"])
    mode = AUTOCAST if autocast else None
    before, after = (step(one, x, mode, count=True).saved for one in (stock, model))
    assert before - after == x.numel() * size
    assert autocast or after == patch_report(model).saved_after


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_where_nothing_is_gained_nothing_is_changed(name: str) -> None:
    model, stock = patched(LEFT_ALONE[name]())
    assert not notes(model) and "forward" not in vars(model)
    assert assert_equal_steps(model, stock, rows()) == 0


def test_what_attention_and_the_linear_save() -> None:
    x = rows()
    model, _ = patched(Attention())
    with saved_bytes(model) as saved:
        model(x)
    # x; q, k, v and the output; a number a row and head
    assert saved.activations == 5 * x.nbytes + BATCH * HEADS * LENGTH * 4


def test_queries_that_come_in_the_readers_order_are_not_copied() -> None:
    """The trace saw others: a module may be called with either."""
    model, _ = patched(Attention())

    def part(x: Tensor) -> Tensor:
        return heads_of(torch.cat((x, x), -1)[..., :WIDTH])

    for queries, expected in ((heads_first, False), (heads_of, True), (part, True)):
        given: list[Tensor] = []

        def keep(x: Tensor, queries: Any = queries, given: list[Tensor] = given) -> Tensor:
            given.append(queries(x))
            return given[0]

        model.queries = keep
        with saved_bytes(model) as saved:
            model(rows())
        held = {storage.key for storage in saved.storages}
        assert (given[0].untyped_storage()._cdata in held) is expected


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_as_accurate_as_the_unpatched_one(mode: str) -> None:
    x = rows().to(MODES[mode].weights)
    model = cast(randomise(nn.Sequential(Attention(), Named())), MODES[mode].weights).train()
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=x)
    assert notes(model)[0].endswith(": 2")
    assert_same_step(model, stock, x, MODES[mode])


def test_queries_that_autocast_casts() -> None:
    """A rotation by float32 angles gives float32 queries; autocast saves a cast of them."""
    stock = randomise(Attention(lambda x: heads_first(x).float())).train()
    with torch.autocast("cpu", torch.bfloat16):
        model, _ = patched(copy.deepcopy(stock))
    assert notes(model)
    before, after = (step(one, rows(), AUTOCAST, count=True).saved for one in (stock, model))
    assert before - after == rows().numel() * 2


# models of transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": COLUMNS}
AUDIO: dict[str, Any] = {
    "vocab_size": 64, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES)),
    "glm": lambda: transformers.GlmForCausalLM(transformers.GlmConfig(**GROUPED)),
    "glm4": lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**GROUPED)),
    "stablelm": lambda: transformers.StableLmForCausalLM(
        transformers.StableLmConfig(**SIZES, num_key_value_heads=2)
    ),
    "whisper": lambda: transformers.WhisperForCausalLM(transformers.WhisperConfig(**AUDIO)),
}


def language_model(name: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(2))
    return randomise(FAMILIES[name]()).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_at_their_floor(name: str) -> None:
    model, inputs = language_model(name)
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=inputs)
    report = patch_report(model)
    assert report.above_floor <= 1.02
    assert notes(model)
    assert step(model, inputs, count=True).saved == report.saved_after
    assert_same_step(model, stock, inputs)


def both(model: Any, inputs: Any) -> tuple[Any, Any]:
    """With attention as it is, and with its output as the Linear reads it; nothing else differs in GLM."""
    kept, fused = (
        patch_model(copy.deepcopy(model), {**SHARE, "attention": attention}, example_inputs=inputs)
        for attention in ("keep", "fused")
    )
    assert notes(fused) and not notes(kept)
    return kept, fused


@pytest.mark.parametrize("p", [None, 0.0, 0.1])
def test_weights_and_adapters_save_the_output_that_attention_saves(p: float | None) -> None:
    """Without p all weights train, else adapters alone."""
    model, inputs = language_model("glm")
    if p is not None:
        model = get_peft_model(
            model, LoraConfig(target_modules=["q_proj", "o_proj"], lora_dropout=p)
        )
    kept, fused = both(randomise(model), inputs)
    found, expected = (step(one, inputs, count=True) for one in (fused, kept))
    assert expected.saved - found.saved == 2 * 4 * 16 * WIDTH * 4  # a copy in each of two layers
    assert_equal(found, expected)


def test_a_rotation_as_one_op_leaves_queries_as_they_lay() -> None:
    """GPT-NeoX joins the columns in the function that is replaced, and Phi behind it."""
    torch.manual_seed(0)
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5))
    ids = torch.randint(3, 64, (4, 16))
    report = patch_report(patch_model(model.train(), "exact", example_inputs={"input_ids": ids}))
    assert report.above_floor <= 1.02
    assert not notes(model)


def test_queries_in_the_readers_order_are_none_that_a_kernel_follows() -> None:
    """A kernel may give its output in an order of its own; no kernel of a CPU does."""
    k = heads_of(rows())
    for q, expected in ((heads_first(rows()), True), (heads_of(rows() + 0), False)):
        attention = F.scaled_dot_product_attention
        op = Op("scaled_dot_product_attention", attention, "", (q, k, k), {}, (q,), False)
        assert _saves_once(op, lambda _: [Saver("", "scaled_dot_product_attention")]) is expected


def test_a_model_whose_queries_lie_right_stays() -> None:
    model = llama_of().train()
    assert not notes(patch_model(model, "exact"))
    assert not has_heads_first(heads_of(rows()))
    assert has_heads_first(heads_first(rows()))
    for lies_right in (torch.randn(2, 1, 5, 8), torch.randn(2, 5, 1, 8), torch.randn(2, 5, 8)):
        assert not has_heads_first(lies_right)

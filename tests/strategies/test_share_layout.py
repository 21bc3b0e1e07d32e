"""How a norm's output lies in memory: as its input, or contiguous where a Linear reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from tests.support.judge import assert_same_step
from tests.support.models import randomise
from tests.support.saved import saved_storages
from tests.support.step import MODES, cast, step

WIDTH, HEADS = 32, 4
NORMS: dict[str, Callable[[int], nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


class Attention(nn.Module):
    """Queries and keys are normalised behind the transposition of the heads (Gemma3, Hunyuan, EXAONE 4)."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.query_norm, self.key_norm = norm(WIDTH // HEADS), norm(WIDTH // HEADS)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (
            norm(linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2))
            for norm, linear in ((self.query_norm, self.query), (self.key_norm, self.key))
        )
        attended = F.scaled_dot_product_attention(query, key, key)
        read: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return read


class WrittenAttention(Attention):
    """The same from one projection, with matmuls (timm's ``qk_norm=True`` and ``fused_attn=False``)."""

    def __init__(self, norm: Callable[[int], nn.Module], how: str) -> None:
        super().__init__(norm)
        self.all, self.how = nn.Linear(WIDTH, 3 * WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        heads = self.all(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        query, key = self.query_norm(query), self.key_norm(key)
        if self.how == "scaled":
            scores = (query * 0.35) @ key.transpose(-2, -1)
        else:
            scores = torch.einsum("bhid,bhjd->bhij", query, key)
        read: Tensor = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(-2))
        return read


class Transposed(nn.Module):
    """Tokens come first, and the norm's input is a view of batch first."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.dropout, self.out = nn.RMSNorm(WIDTH), nn.Dropout(p), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.out(self.dropout(self.norm(x.transpose(0, 1))))
        return read


def patched(model: nn.Module, x: Tensor) -> tuple[Any, Any]:
    """The model and a copy of it from before the patch."""
    stock = copy.deepcopy(randomise(model).train())
    return patch_model(model, "exact", example_inputs=x), stock


@pytest.mark.parametrize("name", NORMS)
def test_attention_and_the_linear_behind_it_save_one_tensor(name: str) -> None:
    x = torch.randn(2, 9, WIDTH)
    model, _ = patched(Attention(NORMS[name]), x)
    _, storages = saved_storages(lambda: model(x))
    report = patch_report(model)
    assert sum(storages.values()) - _weights(model, storages) == report.saved_after
    # x; of each norm its output, which attention saves; attention's output; the statistics of rows
    assert report.saved_after == 4 * x.nbytes + 3 * (x.nbytes // (WIDTH // HEADS))


@pytest.mark.parametrize("how", ["scaled", "einsum"])
@pytest.mark.parametrize("name", NORMS)
def test_matmuls_save_no_copy_of_the_norms_output(name: str, how: str) -> None:
    x = torch.randn(2, 9, WIDTH)
    model, stock = patched(WrittenAttention(NORMS[name], how), x)
    before, after = (step(one, x, count=True).saved for one in (stock, model))
    assert after == patch_report(model).saved_after < before
    assert model.key_norm(torch.randn(2, 9, HEADS, 8).transpose(1, 2)).is_contiguous()
    assert_same_step(model, stock, x)


def _weights(model: nn.Module, storages: dict[int, int]) -> int:
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for key, size in storages.items() if key in own)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NORMS)
def test_a_step_is_as_accurate_as_the_unpatched_one(name: str, mode: str) -> None:
    x = torch.randn(2, 9, WIDTH).to(MODES[mode].weights)
    model = cast(randomise(Attention(NORMS[name])), MODES[mode].weights).train()
    stock = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        patch_model(model, "exact", example_inputs=x)
    assert_same_step(model, stock, x, MODES[mode])


@pytest.mark.parametrize("training", [True, False])
def test_the_output_lies_as_the_input(training: bool) -> None:
    model, _ = patched(Attention(nn.RMSNorm), torch.randn(2, 9, WIDTH))
    rows = torch.randn(2, 9, HEADS, WIDTH // HEADS).transpose(1, 2)
    with torch.set_grad_enabled(training):
        for given in (rows, rows.transpose(0, 1), rows[:, :2], rows[:, :, ::2]):
            found = model.query_norm(given)
            assert found.stride() == torch.empty_like(given).stride()
        # the last dimension is not the innermost one: rows are copied, as ever
        assert model.query_norm(torch.randn(8, 9, 8).transpose(0, 2)).is_contiguous()


class WrittenOut(nn.Module):
    """An RMSNorm whose output lies as a transposed input does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class There(nn.Module):
    """Rows are normalised in another order than that in which Linears make and read them."""

    def __init__(self, back: tuple[int, int]) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), WrittenOut(WIDTH)
        self.out, self.back = nn.Linear(WIDTH, 8), back

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.out(self.norm(self.enter(x).transpose(0, 1)).transpose(*self.back))
        return read


# back where they were; as they lie then; and in a third order, in which neither output is contiguous
@pytest.mark.parametrize("back", [(0, 1), (0, 0), (1, 2)])
def test_a_linear_that_reads_rows_in_any_order_saves_no_copy(back: tuple[int, int]) -> None:
    x = torch.randn(4, 6, 5, WIDTH)
    model, stock = patched(There(back), x)
    after = step(model, x, count=True).saved
    assert after == patch_report(model).saved_after == 2 * x.nbytes + 4 * 4 * 6 * 5
    assert_same_step(model, stock, x)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_linear_behind_a_norm_of_a_view_saves_no_copy(p: float) -> None:
    x = torch.randn(4, 6, WIDTH)
    model, stock = patched(Transposed(p), x)
    before, after = (step(one, x, count=True).saved for one in (stock, model))
    bits = 6 * 4 * WIDTH // 8 if p else 0
    assert after == patch_report(model).saved_after < before
    assert after == x.nbytes + bits + 4 * 24
    if not p:
        assert_same_step(model, stock, x)


def test_gemma3_is_at_its_floor() -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = randomise(transformers.Gemma3ForCausalLM(config)).train()
    ids = torch.randint(1, 64, (2, 64))
    assert (
        patch_report(patch_model(model, "exact", example_inputs={"input_ids": ids})).above_floor
        <= 1.02
    )


class TokensFirst(nn.Module):
    """Torch's own attention reads a norm's output, as tokens that come first (BridgeTower)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x).transpose(0, 1))
        read: Tensor = self.attention(h, h, h, need_weights=False)[0]
        return read


def test_torchs_attention_saves_no_copy_of_the_norms_output() -> None:
    x = torch.randn(3, 5, WIDTH)
    model, stock = patched(TokensFirst(), x)
    sizes = [*saved_storages(lambda: model(x))[1].values()]
    once = x.numel() * x.element_size()
    assert sizes.count(once) == 3  # x, the norm's output, and what the last product reads
    assert_same_step(model, stock, x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_norm_of_a_view_takes_any_length() -> None:
    """Strides are symbols there, which nobody can sort."""
    model, _ = patched(Attention(nn.RMSNorm), torch.randn(3, 5, WIDTH))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 7):
        x = torch.randn(3, length, WIDTH)
        assert_same_step(compiled, copy.deepcopy(model), x)


@pytest.mark.parametrize("name", NORMS)
def test_a_write_of_which_torch_is_not_told(name: str) -> None:
    x = torch.randn(2, 9, WIDTH)
    model, stock = patched(Attention(NORMS[name]), x)
    for one in (model, stock):
        one.key_norm.register_forward_hook(_double_unseen)
    assert_same_step(model, stock, x)


def _double_unseen(module: nn.Module, args: Any, output: Tensor) -> None:
    output.data.mul_(2)

"""The floor counts what the backward can ask for: no branch whose result is dropped, no constant's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Glm4MoeConfig, Glm4MoeModel

from lowmem_patch import plan_patch, saved_bytes
from lowmem_patch.planning.floor import count_floor
from lowmem_patch.strategies.protocol import Facts
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow
from lowmem_patch.tracing.trace import trace_forward

ROWS, WIDTH = 4, 8
ONE = ROWS * WIDTH * 4  # bytes of one activation


class FrozenBatchNorm(nn.BatchNorm1d):
    """Scale and shift by constants, as detection models freeze their batch norms."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.running_var.rsqrt() - self.running_mean


class Toy(nn.Module):
    """Two Linears, and between them what a test names."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm: nn.Module = (
            FrozenBatchNorm(WIDTH, affine=False) if between == "frozen" else nn.BatchNorm1d(WIDTH)
        )
        self.register_buffer("table", torch.randn(ROWS, WIDTH))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        if self.between == "no_grad":
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)
        hidden = self.first(x)
        if self.between == "written":
            out = torch.zeros_like(hidden)
            out[:] = self.second(hidden)
            return out
        if self.between == "table":
            return hidden + self.second(self.table)
        if self.between == "picked":
            scores = torch.einsum("bd,nd->bn", hidden, self.first(x)).softmax(-1)
            return self.second(x)[scores.argmax(-1)]
        if self.between == "dropped":
            self.second(hidden)
            return hidden
        if self.between == "frozen":
            return self.norm(hidden)
        if self.between == "modulated":
            normed = nn.functional.layer_norm(hidden, (WIDTH,))
            return self.second(normed * (1 + self.first.bias) + self.second.bias)
        hidden = hidden.relu()
        return self.second(hidden) + self.norm(hidden)


def floor(between: str) -> dict[str, int]:
    x = torch.randn(ROWS, WIDTH)
    model = Toy(between)
    trace = trace_forward(Shadow(model, ExampleInputs((x,)), None))
    return {
        kind: size
        for kind, size in count_floor(Facts(model, model, trace, {})).by_kind.items()
        if size
    }


def test_an_op_without_gradient_needs_no_input() -> None:
    assert floor("no_grad") == {"linear inputs": ONE}


def test_a_branch_whose_result_is_dropped_needs_nothing() -> None:
    assert floor("dropped") == {"linear inputs": ONE}


def test_what_is_written_into_an_output_is_no_dropped_branch() -> None:
    # RF-DETR writes what each group of queries chose into one tensor
    assert floor("written") == {"linear inputs": 2 * ONE}


def test_a_buffer_is_held_anyway() -> None:
    # relative positions, of which a small MLP makes a bias
    assert floor("table") == {"linear inputs": ONE}


def test_what_only_an_argmax_reads_needs_nothing() -> None:
    # GLM-Image's nearest codes: the scores' matmul and softmax are attention's by their functions
    assert floor("picked") == {"linear inputs": ONE}


def test_a_norm_of_constants_needs_nothing() -> None:
    assert floor("frozen") == {"linear inputs": ONE}


def test_a_batch_norm_behind_a_recomputed_activation_needs_statistics_alone() -> None:
    found = floor("batch norm")
    assert found["linear inputs"] == 2 * ONE
    assert "norms" not in found
    assert found["codes and statistics"] == ROWS * 4  # of the fewer: rows, channels


def test_a_modulated_norm_is_its_output_alone() -> None:
    # x, and the norm's output
    assert floor("modulated") == {"linear inputs": 2 * ONE, "codes and statistics": 4 * ROWS}


def test_masks_that_are_made_under_vmap() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(x.shape[1])
            mask = torch.vmap(lambda one: one >= places)(places)
            y = self.linear(self.norm(x))
            return torch.nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)

    report = plan_patch(Masked(), "exact", example_inputs=torch.randn(2, 5, 8))
    assert [site.strategy for site in report.sites] == ["share"]
    assert 0 < report.floor <= report.saved_after


class Scored(nn.Module):
    """A block whose attention bounds its scores (XGLM), and weighs its result by their sum (Granite)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Scores()])

    def forward(self, x: Tensor) -> Tensor:
        x, scores = self.layers[0](x), self.layers[1]
        return torch.cat([self.layers[0](scores(x)), x.logsumexp(-1, keepdim=True)], -1)


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.max(x @ x.transpose(1, 2), torch.tensor(-1.0))
        total = scores.logsumexp(-1, keepdim=True)
        return scores.softmax(-1) @ x * total.gather(-1, torch.zeros_like(total, dtype=torch.int64))


def test_what_attention_does_with_its_scores_is_attention() -> None:
    model, x = Scored(), torch.randn(2, 6, WIDTH)
    with saved_bytes(model) as saved:
        model(x)
    kinds = {
        (saver.module, saver.function): storage.category
        for storage in saved.storages
        for saver in storage.savers
        if storage.bytes > 4  # the bound
    }
    assert kinds["layers.1", "max"] == kinds["layers.1", "logsumexp"] == "attention"
    assert kinds["layers.1", "gather"] == "rest"  # its index
    assert kinds["", "logsumexp"] == "head and loss"
    assert plan_patch(model, "exact", example_inputs=x).floor >= saved.by_kind["attention"]


class InFloat32(nn.Module):
    """Casts its weights by itself, as the experts of OpenAI's privacy filter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(x.float() @ self.first.weight.t().float())
        return hidden @ self.second.weight.t().float()


def test_a_weight_that_the_forward_casts_is_a_weight() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    model = InFloat32().bfloat16()
    trace = trace_forward(Shadow(model, ExampleInputs((x,)), None))
    assert {s.category for s in trace.saved.storages} == {"linear inputs", "activations"}
    # x, and what the activation reads, which could have been computed in the dtype of x
    assert count_floor(Facts(model, model, trace, {})).total == 2 * (ONE // 2)


class Sinkhorn(nn.Module):
    """Divides what a softmax gives by sums of rows and of columns, in turns, as DeepSeek-V4 does."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.first, self.turns = nn.Linear(WIDTH, WIDTH), turns

    def forward(self, x: Tensor) -> Tensor:
        shares = self.first(x).softmax(-1)
        for turn in range(self.turns):
            shares = shares / shares.sum(turn % 2, keepdim=True)
        return shares


def test_what_is_divided_behind_a_softmax_is_computed_again() -> None:
    x = torch.randn(ROWS, WIDTH)
    for turns in (0, 6):  # x, and the softmax's output
        model = Sinkhorn(turns)
        trace = trace_forward(Shadow(model, ExampleInputs((x,)), None))
        assert count_floor(Facts(model, model, trace, {})).total == 2 * ONE


def test_a_rotation_that_concatenates_nothing_is_no_copy() -> None:
    """Of a head whose columns are all rotated, what is left is an empty tensor; a cache's is another one."""
    config = Glm4MoeConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, use_qk_norm=True, first_k_dense_replace=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    )  # fmt: skip
    found = {}
    for use_cache in (False, True):
        inputs = {"input_ids": torch.arange(ROWS)[None], "use_cache": use_cache}
        found[use_cache] = plan_patch(Glm4MoeModel(config).train(), "exact", example_inputs=inputs)
        assert found[use_cache].floor <= found[use_cache].saved_after
    assert found[True].floor - found[False].floor == ROWS * 8 * 4  # the keys that it copies


def test_a_soft_cap_of_logits_needs_no_codes() -> None:
    config = Gemma2Config(
        vocab_size=20_000, hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    ids = torch.arange(ROWS)[None]
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    report = plan_patch(Gemma2ForCausalLM(config).train(), "exact", example_inputs=inputs)
    assert report.floor <= report.saved_after


class InAutocast(nn.Module):
    """A norm in front of attention, and a Linear of two tables' rows."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH // 2) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        if self.between == "tables":
            numbers = torch.arange(ROWS)
            return self.first(torch.cat([table(numbers) for table in self.tables], -1))
        q = self.norm(self.first(x).float()).view(1, ROWS, 2, -1).transpose(1, 2)
        y: Tensor = nn.functional.scaled_dot_product_attention(q, q, q)
        return y


def test_what_autocast_casts_counts_once_and_in_its_dtype() -> None:
    found = {}
    for between in ("norm", "tables"):
        with torch.autocast("cpu", torch.bfloat16):
            report = plan_patch(
                InAutocast(between), "exact", example_inputs=torch.ones(ROWS, WIDTH)
            )
        found[between] = {kind: size for kind, size in report.kinds.floor.items() if size}
    assert "norms" not in found["norm"]
    assert found["tables"] == {"linear inputs": ONE // 2}

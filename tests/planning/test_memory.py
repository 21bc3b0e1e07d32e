"""Predicted memory against real allocations, real optimizers and hand arithmetic."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.config import load_config
from lowmem_patch.errors import ConfigError
from lowmem_patch.memory import (
    Training,
    largest_that_fits,
    make_plans,
    model_state_bytes,
    parse_bytes,
    predict_memory,
)
from lowmem_patch.memory.model_states import workspace_sizes
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import Shadow, make_shadow
from tests.support.step_bytes import step_bytes


def llama(layers: int = 2, attention: str = "sdpa") -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=320, attn_implementation=attention, max_position_embeddings=300,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokens(batch: int, length: int | None = 24) -> ExampleInputs:
    return ExampleInputs((), {"input_ids": torch.zeros(batch, length or 24, dtype=torch.long)})


# model states


@pytest.mark.parametrize("name", ["adamw", "adamw_foreach", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_is_what_torch_allocates(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Conv1d(3, 5, 7)).to(dtype)
    model[1].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    classes = {
        "adamw": torch.optim.AdamW,
        "adamw_foreach": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adafactor": torch.optim.Adafactor,
    }
    optimizer = classes[name](trained, lr=1e-3)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [
        value
        for values in optimizer.state.values()
        for key, value in values.items()
        if isinstance(value, Tensor) and key != "step"
    ]
    states = model_state_bytes(model, name)
    assert states.optimizer == sum(value.numel() * value.element_size() for value in state)
    assert states.gradients == sum(p.numel() * p.element_size() for p in trained)
    assert states.parameters == sum(p.numel() * p.element_size() for p in model.parameters())


def test_eight_bit_states_and_four_bit_weights_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096, dtype=torch.bfloat16, device="meta"))
    count = 4096 * 4096
    # two states of one byte, and a float32 scale per 256 of each
    states = [2 * n + 2 * (n // 256) * 4 for n in (count, 4096)]
    assert model_state_bytes(model, "adamw8bit").optimizer == sum(states)
    small = nn.Linear(8, 8, dtype=torch.bfloat16)
    # small ones stay in 32 bits, and on the GPU
    for name in ("adamw8bit", "paged_adamw", "paged_adamw8bit"):
        assert model_state_bytes(small, name).optimizer == 2 * 4 * (64 + 8)
    bias = 2 * 4096 + 2 * 16 * 4
    assert model_state_bytes(model, "paged_adamw8bit").optimizer == bias
    assert model_state_bytes(model, "paged_adamw").optimizer == 2 * 4 * 4096
    model.requires_grad_(False)
    packed = model_state_bytes(model, "adamw", quantised=True)
    # 4 bits, 8 per 64 weights, 32 per 64 x 256 weights; the bias stays
    assert packed.parameters == count // 2 + count // 64 + count // 16384 * 4 + 4096 * 2
    assert (packed.gradients, packed.optimizer, packed.dequantised) == (0, 0, count * 2)
    assert model_state_bytes(model, "adamw").parameters == (count + 4096) * 2


def test_the_head_and_what_trains_are_not_packed() -> None:
    model = llama().requires_grad_(False)
    whole = model_state_bytes(model, "sgd").parameters
    packed = model_state_bytes(model, "sgd", quantised=True).parameters
    linears = 2 * (4 * 64 * 64 + 3 * 64 * 176)
    scales = sum(n // 64 + -(-n // 64 // 256) * 4 for n in [64 * 64] * 8 + [64 * 176] * 6)
    assert whole - packed == linears * 4 - linears // 2 - scales


def test_unknown_optimizers_are_named() -> None:
    with pytest.raises(ConfigError, match="lion"):
        model_state_bytes(nn.Linear(2, 2), "lion")


# one step


def test_a_forward_without_data_that_fails_in_backward_is_named() -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError("no way back")

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            cut: Any = Cut.apply
            return cut(super().forward(x))

    shadow = make_shadow(Model(4, 4), ExampleInputs((torch.ones(2, 4),)))
    with pytest.raises(Exception, match="no way back"):
        step_bytes(shadow)


# scaling


def whole_steps(
    model: nn.Module, preset: str | None, batch: int, length: int, *, accumulates: bool = False
) -> Any:
    model, inputs = model.train(), tokens(batch, length)
    if preset is not None:
        patch_model(model, preset, example_inputs=inputs)
    return step_bytes(make_shadow(model, inputs), accumulates=accumulates)


@pytest.mark.parametrize(
    "size",
    [lambda n: 7 * n + 3, lambda n: n * n + 100, lambda n: 3 * (n // 8) + 1, lambda n: 5,
     lambda n: max(100 * n, n * n)],
)  # fmt: skip
@pytest.mark.parametrize("limit", [0, 5, 10, 101, 5000, 123_456])
@pytest.mark.parametrize("bound", [1, 2, 50, 9999])
def test_largest_that_fits_is_the_largest(
    size: Callable[[int], int], limit: int, bound: int
) -> None:
    calls: list[int] = []

    def total(n: int) -> int:
        calls.append(n)
        assert 1 <= n <= bound or n == 1
        return size(n)

    found = largest_that_fits(total, limit, bound)
    fitting = [n for n in range(1, bound + 1) if size(n) <= limit]
    assert found == (fitting[-1] if fitting else 0)
    assert len(set(calls)) <= 40


def test_affine_sizes_take_few_runs() -> None:
    calls: set[int] = set()

    def total(n: int) -> int:
        calls.add(n)
        return 1_000_003 * n + 17

    assert largest_that_fits(total, 10**12, 1 << 20) == 999_996
    assert len(calls) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solve", "attention", "fragments", "accumulates"),
    [
        ("batch", "sdpa", 0.03, False),
        ("length", "eager", 0.0, False),
        ("batch", "sdpa", 0.03, True),
    ],
)
def test_what_is_said_to_fit_fits_just_so(
    solve: str, attention: str, fragments: float, accumulates: bool
) -> None:
    with torch.device("meta"):
        model = llama(2, attention)
    limit = 8 * 2**20 + sum(workspace_sizes(model))
    memory = predict_memory(
        model, load_config("exact"), tokens, batch_size=2, length=24, limit=limit, solve=solve,
        fragments=fragments, training=Training(accumulates=accumulates),
    )  # fmt: skip
    parameters = 2 * 320 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 176 + 2 * 64) + 64
    assert memory.before.gradients == parameters * 4
    # the fused AdamW of a GPU counts the steps of each of the two layers' 9 parameters, and of 3 more
    assert memory.before.optimizer == 2 * memory.before.gradients + (2 * 9 + 3) * 512
    buffers = memory.before.parameters - parameters * 4
    assert 0 <= buffers <= 2 * 4 * 8  # the rotary table
    assert memory.largest_after is not None and memory.largest_before is not None
    assert memory.largest_after > memory.largest_before > 1
    states = memory.before.parameters + memory.before.optimizer + sum(workspace_sizes(model))
    # as in a budget, gradients that are held all the time are no fragments
    earlier = memory.before.gradients if accumulates else 0
    for preset, size in ((None, memory.largest_before), ("exact", memory.largest_after)):
        for number, fits in ((size, True), (size + 1, False)):
            sizes = (number, 24) if solve == "batch" else (2, number)
            found = whole_steps(llama(2, attention), preset, *sizes, accumulates=accumulates)
            beside = (found.peak - earlier) / (1 - fragments)
            assert (states + earlier + beside <= limit) == fits


def test_a_prediction_adds_up() -> None:
    model = llama(2)
    memory = predict_memory(
        model, load_config("auto"), tokens, batch_size=2, length=24, training=Training("sgd")
    )
    found = whole_steps(llama(2), None, 2, 24)
    before = memory.before
    assert before.saved == found.saved and before.optimizer == 0
    assert before.total == before.parameters + found.peak
    assert memory.to_dict()["before"]["total"] == before.total
    assert memory.after.saved < before.saved and memory.after.total < before.total


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("train", ["full", "qlora"])
def test_layers_of_seventy_billion_parameters(train: str) -> None:
    """Llama-3-70B's shapes, eight layers of eighty: seconds, and no memory for the weights."""
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=8, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    largest, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config).bfloat16()
        if train == "qlora":
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    model.train()
    plans = make_plans(model, load_config("auto"), tokens(1, 4096))
    report = plans.report
    memory = predict_memory(
        model,
        load_config("auto"),
        tokens,
        batch_size=1,
        length=4096,
        training=Training(quantised=train == "qlora"),
        plans=plans,
    )
    assert time.process_time() - started < 60
    unit = 1024 if sys.platform != "darwin" else 1  # of ru_maxrss, in bytes
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest) * unit < 2 * 2**30
    weights = 8 * (2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672)
    other = 2 * 128256 * 8192 + 17 * 8192
    assert memory.before.gradients >= (weights + other) * 2 or train == "qlora"
    if train == "full":
        assert memory.before.parameters == pytest.approx((weights + other) * 2, rel=1e-6)
    else:  # 4 bits, 8 per 64 weights, 32 per 64 x 256
        assert memory.before.parameters < weights * 0.52 + other * 2 + 2**27
    assert report.saved_after < 0.5 * report.saved_before
    assert report.above_floor < 1.01
    # what is predicted for the step is what is planned for the model, and the loss's share
    assert memory.after.saved - report.saved_after == memory.before.saved - report.saved_before


def test_lengths_end_where_positions_do() -> None:
    memory = predict_memory(
        llama(2),
        load_config("exact"),
        tokens,
        batch_size=1,
        length=24,
        limit=10**12,
        solve="length",
    )
    assert memory.largest_before == memory.largest_after == memory.bound == 300


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24g", 24 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5MiB", 1572864),
        ("4096B", 4096),
        ("1tib", 2**40),
    ],
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "24 apples", "-3GiB", "nanGiB", "infGB", "0", "24"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "mend"),
    [("24", "24GiB, or 24B"), ("25769803776", "write 25769803776B"), ("10000", "write 10000B")],
)
def test_a_size_without_a_unit_is_told_how_to_have_one(text: str, mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        parse_bytes(text)
    assert parse_bytes(f"{text}B") == int(text)


def test_autocast_copies_of_weights_are_apart() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    inputs = ExampleInputs((torch.ones(8, 64),))
    with torch.autocast("cpu", torch.bfloat16):
        found = step_bytes(make_shadow(model, inputs))
        again = step_bytes(make_shadow(model, inputs))
    assert found == again  # autocast's memory of casts does not reach from one count into the next
    assert found.saved == 2 * 8 * 64 * 2
    assert (
        found.weight_copies == 64 * 64 * 2
    )  # the first one's weight has no input gradient to make


def test_one_shadow_counts_twice_the_same() -> None:
    shadow = make_shadow(llama(1).train(), tokens(2))
    with torch.autocast("cpu", torch.bfloat16):
        first = step_bytes(shadow)
        assert step_bytes(Shadow(shadow.model, shadow.inputs, shadow.mode)) == first

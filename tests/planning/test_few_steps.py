"""A step that few of many equal blocks tell of is, byte for byte and in each moment, that of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lowmem_patch import patch_model
from lowmem_patch.config import load_config
from lowmem_patch.memory import Training, make_plans, predict_memory
from lowmem_patch.memory.few_blocks import Plans
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import make_shadow
from tests.support.step_bytes import step_bytes

WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}


def tokens(batch: int, length: int, *names: str) -> ExampleInputs:
    names = names or ("input_ids",)
    return ExampleInputs((), {n: torch.zeros(batch, length, dtype=torch.long) for n in names})


def llama(**extra: Any) -> Any:
    sizes = {**WIDTHS, "num_hidden_layers": 9, "vocab_size": 320, **extra}
    config = transformers.LlamaConfig(**sizes)
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    """Its decoder's blocks but the last add to a gradient of the encoder's output."""
    config = transformers.T5Config(
        vocab_size=320, d_model=64, d_kv=16, d_ff=176, num_layers=7, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def headless() -> Any:
    """No other block reads what its last one gives."""
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**WIDTHS, **dropouts, num_hidden_layers=7, vocab_size=320)
    return transformers.BertModel(config)


def moments(
    plans: Plans, model: nn.Module, inputs: ExampleInputs, *, patched: bool = False, accumulates: bool = False
) -> dict[str, int]:  # fmt: skip
    """What is predicted beside parameters, optimizer and workspaces."""
    memory = predict_memory(
        model, plans.report.config, lambda *_: inputs, batch_size=1, plans=plans,
        training=Training(accumulates=accumulates),
    )  # fmt: skip
    found = memory.after if patched else memory.before
    held = found.parameters + found.optimizer + found.workspace
    return {moment: size - held for moment, size in found.moments.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "inputs", "preset", "cast"),
    [
        (lambda: llama(attn_implementation="eager"), tokens(3, 40), "exact", False),
        (lambda: llama(attn_implementation="sdpa"), tokens(3, 40), "exact", False),
        # a cache of keys and values holds more than the backward needs
        (llama, tokens(2, 24), "auto", True),
        (t5, tokens(2, 24, "input_ids", "decoder_input_ids"), "exact", False),
        (headless, tokens(2, 24), "exact", False),
    ],
    ids=["eager", "sdpa", "autocast", "t5", "headless"],
)
def test_few_blocks_tell_of_many(make: Any, inputs: Any, preset: str, cast: bool) -> None:
    with torch.device("meta"):
        model = make().train()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        plans = make_plans(model, load_config(preset), inputs)
        assert plans.few is not None and plans.few.depth == 4
        before, after = (
            moments(plans, model, inputs, patched=patched) for patched in (False, True)
        )
        assert before == step_bytes(make_shadow(model, inputs)).moments
        patch_model(model, preset, example_inputs=inputs)
        assert after == step_bytes(make_shadow(model, inputs)).moments


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 30, 200])
def test_few_blocks_tell_where_the_peak_of_many_is(length: int) -> None:
    """With many tokens it is at the loss, with few at the end of the backward. With 30 it is at the loss
    of four blocks, and at the end of twelve: no line goes through both."""
    with torch.device("meta"):
        model = llama(num_hidden_layers=12, vocab_size=2048, tie_word_embeddings=True).train()
    inputs = tokens(1, length)
    plans = make_plans(model, load_config("auto"), inputs)
    shadow = make_shadow(model, inputs)
    for accumulates in (False, True):
        whole = step_bytes(shadow, accumulates=accumulates)
        assert plans.few is not None
        assert moments(plans, model, inputs, accumulates=accumulates) == whole.moments
        assert plans.report.saved_before == whole.saved


class Uneven(nn.Module):
    """Blocks that look equal, but only every third keeps anything."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = torch.nn.functional.gelu(y) if number % 3 == 2 else y
        return x


class Twice(Uneven):
    """All blocks run, and then all of them again."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = torch.nn.functional.gelu(block(x))
        return x


@pytest.mark.parametrize("kind", [Uneven, Twice])
def test_blocks_that_only_look_equal_are_all_run(kind: type[Uneven]) -> None:
    model, inputs = kind().train(), ExampleInputs((torch.ones(4, 8),))
    plans = make_plans(model, load_config("auto"), inputs)
    whole = step_bytes(make_shadow(model, inputs))
    # what is saved by blocks that run twice grows evenly: few are planned
    assert (plans.few is None) == (kind is Uneven)
    assert moments(plans, model, inputs) == whole.moments
    assert plans.report.saved_before == whole.saved
    if kind is Uneven:
        # nine inputs, three inputs of GELU, and what the mean square is of; the first input is the model's
        assert whole.saved == (9 + 3) * 4 * 8 * 4


class Collects(nn.Module):
    """Copies of what each block gives are there until the last block has run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9))
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.collected(x)[-1])

    def collected(self, x: Tensor) -> list[Tensor]:
        copies = []
        for block in self.blocks:
            x = block(x)
            copies.append(x.detach().clone())
        return [x]


def test_what_is_there_while_the_blocks_run_is_in_the_forward_and_not_in_the_loss() -> None:
    model, inputs = Collects().train(), ExampleInputs((torch.ones(4, 8),))
    plans = make_plans(model, load_config("auto"), inputs)
    assert plans.few is not None
    found, whole = (
        moments(plans, model, inputs),
        dict(step_bytes(make_shadow(model, inputs)).moments),
    )
    # behind the last block the copies go at some time, which few blocks do not tell
    assert found.pop("forward") >= whole.pop("forward")
    assert found == whole

"""Where two gradients of one tensor meet, autograd adds the second to the first in place, if it can.

It never does for fake tensors: the peak of their step is held against what torch's allocator gave in a real
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from lowmem_patch.memory import run_step
from lowmem_patch.nn.deferred_experts import GatheredRows
from lowmem_patch.planning.fit_report import FitReport
from lowmem_patch.tracing.fake_mode import make_fake_mode
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.live_storages import LiveStorages
from lowmem_patch.tracing.shadow import make_shadow
from tests.support.fitted import assert_predicted
from tests.support.live import allocated
from tests.support.step import warned
from tests.support.step_bytes import step_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*profil"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
]
WORKSPACE = 256  # bytes, as in test_step_moments
VOCABULARY, TOKENS = 8192, 6  # the largest weight is nearly all of the step


def gpt2(tied: bool = True) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def gemma() -> Any:
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(config)


def lora() -> Any:
    adapters = LoraConfig(r=4, target_modules=["c_attn", "lm_head"], fan_in_fan_out=False)
    with warned():
        return get_peft_model(gpt2(), adapters)


def tokens(length: int = TOKENS) -> ExampleInputs:
    generator = torch.Generator().manual_seed(1)
    return ExampleInputs(
        (), {"input_ids": torch.randint(VOCABULARY, (1, length), generator=generator)}
    )


MODELS: dict[str, Callable[[], Any]] = {
    "tied": gpt2,
    "tied, soft caps": gemma,
    "untied": lambda: gpt2(tied=False),
}


def fitted(model: Any, inputs: ExampleInputs) -> FitReport:
    with warned():
        patch_model(model, "auto", example_inputs=inputs, fit="1GiB", optimizer="sgd")
    fit = patch_report(model).fit
    assert fit is not None
    return fit


def real_peak(model: nn.Module, inputs: ExampleInputs) -> int:
    """Bytes at the peak of a real step, model states but gradients excluded."""
    with warned():
        run_step(model, inputs)  # what is made once
    model.zero_grad(set_to_none=True)
    given = [t for t in (*inputs.args, *inputs.kwargs.values()) if isinstance(t, Tensor)]
    return sum(tensor.nbytes for tensor in given) + allocated(lambda: run_step(model, inputs))


def assert_above(predicted: int, real: int) -> None:
    assert real <= predicted <= 1.03 * real, (predicted, real, predicted / real - 1)


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_tied_model_is_the_real_one(name: str) -> None:
    model, inputs = MODELS[name]().train(), tokens()
    fit = fitted(model, inputs)
    real = real_peak(model, inputs)
    assert_above(fit.predicted - fit.parameters, real)
    assert_above(step_bytes(make_shadow(model, inputs), optimizer="sgd").peak, real)


def test_adapters_on_a_tied_head() -> None:
    """The weight is frozen, and the peak is in the loss.

    A CPU's kernels take more memory there than a GPU's: what ops return is counted. Of 64 labels one is
    ignored, which fake ones do not tell.
    """
    model, inputs = lora().train(), tokens(64)
    assert_predicted(fitted(model, inputs), model, inputs)


class Thrice(nn.Module):
    """One weight, used three times: as it is, or by Linears, whose gradients of it are views."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(512, 512) / 23), linear

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(nn.functional.linear(x, self.weight) if self.linear else x @ self.weight)
        return x


@pytest.mark.parametrize("linear", [False, True])
def test_a_weight_that_is_used_three_times(linear: bool) -> None:
    model, inputs = Thrice(linear).train(), ExampleInputs((torch.randn(4, 512),))
    found = step_bytes(make_shadow(model, inputs), optimizer="sgd").peak
    assert_above(found, real_peak(model, inputs))
    # autograd adds to no view
    assert round(found / model.weight.nbytes) == (3 if linear else 2)


class Foreign(torch.autograd.Function):
    """Its own sum, of two tensors that nobody holds, is not in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # one gradient
        return gradient.clone() + gradient.clone()


class Peak(LiveStorages):
    most = 0

    def grown(self, now: int) -> None:
        self.most = max(self.most, now)


# what is differentiated, and how many tensors of its size its backward takes at one time
SUMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "in place": (lambda x: x * 2 + x * 3, 2),
    "twice in place": (lambda x: x * 2 + x * 3 + x * 4, 2),
    "the caller holds the first": (lambda x: x + x * 3, 2),
    "the first is a view": (lambda x: (x.t() * 2).t() + x * 3, 2),
    "the first is expanded": (lambda x: (x * 3).sum() + x.sum(), 2),
    "of a foreign backward": (Foreign.apply, 3),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_counted_as_they_are_made(name: str) -> None:
    """Of real tensors, which autograd adds in place but for who counts them by a dispatch mode."""
    function, wanted = SUMS[name]
    leaf = torch.ones(256, 256, requires_grad=True)

    def graph() -> tuple[Tensor, Tensor]:
        output = function(leaf)
        leaf.grad = None
        return output, torch.ones_like(output)

    output, gradient = graph()
    real = allocated(lambda: output.backward(gradient))
    output, gradient = graph()
    with Peak((gradient,)) as live:
        output.backward(gradient)
    assert live.most == pytest.approx(real, abs=WORKSPACE)
    assert round(live.most / leaf.nbytes) == wanted


def test_a_write_into_a_deferred_tensor_counts_its_value_once() -> None:
    """As experts of transformers 5.17 write zeros into the rows that they gathered."""

    def run(*given: Tensor) -> None:
        x, index, mask = given
        h: Tensor = GatheredRows.of(x, index)
        h.masked_fill_(mask, 0.0)

    given = (
        torch.randn(64, 512, requires_grad=True),
        torch.arange(256) % 64,
        torch.zeros(256, 1, dtype=torch.bool),
    )
    mode = make_fake_mode()
    fakes = [mode.from_tensor(tensor) for tensor in given]
    with mode, Peak(fakes) as live:
        run(*fakes)
    assert live.most == pytest.approx(allocated(lambda: run(*given)), abs=WORKSPACE)

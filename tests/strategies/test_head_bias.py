"""A bias that is added to logits is added in its own dtype, as without the patch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

from lowmem_patch import patch_model, patch_report

ROWS, WIDTH, VOCABULARY = 12, 16, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embed(tokens)))
        return logits


def pair(dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (ROWS,))
    plain = Model().to(dtype)
    return plain, patch_model(copy.deepcopy(plain), "exact", example_inputs=tokens), tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("widened", [False, True], ids=["as it is", "float()"])
def test_a_float32_mask_stays_finite(dtype: torch.dtype, widened: bool) -> None:
    mask = torch.zeros(VOCABULARY)
    mask[60:] = torch.finfo(torch.float32).min
    found = []
    for model, tokens in [(model, pair(dtype)[2]) for model in pair(dtype)[:2]]:
        logits = model(tokens)
        log_p = ((logits.float() if widened else logits) + mask).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        entropy.backward()
        found.append((log_p.dtype, entropy.detach(), model.head.weight.grad.float()))
    (own, entropy, gradient), (ours, patched, found_gradient) = found
    assert own == ours == torch.float32
    # the same products in the same dtypes: sums of float32 in another order, and roundings to ``dtype``
    torch.testing.assert_close(patched, entropy, rtol=1e-6, atol=0)
    error = (found_gradient - gradient).norm() / gradient.norm()
    assert error <= torch.finfo(dtype).eps


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_bias_costs_no_precision(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    bias = 10 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)).to(bias_dtype)
    plain, patched, tokens = pair(dtype)
    double = copy.deepcopy(plain).double()
    losses = []
    for model in (double, plain, patched):
        given = bias.double() if model is double else bias
        losses.append(F.cross_entropy((model(tokens) + given).double(), tokens, reduction="none"))
    truth, own, ours = (loss.detach() for loss in losses)
    assert (ours - truth).norm() <= 2 * (own - truth).norm() + 1e-12


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_bias_leaves_logits_unread(bias_dtype: torch.dtype) -> None:
    _, patched, tokens = pair(torch.bfloat16)
    F.cross_entropy(patched(tokens) + torch.ones(VOCABULARY, dtype=bias_dtype), tokens).backward()
    assert "computed whole" not in str(patch_report(patched))


def test_a_bias_on_rounded_logits_reads_them() -> None:
    _, patched, tokens = pair(torch.float32)
    logits = patched(tokens).to(torch.bfloat16) + torch.ones(VOCABULARY)
    F.cross_entropy(logits, tokens).backward()
    assert "computed whole" in str(patch_report(patched))


READERS: dict[str, Any] = {
    "mean": lambda y, tokens: F.cross_entropy(y, tokens),
    "each row": lambda y, tokens: F.cross_entropy(y, tokens, reduction="none").square().mean(),
    "log_softmax": lambda y, tokens: y.log_softmax(-1).gather(-1, tokens[:, None]).square().mean(),
    "logsumexp": lambda y, tokens: (y.logsumexp(-1) - y.gather(-1, tokens[:, None])[:, 0]).mean(),
    "soft cap": lambda y, tokens: F.cross_entropy(torch.tanh(y / 3) * 3, tokens),
    "rows": lambda y, tokens: F.cross_entropy(y[1:], tokens[1:]),
    "classes": lambda y, tokens: F.cross_entropy(y[:, :60], tokens % 60),
    "whole": lambda y, tokens: F.cross_entropy(y.exp().log(), tokens),
}


@pytest.mark.parametrize("again", [1, 2], ids=["once", "retained"])
@pytest.mark.parametrize("reader", READERS)
def test_a_trained_wide_bias_has_its_own_gradient(reader: str, again: int) -> None:
    plain, patched, tokens = pair(torch.bfloat16)
    results = []
    for model in (copy.deepcopy(plain).double(), plain, patched):
        bias = torch.linspace(-2, 2, VOCABULARY, dtype=torch.float32)
        bias = (
            bias.double() if model.head.weight.dtype == torch.float64 else bias
        ).requires_grad_()
        loss = READERS[reader](model(tokens) + bias, tokens)
        for step in range(again):
            loss.backward(retain_graph=step + 1 < again)
        weights = (model.embed.weight.grad, model.head.weight.grad)
        assert bias.grad is not None and bias.grad.dtype == bias.dtype
        results.append([t.double() for t in (loss.detach(), bias.grad, *weights)])
    for truth, own, ours in zip(*results, strict=True):
        # two rounded products: their sum in another order
        assert (ours - truth).norm() <= 2 * (own - truth).norm() + 1e-7 * truth.norm()
    assert ("computed whole" in str(patch_report(patched))) == (reader == "whole")


def test_the_highest_logit_counts_a_wide_bias() -> None:
    plain, patched, tokens = pair(torch.bfloat16)
    bias = torch.zeros(VOCABULARY)
    bias[7] = 1e-3  # bf16 has no such number beside 1
    weight = torch.zeros_like(plain.head.weight)
    with torch.no_grad():
        plain.head.weight.copy_(weight)
        patched.head.weight.copy_(weight)
    assert (patched(tokens) + 1 + bias).argmax(-1).tolist() == [7] * ROWS
    assert (patched(tokens) + (1 + bias)).argmax(-1).tolist() == [7] * ROWS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bart_under_autocast_never_has_whole_logits(dtype: torch.dtype) -> None:
    """Its final_logits_bias is a float32 buffer, and its product is in the low dtype."""
    torch.manual_seed(0)
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    feeds = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
    config = BartConfig(vocab_size=256, d_model=16, dropout=0.0, **sizes, **heads, **feeds)
    plain: Any = BartForConditionalGeneration(config).train()
    plain.final_logits_bias.normal_(std=3)
    patched: Any = patch_model(copy.deepcopy(plain), "exact")
    tokens = torch.randint(4, 256, (2, 24))
    results = []
    for model in (copy.deepcopy(plain).double(), plain, patched):
        low = model.final_logits_bias.dtype == torch.float32
        with torch.autocast("cpu", dtype, enabled=low):
            output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        results.append([output.loss.detach().double(), model.model.shared.weight.grad.double()])
    for truth, own, ours in zip(*results, strict=True):
        assert (ours - truth).norm() <= 2 * (own - truth).norm() + 1e-6 * truth.norm()
    assert "computed whole" not in str(patch_report(patched))


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_bias_behind_an_adapter_of_the_head(bias_dtype: torch.dtype) -> None:
    plain, _, tokens = pair(torch.bfloat16)
    adapter = LoraConfig(target_modules=["head"], r=2, init_lora_weights=False)
    plain = get_peft_model(plain, adapter, autocast_adapter_dtype=False)
    patched = patch_model(copy.deepcopy(plain), "exact", example_inputs=tokens)
    results = []
    for model in (copy.deepcopy(plain).double(), plain, patched):
        weight = dict(model.named_parameters())["base_model.model.head.lora_B.default.weight"]
        bias = torch.linspace(-2, 2, VOCABULARY, dtype=bias_dtype)
        bias = bias.to(torch.promote_types(weight.dtype, bias_dtype)).requires_grad_()
        loss = F.cross_entropy((model(tokens) + bias).float(), tokens)
        loss.backward()
        assert bias.grad is not None and weight.grad is not None
        results.append([t.detach().double() for t in (loss, bias.grad, weight.grad)])
    for truth, own, ours in zip(*results, strict=True):
        assert (ours - truth).norm() <= 2 * (own - truth).norm() + 1e-6 * truth.norm()
    assert "computed whole" not in str(patch_report(patched))

"""A bias that is added to logits is added in its own dtype, as without the patch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def test_a_bias_in_the_dtype_of_the_logits_leaves_them_unread() -> None:
    _, patched, tokens = pair(torch.bfloat16)
    logits = patched(tokens) + torch.ones(VOCABULARY, dtype=torch.bfloat16)
    F.cross_entropy(logits, tokens).backward()
    assert "computed whole" not in str(patch_report(patched))
    F.cross_entropy(patched(tokens) + torch.ones(VOCABULARY), tokens).backward()
    assert "computed whole" in str(patch_report(patched))

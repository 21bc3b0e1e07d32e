"""Rotary embeddings that a file applies to one tensor at a time (Gemma 4), and norms in front of them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from lowmem_patch.nn.norms import MSNorm
from lowmem_patch.nn.rotary import RotationOfOne
from lowmem_patch.strategies.rotary import _match
from tests.support.judge import assert_accurate, assert_same_step
from tests.support.models import randomise
from tests.support.step import AUTOCAST, BF16, FP32, Mode, cast, step, truth_of

WIDTH, HEADS, HEAD, LENGTH = 16, 2, 8, 5
ROWS = 2 * LENGTH


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (x * cos) + (rotate_half(x) * sin)


def rotary_the_other_way(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return apply_rotary(x, cos, -sin, unsqueeze_dim)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)
        self.proj = nn.Linear(HEADS * HEAD, WIDTH)
        self.turns_keys = True

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(LENGTH, device=x.device)[None, :, None] * torch.tensor(
            [1.0, 0.3, 0.1, 0.01]
        )
        angles = torch.cat((angles, angles), -1).to(x.dtype)
        q, k, v = (one(x).view(2, LENGTH, HEADS, HEAD) for one in (self.q, self.k, self.v))
        q = apply_rotary(self.q_norm(q), angles.cos(), angles.sin(), unsqueeze_dim=2)
        k = self.k_norm(k)
        if self.turns_keys:
            k = apply_rotary(k, angles.cos(), angles.sin(), 2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return x + self.proj(y.transpose(1, 2).reshape(2, LENGTH, -1))


def rows() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def made() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention())
    randomise(model)
    return model.train()


def patched(model: Any, mode: Mode = FP32) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        x = rows().to(mode.weights)
        return patch_model(copy.deepcopy(model), "exact", example_inputs=x)


def saved(model: Any, mode: Mode = FP32) -> int:
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None),
        saved_bytes(model) as counted,
    ):
        y = model(rows())
    del y
    return counted.activations


@pytest.mark.parametrize("mode", [FP32, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
def test_a_step_is_accurate(mode: Mode) -> None:
    model, x = cast(made(), mode.weights), rows().to(mode.weights)
    ours = patched(model, mode)
    assert "rotary embeddings that run as one op, for speed: 1" in "".join(patch_report(ours).notes)
    found, own = (step(one, x, mode) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, x), mode)


@pytest.mark.parametrize("mode", [FP32, AUTOCAST], ids=["fp32", "autocast"])
def test_norms_save_what_the_rotation_gives(mode: Mode) -> None:
    ours = patched(made(), mode)
    now = saved(ours, mode)
    report = patch_report(ours)
    assert report.floor <= report.saved_after
    assert abs(report.saved_after - now) <= 4 * ROWS
    for module in ours.modules():
        if isinstance(module, MSNorm):
            module.use = dataclasses.replace(module.use, turned=False)
    size = 4 if mode is FP32 else 2  # torch's RMSNorm has autocast's dtype on a CPU
    assert saved(ours, mode) - now == 2 * ROWS * HEADS * HEAD * size


def test_keys_may_stay_as_they_are() -> None:
    model = made()
    ours = patched(model)
    model[1].turns_keys = ours[1].turns_keys = False
    assert_same_step(ours, model, rows())
    assert_same_step(patched(model), model, rows())


def test_copies_and_undo() -> None:
    model = made()
    ours = patched(model)
    assert saved(copy.deepcopy(ours)) == saved(ours)
    unpatch_model(ours)
    assert saved(ours) == saved(model)
    assert_same_step(ours, model, rows())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled() -> None:
    model = made()
    torch._dynamo.reset()
    net = torch.compile(patched(model), backend="aot_eager_decomp_partition", fullgraph=True)
    assert_same_step(net, model, rows())


def test_another_function_is_no_rotation() -> None:
    assert isinstance(_match("apply_rotary", apply_rotary), RotationOfOne)
    assert _match("rotary_the_other_way", rotary_the_other_way) is None
    assert _match("rotary_of_two", lambda x, y, cos, sin: (x, y)) is None

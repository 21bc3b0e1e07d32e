"""BatchNorm and GroupNorm with an activation behind them, computed again from the norm's input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch.constants import ACTIVATION_KINDS, ChannelNormInput
from lowmem_patch.formulas import FORWARD
from lowmem_patch.functional._implementation import module
from tests.ops.conftest import Backend, part
from tests.support.judge import assert_near
from tests.support.step import Mode

EPS = 1e-5
SHAPES = [(3, 8, 5, 7), (2, 12, 3), (5, 6), (2, 4, 70, 33), (3, 4, 2, 3, 5), (1, 8, 300, 9)]
DTYPES = [torch.float32, torch.bfloat16]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def plain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    kind: Any,
    residual: Tensor | None = None,
) -> Tensor:
    if groups:
        y = F.group_norm(x, groups, weight, bias, EPS)
    else:
        y = F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)
    y = y if residual is None else y + residual
    return y if kind is None else FORWARD[kind](y)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups", "affine", "kind", "dtype", "summed"),
    part(SHAPES, (0, 2), (True, False), (None, "silu", "relu", "hardswish"), DTYPES, (False, True)),
)
def test_values_and_gradients_are_torchs(
    backend: Backend,
    shape: tuple[int, ...],
    groups: int,
    affine: bool,
    kind: Any,
    dtype: torch.dtype,
    summed: bool,
    last: bool,
) -> None:
    if last and (groups or len(shape) not in LAST):
        pytest.skip("of BatchNorm over images alone")
    operations, device = module(backend.implementation), backend.device
    torch.manual_seed(0)
    x = (3 * torch.randn(shape) + torch.randn(shape[1]).view(-1, *(1,) * (len(shape) - 2))).to(
        device, dtype
    )
    if last:
        x = x.to(memory_format=LAST[len(shape)])
    vectors = [torch.randn(shape[1]).to(device, dtype) if affine else None for _ in range(2)]
    dy = torch.randn(shape).to(device, dtype)
    residual = torch.empty_like(x).copy_(torch.randn(shape)) if summed else None
    statistics = operations.channel_statistics(x, groups, EPS, None, None, 0.0)
    given = ChannelNormInput(x, *statistics, *vectors, groups, kind, residual)
    value = operations.channel_norm_forward(given, dtype)
    if summed:
        d = dy if kind is None else operations.channel_sum_gradient(dy, given)
        norm = given._replace(kind=None, residual=None)
        found = (*operations.channel_norm_backward(d, norm)[: 3 if affine else 1], d)
    else:
        found = operations.channel_norm_backward(dy, given)
    assert value.stride() == found[0].stride() == x.stride()

    def run(to: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [None if t is None else t.to(to).requires_grad_() for t in (x, *vectors, residual)]
        y = plain(*leaves[:3], groups, kind, leaves[3])  # type: ignore[arg-type]
        present = [leaf for leaf in leaves if leaf is not None]
        return y.detach(), *torch.autograd.grad(y, present, dy.to(to))

    exact = run(torch.float64)
    unpatched = run(dtype)
    mode = Mode(dtype)
    for ours, theirs, truth in zip((value, *found), unpatched, exact, strict=False):
        assert_near(ours.to(theirs.dtype), theirs, truth, mode)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_every_activation(backend: Backend, kind: Any) -> None:
    operations, device = module(backend.implementation), backend.device
    torch.manual_seed(0)
    x, dy = (torch.randn(2, 4, 5, 5).to(device) for _ in range(2))
    weight, bias = (torch.randn(4).to(device) for _ in range(2))
    statistics = operations.channel_statistics(x, 0, EPS, None, None, 0.0)
    given = ChannelNormInput(x, *statistics, weight, bias, 0, kind)
    leaf = x.double().requires_grad_()
    exact = plain(leaf, weight.double(), bias.double(), 0, kind)
    torch.testing.assert_close(
        operations.channel_norm_forward(given, torch.float32).double(), exact.detach(),
        rtol=1e-5, atol=1e-6,  # float32 of values up to 10
    )  # fmt: skip
    (truth,) = torch.autograd.grad(exact, leaf, dy.double())
    found = operations.channel_norm_backward(dy, given)[0].double()
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)  # a mean is subtracted from it


@pytest.mark.parametrize("groups", [0, 2])
def test_a_mean_far_from_zero_leaves_the_variance(backend: Backend, groups: int) -> None:
    x = (torch.randn(2, 4, 40, 30) + 1000).to(backend.device)
    _, rstd = module(backend.implementation).channel_statistics(x, groups, EPS, None, None, 0.0)
    rows = x.double().reshape(2 * groups, -1) if groups else x.double().transpose(0, 1).flatten(1)
    # the rounding of float32 at 1000 is 6e-5
    truth = (rows.var(1, correction=0) + EPS).rsqrt()
    torch.testing.assert_close(rstd.double(), truth, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_running_statistics_are_torchs(backend: Backend, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4, 6, 7) * 2 + 1).to(backend.device, dtype)
    ours = [torch.randn(4, device=backend.device), torch.rand(4, device=backend.device)]
    theirs = [tensor.double() for tensor in ours]
    module(backend.implementation).channel_statistics(x, 0, EPS, *ours, 0.3)
    F.batch_norm(x.double(), *theirs, training=True, momentum=0.3, eps=EPS)
    for found, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            found.double(), truth, rtol=1e-5, atol=1e-6
        )  # float32 of numbers near 1

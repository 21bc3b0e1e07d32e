"""What is taken for a gated norm, and what such a norm may be given."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem_patch import patch_report, saved_bytes
from lowmem_patch.nn.gated_norms import GatedMSRMSNorm
from tests.strategies.test_gated_norms import (
    NORMS,
    GateThenNorm,
    Net,
    NormThenGate,
    Sigmoid,
    batch,
    made,
    patched,
)
from tests.support.judge import assert_near, assert_same_step
from tests.support.step import Mode


class ShiftedNorm(NormThenGate):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states, gate) + gate


class ClampedNorm(NormThenGate):
    act = staticmethod(lambda gate: F.silu(gate.clamp(max=7)))


class ClampedSigmoidNorm(NormThenGate):
    act = staticmethod(lambda gate: torch.sigmoid(gate.clamp(-6, 6)))


class ClippedNorm(NormThenGate):
    act = staticmethod(lambda gate: F.hardtanh(gate, 0.0, 7.0))


class ClampedInputNorm(GateThenNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        return super().forward((hidden_states * F.silu(gate)).clamp(-50, 50))


class DetachedGateNorm(NormThenGate):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states, gate.detach())


class DetachedInputNorm(NormThenGate):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        half = hidden_states * 0.5
        return super().forward(half + half.detach(), gate)


class SwappedNorm(NormThenGate):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(gate, hidden_states)


class TrainingNorm(NormThenGate):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states, gate) * (2.0 if self.training else 1.0)


OTHERS = [
    ShiftedNorm, ClampedNorm, ClampedSigmoidNorm, ClippedNorm, ClampedInputNorm, DetachedGateNorm,
    DetachedInputNorm, SwappedNorm, TrainingNorm,
]  # fmt: skip


@pytest.mark.parametrize("norm", OTHERS)
def test_another_function_of_two_tensors_is_left_alone(norm: Callable[[], nn.Module]) -> None:
    model = Net(norm()).train()
    ours = patched(model)
    assert type(ours.norm) is norm
    assert_same_step(ours, model, batch())


@pytest.mark.parametrize("width", [8, 16, 24, 128])
@pytest.mark.parametrize("norm", [NormThenGate, Sigmoid, GateThenNorm])
def test_one_of_any_width_is_found(norm: Callable[[int], nn.Module], width: int) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.z, self.norm = nn.Linear(4, width), nn.Linear(4, width), norm(width)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.norm(self.x(x), self.z(x))
            return found

    assert type(patched(Plain(), torch.randn(3, 4)).norm) is GatedMSRMSNorm


@pytest.mark.parametrize("name", NORMS)
def test_no_other_strategy_takes_it_as_well(name: str) -> None:
    ours = patched(made(name))
    (site,) = (site for site in patch_report(ours).sites if site.name.startswith("norm"))
    assert (site.name, site.strategy) == ("norm", "share")
    assert "forward" not in vars(ours.norm)


def test_without_a_gate_it_is_the_norm() -> None:
    model = made("silu, norm")
    ours = patched(model)
    for one in (model, ours):
        found, own = ours.norm(one.x(batch())), model.norm(one.x(batch()))
        torch.testing.assert_close(found, own)  # float32's own tolerances


Given = tuple[tuple[Any, ...], dict[str, Any]]
WRONG: list[Given] = [
    ((), {}), ((1, 2, 3), {}), ((1,), {"other": 2}), ((1,), {"hidden_states": 2}), ((1,), {}),
    ((1, None), {}),
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG)
def test_other_arguments_are_an_error(given: Given) -> None:
    with pytest.raises(TypeError, match="takes hidden_states and gate"):
        patched(made()).norm(*given[0], **given[1])


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", NORMS)
def test_any_dtypes_give_the_dtype_and_the_values(name: str) -> None:
    model = made(name)
    ours = patched(model)
    for dtypes in itertools.product(DTYPES, repeat=3):
        x, gate = batch(2).to(dtypes[0]), batch(3).to(dtypes[1])
        theirs, found = (one.norm.to(dtypes[2])(x, gate) for one in (model, ours))
        assert found.dtype == theirs.dtype
        exact = copy.deepcopy(model.norm).double()
        wanted = exact(x.double(), gate.double()).double()
        mode = Mode(max((*dtypes, found.dtype), key=lambda dtype: torch.finfo(dtype).eps))
        assert_near(found, theirs, wanted, mode)


@pytest.mark.parametrize("x_size, gate_size, dy", [(300, 300, 1), (1, -12, 64), (1e-6, 1, 1)])
@pytest.mark.parametrize("name", ["silu, norm", "silu, norm of groups"])
def test_float16_has_room_where_it_had(
    name: str, x_size: float, gate_size: float, dy: float
) -> None:
    gradients = []
    model = made(name).half()
    for one in (model, patched(made(name)).half()):
        x = (batch(2) * x_size).half().requires_grad_()
        gate = (batch(3).abs() * gate_size).half().requires_grad_()
        one.norm(x, gate).backward(torch.full(x.shape, dy, dtype=torch.float16))
        gradients.append((x.grad, gate.grad, one.norm.weight.grad))
    for own, found in zip(*gradients, strict=True):
        assert own.isfinite().all() == found.isfinite().all()
        if own.isfinite().all():
            torch.testing.assert_close(found, own, rtol=2e-2, atol=2e-3 * own.abs().max())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_broadcast_gate_computes_the_same(frozen: bool, name: str) -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        y = net.norm(net.x(x), net.z(x)[..., :1])
        found: Tensor = net.out(y) + y.mean()
        return found

    model = made(name)
    model.out.requires_grad_(not frozen)
    ours = patched(model)
    for one in (model, ours):
        one.use = use
    assert_same_step(ours, model, batch())
    assert_same_step(patched(model), model, batch())


@pytest.mark.parametrize("norm", [Sigmoid, GateThenNorm])
def test_two_calls_in_a_forward_compute_the_same(norm: Callable[[], nn.Module]) -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        y = net.norm(net.x(x), net.z(x))
        found: Tensor = net.out(net.norm(y, net.z(y)))
        return found

    model = Net(norm(), use).train()
    ours = patched(model)
    assert type(ours.norm) is GatedMSRMSNorm
    assert_same_step(ours, model, batch())
    counts = []
    for one in (ours, model):
        with saved_bytes(one) as saved:
            one(batch())
        counts.append(saved.activations)
    assert counts[0] < counts[1]


@pytest.mark.parametrize("name", NORMS)
def test_an_empty_batch_gives_an_empty_output(name: str) -> None:
    ours = patched(made(name))
    assert ours(batch()[:0]).shape == (0, batch().shape[1], 4)

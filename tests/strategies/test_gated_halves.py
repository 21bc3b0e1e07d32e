"""`F.glu` in front of a convolution or a Linear (conformers) is computed again of its input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.chained import chains_of
from tests.support.judge import assert_same_step
from tests.support.step import AUTOCAST, FP32, Mode

CHANNELS, BATCH, FRAMES = 8, 3, 20
FULL = BATCH * CHANNELS * FRAMES * 4  # bytes of a half in float32


class Conformer(nn.Module):
    """The convolutions of a conformer, between which ``gate`` stands."""

    def __init__(self, masked: bool = False, as_module: bool = False) -> None:
        super().__init__()
        self.widen, self.depth = nn.Conv1d(4, 2 * CHANNELS, 1), nn.Conv1d(CHANNELS, CHANNELS, 3)
        self.out = nn.Conv1d(CHANNELS, 2, 1)
        self.masked, self.glu = masked, nn.GLU(dim=1) if as_module else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.widen(x)
        h = F.glu(h, dim=1) if self.glu is None else self.glu(h)
        if self.masked:
            h = h.masked_fill(torch.arange(FRAMES) >= FRAMES - 3, 0.0)
        return self.out(F.silu(self.depth(h))).mean(-1)


class Mlp(nn.Module):
    """Halves of the last dimension, read by a Linear."""

    transposed = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FRAMES, 2 * CHANNELS), nn.Linear(CHANNELS, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.transposed:
            gate = F.glu(h.transpose(0, 1))
            self.strides = gate.stride()
            return self.down(gate.transpose(0, 1))
        return self.down(F.glu(h))


NETS: dict[str, Any] = {
    "function": Conformer,
    "masked": lambda: Conformer(masked=True),
    "module": lambda: Conformer(as_module=True),
    "linear": Mlp,
}


def frames() -> Tensor:
    return torch.randn(BATCH, 4, FRAMES, generator=torch.Generator().manual_seed(1))


def pair(make: Any, mode: Mode = FP32) -> Any:
    torch.manual_seed(0)
    twin = nn.Sequential(make())
    model = copy.deepcopy(twin)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast is not None):
        patch_model(model, "exact", example_inputs=(frames(),))
    return model, twin


def saved(model: nn.Module) -> int:
    with saved_bytes(model) as counted:
        y = model(frames())
    assert y.requires_grad
    return counted.activations


@pytest.mark.parametrize("name", NETS)
def test_only_the_input_of_a_gate_of_halves_is_saved(name: str) -> None:
    model, twin = pair(NETS[name])
    assert len(chains_of(model)) == 1
    gate = BATCH * 4 * CHANNELS * 4 if name == "linear" else FULL
    assert patch_report(model).above_floor == pytest.approx(1, abs=0.01)
    assert saved(model) == patch_report(model).saved_after
    silu = 0 if name == "linear" else BATCH * CHANNELS * (FRAMES - 2) * 4
    assert saved(twin) - saved(model) == gate + silu


@pytest.mark.parametrize("mode", [FP32, AUTOCAST], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", NETS)
def test_a_step_is_as_exact_as_unpatched(name: str, mode: Mode) -> None:
    model, twin = pair(NETS[name], mode)
    assert_same_step(model, twin, frames(), mode)


def test_a_tensor_that_is_not_contiguous_is_left_to_torch() -> None:
    """The trace has seen another one."""
    model, twin = pair(Mlp)
    for one in (model, twin):
        one[0].transposed = True
    assert saved(model) == saved(twin)
    assert model[0].strides == twin[0].strides
    assert_same_step(model, twin, frames())


def test_an_odd_dimension_raises_torchs_error() -> None:
    model, twin = pair(Conformer)
    for one in (model, twin):
        one[0].widen = nn.Conv1d(4, 2 * CHANNELS + 1, 1)
        with pytest.raises(RuntimeError, match="Halving dimension must be even"):
            one(frames())

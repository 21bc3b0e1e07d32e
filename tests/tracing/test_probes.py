"""What a module computes is asked once of equal modules, and of each that may be another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import plan_patch
from lowmem_patch.tracing import probes


class Scaled(nn.Module):
    """A GELU, or none, by an attribute that is the module's own affair."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) * self._factor


def test_equal_modules_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Any] = []
    kind_of = probes._kind_of
    monkeypatch.setattr(
        probes, "_kind_of", lambda module: (probed.append(module), kind_of(module))[1]
    )
    modules = [
        nn.GELU(), nn.Dropout(0.1), nn.GELU().eval(), nn.GELU("tanh"), Scaled(1.0), nn.Dropout(0.1),
        Scaled(2.0), Scaled(1.0), nn.Identity(),
    ]  # fmt: skip
    known: dict[Any, Any] = {}
    found = [probes.match_activation(module, known) for module in modules]
    assert found == ["gelu", None, "gelu", "gelu_tanh", "gelu", None, None, "gelu", None]
    assert len(probed) == 6
    changed = Scaled(1.0)
    changed.forward = lambda x: x  # type: ignore[method-assign]
    assert probes.match_activation(changed, known) is None


def test_equal_norms_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Any] = []
    probe = probes._probe
    monkeypatch.setattr(
        probes, "_probe", lambda module, *rest: (probed.append(module), probe(module, *rest))[1]
    )
    norms = [
        nn.LayerNorm(8),
        nn.LayerNorm(8),
        nn.LayerNorm(8, eps=1e-3),
        nn.RMSNorm(8),
        nn.LayerNorm(8),
    ]
    model = nn.Sequential(*(layer for norm in norms for layer in (norm, nn.Linear(8, 8))))
    report = plan_patch(model, "exact", example_inputs=torch.randn(2, 8))
    assert [site.strategy for site in report.sites] == ["share"] * 5
    assert len(probed) == 3


class Switched(nn.Module):
    """A ReLU or a SiLU, by what its subclass holds."""

    def is_relu(self) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) if self.is_relu() else F.silu(x)


class ByNone(Switched):
    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.register_parameter("relu" if relu else "silu", None)

    def is_relu(self) -> bool:
        return "relu" in self._parameters


class ByType(Switched):
    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.modes = (True,) if relu else (1,)

    def is_relu(self) -> bool:
        return isinstance(self.modes[0], bool)


class BySign(Switched):
    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.sign = 0.0 if relu else -0.0

    def is_relu(self) -> bool:
        return str(self.sign) == "0.0"


class BySlot(Switched):
    __slots__ = ("relu",)

    def __init__(self, relu: bool) -> None:
        super().__init__()
        object.__setattr__(self, "relu", relu)

    def is_relu(self) -> bool:
        return bool(self.relu)


@pytest.mark.parametrize("make", [ByNone, ByType, BySign])
def test_modules_that_differ_in_little_are_probed_each(make: Any) -> None:
    known: dict[Any, Any] = {}
    assert probes.match_activation(make(True), known) == "relu"
    assert probes.match_activation(make(False), known) == "silu"


def test_what_a_slot_holds_is_never_taken_for_equal() -> None:
    known: dict[Any, Any] = {}
    for relu in (True, False):
        probes.match_activation(BySlot(relu), known)
    assert len(known) == 2

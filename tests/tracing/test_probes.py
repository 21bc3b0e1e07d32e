"""What a module computes is asked once of equal modules, and of each that may be another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_patch import patch_model, plan_patch
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


class Remembering(nn.Module):
    """An activation that leaves what it gave on itself, as tools that look into a model do."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = F.gelu(x)
        return self.last


class Codebook(nn.Module):
    """It is no module of the forward: one of its methods is called, which makes a table once (Mimi's)."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Buffer(torch.randn(4, 8))
        self.table: Tensor | None = None
        self.given: Tensor | None = None

    def nearest(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.sums / 2
        self.given = x * 2
        return torch.cdist(x, self.table).argmin(-1)


class Quantising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), Remembering(), nn.Linear(8, 8)
        self.book = Codebook()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        y: Tensor = self.down(h) + self.book.nearest(h)[..., None]
        return y


def test_an_activation_that_leaves_its_value_on_itself_stays() -> None:
    assert probes.match_activation(Remembering()) is None
    model = Quantising()
    x = torch.randn(2, 8)
    patch_model(model, example_inputs=x)
    model(x).sum().backward()
    assert isinstance(model.act, Remembering) and model.act.last is not None
    torch.testing.assert_close(model.act.last + 0, F.gelu(model.up(x)))


@pytest.mark.parametrize("called", [False, True])
def test_a_model_that_remembers_tensors_of_a_forward_is_planned(called: bool) -> None:
    """Fake ones of the trace, and those of an earlier forward, which hang on its graph."""
    model = Quantising()
    x = torch.randn(2, 8)
    if called:
        model(x)
    report = plan_patch(model, example_inputs=x)
    assert 0 < report.saved_after < report.saved_before
    assert not isinstance(model.book.table, FakeTensor)

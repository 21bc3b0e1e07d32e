"""Launches of Triton kernels are skipped under fake tensors, and nowhere else."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from lowmem_patch import plan_patch
from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.fake_mode import make_fake_mode
from lowmem_patch.tracing.isolation import is_skipped, running_fake
from tests.life import foreign
from tests.life.test_foreign_kernels import Net

triton: Any = pytest.importorskip("triton")


def launcher() -> Any:
    return triton.runtime.jit.KernelInterface.__getitem__


def test_model_with_triton_kernels_is_planned_as_on_data() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    launched = plan_patch(Net(foreign.triton_kernel), "exact", example_inputs=x)
    on_data = plan_patch(Net(foreign.ctypes_kernel), "exact", example_inputs=x)
    strategies = [
        [(site.name, site.strategy, site.reason) for site in report.sites]
        for report in (launched, on_data)
    ]
    assert strategies[0] == strategies[1]
    assert launched.saved_before == on_data.saved_before
    assert launched.saved_after and not any("traced with data" in n for n in launched.notes)


@pytest.mark.parametrize("fails", [False, True])
def test_launches_are_tritons_own_after_a_trace(fails: bool) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(launcher() is own)
            raise ValueError("not this")

    own, seen, x = launcher(), list[bool](), torch.randn(2, 6, 8)
    if fails:
        with pytest.raises(TraceError, match="not this"):
            plan_patch(Fails(), "exact", example_inputs=x)
        assert seen == [False, True]  # on fake tensors, and then on data
    else:
        plan_patch(Net(foreign.triton_kernel), "exact", example_inputs=x)
    assert launcher() is own


def test_other_threads_launch_as_ever() -> None:
    found: list[Any] = []

    class Kernel(triton.runtime.jit.KernelInterface):  # type: ignore[misc]  # has no types
        def run(self, *args: Any, grid: Any, warmup: bool) -> Any:
            return threading.current_thread().name

    def launch() -> None:
        found.append(Kernel()[(1,)](torch.ones(1)))

    with running_fake(make_fake_mode()):
        other = threading.Thread(target=launch, name="other")
        other.start()
        other.join()
        launch()
        with running_fake(make_fake_mode()):  # a trace inside of a trace
            launch()
        launch()
    assert found == ["other", None, None, None]
    launch()
    assert found[-1] == threading.current_thread().name
    assert not is_skipped.get()


class Counts(nn.Module):
    """A kernel counts into zeros, by which a branch is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.counts: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        counts = torch.zeros(3, dtype=torch.int64)
        foreign.triton_kernel(counts, counts, counts)
        self.counts = counts[0].item()
        return self.linear(y)  # type: ignore[no-any-return]  # nn.Module's call has no types


def test_what_a_kernel_was_given_is_known_no_longer() -> None:
    with pytest.raises(TraceError, match="could not be run"):  # on data a CPU launches no kernel
        plan_patch(Counts(), "exact", example_inputs=torch.randn(2, 6, 8))


class Launcher(triton.runtime.jit.KernelInterface):  # type: ignore[misc]  # has no types
    ran = 0

    def run(self, *args: Any, grid: Any, warmup: bool) -> None:
        self.ran += 1


def test_a_launcher_that_somebody_holds_launches_later() -> None:
    kernel = Launcher()
    with running_fake(make_fake_mode()):
        held = kernel[(1,)]
        held(torch.ones(1))
    assert kernel.ran == 0
    held(torch.ones(1))
    assert kernel.ran == 1


@pytest.mark.parametrize("given", ["real", "unknown"])
def test_launch_on_what_may_hold_data_is_refused(given: str) -> None:
    real = torch.ones(1)
    with running_fake(make_fake_mode()), pytest.raises(RuntimeError, match="needs real memory"):
        Launcher()[(1,)](real if given == "real" else SimpleNamespace(tensor=torch.ones(1)))


def test_tensors_in_descriptors_are_seen() -> None:
    mode = make_fake_mode()
    with running_fake(mode):
        counts = torch.zeros(3, dtype=torch.int64)
        assert counts[0].item() == 0
        Launcher()[(1,)](SimpleNamespace(base=counts), block=64)
        with pytest.raises(DataDependentOutputException):
            counts[0].item()

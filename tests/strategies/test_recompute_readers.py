"""Recompute for any reader: convolutions, norms, pools and products save no output of an activation."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.nn.activations import RecomputedActivation
from lowmem_patch.nn.deferred import Unstored
from tests.support.judge import assert_equal, assert_same_function
from tests.support.step import step

CHANNELS = 8


class Net(nn.Module):
    """A convolution, an activation, and a reader of its output."""

    def __init__(self, act: nn.Module, read: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.act, self.read = act, read
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.act(self.first(x)), *self.parts)


class Gate(nn.Module):
    """Squeeze and excitation: the output is read by a mean and by a product of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.reduce(hidden.mean((2, 3), keepdim=True)).sigmoid()


def call(hidden: Tensor, *parts: nn.Module) -> Tensor:
    for part in parts:
        hidden = part(hidden)
    return hidden


def twice(hidden: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    return one(hidden) + other(hidden)


READERS: dict[str, tuple[Callable[..., Tensor], tuple[nn.Module, ...]]] = {
    "convolution": (call, (nn.Conv2d(CHANNELS, 4, 3),)),
    "depthwise": (call, (nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, stride=2),)),
    "transposed": (call, (nn.ConvTranspose2d(CHANNELS, 4, 2, stride=2),)),
    "batch norm": (call, (nn.BatchNorm2d(CHANNELS),)),
    "group norm": (call, (nn.GroupNorm(2, CHANNELS),)),
    "max pool": (call, (nn.MaxPool2d(2), nn.Conv2d(CHANNELS, 4, 3))),
    "gate": (call, (Gate(),)),
    "two": (twice, (nn.Conv2d(CHANNELS, 4, 1), nn.Conv2d(CHANNELS, 4, 3, padding=1))),
    "frozen": (call, (nn.Conv2d(CHANNELS, 4, 3).requires_grad_(False), nn.BatchNorm2d(4))),
}  # fmt: skip


def net(reader: str, act: nn.Module) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    read, parts = READERS[reader]
    return Net(act, read, *copy.deepcopy(parts)).train(), torch.randn(2, 3, 10, 10)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_output_is_computed_again_for(reader: str, in_place: bool) -> None:
    model, x = net(reader, nn.SiLU(inplace=in_place))
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    report = patch_report(model)
    found, expected = step(model, x, count=True), step(twin, x, count=True)
    assert (report.saved_before, report.saved_after) == (expected.saved, found.saved)
    assert_equal(found, expected)
    assert expected.saved - found.saved == 4 * 2 * CHANNELS * 10 * 10
    assert isinstance(model.act, RecomputedActivation)


def test_a_report_says_where_a_saving_is_that_no_site_shows() -> None:
    model, x = net("convolution", nn.SiLU())
    report = plan_patch(model, "exact", example_inputs=x)
    (site,) = report.sites
    assert site.bytes_before == site.bytes_after and report.saved_before > report.saved_after
    said = "the module that reads its output no longer saves it"
    assert said in report.about_sites and said in " ".join(str(report).split())
    linears = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))
    report = plan_patch(linears, "exact", example_inputs=torch.randn(3, 4))
    (site,) = report.sites
    assert site.strategy == "recompute" and site.bytes_before > site.bytes_after
    assert said not in report.about_sites


@pytest.mark.parametrize("act", [nn.GELU(), nn.Mish(), nn.Hardswish(), nn.Softplus(), nn.ELU()])
def test_every_activation_that_saves_its_input(act: nn.Module) -> None:
    model, x = net("convolution", act)
    model, x = model.double(), x.double()
    twin = copy.deepcopy(model)
    patch_model(model, "auto", example_inputs=x)
    assert not any(site.approximate for site in patch_report(model).sites)
    assert_same_function(model, twin, x)


def test_values_are_let_go_after_the_last_reader() -> None:
    model, x = net("two", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)
    seen: list[Any] = []
    model.act.register_forward_hook(lambda module, args, output: seen.append(output))
    y = model(x)
    (h,) = seen
    assert isinstance(h, Unstored)
    assert h.held_values() is None
    y.sum().backward(retain_graph=True)
    assert h.held_values() is None
    assert torch.equal(h.detach(), F.silu(model.first(x)).detach())


def test_values_that_somebody_wrote_into_stay() -> None:
    model, x = net("convolution", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)

    def written(hidden: Tensor, conv: nn.Module) -> Tensor:
        hidden += 1  # the trace has not seen it
        return conv(hidden) + conv(hidden)

    model.read = written
    twin = unpatch_model(copy.deepcopy(model))
    assert_equal(step(model, x), step(twin, x))


def test_values_of_which_somebody_has_a_view_stay() -> None:
    model, x = net("convolution", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)

    def viewed(hidden: Tensor, conv: nn.Module) -> Tensor:
        with torch.no_grad():
            part = hidden.detach()[:1]
        y = conv(hidden)
        part.zero_()  # as unpatched: autograd notices
        return y

    model.read = viewed
    twin = unpatch_model(copy.deepcopy(model))
    for one in (model, twin):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            one(x).sum().backward()


MEMORIES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda hidden: torch.from_numpy(hidden.detach().numpy()),
    "data": lambda hidden: hidden.data,
    "storage": lambda hidden: hidden.untyped_storage(),
    "storage of the values": lambda hidden: hidden.detach().untyped_storage(),
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_memory_that_somebody_holds_stays(memory: str) -> None:
    model, x = net("convolution", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)

    def written(hidden: Tensor, conv: nn.Module) -> Tensor:
        held = MEMORIES[memory](hidden)
        y = conv(hidden)
        held.fill_(0)  # autograd does not notice, patched or not
        return y + conv(hidden)

    model.read = written
    twin = unpatch_model(copy.deepcopy(model))
    assert_equal(step(model, x), step(twin, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    model, x = net("gate", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)
    twin = unpatch_model(copy.deepcopy(model))

    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    x.requires_grad_()
    assert_equal(step(Block(model), x), step(Block(twin), x))


def test_under_autocast() -> None:
    model, x = net("convolution", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)
    twin = unpatch_model(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        with saved_bytes(model) as after:
            y = model(x)
        with saved_bytes(twin) as before:
            expected = twin(x)
    assert torch.equal(y, expected)
    assert after.activations < before.activations
    y.float().sum().backward()
    expected.float().sum().backward()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_channels_last() -> None:
    model, x = net("depthwise", nn.SiLU(inplace=True))
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    assert isinstance(model.act, RecomputedActivation)
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    assert_equal(step(model, x), step(twin, x))


def test_what_is_padded_is_the_output() -> None:
    model, x = net("two", nn.Softplus())  # which is not 0 at 0
    model.read = lambda hidden, one, other: (
        one(F.pad(hidden, (1, 1))) + other(hidden).mean()
    ).sum()
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    assert_equal(step(model, x), step(twin, x))


def test_input_that_is_read_later_stays_in_place() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act = nn.Conv2d(3, 4, 3), nn.SiLU(inplace=True)
            self.second = nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.second(self.act(hidden)).mean() + hidden.mean()

    torch.manual_seed(0)
    model, x = Both(), torch.randn(2, 3, 9, 9)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patch_model(model, "exact", example_inputs=x)
    (site,) = patch_report(model).sites
    assert "works in place, and mean reads what its input was" in site.reason
    assert_equal(step(model, x), step(twin, x))


def of_view(hidden: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    return act(hidden.view_as(hidden)), hidden.mean()


def of_slice(hidden: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    return torch.cat((act(hidden[:, :4]), hidden[:, 4:] * 2), 1), hidden.mean()


def beside_view(hidden: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    rows = hidden.flatten(2)
    return act(hidden), rows.sin().mean()


def beside_detached(hidden: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    constant = hidden.detach()
    return act(hidden), constant.mean()


def beside_returned(hidden: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    rows = hidden.flatten(2)
    return act(hidden), rows


Aliased = Callable[[Tensor, nn.Module], tuple[Tensor, Tensor]]


@pytest.mark.parametrize(
    "alias", [of_view, of_slice, beside_view, beside_detached, beside_returned]
)
def test_memory_that_is_read_later_by_another_name_is_written(alias: Aliased) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act = nn.Conv2d(3, 8, 3), nn.SiLU(inplace=True)
            self.second = nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden, other = alias(self.first(x), self.act)
            return self.second(hidden), other

    torch.manual_seed(0)
    model, x = Both(), torch.randn(2, 3, 9, 9)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patch_model(model, "exact", example_inputs=x)
    assert "works in place, and" in patch_report(model).sites[0].reason
    assert_equal(step(model, x), step(twin, x))


def test_small_gate_is_left_alone() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.second = nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 1)
            self.gate = nn.SiLU()
            self.last = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.act(self.first(x))
            return hidden * self.last(self.gate(self.second(hidden.mean((2, 3), keepdim=True))))

    model, x = Squeezed(), torch.randn(1, 3, 200, 200)
    report = patch_report(patch_model(model, "exact", example_inputs=x))
    strategies = {site.name: site.strategy for site in report.sites}
    assert strategies == {"act": "recompute", "gate": "keep"}
    (reason,) = (site.reason for site in report.sites if site.name == "gate")
    assert reason == "next to nothing to gain: less than 0.01 % of all that is saved"


def test_nothing_waits_for_the_garbage_collector() -> None:
    model, x = net("two", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)
    gone: list[Any] = []
    model.act.register_forward_hook(lambda module, args, output: gone.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        model(x).sum().backward()
        assert gone[0]() is None
    finally:
        gc.enable()


class TwoCalls(nn.Module):
    """One activation behind two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, CHANNELS, 3), nn.Conv2d(CHANNELS, CHANNELS, 3)
        self.last, self.act = nn.Conv2d(CHANNELS, 4, 3), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.second(self.act(self.first(x)))))


def test_each_call_of_a_shared_activation_lets_its_values_go() -> None:
    torch.manual_seed(0)
    model, x = TwoCalls(), torch.randn(2, 3, 12, 12)
    twin = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=x)
    seen: list[Any] = []
    model.act.register_forward_hook(lambda module, args, output: seen.append(output))
    y = model(x)
    assert [h.held_values() for h in seen] == [None, None]
    y.sum().backward()
    assert_equal(step(model, x), step(twin, x))


def test_held_values_are_counted_when_the_graph_is_gone() -> None:
    model, x = net("two", nn.SiLU())
    patch_model(model, "exact", example_inputs=x)
    model.read = lambda hidden, one, other: one(hidden)  # fewer readers than the trace has seen
    with saved_bytes(model) as kept:
        y = model(x)
    with saved_bytes(model) as gone:
        model(x)
    assert y.requires_grad
    assert gone.activations == kept.activations >= 2 * 4 * 2 * CHANNELS * 10 * 10

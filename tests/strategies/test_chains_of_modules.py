"""Chains of elementwise functions pass through modules that do nothing else, such as an activation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from lowmem_patch.nn import chains
from lowmem_patch.nn.defer import defer
from tests.support.chained import CHAINS, FULL, HIDDEN, LINEARS, chains_of, patched, saved
from tests.support.judge import assert_close, assert_same_step
from tests.support.step import AUTOCAST, BF16, FP32, cast, step
from tests.support.toys import WIDTH, rows

LIMIT = 0.2


class Softcap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / LIMIT) * LIMIT


class Gated(nn.Module):
    """``formula(self, gate, up)`` between two Linears."""

    def __init__(self, formula: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act, self.softcap, self.other = nn.SiLU(), Softcap(), nn.Linear(WIDTH, WIDTH)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.formula(self, *self.up(x).chunk(2, -1)))


def by_module(net: Any, gate: Tensor, up: Tensor) -> Tensor:
    """DeepSeek-V4's."""
    return net.act(gate.clamp(max=LIMIT)) * up.clamp(min=-LIMIT, max=LIMIT)


def by_function(net: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(min=-LIMIT, max=LIMIT)


def soft(net: Any, gate: Tensor, up: Tensor) -> Tensor:
    """Inkling's."""
    return net.softcap(gate) * torch.sigmoid(gate) * net.softcap(up)


FORMULAS = [by_module, by_function, soft]


def network(formula: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(formula), nn.Linear(WIDTH, 3))


@pytest.mark.parametrize("preset", [CHAINS, "exact", "auto"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_what_enters_the_chain_is_all_that_is_saved(formula: Any, preset: Any) -> None:
    model = network(formula)
    twin = copy.deepcopy(model)
    patched(model, preset)
    assert chains_of(model) == ["1"]
    assert saved(model) == patch_report(model).saved_after == LINEARS + 2 * FULL
    assert saved(twin) >= saved(model) + 3 * FULL
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("mode", [BF16, AUTOCAST], ids=["bf16", "autocast"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_low_precision(formula: Any, mode: Any) -> None:
    model = cast(network(formula), mode.weights)
    twin, x = copy.deepcopy(model), rows().to(mode.weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode is AUTOCAST):
        patch_model(model, CHAINS, example_inputs=(x,))
    assert chains_of(model) == ["1"]
    found, expected = (step(net, rows(), mode, seed=7, count=True) for net in (model, twin))
    assert found.saved < expected.saved
    assert_same_step(model, twin, rows(), mode)


def test_a_gate_of_which_nothing_before_is_saved_is_no_chain() -> None:
    """A kernel multiplies it, and a chain would save as much."""

    def scaled(net: Any, gate: Tensor, up: Tensor) -> Tensor:
        return net.act(gate * 0.5) * (up * 0.5)

    model = network(scaled)
    patched(model)
    assert not chains_of(model)
    assert saved(model) == LINEARS + 2 * FULL


def test_a_module_that_another_calls_is_not_its_parents() -> None:
    """The softcap's forward does not run inside of the one that holds it."""

    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Gated(soft)
            self.down = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.holder.softcap(x) * torch.sigmoid(1.7 * x))
            return y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Borrows())
    twin = copy.deepcopy(model)
    patched(model)
    assert saved(model) <= saved(twin)
    assert_same_step(model, twin, rows())


class GatedRMSNorm(nn.Module):
    """Near Qwen3-Next's, and none that is known: it adds a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        z = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * z * F.silu(gate) + 1


def test_functions_of_a_norm_that_nobody_knows_make_a_chain() -> None:
    model = network(lambda net, gate, up: net.norm(up, gate))
    model[1].norm = GatedRMSNorm()
    twin = copy.deepcopy(model)
    report = patch_report(patched(model, "exact"))
    assert [site.name for site in report.patched] == chains_of(model) == ["1.norm"]
    assert saved(model) == report.saved_after < saved(twin) / 2
    assert_same_step(model, twin, rows())


def test_norms_that_are_kept_have_no_chains() -> None:
    model = network(lambda net, gate, up: net.norm(up, gate))
    model[1].norm = GatedRMSNorm()
    patched(model)
    assert not chains_of(model)


def test_a_forward_of_many_functions_leaves_its_activation_to_others() -> None:
    def long(net: Any, gate: Tensor, up: Tensor) -> Tensor:
        for _ in range(210):
            gate = gate + 0.0
        return by_module(net, gate, up)

    model = network(long)
    twin = copy.deepcopy(model)
    report = patch_report(patched(model))
    assert [(site.name, site.strategy) for site in report.sites] == [("1.act", "recompute")]
    assert saved(model) < saved(twin)
    assert_same_step(model, twin, rows())


class Snake(nn.Module):
    """``x + sin(a x)^2 / (b + tiny)`` with a and b of each channel, as vocoders have it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a.unsqueeze(0).exp(), self.b.unsqueeze(0).exp()
        return x + (1.0 / (b + 1e-9)) * torch.sin(x * a).pow(2)


@pytest.mark.parametrize("rows_", [4, 200])
def test_small_conditions_are_judged_by_what_is_made_of_them_in_the_end(rows_: int) -> None:
    """One is multiplied with the rows at once, another one behind two functions of its own size."""
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(WIDTH, HIDDEN), Snake(), nn.Linear(HIDDEN, 3))
    model = copy.deepcopy(twin)
    x = torch.randn(rows_, WIDTH)
    patch_model(model, "exact", example_inputs=(x,))
    own, theirs = (step(one, x, FP32, count=True).saved for one in (model, twin))
    full = rows_ * HIDDEN * 4
    assert own < x.nbytes + 1.1 * full + 6 * HIDDEN * 4 and theirs > x.nbytes + 3.9 * full
    assert_same_step(model, twin, x)


class RunningMean(nn.Module):
    """Each forward writes into what its chain reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.gain = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean(0), 0.1)
        h = (x - self.mean) * self.gain
        return h.sin() * 1.1 + h


def test_two_forwards_before_a_backward_that_write_a_buffer() -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(WIDTH, HIDDEN), RunningMean(), nn.Linear(HIDDEN, 3)).double()
    model = copy.deepcopy(twin)
    x = torch.randn(5, WIDTH).double()
    with pytest.warns(UserWarning, match="nothing was patched"):
        patch_model(model, "exact", example_inputs=(x,))
    for net in (model, twin):
        (net(x) + net(2 * x)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Joined(nn.Module):
    """A Linear and, behind a concatenation, another one read an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.first = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act, self.second = nn.SiLU(), nn.Linear(HIDDEN + WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return self.first(h) + self.second(torch.cat([x, h], -1))


def test_an_activation_that_is_concatenated_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(WIDTH, WIDTH), Joined(), nn.Linear(WIDTH, 3))
    model = copy.deepcopy(twin)
    patched(model, "exact")
    assert chains_of(model) == ["1"]
    assert saved(model) == patch_report(model).saved_after == LINEARS + FULL
    # without hooks, which nobody else could count, its values are there before its readers ask
    made: list[Any] = []
    monkeypatch.setattr(chains, "defer", lambda *given: made.append(defer(*given)) or made[-1])
    y = model(rows())
    (joined,) = (one for one in made if type(one.op) is chains.Chain)
    assert [hasattr(source, "held_values") for source in joined.sources] == [False, True]
    y.sum().backward()
    assert_same_step(model, twin, rows())


class Beside(nn.Module):
    """A chain, and functions that are called as those of the chain are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.up, self.other, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        gate, up, other = self.gate(x), self.up(x), self.other(x)
        h = torch.sigmoid(1.7 * gate) * gate * (up + 1)
        alike = 1.7 * other
        if self.how == "its source is written":
            other.add_(1.0)
        if self.how == "it is written":
            alike.add_(1.0)
        read = alike * 2.3 + alike.sin()
        if self.how == "a late hook" and alike.requires_grad:
            alike.register_hook(lambda gradient: 1.5 * gradient)
        y: Tensor = self.down(h) + read + alike
        return y


@pytest.mark.filterwarnings("ignore:nothing was patched:UserWarning")
@pytest.mark.parametrize(
    "how", ["nothing", "its source is written", "it is written", "a late hook"]
)
def test_functions_called_as_those_of_a_chain_may_be_written_or_hooked(how: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Beside(how))
    model = patch_model(copy.deepcopy(plain), CHAINS, example_inputs=rows())
    assert bool(chains_of(model)) == (how in ("nothing", "it is written"))
    assert_same_step(model, plain, rows())


class SqueezeExcite(nn.Module):
    """Written as timm's: a gate whose sigmoid is a function, behind an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.act = nn.Conv2d(16, 4, 1), nn.ReLU(inplace=True)
        self.expand = nn.Conv2d(4, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


@pytest.mark.parametrize("part", ["reduce", "expand"])
def test_functions_of_a_hook_do_not_wait(part: str) -> None:
    """What a hook on a convolution keeps is computed before an activation in place writes into its input."""
    torch.manual_seed(0)
    excite = SqueezeExcite()
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), excite, nn.Conv2d(16, 8, 1)).train()
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    patch_model(model, "exact", example_inputs=x)
    assert chains_of(model) == ["2"]
    kept: list[Tensor] = []
    gradients = []
    for one in (model, twin):
        hooked = getattr(one[2], part)
        hooked.register_forward_hook(lambda _, args, output: kept.append(output.sigmoid()))
        loss = one(x).square().mean() + kept[-1].mean()
        loss.backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
    assert type(kept[0]) is Tensor
    assert torch.equal(kept[0], kept[1])
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected, "gradient")

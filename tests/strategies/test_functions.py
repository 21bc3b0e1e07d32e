"""Activations that a forward calls as functions (``F.silu``) save what modules save."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import (
    PatchReport,
    patch_model,
    patch_report,
    plan_patch,
    saved_bytes,
    unpatch_model,
)
from tests.support.judge import assert_equal_steps, assert_same_step
from tests.support.step import AUTOCAST, step
from tests.support.toys import WIDTH, rows

HIDDEN = 2 * WIDTH


class Block(nn.Module):
    """A residual block whose forward calls functions between its Linears, as ``body(self, x)`` says."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.both = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self, self.norm(x))


def plain(net: Any, x: Tensor) -> Tensor:
    return net.down(F.gelu(net.up(x)))


def by_tanh(net: Any, x: Tensor) -> Tensor:
    return net.down(F.gelu(net.up(x), approximate="tanh"))


def gated(net: Any, x: Tensor) -> Tensor:
    return net.down(F.silu(net.gate(x)) * net.up(x))


def packed(net: Any, x: Tensor) -> Tensor:
    gate, up = net.both(x).chunk(2, -1)
    return net.down(F.silu(gate) * up)


def sigmoid_gate(net: Any, x: Tensor) -> Tensor:
    return net.down(net.up(x) * net.gate(x).sigmoid())


def dropped(net: Any, x: Tensor) -> Tensor:
    return net.down(F.dropout(F.gelu(net.up(x)), 0.1, net.training))


def around_a_checkpoint(net: Any, x: Tensor) -> Tensor:
    return plain(net, x) + checkpoint(gated, net, x, use_reentrant=False)


def twice(net: Any, x: Tensor) -> Tensor:
    return plain(net, plain(net, x))


BODIES = {
    "plain": plain, "tanh": by_tanh, "gated": gated, "packed": packed, "sigmoid": sigmoid_gate,
    "dropout": dropped, "twice": twice,
}  # fmt: skip


def network(body: Callable[[Any, Tensor], Tensor], count: int = 2) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(body) for _ in range(count)), nn.Linear(WIDTH, 3))


def patched(model: Any, preset: Any = "exact") -> PatchReport:
    return patch_report(patch_model(model, preset, example_inputs=(rows(),)))


def functions(report: PatchReport) -> dict[str, str]:
    return {site.name: site.strategy for site in report.sites if site.name.endswith(")")}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bits_are_equal_and_bytes_at_the_floor(body: Any) -> None:
    model = network(body)
    twin = copy.deepcopy(model)
    report = patched(model, {"norms": "keep", "activations": "recompute"})
    assert set(functions(report).values()) == {"recompute"}
    assert assert_equal_steps(model, twin, rows()) >= 2 * HIDDEN * len(rows()) * 4
    assert patched(twin).above_floor == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_under_autocast_one_tensor_less_is_saved(body: Any) -> None:
    model = network(body)
    twin = copy.deepcopy(model)
    patched(model)
    assert_same_step(model, twin, rows(), AUTOCAST)
    ours, theirs = (step(net, rows(), AUTOCAST, count=True).saved for net in (model, twin))
    assert theirs - ours >= 2 * HIDDEN * len(rows()) * 2


def test_sites_are_named_as_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    report = patched(network(by_tanh))
    assert functions(report) == {
        "0.gelu(approximate='tanh')": "recompute",
        "1.gelu(approximate='tanh')": "recompute",
    }
    assert "{0..1}.gelu(approximate='tanh') (each)" in str(report)
    (before, after) = {
        (s.bytes_before, s.bytes_after) for s in report.sites if s.kind == "gelu_tanh"
    }.pop()
    assert (before, after) == (len(rows()) * HIDDEN * 4, 0)


def test_torch_encoder_layers_call_functions() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, 0.0, F.gelu, batch_first=True, norm_first=True),
        2, enable_nested_tensor=False,
    )  # fmt: skip
    twin, x = copy.deepcopy(model), rows(2, 5)
    report = patch_report(patch_model(model, "exact", example_inputs=(x,)))
    assert functions(report) == {f"layers.{i}.gelu()": "recompute" for i in range(2)}
    assert_same_step(model.train(), twin.train(), x)


def test_frozen_readers_get_codes() -> None:
    model = network(plain)
    for block in (model[0], model[1]):
        block.down.requires_grad_(False)
    twin = copy.deepcopy(model)
    report = patched(model, {"norms": "keep"})
    assert set(functions(report).values()) == {"codes"}
    codes = len(rows()) * HIDDEN * 3 // 8
    assert {s.bytes_after for s in report.approximate} == {codes}
    with saved_bytes(model) as saved:
        model(rows())
    assert saved.activations == report.saved_after
    x = rows()
    assert torch.equal(model(x), twin(x))
    model(x).sum().backward()
    twin(x).sum().backward()
    ours, theirs = (net[0].up.weight.grad for net in (model, twin))
    assert not torch.equal(ours, theirs)
    assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.95


def test_a_checkpoint_inside_saves_the_same_both_times() -> None:
    model = network(around_a_checkpoint)
    twin = copy.deepcopy(model)
    report = patched(model)
    assert functions(report)["0.gelu()"] == "recompute"
    assert_same_step(model, twin, rows())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_that_are_switched_on_later(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.block = nn.Linear(WIDTH, WIDTH), Block(gated)
            self.on = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            if self.on:
                x = checkpoint(self.block, x, use_reentrant=reentrant)
                return x
            return self.block(x)

    model = Checkpointed()
    twin = copy.deepcopy(model)
    assert functions(patched(model)) == {"block.silu()": "recompute"}
    model.on = twin.on = True
    assert_same_step(model, twin, rows())


def test_copies_and_pickles_take_it_along() -> None:
    model = network(gated)
    twin = copy.deepcopy(model)
    report = patched(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with saved_bytes(other) as saved:
            other(rows())
        assert saved.activations == report.saved_after
        assert_same_step(other, twin, rows())
    assert list(model.state_dict()) == list(twin.state_dict())
    unpatch_model(model)
    assert all("forward" not in vars(module) for module in model.modules())
    with saved_bytes(model) as saved:
        model(rows())
    assert saved.activations == report.saved_before


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")  # torch's own: a FutureWarning since 2.15
def test_without_gradients_and_under_transforms_the_function_runs() -> None:
    model = network(gated)
    twin, x = copy.deepcopy(model), rows()
    patched(model, {"norms": "keep", "activations": "recompute"})
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
    ours, theirs = (
        torch.func.grad(lambda y, net=net: net(y).square().sum())(x) for net in (model, twin)
    )
    assert torch.equal(ours, theirs)
    traced = torch.jit.trace(model, (x,))
    assert torch.allclose(traced(x), twin(x), rtol=1e-6, atol=1e-6)
    exported = torch.export.export(copy.deepcopy(model), (x,)).module()
    assert torch.allclose(exported(x), twin(x), rtol=1e-6, atol=1e-6)


def test_a_call_with_other_arguments_is_left_alone() -> None:
    approximate = "none"

    def body(net: Any, x: Tensor) -> Tensor:
        return net.down(F.gelu(net.up(x), approximate=approximate))

    model = network(body)
    twin = copy.deepcopy(model)
    patched(model)
    approximate = "tanh"
    assert_same_step(model, twin, rows())


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(plain)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(F.gelu(self.block(x)))


def test_what_a_module_inside_calls_is_its_own() -> None:
    model = nn.Sequential(Inner())
    twin = copy.deepcopy(model)
    report = patched(model)
    assert set(functions(report)) == {"0.gelu()", "0.block.gelu()"}
    assert_same_step(model, twin, rows())
    assert step(model, rows(), count=True).saved == report.saved_after


def test_a_module_that_a_forward_makes_is_its_own() -> None:
    model = network(lambda net, x: net.down(nn.GELU()(net.up(x))))
    twin = copy.deepcopy(model)
    report = patched(model)
    assert_same_step(model, twin, rows())
    other = network(plain)
    patched(other)
    saved = step(other, rows(), count=True).saved
    assert step(model, rows(), count=True).saved == report.saved_after == saved


class Kept(nn.Module):
    """A frozen Linear reads the function's output, and a module that is left alone is the same activation."""

    def __init__(self, function: Any, child: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.beside, self.child, self.function = nn.Linear(WIDTH, WIDTH), child, function

    def forward(self, x: Tensor) -> Any:
        return self.down(self.function(self.up(x))), self.child(self.beside(x)).mul_(2).sum(-1)


@pytest.mark.parametrize(
    ("function", "child"),
    [
        (F.silu, nn.SiLU()),
        (lambda x: F.layer_norm(x, (WIDTH,)), nn.LayerNorm(WIDTH, elementwise_affine=False)),
    ],
    ids=["activation", "norm"],
)
def test_a_module_that_is_left_alone_stays_exact(function: Any, child: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Kept(function, child))
    twin = copy.deepcopy(model)
    report = patch_report(patch_model(model, "auto", example_inputs=(rows(),)))
    (kept,) = (site for site in report.sites if site.name == "0.child")
    assert kept.strategy == "keep"
    for one in (model, twin):
        one(rows())[1].sum().backward()
    assert torch.equal(model[0].beside.weight.grad, twin[0].beside.weight.grad)


class Compiled(Block):
    forward = torch.compile(Block.forward, backend="eager")


class Long(Block):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(210):
            x = x + 1
        return super().forward(x)


def given(net: Any) -> Any:
    net[0].forward = lambda x: type(net[0]).forward(net[0], x)
    return net


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: nn.Sequential(Long(plain)), "0 calls 21[0-9] torch functions"),
        (lambda: nn.Sequential(Compiled(plain)), "the forward of 0 is compiled"),
        (lambda: given(network(plain)), "the forward of 0 is overridden on the instance"),
    ],
    ids=["long", "compiled", "given"],
)
@pytest.mark.filterwarnings("ignore")  # torch's own, of a forward that it compiles in parts
def test_what_is_left_alone_is_said(model: Any, reason: str) -> None:
    net = model()
    twin = copy.deepcopy(net)
    report = patched(net)
    left = [site for site in report.left_alone if site.name.endswith(")")]
    assert re.search(reason, "; ".join(site.reason for site in left))
    if "instance" not in reason:  # whose forward runs the module that it was copied from
        assert_same_step(net, twin, rows())


def test_the_models_own_forward_is_named() -> None:
    model = Block(plain)
    report = patched(model)
    assert functions(report) == {}
    (note,) = (note for note in report.notes if "called as functions" in note)
    assert note.endswith("left alone: 1 (F.gelu in the model itself)")
    alone = Block(plain)
    alone.norm = nn.Identity()  # type: ignore[assignment]
    with pytest.warns(
        UserWarning, match="nothing was patched in Block: .*F.gelu in the model itself"
    ):
        patch_model(alone, example_inputs=(rows(),))


def test_what_saves_nothing_is_no_row() -> None:
    report = plan_patch(
        network(lambda net, x: net.down(net.up(x).relu())), example_inputs=(rows(),)
    )
    assert functions(report) == {}
    assert not [note for note in report.notes if "called as functions" in note]


def test_a_forward_set_later_is_warned_of() -> None:
    model = network(plain)
    patched(model)
    model[0].forward = lambda x: type(model[0]).forward(model[0], x)
    with pytest.warns(UserWarning, match="Block in 0"):
        model.train()(rows())


@pytest.mark.parametrize("body", [plain, gated], ids=["plain", "gated"])
def test_compiled(body: Any) -> None:
    model = network(body, 1)
    twin = copy.deepcopy(model)
    patched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_step(torch.compile(model, backend="aot_eager", fullgraph=True), twin, rows())

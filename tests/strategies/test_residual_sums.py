"""Residual sums of norms over channels, before an activation: what is saved, and lives of a model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_report, plan_patch
from tests.strategies.test_channel_norms import (
    ACTIVATIONS,
    BATCH,
    CHANNELS,
    NORMS,
    SIZE,
    Block,
    Net,
    assert_as_unpatched,
    image,
    patched,
    saved,
)
from tests.strategies.test_channel_norms_life import LIVES, full_hook, written_activation
from tests.support.judge import assert_same_step
from tests.support.step import MODES, cast, in_mode, step

TENSOR = BATCH * CHANNELS * SIZE * SIZE * 4


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += x
        return self.act(y)


class ByMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y.add_(x)
        return self.act(y)


class Sum(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) + x)


class Reversed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.norm(self.conv(x)))


def conv() -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)


class Shortcut(Block):
    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__(norm, act)
        self.shortcut, self.beside = conv(), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += self.beside(self.shortcut(x))
        return self.act(y)


class Activated(Block):
    """As the first block behind a stem whose activation is computed again."""

    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__(norm, act)
        self.before, self.first = nn.BatchNorm2d(CHANNELS), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.before(x))
        return self.act(self.norm(self.conv(x)) + x)


KINDS: dict[str, type[Block]] = {
    "in place": InPlace,
    "by method": ByMethod,
    "sum": Sum,
    "reversed": Reversed,
    "shortcut": Shortcut,
    "activated": Activated,
}


def residual_net(kind: str, norm: str = "batch", act: str = "relu") -> Net:
    torch.manual_seed(0)
    model = Net()
    blocks = (KINDS[kind](NORMS[norm](), ACTIVATIONS[act]()) for _ in range(3))
    model.blocks = nn.ModuleList(blocks)
    return model


def summed(model: nn.Module) -> list[str]:
    """The norms that wait for a residual sum."""
    return [site.name for site in patch_report(model).sites if "residual sum" in site.reason]


# each two values meet
GRID = [
    (kind, norm, act, mode)
    for (h, kind), (i, norm), (j, act), (k, mode) in itertools.product(
        enumerate(KINDS), enumerate(NORMS), enumerate(ACTIVATIONS), enumerate(MODES)
    )
    if (h + i + j + k) % 11 == 0
]


@pytest.mark.parametrize(("kind", "norm", "act", "mode"), GRID)
def test_a_step_is_as_accurate(kind: str, norm: str, act: str, mode: str) -> None:
    twin = cast(residual_net(kind, norm, act), MODES[mode].weights)
    given = in_mode((image(),), MODES[mode])
    ours = patched(twin, *given)
    assert summed(ours)
    assert_same_step(ours, twin, given, MODES[mode])


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("kind", "norm", "act", "mode"), GRID)
def test_a_step_on_a_gpu_is_as_accurate(
    kind: str, norm: str, act: str, mode: str, last: bool
) -> None:
    model, x = residual_net(kind, norm, act).cuda(), image().cuda()
    if last:
        model, x = (one.to(memory_format=torch.channels_last) for one in (model, x))
    twin = cast(model, MODES[mode].weights)
    given = in_mode((x,), MODES[mode])
    ours = patched(twin, *given)
    assert summed(ours) or last  # norms of groups give channels that lie first
    assert_same_step(ours, twin, given, MODES[mode])


@pytest.mark.parametrize("kind", ["in place", "by method", "sum", "reversed"])
@pytest.mark.parametrize("act", ["relu", "relu in place", "silu"])
def test_each_second_sum_is_computed_again(kind: str, act: str) -> None:
    model, x = residual_net(kind, act=act), image()
    ours = patched(model, x)
    assert summed(ours) == ["blocks.0.norm", "blocks.2.norm"]
    # what the stem and the convolutions give, and the second block's output with what its activation needs
    middle = TENSOR if "relu" in act else 2 * TENSOR
    assert saved(ours, x) <= x.nbytes + 4 * TENSOR + middle + 2000
    assert patch_report(ours).saved_after == saved(ours, x)


@pytest.mark.parametrize("kind", ["shortcut", "activated"])
def test_what_is_computed_of_saved_inputs_is_a_residual_of_any_block(kind: str) -> None:
    model, x = residual_net(kind), image()
    ours = patched(model, x)
    ends = [name for name in summed(ours) if name.endswith(".norm")]
    assert ends == [f"blocks.{number}.norm" for number in range(3)]
    assert saved(ours, x) <= x.nbytes + 7 * TENSOR + 3000
    assert patch_report(ours).saved_after == saved(ours, x)


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize(
    ("kind", "norm", "act"),
    [
        ("in place", "batch", "relu"),
        ("sum", "group", "silu"),
        ("shortcut", "batch", "relu in place"),
    ],
)
def test_lives_are_those_of_the_unpatched_model(life: Any, kind: str, norm: str, act: str) -> None:
    if life is written_activation and "relu" in act:
        pytest.skip("torch's own ReLU refuses that")
    if life is full_hook and kind != "sum":
        pytest.skip("torch refuses to write into what such a hook gave")
    model, x = residual_net(kind, norm, act), image()
    assert_as_unpatched(model, x, lambda one: life(one, x.double()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_torch_checkpoints(kind: str, blocks: tuple[int, ...], reentrant: bool) -> None:
    def run(model: Any) -> Tensor:
        y = model.stem(x.double())
        for number, block in enumerate(model.blocks):
            again = number in blocks
            y = checkpoint(block, y, use_reentrant=reentrant) if again else block(y)
        output: Tensor = model.head(y).mean((2, 3))
        return output

    x = image()
    assert_as_unpatched(residual_net(kind, act="relu in place"), x, run)


@pytest.mark.parametrize("kind", ["in place", "by method"])
@pytest.mark.parametrize("act", ["relu", "relu in place"])
def test_who_holds_a_norms_output_reads_what_was_added_there(kind: str, act: str) -> None:
    seen: list[Tensor] = []

    def run(model: Any) -> Tensor:
        handle = model.blocks[2].norm.register_forward_hook(lambda m, i, o: seen.append(o))
        output: Tensor = model(x.double())
        handle.remove()
        return output + seen.pop().square().mean()

    x = image()
    assert_as_unpatched(residual_net(kind, act=act), x, run)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("twice", [1, 2])
def test_a_norm_added_to_itself_on_a_path_that_nobody_planned(in_place: bool, twice: int) -> None:
    class Doubled(Block):
        other = 0

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            if in_place:
                y += y if self.other == 1 else x
            else:
                y = y + y if self.other == 1 else y + x
            return self.act(y + x if self.other == 2 else y)

    def run(model: Any) -> Tensor:
        model.blocks[2].other = twice
        return model(x.double())  # type: ignore[no-any-return]

    model, x = Net(), image()
    model.blocks = nn.ModuleList(Doubled(NORMS["batch"](), nn.ReLU()) for _ in range(3))
    assert_as_unpatched(model, x, run)


def test_a_factor_of_the_residual_is_torchs() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(self.conv(x)).add_(x, alpha=2))

    model, x = Net(), image()
    model.blocks = nn.ModuleList(Scaled(NORMS["batch"](), nn.SiLU()) for _ in range(3))
    assert not summed(patched(model, x))
    assert_as_unpatched(model, x, lambda one: one(x.double()))


def test_a_residual_written_before_the_backward_is_an_error() -> None:
    model, x = residual_net("sum"), image()
    ours = patched(model, x)
    for one, text in ((model, "inplace operation"), (ours, "what is added to it, was")):
        seen: list[Tensor] = []
        one.stem.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o))
        loss = one(x).sum()
        with torch.no_grad():
            seen[0].add_(1.0)
        with pytest.raises(RuntimeError, match=text):
            loss.backward()


def test_outputs_of_blocks_that_the_model_returns_are_right() -> None:
    class Pyramid(Net):
        def forward(self, x: Tensor) -> Any:
            x, found = self.stem(x), []
            for block in self.blocks:
                found.append(x := block(x))
            return found

    model, x = Pyramid(), image()
    model.blocks = residual_net("sum").blocks
    report = plan_patch(model, "exact", example_inputs=(x,))
    assert report.saved_after <= report.saved_before
    assert_as_unpatched(model, x, lambda one: torch.cat(one(x.double())))


def test_a_residual_that_nobody_else_saves_is_not_saved_for_the_sum() -> None:
    class Moved(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(self.conv(x)) + (x + 1))

    model, x = Net(), image()
    model.blocks = nn.ModuleList(Moved(NORMS["batch"](), nn.ReLU()) for _ in range(3))
    report = plan_patch(model, "exact", example_inputs=(x,))
    assert not any("residual sum" in site.reason for site in report.sites)


@pytest.mark.parametrize("name", ["test_resnet", "resnet18", "regnetx_002"])
def test_a_step_of_timms_nets(name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, x = timm.create_model(name).train(), torch.randn(2, 3, 64, 64)
    before = saved(model, x)
    ours = patched(model, x)
    assert summed(ours)
    assert saved(ours, x) < 0.72 * before
    found, expected = step(ours, (x,)), step(model, (x,))
    assert set(found.gradients) == set(expected.gradients)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ["relu", "silu"])
def test_no_more_is_saved_than_the_floor_has_and_little_less(kind: str, act: str) -> None:
    report = plan_patch(residual_net(kind, act=act), "exact", example_inputs=(image(),))
    assert report.floor <= report.saved_after <= 1.35 * report.floor

"""BatchNorm and GroupNorm that wait for an activation: what is saved, and that all else stays as it was."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from tests.support.judge import assert_close, assert_same_step
from tests.support.step import MODES, Mode, cast, in_mode, step

CHANNELS, BATCH, SIZE = 8, 3, 10


class Block(nn.Module):
    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm, self.act = norm, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(
        self,
        norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(CHANNELS),
        act: Callable[[], nn.Module] = nn.SiLU,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 1)
        self.blocks = nn.ModuleList(Block(norm(), act()) for _ in range(3))
        self.head = nn.Conv2d(CHANNELS, 2, 1)
        for module in self.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)) and module.weight is not None:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean((2, 3))


class Functions(nn.Module):
    """A norm and its activation, called as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 1)
        self.weight = nn.Parameter(torch.randn(CHANNELS))
        self.out = nn.Conv2d(CHANNELS, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(self.conv(x), 2, self.weight)
        return self.out(F.silu(y)).mean((2, 3))


def group_norm() -> nn.Module:
    return nn.GroupNorm(2, CHANNELS)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(CHANNELS),
    "plain": lambda: nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False),
    "average": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "group": group_norm,
    "instance": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "silu in place": lambda: nn.SiLU(inplace=True),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "gelu": nn.GELU,
}


def image(mode: Mode = MODES["fp32"]) -> Tensor:
    return torch.randn(BATCH, 3, SIZE, SIZE, dtype=mode.weights)


def patched(model: nn.Module, x: Tensor, config: Any = "exact", **more: Any) -> nn.Module:
    return patch_model(copy.deepcopy(model), config, example_inputs=(x,), **more)


def saved(model: nn.Module, x: Tensor) -> int:
    with saved_bytes(model) as found:
        output = model(x)
    del output
    return found.activations


def assert_as_unpatched(model: nn.Module, x: Tensor, run: Callable[[nn.Module], Tensor]) -> None:
    """Outputs, gradients and buffers in float64."""
    model, x = model.double(), x.double()
    ours = patched(model, x)
    found, expected = run(ours), run(model)
    assert_close(found, expected, "output")
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, one), two in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None and two.grad is not None:
            assert_close(one.grad, two.grad, name)
    for one, two in zip(ours.buffers(), model.buffers(), strict=True):
        assert_close(one.double(), two.double(), "buffer")


# each two values meet
GRID = [
    (norm, act, mode)
    for (i, norm), (j, act), (k, mode) in itertools.product(
        enumerate(NORMS), enumerate(ACTIVATIONS), enumerate(MODES)
    )
    if (i + j + k) % 4 == 0
]


@pytest.mark.parametrize(("norm", "act", "mode"), GRID)
def test_a_step_is_as_accurate_and_saves_the_norms_input_alone(
    norm: str, act: str, mode: str
) -> None:
    torch.manual_seed(0)
    model, x = Net(NORMS[norm], ACTIVATIONS[act]), image()
    twin = cast(model, MODES[mode].weights)
    given = in_mode((x,), MODES[mode])
    ours = patched(twin, *given)
    kinds = [site.kind for site in patch_report(ours).sites if site.strategy == "recompute"]
    assert len(kinds) == 6, patch_report(ours)
    assert_same_step(ours, twin, given, MODES[mode])


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("norm", "act", "mode"), GRID)
def test_a_step_on_a_gpu_is_as_accurate(norm: str, act: str, mode: str, last: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(NORMS[norm], ACTIVATIONS[act]).cuda(), image().cuda()
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    twin = cast(model, MODES[mode].weights)
    given = in_mode((x,), MODES[mode])
    assert_same_step(patched(twin, *given), twin, given, MODES[mode])


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("act", ["silu", "relu", "relu in place"])
def test_one_tensor_a_norm_is_saved(norm: str, act: str) -> None:
    model, x = Net(NORMS[norm], ACTIVATIONS[act]), image()
    ours = patched(model, x)
    tensor = BATCH * CHANNELS * SIZE * SIZE * 4
    # the stem's output, which the first conv reads, each conv's, and statistics
    assert saved(ours, x) <= x.nbytes + 4 * tensor + 2000
    assert patch_report(ours).saved_after == saved(ours, x)
    assert saved(model, x) >= saved(ours, x) + (3 if "relu" in act else 6) * tensor - 2000
    if "relu" in act:
        assert patch_report(ours).floor <= saved(ours, x)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("act", ["silu", "relu"])
def test_a_convolution_that_autocast_casts_for_holds_no_values(norm: str, act: str) -> None:
    """As behind a GroupNorm on a GPU, whose output autocast makes float32."""

    class Wide(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(self.conv(x).float()))

    torch.manual_seed(0)
    model, x = Net(), image()
    model.blocks = nn.ModuleList(Wide(NORMS[norm](), ACTIVATIONS[act]()) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        ours = patched(model, x)
        found = saved(ours, x)
    half = BATCH * CHANNELS * SIZE * SIZE * 2
    # what each convolution gives, the stem in half precision and the others as their norms read it
    assert found <= x.nbytes // 2 + (1 + 3 * 2) * half + 2000
    assert patch_report(ours).saved_after == found
    assert_same_step(ours, model, x, MODES["autocast"])


def test_arguments_may_be_given_by_name() -> None:
    class Named(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(
                input=x, running_mean=self.running_mean, running_var=self.running_var,
                weight=self.weight, bias=self.bias, training=True, momentum=0.2, eps=1e-3,
            )  # fmt: skip

    torch.manual_seed(0)
    model, x = Net(lambda: Named(CHANNELS)), image()
    assert saved(patched(model, x), x) < 0.5 * saved(model, x)
    assert_as_unpatched(model, x, lambda one: one(x.double()))


def test_norms_and_activations_called_as_functions_wait() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Functions()), image()
    assert saved(patched(model, x), x) < 0.5 * saved(model, x)
    assert_as_unpatched(model, x, lambda one: one(x.double()))


def test_channels_may_lie_last() -> None:
    torch.manual_seed(0)
    model, x = Net().to(memory_format=torch.channels_last), image()
    x = x.to(memory_format=torch.channels_last)
    assert saved(patched(model, x), x) < 0.5 * saved(model, x)
    assert_as_unpatched(model, x, lambda one: one(x.double()))


def frozen_convs(model: Net) -> None:
    for block in model.blocks:
        block.conv.requires_grad_(False)


def frozen_norms(model: Net) -> None:
    for block in model.blocks:
        block.norm.requires_grad_(False)  # type: ignore[union-attr]


def only_norms(model: Net) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.norm.requires_grad_(True)  # type: ignore[union-attr]


def in_eval(model: Net) -> None:
    model.eval()


def one_in_eval(model: Net) -> None:
    model.blocks[1].norm.eval()  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("act", ["silu", "relu in place"])
@pytest.mark.parametrize("change", [frozen_convs, frozen_norms, only_norms, in_eval, one_in_eval])
def test_what_is_frozen_or_evaluated(norm: str, act: str, change: Any) -> None:
    torch.manual_seed(0)
    model, x = Net(NORMS[norm], ACTIVATIONS[act]), image()
    change(model)
    assert saved(patched(model, x), x) <= saved(model, x)
    assert_as_unpatched(model, x, lambda one: one(x.double()))
    if change in (in_eval, one_in_eval):  # planned while it trained

        def run(one: nn.Module) -> Tensor:
            one.train()
            change(one)
            return one(x.double())

        assert_as_unpatched(Net(NORMS[norm], ACTIVATIONS[act]), x, run)


def test_frozen_convs_save_the_norms_input_without_codes() -> None:
    model, x = Net(), image()
    frozen_convs(model)
    ours = patched(model, x, "auto")
    assert not any(site.approximate for site in patch_report(ours).sites)
    assert saved(ours, x) < 0.55 * saved(model, x)


def test_unpatching_puts_everything_back() -> None:
    model, x = Net(), image()
    ours = patched(model, x)
    unpatch_model(ours)
    assert saved(ours, x) == saved(model, x)
    assert list(ours.state_dict()) == list(model.state_dict())


def test_instance_norms_with_running_statistics_are_torchs() -> None:
    report = plan_patch(
        Net(lambda: nn.InstanceNorm2d(CHANNELS, track_running_stats=True)),
        example_inputs=(image(),),
    )
    assert not any(site.kind == "instance_norm" and site.patched for site in report.sites)


@pytest.mark.parametrize("config", [{"norms": "keep"}, {"activations": "keep"}])
def test_who_keeps_one_of_both_is_obeyed(config: dict[str, str]) -> None:
    report = plan_patch(Net(act=nn.ReLU), config, example_inputs=(image(),))
    assert not any(site.kind == "batch_norm" and site.patched for site in report.sites)


def test_a_norm_that_somebody_else_reads_is_left_alone() -> None:
    class Residual(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            return self.act(y) + y  # type: ignore[no-any-return]

    model, x = Net(), image()
    model.blocks[1] = Residual(nn.BatchNorm2d(CHANNELS), nn.SiLU())
    report = patch_report(patched(model, x))
    left = {site.name for site in report.sites if site.kind == "batch_norm" and not site.patched}
    assert not any(site.name == "blocks.1.norm" and site.patched for site in report.sites), left
    assert_as_unpatched(model, x, lambda one: one(x.double()))


def test_what_torch_refuses_is_torchs_error() -> None:
    model, x = Net(), image()
    ours = patched(model, x)
    for one in (model, ours):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            one(torch.randn(1, 3, 1, 1))
    for one in (model, ours):
        one.blocks[0].norm.weight = nn.Parameter(torch.ones(CHANNELS + 1))  # type: ignore[union-attr, index]
        with pytest.raises(RuntimeError, match=r"(?i)weight|expected"):
            one(x)


def test_a_step_of_timms_and_transformers_nets() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, x = timm.create_model("test_efficientnet").train(), torch.randn(4, 3, 96, 96)
    before = saved(model, x)
    ours = patched(model, x)
    assert saved(ours, x) < 0.6 * before
    found, expected = step(ours, (x,)), step(model, (x,))
    assert set(found.gradients) == set(expected.gradients)

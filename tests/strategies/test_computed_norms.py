"""Norms behind an activation or a gated product (EVA-02, BitNet, Kosmos-2): computed again with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, saved_bytes
from tests.support.judge import assert_accurate, assert_same_step
from tests.support.lives import assert_backwards_add_up, assert_trains_alike
from tests.support.models import randomise
from tests.support.step import AUTOCAST, BF16, MODES, Mode, cast, in_mode, step, truth_of

ROWS, WIDTH, HIDDEN = 6, 8, 16


class RMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Mlp(nn.Module):
    """``down(norm(act(gate(x)) * up(x)))``, or without ``up``."""

    def __init__(self, norm: Callable[[int], nn.Module], gated: bool, act: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(WIDTH, HIDDEN) if gated else None
        self.act, self.drop, self.norm = act, nn.Dropout(0.0), norm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.use: Callable[[Any, Tensor], Tensor] = lambda net, x: net.down(net.norm(net.hidden(x)))

    def hidden(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x))
        h = h if self.up is None else h * self.up(x)
        return self.drop(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class SquaredRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


# the tensors of full width that are saved
NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gelu, LayerNorm": (lambda: Mlp(nn.LayerNorm, False, nn.GELU()), 1),
    "silu * up, LayerNorm": (lambda: Mlp(nn.LayerNorm, True, nn.SiLU()), 2),
    "silu * up, RMSNorm": (lambda: Mlp(RMSNorm, True, nn.SiLU()), 2),
    "squared relu * up, RMSNorm": (lambda: Mlp(nn.RMSNorm, True, SquaredRelu()), 2),
}


def made(name: str = "silu * up, LayerNorm") -> Any:
    torch.manual_seed(0)
    model = NETS[name][0]()
    randomise(model)
    return model.train()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def patched(model: Any, preset: str = "exact", x: Any = None) -> Any:
    return patch_model(copy.deepcopy(model), preset, example_inputs=batch() if x is None else x)


def saved(model: Any, x: Any = None) -> int:
    with saved_bytes(model) as counted:
        y = model(batch() if x is None else x)
    del y
    return counted.activations


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("name", NETS)
def test_neither_the_norm_nor_its_input_is_saved(name: str, mode: Mode) -> None:
    model = cast(made(name), mode.weights)
    x = in_mode(batch(), mode)
    ours = patched(model, x=x)
    found, own = (step(one, x, mode, count=True) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, x), mode)
    if mode is AUTOCAST:
        assert found.saved < own.saved
    else:
        assert found.saved == 2 * ROWS * (WIDTH + NETS[name][1] * HIDDEN) * mode.weights.itemsize


@pytest.mark.parametrize("name", NETS)
def test_the_report_says_so_and_predicts_the_bytes(name: str) -> None:
    ours = patched(made(name), "auto")
    report = patch_report(ours)
    (site,) = (one for one in report.sites if one.name == "norm")
    assert "its input is computed again, and so is the norm" in site.reason
    assert site.bytes_after == 0
    assert report.saved_after == saved(ours)
    assert report.saved_after == report.floor


def read_twice(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.hidden(x))
    return net.down(y) + y[..., :WIDTH].square()


def written(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.hidden(x))
    y.mul_(2)
    return net.down(y)


def flat(net: Any, x: Tensor) -> Tensor:
    return net.down(net.norm(net.hidden(x)).flatten(0, 1)).view(x.shape)


def in_checkpoint(net: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.down(net.norm(net.hidden(x))), x, use_reentrant=False)


def norm_in_checkpoint(net: Any, x: Tensor) -> Tensor:
    return net.down(checkpoint(net.norm, net.hidden(x), use_reentrant=False))


def hidden_in_checkpoint(net: Any, x: Tensor) -> Tensor:
    return net.down(net.norm(checkpoint(net.hidden, x, use_reentrant=False)))


def under_no_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.norm(net.hidden(x))
    return net.down(y)


def other_eps(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.hidden(x))
    if hasattr(net.norm, "eps"):
        net.norm.eps = 0.5
    z = net.down(y) + net.down(net.norm(net.hidden(x)))
    if hasattr(net.norm, "eps"):
        net.norm.eps = 1e-6
    return z


USES = [
    read_twice, written, flat, in_checkpoint, norm_in_checkpoint, hidden_in_checkpoint, under_no_grad,
    other_eps,
]  # fmt: skip


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("use", USES)
def test_every_use_after_the_patch_is_right(use: Any, name: str) -> None:
    model = made(name)
    model.eps = 1e-6
    ours = patched(model)
    for one in (model, ours):
        one.use = use
    assert_same_step(ours, model, batch())


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("gamma", [0.0, 1e-30, -1.0])
def test_any_weight_gives_exact_gradients(gamma: float, name: str) -> None:
    model = made(name)
    with torch.no_grad():
        model.norm.weight[::3] = gamma
    assert_same_step(patched(model), model, batch())


def test_a_weight_written_before_the_backward_is_refused() -> None:
    ours = patched(made())
    loss = ours(batch()).sum()
    with torch.no_grad():
        ours.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"written in place|modified by an inplace"):
        loss.backward()


def test_two_backwards_of_one_graph_add_up() -> None:
    model = made()
    assert_backwards_add_up(patched(model), model, batch())


def test_a_hook_reads_the_norm_and_its_gradient() -> None:
    model = made()
    ours = patched(model)
    seen: list[list[Tensor]] = []
    for one in (model, ours):
        kept: list[Tensor] = []

        def look(_: Any, __: Any, y: Tensor, kept: list[Tensor] = kept) -> None:
            kept.append(y.detach().clone())
            y.register_hook(lambda dy: kept.append(dy.clone()))

        one.norm.register_forward_hook(look)
        one(batch()).square().sum().backward()
        seen.append(kept)
    torch.testing.assert_close(*seen)


def test_several_steps_end_alike() -> None:
    model = made()
    assert_trains_alike(patched(model), model, batch)


def test_low_rank_adapters_train_on_it() -> None:
    model = made()
    config = peft.LoraConfig(r=2, target_modules=["gate", "up", "down"])
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            getattr(adapted.base_model.model, name).lora_B["default"].weight.normal_()
    ours = patched(adapted)
    assert saved(ours) < saved(adapted)
    assert_same_step(ours, adapted, batch())


def test_adapters_in_float32_read_a_cast_of_it() -> None:
    config = peft.LoraConfig(r=2, target_modules=["gate", "up", "down"])
    model = peft.get_peft_model(made().bfloat16(), config)
    assert model.base_model.model.down.lora_A["default"].weight.dtype == torch.float32
    x = batch().bfloat16()
    ours = patched(model, x=x)
    (site,) = (one for one in patch_report(ours).sites if one.name.endswith("norm"))
    assert "its input is computed again, and so is the norm" in site.reason
    found, own = (step(one, x, BF16) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, x), BF16)


def test_copies_and_pickles_compute_the_same() -> None:
    model = made()
    model.__dict__.pop("use")
    type(model).use = staticmethod(lambda net, x: net.down(net.norm(net.hidden(x))))
    ours = patched(model)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same_step(copied, model, batch())


def test_others_than_linears_make_the_norm_save_its_output() -> None:
    model = made()
    model.use = read_twice
    ours = patched(model)
    (site,) = (one for one in patch_report(ours).sites if one.name == "norm")
    assert "save one tensor" in site.reason
    assert_same_step(ours, model, batch())

"""One cast of a float32 tensor for all Linears that read it under autocast, where no norm gives them one."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from tests.support.configs import ONE_COPY
from tests.support.judge import assert_equal_steps, assert_same_step
from tests.support.lives import assert_backwards_add_up, assert_trains_alike
from tests.support.step import AUTOCAST, FP32, step

ROWS, WIDTH = 10, 16
ONE = ROWS * WIDTH * 2  # in bf16


class Residual(nn.Module):
    """Three Linears read a float32 sum, as in OLMo 2; ``use`` says what happens to it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.use = "plainly"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        if self.use == "detached":
            x = x.detach()
        q = self.q(x)
        if self.use == "written":
            x.mul_(2)
        if self.use == "written without a trace":
            x.data.mul_(2)
        if self.use == "under no_grad":
            with torch.no_grad():
                q = q + self.v(x)
        if self.use == "without autocast":
            with torch.autocast("cpu", enabled=False):
                return (q + self.k(x) + self.v(x)) * x.sum()
        if self.use == "hooked":
            x.register_hook(lambda gradient: gradient * 3)
        if self.use == "in fp16":
            with torch.autocast("cpu", torch.float16):
                return q + self.k(x) + self.v(x)
        return q + self.k(x) + self.v(x) + x


def rows(seed: int = 0) -> Tensor:
    return torch.randn(2, ROWS // 2, WIDTH, generator=torch.Generator().manual_seed(seed))


def made(*, adapters: tuple[str, ...] = (), **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Residual())
    if adapters:
        config = LoraConfig(r=8, target_modules=list(adapters), init_lora_weights=False, **options)
        model = get_peft_model(model, config)
        model.base_model.model[0].shift.requires_grad_()
    return model.train()


def patched(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return patch_model(copy.deepcopy(model), ONE_COPY, example_inputs=rows())


def saved(model: Any) -> int:
    with torch.autocast("cpu", torch.bfloat16), saved_bytes(model) as counted:
        model(rows())
    return counted.activations


def test_three_linears_save_one_cast() -> None:
    model = made()
    ours = patched(model)
    assert saved(model) - saved(ours) == 2 * ONE
    report = patch_report(ours)
    assert report.saved_after == saved(ours) == report.floor


@pytest.mark.parametrize("mode", [FP32, AUTOCAST], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "use",
    ["plainly", "written", "under no_grad", "without autocast", "in fp16", "hooked", "detached"],
)
def test_a_step_has_the_bits_of_the_unpatched_one(use: str, mode: Any) -> None:
    """Gradients too: they are added up in float32, as those of several casts are."""
    if use == "written" and mode is FP32:
        pytest.skip("the unpatched model raises torch's error")
    model = made()
    ours = patched(model)
    model[0].use = ours[0].use = use
    found, own = (step(one, (rows(),), mode) for one in (ours, model))
    assert torch.equal(found.output, own.output)
    for name, gradient in own.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@pytest.mark.filterwarnings("ignore:nothing was patched")
def test_a_write_without_a_trace_may_be_planned() -> None:
    model = made()
    model[0].use = "written without a trace"
    found, own = (step(one, (rows(),), AUTOCAST) for one in (patched(model), model))
    assert torch.equal(found.output, own.output)


@pytest.mark.parametrize("adapters", [("q", "k", "v"), ("q", "v")])
def test_adapters_save_one_cast(adapters: tuple[str, ...]) -> None:
    model = made(adapters=adapters)
    ours = patched(model)
    ranks = len(adapters) * ROWS * 8 * 2
    assert saved(ours) == ONE + ranks < saved(model)
    assert_same_step(ours, model, (rows(),), AUTOCAST)


def test_a_trained_linear_beside_adapters_reads_their_cast() -> None:
    model = made(adapters=("q",), modules_to_save=["k"])
    ours = patched(model)
    assert saved(ours) == ONE + ROWS * 8 * 2
    assert_same_step(ours, model, (rows(),), AUTOCAST)


def test_a_dropout_reads_float32() -> None:
    model = made(adapters=("q", "k"), lora_dropout=0.25)
    ours = patched(model)
    assert_same_step(ours.eval(), model.eval(), (rows(),), AUTOCAST)
    assert saved(ours.train()) <= saved(model.train())


class Direct(nn.Module):
    """Linears read the very input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


def direct() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Direct())
    return patched(model), model


def test_each_forward_casts_anew() -> None:
    """What is written in between may leave no trace: a refilled buffer, a captured CUDA graph's input."""
    ours, model = direct()
    buffer = rows().numpy()
    x = torch.from_numpy(buffer)
    for seed in range(2):
        buffer[...] = rows(seed).numpy()
        found, own = (step(one, (x,), AUTOCAST) for one in (ours, model))
        assert torch.equal(found.output, own.output)
        assert all(torch.equal(found.gradients[n], g) for n, g in own.gradients.items())
    assert not vars(x)


def test_a_linear_called_by_itself_casts_for_itself() -> None:
    ours, model = direct()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours[0].q(rows()), model[0].q(rows()))


def test_hooks_see_float32_and_may_write() -> None:
    ours, model = direct()
    seen = []

    def write(module: nn.Module, args: Any) -> None:
        seen.append(args[0].dtype)
        args[0].mul_(2)

    for one in (ours, model):
        one[0].q.register_forward_pre_hook(write)
    found, own = (step(one, (rows(),), AUTOCAST) for one in (ours, model))
    assert set(seen) == {torch.float32}
    assert torch.equal(found.output, own.output)
    assert all(torch.equal(found.gradients[n], g) for n, g in own.gradients.items())


def test_what_autocast_does_not_cast_is_left_to_torch() -> None:
    ours, model = direct()
    with torch.inference_mode():
        x = rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), model(x))
        for kind in (torch.complex64, torch.int64):
            for one in (ours, model):
                with pytest.raises(RuntimeError):
                    one(rows().to(kind))
    assert ours.to("meta")(rows().to("meta")).is_meta


def test_a_selective_checkpoint_that_saves_casts() -> None:
    """The block that runs again makes as many casts."""

    def save_casts(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        policies = CheckpointPolicy
        cast = op is torch.ops.aten._to_copy.default
        return policies.MUST_SAVE if cast else policies.PREFER_RECOMPUTE

    class Blocks(nn.Module):
        def __init__(self, block: nn.Module, inside: bool) -> None:
            super().__init__()
            self.block, self.recomputed = block, False
            self.beside = nn.Linear(WIDTH, WIDTH) if inside else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = x.float() * 2
            y: Tensor = self.beside(x)
            if not self.recomputed:  # but planned
                return y + self.block(x)
            contexts = partial(create_selective_checkpoint_contexts, save_casts)
            return y + checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)

    torch.manual_seed(0)
    for inside in (False, True):  # of the block, or of what holds casts around the checkpoint
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Blocks(Direct(), inside))
        ours = patched(model)
        model[1].recomputed = ours[1].recomputed = True
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [one(rows().requires_grad_()) for one in (ours, model)]
        for one in outputs:
            one.float().square().sum().backward()
        for own, found in zip(model.parameters(), ours.parameters(), strict=True):
            assert torch.equal(found.grad, own.grad)


@pytest.mark.filterwarnings("ignore:nothing was patched")
def test_the_forward_of_the_model_itself_keeps_its_arguments() -> None:
    """Trainers look at them, behind PEFT's model as well."""
    config = LoraConfig(r=8, target_modules=["q", "k"], init_lora_weights=False)
    for model in (Residual(), get_peft_model(Residual(), config)):
        ours: Any = patched(model)
        base = ours.get_base_model() if hasattr(ours, "get_base_model") else ours
        assert list(inspect.signature(base.forward).parameters) == ["x"]
        assert_same_step(ours, model, (rows(),), AUTOCAST)


def test_a_forward_that_holds_casts_has_the_arguments_of_its_class() -> None:
    """transformers looks at those of an encoder whose model generates."""
    ours = patched(made())
    assert list(inspect.signature(ours[0].forward).parameters) == ["x"]
    assert list(inspect.signature(ours[0].q.forward).parameters) == ["input"]


def test_lives() -> None:
    model = made()
    ours = patched(model)
    for one in (ours, model):
        one.register_forward_pre_hook(lambda *_: None)

    class Under(nn.Module):
        def __init__(self, inner: nn.Module, recomputed: bool = False) -> None:
            super().__init__()
            self.inner, self.recomputed = inner, recomputed

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                if self.recomputed:
                    return checkpoint(self.inner, x, use_reentrant=False).float()
                return self.inner(x).float()

    for recomputed in (False, True):
        pair = [Under(copy.deepcopy(one), recomputed) for one in (ours, model)]
        assert_backwards_add_up(*pair, rows())
        assert_trains_alike(*pair, rows)


def test_unpatched_and_copied_models_are_as_they_were() -> None:
    model = made()
    ours = patched(model)
    assert saved(copy.deepcopy(ours)) == saved(ours) < saved(model)
    unpatch_model(ours)
    assert saved(ours) == saved(model)
    assert_equal_steps(ours, model, rows())

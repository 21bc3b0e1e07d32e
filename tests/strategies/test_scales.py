"""Scales behind a Linear (LayerScale, gates): the product saves no output, and computes the same."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, saved_bytes, unpatch_model
from lowmem_patch.config import load_config
from tests.strategies.test_eight_bit import assert_along, wide_llama
from tests.support.judge import assert_accurate, assert_same_step
from tests.support.models import randomise
from tests.support.saved import saved_storages
from tests.support.step import MODES, Mode, cast, in_mode, step, truth_of, warned

ROWS, WIDTH, HIDDEN = 6, 8, 16
LEFT = dataclasses.replace(load_config("exact"), linear_inputs="keep")
Body = Callable[[Any, Tensor], Tensor]


class Scaled(nn.Module):
    """A residual branch whose last Linear is scaled as ``body`` says."""

    def __init__(self, body: Body, shape: tuple[int, ...] = (WIDTH,)) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.up, self.down, self.act = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.GELU()
        self.drop = nn.Dropout(0.0)
        self.scale = nn.Parameter(torch.ones(shape))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(x + self.body(self, x))


def branch(net: Any, x: Tensor) -> Tensor:
    found: Tensor = net.down(net.act(net.up(x)))
    return found


def moved(net: Any, x: Tensor) -> Tensor:
    y = branch(net, x[:, :, None]).permute(0, 3, 1, 2)  # as timm's ConvNeXt
    return y.mul(net.scale.reshape(1, -1, 1, 1)).permute(0, 2, 3, 1)[:, :, 0]


BODIES: dict[str, tuple[Body, tuple[int, ...]]] = {
    "behind an activation": (lambda net, x: branch(net, x) * net.scale, (WIDTH,)),
    "from the left": (lambda net, x: net.scale * branch(net, x), (WIDTH,)),
    "multiply": (lambda net, x: torch.multiply(branch(net, x), net.scale), (WIDTH,)),
    "behind a dropout": (lambda net, x: net.drop(branch(net, x)) * net.scale, (WIDTH,)),
    "one gate": (lambda net, x: branch(net, x) * net.scale.tanh(), (1,)),
    "a number": (lambda net, x: net.scale * branch(net, x), ()),
    "moved": (moved, (WIDTH,)),
    "of a plain input": (lambda net, x: net.down(net.up(x).sin()) * net.scale, (WIDTH,)),
}


def batch() -> Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def made(name: str = "behind an activation") -> Any:
    torch.manual_seed(0)
    model = Scaled(*BODIES[name])
    randomise(model)
    return model.train()


def patched(model: Any, inputs: Any, config: Any = "exact") -> Any:
    with warned():  # where nothing else is there to patch
        return patch_model(copy.deepcopy(model), config, example_inputs=inputs)


def saved(model: Any, x: Tensor) -> int:
    with saved_bytes(model) as found:
        model(x)
    return found.activations


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("name", BODIES)
def test_the_output_is_not_saved_and_gradients_are_exact(name: str, mode: Mode) -> None:
    model, x = cast(made(name), mode.weights), batch()
    ours = patched(model, in_mode(x, mode))
    found, theirs = (step(one, x, mode, count=True) for one in (ours, model))
    assert_accurate(found, theirs, truth_of(model, x), mode)
    left = patched(model, in_mode(x, mode), LEFT)
    product = 2 * ROWS * WIDTH * (mode.autocast or mode.weights).itemsize
    assert step(left, x, mode, count=True).saved - found.saved >= product


def dinov2() -> tuple[Any, Any]:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, num_hidden_layers=2))
    return model, {"pixel_values": torch.randn(3, 3, 28, 28)}


def beit() -> tuple[Any, Any]:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 32, "intermediate_size": 64}
    model = transformers.BeitModel(transformers.BeitConfig(**sizes, num_hidden_layers=2))
    return model, {"pixel_values": torch.randn(3, 3, 32, 32)}


def deit() -> tuple[Any, Any]:
    sizes = {"img_size": 32, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 0}
    return timm.create_model("deit3_small_patch16_224", **sizes), (torch.randn(3, 3, 32, 32),)


@pytest.mark.parametrize("build", [dinov2, beit, deit])
def test_models_with_layer_scale_reach_the_floor(build: Callable[[], tuple[Any, Any]]) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    randomise(model)
    model.train()
    ours = patched(model, inputs)
    report = patch_report(ours)
    assert any("is not saved for the scale behind it: 4" in note for note in report.notes)
    assert report.saved_after <= 1.02 * report.floor
    assert_same_step(ours, model, inputs)


def read_twice(net: Any, x: Tensor) -> Tensor:
    y = branch(net, x)
    return y * net.scale + y.square()


def written(net: Any, x: Tensor) -> Tensor:
    y = branch(net, x)
    y.add_(1)
    return y * net.scale


def dropped(net: Any, x: Tensor) -> Tensor:
    found: Tensor = nn.functional.dropout(branch(net, x), 0.5) * net.scale
    return found


@pytest.mark.parametrize("body", [read_twice, written, dropped])
def test_who_else_reads_or_writes_the_output_gets_it(body: Body) -> None:
    model = made()
    ours = patched(model, (batch(),))
    for one in (model, ours):  # after the patch: the plan knows nothing of it
        one.body = body
    assert_same_step(ours, model, batch())


@pytest.mark.parametrize("trains", ["scale", "weight", "bias"])
def test_what_is_frozen_after_the_patch_stays_without_a_gradient(trains: str) -> None:
    model = made()
    ours = patched(model, (batch(),))
    for one in (model, ours):
        frozen = {"scale": one.scale, "weight": one.down.weight, "bias": one.down.bias}[trains]
        frozen.requires_grad_(False)
    with warned():  # that the plan counted on it
        found, theirs = (step(one, batch()) for one in (ours, model))
    assert found.gradients.keys() == theirs.gradients.keys()
    assert_accurate(found, theirs, truth_of(model, batch()))


def test_a_hook_on_the_linear_sees_what_it_saw() -> None:
    model = made()
    ours = patched(model, (batch(),))
    seen: list[list[Tensor]] = [[], []]
    for found, one in zip(seen, (model, ours), strict=True):
        down, keeps = one.down, found.append
        down.register_full_backward_hook(lambda _m, _i, dy, keeps=keeps: keeps(dy[0]))
        down.register_forward_hook(lambda _m, _args, y, keeps=keeps: keeps(y.detach() * 1))
        one(batch()).sum().backward()
    assert len(seen[0]) == 2
    for own, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(own, theirs)  # float32's own tolerances


def doubled_by_a_hook(net: Any) -> None:
    net.down.register_forward_hook(lambda _module, _args, y: y * 2)


def doubled_by_the_first_hook(net: Any) -> None:
    net.down.register_forward_hook(lambda _module, _args, y: y * 2, prepend=True)


def doubled_by_a_forward(net: Any) -> None:
    net.down.forward = lambda x: nn.functional.linear(x, net.down.weight * 2, net.down.bias)


def doubled_by_a_hook_before(net: Any) -> None:
    net.down.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))


CHANGES = [
    doubled_by_a_hook, doubled_by_the_first_hook, doubled_by_a_forward, doubled_by_a_hook_before,
]  # fmt: skip


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_an_output_that_is_more_than_the_product_is_right(
    change: Callable[[Any], None], before: bool
) -> None:
    model, ours = made(), made()
    change(model)
    if before:
        change(ours)
    with warned():
        patch_model(ours, "exact", example_inputs=(batch(),))
    if not before:
        change(ours)
    own, found = (step(one, batch()) for one in (model, ours))
    for name, gradient in own.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)  # float32's own tolerances


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("trains", [True, False])
def test_what_trains_is_asked_where_the_linear_runs(name: str, trains: bool) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        tensor = getattr(net.down, name).requires_grad_(trains)
        y = branch(net, x)
        tensor.requires_grad_(not trains)
        z: Tensor = y * net.scale
        tensor.requires_grad_(True)  # or torch would not give it a gradient
        return z

    model = made()
    ours = patched(model, (batch(),))
    for one in (model, ours):
        one.body = body
    with warned():
        own, found = (step(one, batch()) for one in (model, ours))
    assert found.gradients.keys() == own.gradients.keys()
    for key, gradient in own.gradients.items():
        torch.testing.assert_close(found.gradients[key], gradient)  # float32's own tolerances


def test_an_input_by_name_is_left_to_torch() -> None:
    model = made()
    ours = patched(model, (batch(),))
    for one in (model, ours):
        one.body = lambda net, x: net.down(input=net.act(net.up(x))) * net.scale
    assert_same_step(ours, model, batch())


def test_a_gradient_of_the_output_itself_is_refused_or_right() -> None:
    model = made()
    outputs: list[Tensor] = []

    def keeps(net: Any, x: Tensor) -> Tensor:
        outputs.append(branch(net, x))
        outputs[-1].retain_grad()
        return outputs[-1] * net.scale

    ours = patched(model, (batch(),))
    for one in (model, ours):
        one.body = keeps
        one(batch()).sum().backward()
    torch.testing.assert_close(outputs[1].grad, outputs[0].grad)  # float32's own tolerances


def test_a_parametrized_weight_is_computed_once() -> None:
    model = made()
    ours = patched(model, (batch(),))
    for one in (model, ours):
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(one.down)
    assert_same_step(ours, model, batch())


def test_float16_has_no_room_and_is_left_to_torch() -> None:
    model = made().half()
    ours = patched(made(), (batch(),)).half()
    x = batch().half()
    assert saved(ours, x) == saved(patched(model, (x,), LEFT), x)


def test_weights_that_zero_3_frees_are_left_to_torch() -> None:
    ours = patched(made(), (batch(),))
    expected = saved(patched(made(), (batch(),), LEFT), batch())
    assert saved(ours, batch()) < expected
    ours.down.weight.ds_id = 1  # DeepSpeed's mark
    assert saved(ours, batch()) == expected


def test_compact_stores_the_input_and_leaves_the_output() -> None:
    notes = patch_report(patched(made(), (batch(),), "compact")).notes
    assert not any("scale" in note for note in notes)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_compact_saves_no_output_of_lora_b_for_a_magnitude() -> None:
    """DoRA's: what lora_B reads has few columns, and costs less in full than its output."""
    model, inputs = wide_llama()
    names = ["q_proj", "down_proj"]
    model = randomise(get_peft_model(model, LoraConfig(r=4, target_modules=names, use_dora=True)))
    found: dict[str, tuple[int, int]] = {}
    for preset in ("exact", "compact"):
        ours = patch_model(copy.deepcopy(model), preset, example_inputs=inputs)
        with saved_bytes(ours) as count:
            ours(**inputs)
        sizes = (size for name, size in count.by_module.items() if "magnitude" in name)
        found[preset] = count.activations, sum(sizes)
        assert_along(step(ours, inputs), step(model, inputs))
    assert found["compact"][0] < found["exact"][0]
    assert found["compact"][1] == found["exact"][1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_branch_computes_the_same(reentrant: bool) -> None:
    model = made()
    inner = model.body

    def body(net: Any, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(inner, net, x, use_reentrant=reentrant)
        return found

    ours = patched(model, (batch(),))
    for one in (model, ours):
        one.body = body
    assert_same_step(ours, model, batch())


# torch's compiler, of a function of autograd
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("mode", ["fp32", "autocast"])
@pytest.mark.parametrize("name", ["behind an activation", "of a plain input", "one gate"])
def test_compiled_saves_no_output_and_computes_the_same(name: str, mode: str) -> None:
    model = made(name)
    ours = patched(model, (batch(),))
    torch._dynamo.reset()
    net: Any = torch.compile(ours, backend="aot_eager_decomp_partition", fullgraph=True)
    assert_same_step(net, model, batch(), MODES[mode])
    counts = []
    for one in (ours, net):
        _, storages = saved_storages(lambda one=one: one(batch()))
        counts.append(sum(storages.values()))
    assert counts[1] <= counts[0]


def test_copies_and_undo() -> None:
    model = made()
    model.body = branch_scaled
    ours = patched(model, (batch(),))
    expected = saved(ours, batch())
    for one in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert saved(one, batch()) == expected
        assert_same_step(one, model, batch())
    unpatch_model(ours)
    assert not ours.down._forward_hooks
    assert saved(ours, batch()) == saved(model, batch())


def branch_scaled(net: Any, x: Tensor) -> Tensor:
    found: Tensor = branch(net, x) * net.scale
    return found


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_linears_are_left() -> None:
    """Their gradients need conjugates; a complex output may have a real scale."""
    torch.manual_seed(0)
    twin = Scaled(lambda net, x: net.down(net.up(x)) * net.scale)
    for linear in (twin.enter, twin.leave, twin.up, twin.down):
        linear.to(torch.complex64)
    model = copy.deepcopy(twin)
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex64)
    with pytest.warns(UserWarning, match="nothing was patched"):
        patch_model(model, "exact", example_inputs=(x,))
    for net in (model, twin):
        net(x).abs().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)

"""Dataflows that could be patched wrong without an error: outputs and gradients must stay right."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch
from tests.support.configs import FOLD, FOLD_AND_SHARE, SHARE
from tests.support.judge import assert_close, assert_same_outputs
from tests.support.models import randomise
from tests.support.toys import CustomLinear, Toy, assert_same_steps, batch, gated, mlp, patched_twin


def strategies(model: Any) -> dict[str, str]:
    return {site.name: site.strategy for site in patch_report(model).sites}


def norm_twice(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(net.gate(net.norm(x))) * net.up(net.norm(x + 1)))


def fed_by_something_else(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(net.up(net.norm(x))) + net.up(x))


def weight_used_functionally(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(net.up(net.norm(x))) + net.up.weight.mean())


def flipped(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(net.up(net.norm(x).flip(0, -1))))


def bits_reread(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x)
    bits = torch.int32 if h.dtype == torch.float32 else torch.int64
    return net.down(net.act(net.up(h))) + h.view(bits).view(h.dtype)


def rows_dropped_and_joined(net: Any, x: Tensor) -> Tensor:
    first, second = net.norm(x).chunk(2, dim=1)
    return net.down(net.act(net.up(torch.cat([second, first], dim=1))))


def act_read_twice(net: Any, x: Tensor) -> Tensor:
    h = net.act(net.up(net.norm(x)))
    return net.down(torch.stack([h, h]).sum(0) + F.relu(h) * (h > 0.1))


def written_in_place(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x)
    h += 1.0
    a = net.act(net.up(h))
    a[..., 0] = 0.0
    return net.down(a)


def no_grad_teacher(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x)
    with torch.no_grad():
        target = net.up(h)
    return net.down(net.act(net.up(h)) - target)


def no_grad_reader_of_activation(net: Any, x: Tensor) -> Tensor:
    a = net.act(net.up(net.norm(x)))
    with torch.no_grad():
        target = net.down(a)
    return net.down(a) - target


def reentrant_linear(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(checkpoint(net.up, net.norm(x), use_reentrant=True)))


def reentrant_reader(net: Any, x: Tensor) -> Tensor:
    return checkpoint(net.down, net.act(net.up(net.norm(x))), use_reentrant=True)


def sunk_through_windows(net: Any, x: Tensor) -> Tensor:
    h = torch.roll(net.norm(x), 1, 1).view(2, 3, 2, 8).transpose(1, 2).reshape(4, 3, 8)
    return net.down(net.act(net.up(h))).reshape(2, 2, 3, 8).transpose(1, 2).reshape(2, 6, 8)


def mixed_autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = net.norm(x)
    return net.down(net.act(net.up(h)))


def masked(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(net.up(net.norm(x).masked_fill(x > 0.5, 0.0))))


BODIES = [
    mlp, gated, norm_twice, fed_by_something_else, weight_used_functionally, flipped, bits_reread,
    rows_dropped_and_joined, act_read_twice, written_in_place, no_grad_teacher, no_grad_reader_of_activation,
    reentrant_linear,
    reentrant_reader, sunk_through_windows, mixed_autocast, masked,
]  # fmt: skip


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_dataflow_keeps_function_and_gradients(body: Any, config: Any) -> None:
    assert_same_steps(*patched_twin(Toy(body), config))


@pytest.mark.parametrize(
    "config", [*FOLD_AND_SHARE, "auto", "paper"], ids=["fold", "share", "auto", "paper"]
)
@pytest.mark.parametrize("body", [mlp, gated], ids=["mlp", "gated"])
def test_custom_autograd_function_reads_tensors(body: Any, config: Any) -> None:
    patched, twin, original = patched_twin(Toy(body, CustomLinear), config)
    assert strategies(patched)["norm"] != "fold"
    if config in FOLD_AND_SHARE:
        assert_same_steps(patched, twin, original)


class Kernel(torch.autograd.Function):
    """Reads memory by its address, as a compiled extension does: no torch op ever sees the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            raise RuntimeError("a kernel needs data")
        number = ctypes.c_float if x.dtype == torch.float32 else ctypes.c_double
        values = (number * x.numel()).from_address(
            x.untyped_storage().data_ptr()  # which the trace does not see
        )
        return torch.tensor(list(values), dtype=x.dtype).reshape(2, 6, 8) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_custom_function_without_torch_ops_is_found_in_the_graph() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        return net.down(net.act(net.up(h))) + Kernel.apply(h)

    patched, twin, original = patched_twin(Toy(body), FOLD)
    norm = patch_report(patched).sites[0]
    assert norm.strategy == "share"
    assert "KernelBackward" in norm.reason
    assert_same_steps(patched, twin, original)


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("needs_data", [False, True])
def test_a_scripted_reader_is_shared_with(needs_data: bool, config: Any) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        if needs_data and x.sum().item() == 0:
            return x
        h = net.norm(x)
        return net.down(net.act(net.up(h)) + net.scripted(h))

    net = Toy(body)
    net.scripted = torch.jit.script(nn.Linear(8, 16).requires_grad_(False))
    patched, twin, original = patched_twin(net, config)
    assert strategies(patched)["norm"] == "share"
    assert_same_steps(patched, twin, original)


def test_memory_shared_with_an_untraced_module_is_not_folded() -> None:
    net = Toy(mlp)
    net.other = nn.Linear(8, 16)
    net.other.weight = nn.Parameter(net.up.weight.detach())
    randomise(net)
    before = net.other(batch())
    patch_model(net, FOLD, example_inputs=batch())
    assert "shares its memory with other.weight" in patch_report(net).sites[0].reason
    assert torch.equal(net.other(batch()), before)


def test_zeros_that_only_other_sizes_pad() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h, size = net.norm(x), x.shape[1]
        if size % 4:
            h = F.pad(h, (0, 0, 0, 4 - size % 4))
        h = h.view(2, 2, -1, 8).transpose(1, 2).contiguous()
        h = net.up(h)
        h = net.down(net.act(h + h.mean(2, keepdim=True)))
        return h.transpose(1, 2).reshape(2, -1, 8)[:, :size]

    net = randomise(Toy(body))
    fits, pads = batch()[:, :4], batch()
    before = copy.deepcopy(net)
    patch_model(net, FOLD, example_inputs=fits)
    assert strategies(net)["norm"] == "share"
    for x in (fits, pads):
        assert_same_outputs(net, before, x)


@dataclasses.dataclass
class Output:
    logits: Tensor
    features: Tensor


def test_output_in_a_dataclass_is_not_folded() -> None:
    class Features(Toy):
        def forward(self, x: Tensor) -> Any:
            h = self.norm(self.enter(x))
            return Output(self.leave(self.last(self.down(self.act(self.up(h))))), h)

    net = randomise(Features(mlp)).double()
    x = batch().double()
    before = net(x).features
    patch_model(net, FOLD, example_inputs=x)
    assert_close(net(x).features, before, "features")


def test_output_left_on_an_attribute_is_not_folded() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        net.features = net.norm(x)
        return net.down(net.act(net.up(net.features)))

    net, x = randomise(Toy(body)).double(), batch().double()
    net(x)
    before = net.features.detach()
    net.features = None  # a graph cannot be copied
    patch_model(net, FOLD, example_inputs=x)
    net(x)
    assert_close(net.features, before, "features")


def test_table_that_a_forward_left_on_a_graph() -> None:
    """LeViT keeps its biases of an evaluation: tensors with a graph cannot be copied for a trace."""

    def body(net: Any, x: Tensor) -> Tensor:
        if not hasattr(net, "tables"):
            net.tables = {"bias": net.down.weight.sum(0)}
        return net.down(net.act(net.up(net.norm(x)) + net.tables["bias"].detach()))

    net = Toy(body)
    net(batch())
    assert net.tables["bias"].grad_fn is not None
    report = plan_patch(net, FOLD, example_inputs=batch())
    assert {site.name: site.strategy for site in report.sites}["norm"] == "fold"
    assert net.tables["bias"].grad_fn is not None


def test_hooked_norm_is_not_folded() -> None:
    net, x = randomise(Toy(mlp)).double(), batch().double()
    seen: list[Tensor] = []
    net.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    net(x)
    before = seen[-1]
    patch_model(net, FOLD, example_inputs=x)
    assert strategies(net)["norm"] == "share"
    net(x)
    assert_close(seen[-1] * 1, before * 1, "norm")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda net: net.up.weight.requires_grad_(False),
            "weight trains, and up.weight into which",
        ),
        (lambda net: net.up.bias.requires_grad_(False), "bias trains, and up.bias into which"),
        (lambda net: net.up.register_parameter("bias", None), "bias trains, and up has none into"),
    ],
    ids=["frozen weight", "frozen bias", "no bias"],
)
def test_training_is_never_folded_away(change: Any, reason: str) -> None:
    net = Toy(mlp)
    change(net)
    patched, twin, original = patched_twin(net, FOLD)
    sites = {site.name: site for site in patch_report(patched).sites}
    assert sites["norm"].strategy == "share" and reason in sites["norm"].reason
    assert patched.norm.weight.requires_grad
    assert_same_steps(patched, twin, original)


def test_frozen_norm_folds_into_what_trains() -> None:
    net = Toy(mlp)
    net.norm.requires_grad_(False)
    patched, twin, original = patched_twin(net, FOLD)
    assert strategies(patched)["norm"] == "fold"
    assert_same_steps(patched, twin, original)


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
def test_modules_shared_between_parents_are_patched_once(config: Any) -> None:
    net = Toy(gated)
    net.shared = nn.ModuleList([net.norm, net.act])

    def body(net: Any, x: Tensor) -> Tensor:
        return net.down(net.shared[1](net.up(net.shared[0](x)))) + net.down(
            net.act(net.up(net.norm(2 * x)))
        )

    net.body = body
    patched, twin, original = patched_twin(net, config)
    assert patched.shared[0] is patched.norm
    assert patched.shared[1] is patched.act
    assert_same_steps(patched, twin, original)


@pytest.mark.parametrize("shape", [(0, 6, 8), (1, 6, 8), (1, 1, 8), (6, 8)], ids=str)
def test_batches_of_other_sizes_are_right(shape: tuple[int, ...]) -> None:
    for config in FOLD_AND_SHARE:
        patched, twin, original = patched_twin(Toy(gated), config)
        assert_same_steps(patched, twin, original, [torch.randn(shape)])


def test_input_that_needs_no_gradient() -> None:
    for config in FOLD_AND_SHARE:
        net = Toy(gated)
        net.enter.requires_grad_(False)
        assert_same_steps(*patched_twin(net, config))


@pytest.mark.parametrize("trains", [True, False])
def test_gamma_of_zero_keeps_its_gradient(trains: bool) -> None:
    def zero(net: Any) -> None:
        with torch.no_grad():
            net.norm.weight[0] = 0.0

    net = Toy(mlp)
    net.norm.weight.requires_grad_(trains)
    patched, twin, _ = patched_twin(net, SHARE, zero)
    assert strategies(patched)["norm"] == "share"
    assert_same_steps(patched, twin, twin)
    net = randomise(Toy(mlp))
    net.norm.weight.requires_grad_(trains)
    zero(net)
    before = copy.deepcopy(net)
    assert_same_steps(patch_model(net, SHARE, example_inputs=batch()), before, before)

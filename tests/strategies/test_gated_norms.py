"""Gated norms: what they save, and that they compute the same."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes, unpatch_model
from lowmem_patch.config import load_config
from lowmem_patch.nn.gated_norms import GatedMSRMSNorm
from tests.support.judge import assert_accurate, assert_equal, assert_same_step
from tests.support.models import randomise
from tests.support.step import AUTOCAST, MODES, Mode, cast, in_mode, step, truth_of, warned

ROWS, WIDTH, GROUPS = 6, 16, 2


class NormThenGate(nn.Module):
    """As of Qwen3.5, Kimi Linear."""

    act: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        x = self.weight * x.to(dtype) * self.act(gate.float())
        return x.to(dtype)


class Sigmoid(NormThenGate):
    act = staticmethod(torch.sigmoid)


class GateThenNorm(NormThenGate):
    """As of Mamba 2."""

    def __init__(self, width: int = WIDTH, groups: int = 1) -> None:
        super().__init__(width)
        self.group_size = width // groups

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        dtype = hidden_states.dtype
        x = hidden_states.float()
        if gate is not None:
            x = x * F.silu(gate.float())
        split = x.view(*x.shape[:-1], -1, self.group_size)
        split = split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * split.view(x.shape).to(dtype)


class NumberOfGroups(nn.Module):
    """As of Falcon-H1, which tells the number of groups and not their size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.variance_epsilon, self.n_groups = 1e-5, GROUPS

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        x = (hidden_states * F.silu(gate.float())).float()
        split = x.view(*x.shape[:-1], self.n_groups, -1)
        split = split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.view(self.n_groups, -1) * split).view(x.shape).to(dtype)


Use = Callable[[Any, Tensor], Tensor]


def plainly(net: Any, x: Tensor) -> Tensor:
    found: Tensor = net.out(net.norm(net.x(x), net.z(x)))
    return found


class Net(nn.Module):
    """Two Linears, a gated norm of what they give, and a Linear behind it, as ``use`` calls them."""

    def __init__(self, norm: nn.Module, use: Use = plainly) -> None:
        super().__init__()
        self.x, self.z, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), norm
        self.out = nn.Linear(WIDTH, 4)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


# the tensors of full width that are saved, and the numbers of each row
NORMS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "norm, silu": (NormThenGate, 3, 1),
    "norm, sigmoid": (Sigmoid, 3, 1),
    "silu, norm": (GateThenNorm, 3, 0),
    "silu, norm of groups": (lambda: GateThenNorm(groups=GROUPS), 3, 0),
    "silu, norm of a number of groups": (NumberOfGroups, 3, 0),
}


def made(name: str = "norm, silu") -> Any:
    torch.manual_seed(0)
    model = Net(NORMS[name][0]())
    randomise(model)
    return model.train()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def patched(model: Any, x: Any = None, config: Any = "exact") -> Any:
    with warned():
        return patch_model(copy.deepcopy(model), config, example_inputs=batch() if x is None else x)


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("name", NORMS)
def test_a_gated_norm_saves_its_two_inputs_or_its_output(name: str, mode: Mode) -> None:
    model = cast(made(name), mode.weights)
    x = in_mode(batch(), mode)
    ours = patched(model, x)
    assert type(ours.norm) is GatedMSRMSNorm
    found, own = (step(one, x, mode, count=True) for one in (ours, model))
    assert_accurate(found, own, truth_of(model, x), mode)
    _, wide, numbers = NORMS[name]
    if mode is AUTOCAST:  # each Linear casts what it reads
        assert found.saved < own.saved
    else:
        assert found.saved == 2 * ROWS * (wide * WIDTH * mode.weights.itemsize + numbers * 4)


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("name", [name for name in NORMS if name.startswith("silu")])
def test_the_floor_counts_its_two_inputs(name: str, mode: Mode) -> None:
    model, x = cast(made(name), mode.weights), in_mode(batch(), mode)
    with torch.autocast("cpu", mode.autocast, enabled=mode.autocast is not None):
        report = patch_report(patched(model, x))
    # under autocast each of two Linears casts what both read
    casts = 2 * ROWS * WIDTH * torch.bfloat16.itemsize if mode is AUTOCAST else 0
    assert report.floor == report.saved_after - casts


def test_the_report_names_it_and_its_prediction_is_exact() -> None:
    x = batch()
    ours = patched(made(), x)
    report = patch_report(ours)
    (site,) = (site for site in report.sites if site.name == "norm")
    assert site.strategy == "share"
    assert "their product recomputed" in site.reason
    with saved_bytes(ours) as found:
        ours(x)
    assert report.saved_after == found.activations


class Heads(nn.Module):
    """The end of a layer of linear attention: 32 heads of 128 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.z = nn.Linear(8, 4096), nn.Linear(8, 4096)
        self.norm, self.out = NormThenGate(128), nn.Linear(4096, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = (tensor.reshape(-1, 128) for tensor in (self.x(x), self.z(x)))
        found: Tensor = self.out(self.norm(*heads).reshape(*x.shape[:-1], -1))
        return found


def test_a_layer_of_qwen_saves_what_the_documents_say() -> None:
    with torch.device("meta"):
        model, x = Heads().bfloat16(), torch.empty(2, 2048, 8, dtype=torch.bfloat16)
    plan = plan_patch(model, "exact", example_inputs=(x,))
    own = x.numel() * 2
    assert (plan.saved_before - own) / 2**20 == 288.5
    assert (plan.saved_after - own) / 2**20 == 64.5


QWEN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "use_cache": False,
}  # fmt: skip
BAMBA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "use_cache": False,
}  # fmt: skip


@pytest.mark.parametrize("model_type, sizes", [("qwen3_5_text", QWEN), ("bamba", BAMBA)])
def test_models_of_transformers_compute_the_same(model_type: str, sizes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    randomise(model)
    ids = torch.randint(64, (2, 12))
    ours = patched(model, {"input_ids": ids})
    assert sum(isinstance(module, GatedMSRMSNorm) for module in ours.modules()) == 1
    assert_same_step(ours, model, {"input_ids": ids})


def test_a_kept_norm_is_left_alone() -> None:
    ours = patched(made(), config=dataclasses.replace(load_config("exact"), norms="keep"))
    assert type(ours.norm) is NormThenGate


def by_name(net: Any, x: Tensor) -> Tensor:
    return net.out(net.norm(gate=net.z(x), hidden_states=net.x(x)))


def read_twice(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.x(x), net.z(x))
    return net.out(y) + y[..., :4].square()


def as_heads(net: Any, x: Tensor) -> Tensor:
    heads = (*x.shape[:-1], 2, WIDTH // 2)
    y = net.norm(net.x(x), net.z(x)).view(heads).reshape(x.shape)
    return net.out(y)


def written(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.x(x), net.z(x))
    y.mul_(2)
    return net.out(y)


def written_gate(net: Any, x: Tensor) -> Tensor:
    gate = net.z(x)
    y = net.norm(net.x(x), gate * 1)
    return net.out(y) + gate.mul_(2)[..., :4]


def half_gate(net: Any, x: Tensor) -> Tensor:
    return net.out(net.norm(net.x(x), net.z(x).bfloat16().float()))


def of_constants(net: Any, x: Tensor) -> Tensor:
    return net.out(net.norm(x.detach(), x.detach() + 1))


def under_no_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.norm(net.x(x), net.z(x))
    return net.out(y)


USES = [
    by_name,
    read_twice,
    as_heads,
    written,
    written_gate,
    half_gate,
    of_constants,
    under_no_grad,
]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("use", USES)
def test_every_use_after_the_patch_is_right(use: Use, name: str) -> None:
    model = made(name)
    ours = patched(model)
    for one in (model, ours):
        one.use = use
    assert_same_step(ours, model, batch())


@pytest.mark.parametrize("use", [by_name, read_twice, as_heads, written, half_gate, of_constants])
def test_every_use_that_was_traced_computes_the_same(use: Use) -> None:
    model = made()
    model.use = use
    assert_same_step(patched(model), model, batch())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("gamma", [0.0, 1e-30, -1.0])
def test_any_weight_gives_exact_gradients(gamma: float, name: str) -> None:
    model = made(name)
    with torch.no_grad():
        model.norm.weight[::3] = gamma
    assert_same_step(patched(model), model, batch())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("frozen", ["norm.weight", "x.weight", "z.weight", "out.weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str, name: str) -> None:
    model = made(name)
    model.get_parameter(frozen).requires_grad_(False)
    ours = patched(model)
    assert_same_step(ours, model, batch())
    model, ours = made(name), patched(made(name))
    for one in (model, ours):  # after the patch
        one.get_parameter(frozen).requires_grad_(False)
    with warned():
        assert_same_step(ours, model, batch())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_computes_the_same(reentrant: bool, name: str) -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(plainly, net, x, use_reentrant=reentrant)
        return found

    model = made(name)
    ours = patched(model)
    truth = truth_of(model, batch())
    for one in (model, ours):
        one.use = use
    x = batch().requires_grad_(reentrant)  # which needs an input with a gradient
    found, own = (step(one, x) for one in (ours, model))
    found.gradients.pop("input.0", None)
    assert_accurate(found, own, truth)


# torch's compiler, of a function of autograd
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", NORMS)
def test_compiled_computes_the_same(name: str) -> None:
    model = made(name)
    torch._dynamo.reset()
    net: Any = torch.compile(patched(model), backend="aot_eager_decomp_partition", fullgraph=True)
    assert_same_step(net, model, batch())


@pytest.mark.parametrize("name", NORMS)
def test_copies_state_and_undo(name: str) -> None:
    model = made(name)
    ours = patched(model)
    assert ours.state_dict().keys() == model.state_dict().keys()
    for one in (copy.deepcopy(ours), pickle.loads(pickle.dumps(patched(made(name))))):
        assert_same_step(one, model, batch())
    ours.norm.variance_epsilon = model.norm.variance_epsilon = 0.5
    assert_same_step(ours, model, batch())
    unpatch_model(ours)
    assert type(ours.norm) is type(model.norm)
    assert_equal(step(ours, batch()), step(model, batch()))


@pytest.mark.parametrize("name", NORMS)
def test_hooks_see_what_they_saw(name: str) -> None:
    model, seen = made(name), []
    ours = patched(model)
    for one in (model, ours):
        one.norm.register_forward_hook(lambda _m, _args, y: seen.append(y.detach() * 1))
        one.norm.register_full_backward_hook(lambda _m, _dx, dy: seen.append(dy[0]))
        one(batch()).sum().backward()
    assert len(seen) == 4
    for own, found in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(found, own)  # float32's own tolerances


@pytest.mark.parametrize("name", NORMS)
def test_compact_saves_fewer_bytes_and_near_gradients(name: str) -> None:
    model, x = made(name), batch()
    stored, exact = (patched(model, x, preset) for preset in ("compact", "exact"))
    found, own = (step(one, x, count=True) for one in (stored, exact))
    assert found.saved < own.saved
    assert torch.equal(found.output, own.output)
    for parameter, gradient in own.gradients.items():
        near = torch.cosine_similarity(found.gradients[parameter].ravel(), gradient.ravel(), dim=0)
        assert near > 0.999  # as of 8 bits


def test_evaluation_computes_the_same() -> None:
    for name in NORMS:
        model = made(name).eval()
        ours = patched(model)
        with torch.no_grad():
            torch.testing.assert_close(ours(batch()), model(batch()))  # float32's own tolerances

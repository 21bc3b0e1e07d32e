"""DTensors where a plain tensor is expected, and models that came sharded: one process is a mesh of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from lowmem_patch import patch_model, patch_report, plan_patch, unpatch_model
from lowmem_patch.errors import TraceError
from lowmem_patch.functional import (
    LowRank,
    NormSettings,
    activation,
    activation_linear,
    codes_activation,
    ms_norm,
    recast_linear,
    recast_matmul,
)
from lowmem_patch.nn.activations import PackedDropout
from tests.support.judge import BAND, assert_close
from tests.support.models import llama, randomise, tokens
from tests.support.step import FP32

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning",
    "ignore:DTensor random operators:UserWarning",
)

NARROW = torch.bfloat16


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def with_adapter(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return recast_linear(x, weight, None, x.dtype, LowRank(down, up, 0.5))


def gated(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    hidden = (F.silu(gate) * up).detach()
    return activation_linear(hidden, (gate, up), weight, bias, "silu", hidden.dtype)


# what the op is, and what torch computes for the same
OPS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "activation": ([(3, 8)], lambda x: activation(x, "quick_gelu"), lambda x: x * (1.702 * x).sigmoid()),
    "codes": ([(3, 8)], lambda x: codes_activation(x, "gelu"), F.gelu),
    "glu": ([(3, 8)] * 2, lambda g, u: activation(g, "silu", u), lambda g, u: F.silu(g) * u),
    "layer norm": (
        [(3, 8), (8,), (8,)],
        lambda x, w, b: ms_norm(x, w, b, NormSettings(1e-5))[0],
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
    ),
    "rms norm": (
        [(3, 8), (8,)],
        lambda x, w: ms_norm(x, w, None, NormSettings(1e-5, 1.0, centered=False))[0],
        lambda x, w: F.rms_norm(x, (8,), 1 + w, 1e-5),
    ),
    "norm with a copy": (
        [(3, 8), (8,)],
        lambda x, w: ms_norm(x, w, None, NormSettings(1e-5, centered=False), copy_dtype=NARROW)[0],
        lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
    ),
    "linear with an adapter": (
        [(3, 8), (5, 8), (2, 8), (5, 2)],
        with_adapter,
        lambda x, w, a, b: x @ w.T + 0.5 * (x @ a.T @ b.T),
    ),
    "linear behind a gate": (
        [(3, 8), (3, 8), (5, 8), (5,)],
        gated,
        lambda g, u, w, b: F.linear(F.silu(g) * u, w, b),
    ),
    "matmul": (
        [(2, 3, 8), (2, 8, 5)],
        lambda x, y: recast_matmul(x, y, torch.float64),
        lambda x, y: x @ y,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ops_take_dtensors(mesh: DeviceMesh, name: str) -> None:
    shapes, op, plain = OPS[name]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sharded = [distribute_tensor(t.detach(), mesh, [Replicate()]).requires_grad_() for t in given]
    wanted, found = plain(*given), op(*sharded)
    assert isinstance(found, DTensor)
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * weight).sum().backward()
    (found * distribute_tensor(weight, mesh, [Replicate()])).sum().backward()
    torch.testing.assert_close(found.full_tensor(), wanted)
    for ours, theirs in zip(sharded, given, strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_packed_dropout_takes_dtensors(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(64), mesh, [Replicate()]).requires_grad_()
    found = []
    for dropout in (PackedDropout(0.5), nn.Dropout(0.5)):
        torch.manual_seed(3)
        y = dropout(x)
        assert isinstance(y, DTensor)
        found.append(y.full_tensor())
    assert torch.equal(*found) and bool((found[0] == 0).any())


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """DTensors in the place of q_proj's weights, and their forward beside, as transformers shards a model."""

    def install(module: nn.Linear) -> None:
        def forward(x: Tensor) -> Tensor:
            whole = DTensor.from_local(x, mesh, [Replicate()])
            y: Any = F.linear(whole, module.weight)
            local: Tensor = y.to_local()
            return local

        weight = distribute_tensor(module.weight.detach(), mesh, [Replicate()])
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        module.forward = forward  # type: ignore[method-assign]

    for name, module in model.named_modules():
        if name.endswith(("q_proj", "q_proj.base_layer")) and isinstance(module, nn.Linear):
            install(module)
    return model


def test_what_came_sharded_is_planned_as_the_whole(mesh: DeviceMesh) -> None:
    model = randomise(llama())
    inputs = tokens().kwargs
    whole = plan_patch(model, "exact", example_inputs=inputs)
    report = patch_report(patch_model(shard(model, mesh), "exact", example_inputs=inputs))
    strategies = [[(s.name, s.strategy) for s in found.sites] for found in (report, whole)]
    assert strategies[0] == strategies[1]
    assert report.saved_before == whole.saved_before
    assert report.saved_after == whole.saved_after
    assert any("came sharded" in note for note in report.notes)
    assert not any("came sharded" in note for note in whole.notes)


def test_what_trains_and_checkpointing_reach_the_plan(mesh: DeviceMesh) -> None:
    model = randomise(llama()).bfloat16().requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    whole = plan_patch(model, "exact", example_inputs=tokens())
    report = plan_patch(shard(model, mesh), "exact", example_inputs=tokens())
    for plan in (whole, report):
        assert any("activation checkpointing is on" in note for note in plan.notes)
    assert (report.saved_before, report.saved_after) == (whole.saved_before, whole.saved_after)


def test_adapters_of_a_model_that_came_sharded(mesh: DeviceMesh) -> None:
    config = peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"])
    model = peft.get_peft_model(randomise(llama()), config)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    model.set_adapter("other")
    whole = plan_patch(model, "exact", example_inputs=tokens())
    report = plan_patch(shard(model, mesh), "exact", example_inputs=tokens())
    assert (report.saved_before, report.saved_after) == (whole.saved_before, whole.saved_after)


def test_a_module_with_a_forward_of_its_own_stays(mesh: DeviceMesh) -> None:
    # transformers sums the gradients of Qwen3's q_norm in such a forward
    config = transformers.Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, vocab_size=50,
    )  # fmt: skip
    model = shard(transformers.Qwen3ForCausalLM(config), mesh)
    norm = model.model.layers[0].self_attn.q_norm
    own = norm.forward
    norm.forward = lambda x: own(x)
    patch_model(model, "exact", example_inputs=tokens())
    assert model.model.layers[0].self_attn.q_norm is norm
    reasons = {site.name: site.reason for site in patch_report(model).sites}
    assert reasons["model.layers.0.self_attn.q_norm"] == "its forward is overridden on the instance"
    assert model.model.norm is not norm and "sharded" not in reasons["model.norm"]
    unpatch_model(model)


def test_norms_whose_weights_are_dtensors_are_shared(mesh: DeviceMesh) -> None:
    model = randomise(llama().double())
    model.set_attn_implementation("eager")  # torch shards no other attention on a CPU
    distribute_module(model, mesh)
    ids = distribute_tensor(tokens().kwargs["input_ids"], mesh, [Replicate()])
    found = []
    for patched in (False, True):
        if patched:
            patch_model(model, "exact", example_inputs=ids.full_tensor())
            assert {s.strategy for s in patch_report(model).sites if "norm" in s.name} == {"share"}
        with implicit_replication():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        found.append([loss.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())])
        model.zero_grad()
    for ours, theirs in zip(*found, strict=True):
        # LLaMA's RMSNorm computes in float32, whatever the dtype
        assert_close(ours, theirs, "step", BAND * FP32.eps)


def test_no_weight_folds_into_a_sharded_one(mesh: DeviceMesh) -> None:
    report = plan_patch(shard(randomise(llama()), mesh), {"norms": "fold"}, example_inputs=tokens())
    reasons = {site.name: site.reason for site in report.sites}
    assert "q_proj is sharded" in reasons["model.layers.0.input_layernorm"]


def test_surgery_on_what_came_sharded_is_refused(mesh: DeviceMesh) -> None:
    model = shard(randomise(llama()), mesh)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    before = copy.copy(list(model.modules()))
    with pytest.raises(TraceError, match=r"layers\.1\.mlp\.act_fn is GELU.*before sharding"):
        patch_model(model, "exact")
    assert list(model.modules()) == before


def test_what_came_sharded_without_a_config_is_refused(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    weight = distribute_tensor(model[1].weight.detach(), mesh, [Replicate()])
    model[1].weight = nn.Parameter(weight)
    with pytest.raises(TraceError, match=r"Sequential has no config.*before sharding"):
        patch_model(model, "exact", example_inputs=torch.randn(2, 8))

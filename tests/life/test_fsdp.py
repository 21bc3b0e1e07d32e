"""Norms whose weights or inputs are sharded, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from lowmem_patch import patch_model, patch_report, unpatch_model
from lowmem_patch.errors import PatchError, TraceError
from lowmem_patch.nn.gammas import can_be_checked
from tests.life.test_gamma_checks import Block, rows
from tests.support.judge import BAND, assert_close
from tests.support.models import llama, tokens
from tests.support.step import FP32


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.usefixtures("one_process")
def test_nobody_waits_for_a_gamma_that_fsdp_gathers(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(Block().double())
    twin[0].norm.requires_grad_(not frozen)
    model = patch_model(copy.deepcopy(twin), "exact", example_inputs={"input": rows()})
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    monkeypatch.setattr("lowmem_patch.nn.norms.check_gammas", _refuse)
    for _ in range(3):
        for one in (model, twin):
            one.zero_grad()
            one(rows()).square().sum().backward()
        for name, parameter in twin.named_parameters():
            if parameter.grad is not None:
                sharded: Any = model.get_parameter(name).grad
                assert_close(sharded.full_tensor(), parameter.grad, name, 1e-9)


@pytest.mark.parametrize("preset", ["exact", "compact"])
@pytest.mark.usefixtures("one_process")
def test_linears_behind_a_group_outlive_its_gamma_under_fsdp(preset: str) -> None:
    """A norm ends the group, as in BERT: gamma is free when the Linear behind it runs backward."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 128), nn.LayerNorm(128))
    twin = nn.Sequential(block, nn.Linear(128, 8), nn.Tanh())
    x = torch.randn(4, 8)
    model = patch_model(copy.deepcopy(twin), preset, example_inputs=(x,))
    mesh = init_device_mesh("cpu", (1,))
    for group in (model[0], model):
        fully_shard(group, mesh=mesh)
    for one in (model, twin):
        one(x).square().sum().backward()
    for name, parameter in twin.named_parameters():
        sharded: Any = model.get_parameter(name).grad
        assert parameter.grad is not None
        tolerance = 1e-5 if preset == "exact" else 0.02
        assert_close(sharded.full_tensor(), parameter.grad, name, tolerance)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda channels: nn.GroupNorm(2, channels)])
@pytest.mark.usefixtures("one_process")
def test_convolutions_outlive_the_weights_of_a_norm_of_another_group(norm: Any) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.SiLU(), nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 2, 1),
    ).double()  # fmt: skip
    x = torch.randn(2, 3, 9, 9).double()
    model = patch_model(copy.deepcopy(twin), "exact", example_inputs=(x,))
    mesh = init_device_mesh("cpu", (1,))
    for group in (*(one for one in model if list(one.parameters())), model):
        fully_shard(group, mesh=mesh)
    for _ in range(2):
        for one in (model, twin):
            one.zero_grad()
            one(x).square().sum().backward()
    for name, parameter in twin.named_parameters():
        sharded: Any = model.get_parameter(name).grad
        assert parameter.grad is not None
        assert_close(sharded.full_tensor(), parameter.grad, name)


@pytest.mark.usefixtures("one_process")
def test_a_model_sharded_since_is_not_unpatched() -> None:
    model = patch_model(nn.Sequential(Block()), "exact", example_inputs={"input": rows().float()})
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PatchError, match="load them into an unpatched model"):
        unpatch_model(model)
    with pytest.raises(TraceError, match=r"sharded by FSDP2 \(fully_shard\) already"):
        patch_model(model, "auto", example_inputs={"input": rows().float()})
    assert patch_report(model).config.name == "exact"
    model(rows().float()).sum().backward()
    assert model[0].norm.weight.grad is not None


@pytest.mark.usefixtures("one_process")
def test_activations_of_a_model_sharded_since_are_unpatched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    patch_model(model, "exact", example_inputs={"input": rows().float()})
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    unpatch_model(model)
    model(rows().float()).sum().backward()
    assert type(model[1]) is nn.GELU and model[0].weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("preset", ["exact", "compact"])
@pytest.mark.usefixtures("one_process")
def test_compiled_norms_of_sequence_shards_are_as_eager_ones(preset: str) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.Linear(128, 8))
    x = torch.randn(2, 8, 128)
    model = patch_model(copy.deepcopy(twin), preset, example_inputs=(x,))
    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    model[0].register_forward_hook(lambda module, args, output: output.full_tensor())
    for one in (torch.compile(model, backend="aot_eager_decomp_partition"), twin):
        one(x).square().sum().backward()
    for name, parameter in twin.named_parameters():
        ours: Any = model.get_parameter(name).grad
        assert parameter.grad is not None
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert_close(ours, parameter.grad, name, 1e-5 if preset == "exact" else 0.02)


def test_parts_of_gamma_and_beta_tell_nothing() -> None:
    """As FSDP1 has them between its forwards, with a border anywhere."""
    assert can_be_checked(torch.ones(8), torch.ones(8))
    assert not can_be_checked(torch.ones(8), torch.ones(5))


def _refuse(norms: Any) -> None:
    raise AssertionError("the host waited for gamma")


@pytest.mark.filterwarnings("ignore:.*FSDP is switching to use")  # one process shards nothing
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*has both parameters with requires_grad:UserWarning")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("trains", ["full", "lora"])
@pytest.mark.usefixtures("one_process")
def test_fsdp1_trains_a_patched_model(trains: str, checkpointed: bool) -> None:
    """FSDP1 sets a hook on all that the model returns, when the loss has read the logits already. Where a
    block runs again, it has its weights as attributes."""
    twin: Any = llama()
    layer = type(twin.model.layers[0])
    if trains == "lora":
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        twin = get_peft_model(twin, config)
    if checkpointed:
        twin.gradient_checkpointing_enable({"use_reentrant": False})
        twin.enable_input_require_grads()
    model = patch_model(copy.deepcopy(twin), "exact")
    ids = tokens().kwargs["input_ids"]
    losses = []
    for one in (twin, model):
        sharded = FullyShardedDataParallel(
            one,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({layer}),
        )
        trained = [p for p in sharded.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(2):
            loss = sharded(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sharded(input_ids=ids, labels=ids).loss.detach())
    assert_close(losses[1], losses[0], "loss", BAND * FP32.eps)
    with pytest.raises(PatchError, match=r"FSDP .* wraps LlamaDecoderLayer in .*layers\.0 already"):
        patch_model(model, "exact")

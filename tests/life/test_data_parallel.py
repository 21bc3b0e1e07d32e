"""nn.DataParallel's replicas of a patched model, made as it makes them, without its devices."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lowmem_patch import patch_model
from tests.support.judge import assert_rounded
from tests.support.models import FAMILIES, build, randomise
from tests.support.step import StayInFloat64, Step, tensors_of

# of transformers 5.23, which PEFT asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

REPLICATE: Any = importlib.import_module("torch.nn.parallel.replicate")


def replicas(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two, whose tensors are not the model's, but lead gradients there."""

    def copies(tensors: list[Tensor], devices: list[int], detach: bool = False) -> Any:
        return [[(t.detach() if detach else t) * 1 for t in tensors] for _ in devices]

    monkeypatch.setattr(REPLICATE, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(REPLICATE, "_get_device_index", lambda device, _optional: device)
    found: list[Any] = REPLICATE.replicate(model, [0, 1])
    return found


def steps(model: Any, replicas: list[Any], inputs: dict[str, Tensor]) -> Step:
    """The outputs of all replicas, and the gradients that they lead to the model."""
    model.zero_grad()
    outputs = [tensors_of(replica(**inputs))[0] for replica in replicas]
    for output in outputs:
        output.square().mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step([output.detach() for output in outputs], found)


@pytest.mark.parametrize("preset", ["auto", "exact", "paper"])
@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "timm-vit", "bert"])
def test_replicas_compute_with_their_own_weights(
    name: str, adapts: bool, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.inputs()
    if adapts:
        config = LoraConfig(r=4, target_modules=family.linears)
        model = randomise(get_peft_model(model, config))
    model = model.double().eval()  # without dropout
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    twin = copy.deepcopy(model)
    patch_model(model, preset, example_inputs=inputs)
    with StayInFloat64():
        wanted = steps(model, [model, model], inputs)
        found = steps(model, replicas(model, monkeypatch), inputs)
        assert_rounded(found, wanted)
        if preset == "exact":
            assert_rounded(found, steps(twin, [twin, twin], inputs))


def test_a_replica_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is changed in the replica alone changes what the replica computes."""
    family = FAMILIES["llama"]
    model = randomise(get_peft_model(build(family), LoraConfig(r=4, target_modules=family.linears)))
    inputs = family.inputs()
    patch_model(model.eval(), "exact", example_inputs=inputs)
    first, second = replicas(model, monkeypatch)
    for name, module in second.named_modules():
        if name.endswith("q_proj.base_layer"):
            module.__dict__["weight"] = module.__dict__["weight"] * 3
    wanted, one, two = (m(**inputs)[0] for m in (model, first, second))
    assert torch.equal(one, wanted)
    assert (two - wanted).abs().max() > 0.01

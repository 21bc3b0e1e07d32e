"""A patched module that reads what another one defers: it must take the value, with its gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch import patch_model, patch_report
from lowmem_patch.functional import NormSettings, activation, ms_norm
from lowmem_patch.nn.deferred_ops import Activation
from tests.support.chained import CHAINS
from tests.support.configs import FOLD_AND_SHARE, SHARE
from tests.support.judge import assert_same_step
from tests.support.toys import Toy, assert_same_steps, batch, patched_twin


class Chained(Toy):
    """With a norm and a second activation of the inner width (EVA-02 and BitNet norm the product)."""

    def __init__(self, body: Any, norm: type[nn.Module]) -> None:
        super().__init__(body)
        self.inner = norm(16)
        self.second = nn.SiLU()


BODIES = {
    "activation, norm": lambda net, x: net.down(net.inner(net.act(net.up(net.norm(x))))),
    "product, norm": lambda net, x: net.down(
        net.inner(net.act(net.gate(net.norm(x))) * net.up(net.norm(x)))
    ),
    "activation, norm, view": lambda net, x: net.down(
        net.inner(net.act(net.up(net.norm(x)))).flatten(0, 1).view(*x.shape[:-1], 16)
    ),
    "activation, activation": lambda net, x: net.down(net.second(net.act(net.up(net.norm(x))))),
    "norm, activation": lambda net, x: net.down(net.act(net.inner(net.up(x)))),
}


@pytest.mark.parametrize("config", FOLD_AND_SHARE, ids=["fold", "share"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_patched_reader_of_a_deferred_value_is_right(
    body: Any, norm: type[nn.Module], config: Any
) -> None:
    assert_same_steps(*patched_twin(Chained(body, norm), config))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_chain_of_frozen_weights_is_right(body: Any) -> None:
    def freeze(net: Any) -> None:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.startswith("enter"))

    net = Chained(body, nn.LayerNorm)
    freeze(net)
    patched, twin, _ = patched_twin(net, SHARE, freeze)
    assert_same_step(patched, twin, batch())
    assert patch_report(patched).sites


def test_ops_read_the_values_of_a_deferred_tensor() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    ones = torch.ones(8, requires_grad=True)
    calls: list[Any] = [
        lambda h: ms_norm(h, ones, None, NormSettings(1e-5))[0],
        lambda h: activation(h, "quick_gelu"),
        lambda h: ms_norm(h, None, None, NormSettings(1e-5), copy_dtype=torch.bfloat16)[0],
    ]
    for call in calls:
        found = []
        for h in (Activation("gelu").of((x,)), nn.functional.gelu(x)):
            y = call(h)
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, graph: Tensor | None = None) -> Tensor:
        gate = self.gate(x)
        h = torch.sigmoid(1.7 * gate) * gate * (self.up(x) + 1)
        y: Tensor = self.down(h if graph is None else (graph * 0.5) @ h)
        return y


# torch says so of both, once in a process
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["csr", "coo", "jagged"])
def test_functions_of_tensors_without_strides_run_beside_a_chain(kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Gated())
    x = batch()[0]
    patched = patch_model(copy.deepcopy(plain), CHAINS, example_inputs=x)
    found = []
    for model in (patched, plain):
        model.double()
        rows = x.double()
        if kind == "jagged":
            nested = torch.nested.nested_tensor([rows[:2], rows[:5]], layout=torch.jagged)
            model[0](nested).values().square().sum().backward()
        else:
            graph = (torch.eye(6) + torch.eye(6).roll(1, 0)).double()
            graph = graph.to_sparse_csr() if kind == "csr" else graph.to_sparse()
            model[0](rows, graph).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)

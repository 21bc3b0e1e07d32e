"""Small networks whose activations are written as chains of elementwise functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_patch import patch_model, patch_report, plan_patch, saved_bytes
from tests.support.toys import WIDTH, rows

HIDDEN = 2 * WIDTH
FULL = len(rows()) * HIDDEN * 4  # bytes of a tensor in the chain
LINEARS = 3 * len(rows()) * WIDTH * 4  # the inputs of the others
CHAINS = {"norms": "keep", "activations": "recompute"}


class Activation(nn.Module):
    """``formula(self, x)`` with two numbers that train, as xIELU has, and two that do not."""

    def __init__(self, formula: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.positive, self.negative = (
            nn.Parameter(torch.tensor([0.3])),
            nn.Parameter(torch.ones(1)),
        )
        self.beta = nn.Buffer(torch.tensor(0.5))
        self.least = nn.Buffer(torch.tensor(-1e-6))
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


class Block(nn.Module):
    """An activation between two Linears; ``body(self, hidden)`` stands in front of the second."""

    def __init__(self, formula: Any, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.other = nn.Linear(HIDDEN, WIDTH)
        self.act = Activation(formula)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self, self.up(x))


def xielu(net: Any, x: Tensor) -> Tensor:
    positive, negative = F.softplus(net.positive), net.beta + F.softplus(net.negative)
    return torch.where(
        x > 0,
        positive * x * x + net.beta * x,
        (torch.expm1(torch.min(x, net.least)) - x) * negative + net.beta * x,
    )


def clamped(net: Any, x: Tensor) -> Tensor:
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(min=None, max=1.0), up.clamp(min=-1.0, max=1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def wide(net: Any, x: Tensor) -> Tensor:
    """In float32, whatever the dtype of x is."""
    y = x.float()
    return (y * torch.exp(-y.abs()) * net.positive.float() + y).to(x.dtype)


def masked(net: Any, x: Tensor) -> Tensor:
    y = x.tanh() * x - 0.5 * x**2
    return y.masked_fill(x < -0.5, 0.0) / (1 + x.square())


def half(net: Any, x: Tensor) -> Tensor:
    return x[..., :HIDDEN].contiguous()


def of_half(formula: Any) -> Any:
    return lambda net, x: formula(net, half(net, x))


FORMULAS = {
    "xielu": of_half(xielu),
    "clamped": clamped,
    "wide": of_half(wide),
    "masked": of_half(masked),
}
SAVED = {"xielu": 1, "clamped": 2, "wide": 1, "masked": 1}  # tensors of the chain's width


def plain(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(x))


def read_twice(net: Any, x: Tensor) -> Tensor:
    y = net.act(x)
    return net.down(y) + net.other(y)


def read_otherwise(net: Any, x: Tensor) -> Tensor:
    y = net.act(x)
    return net.down(y) + y.exp().sum(-1, keepdim=True) + y.view(-1, HIDDEN).cumsum(0)[:, :1]


def multiplied(net: Any, x: Tensor) -> Tensor:
    return net.down(net.act(x) * x[..., HIDDEN:])


def dropped(net: Any, x: Tensor) -> Tensor:
    return net.down(F.dropout(net.act(x), 0.3, net.training))


def written(net: Any, x: Tensor) -> Tensor:
    y = net.act(x)
    y.mul_(2.0)
    return net.down(y)


def hooked(net: Any, x: Tensor) -> Tensor:
    y = net.act(x)
    y.register_hook(lambda gradient: 3.0 * gradient)
    return net.down(y)


def checkpointed(net: Any, x: Tensor) -> Tensor:
    return checkpoint(plain, net, x, use_reentrant=False)


def checkpointed_reentrant(net: Any, x: Tensor) -> Tensor:
    return checkpoint(plain, net, x, use_reentrant=True)


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.act(x)
    return net.down(net.act(x)) + net.other(y)


BODIES = (
    plain, read_twice, read_otherwise, multiplied, dropped, written, hooked, checkpointed,
    checkpointed_reentrant, without_gradients,
)  # fmt: skip

# a checkpoint holds nothing that is in it
UNPLANNED = (hooked, checkpointed, checkpointed_reentrant)


def network(formula: Any, body: Any = plain) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(formula, body), nn.Linear(WIDTH, 3))


def planned(formula: Any, body: Any = plain, config: Any = None) -> list[str]:
    report = plan_patch(network(formula, body), config or CHAINS, example_inputs=(rows(),))
    return [site.name for site in report.sites if site.kind == "chain"]


def patched(model: Any, config: Any = None) -> Any:
    return patch_model(model, config or CHAINS, example_inputs=(rows(),))


def chains_of(model: Any) -> list[str]:
    return [site.name for site in patch_report(model).sites if site.kind == "chain"]


def saved(model: Any) -> int:
    with saved_bytes(model) as counted:
        output = model(rows())
    assert output.requires_grad
    return counted.activations


def small() -> Any:
    return transformers.ApertusConfig(
        vocab_size=64, hidden_size=16, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(3))}

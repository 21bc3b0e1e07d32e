"""Gated MLPs in the spellings that models have: separate, packed, interleaved, clamped, in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.toy_blocks import WIDTH, TokenModel


class Glu(TokenModel):
    """A gated MLP; subclasses spell the gate."""

    outputs = 48

    def build(self) -> None:
        self.gate_up, self.act, self.down = (
            nn.Linear(WIDTH, self.outputs),
            nn.SiLU(),
            nn.Linear(24, WIDTH),
        )

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.act(gate) * up

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(self.gated(self.gate_up(self.norm(x))))


class PackedGeglu(Glu):
    """GEGLU by the function: the gate is no module, so it is named and left alone."""

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.gelu(gate) * up


class SeparateGlu(Glu):
    """LLaMA's: gate and up are Linears of their own."""

    outputs = 24

    def build(self) -> None:
        super().build()
        self.act = nn.GELU()
        self.up = nn.Linear(WIDTH, 24)

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.act(self.gate_up(y)) * self.up(y))


class SwappedGlu(Glu):
    def gated(self, both: Tensor) -> Tensor:
        up, gate = both.split(24, -1)
        return up * self.act(gate)


class InterleavedGlu(Glu):
    def gated(self, both: Tensor) -> Tensor:
        return self.act(both[..., ::2]) * both[..., 1::2]


class ClampedGlu(Glu):
    """GptOss: clamped, scaled, and 1 added to up."""

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2].clamp(max=0.5), both[..., 1::2].clamp(-0.5, 0.5)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class ClampedModuleGlu(Glu):
    """The activation is a module, and its output is clamped before the product."""

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.act(gate).clamp(max=0.25) * (up + 1)


class SharedInput(Glu):
    """The activation's input lies in memory that the product keeps as well: codes would only add to it."""

    def build(self) -> None:
        super().build()
        self.down = nn.Linear(24, WIDTH)

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return (self.act(gate) + up) * both[..., 24:].tanh() * up


class InPlace(Glu):
    """The activation writes into its input, which is read afterwards by its old name."""

    def build(self) -> None:
        super().build()
        self.act = nn.SiLU(inplace=True)

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        gate = gate * 1.0
        self.act(gate)
        return gate * up


class ReusedGate(Glu):
    """The activation's output is read by the product and by something else."""

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        active = self.act(gate)
        return active * up + active

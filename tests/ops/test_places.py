"""Gradients that take the places of saved tensors: the same bits, fewer bytes, only where nobody reads on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lowmem_patch.constants import ACTIVATION_KINDS
from lowmem_patch.functional import LowRank, activation, activation_linear, activations, linear
from lowmem_patch.functional._implementation import module
from lowmem_patch.functional._ownership import TELLS_HOLDERS
from lowmem_patch.functional.products_backward import linear_backward
from lowmem_patch.nn.deferred_ops import Activation, Projection
from lowmem_patch.nn.stored import project
from tests.ops.conftest import INTERPRETED, Backend, part
from tests.support.live import LiveBytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, IN, WIDTH, OUT = 256, 16, 64, 8
BYTES = ROWS * WIDTH * 4  # of gate, of up, of their product, of each gradient


# of the columns the second takes two programs
@pytest.mark.parametrize(
    ("kind", "gated", "dtype", "columns"),
    part(ACTIVATION_KINDS, [False, True], DTYPES, [24, 1500]),
    ids=str,
)
def test_the_bits_are_the_same(
    backend: Backend, kind: str, gated: bool, dtype: torch.dtype, columns: int
) -> None:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape).to(backend.device, dtype)

    source, up = numbers(3, columns), numbers(3, columns) if gated else None
    weights = numbers(OUT, columns), numbers(2, columns), numbers(OUT, 2)
    rest = (*weights, numbers(3, 2), 0.5, kind, [True] * 5, backend.implementation)
    dy = numbers(3, OUT)
    *wanted, _ = linear_backward(dy, source, up, *rest)  # the last is what is needed meanwhile
    found = linear_backward(dy, source, up, *rest, over=True)
    assert [t.data_ptr() for t in found[: 1 + gated]][:gated] == (
        [] if up is None else [up.data_ptr()]
    )
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_the_bits_of_a_gated_product_are_the_same(backend: Backend, kind: str) -> None:
    dy, gate, up = (torch.randn(3, 1500).to(backend.device) for _ in range(3))
    operations: Any = module(backend.implementation)
    wanted = operations.activation_backward(dy, gate, up, kind)
    found = operations.activation_backward(dy, gate, up, kind, None, (up, gate))
    assert found[0] is up and found[1] is gate
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class Block:
    """x -> a gated MLP whose down_proj is frozen, trains or has an adapter."""

    def __init__(self, down: str, outputs: int = OUT) -> None:
        torch.manual_seed(0)
        self.down = down
        self.gate, self.up = (torch.randn(WIDTH, IN, requires_grad=True) for _ in range(2))
        self.weight = torch.randn(outputs, WIDTH, requires_grad=down == "trained")
        shapes = ((2, WIDTH), (outputs, 2))
        self.adapter = [torch.randn(shape, requires_grad=True) for shape in shapes]
        self.seen: list[Tensor] = []
        self.looks = False

    def parameters(self) -> list[Tensor]:
        extra = {"trained": [self.weight], "adapter": self.adapter, "frozen": []}
        return [self.gate, self.up, *extra[self.down]]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x @ self.gate.t(), x @ self.up.t()
        if self.looks:
            self.seen.append(gate.detach())
        adapter = LowRank(*self.adapter, 0.5) if self.down == "adapter" else None
        h = Activation("silu").of((gate, up))
        y: Tensor = project(h, Projection(self.weight, None, adapter), x.dtype)
        return y


def gradients(block: Block, x: Tensor, again: bool, times: int = 1) -> list[Tensor]:
    inputs = [x, *block.parameters()]
    y = checkpoint(block, x, use_reentrant=False) if again else block(x)
    for left in reversed(range(times)):
        found = torch.autograd.grad(y.square().sum(), inputs, retain_graph=left > 0)
    return list(found)


def input_rows() -> Tensor:
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(3)).requires_grad_()


DOWN = ("adapter", "trained", "frozen")
on_cpu = pytest.mark.skipif(
    INTERPRETED or not TELLS_HOLDERS, reason="of eager torch that tells who holds a tensor"
)


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each backward of a gated product that might overwrite, whether it does."""
    found: list[bool] = []
    for place in (linear, activations):
        known = place.can_be_overwritten

        def noted(*args: Any, known: Any = known) -> bool:
            found.append(known(*args))
            return found[-1]

        monkeypatch.setattr(place, "can_be_overwritten", noted)
    return found


@on_cpu
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("down", DOWN)
def test_a_block_that_runs_again_gives_the_same_bits(
    down: str, times: int, overwritten: list[bool]
) -> None:
    block = Block(down)
    wanted = gradients(block, input_rows(), again=False)
    assert overwritten == []  # autograd holds what it saved
    found = gradients(block, input_rows(), again=True, times=times)
    assert overwritten == [True] * times
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@on_cpu
@pytest.mark.parametrize("down", DOWN)
def test_who_holds_a_tensor_of_the_second_run_keeps_its_values(
    down: str, overwritten: list[bool]
) -> None:
    block = Block(down)
    wanted = gradients(block, input_rows(), again=False)
    block.looks = True
    found = gradients(block, input_rows(), again=True)
    assert overwritten == [False] and len(block.seen) == 2
    assert torch.equal(*block.seen)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@on_cpu
def test_somebody_elses_hooks_inside_of_a_block_keep_their_tensors(overwritten: list[bool]) -> None:
    packed: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    block = Block("adapter")

    def hooked(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return block(x)

    checkpoint(hooked, input_rows(), use_reentrant=False).sum().backward()
    assert packed and overwritten == []


@on_cpu
def test_halves_of_one_tensor_other_strides_and_dtypes_stay(overwritten: list[bool]) -> None:
    weight = torch.randn(OUT, WIDTH, requires_grad=True)

    def halves(x: Tensor) -> Tensor:
        gate, up = torch.cat((x, x), -1).chunk(2, -1)
        return activation_linear(
            activation(gate, "silu", up).detach(), (gate, up), weight, None, "silu", x.dtype
        )

    def turned(x: Tensor) -> Tensor:
        gate, up = ((x * factor).t().contiguous().t() for factor in (2, 3))
        return activation_linear(
            activation(gate, "silu", up).detach(), (gate, up), weight, None, "silu", x.dtype
        )

    def mixed(x: Tensor) -> Tensor:
        hidden = activation(x * 2, "silu", x * 3).detach()
        return activation_linear(hidden, (x * 2, x * 3), weight, None, "silu", torch.bfloat16)

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for function in (halves, turned, mixed):
        checkpoint(function, x, use_reentrant=False).sum().backward()
        found, x.grad = x.grad, None
        function(x).sum().backward()
        assert found is not None and x.grad is not None and torch.equal(found, x.grad)
        x.grad = None
    assert overwritten == [False] * 3


def peak_of_backward(block: Block, again: bool = True) -> int:
    """Bytes of all tensors that are made in a step, at the backward's peak."""
    x = input_rows()
    with LiveBytes() as live:
        loss = (checkpoint(block, x, use_reentrant=False) if again else block(x)).sum()
        live.peak = 0
        loss.backward()
        return live.peak


@on_cpu
@pytest.mark.parametrize("fake", [False, True], ids=["data", "no data"])
@pytest.mark.parametrize("down", DOWN)
def test_three_tensors_of_the_width_are_alive_and_not_five(down: str, fake: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        again, saved = (peak_of_backward(Block(down), again) for again in (True, False))
    assert saved >= 5 * BYTES
    assert 3 * BYTES <= again < 4 * BYTES


@on_cpu
@pytest.mark.parametrize("fake", [False, True], ids=["data", "no data"])
@pytest.mark.parametrize("down", ["adapter", "trained"])
def test_who_counts_bytes_sees_no_second_product_of_the_last_linear(down: str, fake: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        peak = peak_of_backward(Block(down, outputs=32 * WIDTH))
    assert peak < 32 * BYTES  # the product's

"""A model that is compiled after the patch, and whose graph breaks behind a deferred tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_patch import patch_model, saved_bytes
from tests.support.judge import assert_accurate
from tests.support.step import step, truth_of

pytestmark = [
    # what torch's own compiler does to torch
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:nothing was patched:UserWarning"
    ),  # an activation that a sum reads
]
WIDTH = 16
X = torch.linspace(-2, 2, 4 * 6 * WIDTH).view(4, 6, WIDTH).sin()


class Broken(nn.Module):
    """What ``make`` returns leaves a graph, and ``read`` takes it in the next one."""

    def __init__(
        self, make: Callable[[Broken, Tensor], Tensor], read: Callable[[Broken, Tensor], Tensor]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act, self.norm, self.later = nn.GELU(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.make, self.read = make, read

    def forward(self, x: Tensor) -> Tensor:
        y = self.make(self, x)
        torch._dynamo.graph_break()
        return x + self.read(self, y)


MADE: dict[str, Callable[[Broken, Tensor], Tensor]] = {
    "activation": lambda m, x: m.act(m.up(x)),
    "gated": lambda m, x: m.act(m.gate(x)) * m.up(x),
    "gated by a function": lambda m, x: F.silu(m.gate(x)) * m.up(x),
    "norm": lambda m, x: m.norm(x),
}
READ: dict[str, Callable[[Broken, Tensor], Tensor]] = {
    "Linear": lambda m, y: m.down(y),
    "view": lambda m, y: m.down(y.view(-1, WIDTH)).view(y.shape),
    "norm": lambda m, y: m.down(m.later(y)),
    "sum": lambda m, y: m.down(y + 1),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("reads", [("Linear", "norm"), ("sum", "view")], ids=", ".join)
@pytest.mark.parametrize("made", MADE)
def test_the_next_graph_takes_what_left_one(made: str, reads: tuple[str, str]) -> None:
    model = nn.Sequential(*(Broken(MADE[made], READ[read]) for read in reads))
    truth, expected = truth_of(model, (X,)), step(model, (X,))
    patch_model(model, "exact", example_inputs=X)
    compiled = torch.compile(model, backend="aot_eager")
    assert_accurate(step(compiled, (X,)), expected, truth)


@pytest.mark.slow
def test_the_default_backend_takes_it() -> None:
    model = Broken(MADE["activation"], READ["norm"])
    truth, expected = truth_of(model, (X,)), step(model, (X,))
    patch_model(model, "exact", example_inputs=X)
    assert_accurate(step(torch.compile(model), (X,)), expected, truth)


def test_what_leaves_a_graph_is_an_ordinary_tensor() -> None:
    model = Broken(MADE["activation"], READ["Linear"])
    patch_model(model, "exact", example_inputs=X)
    seen: list[type] = []
    model.read = torch.compiler.disable(lambda m, y: (seen.append(type(y)), m.down(y))[1])
    torch.compile(model, backend="aot_eager")(X).sum().backward()
    assert seen == [Tensor]


def test_eager_code_defers_as_before() -> None:
    model = Broken(MADE["activation"], READ["Linear"])
    stock = copy.deepcopy(model)
    patch_model(model, "exact", example_inputs=X)
    torch.compile(model, backend="aot_eager")(X)
    with saved_bytes(model) as found:
        model(X)
    with saved_bytes(stock) as own:
        stock(X)
    assert found.activations < own.activations

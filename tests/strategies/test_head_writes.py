"""Writes into logits and into views of them: right, or refused, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.compiler import Graphs
from tests.support.heads import CLASSES, IDS, bare, logits_of, run, truth
from tests.support.judge import assert_accurate
from tests.support.versions import before

# what torch's own compiler does to torch
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
Write = Callable[[Tensor], Any]
COLUMNS = torch.tensor([1, 5])
REFUSED = "share their memory"
# behind a break of the graph, torch's compiler looks at the gradients of whatever enters
older_compiler = pytest.mark.skipif(
    before("torch", "2.12"), reason="an error of torch 2.11's own compiler"
)
breaks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

# into a view that torch would give, or while one is held
VIEWED: dict[str, Write] = {
    "rows": lambda y: y[:, :3].zero_(),
    "classes": lambda y: y[..., 100:].fill_(-1.0),
    "detached": lambda y: y.detach().mul_(2),
    "detached, set": lambda y: y.detach().__setitem__((..., slice(5, 9)), -3.0),
    "a view of a view": lambda y: y.view(-1, CLASSES)[3:9].mul_(2),
    "transposed": lambda y: y.transpose(1, 2).mul_(0.5),
    "transposed rows": lambda y: y.transpose(0, 1)[2].mul_(0.5),
    "index_fill_": lambda y: y[:, 1:].index_fill_(2, COLUMNS, -4.0),
    "masked_fill_": lambda y: y.flatten(0, 1).masked_fill_(torch.arange(CLASSES) % 7 == 0, -4.0),
    "copy_": lambda y: y[:, 2:4].copy_(torch.zeros(2, 2, CLASSES)),
    "out": lambda y: (lambda d: torch.mul(d, 2, out=d))(y.detach()),
}
# through a view of torch's own
OTHERS: dict[str, Write] = {
    "diagonal": lambda y: torch.diagonal(y, dim1=1, dim2=2).fill_(9.0),
    "every other class": lambda y: y[..., ::2].mul_(2),
    "mT": lambda y: y.mT.mul_(2),
    "as it is": lambda y: y.index_fill_(2, COLUMNS, -4.0),
    "no_grad": lambda y: torch.no_grad()(lambda: y[:, 1:].mul_(2))(),
}
LOSSES: dict[str, Callable[[Tensor, Write], Tensor]] = {
    "read behind": lambda y, write: (write(y), cross_entropy(y))[1],
    "a view made before": lambda y, write: (
        lambda z: (write(y), cross_entropy(z) + cross_entropy(y))[1]
    )(y.view(-1, CLASSES)),
}


def cross_entropy(y: Tensor) -> Tensor:
    return F.cross_entropy(y.view(-1, CLASSES), IDS.view(-1))


@pytest.mark.parametrize("name", VIEWED | OTHERS)
def test_a_write_in_a_graph_is_torchs(name: str) -> None:
    """The second loss reads what the first reads as well; both in one graph where writes differ most."""
    (model, patched), write = bare(), (VIEWED | OTHERS)[name]
    losses = list(LOSSES.values())[
        0 if name in ("rows", "detached", "diagonal", "as it is") else 1 :
    ]

    def step(m: Any) -> Tensor:
        found = [number * loss(logits_of(m), write) for number, loss in enumerate(losses, 1)]
        return torch.stack(found).sum()

    compiled: Any = torch.compile(step, fullgraph=True, backend=Graphs().backend)
    assert_accurate(run(patched, compiled), run(model, step), truth(model, step))


@pytest.mark.parametrize("name", VIEWED)
def test_an_eager_write_into_a_view_is_refused(name: str) -> None:
    y = logits_of(bare()[1])
    with pytest.raises(RuntimeError, match=REFUSED):
        LOSSES["read behind"](y, VIEWED[name])


@pytest.mark.parametrize("name", OTHERS)
def test_an_eager_write_through_another_view(name: str) -> None:
    (model, patched), write = bare(), OTHERS[name]

    def step(m: Any) -> Tensor:
        return LOSSES["read behind"](logits_of(m), write)

    assert_accurate(run(patched, step), run(model, step), truth(model, step))
    with pytest.raises(RuntimeError, match=REFUSED):
        LOSSES["a view made before"](logits_of(patched), write)


def test_a_view_of_a_view_that_is_gone_when_it_is_read() -> None:
    y = logits_of(bare()[1])
    y.view(-1, CLASSES).T.mul_(2)
    with pytest.raises(RuntimeError, match=REFUSED):
        cross_entropy(y)


@pytest.mark.filterwarnings("ignore:.*_foreach:UserWarning")
def test_a_list_is_written() -> None:
    y = logits_of(bare()[1])
    expected = y.detach().clone() * 2
    with torch.no_grad():
        torch._foreach_mul_([y], 2.0)
    torch.testing.assert_close(cross_entropy(y), cross_entropy(expected))


def test_a_copy_has_a_memory_of_its_own() -> None:
    model, patched = bare()

    def step(m: Any) -> Tensor:
        y = logits_of(m)
        rolled, reshaped = y.roll(1, 1), y.transpose(0, 1).reshape(-1, CLASSES)
        rolled.mul_(2)
        reshaped[3:9].mul_(3)
        return cross_entropy(y) + cross_entropy(rolled) + cross_entropy(reshaped)

    compiled: Any = torch.compile(step, fullgraph=True, backend=Graphs().backend)
    assert_accurate(run(patched, compiled), run(model, step), truth(model, step))


@older_compiler
def test_tensors_that_leave_a_graph_share_their_memory() -> None:
    _, patched = bare()

    def views() -> tuple[Tensor, ...]:
        y = logits_of(patched)
        return y, y.view(-1, CLASSES), y.detach()

    compiled: Any = torch.compile(views, fullgraph=True, backend=Graphs().backend)
    for number in range(3):
        tensors = compiled()
        with pytest.raises(RuntimeError, match=REFUSED):
            tensors[number].mul_(2)


@older_compiler
def test_tensors_that_leave_a_graph_after_a_write_are_views() -> None:
    _, patched = bare()

    def views() -> tuple[Tensor, ...]:
        y = logits_of(patched)
        z = y.view(-1, CLASSES)
        y[:, :3].zero_()
        return y, z

    y, z = torch.compile(views, fullgraph=True, backend=Graphs().backend)()
    assert bool((y[:, :3] == 0).all())
    z[:, 9:] = -5.0
    assert bool((y[..., 9:] == -5).all())
    (y.square().sum() + z.sum()).backward()
    assert patched.lm_head.weight.grad[9:].count_nonzero() == 0
    assert patched.lm_head.weight.grad[:9].count_nonzero()


@older_compiler
@breaks
def test_a_compiled_write_into_logits_from_outside() -> None:
    model, patched = bare()
    compiled: Any = torch.compile(LOSSES["read behind"], backend=Graphs().backend)

    def step(m: Any, loss: Any = LOSSES["read behind"]) -> Tensor:
        found: Tensor = loss(logits_of(m), OTHERS["as it is"])
        return found

    found = run(patched, lambda m: step(m, compiled))
    assert_accurate(found, run(model, step), truth(model, step))
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(logits_of(patched), VIEWED["rows"])


@breaks
def test_a_write_before_a_criterion_of_the_graphs_own() -> None:
    model, patched = bare()

    def step(m: Any) -> Tensor:
        y = logits_of(m)
        y[..., :9] = -5.0
        loss: Tensor = nn.CrossEntropyLoss()(y.view(-1, CLASSES), IDS.view(-1))
        return loss

    compiled: Any = torch.compile(step, backend=Graphs().backend)
    assert_accurate(run(patched, compiled), run(model, step), truth(model, step))


@older_compiler
@breaks
@pytest.mark.parametrize("ahead", [True, False])
def test_a_write_outside_of_a_graph_that_reads_another(ahead: bool) -> None:
    """A frame that the compiler leaves to eager code, whose calls it compiles, or a write before."""
    _, patched = bare()

    def step(y: Tensor) -> Tensor:
        if not ahead:
            for _ in range(2):
                torch._dynamo.graph_break()  # in a loop: the frame is left
            y[:, 1:][..., :9] = -5.0
        return cross_entropy(y)

    y = logits_of(patched)
    if ahead:
        y[:, 1:][..., :9] = -5.0
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.compile(step, backend=Graphs().backend)(y)

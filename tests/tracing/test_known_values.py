"""Forwards whose shapes depend on values of their inputs run without data, to the shapes of a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem_patch.errors import TraceError
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.shadow import make_shadow, output_tensors
from lowmem_patch.tracing.trace import trace_forward

IDS = torch.tensor([[5, 7, 7, 2, 9, 7], [7, 1, 7, 3, 3, 8]])
SIZES = torch.tensor([[1, 2, 4], [2, 3, 2]])
IMAGE = 7
Formula = Callable[[Any, Tensor, Tensor], Any]


class Net(nn.Module):
    """x ``[2, 6, 4]`` of the embedded ids, and a formula of it, the ids and the sizes."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(16, 4), nn.Linear(4, 4)
        self.register_buffer("stride", torch.tensor(3))
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.formula = formula

    def forward(self, ids: Tensor, sizes: Tensor) -> Any:
        return self.formula(self, ids, sizes)

    def x(self, ids: Tensor) -> Tensor:
        return self.linear(self.embed(ids))  # type: ignore[no-any-return]


def _levels(net: Net, ids: Tensor, sizes: Tensor) -> Tensor:
    shapes = torch.empty(2, 2, dtype=torch.long)
    for level in range(2):
        shapes[level, 0], shapes[level, 1] = level + 1, 2
    return net.x(ids)[:, : int(shapes.prod(1).sum())]


def _written(net: Net, ids: Tensor, sizes: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 0] = IMAGE
    ids[ids == 3] = IMAGE
    return net.x(ids)[ids == IMAGE]


def _constant(net: Net, ids: Tensor, sizes: Tensor) -> Tensor:
    lengths = torch.tensor([1, 2])
    lengths += 1
    return net.x(ids)[:, : int(lengths[0])]


def _writes_its_input(net: Net, ids: Tensor, sizes: Tensor) -> Tensor:
    ids[:, 0] = IMAGE
    return net.x(ids)[ids == IMAGE]


def _positions(net: Net, ids: Tensor, sizes: Tensor) -> Tensor:
    rows = [torch.arange(t * h * w).view(t, -1).flatten() for t, h, w in sizes.tolist()]
    lengths = torch.tensor([row.max() + 1 for row in rows])
    return net.embed(torch.cat(rows) % 16)[: lengths.max()]


def _alignment(net: Net, ids: Tensor, sizes: Tensor) -> Any:
    scores = net.x(ids).transpose(0, 1).log_softmax(-1)
    lengths = torch.full_like(sizes[:, 0], 6)
    return torch._ctc_loss(scores, ids[:, :3] % 4, lengths, sizes[:, 1], blank=0)


FORMULAS: dict[str, Formula] = {
    "an alignment": _alignment,
    "a mask of rows": lambda net, ids, sizes: net.x(ids)[ids == IMAGE],
    "masked_select": lambda net, ids, sizes: net.x(ids).masked_select((ids == IMAGE)[..., None]),
    "a number": lambda net, ids, sizes: net.x(ids)[:, : (ids == IMAGE).sum().item()],
    "a branch": lambda net, ids, sizes: net.x(ids) if (ids == IMAGE).any() else ids,
    "nonzero": lambda net, ids, sizes: net.x(ids)[torch.where(ids != IMAGE)],
    "unique": lambda net, ids, sizes: net.embed(ids.unique()),
    "repeats": lambda net, ids, sizes: net.embed(torch.repeat_interleave(sizes[:, 0], sizes[:, 1])),
    "sizes of parts": lambda net, ids, sizes: net.x(ids).split([*sizes[1:, 1:].sum(-1).tolist(), 1], 1),
    "positions": _positions,
    "of a buffer": lambda net, ids, sizes: net.x(ids)[:, : int(net.stride)],
    "written": _written,
    "a constant that is written": _constant,
    "an input that is written": _writes_its_input,
    "sizes of levels": _levels,
    "equal": lambda net, ids, sizes: net.x(ids) if torch.equal(ids, ids + 0) else ids,
    "images that are not blank": lambda net, ids, sizes: net.x(ids)[(sizes.float() == 0).sum(-1) == 0],
    "all are finite": lambda net, ids, sizes: net.x(ids) if net.x(ids).isfinite().all() else ids,
    "none is infinite": lambda net, ids, sizes: ids if net.x(ids).isinf().any() else net.x(ids),
    "none is undefined": lambda net, ids, sizes: ids if net.x(ids).isnan().any() else net.x(ids),
}  # fmt: skip


def _formulas_of_data(net: Net, ids: Tensor) -> dict[str, Callable[[], Any]]:
    mask = torch.zeros(2, 6, dtype=torch.bool)

    def spoiled() -> Any:
        rows = mask.clone()
        view = rows[0]
        view.copy_(net.x(ids)[0, :, 0] > 0)
        return net.x(ids)[rows]

    def half_written() -> Any:
        sizes = torch.empty(2, dtype=torch.long)
        return net.x(ids)[:, : int(sizes[0]) % 6]

    return {
        "activations": lambda: net.x(ids)[net.x(ids)[..., 0] > 0],
        "random numbers": lambda: net.x(ids) if torch.rand(2).sum() < 1 else ids,
        "a weight": lambda: net.x(ids) if net.linear.weight.sum() > 0 else ids,
        "unknown ones written through a view": spoiled,
        "memory as it is": half_written,
    }


def _traced(model: Net, ids: Tensor = IDS) -> list[Tensor]:
    shadow = make_shadow(model, ExampleInputs((ids, SIZES)))
    found: list[Any] = []
    shadow.model.register_forward_hook(lambda module, args, output: found.append(output))
    trace_forward(shadow)
    return output_tensors(found[-1])


@pytest.mark.parametrize("name", FORMULAS)
def test_shapes_are_those_of_a_real_run(name: str) -> None:
    model = Net(FORMULAS[name])
    kept = IDS.clone()
    found, wanted = _traced(model), output_tensors(model(IDS.clone(), SIZES))
    shapes = [[(t.shape, t.stride(), t.dtype) for t in tensors] for tensors in (found, wanted)]
    assert shapes[0] == shapes[1]
    assert torch.equal(IDS, kept)  # nothing of the user's was written


def test_a_tensor_that_no_module_holds_is_written_once() -> None:
    """Among fake tensors torch runs an op on none of them as it is."""
    count = torch.tensor([2])
    _traced(Net(lambda net, ids, sizes: (count.add_(1), net.x(ids))[1]))
    assert count.tolist() == [3]


def test_a_slice_of_a_batch_lies_as_it_does() -> None:
    ids = torch.cat((IDS, IDS), 1)[:, 1:7]
    model = Net(
        lambda net, ids, sizes: net.x(torch.as_strided(ids, (2,), (12,)))[:, : int(ids[1, 0])]
    )
    assert [t.shape for t in _traced(model, ids)] == [
        t.shape for t in output_tensors(model(ids, SIZES))
    ]


@pytest.mark.parametrize("name", list(_formulas_of_data(Net(FORMULAS["unique"]), IDS)))
def test_what_follows_from_more_than_the_inputs_is_refused(name: str) -> None:
    model = Net(lambda net, ids, sizes: _formulas_of_data(net, ids)[name]())
    with pytest.raises(TraceError, match=r"DataDependent|DynamicOutputShape"):
        _traced(model)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_layer_that_a_small_draw_skips_runs(shape: tuple[int, ...]) -> None:
    model = Net(lambda net, ids, sizes: ids if torch.rand(shape) < 0.999 else net.x(ids))
    assert [t.shape for t in _traced(model)] == [(*IDS.shape, 4)]


def test_a_second_run_begins_with_the_same_values() -> None:
    model = Net(lambda net, ids, sizes: net.x(ids)[ids == IMAGE])
    shadow = make_shadow(model, ExampleInputs((IDS, SIZES)))
    first, second = (len(trace_forward(shadow).ops) for _ in range(2))
    assert first == second

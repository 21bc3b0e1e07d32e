"""A value is followed forward to all that hold it, and backward to what it was made from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowmem_patch.tracing.consumers import Consumer, find_consumers
from lowmem_patch.tracing.dataflow import backward, first_input, forward, makers, only_consumer
from lowmem_patch.tracing.inputs import ExampleInputs
from lowmem_patch.tracing.op_roles import REARRANGES
from lowmem_patch.tracing.shadow import make_shadow
from lowmem_patch.tracing.trace import Op, Trace, trace_forward


class Moves(nn.Module):
    """A norm whose output is rolled and viewed on one way, and merged into longer rows on another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.short, self.long = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        windows = torch.roll(y, 1, 1).view(2, 3, 2, 4)
        return self.short(windows.float()), self.long(y.reshape(2, 3, 8))


def traced() -> tuple[Trace, Tensor]:
    inputs = ExampleInputs((torch.zeros(2, 6, 4, requires_grad=True),))
    trace = trace_forward(make_shadow(Moves(), inputs))
    (call,) = (call for call in trace.calls if call.name == "norm")
    return trace, call.outputs[0]


def rearranges(op: Op, tensor: Tensor) -> bool:
    return op.role.has(REARRANGES) and first_input(op) is tensor


def test_forward_reaches_each_holder_once_and_names_the_way() -> None:
    trace, output = traced()
    paths = list(forward(trace, [output, output], rearranges))
    ways = [[op.name for op in path.ops] for path in paths]
    assert ways == [[], ["roll"], ["reshape"], ["view", "roll"]]
    assert all(path.start is output for path in paths)


def test_backward_returns_along_the_same_way() -> None:
    trace, output = traced()
    *_, last = forward(trace, [output], rearranges)
    made_by = makers(trace)
    back = list(
        backward(
            made_by, last.end, lambda op, _: first_input(op) if op.role.has(REARRANGES) else None
        )
    )
    assert [tuple(tensor.shape) for tensor in back] == [(2, 3, 2, 4), (2, 6, 4), (2, 6, 4)]
    assert back[-1] is output


def test_only_consumer_is_none_where_two_read() -> None:
    trace, output = traced()
    assert only_consumer(trace, output) is None
    rolled = next(op for op in trace.ops if op.name == "roll").outputs[0]
    following = only_consumer(trace, rolled)
    assert following is not None and following.name == "view"


def test_consumers_say_what_lies_between() -> None:
    trace, output = traced()
    found: dict[str, Consumer] = {c.text: c for c in find_consumers(trace, [output])}
    assert {text: consumer.use for text, consumer in found.items()} == {
        "short": "linear", "long": "linear"
    }  # fmt: skip
    assert found["short"].copied and not found["short"].reshaped
    assert found["long"].reshaped and not found["long"].copied


class WritesBehindChunk(nn.Module):
    """The whole is written in place while its parts are held, which nobody reads any more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        one, other = hidden.chunk(2, -1)
        gated = one * other.sin()
        hidden.add_(1)
        return gated + hidden[..., :2].detach()


def test_parts_that_a_write_has_left_behind_are_traced() -> None:
    inputs = ExampleInputs((torch.zeros(2, 4),))
    trace = trace_forward(make_shadow(WritesBehindChunk(), inputs))
    assert {"linear", "chunk", "add_"} <= {op.name for op in trace.ops}

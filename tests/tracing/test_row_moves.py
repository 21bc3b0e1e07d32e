"""A claimed row move keeps each row whole: checked on a tensor that holds every element's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowmem_patch.tracing.row_moves import function_name, moves_rows


def keeps_rows(source: Tensor, output: Tensor) -> bool:
    """Whether each row of ``output`` is a row of ``source``; elements are their own places."""
    size = source.shape[-1]
    if output.dtype != source.dtype or output.dim() == 0 or output.shape[-1] != size:
        return False
    rows = output.reshape(-1, size)
    whole = rows[:, :1] + torch.arange(size)
    return bool((rows == whole).all() and (rows[:, 0] % size == 0).all())


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A tensor function with arguments that may be legal, on a tensor of places."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    source = torch.arange(torch.Size(shape).numel()).reshape(shape)
    ndim = len(shape)
    dim = st.integers(-ndim, ndim - 1)
    some = st.lists(dim, min_size=1, max_size=2, unique=True)
    item = st.one_of(
        st.just(slice(None)), st.just(slice(0, 1)), st.just(slice(None, None, 2)), st.just(None),
        st.just(...), st.integers(-1, 0), st.just([0]), st.just(True), st.just(torch.tensor([0, 0])),
    )  # fmt: skip
    index = st.one_of(item, st.lists(item, min_size=1, max_size=4).map(tuple))
    permutation = st.permutations(range(ndim))
    shapes = st.lists(st.integers(1, 8), min_size=1, max_size=4)
    zero_pad = st.lists(st.integers(0, 1), min_size=2, max_size=4).filter(lambda p: len(p) % 2 == 0)
    T = torch.Tensor
    call = draw(
        st.one_of(
            st.tuples(st.just(T.permute), permutation.map(lambda p: (p,))),
            st.tuples(st.just(T.permute), permutation.map(tuple)),
            st.tuples(st.just(T.transpose), st.tuples(dim, dim)),
            st.tuples(st.just(T.view), shapes.map(tuple)),
            st.tuples(st.just(T.view), st.just((torch.int32,))),
            st.tuples(st.just(T.reshape), shapes.map(lambda s: (s,))),
            st.tuples(st.just(torch.roll), st.tuples(st.integers(0, 3), dim)),
            st.tuples(st.just(torch.roll), st.tuples(st.integers(0, 3))),
            st.tuples(st.just(T.flip), some.map(tuple)),
            st.tuples(st.just(T.flip), some.map(lambda d: (d,))),
            st.tuples(st.just(T.__getitem__), index.map(lambda i: (i,))),
            st.tuples(st.just(T.flatten), st.tuples(dim, dim)),
            st.tuples(st.just(T.squeeze), st.tuples(dim)),
            st.tuples(st.just(T.unsqueeze), st.tuples(dim)),
            st.tuples(st.just(T.chunk), st.tuples(st.integers(1, 3), dim)),
            st.tuples(st.just(T.split), st.tuples(st.integers(1, 3), dim)),
            st.tuples(st.just(T.unbind), st.tuples(dim)),
            st.tuples(st.just(T.select), st.tuples(dim, st.just(0))),
            st.tuples(st.just(T.narrow), st.tuples(dim, st.just(0), st.just(1))),
            st.tuples(st.just(T.expand), shapes.map(tuple)),
            st.tuples(st.just(F.pad), zero_pad.map(lambda p: (p,))),
            st.tuples(st.just(T.sort), st.tuples(dim)),
            st.tuples(st.just(T.cumsum), st.tuples(dim)),
        )
    )
    return call[0], (source, *call[1]), {}


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(calls())
def test_a_claimed_row_move_keeps_rows_whole(call: tuple[Any, Any, Any]) -> None:
    function, args, kwargs = call
    try:
        output = function(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return  # arguments that torch refuses
    if moves_rows(function, args, kwargs, args[0], output):
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            assert keeps_rows(args[0], tensor), function_name(function)


PLACES = torch.arange(2 * 4 * 6 * 8).reshape(2, 4, 6, 8)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.Tensor.view, (2, 2, 2, 3, 2, 8)),
        (torch.Tensor.permute, (0, 2, 1, 3)),
        (torch.Tensor.transpose, (1, 2)),
        (torch.roll, ((-1, -1), (1, 2))),
        (torch.Tensor.__getitem__, ((slice(None), slice(0, None, 2)),)),
        (torch.Tensor.__getitem__, ((..., 0, slice(None)),)),
        (torch.Tensor.flatten, (1, 2)),
        (torch.Tensor.unbind, (0,)),
        (torch.Tensor.flip, (0, 1)),
        (torch.Tensor.contiguous, ()),
        (F.pad, ((0, 0, 0, 0),)),
    ],
)
def test_moves_of_window_partitions_are_recognised(function: Any, args: tuple[Any, ...]) -> None:
    output = function(PLACES, *args)
    assert moves_rows(function, (PLACES, *args), {}, PLACES, output)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.Tensor.flip, (0, -1)),
        (torch.Tensor.view, (torch.int32,)),
        (torch.Tensor.permute, (0, 1, 3, 2)),
        (torch.roll, (1, -1)),
        (torch.roll, (1,)),
        (torch.Tensor.__getitem__, ((..., None),)),
        (F.pad, ((0, 0, 0, 1),)),
        (torch.Tensor.sort, (-1,)),
    ],
)
def test_what_breaks_rows_is_no_move(function: Any, args: tuple[Any, ...]) -> None:
    source = PLACES.float() if args == (torch.int32,) else PLACES
    output = function(source, *args)
    output = output if isinstance(output, torch.Tensor) else output[0]
    assert not moves_rows(function, (source, *args), {}, source, output)

"""unbind_permuted: the parts and gradients of torch's own unbind, joined in one pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_patch.functional import unbind_permuted

SIZES = (2, 3, 4, 5)
ORDERS = list(itertools.permutations(range(4)))


def whole(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 60, dtype=dtype, requires_grad=True)


def view_of(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    return tensor.reshape(SIZES).permute(order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [0, 2, -1])
def test_parts_and_gradients_are_those_of_torch(order: tuple[int, ...], dim: int) -> None:
    first, second = whole(), whole()
    wanted = view_of(first, order).unbind(dim)
    found = unbind_permuted(second, view_of(second, order), dim)
    assert len(found) == len(wanted)
    seeds = [torch.randn_like(part) for part in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    torch.autograd.backward(wanted, seeds)
    torch.autograd.backward(found, seeds)
    assert first.grad is not None and second.grad is not None
    assert torch.equal(second.grad, first.grad) and second.grad.is_contiguous()


@pytest.mark.parametrize("sizes", [(1, 3, 1, 20), (1, 3, 20, 1), (4, 3, 1, 5)])
def test_dimensions_of_one(sizes: tuple[int, ...]) -> None:
    x = torch.arange(float(torch.Size(sizes).numel()), requires_grad=True)
    parts = unbind_permuted(x, x.view(sizes).permute(1, 0, 2, 3), 0)
    (sum(part.square().sum() for part in parts) / 2).backward()  # type: ignore[union-attr]
    assert torch.equal(x.grad, x.detach())


@pytest.mark.parametrize("used", [(0,), (1, 2), ()])
def test_parts_that_are_not_used(used: tuple[int, ...]) -> None:
    first, second = whole(), whole()
    for x, parts in (
        (first, view_of(first, (1, 2, 0, 3)).unbind(0)),
        (second, unbind_permuted(second, view_of(second, (1, 2, 0, 3)), 0)),
    ):
        loss = x.sum() * 0 + sum(parts[i].square().sum() for i in used)
        loss.backward()
    assert torch.equal(second.grad, first.grad)


def test_it_can_be_differentiated_again() -> None:
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return unbind_permuted(x, view_of(x, (1, 2, 0, 3)), 0)

    assert torch.autograd.gradcheck(parts, (whole(),))
    assert torch.autograd.gradgradcheck(parts, (whole(),))


class _Written(TorchDispatchMode):  # type: ignore[misc]  # a base without types
    """Counts the elements that copying operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] in ("cat", "stack", "clone", "_to_copy", "copy_"):
            self.elements += result.numel()
        return result


@pytest.mark.parametrize("layout", [(0, 2, 1, 3), (0, 1, 2, 3)])
def test_one_pass_where_gradients_lie_as_attention_leaves_them(layout: tuple[int, ...]) -> None:
    """Flash attention gives [B, H, N, D] in the memory order of [B, N, H, D]; another order costs a copy
    more, as many as torch's own."""

    def written(ours: bool) -> float:
        x = torch.randn(2, 6, 3 * 4 * 5, requires_grad=True)
        view = x.view(2, 6, 3, 4, 5).permute(2, 0, 3, 1, 4)
        parts = unbind_permuted(x, view, 0) if ours else view.unbind(0)
        seeds = [torch.randn_like(p.permute(layout).contiguous()).permute(layout) for p in parts]
        with _Written() as counter:
            torch.autograd.backward(parts, seeds)
        return counter.elements / x.numel()

    assert written(False) == 2
    assert written(True) == (1 if layout == (0, 2, 1, 3) else 2)


def test_nothing_is_saved() -> None:
    saved: list[Tensor] = []
    x = whole()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        unbind_permuted(x, view_of(x, (1, 2, 0, 3)), 0)
    assert not saved


def test_other_views_are_refused() -> None:
    x = whole()
    with pytest.raises(ValueError, match="each of its elements"):
        unbind_permuted(x, x[:, :30], 0)
    with pytest.raises(ValueError, match="each of its elements"):
        unbind_permuted(x, x.clone(), 0)
    with pytest.raises(ValueError, match="each of its elements"):  # the first row, again and again
        unbind_permuted(x, x[:1].expand(x.shape), 0)
    with pytest.raises(ValueError, match="must be contiguous"):
        unbind_permuted(x.t(), x.t(), 0)


@pytest.mark.parametrize("dim", [4, -5])
def test_a_dimension_that_is_not_there_is_refused(dim: int) -> None:
    x = whole()
    with pytest.raises(IndexError, match=f"dimension {dim} of a view of 4"):
        unbind_permuted(x, view_of(x, (1, 2, 0, 3)), dim)

"""The rotary embedding: one pass each way, results and gradients in the layout of their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_patch.functional import turned
from lowmem_patch.functional._implementation import module, resolve
from tests.ops.conftest import INTERPRETED, Backend, part
from tests.support.judge import assert_within_budget
from tests.support.saved import saved_storages, storage_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# batches, positions, heads of q, heads of k, columns, columns that turn
SHAPES = [
    (2, 5, 4, 4, 16, 16),
    (2, 7, 8, 2, 64, 64),  # grouped queries
    (1, 3, 6, 1, 128, 128),  # one head of keys
    (2, 9, 3, 3, 80, 20),  # part of the columns, nothing a power of two
    (3, 4, 5, 5, 6, 2),
    (1, 70, 2, 1, 32, 16),  # several programs of several positions
    (2, 2, 40, 40, 128, 96),  # several programs of heads
    (2, 0, 3, 3, 8, 8),
    (0, 2, 3, 3, 8, 8),
    (2, 3, 0, 1, 8, 8),
    (2, 1, 3, 3, 8, 8),
]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def plain(x: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> Tensor:
    """The embedding of one tensor in the operators of torch, as models write it."""
    size = cos.shape[-1]
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    turning, rest = x[..., :size], x[..., size:]
    return torch.cat((turning * cos + rotate_half(turning) * sin, rest), -1)


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **more: Any) -> Any:
    return tuple(turned(x, cos, sin, **more) for x in (q, k))


def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backend: Backend, **more: Any) -> Any:
    return rotary_embedding(q, k, cos, sin, implementation=backend.implementation, **more)


def leaf(shape: tuple[int, ...], backend: Backend, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[B, S, H, D]``."""
    return torch.randn(shape).to(backend.device, dtype).requires_grad_()


def angles(
    shape: tuple[int, ...], backend: Backend, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin whose halves differ."""
    phase = 3 * torch.randn(shape)
    return phase.cos().to(backend.device, dtype), phase.sin().to(backend.device, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "heads_dim"), part(SHAPES, DTYPES, [1, 2], of=2), ids=str
)
def test_rotary_is_torchs_within_its_own_error(
    backend: Backend, shape: tuple[int, ...], dtype: torch.dtype, heads_dim: int
) -> None:
    batches, positions, q_heads, k_heads, columns, size = shape
    leaves = [leaf((batches, positions, h, columns), backend, dtype) for h in (q_heads, k_heads)]
    inputs = [x.transpose(1, 2) if heads_dim == 1 else x for x in leaves]
    for angle_dtype in {dtype, torch.float32}:
        cos, sin = angles((batches, positions, size), backend, angle_dtype)
        results = ours(*inputs, cos, sin, backend, heads_dim=heads_dim)
        for x, y in zip(inputs, results, strict=True):
            wide = x.detach().double().requires_grad_()
            # in one dtype, so that the result is rounded to it and no more
            theirs = plain(x, cos.to(dtype), sin.to(dtype), heads_dim)
            exact = plain(wide, cos.double(), sin.double(), heads_dim)
            assert_within_budget(y, theirs, exact.detach())
            assert y.stride() == torch.empty_like(x).stride()
            dy = torch.randn(x.shape).to(x)
            (mine,) = torch.autograd.grad(y, x, dy)
            (other,) = torch.autograd.grad(theirs, x, dy)
            (true,) = torch.autograd.grad(exact, wide, dy.double())
            assert_within_budget(mine, other, true)
            assert mine.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("alike", [True, False], ids=["equal halves", "unequal halves"])
@pytest.mark.parametrize(("shape", "heads_dim"), part(SHAPES, [1, 2], of=2), ids=str)
def test_the_inverse_gives_what_was_turned(
    backend: Backend, shape: tuple[int, ...], heads_dim: int, alike: bool
) -> None:
    batches, positions, heads, _, columns, size = shape
    x = torch.randn(batches, positions, heads, columns).to(backend.device)
    x = x.transpose(1, 2) if heads_dim == 1 else x
    phase = torch.randn(batches, positions, size // 2).repeat(1, 1, 2)
    cos, sin = (
        1.3 * angle.to(backend.device, torch.bfloat16) for angle in (phase.cos(), phase.sin())
    )
    if not alike:
        cos[..., size // 2 :] *= 2
    cos[:, :1] = sin[:, :1] = 0
    y, _ = ours(x, x, cos, sin, backend, heads_dim=heads_dim)
    rotate = module(resolve(backend.implementation, x)).rotate
    back = rotate(y, cos, sin, heads_dim, "inverse", x.stride(), torch.float32)
    lost = torch.zeros_like(x, dtype=torch.bool)
    lost.narrow(3 - heads_dim, 0, min(1, positions))[..., :size] = True
    # each of two roundings is at most half an epsilon of the pair's length, and so is the division's
    bound = 8 * torch.finfo(torch.float32).eps * float(x.abs().max()) if x.numel() else 0.0
    torch.testing.assert_close(back, x.masked_fill(lost, 0.0), rtol=0, atol=bound)
    assert back.stride() == x.stride()


def shuffled(x: Tensor) -> Tensor:
    return x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a packed projection": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "part of packed heads": lambda x: torch.cat((x, x), 2)[:, :, x.shape[2] :],
    "positions outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second column": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "columns outermost": shuffled,
    "expanded heads": lambda x: x[:, :, :1].expand_as(x),
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend: Backend, name: str, heads_dim: int) -> None:
    x = LAYOUTS[name](torch.randn(2, 5, 3, 16, device=backend.device))
    x = (x.transpose(1, 2) if heads_dim == 1 else x).detach().requires_grad_()
    cos, sin = angles((2, 5, 12), backend)
    y, _ = ours(x, x, cos, sin, backend, heads_dim=heads_dim)
    expected = torch.empty_like(x)
    if expected.stride(-1) != 1:
        expected = expected.contiguous()
    assert y.stride() == expected.stride()
    same, _ = ours(x.detach().contiguous(), x, cos, sin, backend, heads_dim=heads_dim)
    assert torch.equal(y, same)
    dy = torch.randn(x.shape, device=backend.device)
    gradients = []
    for change in LAYOUTS.values():
        if change is LAYOUTS["expanded heads"]:
            continue
        there = dy.transpose(1, 2) if heads_dim == 1 else dy
        given = change(there)
        given = given.transpose(1, 2) if heads_dim == 1 else given
        assert torch.equal(given, dy)
        (gradient,) = torch.autograd.grad(y, x, given, retain_graph=True)
        assert gradient.stride() == expected.stride()
        gradients.append(gradient)
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.stride() == expected.stride()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t[:1].clone(), id="one batch"),
        pytest.param(lambda t: t[:1].expand_as(t), id="expanded"),
        pytest.param(lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), id="transposed"),
        pytest.param(lambda t: torch.cat((t, t), 1)[:, : t.shape[1]], id="cut"),
    ],
)
def test_layouts_of_angles(backend: Backend, change: Callable[[Tensor], Tensor]) -> None:
    x = leaf((3, 5, 2, 16), backend).transpose(1, 2)
    cos, sin = angles((3, 5, 16), backend)
    cos[1:], sin[1:] = cos[:1], sin[:1]
    expected = ours(x, x, cos, sin, backend)[0]
    dy = torch.randn_like(expected)
    mixed = [(change(cos), sin), (cos, change(sin))] if change(cos).shape == cos.shape else []
    for given in ((change(cos), change(sin)), *mixed):
        y = ours(x, x, *given, backend)[0]
        assert torch.equal(y, expected)
        for mine, true in zip(
            torch.autograd.grad(y, x, dy),
            torch.autograd.grad(expected, x, dy, retain_graph=True),
            strict=True,
        ):
            assert torch.equal(mine, true)


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (1, 3, 5, 128), (2, 70, 1, 32)], ids=str)
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_nothing_else_is_written(
    backend: Backend, shape: tuple[int, ...], heads_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(shape, backend).detach()
    x = x.transpose(1, 2) if heads_dim == 1 else x
    cos, sin = angles((shape[0], shape[1], 12), backend)
    memory = torch.full((2 * x.numel() + 4096,), 7.0, device=backend.device)
    result = memory.as_strided(x.shape, x.stride())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *_, **__: result)
        ours(x, x, cos, sin, backend, heads_dim=heads_dim)
    assert torch.equal(result, ours(x, x, cos, sin, backend, heads_dim=heads_dim)[0])
    assert bool((memory[x.numel() :] == 7.0).all())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [6, 16])
def test_out_dtype(backend: Backend, dtype: torch.dtype, out_dtype: torch.dtype, size: int) -> None:
    x = leaf((2, 5, 3, 16), backend, dtype)
    cos, sin = angles((2, 5, size), backend)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y, _ = ours(x, x, cos, sin, backend, heads_dim=2, out_dtype=out_dtype)
    exact = plain(x.detach().double(), cos.double(), sin.double(), 2)
    assert_within_budget(y, exact.to(out_dtype), exact)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    (true,) = torch.autograd.grad(plain(wide, cos.double(), sin.double(), 2), wide, dy.double())
    assert_within_budget(dx, true.to(dtype), true)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["q", "k"])
def test_one_gradient_alone(backend: Backend, wanted: tuple[bool, bool]) -> None:
    pair = [leaf((2, 5, 3, 16), backend).detach().requires_grad_(needs) for needs in wanted]
    cos, sin = angles((2, 5, 16), backend)
    results = ours(*pair, cos, sin, backend, heads_dim=2)
    assert tuple(y.requires_grad for y in results) == wanted
    sum(y.sum() for y in results).backward()
    assert tuple(x.grad is not None for x in pair) == wanted


class _Severed(torch.autograd.Function):
    """Identity whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> None:
        return None


def test_no_gradient_arrives(backend: Backend) -> None:
    q, k = leaf((2, 5, 3, 16), backend), leaf((2, 5, 3, 16), backend)
    turned_q, turned_k = ours(q, k, *angles((2, 5, 16), backend), backend, heads_dim=2)
    sever: Any = _Severed.apply
    (sever(turned_q).sum() + turned_k.sum()).backward()
    assert q.grad is None
    assert k.grad is not None


def test_saves_cos_and_sin_alone(backend: Backend) -> None:
    q = leaf((2, 5, 4, 16), backend, torch.bfloat16).transpose(1, 2)
    k = leaf((2, 5, 2, 16), backend, torch.bfloat16).transpose(1, 2)
    cos, sin = angles((1, 5, 8), backend)
    expanded = cos.expand(2, -1, -1), sin.expand(2, -1, -1)
    results, saved = saved_storages(lambda: ours(q, k, *expanded, backend))
    assert all(y.requires_grad for y in results)
    assert set(saved) == {storage_of(cos), storage_of(sin)}


def test_without_gradients(backend: Backend) -> None:
    x = leaf((2, 5, 4, 16), backend)
    cos, sin = angles((2, 5, 16), backend)
    expected = ours(x, x, cos, sin, backend, heads_dim=2)[0]
    with torch.no_grad():
        y = ours(x, x, cos, sin.requires_grad_(), backend, heads_dim=2)[0]
    assert not y.requires_grad
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own: a FutureWarning since 2.15
def test_forward_mode_is_refused(backend: Backend) -> None:
    x = leaf((2, 5, 4, 16), backend).detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward mode"):
            ours(dual, x, *angles((2, 5, 16), backend), backend, heads_dim=2)


def test_second_derivatives(backend: Backend) -> None:
    x = leaf((2, 5, 3, 16), backend).transpose(1, 2)
    cos, sin = angles((2, 5, 12), backend)

    def penalty(rotate: Callable[[Tensor], Tensor]) -> Tensor:
        (gradient,) = torch.autograd.grad(rotate(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    mine = penalty(lambda x: ours(x, x, cos, sin, backend)[0])
    theirs = penalty(lambda x: plain(x, cos, sin, 1))
    x = x.detach().double().requires_grad_()
    cos, sin = cos.double(), sin.double()
    exact = penalty(lambda x: plain(x, cos, sin, 1))
    # the error of each result is carried through two products
    unit = torch.finfo(torch.float32).eps
    assert_within_budget(mine, theirs, exact, unit * exact.abs().max())


@pytest.mark.skipif(INTERPRETED, reason="the kernels take no float64")
def test_float64() -> None:
    q = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 1, 4, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = angles((2, 4, 6), Backend("cpu", "reference"), torch.float64)

    def run(q: Tensor, k: Tensor) -> Any:
        return rotary_embedding(q, k, cos, sin)

    torch.autograd.gradcheck(run, (q, k))
    torch.autograd.gradgradcheck(run, (q, k))
    assert (run(q, k)[0] - plain(q, cos, sin, 1)).abs().max() < 1e-14


@pytest.mark.skipif(INTERPRETED, reason="no kernel takes part")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(dynamic: bool) -> None:
    torch.compiler.reset()
    backend = Backend("cpu", "reference")

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        both = rotary_embedding(q, k, cos, sin)
        # a view, as models take it: it fails if the layout is not the one that was promised
        first, second = (t.transpose(1, 2).view(*t.transpose(1, 2).shape[:2], -1) for t in both)
        return first, second

    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=dynamic)
    # sizes of their own: dynamic shapes take equal ones for the same
    for batches, positions in ((3, 5), (7, 6), (5, 9)) if dynamic else ((3, 5),):
        q = leaf((batches, positions, 4, 16), backend)
        k = leaf((batches, positions, 2, 16), backend)
        cos, sin = angles((1, positions, 12), backend)
        expected = run(q, k, cos, sin)
        results, saved = saved_storages(lambda given=(q, k, cos, sin): compiled(*given))
        assert set(saved) <= {storage_of(cos), storage_of(sin)}
        dys = [torch.randn_like(y) for y in expected]
        for mine, true in zip(
            (*results, *torch.autograd.grad(results, (q, k), dys)),
            (*expected, *torch.autograd.grad(expected, (q, k), dys)),
            strict=True,
        ):
            assert torch.equal(mine, true)
    assert counter.frame_count == 1


@pytest.mark.skipif(INTERPRETED, reason="checks arguments, not kernels")
def test_errors_name_the_dtype() -> None:
    x, angle = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8)
    with pytest.raises(TypeError, match=r"x must be .* got torch\.int64"):
        rotary_embedding(x, x.long(), angle, angle)


def test_results_of_columns_that_lie_apart_are_contiguous() -> None:
    """Zaya's queries come from a convolution: fused attention would compute them by its slowest kernel."""
    q = torch.randn(2, 4, 8, 16, requires_grad=True).transpose(2, 3)
    cos, sin = torch.randn(2, 1, 16, 8)
    found = rotary_embedding(q, q, cos, sin)[0]
    assert found.is_contiguous()
    assert torch.equal(found, rotary_embedding(q.contiguous(), q, cos, sin)[0])

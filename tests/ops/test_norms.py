"""ms_norm: exact gradients from the output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from lowmem_patch.functional import NormSettings, ms_norm
from tests.ops.conftest import INTERPRETED, Backend, norm_grid
from tests.support.judge import assert_near, assert_within_budget
from tests.support.saved import saved_storages, storage_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (5,), (2, 3, 37), (33, 768), (3, 8200), (2, 16500), (0, 16), (2, 0, 16)]
EPS = 1e-5
# the interpreter cuts bfloat16 off
_COPY_DTYPE = torch.float16 if INTERPRETED else torch.bfloat16


def plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, centered: bool
) -> Tensor:
    """The norm in the operators of torch, in the dtype of ``x``."""
    factor = None if weight is None else weight + offset
    if centered:
        return F.layer_norm(x, x.shape[-1:], factor, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], factor, EPS)


def ours(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    centered: bool,
    backend: Backend,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    settings = NormSettings(EPS, offset, centered)
    vectors = weight, bias if centered else None
    return ms_norm(x, *vectors, settings, out_dtype, implementation=backend.implementation)[0]


def recovery_error(
    x: Tensor, dy: Tensor, y: Tensor, weight: Tensor | None, offset: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """What the rounding of y costs dx and d_weight: half a unit of y, carried through the formulas."""
    x, dy = x.double(), dy.double()
    gamma = torch.ones(x.shape[-1], dtype=torch.float64, device=x.device)
    if weight is not None:
        gamma = weight.double() + offset
    wide = x - x.mean(-1, keepdim=True) if centered else x
    rstd = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    z, g = wide * rstd, dy * gamma
    unit = torch.finfo(y.dtype).eps / 2 * y.double().abs() / gamma.abs()
    along = (g.abs() * unit).mean(-1, keepdim=True)
    d_x = rstd * (unit * (g * z).mean(-1, keepdim=True).abs() + z.abs() * along)
    return d_x, (dy.abs() * unit).reshape(-1, x.shape[-1]).sum(0)


def parameters(
    size: int, device: str, dtype: torch.dtype, offset: float, centered: bool
) -> tuple[Tensor, Tensor | None]:
    weight = (1 - offset + 0.3 * torch.randn(size).clamp(-2, 2)).to(device, dtype)
    bias = (0.5 * torch.randn(size)).to(device, dtype).requires_grad_() if centered else None
    return weight.requires_grad_(), bias


CASES = [
    pytest.param(True, 0.0, id="layer_norm"),
    pytest.param(True, 1.0, id="layer_norm_offset"),
    pytest.param(False, 0.0, id="rms_norm"),
    pytest.param(False, 1.0, id="rms_norm_offset"),
]


@pytest.mark.parametrize(("shape", "centered", "offset", "dtype"), norm_grid(SHAPES, CASES, DTYPES))
def test_norm_is_torchs_within_its_own_error(
    backend: Backend, centered: bool, offset: float, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (2 * torch.randn(shape) + 0.5).to(backend.device, dtype).requires_grad_()
    weight, bias = parameters(shape[-1], backend.device, dtype, offset, centered)
    inputs = tuple(t for t in (x, weight, bias) if t is not None)
    dy = torch.randn(shape).to(backend.device, dtype)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    y = ours(x, weight, bias, offset, centered, backend)
    theirs = plain(x, weight, bias, offset, centered)
    exact = plain(*wide[:2], wide[2] if centered else None, offset, centered)
    assert y.is_contiguous()
    assert_within_budget(y, theirs, exact)
    found = torch.autograd.grad(y, inputs, dy)
    expected = torch.autograd.grad(theirs, inputs, dy)
    d_exact = torch.autograd.grad(exact, wide, dy.double())
    d_x, d_weight = recovery_error(x.detach(), dy, y.detach(), weight.detach(), offset, centered)
    for mine, other, true, extra in zip(
        found, expected, d_exact, (d_x, d_weight, 0.0), strict=False
    ):
        assert_within_budget(mine, other, true, extra)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("needs", ["x", "weight", "bias", "weight,bias", "none"])
@pytest.mark.parametrize("columns", [24, 8200])
def test_each_gradient_alone(backend: Backend, centered: bool, needs: str, columns: int) -> None:
    x = torch.randn(9 if columns < 4096 else 3, columns, device=backend.device)
    weight = torch.rand(columns, device=backend.device) + 0.5
    bias = torch.randn(columns, device=backend.device) if centered else None
    tensors = {"x": x, "weight": weight, "bias": bias}
    asked = [tensors[n] for n in needs.split(",") if tensors.get(n) is not None]
    for tensor in asked:
        tensor.requires_grad_()
    y = ours(x, weight, bias, 0.0, centered, backend)
    if not asked:
        assert not y.requires_grad
        return
    dy = torch.randn_like(y)
    exact = plain(
        x.double(), weight.double(), None if bias is None else bias.double(), 0.0, centered
    )
    extras = dict(
        zip(
            ("x", "weight"),
            recovery_error(x.detach(), dy, y.detach(), weight.detach(), 0.0, centered),
            strict=True,
        )
    )
    for mine, true, name in zip(
        torch.autograd.grad(y, asked, dy),
        torch.autograd.grad(exact, asked, dy.double()),
        needs.split(","),
        strict=False,
    ):
        assert_within_budget(mine, true, true.double(), extras.get(name, 0.0))


@pytest.mark.parametrize("centered", [True, False])
def test_saves_output_and_one_number_a_row(backend: Backend, centered: bool) -> None:
    x = torch.randn(6, 5, 64, device=backend.device, requires_grad=True)
    y, saved = saved_storages(lambda: ours(x, None, None, 0.0, centered, backend))
    assert saved.pop(storage_of(y)) == y.nbytes
    assert list(saved.values()) == [6 * 5 * 4]


def test_only_a_trained_bias_saves_no_activation(backend: Backend) -> None:
    x, weight = torch.randn(6, 64, device=backend.device), torch.ones(64, device=backend.device)
    bias = torch.zeros(64, device=backend.device, requires_grad=True)
    y, saved = saved_storages(lambda: ours(x, weight, bias, 0.0, True, backend))
    saved.pop(storage_of(bias))
    assert sum(saved.values()) == 0
    y.sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 6.0))


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_output_is_the_tensor_that_linears_save(backend: Backend, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    x = torch.randn(2, 3, 64, device=backend.device, dtype=dtype, requires_grad=True)
    weight = torch.ones(64, device=backend.device, dtype=dtype, requires_grad=True)
    linears = [nn.Linear(64, 8, device=backend.device, dtype=dtype) for _ in range(3)]

    def block() -> list[Tensor]:
        with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=autocast):
            y = ours(x, weight, None, 0.0, False, backend, torch.bfloat16)
            return [y, *(linear(y) for linear in linears)]

    outputs, saved = saved_storages(block)
    activations = {key: size for key, size in saved.items() if size >= x.numel() * 2}
    weights = {storage_of(p) for linear in linears for p in linear.parameters()}
    copies = 8 * 64 * 2  # autocast's copies of the weights
    activations = {k: s for k, s in activations.items() if k not in weights and s != copies}
    assert activations == {storage_of(outputs[0]): x.numel() * 2}


def test_mixed_dtypes(backend: Backend) -> None:
    x = torch.randn(4, 40, device=backend.device).bfloat16().requires_grad_()
    weight = (torch.rand(40, device=backend.device) + 0.5).requires_grad_()
    y = ours(x, weight, None, 0.0, False, backend)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    wide = x.detach().float().requires_grad_()
    z = ours(wide, weight, None, 0.0, False, backend, torch.bfloat16)
    assert z.dtype == torch.bfloat16
    assert torch.autograd.grad(z.float().sum(), wide)[0].dtype == torch.float32


def test_strided_rows(backend: Backend) -> None:
    base = torch.randn(4, 6, 200, device=backend.device)
    views = (base[:, ::2, :96], base.transpose(0, 1), base[..., ::2])
    for view in views:
        x = view.detach().requires_grad_()
        dy = torch.randn_like(x)
        y = ours(x, None, None, 0.0, True, backend)
        exact = plain(x.double(), None, None, 0.0, True)
        assert_within_budget(y, exact.float(), exact)
        extra, _ = recovery_error(x.detach(), dy, y.detach(), None, 0.0, True)
        (true,) = torch.autograd.grad(exact, x, dy.double())
        assert_within_budget(torch.autograd.grad(y, x, dy)[0], true, true.double(), extra)


def test_weight_gradients_repeat_bit_for_bit(backend: Backend) -> None:
    x = torch.randn(100 if INTERPRETED else 500, 48, device=backend.device)
    weight = torch.rand(48, device=backend.device, requires_grad=True)
    dy = torch.randn_like(x)
    runs = [
        torch.autograd.grad(ours(x, weight, None, 0.0, False, backend), weight, dy)[0]
        for _ in range(3)
    ]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("shape", [(2, 3, 37), (33, 768), (2, 16500), (0, 16)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_a_copy_is_the_output_cast(
    backend: Backend, shape: tuple[int, ...], out_dtype: torch.dtype
) -> None:
    x = torch.randn(shape, device=backend.device)
    bias = torch.randn(shape[-1], device=backend.device)
    lower = _COPY_DTYPE if out_dtype == torch.float32 else torch.float32
    settings, chosen = NormSettings(EPS), backend.implementation
    y, copy, _ = ms_norm(x, None, bias, settings, out_dtype, lower, implementation=chosen)
    assert copy is not None
    assert copy.dtype == lower
    assert torch.equal(copy, y.to(lower))


@pytest.mark.parametrize("used", ["both", "output", "copy"])
def test_a_copy_adds_its_gradient_to_that_of_the_output(backend: Backend, used: str) -> None:
    x = torch.randn(6, 40, device=backend.device, requires_grad=True)
    weight = (torch.rand(40, device=backend.device) + 0.5).requires_grad_()
    (y, copy, _), saved = saved_storages(
        lambda: ms_norm(
            x,
            weight,
            None,
            NormSettings(EPS),
            copy_dtype=_COPY_DTYPE,
            implementation=backend.implementation,
        )
    )
    assert sum(saved.values()) == copy.nbytes + 6 * 4 + weight.nbytes
    dy, d_copy = torch.randn_like(y), torch.randn_like(copy)
    outputs = {"both": (y, copy), "output": (y,), "copy": (copy,)}[used]
    given = {"both": (dy, d_copy), "output": (dy,), "copy": (d_copy,)}[used]
    total = sum(g.double() for g in given)
    exact = plain(x.double(), weight.double(), None, 0.0, True)
    extra = recovery_error(x.detach(), total, copy.detach(), weight.detach(), 0.0, True)
    for mine, true, cost in zip(
        torch.autograd.grad(outputs, (x, weight), given),
        torch.autograd.grad(exact, (x, weight), total),
        extra,
        strict=True,
    ):
        assert_within_budget(mine, true, true.double(), cost)


def test_zero_weights_give_finite_gradients(backend: Backend) -> None:
    x = torch.randn(4, 40, device=backend.device, requires_grad=True)
    weight = torch.ones(40, device=backend.device)
    weight[::3] = 0
    ours(x, weight, None, 0.0, True, backend).square().sum().backward()
    assert bool(x.grad.isfinite().all())


def test_a_second_backward_gives_the_same(backend: Backend) -> None:
    x = torch.randn(4, 40, device=backend.device, requires_grad=True)
    y = ours(x, None, None, 0.0, True, backend)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x, dy)[0])


def test_writing_into_the_saved_output_is_noticed(backend: Backend) -> None:
    x = torch.randn(4, 40, device=backend.device, requires_grad=True)
    y = ours(x, None, None, 0.0, True, backend)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(
        RuntimeError, match="the output of a norm, or its weight or bias, was written in place"
    ):
        y.sum().backward()


@pytest.mark.parametrize("centered", [True, False])
def test_float64(centered: bool) -> None:
    x = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    weight, bias = parameters(20, "cpu", torch.float64, 0.0, centered)
    inputs = tuple(t for t in (x, weight, bias) if t is not None)
    dy = torch.randn_like(x)
    y = ours(x, weight, bias, 0.0, centered, Backend("cpu", "reference"))
    exact = plain(x, weight, bias, 0.0, centered)
    for mine, true in zip(
        (y, *torch.autograd.grad(y, inputs, dy)),
        (exact, *torch.autograd.grad(exact, inputs, dy)),
        strict=True,
    ):
        error = (mine - true).detach().abs().max() / true.detach().abs().max()
        assert float(error) < 1e-13


def test_without_gradients_under_autocast(backend: Backend) -> None:
    x = torch.randn(4, 40, device=backend.device)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y = ours(x, None, None, 0.0, True, backend, torch.bfloat16)
    assert y.dtype == torch.bfloat16
    assert torch.equal(ours(x, None, None, 0.0, True, backend), plain(x, None, None, 0.0, True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own: a FutureWarning since 2.15
@pytest.mark.parametrize("copies", [False, True])
def test_forward_mode_is_that_of_torch(backend: Backend, copies: bool) -> None:
    """A kernel would drop the tangent without a word."""
    x = torch.randn(3, 16, device=backend.device)
    weight = torch.rand(16, device=backend.device)

    def tangent(norm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.arange(48, device=x.device).view_as(x).to(x))
            found: Tensor = forward_ad.unpack_dual(norm(dual, weight)).tangent
            return found.clone()

    def own(x: Tensor, weight: Tensor) -> Tensor:
        copy = torch.bfloat16 if copies else None
        settings, chosen = NormSettings(EPS, 1.0, centered=False), backend.implementation
        return ms_norm(x, weight, None, settings, None, copy, implementation=chosen)[0]

    def stock(x: Tensor, weight: Tensor) -> Tensor:
        return plain(x, weight, None, 1.0, False)

    exact = tangent(stock, x.double(), weight.double())
    assert_near(tangent(own, x, weight), tangent(stock, x, weight), exact)


@pytest.mark.skipif(INTERPRETED, reason="checks arguments, not kernels")
def test_errors_name_the_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(4,\)"):
        ms_norm(torch.randn(2, 4), torch.ones(3), None, NormSettings(EPS))
    with pytest.raises(ValueError, match="at least one dimension"):
        ms_norm(torch.tensor(1.0), None, None, NormSettings(EPS))
    with pytest.raises(TypeError, match=r"torch\.int64"):
        ms_norm(torch.arange(4), None, None, NormSettings(EPS))

"""activation_linear: F.linear whose weight gradient recomputes its input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import ACTIVATION_KINDS
from lowmem_patch.functional import LowRank, activation, activation_linear
from lowmem_patch.functional._implementation import module
from lowmem_patch.functional.linear import recast_linear
from tests.ops.conftest import INTERPRETED, Backend, part
from tests.support.judge import assert_within_budget
from tests.support.saved import saved_storages, storage_of

FEATURES, OUT = 24, 10


def make_sources(
    gated: bool, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    shape = (2, 3, FEATURES)
    return tuple(
        torch.randn(shape).to(device, dtype).requires_grad_() for _ in range(2 if gated else 1)
    )


def plain(sources: tuple[Tensor, ...], kind: str) -> Tensor:
    hidden = reference.activate(sources[0], kind)
    return hidden * sources[1] if len(sources) == 2 else hidden


def ours(sources: tuple[Tensor, ...], kind: str, backend: Backend) -> Tensor:
    with torch.no_grad():
        if len(sources) == 2:
            return activation(sources[0], kind, sources[1], implementation=backend.implementation)
        return activation(sources[0], kind, implementation=backend.implementation)


@pytest.mark.parametrize(
    ("kind", "gated", "with_bias", "dtype"),
    part(ACTIVATION_KINDS, [False, True], [False, True], [torch.float32, torch.bfloat16]),
)
def test_gradients_are_torchs_within_its_own_error(
    backend: Backend, kind: str, gated: bool, with_bias: bool, dtype: torch.dtype
) -> None:
    sources = make_sources(gated, backend.device, dtype)
    weight = torch.randn(OUT, FEATURES).to(backend.device, dtype).requires_grad_()
    bias = torch.randn(OUT).to(backend.device, dtype).requires_grad_() if with_bias else None
    inputs = (*sources, weight, *((bias,) if bias is not None else ()))
    dy = torch.randn(2, 3, OUT).to(backend.device, dtype)
    y = activation_linear(
        ours(sources, kind, backend),
        sources,
        weight,
        bias,
        kind,
        dtype,
        implementation=backend.implementation,
    )
    theirs = F.linear(plain(sources, kind), weight, bias)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    count = len(sources)
    wide_bias = wide[-1] if with_bias else None
    exact = F.linear(plain(wide[:count], kind), wide[count], wide_bias)
    # the rounding of hidden and of partial sums enters every output, at the scale of their terms
    unit = torch.finfo(dtype).eps
    terms = F.linear(plain(wide[:count], kind).abs(), wide[count].abs()).detach()
    assert_within_budget(y, theirs, exact.detach(), unit * terms)
    found = torch.autograd.grad(y, inputs, dy)
    expected = torch.autograd.grad(theirs, inputs, dy)
    d_exact = torch.autograd.grad(exact, wide, dy.double())
    for mine, other, true in zip(found, expected, d_exact, strict=True):
        assert_within_budget(mine, other, true, unit * true.abs().max())


@pytest.mark.skipif(INTERPRETED, reason="bits of eager torch")
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, FEATURES), (2, 3, FEATURES), (FEATURES,)], ids=str)
def test_float32_bits_are_those_of_linear(
    kind: str, gated: bool, with_bias: bool, shape: tuple[int, ...]
) -> None:
    sources = tuple(torch.randn(shape) for _ in range(2 if gated else 1))
    weight = torch.randn(OUT, FEATURES, requires_grad=True)
    bias = torch.randn(OUT, requires_grad=True) if with_bias else None
    sources = tuple(source.requires_grad_() for source in sources)
    # torch has no kernel for QuickGELU, whose eager backward rounds elsewhere
    inputs = (
        *(() if kind == "quick_gelu" else sources),
        weight,
        *(() if bias is None else (bias,)),
    )
    y = activation_linear(plain(sources, kind).detach(), sources, weight, bias, kind, weight.dtype)
    exact = F.linear(plain(sources, kind), weight, bias)
    dy = torch.randn_like(y)
    assert torch.equal(y, exact)
    for mine, true in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(exact, inputs, dy), strict=True
    ):
        assert torch.equal(mine, true)


def make_adapter(device: str, dtype: torch.dtype, rank: int = 3) -> LowRank:
    lora_A = torch.randn(rank, FEATURES).to(device, dtype).requires_grad_()
    return LowRank(lora_A, torch.randn(OUT, rank).to(device, dtype).requires_grad_(), 0.7)


def with_adapter(hidden: Tensor, weight: Tensor, bias: Tensor | None, adapter: LowRank) -> Tensor:
    added = F.linear(F.linear(hidden, adapter.lora_A), adapter.lora_B) * adapter.scale
    return F.linear(hidden, weight, bias) + added


@pytest.mark.parametrize("form", ["identity", "activation", "gated"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_with_an_adapter_are_torchs(
    backend: Backend, form: str, frozen: bool, dtype: torch.dtype
) -> None:
    sources = make_sources(form == "gated", backend.device, dtype)
    weight = torch.randn(OUT, FEATURES).to(backend.device, dtype).requires_grad_(not frozen)
    bias = torch.randn(OUT).to(backend.device, dtype).requires_grad_(not frozen)
    adapter = make_adapter(backend.device, dtype)
    inputs = tuple(
        t for t in (*sources, weight, bias, adapter.lora_A, adapter.lora_B) if t.requires_grad
    )

    def hidden_of(tensors: tuple[Tensor, ...]) -> Tensor:
        return tensors[0] if form == "identity" else plain(tensors, "gelu")

    def run() -> Tensor:
        if form == "identity":
            return recast_linear(sources[0], weight, bias, dtype, adapter)
        hidden = ours(sources, "gelu", backend)
        return activation_linear(
            hidden,
            sources,
            weight,
            bias,
            "gelu",
            dtype,
            adapter,
            implementation=backend.implementation,
        )

    y, saved = saved_storages(run)
    kept = {storage_of(t) for t in (*sources, weight, adapter.lora_A, adapter.lora_B)}
    rank = 8 if dtype == torch.bfloat16 else 3  # padded where tensor cores want it
    low = 6 * rank * y.element_size()  # x A^T
    assert kept < set(saved) and sum(saved[s] for s in set(saved) - kept) == low
    theirs = with_adapter(hidden_of(sources), weight, bias, adapter)
    wide = [t.detach().double().requires_grad_() for t in (*sources, weight, bias, *adapter[:2])]
    wide_adapter = LowRank(wide[-2], wide[-1], adapter.scale)
    exact = with_adapter(hidden_of(tuple(wide[:-4])), wide[-4], wide[-3], wide_adapter)
    terms = with_adapter(
        hidden_of(tuple(wide[:-4])).abs(), wide[-4].abs(), wide[-3].abs(),
        LowRank(wide[-2].abs(), wide[-1].abs(), adapter.scale),
    ).detach()  # fmt: skip
    unit = torch.finfo(dtype).eps
    assert_within_budget(y, theirs, exact.detach(), unit * terms)
    dy = torch.randn_like(y)
    wide_inputs = [
        w
        for w, t in zip(wide, (*sources, weight, bias, *adapter[:2]), strict=True)
        if t.requires_grad
    ]
    for mine, other, true in zip(
        torch.autograd.grad(y, inputs, dy),
        torch.autograd.grad(theirs, inputs, dy),
        torch.autograd.grad(exact, wide_inputs, dy.double()),
        strict=True,
    ):
        assert_within_budget(mine, other, true, unit * true.abs().max())


@pytest.mark.parametrize("rank", [1, 4, 8, 12])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_adapter_weights_are_cast_as_torch_does(
    backend: Backend, rank: int, given: torch.dtype, dtype: torch.dtype
) -> None:
    """Cast once, to the nearest; what is padded is zeros, and float32 is not padded."""
    lora_A = torch.randn(rank, FEATURES).to(backend.device, given)
    lora_B = torch.randn(OUT, 2 * rank).to(backend.device, given)[:, ::2]  # in strides
    found = module(backend.implementation).adapter_weights(lora_A, lora_B, dtype)
    padded = rank if dtype == torch.float32 else {1: 8, 4: 8, 8: 8, 12: 16}[rank]
    assert [tuple(t.shape) for t in found] == [(padded, FEATURES), (OUT, padded)]
    assert not found[0][rank:].any() and not found[1][:, rank:].any()
    cuts_off = INTERPRETED and dtype == torch.bfloat16 != given  # as Triton's interpreter casts
    unit = torch.finfo(dtype).eps if cuts_off else 0.0
    for narrow, wide in ((found[0][:rank], lora_A), (found[1][:, :rank], lora_B)):
        torch.testing.assert_close(narrow, wide.to(dtype), rtol=unit, atol=0)  # a cast: to the bit


@pytest.mark.parametrize("trains", ["x", "lora_A", "lora_B"])
def test_one_part_of_an_adapted_linear_trains(backend: Backend, trains: str) -> None:
    """A rank that is padded, with weights wider than the product."""
    (x,) = (t.detach() for t in make_sources(False, backend.device))
    weight = torch.randn(OUT, FEATURES, device=backend.device)
    adapter = LowRank(*(t.detach() for t in make_adapter(backend.device, torch.float32)[:2]), 0.7)
    one = {"x": x, "lora_A": adapter.lora_A, "lora_B": adapter.lora_B}[trains].requires_grad_()
    y = recast_linear(x, weight, None, torch.bfloat16, adapter)
    dy = torch.randn_like(y)
    if (
        trains == "lora_A"
    ):  # its gradient does not ask for it, so that an optimizer may have written it
        with torch.no_grad():
            adapter.lora_A.add_(0)
    (found,) = torch.autograd.grad(y, one, dy)
    with torch.autocast(backend.device, torch.bfloat16):
        theirs = with_adapter(x, weight, None, adapter)
    (other,) = torch.autograd.grad(theirs, one, dy)
    x, weight, lora_A, lora_B = (
        t.detach().double().requires_grad_(t is one) for t in (x, weight, *adapter[:2])
    )
    exact = with_adapter(x, weight, None, LowRank(lora_A, lora_B, adapter.scale))
    (true,) = torch.autograd.grad(
        exact, [t for t in (x, lora_A, lora_B) if t.requires_grad], dy.double()
    )
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert_within_budget(found, other, true, torch.finfo(torch.bfloat16).eps * true.abs().max())


def test_an_adapter_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product is written first, over whatever lies there."""
    allocate = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: allocate(*a, **k).fill_(torch.nan))
    (x,) = make_sources(False, "cpu", torch.float64)
    weight = torch.randn(OUT, FEATURES, dtype=torch.float64, requires_grad=True)
    adapter = make_adapter("cpu", torch.float64)
    inputs = (x, weight, adapter.lora_A, adapter.lora_B)
    y = recast_linear(x, weight, None, torch.float64, adapter)
    theirs = with_adapter(x, weight, torch.zeros(OUT, dtype=torch.float64), adapter)
    torch.testing.assert_close(y, theirs)
    dy = torch.randn_like(y)
    for mine, other in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(theirs, inputs, dy), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("gated", [False, True])
def test_hidden_is_not_kept(backend: Backend, gated: bool) -> None:
    sources = make_sources(gated, backend.device)
    weight = torch.randn(OUT, FEATURES, device=backend.device, requires_grad=True)
    _, saved = saved_storages(
        lambda: activation_linear(
            ours(sources, "gelu", backend),
            sources,
            weight,
            None,
            "gelu",
            torch.float32,
            implementation=backend.implementation,
        )
    )
    assert set(saved) == {storage_of(t) for t in (*sources, weight)}


@pytest.mark.parametrize("needs", ["source", "weight", "bias"])
def test_only_what_is_needed_is_saved_and_computed(backend: Backend, needs: str) -> None:
    (source,) = (t.detach() for t in make_sources(False, backend.device))
    tensors = {
        "source": source,
        "weight": torch.randn(OUT, FEATURES, device=backend.device),
        "bias": torch.randn(OUT, device=backend.device),
    }
    tensors[needs].requires_grad_()
    y, saved = saved_storages(
        lambda: activation_linear(
            plain((source,), "silu").detach(),
            (source,),
            tensors["weight"],
            tensors["bias"],
            "silu",
            torch.float32,
            implementation=backend.implementation,
        )
    )
    kept = {"source": [source, tensors["weight"]], "weight": [source], "bias": []}[needs]
    assert set(saved) == {storage_of(t) for t in kept}
    y.sum().backward()
    assert [name for name, t in tensors.items() if t.grad is not None] == [needs]


@pytest.mark.parametrize("autocast", [False, True])
def test_no_low_precision_weight_is_saved(backend: Backend, autocast: bool) -> None:
    sources = make_sources(False, backend.device)
    weight = torch.randn(OUT, FEATURES, device=backend.device, requires_grad=True)
    bias = torch.randn(OUT, device=backend.device, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=autocast):
            hidden = ours(sources, "gelu", backend)
            return activation_linear(
                hidden,
                sources,
                weight,
                bias,
                "gelu",
                torch.bfloat16,
                implementation=backend.implementation,
            )

    y, saved = saved_storages(run)
    assert y.dtype == torch.bfloat16
    assert set(saved) == {storage_of(sources[0]), storage_of(weight)}
    inputs = (sources[0], weight, bias)
    dy = torch.randn_like(y)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        theirs = F.linear(plain(sources, "gelu"), weight, bias)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    exact = F.linear(plain(wide[:1], "gelu"), *wide[1:])
    expected = torch.autograd.grad(theirs, inputs, dy)
    for mine, other, true in zip(
        torch.autograd.grad(y, inputs, dy),
        expected,
        torch.autograd.grad(exact, wide, dy.double()),
        strict=True,
    ):
        unit = torch.finfo(torch.bfloat16).eps
        assert_within_budget(mine, other, true, unit * true.abs().max())


def test_without_gradients_nothing_is_saved(backend: Backend) -> None:
    (source,) = make_sources(False, backend.device)
    weight = torch.randn(OUT, FEATURES, device=backend.device)
    with torch.no_grad():
        hidden = plain((source,), "gelu")
        y, saved = saved_storages(
            lambda: activation_linear(
                hidden,
                (source,),
                weight,
                None,
                "gelu",
                hidden.dtype,
                implementation=backend.implementation,
            )
        )
    assert not saved
    assert torch.equal(y, F.linear(hidden, weight))


@pytest.mark.skipif(INTERPRETED, reason="no kernel takes part")
@pytest.mark.parametrize("with_bias", [False, True])
def test_recast_linear_repeats_its_casts(with_bias: bool) -> None:
    x = torch.randn(2, 3, FEATURES, requires_grad=True)
    weight = torch.randn(OUT, FEATURES, requires_grad=True)
    bias = torch.randn(OUT, requires_grad=True) if with_bias else None
    inputs = (x, weight) if bias is None else (x, weight, bias)
    y, saved = saved_storages(lambda: recast_linear(x, weight, bias, torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = F.linear(x, weight, bias)
    assert set(saved) == {storage_of(x), storage_of(weight)}
    assert torch.equal(y, theirs)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    exact = F.linear(*wide)
    dy = torch.randn_like(y)
    for mine, other, true in zip(
        torch.autograd.grad(y, inputs, dy),
        torch.autograd.grad(theirs, inputs, dy),
        torch.autograd.grad(exact, wide, dy.double()),
        strict=True,
    ):
        unit = torch.finfo(torch.bfloat16).eps
        assert_within_budget(mine, other, true, unit * true.abs().max())


@pytest.mark.skipif(INTERPRETED, reason="checks arguments, not kernels")
def test_errors_name_the_shapes() -> None:
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"\(4, 3\) for \(2, 4\)"):
        recast_linear(x, weight.t(), None, x.dtype)
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(3, 5\)"):
        recast_linear(x, weight, None, x.dtype, LowRank(torch.randn(2, 4), torch.randn(3, 5), 1.0))

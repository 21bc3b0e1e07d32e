"""to_eight_bits and from_eight_bits: integers, a scale for each group, and what is made of them again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowmem_patch import reference
from lowmem_patch.constants import EIGHT_BIT_GROUP, EIGHT_BIT_LEVELS, EightBits, NormSettings
from lowmem_patch.functional import from_eight_bits, to_eight_bits
from lowmem_patch.functional._implementation import module, resolve
from lowmem_patch.functional.eight_bit import matrix_values, stored_matrix
from lowmem_patch.functional.graph_storage import graph_values
from tests.ops.conftest import Backend, part
from tests.support.judge import assert_within_budget

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 127, 128, 129, 4096, 5000]
GROUPS = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def stored(x: Tensor, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    integers, scales = to_eight_bits(x, implementation=backend.implementation)  # type: ignore[arg-type]
    y = from_eight_bits(integers, scales, x.dtype, implementation=backend.implementation)  # type: ignore[arg-type]
    return integers, scales, y


def by_element(per_group: Tensor, size: int) -> Tensor:
    return per_group.repeat_interleave(EIGHT_BIT_GROUP)[:size]


@GROUPS
@pytest.mark.parametrize("size", SIZES)
def test_values_come_back_to_half_a_step(backend: Backend, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()
    x = x.to(backend.device, dtype)
    integers, scales, y = stored(x, backend)
    assert (integers.dtype, scales.dtype, y.dtype) == (torch.int8, torch.bfloat16, dtype)
    assert integers.shape == y.shape == x.shape
    assert scales.shape == (-(-size // EIGHT_BIT_GROUP),)
    step = by_element(scales, size).double()
    assert bool((integers.abs() <= EIGHT_BIT_LEVELS).all())
    # half a step, and the rounding of float32 arithmetic and of the result
    band = 4 * torch.finfo(torch.float32).eps * x.double().abs()
    band += torch.finfo(dtype).eps * x.double().abs()
    assert bool(((y.double() - x.double()).abs() <= step / 2 + band).all())
    largest = torch.nn.functional.pad(x, (0, -size % EIGHT_BIT_GROUP)).view(-1, EIGHT_BIT_GROUP)
    exact = largest.double().abs().amax(1) / EIGHT_BIT_LEVELS
    # rounded up, so that the integers stay in their range
    wide, eps = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    assert bool((scales.double() >= exact * (1 - wide)).all())
    assert bool((scales.double() <= exact * (1 + eps)).all())


@GROUPS
def test_equal_bytes_by_the_reference(backend: Backend, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(128 * 40 + 5, generator=generator)).to(backend.device, dtype)
    x[:128], x[200], x[300], x[400] = 0, torch.inf, -torch.inf, torch.nan
    x[512:640] *= torch.finfo(dtype).tiny
    integers, scales, y = stored(x, backend)
    expected = reference.to_eight_bits(x)
    assert torch.equal(integers, expected[0])
    assert torch.equal(scales.nan_to_num(7.0), expected[1].nan_to_num(7.0))
    again = reference.from_eight_bits(*expected, dtype)
    assert torch.equal(y.isnan(), again.isnan())
    exact = reference.from_eight_bits(*expected, torch.float32)
    # Triton's interpreter cuts a float32 off where it makes a bfloat16 of it
    assert_within_budget(y.nan_to_num(7.0), again.nan_to_num(7.0), exact.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("dtype", "columns", "saved"),
    part(DTYPES, [128, 200, 256, 384, 1024, 4096, 17000], ["y", "copy", "z"]),
    ids=str,
)
def test_a_norm_stores_what_a_second_pass_would(
    backend: Backend, dtype: torch.dtype, columns: int, saved: str
) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(2, 10 if columns <= 1024 else 2, columns, generator=generator)
    x[0, 1] = 0
    x = x.to(backend.device, dtype)
    weight, bias = (
        torch.randn(columns, generator=generator).to(backend.device, dtype) for _ in range(2)
    )
    bias[-1] = torch.inf  # not finite in y, and in the last group of a row alone
    other = torch.bfloat16 if dtype != torch.bfloat16 else torch.float16
    dtypes = (other if saved != "y" else None, other if saved == "z" else None)
    given = (x, weight, bias, NormSettings(1e-5, centered=True), dtype, *dtypes)
    used = module(backend.implementation)
    output, parts = used.norm_forward_in_eight_bits(*given)
    expected = used.norm_forward(*given)
    for ours, theirs in zip(output, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    again = used.to_eight_bits(expected[{"y": 0, "copy": 1, "z": 2}[saved]].view(-1))
    assert torch.equal(parts[0], again[0])
    assert torch.equal(parts[1].nan_to_num(7.0), again[1].nan_to_num(7.0))


@GROUPS
def test_what_is_not_finite_makes_its_group_so_and_no_other(
    backend: Backend, dtype: torch.dtype
) -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(3 * EIGHT_BIT_GROUP, device=backend.device, dtype=dtype)
        x[EIGHT_BIT_GROUP + 3] = value
        _, _, y = stored(x, backend)
        first, second, third = y.view(3, EIGHT_BIT_GROUP)
        assert bool(second.isnan().all())
        assert bool(first.isfinite().all() and third.isfinite().all())


@GROUPS
def test_zeros_are_zeros_and_the_smallest_numbers_come_near(
    backend: Backend, dtype: torch.dtype
) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.zeros(2 * EIGHT_BIT_GROUP, device=backend.device, dtype=dtype)
    x[EIGHT_BIT_GROUP:] = tiny
    _, _, y = stored(x, backend)
    assert bool((y[:EIGHT_BIT_GROUP] == 0).all())
    assert float((y - x).abs().max()) <= tiny


def test_no_gradient_flows_and_what_a_packer_changed_is_named() -> None:
    x = torch.randn(256, requires_grad=True)
    integers, scales = to_eight_bits(x)
    assert not from_eight_bits(integers, scales, torch.float32).requires_grad
    with pytest.raises(TypeError, match="int8"):
        from_eight_bits(scales, scales, torch.float32)


@GROUPS
@pytest.mark.parametrize("gated", [False, True], ids=["alone", "gated"])
@pytest.mark.parametrize("part", [None, slice(128, 384)], ids=["whole", "columns"])
def test_gradients_of_what_is_stored_are_those_of_its_values(
    backend: Backend, dtype: torch.dtype, gated: bool, part: slice | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 3, 512)
    dy, x, up = (
        torch.randn(sizes, generator=generator).to(backend.device, dtype) for _ in range(3)
    )
    x[0, 1, 130] = torch.inf
    stored = [EightBits(*stored_matrix(one), dtype) for one in (x, up)]
    values = [matrix_values(one.integers, one.scales, dtype) for one in stored]
    columns = part or slice(0, 512)
    if part is not None:
        stored, dy = [one.columns(part) for one in stored], dy[..., part].contiguous()
    operations = module(resolve(backend.implementation, x))  # type: ignore[arg-type]

    def gradients(sources: list[Tensor | EightBits]) -> list[Tensor]:
        into = [torch.full_like(x, 7.0) for _ in sources[: 1 + gated]]
        places, hidden = [one[..., columns] for one in into], torch.empty_like(dy)
        given = (*sources, "silu") if gated else (sources[0], None, "gelu")
        operations.activation_backward(dy, *given, hidden, places)
        return [*into, hidden]

    found = gradients(list(stored))
    values = [value[..., columns] for value in values]
    if backend.implementation == "reference":  # torch rounds a strided GELU otherwise
        values = [value.contiguous() for value in values]
    expected = gradients(list(values))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@GROUPS
@pytest.mark.parametrize("shape", [(3, 5, 128), (4, 256), (2, 3, 130), (7,), (0, 128), (256, 6)])
def test_values_in_a_graph_are_those_of_the_parts(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = (9 * torch.randn(shape, generator=generator)).to(backend.device, dtype)
    if shape == (256, 6):
        x = x.t()
    if shape == (4, 256):
        x[0, 3], x[1, 5] = torch.nan, 65504
    lying = x.t() if shape == (256, 6) else x  # as the memory does, of which the groups are
    expected = matrix_values(*stored_matrix(lying), dtype)
    expected = expected.t() if lying is not x else expected
    interpreted = backend.implementation == "triton" and backend.device == "cpu"
    # Triton's interpreter rounds a bfloat16 otherwise than torch: by a step of it
    rtol = torch.finfo(dtype).eps if interpreted else 0.0
    torch.testing.assert_close(graph_values(x), expected, rtol=rtol, atol=0, equal_nan=True)

"""How the reference packs flags and unpacks them; test_dropout.py compares the kernel with it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lowmem_patch.reference import pack_bool, unpack_bool


@given(st.lists(st.booleans(), max_size=70))
def test_packed_bits_are_unpacked_the_same(flags: list[bool]) -> None:
    mask = torch.tensor(flags, dtype=torch.bool)
    packed = pack_bool(mask)
    assert packed.dtype == torch.uint8
    assert packed.numel() == (len(flags) + 7) // 8
    assert torch.equal(unpack_bool(packed, mask.shape), mask)


def test_first_flag_is_lowest_and_strides_are_read() -> None:
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    assert pack_bool(mask).tolist() == [0b110001]
    assert pack_bool(mask.t()).tolist() == [0b100101]
    assert torch.equal(unpack_bool(pack_bool(mask.t()), (2, 3)), mask.t())

"""Packing is an exact inverse pair, and the words are those of the compressed-tensors library."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.quant.packing import pack, unpack

BITS = st.integers(1, 8)


def codes(num_bits: int, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (num_bits - 1)
    return torch.randint(-half, half, (rows, columns), generator=generator).to(torch.int8)


@settings(deadline=None, max_examples=60)
@given(num_bits=BITS, rows=st.integers(1, 5), columns=st.integers(1, 70), seed=st.integers(0, 1000))
def test_unpack_is_the_inverse_of_pack(num_bits: int, rows: int, columns: int, seed: int) -> None:
    codes_OI = codes(num_bits, rows, columns, seed)
    words = pack(codes_OI, num_bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-columns * num_bits // 32))
    assert torch.equal(unpack(words, num_bits, columns), codes_OI)


@settings(deadline=None, max_examples=60)
@given(
    num_bits=BITS,
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_words_are_those_of_compressed_tensors(num_bits: int, rows: int, columns: int, seed: int) -> None:
    codes_OI = codes(num_bits, rows, columns, seed)
    theirs = pack_to_int32(codes_OI, num_bits)
    assert torch.equal(pack(codes_OI, num_bits), theirs)
    assert torch.equal(
        unpack(theirs, num_bits, columns), unpack_from_int32(theirs, num_bits, torch.Size((rows, columns)))
    )


@pytest.mark.parametrize("num_bits", [4, 8])
def test_every_code_in_every_lane_packs_to_its_bits(num_bits: int) -> None:
    """Against plain integer arithmetic, sign bit included."""
    per_word = 32 // num_bits
    half = 1 << (num_bits - 1)
    for lane in range(per_word):
        for code in {-half, -1, 0, 1, half - 1}:
            row = torch.full((1, per_word), -half, dtype=torch.int8)  # stored as zero bits
            row[0, lane] = code
            word = int(pack(row, num_bits)) % (1 << 32)
            assert word == (code + half) << (num_bits * lane)

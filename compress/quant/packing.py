"""Bit packing of codes into int32 words, little end first; `unpack` is the exact inverse of `pack`.

Stored code u = q + 2^(b-1) (unsigned). The codes of a row follow one another without a gap: element i is in
bits b * i to b * i + b - 1 of the row, and bit n of a row is bit n % 32 of word n // 32. A code of three bits
may so lie in two words; 32 of them are three words. A row that does not fill its last word is padded with
zero bits. This is the order of compressed-tensors since 0.20 and, along other axes, of GPTQ; for 2, 4 and 8
bits also of older versions.

Shapes: O out, I in, W words of a row.
"""

import math

import torch
from torch import Tensor

WORD_BITS = 32


def num_words(size: int, num_bits: int) -> int:
    """Return the words of a row of `size` codes."""
    return -(-size * num_bits // WORD_BITS)


def codes_in_whole_words(num_bits: int) -> int:
    """Return the least number of codes that fill words without a rest: 32 of three bits, in three words."""
    return WORD_BITS // math.gcd(WORD_BITS, num_bits)


def pack(codes_OI: Tensor, num_bits: int) -> Tensor:
    """Pack int8 codes [O, I] into int32 words [O, ceil(I * b / 32)], along the last axis."""
    period = codes_in_whole_words(num_bits)
    zero = 1 << (num_bits - 1)
    step = period * num_bits // WORD_BITS
    words = codes_OI.new_zeros(
        (*codes_OI.shape[:-1], num_words(codes_OI.shape[-1], num_bits)), dtype=torch.int32
    )
    for idx in range(min(period, codes_OI.shape[-1])):
        codes = codes_OI[..., idx::period].to(torch.int32) + zero
        word, shift = divmod(idx * num_bits, WORD_BITS)
        words[..., word::step][..., : codes.shape[-1]] |= codes << shift
        if shift + num_bits > WORD_BITS:
            words[..., word + 1 :: step][..., : codes.shape[-1]] |= codes >> (WORD_BITS - shift)
    return words


def unpack(words: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Unpack int32 words [O, W] into signed int8 codes [O, I]."""
    period = codes_in_whole_words(num_bits)
    zero = 1 << (num_bits - 1)
    step = period * num_bits // WORD_BITS
    words = torch.nn.functional.pad(words, (0, -words.shape[-1] % step)).unflatten(-1, (-1, step))
    starts = torch.arange(period, device=words.device) * num_bits
    first = starts // WORD_BITS
    lanes = words[..., first] >> (starts % WORD_BITS).to(torch.int32)
    for idx in range(period):
        here = WORD_BITS - idx * num_bits % WORD_BITS  # bits of the code in its first word
        if here < num_bits:
            lanes[..., idx] &= (1 << here) - 1
            lanes[..., idx] |= words[..., int(first[idx]) + 1] << here
    unsigned = (lanes & ((1 << num_bits) - 1)).flatten(-2)[..., :in_features]
    return (unsigned - zero).to(torch.int8)

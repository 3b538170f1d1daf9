"""Bit packing of codes into int32 words, little end first; `unpack` is the exact inverse of `pack`.

Stored code u = q + 2^(b-1) (unsigned); element i of a row is in bits b * (i % (32 / b)) of word i // (32 /
b). A row that does not fill its last word is padded with zero bits. This is the word order of
compressed-tensors and, along other axes, of GPTQ.

Shapes: O out, I in, W words of a row.
"""

import torch
from torch import Tensor


def pack(codes_OI: Tensor, num_bits: int) -> Tensor:
    """Pack int8 codes [O, I] into int32 words [O, ceil(I * b / 32)], along the last axis."""
    per_word = 32 // num_bits
    zero = 1 << (num_bits - 1)
    words = codes_OI.new_zeros((*codes_OI.shape[:-1], -(-codes_OI.shape[-1] // per_word)), dtype=torch.int32)
    for idx in range(per_word):
        codes = codes_OI[..., idx::per_word]
        words[..., : codes.shape[-1]] |= (codes.to(torch.int32) + zero) << (idx * num_bits)
    return words


def unpack(words: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Unpack int32 words [O, W] into signed int8 codes [O, I]."""
    per_word = 32 // num_bits
    shifts = torch.arange(per_word, device=words.device, dtype=torch.int32) * num_bits
    lanes = (words.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)
    unsigned = lanes.view(*words.shape[:-1], -1)[..., :in_features]
    return (unsigned - (1 << (num_bits - 1))).to(torch.int8)

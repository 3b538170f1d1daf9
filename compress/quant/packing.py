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
    unsigned = codes_OI.to(torch.int64) + (1 << (num_bits - 1))
    missing = -unsigned.shape[-1] % per_word
    if missing:
        unsigned = torch.nn.functional.pad(unsigned, (0, missing))
    lanes = unsigned.view(*unsigned.shape[:-1], -1, per_word)
    shifts = torch.arange(per_word, device=codes_OI.device, dtype=torch.int64) * num_bits
    words = (lanes << shifts).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(words: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Unpack int32 words [O, W] into signed int8 codes [O, I]."""
    per_word = 32 // num_bits
    shifts = torch.arange(per_word, device=words.device, dtype=torch.int32) * num_bits
    lanes = (words.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)
    unsigned = lanes.view(*words.shape[:-1], -1)[..., :in_features]
    return (unsigned - (1 << (num_bits - 1))).to(torch.int8)

"""Tokens in the rows of the embedding table, as digits that numbers of 16 bits hold exactly.

Every pass takes rows of the table, so layers that read tokens themselves (tables of experts, embeddings of
n-grams) have them wherever the rows come from.

Shapes: T rows, V vocabulary.
"""

import torch
from torch import Tensor

_BASE = 256
"""Whole numbers up to this one are exact in every dtype of models."""
NUM_DIGITS = 8
"""Digits of a token in a row of the table: 16 bytes of a row of 16 bits."""


def digits_of_tokens(num_tokens: int) -> Tensor:
    """Return the digits [V, `NUM_DIGITS`] of tokens, int64, the last digit first; zeros fill them up."""
    places = _BASE ** torch.arange(NUM_DIGITS)
    return torch.arange(num_tokens).unsqueeze(1) // places % _BASE


def tokens_of_digits(digits_TN: Tensor) -> Tensor:
    """Return the tokens int64 [T] of their digits."""
    places = _BASE ** torch.arange(NUM_DIGITS, device=digits_TN.device)
    return (digits_TN.to(torch.int64) * places).sum(1)

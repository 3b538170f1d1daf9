"""Operands of the recurrence of a Mamba-1 mixer in serving (`models/mamba1.py`).

Shapes: T rows, V channels, K numbers of the state of a channel.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

PLACE_ROWS = 16
"""Rows of a pass for each place of a chunk: no more than a sequence has whose rows go in chunks."""


def num_scan_places(num_rows: int) -> int:
    """Return the places of chunks of `CHUNK` rows in a pass over prompts. Chunk c of a sequence whose rows
    begin at s is in place s // PLACE_ROWS + c, so that chunks of two sequences with at least `PLACE_ROWS`
    rows are never in one."""
    return num_rows // PLACE_ROWS + 1


@dataclass(frozen=True)
class ScanWeights:
    """The parameters of the recurrence, float32: -exp(A_log) [V, K], the bias of dt [V] and D [V]."""

    decay_rate_VK: Tensor
    dt_bias_V: Tensor
    skip_V: Tensor


class ScanRows(NamedTuple):
    """The operands of the rows of a pass, in the dtype of the model: inputs x and their gates [T, V], dt
    before its bias and its softplus [T, V], and B and C side by side [T, 2 K]. Each may be columns of a wider
    tensor."""

    x_TV: Tensor
    gate_TV: Tensor
    dt_TV: Tensor
    bc_TK: Tensor

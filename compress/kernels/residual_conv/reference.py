"""A short convolution with a residual (`models/residual_conv.py`) over the rows of a pass, in PyTorch's
operators.

All rows of a sequence at once: each number comes from one channel, and has the same bits whatever is computed
with it. A layer has several such convolutions, and its state has the inputs of all of them.

Shapes: T rows, F channels, L rows of one sequence, W positions of the convolution, M inputs of a slot.
"""

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import RecurrentStates, Sequences
from compress.kernels.select import Kernel, anything, register
from compress.kernels.short_conv.reference import convolved, save_inputs


def residual_conv(
    rows_TF: Tensor, conv_FW: Tensor, states: RecurrentStates, sequences: Sequences, *, first_channel: int
) -> Tensor:
    """Return the rows with their convolution added [T, F], and write the slots of the sequences, in which
    `first_channel` is the first of the channels."""
    x_TF = rows_TF.to(torch.float32)
    sums_TF = torch.empty_like(x_TF, memory_format=torch.contiguous_format)
    channels = slice(first_channel, first_channel + x_TF.shape[1])
    inputs = states.inputs[..., channels]
    saving = states.saving if sequences.chunks_C4 is not None else None
    start = 0
    for idx, length in enumerate(sequences.query_lens):
        rows = slice(start, start + length)
        slot = sequences.slots_R[idx].long()
        first = sequences.context_lens_R[idx] - length
        sums_TF[rows] = convolved(x_TF[rows], conv_FW, inputs[slot], first)
        if saving is not None:
            save_inputs(saving, saving.inputs[..., channels], conv_FW.shape[1] - 1, x_TF[rows], slot, first)
        start += length
    return (x_TF + sums_TF).to(rows_TF.dtype)


register(Kernel("residual_conv", "reference", min_sm=0, priority=0, supports=anything, fn=residual_conv))

"""A gated short convolution (LFM2, arXiv 2511.23404) between its linears, in PyTorch's operators.

All rows of a sequence at once: each number comes from one channel, and has the same bits whatever is computed
with it. Numbers are rounded where the canonical decoder rounds them.

Shapes: T rows, F channels, L rows of one sequence, W positions of the convolution, M inputs of a slot.
"""

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import RecurrentStates, Saving, Sequences
from compress.kernels.select import Kernel, anything, register


def short_conv(rows_TF: Tensor, conv_FW: Tensor, states: RecurrentStates, sequences: Sequences) -> Tensor:
    """Return the outputs [T, F] from B, C and x [T, 3 F]; the slots of the sequences are written."""
    b_TF, c_TF, x_TF = rows_TF.chunk(3, dim=1)
    products_TF = (b_TF * x_TF).to(torch.float32)
    mixed_TF = torch.empty_like(products_TF)
    saving = states.saving if sequences.chunks_C4 is not None else None
    start = 0
    for idx, length in enumerate(sequences.query_lens):
        rows = slice(start, start + length)
        slot = sequences.slots_R[idx].long()
        first = sequences.context_lens_R[idx] - length
        mixed_TF[rows] = convolved(products_TF[rows], conv_FW, states.inputs[slot], first)
        if saving is not None:
            num_kept = states.recurrence.kernel_size - 1
            save_inputs(saving, saving.inputs, num_kept, products_TF[rows], slot, first)
        start += length
    return c_TF * mixed_TF.to(rows_TF.dtype)


def convolved(x_LF: Tensor, conv_FW: Tensor, inputs_MF: Tensor, first: Tensor) -> Tensor:
    """Return the convolution of the rows of a sequence, the first of which has position `first`, and keep
    the last of them in its slot."""
    width = conv_FW.shape[1]
    length = len(x_LF)
    positions = first + torch.arange(1 - width, length, device=x_LF.device)
    past_WF = inputs_MF[positions[: width - 1] % len(inputs_MF)]
    past_WF = torch.where(positions[: width - 1, None] >= 0, past_WF, torch.zeros_like(past_WF))
    all_LF = torch.cat((past_WF, x_LF))
    total_LF = torch.zeros_like(x_LF)
    for tap in range(width):
        total_LF += all_LF[tap : tap + length] * conv_FW[:, tap].to(torch.float32)
    num_left = min(length, len(inputs_MF))
    inputs_MF[positions[-num_left:] % len(inputs_MF)] = x_LF[-num_left:]
    return total_LF


def save_inputs(
    saving: Saving, inputs_PWF: Tensor, num_kept: int, x_LF: Tensor, slot: Tensor, first: Tensor
) -> None:
    """Save the last `num_kept` inputs before a position of these rows, where they are wanted, in their place
    among `inputs`: all channels that are saved, or some."""
    wanted = int(saving.wanted_S2[slot, 0])
    place = int(saving.wanted_S2[slot, 1])
    saved_WF = inputs_PWF[place]
    for position in range(max(wanted - num_kept, int(first)), min(wanted, int(first) + len(x_LF))):
        saved_WF[position % len(saved_WF)] = x_LF[position - int(first)]


register(Kernel("short_conv", "reference", min_sm=0, priority=0, supports=anything, fn=short_conv))

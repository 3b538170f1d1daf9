"""Common parts of the kernels of recurrences on a CPU: the rows that go at once, the convolution, and the
places of states.

Rows that go one after the other have tensors of the same shapes, so that their bits depend on the sequence
alone.

Shapes: T rows, F channels of the convolution, H heads, K key dimension, V value dimension, W positions of the
convolution, N states and M inputs of a slot.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import RecurrentStates, Sequences
from compress.kernels.recurrence.chunking import parts


@dataclass(frozen=True)
class Part:
    """Rows of one sequence that go at once, the first of which has position `first`."""

    states: RecurrentStates
    slot: int
    first: int
    length: int

    def convolved(self, x_TF: Tensor, conv_FW: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """Return silu of the convolution of inputs, in their dtype, and keep the last of them."""
        dtype = x_TF.dtype
        x_TF = x_TF.to(torch.float32)
        inputs_MF = self.states.inputs[self.slot]
        width = conv_FW.shape[1]
        positions = torch.arange(self.first - width + 1, self.first)
        past_WF = inputs_MF[positions % len(inputs_MF)]
        past_WF[positions < 0] = 0
        all_LF = torch.cat((past_WF, x_TF))
        total_TF = torch.zeros_like(x_TF)
        for tap in range(width):
            total_TF += all_LF[tap : tap + self.length] * conv_FW[:, tap].to(torch.float32)
        if bias_F is not None:
            total_TF += bias_F.to(torch.float32)
        num_left = min(self.length, len(inputs_MF))
        end = self.first + self.length
        inputs_MF[torch.arange(end - num_left, end) % len(inputs_MF)] = x_TF[-num_left:]
        return F.silu(total_TF.to(dtype))

    @property
    def before(self) -> Tensor:
        """The state before the rows [H, V, K]."""
        return self._state(self.first)

    @property
    def after(self) -> Tensor:
        """The place of the state after the rows, which is that of the state before where a slot keeps one."""
        return self._state(self.first + self.length)

    def _state(self, num_tokens: int) -> Tensor:
        """Return the state after so many tokens; rows that fill up a step come before the first."""
        heads_NHVK = self.states.heads[self.slot]
        if num_tokens <= 0:
            return torch.zeros_like(heads_NHVK[0])
        return heads_NHVK[(num_tokens - 1) % len(heads_NHVK)]


def run_parts(
    states: RecurrentStates,
    sequences: Sequences,
    run: Callable[[Part, slice], None],
    *,
    save: Callable[[int, int], None] | None = None,
) -> None:
    """Call `run` with every part of every sequence and its rows, and save the states that are wanted: by
    `save`, or with the inputs of the convolution."""
    start = 0
    lens = sequences.context_lens_R.tolist()
    slots = sequences.slots_R.tolist()
    for slot, context_len, length in zip(slots, lens, sequences.query_lens, strict=False):
        first = context_len - length
        wanted = 0
        if sequences.chunks_C4 is not None and states.saving is not None:
            wanted = int(states.saving.wanted_S2[slot, 0])
        for begin, end in parts(length, states.num_kept, wanted - first):
            run(Part(states, slot, first + begin, end - begin), slice(start + begin, start + end))
            if 0 < wanted == first + end:
                (save or states.save)(slot, wanted)
        start += length

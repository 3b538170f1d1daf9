"""Operands of recurrences in serving (`models/recurrence.py`): the parameters of gated delta nets (arXiv
2412.06464) and of Mamba-2 mixers (arXiv 2405.21060), the states of sequences, and the rows of a pass.

A sequence has a slot of states, which is its first block of the KV cache. Of the last N positions the slot
holds the state after each, and of the last M the inputs of the convolution; position p is in place p mod N,
or p mod M. So rows of proposals that are not kept need no undoing: the next step goes on after the last
position that was kept, and overwrites what follows it. Slot 0 belongs to no sequence.

Shapes: S slots, N states, M inputs, H heads, K key dimension, V value dimension, F channels of the
convolution, W its positions, Z = H V, T rows, R sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.operands.selective import num_scan_places
from compress.kernels.operands.tiles import query_tiles
from compress.models.recurrence import Recurrence

CHUNK = 32
"""Rows of a prompt whose updates kernels solve for at once."""
LONG_CHUNK = 64
"""Rows of a chunk of Mamba-2 mixers, which waits for the state before it alone."""
_ROWS_MULTIPLE = 128


def rows_of_chunks(has_mamba: bool, device: torch.device) -> int:
    """Return the rows of a prompt after a multiple of which its bits are the same wherever it is cut."""
    return LONG_CHUNK if has_mamba and device.type == "cuda" else CHUNK


def num_places(num_rows: int, num_sequences: int) -> int:
    """Return the places of states before chunks of `LONG_CHUNK` rows in a pass. Chunk c of sequence r, one of
    many, is in place s + min(r, s) + c, where s whole chunks come before the sequence."""
    whole = num_rows // LONG_CHUNK
    return whole + min(num_sequences - 1, whole) + 1 if num_rows > LONG_CHUNK else 0


def pass_bytes(recurrence: Recurrence, num_rows: int, num_sequences: int) -> int:
    """Return the bytes that a pass over prompts needs on a GPU in addition to its rows. Mamba-2 mixers need
    float32 states before their chunks, and lightning attention also its rows with the gates of such a mixer,
    and what it returns before gates. Mamba-1 mixers need float32 inputs of their convolution, a copy of
    them with the two factors that `short_conv` multiplies, and its outputs; or, later, states before their
    chunks with the sums of dt, if these are more."""
    if recurrence.module == "mamba1":
        of_chunks = num_scan_places(num_rows) * (recurrence.state_numbers + recurrence.num_channels)
        return 4 * max(5 * recurrence.num_channels * num_rows, of_chunks)
    if recurrence.module not in ("mamba", "lightning"):
        return 0
    of_states = 4 * recurrence.state_numbers * num_places(num_rows, num_sequences)
    if recurrence.module == "mamba":
        return of_states
    return of_states + 4 * (recurrence.num_channels + 2 * recurrence.value_size) * num_rows


@dataclass(frozen=True)
class DeltaWeights:
    """The parameters of a delta net other than its linears: weights of the convolution [F, W], -exp(A_log)
    [H] and dt_bias [D], float32, and the weight of the norm of a head [V]. D decays are those of all heads,
    or of the channels of all keys, H K, where they are by channel. `beta_factor`
    multiplies the sigmoids of beta."""

    conv_FW: Tensor
    decay_rate_H: Tensor
    dt_bias_D: Tensor
    norm_V: Tensor
    norm_eps: float
    beta_factor: float = 1.0


def padded_rows(num_rows: int) -> int:
    """Return the rows of the first linears of a Mamba-2 mixer, one product, in serving: with zero rows at the
    end, a multiple of what every kernel of linears serves."""
    return -(-num_rows // _ROWS_MULTIPLE) * _ROWS_MULTIPLE


@dataclass(frozen=True)
class MambaWeights:
    """The parameters of a Mamba-2 mixer other than its linears: weights [F, W] and bias [F] of the
    convolution, whose channels are C, B and x, -exp(A_log), dt_bias and D [H], float32, and the weight of the
    norm [Z], of whose `norm_groups` equal parts each is normed for itself; None where there is no norm.
    `gate_factor` and `dt_factor` multiply the gates and dt."""

    conv_FW: Tensor
    conv_bias_F: Tensor | None
    decay_rate_H: Tensor
    dt_bias_H: Tensor
    skip_H: Tensor
    norm_Z: Tensor | None
    norm_groups: int
    norm_eps: float
    gate_factor: float = 1.0
    dt_factor: float = 1.0


@dataclass(frozen=True)
class Saving:
    """The places in which passes over prompts save states on their way: P of inputs [P, W, F] and of a state
    [P, 1, H, V, K], as slots have them, and for each slot after how many tokens of its sequence one is saved,
    and in which place, int32 [S, 2]. 0 tokens: none.

    In a pass whose first row has position b, p tokens are such that p - b is a positive multiple of
    `rows_of_chunks`."""

    inputs: Tensor
    heads: Tensor
    wanted_S2: Tensor


@dataclass(frozen=True)
class RecurrentStates:
    """The slots of one layer: inputs [S, M, F] and states [S, N, H, V, K], float32 for models of any dtype,
    and where some of these are saved."""

    recurrence: Recurrence
    inputs: Tensor
    heads: Tensor
    saving: Saving | None = None

    @staticmethod
    def empty(
        recurrence: Recurrence, num_slots: int, num_kept: int, device: torch.device
    ) -> "RecurrentStates":
        """Return zeroed slots for steps of at most `num_kept` rows of a sequence, in which any number of them
        may be kept."""
        return StackedStates.empty(recurrence, 1, num_slots, num_kept, device).layer(0)

    @property
    def num_kept(self) -> int:
        """The positions after which a slot has the state."""
        return self.heads.shape[1]

    @staticmethod
    def at(kept: Tensor, slot: Tensor, position: Tensor) -> Tensor:
        """Return what a slot keeps of a position, in `inputs` or in `heads`; zeros before the first."""
        found = kept[slot.long(), (position % kept.shape[1]).long()]
        return torch.where(position >= 0, found, torch.zeros_like(found))

    @staticmethod
    def keep(kept: Tensor, slot: Tensor, position: Tensor, value: Tensor) -> None:
        """Have a slot keep a value of a position, in `inputs` or in `heads`."""
        kept[slot.long(), (position % kept.shape[1]).long()] = value

    def save(self, slot: int, num_tokens: int) -> None:
        """Copy the state that a slot has after so many tokens to where it is wanted."""
        self.save_heads(slot, num_tokens)
        assert self.saving is not None
        place = int(self.saving.wanted_S2[slot, 1])
        for position in range(max(0, num_tokens - self.recurrence.kernel_size + 1), num_tokens):
            inputs_F = self.inputs[slot, position % self.inputs.shape[1]]
            self.saving.inputs[place, position % self.saving.inputs.shape[1]] = inputs_F

    def save_heads(self, slot: int, num_tokens: int) -> None:
        """Copy the states of the heads alone as `save` does."""
        assert self.saving is not None
        place = int(self.saving.wanted_S2[slot, 1])
        self.saving.heads[place, 0] = self.heads[slot, (num_tokens - 1) % self.num_kept]

    @property
    def saved_heads(self) -> tuple[Tensor, Tensor]:
        """The saved states, and which are wanted; any tensors where none are saved."""
        return (self.heads, self.heads) if self.saving is None else (self.saving.heads, self.saving.wanted_S2)

    @property
    def saved_inputs(self) -> tuple[Tensor, Tensor]:
        """The saved inputs, and which are wanted; any tensors where none are saved."""
        if self.saving is None:
            return self.inputs, self.inputs
        return self.saving.inputs, self.saving.wanted_S2

    @staticmethod
    def slot_bytes(recurrence: Recurrence, num_kept: int) -> int:
        """Return the bytes of one slot."""
        num_inputs = num_kept + recurrence.kernel_size - 1
        numbers = num_kept * recurrence.state_numbers + num_inputs * recurrence.num_channels
        return numbers * torch.float32.itemsize

    def scratch(self, num_sequences: int) -> "RecurrentStates":
        """Return slots for sequences that one pass begins and ends, after slot 0."""
        return RecurrentStates.empty(self.recurrence, 1 + num_sequences, 1, self.inputs.device)


class SavedState(NamedTuple):
    """The state after `num_tokens` tokens of a sequence, in its slot and in the place where it is saved."""

    slot: int
    place: int
    num_tokens: int


@dataclass(frozen=True)
class StackedStates:
    """The slots of L layers: inputs [L, S, M, F] and states [L, S, N, H, V, K]."""

    recurrence: Recurrence
    inputs: Tensor
    heads: Tensor

    @staticmethod
    def empty(
        recurrence: Recurrence, num_layers: int, num_slots: int, num_kept: int, device: torch.device
    ) -> "StackedStates":
        """Return zeroed slots as `RecurrentStates.empty` does."""
        num_inputs = num_kept + recurrence.kernel_size - 1
        slots = num_layers, num_slots
        widths = recurrence.num_heads, recurrence.value_dim, recurrence.key_dim
        return StackedStates(
            recurrence,
            torch.zeros(*slots, num_inputs, recurrence.num_channels, dtype=torch.float32, device=device),
            torch.zeros(*slots, num_kept, *widths, dtype=torch.float32, device=device),
        )

    def layer(self, idx: int) -> RecurrentStates:
        """Return the slots of one layer."""
        return RecurrentStates(self.recurrence, self.inputs[idx], self.heads[idx])

    def restore(self, saved: "StackedStates", states: Sequence[SavedState]) -> None:
        """Copy saved states to the slots of sequences."""
        for slot, place, num_tokens in states:
            last = num_tokens - 1
            self.heads[:, slot, last % self.heads.shape[2]] = saved.heads[:, place, 0]
            for position in range(max(0, num_tokens - self.recurrence.kernel_size + 1), num_tokens):
                inputs = saved.inputs[:, place, position % saved.inputs.shape[2]]
                self.inputs[:, slot, position % self.inputs.shape[2]] = inputs


@dataclass(frozen=True)
class Sequences:
    """The rows of a pass, those of one sequence after another: how many each has, its positions up to its
    last row [R], its slot [R], its first row [R], and the sequence of each row [T]. Prompts also have their
    chunks of `CHUNK` and of `LONG_CHUNK` rows [C, 4] (`operands/tiles.py`); a decode step has none."""

    query_lens: tuple[int, ...]
    context_lens_R: Tensor
    slots_R: Tensor
    starts_R: Tensor
    of_row_T: Tensor
    chunks_C4: Tensor | None = None
    long_chunks_C4: Tensor | None = None

    @staticmethod
    def of_decode(slots_R: Tensor, context_lens_R: Tensor, q_len: int) -> "Sequences":
        """Return sequences of `q_len` rows each; nothing waits for the host."""
        num_rows = len(context_lens_R) * q_len
        rows_T = torch.arange(num_rows, dtype=torch.int32, device=slots_R.device)
        return Sequences(
            (q_len,) * len(context_lens_R),
            context_lens_R,
            slots_R.contiguous(),
            torch.arange(0, num_rows, q_len, dtype=torch.int32, device=slots_R.device),
            rows_T // q_len,
        )

    @staticmethod
    def of_prefill(
        slots_R: Tensor, query_lens: tuple[int, ...], context_lens: tuple[int, ...]
    ) -> "Sequences":
        """Return ragged sequences."""
        device = slots_R.device
        lens_R = torch.tensor(query_lens, dtype=torch.int32)
        starts_R = (lens_R.cumsum(0) - lens_R).to(torch.int32)
        of_row_T = torch.arange(len(query_lens), dtype=torch.int32).repeat_interleave(lens_R)
        context_lens_R = torch.tensor(context_lens, dtype=torch.int32)
        context_lens_R, starts_R, of_row_T = (
            each.to(device, non_blocking=True) for each in (context_lens_R, starts_R, of_row_T)
        )
        lists = (query_tiles(query_lens, context_lens, size, device) for size in (CHUNK, LONG_CHUNK))
        return Sequences(query_lens, context_lens_R, slots_R.contiguous(), starts_R, of_row_T, *lists)

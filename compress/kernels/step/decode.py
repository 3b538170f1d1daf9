"""Advance the state of plain decode steps on the device, in two small launches without a transfer.

    begin_step   x = embedding of the token
                 position = context - 1,   slot = block of the position * block size + offset in it
    end_step     token   <- chosen token
                 context <- context + running
                 chosen token, log probability -> host

The host and the kernels exchange values in memory that both reach (`host_memory.py`). When a sequence enters
a block that the block table does not have yet, `begin_step` reads the number of the block there
(`next_block`) and writes it to the table.
`end_step` writes its results to one of two places in turn, so that the host may read one step while the next
one runs: `num_steps` counts the steps begun, and step n uses place n % 2.

Shapes: R rows, B blocks of the longest sequence, S rows of the state (R or more), V vocabulary, D width of a
row of the embedding table.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait
from compress.kernels.operands.paged import PADDING_BLOCK
from compress.kernels.step.host_memory import uses_kernels

_ROWS = 128
"""Number of rows of one program of `end_step`."""
_COLUMNS = 1024
"""Number of columns of one row in a program of `begin_step`: 16 bytes of a 16-bit row for each thread of four
warps."""


@dataclass(frozen=True)
class DecodeBuffers:
    """The tensors that plain decode steps read and advance. All are int64 but the log probabilities, which
    are float32.

    `tokens` are the next to be fed. `running` is 1 for a request and 0 for a padding row, whose context does
    not grow. `next_block` is read for running rows whose position begins a block that has no entry in the
    block table. The host tensors hold the results of step n at index n % 2.
    """

    tokens_S: Tensor
    context_lens_S: Tensor
    running_S: Tensor
    block_table_SB: Tensor
    num_steps: Tensor
    next_block_S: Tensor
    host_tokens_2S: Tensor
    host_logprobs_2S: Tensor


def begin_step(
    state: DecodeBuffers, num_rows: int, embed_VD: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the embedding [R, D] of the token that each row feeds, and its position and slot, int64 [R].

    A block that a row enters is in the block table afterwards.
    """
    device = state.tokens_S.device
    width = embed_VD.shape[1]
    if not uses_kernels(device):
        positions_R, slots_R = _begin_by_torch(state, num_rows, block_size)
        return F.embedding(state.tokens_S[:num_rows], embed_VD), positions_R, slots_R
    positions_R, slots_R = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    x_RD = torch.empty(num_rows, width, dtype=embed_VD.dtype, device=device)
    _begin[num_rows, -(-width // _COLUMNS)](
        *(state.tokens_S, embed_VD, x_RD),
        *(
            state.context_lens_S,
            state.running_S,
            state.block_table_SB,
            state.num_steps,
            state.next_block_S,
            positions_R,
            slots_R,
        ),
        HIDDEN=width,
        COLUMNS=_COLUMNS,
        TABLE_COLUMNS=state.block_table_SB.shape[1],
        BLOCK_SIZE=block_size,
        PADDING=PADDING_BLOCK,
        **pdl_options(device),
    )
    return x_RD, positions_R, slots_R


def end_step(state: DecodeBuffers, chosen_R: Tensor, logprobs_R: Tensor | None) -> None:
    """Advance the state past a step that chose these tokens, and write the results for the host."""
    device = state.tokens_S.device
    (num_rows,) = chosen_R.shape
    if not uses_kernels(device):
        return _end_by_torch(state, chosen_R, logprobs_R)
    _end[(-(-num_rows // _ROWS),)](
        *(
            chosen_R,
            chosen_R if logprobs_R is None else logprobs_R,
            state.tokens_S,
            state.context_lens_S,
            state.running_S,
            state.num_steps,
        ),
        *(state.host_tokens_2S, state.host_logprobs_2S, num_rows),
        LOGPROBS=logprobs_R is not None,
        STATE_ROWS=state.tokens_S.shape[0],
        ROWS=_ROWS,
        num_warps=_ROWS // 32,
        **pdl_options(device),
    )


def _begin_by_torch(state: DecodeBuffers, num_rows: int, block_size: int) -> tuple[Tensor, Tensor]:
    state.num_steps.add_(1)
    positions_R = state.context_lens_S[:num_rows] - 1
    column_R1 = torch.div(positions_R, block_size, rounding_mode="floor").unsqueeze(1)
    table_RB = state.block_table_SB[:num_rows]
    known_R = table_RB.gather(1, column_R1).squeeze(1)
    opens_R = (positions_R % block_size == 0) & (known_R == PADDING_BLOCK)
    opens_R &= state.running_S[:num_rows] != 0
    blocks_R = torch.where(opens_R, state.next_block_S[:num_rows], known_R)
    table_RB.scatter_(1, column_R1, blocks_R.unsqueeze(1))
    return positions_R, blocks_R * block_size + positions_R % block_size


def _end_by_torch(state: DecodeBuffers, chosen_R: Tensor, logprobs_R: Tensor | None) -> None:
    num_rows = chosen_R.shape[0]
    state.tokens_S[:num_rows].copy_(chosen_R)
    state.context_lens_S[:num_rows].add_(state.running_S[:num_rows])
    place = state.num_steps % 2
    state.host_tokens_2S[:, :num_rows].index_copy_(0, place, chosen_R.unsqueeze(0))
    if logprobs_R is not None:
        state.host_logprobs_2S[:, :num_rows].index_copy_(0, place, logprobs_R.unsqueeze(0))


@jit()
def _begin(
    tokens_ptr: tl.tensor,
    embed_ptr: tl.tensor,
    x_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    running_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    next_block_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute one row's embedding, position and slot.

    Only rows that begin a new block read the memory of the host, past the caches (.cv): that takes a
    microsecond or two.
    """
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(embed_ptr + tl.load(tokens_ptr + row) * HIDDEN + column, mask=column < HIDDEN)
    tl.store(x_ptr + row * HIDDEN + column, x, mask=column < HIDDEN)
    if tl.program_id(1) == 0:
        if row == 0:
            tl.store(num_steps_ptr, tl.load(num_steps_ptr) + 1)
        position = tl.load(context_lens_ptr + row) - 1
        entry_ptr = table_ptr + row * TABLE_COLUMNS + position // BLOCK_SIZE
        block = tl.load(entry_ptr)
        opens = (position % BLOCK_SIZE == 0) & (block == PADDING) & (tl.load(running_ptr + row) != 0)
        if opens:
            block = tl.load(next_block_ptr + row, cache_modifier=".cv")
            tl.store(entry_ptr, block)
        tl.store(positions_ptr + row, position)
        tl.store(slots_ptr + row, block * BLOCK_SIZE + position % BLOCK_SIZE)


@jit(varying=["num_rows"])
def _end(
    chosen_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    running_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    host_tokens_ptr: tl.tensor,
    host_logprobs_ptr: tl.tensor,
    num_rows: tl.tensor,
    LOGPROBS: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    chosen = tl.load(chosen_ptr + row, mask=mask)
    place = tl.load(num_steps_ptr) % 2 * STATE_ROWS + row
    tl.store(host_tokens_ptr + place, chosen, mask=mask)
    if LOGPROBS:
        tl.store(host_logprobs_ptr + place, tl.load(logprobs_ptr + row, mask=mask), mask=mask)
    tl.store(tokens_ptr + row, chosen, mask=mask)
    context_len = tl.load(context_lens_ptr + row, mask=mask) + tl.load(running_ptr + row, mask=mask)
    tl.store(context_lens_ptr + row, context_len, mask=mask)

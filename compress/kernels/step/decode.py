"""What a decode step does to its own state: once before the layers, once after the sampler. Two small launches on a GPU, and no transfer.

    begin_step   x = embedding of the token,  position = context - 1,  slot = block of the position * block size + offset in it
    end_step     tokens <- chosen,  context <- context + running,  and both chosen and log probabilities to the host

The host and the step meet in memory that both can reach (`shared_memory`). When a sequence enters a new block, the step fetches its number
there, `next_block`, and writes it into the block table. What was chosen is left there, in turns in two places, so that the host may read
one step while the next one runs: `num_steps` counts the steps begun, and its last bit is the place.

Shapes: R rows, B blocks of the longest sequence, S rows of the state (R or more), V vocabulary, D hidden.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.compilers.triton import (
    interpreted,
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    wait,
)

_ROWS = 128
"""Rows of a program of `end_step`."""
_COLUMNS = 1024
"""Columns of a program of `begin_step`, of one row: 16 bytes of a 16-bit row for each thread of four warps."""


@dataclass(frozen=True)
class StepState:
    """What steps read and advance. All int64 but `landed_logprobs`.

    `tokens` are fed next; `running` is 1 for a request and 0 for a filler, whose context does not grow; `next_block` is for running rows
    whose position begins a block. `landed_tokens` and `landed_logprobs` (float32) hold step n at n % 2.
    """

    tokens_S: Tensor
    context_lens_S: Tensor
    running_S: Tensor
    block_table_SB: Tensor
    num_steps: Tensor
    next_block_S: Tensor
    landed_tokens_2S: Tensor
    landed_logprobs_2S: Tensor


def shared_memory(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that kernels on `device` and the host both reach: pinned memory of the host, or the device's own where only torch serves it."""
    pinned = device.type == "cuda" and _by_kernel(device)
    return (
        torch.zeros(shape, dtype=dtype, pin_memory=True)
        if pinned
        else torch.zeros(shape, dtype=dtype, device=device)
    )


def begin_step(
    state: StepState, num_rows: int, embed_VD: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding [R, D], position and slot, int64 [R], of the token that each row feeds; its block is in the table afterwards."""
    device = state.tokens_S.device
    hidden_size = embed_VD.shape[1]
    if not _by_kernel(device):
        positions_R, slots_R = _begin_by_torch(state, num_rows, block_size)
        return F.embedding(state.tokens_S[:num_rows], embed_VD), positions_R, slots_R
    positions_R, slots_R = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    x_RD = torch.empty(num_rows, hidden_size, dtype=embed_VD.dtype, device=device)
    _begin[num_rows, -(-hidden_size // _COLUMNS)](
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
        HIDDEN=hidden_size,
        COLUMNS=_COLUMNS,
        TABLE_COLUMNS=state.block_table_SB.shape[1],
        BLOCK_SIZE=block_size,
        **pdl_options(device),
    )
    return x_RD, positions_R, slots_R


def end_step(state: StepState, chosen_R: Tensor, logprobs_R: Tensor | None) -> None:
    """The state after a step that chose these tokens."""
    device = state.tokens_S.device
    (num_rows,) = chosen_R.shape
    if not _by_kernel(device):
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
        *(state.landed_tokens_2S, state.landed_logprobs_2S, num_rows),
        LOGPROBS=logprobs_R is not None,
        STATE_ROWS=state.tokens_S.shape[0],
        ROWS=_ROWS,
        num_warps=_ROWS // 32,
        **pdl_options(device),
    )


def _by_kernel(device: torch.device) -> bool:
    return triton is not None and (device.type == "cuda" or interpreted())


def _begin_by_torch(state: StepState, num_rows: int, block_size: int) -> tuple[Tensor, Tensor]:
    state.num_steps.add_(1)
    positions_R = state.context_lens_S[:num_rows] - 1
    column_R1 = torch.div(positions_R, block_size, rounding_mode="floor").unsqueeze(1)
    table_RB = state.block_table_SB[:num_rows]
    opens_R = (positions_R % block_size == 0) & (state.running_S[:num_rows] != 0)
    blocks_R = torch.where(opens_R, state.next_block_S[:num_rows], table_RB.gather(1, column_R1).squeeze(1))
    table_RB.scatter_(1, column_R1, blocks_R.unsqueeze(1))
    return positions_R, blocks_R * block_size + positions_R % block_size


def _end_by_torch(state: StepState, chosen_R: Tensor, logprobs_R: Tensor | None) -> None:
    num_rows = chosen_R.shape[0]
    state.tokens_S[:num_rows].copy_(chosen_R)
    state.context_lens_S[:num_rows].add_(state.running_S[:num_rows])
    place = state.num_steps % 2
    state.landed_tokens_2S[:, :num_rows].index_copy_(0, place, chosen_R.unsqueeze(0))
    if logprobs_R is not None:
        state.landed_logprobs_2S[:, :num_rows].index_copy_(0, place, logprobs_R.unsqueeze(0))


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
    PDL: tl.constexpr,
) -> None:
    """The host's memory is read past the caches (.cv), and only by rows that begin a block: that takes a microsecond or two."""
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
        opens = (position % BLOCK_SIZE == 0) & (tl.load(running_ptr + row) != 0)
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
    landed_tokens_ptr: tl.tensor,
    landed_logprobs_ptr: tl.tensor,
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
    landed = tl.load(num_steps_ptr) % 2 * STATE_ROWS + row
    tl.store(landed_tokens_ptr + landed, chosen, mask=mask)
    if LOGPROBS:
        tl.store(landed_logprobs_ptr + landed, tl.load(logprobs_ptr + row, mask=mask), mask=mask)
    tl.store(tokens_ptr + row, chosen, mask=mask)
    context_len = tl.load(context_lens_ptr + row, mask=mask) + tl.load(running_ptr + row, mask=mask)
    tl.store(context_lens_ptr + row, context_len, mask=mask)

"""Where the rows of a speculative step are, and how it ends: how many proposals are kept, the state of the next step, and what came out, to
the host. Two small launches on a GPU, and no transfer.

    place      position of each of the last Q tokens of a context,   slot = block of the position * block size + offset in it
    count      how many proposals may be kept: those there are, one fewer than tokens are left, and as many as the blocks hold
    accepted   those before the first that is not what the model chose; another rule than that says it itself
    advance    last <- the last tokens of (last, tokens 0..accepted),   context <- context + accepted + 1
    land       count, accepted and the tokens in memory that the host reaches, in turns in two places (`decode_step.py`): step n at n % 2

A filler row (`running` 0) is left as it is, and lands nothing.

Shapes: R rows, S rows of the state (R or more), K proposals, Q tokens of a row: K + 1, or 1 where nothing is proposed; T = R Q; N = K + 1;
C = N + 4; B blocks of the longest sequence; X = 1 + B; Y = 2 + N.
"""

from dataclasses import dataclass

import torch
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

CONTEXT = -4
RUNNING = -3
END = -2
STEP = -1
_TOKENS = 128
"""Tokens of a program of `_place`."""
_ROWS = 32
"""Rows of a program of `_end`, one warp: a lane has a row to itself, so that it reads what it will overwrite before it does."""


@dataclass(frozen=True)
class VerifyState:
    """What speculative steps read and advance. All int64 but `landed_logprobs`.

    A row of `rows` is its last N tokens (of a shorter sequence zeros before them), and then `CONTEXT`, how many tokens are known, the last
    of which is yet to be fed; `RUNNING`, 1 for a request and 0 for a filler; `END`, how many tokens it may have in all; `STEP`, how many
    steps it was in. A row of `held` is how many positions its blocks hold, and then the blocks. `proposed`: how many of its `drafts` are
    meant.
    """

    rows_SC: Tensor
    held_SX: Tensor
    proposed_S: Tensor
    drafts_SK: Tensor
    landed_2SY: Tensor
    landed_logprobs_2SN: Tensor

    def counts(self, num_rows: int) -> Tensor:
        """int64 [R]: the proposals of each row that may be kept."""
        context_lens_R = self.rows_SC[:num_rows, CONTEXT]
        ends_R = self.rows_SC[:num_rows, END]
        may_R = torch.minimum(ends_R - 1, self.held_SX[:num_rows, 0]) - context_lens_R
        return torch.minimum(may_R, self.proposed_S[:num_rows]).clamp(min=0)


def place_rows(
    context_lens_R: Tensor, table_RB: Tensor, q_len: int, *, block_size: int, last_position: int
) -> tuple[Tensor, Tensor]:
    """Positions, none of them above the last, and slots, int64 [T], of the last `q_len` tokens of each context."""
    device = context_lens_R.device
    num_tokens = len(context_lens_R) * q_len
    if not _by_kernel(device):
        return _place_by_torch(context_lens_R, table_RB, q_len, block_size, last_position)
    positions_T, slots_T = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    _place[(-(-num_tokens // _TOKENS),)](
        *(context_lens_R, table_RB, positions_T, slots_T, num_tokens, last_position),
        CONTEXT_STRIDE=context_lens_R.stride(0),
        TABLE_STRIDE=table_RB.stride(0),
        Q_LEN=q_len,
        BLOCK_SIZE=block_size,
        TOKENS=_TOKENS,
        num_warps=_TOKENS // 32,
        **pdl_options(device),
    )
    return positions_T, slots_T


def leading(keep_RK: Tensor, counts_R: Tensor) -> Tensor:
    """int64 [R]: how many are kept before the first that is not; only the first `counts` may be."""
    real_RK = torch.arange(keep_RK.shape[1], device=counts_R.device) < counts_R.unsqueeze(1)
    return (keep_RK & real_RK).to(torch.int64).cumprod(dim=1).sum(dim=1)


def end_verify(
    state: VerifyState, tokens_RQ: Tensor, accepted_R: Tensor | None, logprobs_RQ: Tensor | None
) -> None:
    """The state after a step that chose these tokens, or from which, with `accepted` given, these come out."""
    device = tokens_RQ.device
    (num_rows, q_len) = tokens_RQ.shape
    if not _by_kernel(device):
        return _end_by_torch(state, tokens_RQ, accepted_R, logprobs_RQ)
    (num_state_rows, columns) = state.rows_SC.shape
    landed_columns = state.landed_2SY.shape[2]
    _end[(-(-num_rows // _ROWS),)](
        *(state.rows_SC, state.held_SX, state.proposed_S, state.drafts_SK, tokens_RQ),
        *(tokens_RQ if accepted_R is None else accepted_R, tokens_RQ if logprobs_RQ is None else logprobs_RQ),
        *(state.landed_2SY, state.landed_logprobs_2SN, num_rows),
        DRAFTS=q_len - 1,
        GIVEN=accepted_R is not None,
        LOGPROBS=logprobs_RQ is not None,
        LAST=columns - 4,
        HELD_COLUMNS=state.held_SX.shape[1],
        LANDED_COLUMNS=landed_columns,
        STATE_ROWS=num_state_rows,
        ROWS=_ROWS,
        num_warps=_ROWS // 32,
        **pdl_options(device),
    )
    return None


def _by_kernel(device: torch.device) -> bool:
    return triton is not None and (device.type == "cuda" or interpreted())


def _place_by_torch(
    context_lens_R: Tensor, table_RB: Tensor, q_len: int, block_size: int, last_position: int
) -> tuple[Tensor, Tensor]:
    positions_RQ = context_lens_R.unsqueeze(1) + torch.arange(-q_len, 0, device=context_lens_R.device)
    blocks_RQ = table_RB.gather(1, torch.div(positions_RQ, block_size, rounding_mode="floor"))
    slots_RQ = blocks_RQ * block_size + positions_RQ % block_size
    return positions_RQ.clamp(max=last_position).flatten(), slots_RQ.flatten()


def _end_by_torch(
    state: VerifyState, tokens_RQ: Tensor, accepted_R: Tensor | None, logprobs_RQ: Tensor | None
) -> None:
    num_rows, q_len = tokens_RQ.shape
    counts_R = state.counts(num_rows).clamp(max=q_len - 1)
    if accepted_R is None:
        accepted_R = leading(state.drafts_SK[:num_rows, : q_len - 1] == tokens_RQ[:, :-1], counts_R)
    rows_RC = state.rows_SC[:num_rows]
    came_R = accepted_R + 1
    last_RN = rows_RC[:, :CONTEXT]
    running_R = rows_RC[:, RUNNING] != 0
    places_RN = came_R.unsqueeze(1) + torch.arange(last_RN.shape[1], device=came_R.device)
    next_RN = torch.cat((last_RN, tokens_RQ), dim=1).gather(1, places_RN)
    advanced_R4 = torch.stack(
        (rows_RC[:, CONTEXT] + came_R, rows_RC[:, RUNNING], rows_RC[:, END], rows_RC[:, STEP] + 1), dim=1
    )
    rows_RC.copy_(torch.where(running_R.unsqueeze(1), torch.cat((next_RN, advanced_R4), dim=1), rows_RC))
    landing_RY = torch.cat((counts_R.unsqueeze(1), accepted_R.unsqueeze(1), tokens_RQ), dim=1)
    for place in range(2):
        here_R1 = (running_R & (rows_RC[:, STEP] % 2 == place)).unsqueeze(1)
        landed_RY = state.landed_2SY[place, :num_rows, : 2 + q_len]
        landed_RY.copy_(torch.where(here_R1, landing_RY, landed_RY))
        if logprobs_RQ is not None:
            landed_RQ = state.landed_logprobs_2SN[place, :num_rows, :q_len]
            landed_RQ.copy_(torch.where(here_R1, logprobs_RQ, landed_RQ))


@jit(varying=["num_tokens", "last_position"])
def _place(
    context_lens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_tokens: tl.tensor,
    last_position: tl.tensor,
    CONTEXT_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    Q_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    mask = token < num_tokens
    row = token // Q_LEN
    position = (
        tl.load(context_lens_ptr + row * CONTEXT_STRIDE, mask=mask, other=Q_LEN) - Q_LEN + token % Q_LEN
    )
    block = tl.load(table_ptr + row * TABLE_STRIDE + position // BLOCK_SIZE, mask=mask, other=0)
    tl.store(slots_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
    tl.store(positions_ptr + token, tl.minimum(position, last_position), mask=mask)


@jit(varying=["num_rows"])
def _end(
    rows_ptr: tl.tensor,
    held_ptr: tl.tensor,
    proposed_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    landed_ptr: tl.tensor,
    landed_logprobs_ptr: tl.tensor,
    num_rows: tl.tensor,
    DRAFTS: tl.constexpr,
    GIVEN: tl.constexpr,
    LOGPROBS: tl.constexpr,
    LAST: tl.constexpr,
    HELD_COLUMNS: tl.constexpr,
    LANDED_COLUMNS: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = row < num_rows
    last_ptr = rows_ptr + row * (LAST + 4)
    own_ptr = last_ptr + LAST
    mask = mask & (tl.load(own_ptr + 1, mask=mask, other=0) != 0)
    context_len = tl.load(own_ptr, mask=mask, other=0)
    may = tl.minimum(
        tl.load(own_ptr + 2, mask=mask, other=0) - 1,
        tl.load(held_ptr + row * HELD_COLUMNS, mask=mask, other=0),
    )
    count = tl.minimum(may - context_len, tl.load(proposed_ptr + row, mask=mask, other=0))
    count = tl.minimum(tl.maximum(count, 0), DRAFTS)
    tokens_ptr += row * (DRAFTS + 1)
    if GIVEN:
        accepted = tl.load(accepted_ptr + row, mask=mask, other=0)
    else:
        accepted = tl.zeros_like(count)
        for place in tl.static_range(DRAFTS):
            draft = tl.load(drafts_ptr + row * (LAST - 1) + place, mask=mask, other=0)
            same = (draft == tl.load(tokens_ptr + place, mask=mask, other=0)) & (place < count)
            accepted += tl.where(same & (accepted == place), 1, 0)

    step = tl.load(own_ptr + 3, mask=mask, other=0) + 1
    landing = step % 2 * STATE_ROWS + row
    landing_ptr = landed_ptr + landing * LANDED_COLUMNS
    tl.store(landing_ptr, count, mask=mask)
    tl.store(landing_ptr + 1, accepted, mask=mask)
    for place in tl.static_range(DRAFTS + 1):
        tl.store(landing_ptr + 2 + place, tl.load(tokens_ptr + place, mask=mask), mask=mask)
        if LOGPROBS:
            logprob = tl.load(logprobs_ptr + row * (DRAFTS + 1) + place, mask=mask)
            tl.store(landed_logprobs_ptr + landing * LAST + place, logprob, mask=mask)

    for place in tl.static_range(LAST):  # each reads behind where it writes
        source = place + accepted + 1
        kept = tl.load(last_ptr + source, mask=mask & (source < LAST), other=0)
        new = tl.load(tokens_ptr + source - LAST, mask=mask & (source >= LAST), other=0)
        tl.store(last_ptr + place, tl.where(source < LAST, kept, new), mask=mask)
    tl.store(own_ptr, context_len + accepted + 1, mask=mask)
    tl.store(own_ptr + 3, step, mask=mask)

"""Advance the state of speculative decode steps on the device, in two small launches without a transfer.

    place_rows   for each of the last Q tokens of a context:
                 position,   slot = block of the position * block size + offset in it
    end_verify   count    = least of: proposals of the row, tokens left - 1, positions left in its blocks
                 accepted = proposals before the first that differs from the model's choice
                            (or as the caller passes it)
                 last    <- the last N tokens of (last, tokens 0..accepted)
                 context <- context + accepted + 1
                 count, accepted and the tokens -> host

`count` limits how many proposals may be kept. Results go to one of two places in turn, as in `decode.py`:
those of step n to place n % 2. A padding row (`RUNNING` 0) keeps its state and writes no results.

Shapes: R rows, S rows of the state (R or more), K proposals, Q tokens of a row: K + 1, or 1 where nothing is
proposed; T = R Q; N = K + 1; C = N + 4; B blocks of the longest sequence; X = 1 + B; Y = 2 + N.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait
from compress.kernels.step.host_memory import uses_kernels

CONTEXT = -4
RUNNING = -3
END = -2
STEP = -1
_TOKENS = 128
"""Number of tokens of one program of `_place`."""
_ROWS = 32
"""Number of rows of one program of `_end`, which is one warp: each row has its own lane, which reads a value
before it overwrites it."""


@dataclass(frozen=True)
class VerifyBuffers:
    """The tensors that speculative steps read and advance. All are int64 but the log probabilities, which are
    float32.

    A row of `rows` holds the last N tokens of a sequence (zeros before a shorter one), then at these columns:
    `CONTEXT`, the number of its tokens, the last of which is the next to be fed; `RUNNING`, 1 for a request
    and 0 for a padding row; `END`, the number of tokens it may have in all; `STEP`, the number of steps that
    have served it. A row of `held` holds the number of positions in the row's blocks, then the block numbers.
    Of a row's `drafts` the first `proposed` count. The host tensors hold the results of step n at index n %
    2; a row of `host_results` is the count, the number accepted, and the tokens.
    """

    rows_SC: Tensor
    held_SX: Tensor
    proposed_S: Tensor
    drafts_SK: Tensor
    host_results_2SY: Tensor
    host_logprobs_2SN: Tensor

    def counts(self, num_rows: int) -> Tensor:
        """Return how many proposals of each row may be kept, int64 [R]."""
        context_lens_R = self.rows_SC[:num_rows, CONTEXT]
        ends_R = self.rows_SC[:num_rows, END]
        may_R = torch.minimum(ends_R - 1, self.held_SX[:num_rows, 0]) - context_lens_R
        return torch.minimum(may_R, self.proposed_S[:num_rows]).clamp(min=0)


def place_rows(
    context_lens_R: Tensor, table_RB: Tensor, q_len: int, *, block_size: int, last_position: int
) -> tuple[Tensor, Tensor]:
    """Return positions and slots, int64 [T], of the last `q_len` tokens of each context. Positions are
    limited to `last_position`.
    """
    device = context_lens_R.device
    num_tokens = len(context_lens_R) * q_len
    if not uses_kernels(device):
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
    """Return how many proposals precede the first that is not kept, int64 [R]; at most `counts`."""
    real_RK = torch.arange(keep_RK.shape[1], device=counts_R.device) < counts_R.unsqueeze(1)
    return (keep_RK & real_RK).to(torch.int64).cumprod(dim=1).sum(dim=1)


def end_verify(
    state: VerifyBuffers, tokens_RQ: Tensor, accepted_R: Tensor | None, logprobs_RQ: Tensor | None
) -> None:
    """Advance the state past a step that chose these tokens, and write the results for the host.

    With `accepted_R` given, the tokens are those that the acceptance rule returned; without it, the kernel
    compares them with the drafts.
    """
    device = tokens_RQ.device
    (num_rows, q_len) = tokens_RQ.shape
    if not uses_kernels(device):
        return _end_by_torch(state, tokens_RQ, accepted_R, logprobs_RQ)
    (num_state_rows, columns) = state.rows_SC.shape
    result_columns = state.host_results_2SY.shape[2]
    _end[(-(-num_rows // _ROWS),)](
        *(state.rows_SC, state.held_SX, state.proposed_S, state.drafts_SK, tokens_RQ),
        *(tokens_RQ if accepted_R is None else accepted_R, tokens_RQ if logprobs_RQ is None else logprobs_RQ),
        *(state.host_results_2SY, state.host_logprobs_2SN, num_rows),
        DRAFTS=q_len - 1,
        GIVEN=accepted_R is not None,
        LOGPROBS=logprobs_RQ is not None,
        LAST=columns - 4,
        HELD_COLUMNS=state.held_SX.shape[1],
        RESULT_COLUMNS=result_columns,
        STATE_ROWS=num_state_rows,
        ROWS=_ROWS,
        num_warps=_ROWS // 32,
        **pdl_options(device),
    )
    return None


def _place_by_torch(
    context_lens_R: Tensor, table_RB: Tensor, q_len: int, block_size: int, last_position: int
) -> tuple[Tensor, Tensor]:
    positions_RQ = context_lens_R.unsqueeze(1) + torch.arange(-q_len, 0, device=context_lens_R.device)
    blocks_RQ = table_RB.gather(1, torch.div(positions_RQ, block_size, rounding_mode="floor"))
    slots_RQ = blocks_RQ * block_size + positions_RQ % block_size
    return positions_RQ.clamp(max=last_position).flatten(), slots_RQ.flatten()


def _end_by_torch(
    state: VerifyBuffers, tokens_RQ: Tensor, accepted_R: Tensor | None, logprobs_RQ: Tensor | None
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
    results_RY = torch.cat((counts_R.unsqueeze(1), accepted_R.unsqueeze(1), tokens_RQ), dim=1)
    for place in range(2):
        here_R1 = (running_R & (rows_RC[:, STEP] % 2 == place)).unsqueeze(1)
        host_RY = state.host_results_2SY[place, :num_rows, : 2 + q_len]
        host_RY.copy_(torch.where(here_R1, results_RY, host_RY))
        if logprobs_RQ is not None:
            host_RQ = state.host_logprobs_2SN[place, :num_rows, :q_len]
            host_RQ.copy_(torch.where(here_R1, logprobs_RQ, host_RQ))


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
    results_ptr: tl.tensor,
    host_logprobs_ptr: tl.tensor,
    num_rows: tl.tensor,
    DRAFTS: tl.constexpr,
    GIVEN: tl.constexpr,
    LOGPROBS: tl.constexpr,
    LAST: tl.constexpr,
    HELD_COLUMNS: tl.constexpr,
    RESULT_COLUMNS: tl.constexpr,
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
    place_row = step % 2 * STATE_ROWS + row
    result_ptr = results_ptr + place_row * RESULT_COLUMNS
    tl.store(result_ptr, count, mask=mask)
    tl.store(result_ptr + 1, accepted, mask=mask)
    for place in tl.static_range(DRAFTS + 1):
        tl.store(result_ptr + 2 + place, tl.load(tokens_ptr + place, mask=mask), mask=mask)
        if LOGPROBS:
            logprob = tl.load(logprobs_ptr + row * (DRAFTS + 1) + place, mask=mask)
            tl.store(host_logprobs_ptr + place_row * LAST + place, logprob, mask=mask)

    for place in tl.static_range(LAST):  # reads only places after those written so far
        source = place + accepted + 1
        kept = tl.load(last_ptr + source, mask=mask & (source < LAST), other=0)
        new = tl.load(tokens_ptr + source - LAST, mask=mask & (source >= LAST), other=0)
        tl.store(last_ptr + place, tl.where(source < LAST, kept, new), mask=mask)
    tl.store(own_ptr, context_len + accepted + 1, mask=mask)
    tl.store(own_ptr + 3, step, mask=mask)

"""The recurrence of a Mamba-2 mixer over the rows of prompts, in chunks whose rows attend to those before
them at once (arXiv 2405.21060, section 6), so that the work is products on tensor cores: what
`models/mamba2.py` does in torch.

One program takes some columns of the state of a head from chunk to chunk. Queries and keys (C and B) belong
to many heads, and what a state has forgotten to one, so decays multiply rows of products and of updates,
never queries or keys, and nothing is stored for each head between launches.

Operands have the range of float32 and are multiplied in TF32, to which they are rounded first; C, B and x of
models in 16 bits are such numbers. For models in float32 that is too coarse, and products as exact as theirs
take as long as the rows one after the other (3.3 ms for 4096 rows of 128 heads on an H200, 2.9 ms in three
products of TF32 at best).

Shapes: T rows, F channels of the convolution, H heads, G groups, K state size, V dimension of a head, N rows
of a chunk.
"""

from typing import Any

from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.recurrent_states import CHUNK, RecurrentStates, Sequences
from compress.kernels.recurrence.chunking import few_rows
from compress.kernels.recurrence.rounding import rounded

MIN_COLUMNS = 16
COLUMNS = 32
WARPS = 2
STAGES = 3
"""The least and the most columns of a state that one program has, its warps and its stages."""


@jit()
def _scan(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    states_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    FEW: tl.constexpr,
    KEPT: tl.constexpr,
    K_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take some columns of the state of one head from the first chunk of a sequence to its last, but for
    the last KEPT - 1 rows."""
    launch_dependents(PDL)
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    idx = tl.arange(0, N)
    row = idx[:, None]
    column = idx[None, :]
    k_row = tl.arange(0, K_TILE)[:, None]
    k_column = tl.arange(0, K_TILE)[None, :]
    v_idx = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    wait(PDL)
    start = tl.load(starts_ptr + sequence)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    if stop - start > FEW:
        length = stop - start - (KEPT - 1)
        last = tl.load(context_lens_ptr + sequence) - KEPT
        first = last + 1 - length
        own_slot = tl.load(slots_ptr + sequence).to(tl.int64)
        slot = own_slot * KEPT
        inner = head * K * V + v_idx * K + k_row
        real = (k_row < K) & (v_idx < V)
        before = states_ptr + (slot + tl.maximum(first - 1, 0) % KEPT) * (H * K * V)
        state = tl.load(before + inner, mask=real & (first > 0), other=0.0)
        rows = start.to(tl.int64) + idx
        group = mixed_ptr + head // (H // G) * K
        q_at = group + rows[:, None] * F + k_column
        k_at = group + G * K + rows[None, :] * F + k_row
        v_at = mixed_ptr + 2 * G * K + head * V + rows[:, None] * F + v_idx
        gate_at = gates_ptr + rows * (2 * H) + head
        out_at = out_ptr + rows[:, None] * (H * V) + head * V + v_idx
        if SAVES:
            wanted = tl.load(wanted_ptr + own_slot * 2) - first
            saved_at = saved_ptr + tl.load(wanted_ptr + own_slot * 2 + 1).to(tl.int64) * (H * K * V) + inner
        for begin in range(0, length, N):
            if SAVES:
                tl.store(saved_at, state, mask=real & (begin == wanted) & (wanted > 0))
            left = length - begin
            out_real = (row < left) & (v_idx < V)
            q = tl.load(q_at, mask=(row < left) & (k_column < K), other=0.0)
            k = tl.load(k_at, mask=(column < left) & (k_row < K), other=0.0)
            v = tl.load(v_at, mask=out_real, other=0.0)
            decay = tl.load(gate_at, mask=idx < left, other=0.0)
            factor = tl.load(gate_at + H, mask=idx < left, other=0.0)
            total = tl.cumsum(decay, axis=0)
            whole = tl.sum(decay, axis=0)
            kept = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))
            scores = rounded(tl.dot(q, k, input_precision="tf32") * kept, True)
            update = v * factor[:, None]
            out = tl.dot(q, rounded(state, True), input_precision="tf32") * tl.exp(total)[:, None]
            out = tl.dot(scores, rounded(update, True), out, input_precision="tf32")
            to_end = rounded(update * tl.exp(tl.minimum(whole - total, 0.0))[:, None], True)
            state = tl.dot(k, to_end, state * tl.exp(whole), input_precision="tf32")
            tl.store(out_at, out, mask=out_real)
            q_at += N * F
            k_at += N * F
            v_at += N * F
            gate_at += N * 2 * H
            out_at += N * H * V
        after = states_ptr + (slot + last % KEPT) * (H * K * V)
        tl.store(after + inner, state, mask=real)
        if SAVES:
            tl.store(saved_at, state, mask=real & (length == wanted))


def recur(
    mixed_TF: Tensor,
    gates_TH: Tensor,
    states: RecurrentStates,
    sequences: Sequences,
    out_TZ: Tensor,
    options: dict[str, Any],
) -> None:
    """Write the float32 outputs of sequences that have more than `few_rows` rows in the pass, and the state
    after. The last rows, one fewer than the states that are kept, are left out. Operands are those of
    `recurrence/steps.py`."""
    mamba = states.recurrence
    num_sequences = len(sequences.starts_R)
    columns = min(COLUMNS, max(MIN_COLUMNS, triton.next_power_of_2(mamba.value_dim)))
    _scan[(num_sequences, mamba.num_heads, triton.cdiv(mamba.value_dim, columns))](
        mixed_TF,
        gates_TH,
        states.heads,
        *states.saved_heads,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        out_TZ,
        len(mixed_TF),
        num_sequences,
        H=mamba.num_heads,
        G=mamba.num_key_heads,
        K=mamba.key_dim,
        V=mamba.value_dim,
        F=mamba.num_channels,
        N=CHUNK,
        FEW=few_rows(states.num_kept),
        KEPT=states.num_kept,
        K_TILE=max(16, triton.next_power_of_2(mamba.key_dim)),
        COLUMNS=columns,
        SAVES=states.saving is not None,
        num_warps=WARPS,
        num_stages=STAGES,
        **options,
    )

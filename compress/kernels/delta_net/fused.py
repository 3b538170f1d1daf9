"""A gated delta net between its linears: launches for the convolution, for the recurrence of each sequence,
and for the gated norm of each head, which also keeps the inputs of the last positions.

Rows of decode, and a few of a prompt, go one after the other (`recurrence/steps.py`), so that the bits of a
row do not depend on how many rows of its sequence a step has. Longer parts of prompts go in chunks
(`chunks.py`).

Shapes: T rows, F channels of the convolution and after them Z = H V of the gate, H value heads, G key heads,
D decays (`DeltaWeights`), K key dimension, V value dimension, W positions of the convolution, M inputs of a
slot.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.delta_net import chunks
from compress.kernels.delta_net.gates import delta_of, gates_of
from compress.kernels.operands.recurrent_states import DeltaWeights, RecurrentStates, Sequences
from compress.kernels.problem import Problem
from compress.kernels.recurrence import chunking, steps
from compress.kernels.recurrence.inputs import convolved
from compress.kernels.select import Kernel, register
from compress.models.delta_net import LENGTH_EPS
from compress.models.limits import MAX_SIZE

MAX_HEAD = 256
SHORT_ROWS = 128
PROMPT_ROWS = 32
PROMPT_WARPS = 8
"""Rows and warps of a program of the other launches in prompts of more than `SHORT_ROWS` rows in all, whose
bits may depend on their company."""


@jit(varying=("row_stride",))
def _convolve(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    past_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    of_row_ptr: tl.tensor,
    beta_decay_ptr: tl.tensor,
    decay_rate_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    beta_stride: tl.tensor,
    q_scale: tl.tensor,
    length_eps: tl.tensor,
    beta_factor: tl.tensor,
    decay_bound: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute silu of the convolution for some rows and one head of queries, keys or values; q and k get
    length 1. With values come the gates of their head: the log of what the state keeps, and how much of it
    is replaced."""
    launch_dependents(PDL)
    D: tl.constexpr = H * K if BY_CHANNEL else H
    head = tl.program_id(1)
    is_value = head >= 2 * G
    size = tl.where(is_value, V, K)
    base = tl.where(is_value, 2 * G * K + (head - 2 * G) * V, head * K)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, TILE)[None, :]
    channel = base + d
    in_pass = row < num_rows
    real = in_pass & (d < size)
    wait(PDL)
    total = convolved(
        x_ptr,
        conv_ptr,
        past_ptr,
        context_lens_ptr,
        slots_ptr,
        starts_ptr,
        of_row_ptr,
        row,
        channel,
        in_pass,
        d < size,
        num_rows,
        num_sequences,
        row_stride,
        F,
        W,
        M,
    )
    rounded = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    mixed = (rounded / (1 + tl.exp(-rounded))).to(x_ptr.dtype.element_ty).to(tl.float32)
    length = tl.rsqrt(tl.sum(mixed * mixed, axis=1, keep_dims=True) + length_eps)
    scale = tl.where(is_value, 1.0, length) * tl.where(head < G, q_scale, 1.0)
    tl.store(mixed_ptr + row.to(tl.int64) * F + channel, mixed * scale, mask=real)
    if is_value:
        own = head - 2 * G
        at = beta_decay_ptr + row.to(tl.int64) * beta_stride
        gate_at = gates_ptr + row.to(tl.int64) * (D + H)
        decay_idx = own * K + d if BY_CHANNEL else own
        of_decay = in_pass & (d < K) if BY_CHANNEL else in_pass
        bias = (
            tl.load(dt_bias_ptr + decay_idx, mask=d < K, other=0.0)
            if BY_CHANNEL
            else tl.load(dt_bias_ptr + own)
        )
        decay = tl.load(at + H + decay_idx, mask=of_decay, other=0.0) + bias
        rate = tl.load(decay_rate_ptr + own)
        if BOUNDED:
            log_decay = -decay_bound / (1 + tl.exp(rate * decay))
        else:
            log_decay = rate * tl.where(decay > 20.0, decay, tl.log(1 + tl.exp(tl.minimum(decay, 20.0))))
        tl.store(gate_at + decay_idx, log_decay, mask=of_decay)
        beta = tl.load(at + own, mask=in_pass, other=0.0)
        tl.store(gate_at + D + own, beta_factor / (1 + tl.exp(-beta)), mask=in_pass)


@jit(varying=("row_stride", "gate_stride"))
def _norm_and_keep(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    past_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    of_row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    V_TILE: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Norm and gate the output of one head in some rows, in place, and keep a share of the inputs."""
    launch_dependents(PDL)
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, V_TILE)[None, :]
    in_pass = row < num_rows
    real = in_pass & (d < V)
    weight = tl.load(norm_ptr + d, mask=d < V, other=0.0).to(tl.float32)
    wait(PDL)
    dtype = out_ptr.dtype.element_ty
    at = out_ptr + row.to(tl.int64) * (H * V) + head * V + d
    out = tl.load(at, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row.to(tl.int64) * gate_stride + head * V + d, mask=real, other=0.0)
    gate = gate.to(tl.float32)
    factor = 1 / (1 + tl.exp(-gate)) if SIGMOID else gate / (1 + tl.exp(-gate))
    square = tl.sum(out * out, axis=1, keep_dims=True)
    unit = (out * tl.rsqrt(square / V + eps)).to(dtype).to(tl.float32)
    normed = (unit * weight).to(dtype).to(tl.float32)
    tl.store(at, (normed * factor).to(dtype), mask=real)
    sequence = tl.load(of_row_ptr + row, mask=in_pass, other=0)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    position = tl.load(context_lens_ptr + sequence) - (stop - row)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    place = slot * M + tl.maximum(position, 0) % M
    part = tl.arange(0, SHARE_TILE)[None, :]
    channel = head * SHARE + part
    own = in_pass & (part < SHARE) & (channel < F)
    kept = own & (row >= stop - M)
    x = tl.load(x_ptr + row.to(tl.int64) * row_stride + channel, mask=kept, other=0.0)
    tl.store(past_ptr + place * F + channel, x, mask=kept)
    if SAVES:
        wanted = tl.load(wanted_ptr + slot * 2)
        place = tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * W + tl.maximum(position, 0) % W
        saved = own & (position < wanted) & (position >= wanted - (W - 1))
        x = tl.load(x_ptr + row.to(tl.int64) * row_stride + channel, mask=saved, other=0.0)
        tl.store(saved_ptr + place * F + channel, x, mask=saved)


def delta_net(
    qkv_gate_TF: Tensor,
    beta_decay_TH: Tensor,
    weights: DeltaWeights,
    states: RecurrentStates,
    sequences: Sequences,
    *,
    gate_TZ: Tensor | None = None,
) -> Tensor:
    """Return the gated outputs [T, Z], and write the slots of the sequences (`select.py`)."""
    delta = delta_of(states)
    gate_TZ = gates_of(delta, qkv_gate_TF, gate_TZ)
    num_rows = len(qkv_gate_TF)
    num_sequences = len(sequences.starts_R)
    device = qkv_gate_TF.device
    mixed_TF = torch.empty(num_rows, delta.num_channels, dtype=torch.float32, device=device)
    gates_TH = torch.empty(num_rows, delta.num_decays + delta.num_heads, dtype=torch.float32, device=device)
    out_TZ = torch.empty(num_rows, delta.value_size, dtype=qkv_gate_TF.dtype, device=device)
    sizes = {"K": delta.key_dim, "V": delta.value_dim, "F": delta.num_channels}
    heads = {"H": delta.num_heads, "G": delta.num_key_heads}
    is_prompt = sequences.chunks_C4 is not None
    saves = is_prompt and states.saving is not None
    of_sequences = sequences.context_lens_R, sequences.slots_R, sequences.starts_R
    counts = num_rows, num_sequences
    options = pdl_options(device)
    by_chunks = is_prompt and num_rows > chunking.FEW_ROWS and delta.key_dim <= chunks.MAX_KEY
    rows, warps = (PROMPT_ROWS, PROMPT_WARPS) if is_prompt and num_rows > SHORT_ROWS else (1, 1)
    _convolve[(triton.cdiv(num_rows, rows), 2 * delta.num_key_heads + delta.num_heads)](
        qkv_gate_TF,
        weights.conv_FW,
        states.inputs,
        *of_sequences,
        sequences.of_row_T,
        beta_decay_TH,
        weights.decay_rate_H,
        weights.dt_bias_D,
        mixed_TF,
        gates_TH,
        *counts,
        qkv_gate_TF.stride(0),
        beta_decay_TH.stride(0),
        delta.key_dim**-0.5,
        LENGTH_EPS,
        weights.beta_factor,
        delta.decay_bound,
        **heads,
        W=delta.kernel_size,
        M=states.inputs.shape[1],
        TILE=triton.next_power_of_2(max(delta.key_dim, delta.value_dim)),
        ROWS=rows,
        BY_CHANNEL=delta.by_channel,
        BOUNDED=delta.decay_bound > 0,
        num_warps=warps,
        **sizes,
        **options,
    )
    if by_chunks:
        chunks.recur(mixed_TF, gates_TH, states, sequences, out_TZ, options)
    few = chunking.few_rows(states.num_kept) if by_chunks else MAX_SIZE
    steps.recur(
        mixed_TF,
        gates_TH,
        states,
        sequences,
        out_TZ,
        options,
        few_rows=few,
        replaces=True,
        by_channel=delta.by_channel,
    )
    share = triton.cdiv(delta.num_channels, delta.num_heads)
    _norm_and_keep[(triton.cdiv(num_rows, rows), delta.num_heads)](
        qkv_gate_TF,
        gate_TZ,
        weights.norm_V,
        states.inputs,
        *states.saved_inputs,
        *of_sequences,
        sequences.of_row_T,
        out_TZ,
        *counts,
        qkv_gate_TF.stride(0),
        gate_TZ.stride(0),
        weights.norm_eps,
        H=delta.num_heads,
        V=delta.value_dim,
        F=delta.num_channels,
        W=delta.kernel_size,
        M=states.inputs.shape[1],
        V_TILE=triton.next_power_of_2(delta.value_dim),
        SHARE=share,
        SHARE_TILE=triton.next_power_of_2(share),
        ROWS=rows,
        SIGMOID=delta.by_channel,
        SAVES=saves,
        num_warps=warps,
        **options,
    )
    return out_TZ


def _supports(problem: Problem) -> str | None:
    if problem.n > MAX_HEAD or problem.k > MAX_HEAD:
        return f"heads of keys of {problem.n} and values of {problem.k} dimensions, above {MAX_HEAD}."
    return triton_refusal(problem)


register(
    Kernel(
        "delta_net",
        "fused",
        min_sm=80,
        priority=10,
        supports=_supports,
        fn=delta_net,
        takes_lists=True,
    )
)

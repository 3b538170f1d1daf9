"""Grouped kernels of experts: gate and up with their activation, then down, over the rows of each expert, and
the weighted sum.

    h[p] = act(gate_e x[t]) * (up_e x[t])        p = t K + k, e = ids[t, k]
    y[p] = down_e h[p]
    out[t] = residual[t] + round(sum_k weights[t, k] y[t, k])

Experts without a gate have h[p] = act(up_e x[t]). With a cap c, min(act(gate), c) takes the place of
act(gate), or act(min(gate, c)) where it caps first, and up lies between -c and c.

A program owns `BM` outputs of one unit (`units.py`), and reads its rows of the weights once.
Sums over K run in its order: y is kept in float32 (of a prompt in the model's dtype), and the program of an
output tile that arrives last, or a launch of its own for more rows, adds. So a decode row has the same bits
in any company.
"""

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.activation import activated, clamped
from compress.kernels.operands.matrix_product import prefetch, product


@jit()
def _gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, CAP: tl.constexpr) -> tl.tensor:
    """Return the activation of gate and up, or of up alone, which then is `gate`. `CAP` is 0 for none."""
    if ACTIVATION == "relu2":
        return activated(gate, ACTIVATION)
    elif ACTIVATION == "swiglu_clamped":
        return clamped(gate, up)
    elif ACTIVATION == "silu_capped":
        return activated(tl.minimum(gate, CAP), "silu") * tl.minimum(tl.maximum(up, -CAP), CAP)
    elif CAP > 0:
        return tl.minimum(activated(gate, ACTIVATION), CAP) * tl.minimum(tl.maximum(up, -CAP), CAP)
    else:
        return activated(gate, ACTIVATION) * up


@jit()
def _load_unit(
    experts_ptr: tl.tensor, pairs_ptr: tl.tensor, BN: tl.constexpr, PAIRED: tl.constexpr
) -> tl.tensor:
    """Return (expert of this program's unit or -1, pairs [BN], which of them are valid). `PAIRED` units are
    pairs, and `experts_ptr` their ids."""
    unit = tl.program_id(1)
    slots = tl.arange(0, BN)
    expert = tl.load(experts_ptr + unit)
    if PAIRED:
        return expert, unit + slots * 0, slots == 0
    pairs = tl.load(pairs_ptr + unit * BN + slots)
    return expert, tl.maximum(pairs, 0), pairs >= 0


@jit()
def gate_up(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    h_ptr: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CAP: tl.constexpr,
    PAIRED: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if not PREFETCH:
        launch_dependents(PDL)
    wait(PDL)
    if PREFETCH:  # `_down` may then read what was written before this kernel
        launch_dependents(PDL)
    expert, pairs, valid = _load_unit(experts_ptr, pairs_ptr, BN, PAIRED)
    GATED: tl.constexpr = ACTIVATION != "relu2"
    UP: tl.constexpr = F if GATED else 0  # the first output of up
    if expert >= 0:
        start = tl.program_id(0) * BM
        outputs = start + tl.arange(0, BM)
        rows = tl.minimum(outputs, F - 1)
        gate, up = product(
            x_ptr, x_scale_ptr, pairs // K, valid, w_ptr, scale_ptr, offset_ptr, outer_ptr, expert, rows,
            UP + rows, start // 128, (BLOCKS // 2 if GATED else 0) + start // 128,
            UP + F, D, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, GATED, STAGES, E4M3, INTERPRETED,
        )  # fmt: skip
        if BIAS:
            gate += tl.load(bias_ptr + expert * (UP + F) + rows).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias_ptr + expert * (UP + F) + UP + rows).to(tl.float32)[:, None]
        h = _gated(gate, up, ACTIVATION, CAP).to(h_ptr.dtype.element_ty)
        at = h_ptr + pairs.to(tl.int64)[None, :] * F + outputs[:, None]
        tl.store(at, h, mask=valid[None, :] & (outputs < F)[:, None])


@jit(varying=("num_pairs",))
def down(
    h_ptr: tl.tensor,
    h_scale_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_pairs: tl.tensor,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    COMBINE: tl.constexpr,
    PAIRED: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    start = tl.program_id(0) * BM
    outputs = start + tl.arange(0, BM)
    if PDL and PREFETCH:
        # The ids were there before gate_up ran; weights are on their way to L2 while it ends.
        ahead = tl.load(experts_ptr + tl.program_id(1), cache_modifier=".cg")
        ahead = tl.minimum(tl.maximum(ahead, 0), E - 1).to(tl.int64)
        prefetch(w_ptr, ahead * D + start, tl.minimum(BM, D - start), BM, F)
    wait(PDL)
    expert, pairs, valid = _load_unit(experts_ptr, pairs_ptr, BN, PAIRED)
    if expert >= 0:
        rows = tl.minimum(outputs, D - 1)
        y, _ = product(
            h_ptr, h_scale_ptr, pairs, valid, w_ptr, scale_ptr, offset_ptr, outer_ptr, expert, rows, rows,
            start // 128, start // 128,
            D, F, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, False, STAGES, E4M3, INTERPRETED,
        )  # fmt: skip
        if BIAS:
            y += tl.load(bias_ptr + expert * D + rows).to(tl.float32)[:, None]
        at = y_ptr + pairs.to(tl.int64)[None, :] * D + outputs[:, None]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=valid[None, :] & (outputs < D)[:, None])
    if COMBINE:
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == tl.num_programs(1) - 1:
            tl.store(arrivals_ptr + tl.program_id(0), 0)
            tl.debug_barrier()
            zero = tl.full([], 0, dtype=tl.int64)
            for token in range(num_pairs // K):
                _combine_row(y_ptr, weights_ptr, residual_ptr, out_ptr, zero + token, outputs, D, K, RESIDUAL)


@jit()
def _combine_row(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token: tl.tensor,
    outputs: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """Write `outputs` of one token."""
    there = outputs < D
    total = tl.zeros_like(outputs).to(tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        at = y_ptr + pair * D + outputs
        y = tl.load(at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        weight = tl.load(weights_ptr + pair)
        total = tl.fma(y, tl.zeros_like(y) + weight, total)
    dtype = out_ptr.dtype.element_ty
    out = total.to(dtype)
    if RESIDUAL:
        residual = tl.load(residual_ptr + token * D + outputs, mask=there, other=0.0)
        out = (residual.to(tl.float32) + out.to(tl.float32)).to(dtype)
    tl.store(out_ptr + token * D + outputs, out, mask=there)


@jit()
def combine(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    outputs = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    _combine_row(
        y_ptr, weights_ptr, residual_ptr, out_ptr, tl.program_id(0).to(tl.int64), outputs, D, K, RESIDUAL
    )

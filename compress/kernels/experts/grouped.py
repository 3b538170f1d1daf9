"""Grouped kernels of experts: gate and up with their activation, then down, over the rows of each expert, and
the weighted sum.

    h[p] = act(gate_e x[t]) * (up_e x[t])        p = t K + k, e = ids[t, k]
    y[p] = down_e h[p]
    out[t] = residual[t] + round(sum_k weights[t, k] y[t, k])

A program owns `BM` outputs of one unit (`units.py`), and reads its rows of the weights once. Sums over K run
in its order, in a launch of their own.
"""

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.activation import activated
from compress.kernels.operands.matrix_product import product


@jit()
def _load_unit(experts_ptr: tl.tensor, pairs_ptr: tl.tensor, BN: tl.constexpr) -> tl.tensor:
    """Return (expert of this program's unit or -1, pairs [BN], which of them are valid)."""
    unit = tl.program_id(1)
    pairs = tl.load(pairs_ptr + unit * BN + tl.arange(0, BN))
    return tl.load(experts_ptr + unit), tl.maximum(pairs, 0), pairs >= 0


@jit()
def _gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "swiglu_clamped":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    else:
        return activated(gate, ACTIVATION) * up


@jit()
def gate_up(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
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
    STAGES: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    expert, pairs, valid = _load_unit(experts_ptr, pairs_ptr, BN)
    if expert >= 0:
        start = tl.program_id(0) * BM
        outputs = start + tl.arange(0, BM)
        rows = tl.minimum(outputs, F - 1)
        gate, up = product(
            x_ptr, x_scale_ptr, pairs // K, valid, w_ptr, scale_ptr, offset_ptr, expert, rows, F + rows,
            start // 128, BLOCKS // 2 + start // 128,
            2 * F, D, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, True, STAGES, E4M3, INTERPRETED,
        )  # fmt: skip
        if BIAS:
            gate += tl.load(bias_ptr + expert * (2 * F) + rows).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + expert * (2 * F) + F + rows).to(tl.float32)[:, None]
        h = _gated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty)
        at = h_ptr + pairs.to(tl.int64)[None, :] * F + outputs[:, None]
        tl.store(at, h, mask=valid[None, :] & (outputs < F)[:, None])


@jit()
def down(
    h_ptr: tl.tensor,
    h_scale_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    STAGES: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    start = tl.program_id(0) * BM
    outputs = start + tl.arange(0, BM)
    wait(PDL)
    expert, pairs, valid = _load_unit(experts_ptr, pairs_ptr, BN)
    if expert >= 0:
        rows = tl.minimum(outputs, D - 1)
        y, _ = product(
            h_ptr, h_scale_ptr, pairs, valid, w_ptr, scale_ptr, offset_ptr, expert, rows, rows,
            start // 128, start // 128,
            D, F, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, False, STAGES, E4M3, INTERPRETED,
        )  # fmt: skip
        if BIAS:
            y += tl.load(bias_ptr + expert * D + rows).to(tl.float32)[:, None]
        at = y_ptr + pairs.to(tl.int64)[None, :] * D + outputs[:, None]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=valid[None, :] & (outputs < D)[:, None])


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
    """Write `SPAN` outputs of one token."""
    launch_dependents(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    there = outputs < D
    total = tl.zeros_like(outputs).to(tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        y = tl.load(y_ptr + pair * D + outputs, mask=there, other=0.0).to(tl.float32)
        total = tl.fma(y, tl.zeros_like(y) + tl.load(weights_ptr + pair), total)
    dtype = out_ptr.dtype.element_ty
    out = total.to(dtype)
    if RESIDUAL:
        residual = tl.load(residual_ptr + token * D + outputs, mask=there, other=0.0)
        out = (residual.to(tl.float32) + out.to(tl.float32)).to(dtype)
    tl.store(out_ptr + token * D + outputs, out, mask=there)

"""Activation of an FFN in one pass: round(round(act(gate)) * up) (arXiv 2002.05202), or round(act(up)) where
there is no gate, quantized on the way out if the next linear needs it. The numbers of xIELU are those of a
layer, and are read from memory.

The arithmetic is float32 (`operands/activation.py`). round: to the model's dtype. The clamped activation of
gpt-oss is rounded once, with up in it.

Where rows are quantized, one program holds a whole row, because it needs the row's scale, and so it does
where gates are sparse (arXiv 2506.06644), because it needs the mean and the deviation of the gates of a row;
otherwise a program takes `SPAN` elements of a row.
"""

from statistics import NormalDist

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait
from compress.kernels.operands.activation import activated, clamped, xielu
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows
from compress.kernels.quantize_rows.fused import row_options, row_output, row_refusal, store_row
from compress.kernels.rms_norm.fused import aligned, are_columns
from compress.kernels.select import Kernel, register
from compress.models.layer_shape import UNGATED, XIELU

SPAN = 1024
MANY_ROWS = 256
"""Rows from which on programs of 1024 threads that hold 16 elements each have 32 registers a thread, so that
a multiprocessor holds two programs: 2,048 rows of 14336 in FP8 take 41.7 us on an H200 instead of 52.6, but
64 rows 5.3 instead of 3.7."""


@jit()
def _sparse(gate: tl.tensor, mask: tl.tensor, quantile: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the excess of each gate of a row over its quantile, zero beyond the mask."""
    x = gate.to(tl.float32)
    mean = tl.sum(x, axis=0) / SIZE
    distance = tl.where(mask, x - mean, 0.0)
    deviation = tl.sqrt_rn(tl.sum(distance * distance, axis=0) / SIZE)
    excess = x - (mean + deviation * quantile)
    return tl.where(mask, tl.where(excess < 0, 0.0, excess), 0.0).to(gate.dtype)


@jit()
def _gated(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    gate_factor: tl.tensor,
    quantile: tl.tensor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CAP: tl.constexpr,
    SPARSE: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Return the rounded activation(factor * gate) * up at `offsets` of their rows, or that of up alone,
    which then is `gate`; zero beyond the mask. `CAP` is that of both, 0 for none. If SPARSE, offsets are
    those of a whole row, and the gate is its excess over `quantile` deviations above the mean, at least 0."""
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0)
    if ACTIVATION == "xielu":  # which is not zero at zero
        return tl.where(mask, xielu(gate.to(tl.float32), numbers_ptr), 0.0).to(gate.dtype)
    if not GATED:
        return activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0)
    if SPARSE:
        gate = _sparse(gate, mask, quantile, SIZE)
    x = (gate.to(tl.float32) * gate_factor).to(gate.dtype).to(tl.float32)
    if ACTIVATION == "swiglu_clamped":
        return clamped(x, up.to(tl.float32)).to(gate.dtype)
    up = up.to(tl.float32)
    if ACTIVATION == "silu_capped":
        x = tl.minimum(x, CAP).to(gate.dtype).to(tl.float32)
        up = tl.minimum(tl.maximum(up, -CAP), CAP).to(gate.dtype).to(tl.float32)
        return (activated(x, "silu").to(gate.dtype).to(tl.float32) * up).to(gate.dtype)
    y = activated(x, ACTIVATION).to(gate.dtype).to(tl.float32)
    if CAP > 0:
        y = tl.minimum(y, CAP).to(gate.dtype).to(tl.float32)
        up = tl.minimum(tl.maximum(up, -CAP), CAP).to(gate.dtype).to(tl.float32)
    return (y * up).to(gate.dtype)


@jit()
def _act_mul(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    gate_factor: tl.tensor,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CAP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    gate_at = gate_ptr + row * gate_stride
    up_at = up_ptr + row * up_stride
    y = _gated(
        gate_at,
        up_at,
        numbers_ptr,
        columns,
        columns < SIZE,
        gate_factor,
        0.0,
        ACTIVATION,
        GATED,
        CAP,
        False,
        SIZE,
    )
    tl.store(out_ptr + row * SIZE + columns, y, mask=columns < SIZE)


@jit()
def _act_mul_quantize(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    gate_factor: tl.tensor,
    quantile: tl.tensor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CAP: tl.constexpr,
    SPARSE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    gate_at = gate_ptr + row.to(tl.int64) * gate_stride
    up_at = up_ptr + row.to(tl.int64) * up_stride
    y = _gated(
        gate_at,
        up_at,
        numbers_ptr,
        columns,
        columns < SIZE,
        gate_factor,
        quantile,
        ACTIVATION,
        GATED,
        CAP,
        SPARSE,
        SIZE,
    )
    store_row(
        y, row, out_ptr, scale_ptr, static_ptr, zero_ptr, static_zero_ptr,
        SIZE, BLOCK, QUANT, GROUP, CONVERTS,
    )  # fmt: skip


def act_mul(
    gate_up_TF: Tensor,
    activation: str,
    quant: ActivationQuant | None = None,
    *,
    up_TF: Tensor | None = None,
    xielu_4: Tensor | None = None,
    gate_factor: float = 1.0,
    gated: bool = True,
    cap: float | None = None,
    sparsity: float | None = None,
) -> Tensor | QuantizedRows:
    """Map [T, 2 F], or a gate [T, F] and `up_TF` [T, F], to [T, F]; where rows are not `gated`, or the
    activation is one of `UNGATED`, map [T, F] without a gate. `xielu_4` are the numbers of the activation
    xielu, and `gate_factor` multiplies the gate. What the gate becomes is at most `cap`, or the gate itself
    with `silu_capped`, and up between -`cap` and `cap`, where there is one. With a `sparsity`,
    the gate is first its excess over a quantile of its row."""
    gated = gated and activation not in UNGATED
    if not gated:
        up_TF = gate_up_TF  # which is not read
    gate, up = gate_up_TF.chunk(2, dim=-1) if up_TF is None else (gate_up_TF, up_TF)
    num_rows, size = gate.shape
    device = gate.device
    gate, up = (each if each.stride(1) == 1 else each.contiguous() for each in (gate, up))
    scalars = {"gate_stride": gate.stride(0), "up_stride": up.stride(0), "gate_factor": gate_factor}
    how = {"ACTIVATION": activation, "GATED": gated, "CAP": cap or 0.0}
    assert (xielu_4 is not None) == (activation == XIELU)
    numbers = gate if xielu_4 is None else xielu_4
    if quant is None and sparsity is None:
        out = torch.empty(num_rows, size, dtype=gate.dtype, device=device)
        grid = num_rows, -(-size // SPAN)
        _act_mul[grid](
            gate, up, numbers, out, **scalars, SIZE=size, SPAN=SPAN, **how, num_warps=4,
            **pdl_options(device),
        )  # fmt: skip
        return out
    assert sparsity is None or gated
    if sparsity is not None:  # off its alignment, a row would be summed in another order
        gate, up = (each if are_columns(each) else aligned(each) for each in (gate, up))
        scalars |= {"gate_stride": gate.stride(0), "up_stride": up.stride(0)}
    z = 0.0 if sparsity is None else NormalDist().inv_cdf(sparsity)
    sparse = {"quantile": z, "SPARSE": sparsity is not None}
    rows, output = row_output(num_rows, size, gate.dtype, device, quant)
    options = row_options(size, device)
    if num_rows >= MANY_ROWS and options["BLOCK"] == 16 * 1024 and device.type == "cuda":
        options = {**options, "maxnreg": 32}
    _act_mul_quantize[(num_rows,)](gate, up, numbers, **output, **scalars, **sparse, **how, **options)
    return rows


register(Kernel("act_mul", "triton.row", min_sm=80, priority=10, supports=row_refusal, fn=act_mul))

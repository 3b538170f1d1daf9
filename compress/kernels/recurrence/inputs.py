"""The causal convolution of the inputs of a recurrence, in Triton: those before the rows of a pass are in the
slot of a sequence.

Shapes: T rows, F channels, W positions of the convolution, M inputs of a slot.
"""

from compress.kernels.compilers.triton import jit, tl
from compress.kernels.recurrence.rows import rows_of


@jit()
def convolved(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    past_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    of_row_ptr: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    in_pass: tl.tensor,
    in_channels: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    F: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
) -> tl.tensor:
    """Return the convolution of some rows [rows, 1] and channels [1, channels], in float32. Those
    outside of `in_pass` or `in_channels` are not loaded."""
    real = in_pass & in_channels
    sequence = tl.load(of_row_ptr + row, mask=in_pass, other=0)
    start, _, first, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    total = tl.zeros(real.shape, tl.float32)
    for tap in tl.static_range(W):
        source = row - (W - 1) + tap
        position = first + (source - start)
        here = tl.load(
            x_ptr + source.to(tl.int64) * row_stride + channel, mask=real & (source >= start), other=0.0
        )
        before = (source < start) & (position >= 0)
        place = slot * M + tl.maximum(position, 0) % M
        past = tl.load(past_ptr + place * F + channel, mask=real & before, other=0.0)
        weight = tl.load(conv_ptr + channel * W + tap, mask=in_channels, other=0.0).to(tl.float32)
        total = total + tl.where(source >= start, here.to(tl.float32), past) * weight
    return total

"""The rows that a sequence has in a pass, as Triton kernels of recurrences read them."""

from compress.kernels.compilers.triton import jit, tl


@jit()
def rows_of(
    sequence: tl.tensor,
    starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first row of a sequence and the row after its last, the position of the first, and the slot.
    Of a sequence that is not there both rows are `num_rows`, as they are of those without a row, which come
    last: a walk over sequences ends there."""
    real = sequence < num_sequences
    start = tl.load(starts_ptr + sequence, mask=real, other=num_rows)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    first = tl.load(context_lens_ptr + sequence, mask=real, other=0) - (stop - start)
    return start, stop, first, tl.load(slots_ptr + sequence, mask=real, other=0).to(tl.int64)

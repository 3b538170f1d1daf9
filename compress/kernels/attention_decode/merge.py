"""Second launch of the paged decode attention: the chunks of a row, added up by a fixed tree."""

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait


@jit(varying=("q_len",), unaligned=("lens_ptr",))
def merge_chunks(
    o_ptr: tl.tensor,
    ml_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    max_chunks: tl.tensor,
    q_len: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merge one row of one head of the output. A sink is a key with the weight of its score and no value."""
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request = token // q_len
    query = token % q_len
    columns = tl.arange(0, C_TILE)
    part = (request * K + head // G) * max_chunks * (q_len * G) + query * G + head % G
    wait(PDL)
    position = tl.load(lens_ptr + request).to(tl.int32) - q_len + query.to(tl.int32)
    first_chunk = 0
    if WINDOW > 0:
        first_chunk = tl.maximum(position + 1 - WINDOW, 0) // CHUNK
    m = float("-inf")
    total = 0.0
    if SINKS:
        m = tl.load(sinks_ptr + head) * 1.4426950408889634
        total = 1.0
    o = tl.zeros([C_TILE], tl.float32)
    for start in range(first_chunk // MERGE * MERGE, position // CHUNK + 1, MERGE):
        chunks = start + tl.arange(0, MERGE)
        real = (chunks >= first_chunk) & (chunks * CHUNK <= position)
        at = part + chunks.to(tl.int64) * (q_len * G)
        o_j = tl.load(
            o_ptr + at[:, None] * C + columns[None, :], mask=real[:, None] & (columns < C)[None, :], other=0.0
        )
        m_j = tl.load(ml_ptr + at * 2, mask=real, other=float("-inf"))
        total_j = tl.load(ml_ptr + at * 2 + 1, mask=real, other=0.0)
        m_next = tl.maximum(m, tl.max(m_j, axis=0))
        m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        weight = tl.exp2(m_j - m_finite)
        alpha = tl.exp2(m - m_finite)
        o = o * alpha + tl.sum(o_j * weight[:, None], axis=0)
        total = total * alpha + tl.sum(total_j * weight, axis=0)
        m = m_next
    o = tl.where(total > 0, o / total, 0.0)
    tl.store(out_ptr + (token * K * G + head) * C + columns, o.to(out_ptr.dtype.element_ty), mask=columns < C)

"""Triton: the terms that relative logits add to scores, by distance (`relative.py` has the definition). They
are added one profile at a time, so that those of a row depend on the row alone.

Shapes: T rows, H heads, R numbers of a head, E distances.
"""

import math

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton, wait
from compress.kernels.operands.relative import RelativeTerm

ROWS = 8
"""Heads of rows of a program."""
DISTANCES = 256
"""Distances of a program."""


@jit(unaligned=("states_ptr",))
def _add_profiles(
    states_ptr: tl.tensor,
    profiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    unit: tl.tensor,
    R: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    DISTANCES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    distance = tl.program_id(1) * DISTANCES + tl.arange(0, DISTANCES)
    real_row = row < num_rows
    real = distance < E
    row = row.to(tl.int64)
    total = tl.zeros([ROWS, DISTANCES], tl.float32)
    wait(PDL)
    for idx in tl.static_range(R):
        state = tl.load(states_ptr + row * R + idx, mask=real_row, other=0.0)
        profile = tl.load(profiles_ptr + idx * E + distance, mask=real, other=0.0)
        total += state[:, None] * profile[None, :]
    at = row[:, None] * E + distance[None, :]
    tl.store(out_ptr + at, total * unit, mask=real_row[:, None] & real[None, :])


def terms_by_distance(relative: RelativeTerm) -> Tensor:
    """Return the terms [T, H, E] of keys by distance, in bits: as powers of two have them."""
    num_rows, num_heads, rank = relative.states_THR.shape
    extent = relative.profiles_RE.shape[1]
    out_THE = torch.empty(num_rows, num_heads, extent, dtype=torch.float32, device=relative.states_THR.device)
    if num_rows == 0:
        return out_THE
    _add_profiles[(triton.cdiv(num_rows * num_heads, ROWS), triton.cdiv(extent, DISTANCES))](
        relative.states_THR.contiguous(),
        relative.profiles_RE.contiguous(),
        out_THE,
        num_rows * num_heads,
        math.log2(math.e),
        R=rank,
        E=extent,
        ROWS=ROWS,
        DISTANCES=DISTANCES,
        num_warps=4,
        **pdl_options(out_THE.device),
    )
    return out_THE


@jit()
def with_terms(
    s: tl.tensor,
    terms_ptr: tl.tensor,
    growth_ptr: tl.tensor,
    row: tl.tensor,
    head_row: tl.tensor,
    back: tl.tensor,
    real_row: tl.tensor,
    EXTENT: tl.constexpr,
) -> tl.tensor:
    """Return scores [rows, keys] in bits with the terms of heads of rows `head_row` for keys that lie `back`,
    times the growth of the `row` if there is one."""
    known = real_row[:, None] & (back >= 0) & (back < EXTENT)
    s += tl.load(terms_ptr + (head_row.to(tl.int64) * EXTENT)[:, None] + back, mask=known, other=0.0)
    if growth_ptr is not None:
        s *= tl.load(growth_ptr + row, mask=real_row, other=1.0)[:, None]
    return s

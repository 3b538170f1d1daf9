"""Every kernel of `index_store` that runs here, against its law in float64, and the bits of rows in company.
In triton's interpreter those are the GPU's kernels, too, on a GPU the same.

The interpreter truncates where bfloat16 rounds: float16 and float32 stand in.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.query_growth import QueryGrowth
from compress.kernels.operands.rows import RowNorm
from compress.kernels.select import Kernel
from compress.models.indexer import Indexer
from compress.models.layer_shape import Rope
from compress.models.query_growth import position_logs
from compress.models.rope import cos_sin
from tests.support.usable_kernels import usable

DTYPES = {"F32": torch.float32, "F16": torch.float16}
POISON = 77.0
POSITIONS = (0, 5, 3, 1, 49, 2, 7)
SLOTS = (4, 17, 2, 31, 16, 0, 9)
INDEXERS = {
    "DeepSeek-V3.2": (Indexer(64, 128, 1), 64),
    "neighbours": (Indexer(5, 24, 1, interleaved=True), 8),
    "neighbours at the end": (Indexer(3, 40, 1, interleaved=True, rope_last=True, norm_eps=1e-3), 6),
    "halves at the end": (Indexer(9, 10, 1, rope_last=True), 10),
    "growing": (Indexer(6, 32, 1, of_stream=True, interleaved=True), 16),
    "pools": (Indexer(3, 20, 7, pool_size=4), 0),
}
"""Facts, and dimensions that rotate."""

each_indexer = pytest.mark.parametrize("name", INDEXERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


class Step:
    """The rows of one pass, columns of wider rows, and the poisoned pages that they are stored in."""

    def __init__(self, name: str, dtype: torch.dtype, device: str) -> None:
        self.facts, self.rope_dim = INDEXERS[name]
        heads, width = self.facts.num_heads, self.facts.head_dim
        self.dtype, self.device, self.num_rows = dtype, device, len(POSITIONS)
        self.q = randn(self.num_rows, heads * width + 3, device=device, dtype=dtype)[:, : heads * width]
        self.k = 3 * randn(self.num_rows, width + 1, device=device, dtype=dtype, seed=1)[:, 1:] + 2
        self.gate = randn(self.num_rows, width, device=device, dtype=dtype, seed=2)
        self.weights = randn(self.num_rows, heads + 5, device=device, seed=3)[:, :heads]
        scale, bias = randn(2, width, device=device, seed=4)
        self.norm = RowNorm(scale, self.facts.norm_eps, centered=True, bias=bias)
        positions = torch.arange(50, device=device)
        self.tables = cos_sin(Rope(theta=100.0), self.rope_dim, positions, dtype)
        grows = QueryGrowth(position_logs(positions, dtype), randn(2, heads, device=device, dtype=dtype))
        self.growth = grows if self.facts.of_stream else None

    def stored(self, kernel: Kernel, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, factors and all pages [slots, numbers] after a call."""
        kv_format = "F32" if self.dtype == torch.float32 else "F16"
        width = self.facts.cached_numbers
        pages = PagedLatents.empty(kv_format, 2, 16, width, torch.device(self.device))
        pages.rows.fill_(POISON)
        q, factors = kernel.fn(
            self.q[rows],
            self.k[rows],
            self.weights[rows],
            self.norm,
            *self.tables,
            torch.tensor(POSITIONS, device=self.device)[rows],
            torch.tensor(SLOTS, device=self.device)[rows],
            pages,
            facts=self.facts,
            gate_TI=self.gate[rows] if self.facts.pool_size else None,
            growth=self.growth,
        )
        return q, factors, pages.rows.flatten(0, 2)

    def turned(self, x: Tensor) -> Tensor:
        """Return heads [T, H, I] of which each pair turns as a complex number, float64, those first."""
        still = x.shape[-1] - self.rope_dim
        turning = x[..., still:] if self.facts.rope_last else x[..., : self.rope_dim]
        rest = x[..., :still] if self.facts.rope_last else x[..., self.rope_dim :]
        pairs = (turning[..., 0::2], turning[..., 1::2]) if self.facts.interleaved else turning.chunk(2, -1)
        half = self.rope_dim // 2
        cos, sin = (each[list(POSITIONS), :half].double().unsqueeze(1) for each in self.tables)
        rotated = torch.complex(*pairs) * torch.complex(cos, sin)
        return torch.cat((rotated.real, rotated.imag, rest), dim=-1)


@usable("index_store", n=32, k=8)
@each_dtype
@each_indexer
def test_keys_are_normed_turned_and_stored_and_queries_turned(
    name: str, dtype: torch.dtype, kernel: Kernel, device: str
) -> None:
    step = Step(name, dtype, device)
    q, factors, pages = step.stored(kernel, list(range(step.num_rows)))
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    asked = step.q.double().unflatten(1, (step.facts.num_heads, -1))
    if step.growth is not None:
        scale, base = step.growth.heads_2H.double()
        logs = torch.tensor(POSITIONS, device=device).add(1).double().log()
        asked = asked * (scale * logs.unsqueeze(1) + base).unsqueeze(-1)
        close = {name: 4 * value for name, value in close.items()}
    assert q.dtype == dtype
    torch.testing.assert_close(q.double(), step.turned(asked), **close)
    assert torch.equal(factors, step.weights * step.facts.score_scale)
    norm = (each.double() for each in (step.norm.weight, step.norm.bias) if each is not None)
    keys = F.layer_norm(step.k.double(), step.k.shape[1:], *norm, eps=step.norm.eps)
    expected = step.turned(keys.unsqueeze(1)).squeeze(1)
    if step.facts.pool_size:
        expected = torch.cat((expected, step.gate.double()), dim=1)
    torch.testing.assert_close(pages[list(SLOTS)].double(), expected, **close)
    others = [slot for slot in range(len(pages)) if slot not in SLOTS]
    assert (pages[others] == POISON).all()


@usable("index_store", n=32, k=8)
@each_dtype
@each_indexer
def test_a_row_has_its_bits_in_any_company(
    name: str, dtype: torch.dtype, kernel: Kernel, device: str
) -> None:
    step = Step(name, dtype, device)
    whole = step.stored(kernel, list(range(step.num_rows)))
    for rows in ([3], [6, 0], list(range(step.num_rows))[::-1]):
        q, factors, pages = step.stored(kernel, rows)
        slots = [SLOTS[row] for row in rows]
        assert torch.equal(q, whole[0][rows])
        assert torch.equal(factors, whole[1][rows])
        assert torch.equal(pages[slots], whole[2][slots])
    q, factors, pages = step.stored(kernel, [])
    assert (len(q), len(factors)) == (0, 0)
    assert (pages == POISON).all()

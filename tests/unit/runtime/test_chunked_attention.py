"""Attention in chunks by kernels of whole sequences, wherever rows lie among the borders of chunks."""

import pytest
import torch
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.attention_decode.chunks import attention_decode
from compress.kernels.attention_prefill.sdpa import attention_prefill
from compress.kernels.operands.paged import PagedKV
from compress.models.attention import FullAttention
from compress.runtime.chunked_attention import DecodeChunks, PrefillChunks
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.support.tiny_source import tiny_shape, tiny_source

BLOCK = 16
CHUNK = 32
LENGTH = 100
NUM_BLOCKS = -(-LENGTH // BLOCK)


@pytest.fixture(scope="module")
def sequence() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, S, H, C] of one sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, LENGTH, 4, 16), (1, LENGTH, 2, 16), (1, LENGTH, 2, 16))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def pages(k: Tensor, v: Tensor) -> tuple[PagedKV, Tensor]:
    """Return the keys and values in blocks in reverse order, and their block table."""
    table = torch.arange(NUM_BLOCKS, 0, -1)
    positions = torch.arange(LENGTH)
    empty = [torch.zeros(2, NUM_BLOCKS + 1, BLOCK, 16) for _ in range(2)]
    kv = PagedKV(*empty)
    kv.write_(table[positions // BLOCK] * BLOCK + positions % BLOCK, k[0], v[0])
    return kv, table.unsqueeze(0)


@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_decode_rows_see_their_own_chunk(q_len: int, sequence: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = sequence
    expected = FullAttention()(0, q, k, v, window=None, chunk=CHUNK)[0]
    kv, table_1B = pages(k, v)
    ends = torch.arange(q_len, LENGTH + 1)
    rows = torch.cat([torch.arange(end - q_len, end) for end in ends.tolist()])
    chunks = DecodeChunks(table_1B.expand(len(ends), -1), ends, q_len=q_len, chunk=CHUNK, block_size=BLOCK)
    found = chunks.attend(
        lambda table, lens: attention_decode(
            q[0, rows], kv, table, lens, q_len=q_len, window=None, scale=0.25
        )
    )
    assert (found - expected[rows]).abs().max() < 1e-5


def test_rows_before_the_first_position_disturb_no_other(sequence: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = sequence
    kv, table_1B = pages(k, v)
    chunks = DecodeChunks(table_1B, torch.tensor([1]), q_len=4, chunk=CHUNK, block_size=BLOCK)
    found = chunks.attend(
        lambda table, lens: attention_decode(q[0, :4], kv, table, lens, q_len=4, window=None, scale=0.25)
    )
    assert torch.allclose(found[3], v[0, 0].repeat_interleave(2, dim=0), atol=1e-6)


@pytest.mark.parametrize("cuts", [(LENGTH,), (31, 32, 33, LENGTH), (7, 50, 96, 97, LENGTH)])
def test_prefill_rows_see_their_own_chunk(
    cuts: tuple[int, ...], sequence: tuple[Tensor, Tensor, Tensor]
) -> None:
    q, k, v = sequence
    expected = FullAttention()(0, q, k, v, window=None, chunk=CHUNK)[0]
    kv, table_1B = pages(k, v)
    query_lens = tuple(end - start for start, end in zip((0, *cuts), cuts, strict=False))
    parts = PrefillChunks.of(table_1B.expand(len(cuts), -1), query_lens, cuts, chunk=CHUNK, block_size=BLOCK)
    assert sum(parts.query_lens) == LENGTH
    assert max(parts.context_lens) <= CHUNK
    found = attention_prefill(
        q[0], kv, parts.table_RB, parts.query_lens, parts.context_lens, window=None, scale=0.25
    )
    assert (found - expected).abs().max() < 1e-5


def test_blocks_that_lie_in_two_chunks_are_refused_where_there_are_two_chunks() -> None:
    source = tiny_source(layers=(tiny_shape(chunk=40),))
    with pytest.raises(UsageError, match="chunks of 40 positions, which are no whole blocks of 16"):
        Engine(source, device=torch.device("cpu"))
    Engine(source, device=torch.device("cpu"), config=EngineConfig(max_model_len=40))

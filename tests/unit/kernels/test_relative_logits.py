"""Attention with relative logits by kernels: the numbers of the references within rounding, and rows of a
decode step whose bits depend on their request alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.attention_decode import chunks
from compress.kernels.attention_decode import paged as decode
from compress.kernels.attention_prefill import paged as prefill
from compress.kernels.attention_prefill import sdpa
from compress.kernels.operands.distance_terms import terms_by_distance
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.relative import RelativeTerm
from compress.models.relative_logits import RelativeLogits
from compress.runtime.pass_memory import terms_bytes
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products
from tests.support.usable_kernels import DEVICES

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, RANK = 16, 6, 2, 32, 5
LENGTHS = (1, 40, 133)
DEVICE = DEVICES[-1]

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or triton's interpreter"
)
each_window = pytest.mark.parametrize("window", [None, 30])
each_term = pytest.mark.parametrize(
    ("extent", "grows"), [(7, False), (100, True), (300, True)], ids=["near", "far", "all"]
)


@pytest.fixture(autouse=True)
def row_independent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_row_independent_products(monkeypatch)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def cached() -> tuple[PagedKV, Tensor]:
    """Return pages of sequences of `LENGTHS`, and their blocks."""
    num_blocks = -(-max(LENGTHS) // BLOCK_SIZE)
    order = torch.randperm(len(LENGTHS) * num_blocks, generator=torch.Generator().manual_seed(1)) + 1
    shape = (KV_HEADS, 1 + len(order), BLOCK_SIZE, HEAD_DIM)
    table = order.view(len(LENGTHS), -1).to(DEVICE, torch.int32)
    return PagedKV(randn(*shape, seed=2), randn(*shape, seed=3)), table


def term(num_rows: int, extent: int, grows: bool) -> RelativeTerm:
    growth = 1 + randn(num_rows, seed=6).abs() if grows else None
    return RelativeTerm(randn(num_rows, HEADS, RANK, seed=4), randn(RANK, extent, seed=5), growth)


@each_window
@each_term
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_is_that_of_the_reference_and_a_request_is_alone(
    q_len: int, extent: int, grows: bool, window: int | None
) -> None:
    kv, table = cached()
    lengths = torch.tensor([max(each, q_len) for each in LENGTHS], device=DEVICE, dtype=torch.int32)
    num_rows = q_len * len(LENGTHS)
    q = randn(num_rows, HEADS, HEAD_DIM, seed=7)
    relative = term(num_rows, extent, grows)
    facts: dict[str, Any] = {"q_len": q_len, "window": window, "scale": 0.2}
    found = decode.attention_decode(q, kv, table, lengths, relative=relative, **facts)
    expected = chunks.attention_decode(q, kv, table, lengths, relative=relative, **facts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for idx in range(len(LENGTHS)):
        rows = slice(idx * q_len, (idx + 1) * q_len)
        own = relative.rows(rows.start, rows.stop)
        request = slice(idx, idx + 1)
        alone = decode.attention_decode(
            q[rows].contiguous(), kv, table[request], lengths[request], relative=own, **facts
        )
        assert torch.equal(alone, found[rows])


@each_window
@each_term
def test_prefill_is_that_of_the_reference(extent: int, grows: bool, window: int | None) -> None:
    kv, table = cached()
    query_lens = (1, 17, 133)
    q = randn(sum(query_lens), HEADS, HEAD_DIM, seed=7)
    relative = term(len(q), extent, grows)
    facts: dict[str, Any] = {"window": window, "scale": 0.2, "relative": relative}
    found = prefill.attention_prefill(q, kv, table, query_lens, LENGTHS, **facts)
    expected = sdpa.attention_prefill(q, kv, table, query_lens, LENGTHS, **facts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_terms_take_the_bytes_that_a_cache_leaves_room_for() -> None:
    relative = RelativeLogits(RANK, 300)
    layers = (tiny_shape(num_heads=HEADS, num_kv_heads=KV_HEADS, rope=None, relative=relative), tiny_shape())
    own = term(37, 300, grows=False)
    assert own.states_THR.nbytes + terms_by_distance(own).nbytes == terms_bytes(
        tiny_source(layers=layers).arch, 37
    )
    assert terms_bytes(tiny_source().arch, 37) == 0

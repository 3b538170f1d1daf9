"""The law of rows on a CPU: a row's result has the same bits in any company.

Company is the number of rows, the place among them, the values of the others, the alignment of the operands
and the number of threads. The law holds for every CPU kernel of a decode step, whichever code a library
chooses; `test_row_law_emulated.py` repeats this file under other instruction sets.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.block_choice.reference import row_products
from compress.kernels.index_choice.reference import row_scores
from compress.kernels.linear import row_product
from compress.kernels.operands.altup import AltUpWeights
from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.hyper import HyperWeights
from compress.kernels.operands.key_pools import KeyPools
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.query_growth import QueryGrowth
from compress.kernels.operands.routing import COUNTED_ROWS, RouterWeights
from compress.kernels.operands.rows import INT8, ActivationQuant, RowNorm, activation_quant, quantize
from compress.kernels.problem import DENSE_SCHEMES, Op, Problem
from compress.kernels.select import Kernel, candidates, select
from compress.models.block_choice import num_attended
from compress.models.compressed import Compressed
from compress.models.experts import Experts
from compress.models.hyper_connection import HyperConnections
from compress.models.indexer import BlockIndexer, EntryIndexer, Indexer
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import sample
from tests.support.emulation import EMULATED, EMULATIONS, is_intel

pytestmark = pytest.mark.row_law
CPU = torch.device("cpu")
THREADS = (1, 2)
WIDTHS = (*range(1, 10), 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 576, 1000)
DEPTHS = (1, 2, 3, 7, 8, 15, 17, 31, 33, 64, 65, 127, 129, 576)
ROWS = {"decode": 9, "prefill": 130}
"""Rows of the largest batch: more than two tiles, the last one not full."""


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(bits(first), bits(second))


def at_offset(x: Tensor, num_elements: int) -> Tensor:
    """Return a copy that begins so many elements after the start of its storage."""
    copy = x.new_empty(x.numel() + num_elements)[num_elements:].view(x.shape)
    return copy.copy_(x)


def companies(x_TK: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield batches of rows of x, and for each row its index in x, or -1 for noise."""
    num_rows, _ = x_TK.shape
    idx_T = torch.arange(num_rows)
    for size in sorted({1, 2, 3, 4, 5, 7, 8, num_rows // 2, num_rows - 1}):
        yield f"the first {size}", x_TK[:size], idx_T[:size]
        yield f"the last {size}", x_TK[num_rows - size :], idx_T[num_rows - size :]
    yield "in reverse", x_TK.flip(0), idx_T.flip(0)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    yield "in another order", x_TK[order], order
    yield "one row repeated", x_TK[:1].expand(num_rows, -1), torch.zeros_like(idx_T)
    loud = x_TK.clone()
    loud[1::2] *= 1e6
    yield "beside large numbers", loud, torch.where(idx_T % 2 == 0, idx_T, -1)
    for offset in (1, 2, 3, 4, 8):
        yield f"{offset} elements behind an aligned address", at_offset(x_TK, offset), idx_T
    wider = torch.cat((x_TK, x_TK), dim=1)
    yield "in rows of a wider tensor", wider[:, : x_TK.shape[1]], idx_T


def breaches(
    fn: Callable[[Tensor], Tensor], x_TK: Tensor, *, threads: tuple[int, ...] = THREADS
) -> list[str]:
    """Return the companies in which a row of fn(x) has other bits than in fn(x) on the first number of
    threads."""
    torch.set_num_threads(threads[0])
    expected = fn(x_TK)
    found = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        if not same_bits(fn(x_TK), expected):
            found.append(f"{num_threads} threads")
        for name, batch, idx_T in companies(x_TK):
            y = fn(batch)
            real = idx_T >= 0
            if not same_bits(y[real], expected[idx_T[real]]):
                found.append(f"{name}, {num_threads} threads")
    return found


def problem(
    op: Op, *, n: int, k: int, phase: str, scheme: str, dtype: torch.dtype = torch.float32
) -> Problem:
    return Problem(
        op, n, k, 1, {"decode": 8, "prefill": 4096}[phase], phase == "decode", scheme, dtype, "cpu", 0
    )


def linear_of(
    w: Tensor | QuantizedWeight, scheme: str, phase: str, dtype: torch.dtype
) -> Callable[[Any], Tensor]:
    n, k = w.shape
    kernel = select(problem("linear", n=n, k=k, phase=phase, scheme=scheme, dtype=dtype))
    assert kernel.repack is not None
    packed = kernel.repack([w], dtype=dtype, device=CPU, gated=False)
    return lambda x: kernel.fn(x, packed, None)


def check_linears(
    phase: str, dtype: torch.dtype, shapes: list[tuple[int, int]], threads: tuple[int, ...] = THREADS
) -> None:
    found = {}
    for n, k in shapes:
        fn = linear_of(randn(n, k, dtype=dtype), DENSE_SCHEMES[dtype], phase, dtype)
        assert fn(randn(0, k, dtype=dtype)).shape == (0, n)
        rows = ROWS[phase] if n * k < 1 << 16 else min(ROWS[phase], 50)
        if broken := breaches(fn, randn(rows, k, seed=1, dtype=dtype), threads=threads):
            found[n, k] = broken
    assert not found


def test_float32_linears_of_a_decode_step() -> None:
    """The number of threads changes no bits either."""
    widths = itertools.cycle(WIDTHS)
    shapes = [(n, k) for n in WIDTHS for k in (7, 65)] + [(next(widths), k) for k in DEPTHS for _ in range(3)]
    check_linears("decode", torch.float32, [*shapes, (576, 1536), (97, 4096)])


def test_float32_linears_of_a_prefill_step() -> None:
    widths = itertools.cycle(WIDTHS)
    shapes = [(n, 65) for n in WIDTHS] + [(next(widths), k) for k in DEPTHS]
    check_linears("prefill", torch.float32, [*shapes, (576, 576)], threads=(1, 2))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linears_of_16_bit_models(phase: str, dtype: torch.dtype) -> None:
    check_linears(phase, dtype, [(1, 3), (7, 129), (65, 64), (130, 33)], threads=(1, 2))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_linears_that_multiply_in_bfloat16(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """A CPU with AMX takes this path; the library of another CPU can take it too, slowly."""
    monkeypatch.setattr(row_product, "has_bfloat16_tiles", lambda: True)
    for threads in ((1,), (2,)):  # oneDNN may split a sum among threads
        check_linears(phase, torch.bfloat16, [(1, 3), (7, 129), (65, 64), (48, 1000)], threads=threads)


QUANTS = {
    None: None,
    "token": ActivationQuant(),
    "tensor": ActivationQuant(torch.tensor(0.03)),
    "group": ActivationQuant(group_size=128),
}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_quantized_linears(scheme: Scheme, phase: str) -> None:
    quant = QUANTS[scheme.activation]
    if quant is not None and scheme.code_dtype == INT8:
        static_zero = None if scheme.input_symmetric else torch.tensor(-9, dtype=torch.int32)
        quant = activation_quant(
            scheme, *((quant.static_scale, static_zero) if quant.static_scale is not None else ())
        )
    if scheme.scale_type is not None and scheme.activation is not None:
        global_scale = torch.tensor(64.0) if scheme.has_input_global_scale else None
        quant = activation_quant(scheme, global_scale=global_scale)
    w = nearest_weight(randn(136, 256), scheme, torch.float32)
    multiply = linear_of(w, scheme.name, phase, torch.float32)

    def fn(x: Tensor) -> Tensor:
        return multiply(x if quant is None else quantize(x, quant))

    assert not breaches(fn, randn(ROWS[phase], 256, seed=1), threads=(1, 2))


def each_kernel(op: Op, **facts: int) -> pytest.MarkDecorator:
    kernels = [
        (kernel, dtype)
        for dtype in DENSE_SCHEMES
        for kernel in candidates(op)
        if kernel.refusal(problem(op, **facts, phase="decode", scheme=DENSE_SCHEMES[dtype], dtype=dtype))
        is None
    ]
    names = [f"{kernel.name}-{DENSE_SCHEMES[dtype]}" for kernel, dtype in kernels]
    return pytest.mark.parametrize(("kernel", "dtype"), kernels, ids=names)


@each_kernel("rms_norm", n=83, k=0)
def test_norms(kernel: Kernel, dtype: torch.dtype) -> None:
    for size in (7, 16, 83, 1536):
        weight = randn(size, seed=2, dtype=dtype)
        assert not breaches(partial(kernel.fn, weight=weight, eps=1e-5), randn(33, size, dtype=dtype))


@each_kernel("hyper_mix", n=83, k=4)
@pytest.mark.parametrize(("num_rows", "size"), [(33, 83), (9, 10_240)])
def test_mixtures_of_streams(kernel: Kernel, dtype: torch.dtype, num_rows: int, size: int) -> None:
    facts = HyperConnections(4, 1e-6, sinkhorn_iterations=3)
    shapes = facts.shapes(size)
    weight = randn(*shapes["weight"], seed=2, dtype=torch.float32) * (4 * size) ** -0.5
    hyper = HyperWeights(facts, 1e-5, weight, randn(*shapes["bias"], seed=3), torch.ones(3))
    norm = RowNorm(randn(size, seed=4, dtype=dtype), 1e-5)

    def mixed(streams_TE: Tensor) -> Tensor:
        rows, factors = kernel.fn(streams_TE, hyper, norm)
        return torch.cat((rows.to(torch.float32), factors), dim=1)

    assert not breaches(mixed, randn(num_rows, 4 * size, dtype=dtype))


@each_kernel("altup_predict", n=83, k=3)
@pytest.mark.parametrize(("num_rows", "size"), [(33, 83), (9, 2048)])
def test_predicted_and_corrected_streams(
    kernel: Kernel, dtype: torch.dtype, num_rows: int, size: int
) -> None:
    norms = [RowNorm(randn(size, seed=seed, dtype=dtype), 1e-5) for seed in (2, 3)]
    router = randn(3, size, seed=4, dtype=dtype) * size**0.5
    altup = AltUpWeights(norms[0], router, randn(9, 3, seed=5), randn(3, 3, seed=6), norms[1].weight)
    correct = select(problem("altup_correct", n=83, k=3, phase="decode", scheme="F32")).fn

    def updated(streams_TE: Tensor) -> Tensor:
        predicted_TE, rows = kernel.fn(streams_TE, altup, norms[1])
        streams_TE, read_TD = correct(rows, predicted_TE, altup)
        return torch.cat((predicted_TE, rows, streams_TE, read_TD), dim=1)

    assert not breaches(updated, randn(num_rows, 3 * size, dtype=dtype))


@pytest.mark.parametrize("sparsity", [0.4, 0.95])
def test_sparse_gates(sparsity: float) -> None:
    act_mul = select(problem("act_mul", n=83, k=0, phase="decode", scheme="F32")).fn
    for size in (7, 83, 2048):
        fn = partial(act_mul, activation_name="gelu_pytorch_tanh", sparsity=sparsity)
        assert not breaches(fn, randn(33, 2 * size))


@each_kernel("router", n=83, k=48)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_topk", "sparsemixer", "sqrt_softplus"])
@pytest.mark.parametrize("num_experts", [6, 40, 83])
def test_routers(kernel: Kernel, dtype: torch.dtype, score: Any, num_experts: int) -> None:
    has_bias = score in ("sigmoid", "sqrt_softplus")
    facts = Experts(
        num_experts=num_experts,
        top_k=2,
        expert_size=16,
        score=score,
        renormalize=score in ("softmax", "sigmoid", "sqrt_softplus"),
        selection_bias=has_bias,
        jitter=0.01 if score == "sparsemixer" else 0.0,
        router_scale=0.2 if has_bias else 1.0,
    )
    weight_ED = randn(num_experts, 48, seed=2, dtype=dtype)
    bias_E = randn(num_experts, seed=3) if has_bias else None
    router = RouterWeights(weight_ED, None, bias_E, None, torch.zeros(COUNTED_ROWS, dtype=torch.int32))

    def routed(x_TD: Tensor) -> Tensor:
        ids_TK, weights_TK = kernel.fn(x_TD, router, facts)
        return torch.cat((ids_TK.to(torch.float32), weights_TK), dim=1)

    assert not breaches(routed, randn(33, 48, dtype=dtype))


@each_kernel("act_mul", n=83, k=0)
@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "xielu", "silu_capped"]
)
def test_activations(kernel: Kernel, dtype: torch.dtype, activation: str) -> None:
    numbers = {"xielu_4": torch.tensor([0.8, 0.9, 0.5, -1e-6])} if activation == "xielu" else {}
    numbers |= {"cap": 0.7} if activation == "silu_capped" else {}
    for size in (7, 32, 96, 1536):
        x = randn(17, 2 * size, dtype=dtype)
        assert not breaches(lambda x: kernel.fn(x, activation, **numbers), x)
        if activation.startswith("gelu"):
            assert not breaches(lambda x: kernel.fn(x, activation, gated=False), x)


@pytest.mark.parametrize(
    "draw",
    [
        SamplingParams(max_tokens=1, logprobs=True),
        SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9, seed=1, logprobs=True),
    ],
)
def test_tokens_and_their_log_probabilities(draw: SamplingParams) -> None:
    for vocab_size in (61, 1000):

        def fn(logits_RV: Tensor) -> Tensor:
            choice = sample(logits_RV, [draw] * len(logits_RV), [5] * len(logits_RV))
            assert choice.logprobs_R is not None
            return torch.stack((choice.tokens_R.to(torch.float32), choice.logprobs_R), dim=1)

        assert not breaches(fn, randn(9, vocab_size) * 4)


@dataclass(frozen=True)
class Heads:
    """Attention of `group` query heads for each of `kv_heads` heads of keys and values."""

    group: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None


HEADS = (
    Heads(1, 1, 16),
    Heads(2, 2, 8),
    Heads(3, 3, 24, window=50),
    Heads(4, 1, 64, block_size=128),
    Heads(7, 2, 64),
    Heads(8, 1, 24),
    Heads(64, 1, 32),
)
LENGTHS = (1, 5, 128, 129, 300, 17, 400)


def pages(heads: Heads, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[PagedKV, Tensor]:
    """Random keys and values, and a table of blocks in no order."""
    num_blocks = -(-max(lengths) // heads.block_size)
    order = torch.randperm(len(lengths) * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
    shape = (heads.kv_heads, 1 + len(order), heads.block_size, heads.head_dim)
    return PagedKV(randn(*shape, seed=3, dtype=dtype), randn(*shape, seed=4, dtype=dtype)), order.view(
        len(lengths), -1
    )


COMPRESSED = (
    (Compressed(16, 8, 1, 16), 3, 24, None),
    (Compressed(16, 8, 1, 16, rate=4, overlaps=True), 4, 16, None),
    (Compressed(16, 6, 1, 16, rate=5, overlaps=True), 7, 30, None),
    (Compressed(16, 32, 1, 16, rate=128), 64, 32, None),
    (Compressed(16, 8, 1, 16, rate=4, overlaps=True), 4, 16, EntryIndexer(5, 24, 9, 4)),
    (Compressed(16, 6, 1, 16, rate=1, overlaps=True), 7, 30, EntryIndexer(64, 10, 130, 1)),
)
"""Facts of compressed attention, the query heads, the dimensions of each, and an indexer."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("facts", "num_heads", "head_dim", "indexer"), COMPRESSED, ids=str)
def test_compressed_attention(
    facts: Compressed, num_heads: int, head_dim: int, indexer: EntryIndexer | None, dtype: torch.dtype
) -> None:
    """Compare the rows of sequences alone, in batches and in another order, and rows of one sequence in
    passes of several and of one."""
    scheme = DENSE_SCHEMES[dtype]
    stated = {"phase": "decode", "scheme": scheme, "dtype": dtype}
    kernel = select(problem("compressed_attention", n=head_dim, k=num_heads, **stated))
    width = facts.raw_width(head_dim)
    scored_width = 0 if indexer is None else facts.raw_width(indexer.head_dim)
    num_blocks = -(-max(LENGTHS) // 16)
    order = torch.randperm(len(LENGTHS) * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(LENGTHS), -1)
    numbers = head_dim + width + scored_width
    cached = PagedLatents(randn(1, 1 + len(order), 16, numbers, seed=3, dtype=dtype))
    angles = randn(max(LENGTHS) + 1, facts.rope_dim, seed=4)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = None
    if facts.rate:
        norm = RowNorm(randn(head_dim, seed=5, dtype=dtype), 1e-5)
        weights = EntryWeights(facts, randn(facts.rate, width // 2, seed=6), norm)
    q = randn(len(LENGTHS), 3, num_heads, head_dim, dtype=dtype)
    sinks = randn(num_heads, seed=7)

    def choice_of(sequences: list[int], rows: slice) -> EntryChoice | None:
        if indexer is None:
            return None
        norm = RowNorm(randn(indexer.head_dim, seed=8, dtype=dtype), 1e-5)
        scored = EntryWeights(facts, randn(facts.rate, scored_width // 2, seed=9), norm)
        queries = randn(len(LENGTHS), 3, indexer.num_heads, indexer.head_dim, seed=10, dtype=dtype)
        factors = randn(len(LENGTHS), 3, indexer.num_heads, seed=11)
        of_rows = (each[sequences][:, rows].flatten(0, 1) for each in (queries, factors))
        return EntryChoice(scored, indexer.top_entries, *of_rows)

    last = torch.tensor(LENGTHS) - 1
    positions = (last.unsqueeze(1) - torch.arange(2, -1, -1)).clamp(min=0)

    def attended(sequences: list[int], rows: slice) -> Tensor:
        sizes = torch.arange(len(sequences)).repeat_interleave(len(range(3)[rows]))
        own = table[sequences, : -(-max(LENGTHS[each] for each in sequences) // 16)]
        out: Tensor = kernel.fn(
            q[sequences][:, rows].flatten(0, 1),
            cached,
            weights,
            *tables,
            own,
            sizes,
            positions[sequences][:, rows].flatten(),
            window=50,
            scale=0.3,
            sinks_H=sinks,
            choice=choice_of(sequences, rows),
        )
        return out.unflatten(0, (len(sequences), -1))

    for threads in THREADS:
        torch.set_num_threads(threads)
        whole = attended(list(range(len(LENGTHS))), slice(3))
        for some in ([3], [6, 0], [5, 4, 3, 2, 1, 0]):
            assert same_bits(attended(some, slice(3)), whole[some])
        for row in range(3):
            assert same_bits(attended([6, 2, 4], slice(row, row + 1)), whole[[6, 2, 4], row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim", "size"), [(1, 8, 4), (5, 10, 3), (8, 128, 16), (3, 6, 1)])
def test_choice_of_pools(num_heads: int, head_dim: int, size: int, dtype: torch.dtype) -> None:
    """Compare the choice of pools by rows alone and in batches over wider tables, and by exact arithmetic."""
    facts = {"phase": "decode", "scheme": DENSE_SCHEMES[dtype], "dtype": dtype}
    kernel = select(problem("pool_choice", n=head_dim, k=num_heads, **facts))
    lengths = torch.tensor(LENGTHS)
    num_blocks = -(-max(LENGTHS) // 16)
    order = torch.randperm(len(LENGTHS) * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(LENGTHS), -1)
    pages = PagedLatents(randn(1, 1 + len(order), 16, 2 * head_dim, seed=3, dtype=dtype))
    q = randn(len(LENGTHS), num_heads, head_dim, dtype=dtype)
    weights = randn(len(LENGTHS), num_heads, seed=4)
    top_pools = 5
    indexer = Indexer(num_heads, head_dim, top_pools * size + size - 1, pool_size=size)
    pools = KeyPools(indexer, randn(size, head_dim, seed=5))

    def chosen(rows: list[int], width: int) -> Tensor:
        operands = q[rows], weights[rows], pages, table[rows, :width], lengths[rows]
        found: Tensor = kernel.fn(*operands, pools=pools)
        return found

    everyone = list(range(len(LENGTHS)))
    for threads in THREADS:
        torch.set_num_threads(threads)
        whole = chosen(everyone, num_blocks)
        assert torch.equal(chosen(everyone[::-1], num_blocks), whole.flip(0))
        for row, length in enumerate(LENGTHS):
            least = max(-(-(indexer.top_k + 1) // 16), -(-length // 16))
            assert torch.equal(chosen([row], least), whole[row : row + 1])
            gathered = pages.rows[0, table[row]].flatten(0, 1)[:length].to(torch.float64)
            keys, gates = gathered[: length // size * size].unflatten(0, (-1, size)).chunk(2, dim=-1)
            keys = (keys * (gates + pools.positions_nI.to(torch.float64)).softmax(dim=1)).sum(dim=1)
            scores = weights[row].to(torch.float64) @ (q[row].to(torch.float64) @ keys.mT).clamp(min=0)
            best = scores.sort(descending=True, stable=True).indices[:top_pools].sort().values
            after = torch.arange(length // size * size, length)
            expected = torch.cat(((best.unsqueeze(1) * size + torch.arange(size)).flatten(), after))
            assert int(indexer.num_chosen(lengths[row])) == len(expected)
            slots = (table[row].unsqueeze(1) * 16 + torch.arange(16)).flatten()
            padded = [*expected.tolist(), *[0] * (indexer.top_k - len(expected))]
            assert whole[row].tolist() == slots[padded].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 8), (5, 10), (8, 128), (64, 32)])
def test_choice_of_an_indexer(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Compare the choice of rows alone, in batches and over wider tables, and by one product of all."""
    facts = {"phase": "decode", "scheme": DENSE_SCHEMES[dtype], "dtype": dtype}
    kernel = select(problem("index_choice", n=head_dim, k=num_heads, **facts))
    lengths = torch.tensor(LENGTHS)
    num_blocks = -(-max(LENGTHS) // 16)
    order = torch.randperm(len(LENGTHS) * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(LENGTHS), -1)
    keys = PagedLatents(randn(1, 1 + len(order), 16, head_dim, seed=3, dtype=dtype))
    q = randn(len(LENGTHS), num_heads, head_dim, dtype=dtype)
    weights = randn(len(LENGTHS), num_heads, seed=4)

    def scores(rows: list[int], width: int) -> Tensor:
        blocks = table[rows, : width - width % 8].flatten()
        own = keys.gather(blocks, head_dim, torch.float32)[0].unflatten(0, (-1, 128))
        return row_scores(q[rows], weights[rows], own)

    def chosen(rows: list[int], width: int) -> Tensor:
        found: Tensor = kernel.fn(q[rows], weights[rows], keys, table[rows, :width], lengths[rows], top_k=37)
        return found

    everyone = list(range(len(LENGTHS)))
    for threads in THREADS:
        torch.set_num_threads(threads)
        whole = chosen(everyone, num_blocks)
        all_scores = scores(everyone, num_blocks)
        for rows, width in (([3], 8), ([6, 0], 24), ([5, 4, 3, 2, 1, 0], 16)):
            assert same_bits(scores(rows, width), all_scores[rows, : width * 16])
        assert torch.equal(chosen(everyone[::-1], num_blocks), whole.flip(0))
        for row, length in enumerate(LENGTHS):
            assert torch.equal(chosen([row], max(3, -(-length // 16))), whole[row : row + 1])
            gathered = keys.rows[0, table[row]].flatten(0, 1)[:length].to(torch.float64)
            of_heads = (q[row].to(torch.float64) @ gathered.mT).clamp(min=0)
            best = (weights[row].to(torch.float64) @ of_heads).sort(descending=True, stable=True).indices[:37]
            slots = (table[row].unsqueeze(1) * 16 + torch.arange(16)).flatten()
            assert whole[row, : len(best)].tolist() == slots[best.sort().values].tolist()
            assert (whole[row, len(best) :] == slots[0]).all()


@each_kernel("index_store", n=83, k=6)
@pytest.mark.parametrize(
    ("facts", "rope_dim"),
    [
        (Indexer(5, 10, 37, interleaved=True), 6),
        (Indexer(3, 83, 37, rope_last=True), 20),
        (Indexer(2, 128, 37, of_stream=True), 64),
        (Indexer(4, 24, 39, pool_size=4), 0),
    ],
    ids=str,
)
def test_queries_and_stored_keys_of_an_indexer(
    kernel: Kernel, dtype: torch.dtype, facts: Indexer, rope_dim: int
) -> None:
    """A row has the queries, the key, the weights of heads and the gate of a position, which follows from
    it."""
    width, heads = facts.head_dim, facts.num_heads
    scale, bias = randn(2, width, seed=2)
    norm = RowNorm(scale, facts.norm_eps, centered=True, bias=bias)
    tables = randn(40, rope_dim, seed=3, dtype=dtype), randn(40, rope_dim, seed=4, dtype=dtype)
    growth = QueryGrowth(randn(40, seed=5, dtype=dtype), randn(2, heads, seed=6, dtype=dtype))

    def stored(rows_TF: Tensor) -> Tensor:
        q_TF, k_TI, gate_TI, weights_TH = rows_TF.split([heads * width, width, width, heads], dim=1)
        places = torch.arange(len(rows_TF))
        pages = PagedLatents(torch.zeros(1, 3, 16, facts.cached_numbers, dtype=dtype))
        q_THI, factors_TH = kernel.fn(
            q_TF,
            k_TI,
            weights_TH.to(torch.float32),
            norm,
            *tables,
            (gate_TI[:, 0].abs() * 10).long() % 40,
            places,
            pages,
            facts=facts,
            gate_TI=gate_TI if facts.pool_size else None,
            growth=growth if facts.of_stream else None,
        )
        return torch.cat((q_THI.flatten(1), factors_TH, pages.rows.flatten(0, 2)[places]), dim=1)

    assert not breaches(stored, randn(33, (heads + 2) * width + heads, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "facts",
    [
        BlockIndexer(1, 8, block_size=4, top_blocks=5),
        BlockIndexer(3, 34, block_size=7, top_blocks=4, local_blocks=2),
        BlockIndexer(4, 128, block_size=16, top_blocks=2),
        BlockIndexer(5, 32, block_size=4, top_blocks=5, pooled=True),
    ],
    ids=str,
)
def test_choice_of_blocks(facts: BlockIndexer, dtype: torch.dtype) -> None:
    """Compare products and choices of rows alone, in batches and over wider tables."""
    shape = {"n": facts.head_dim, "k": facts.num_heads, "phase": "decode"}
    kernel = select(problem("block_choice", **shape, scheme=DENSE_SCHEMES[dtype], dtype=dtype))
    lengths = torch.tensor(LENGTHS)
    num_blocks = -(-max(LENGTHS) // 16)
    order = torch.randperm(len(LENGTHS) * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(LENGTHS), -1)
    pages = PagedLatents(randn(1, 1 + len(order), 16, facts.head_dim, seed=3, dtype=dtype))
    q = randn(len(LENGTHS), facts.num_heads, facts.head_dim, dtype=dtype)
    angles = randn(max(LENGTHS) + 16, 8, seed=4)
    norm = RowNorm(randn(facts.head_dim, seed=5, dtype=dtype), 1e-6)
    keys = BlockKeys(facts, norm, 8, angles.cos().to(dtype), angles.sin().to(dtype))

    def products(rows: list[int], width: int) -> Tensor:
        own = pages.rows[0, table[rows, :width]].flatten(1, 2)
        return row_products(q[rows].to(torch.float32), own.to(torch.float32))

    def chosen(rows: list[int], width: int) -> list[list[list[int]]]:
        found: Tensor = kernel.fn(q[rows], keys, pages, table[rows, :width], lengths[rows])
        counts = num_attended(facts, lengths[rows] - 1).tolist()
        return [heads[:, :count].tolist() for heads, count in zip(found, counts, strict=True)]

    everyone = list(range(len(LENGTHS)))
    for threads in THREADS:
        torch.set_num_threads(threads)
        whole = chosen(everyone, num_blocks)
        all_products = products(everyone, num_blocks)
        for rows, width in (([3], 8), ([6, 0], 24), ([5, 4, 3, 2, 1, 0], 16)):
            assert same_bits(products(rows, width), all_products[rows][..., : width * 16])
        assert chosen(everyone[::-1], num_blocks) == whole[::-1]
        for row, length in enumerate(LENGTHS):
            assert chosen([row], max(1, -(-length // 16))) == whole[row : row + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_attention(heads: Heads, dtype: torch.dtype) -> None:
    """Compare requests alone, in batches and in another order, and queries of a step alone and with
    others."""
    scheme = DENSE_SCHEMES[dtype]
    kernel = select(
        problem(
            "attention_decode", n=heads.head_dim, k=heads.group, phase="decode", scheme=scheme, dtype=dtype
        )
    )
    kv, table = pages(heads, LENGTHS, dtype)
    lens = torch.tensor(LENGTHS)
    q_RQHC = randn(len(LENGTHS), 3, heads.group * heads.kv_heads, heads.head_dim, dtype=dtype)

    def attend(rows: list[int], *, queries: slice, back: int = 0, width: int | None = None) -> Tensor:
        q = q_RQHC[rows, queries]
        blocks = table[rows, : -(-int(lens[rows].max()) // heads.block_size) if width is None else width]
        out = kernel.fn(
            q.flatten(0, 1).contiguous(),
            kv,
            blocks,
            lens[rows] - back,
            q_len=q.shape[1],
            window=heads.window,
            scale=0.3,
        )
        return out.view(q.shape)

    everyone = list(range(len(LENGTHS)))
    last = slice(2, 3)
    torch.set_num_threads(1)
    expected = attend(everyone, queries=last)
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        assert same_bits(attend(everyone[::-1], queries=last), expected.flip(0))
        for row in everyone:
            assert same_bits(attend([row], queries=last), expected[row : row + 1])
            assert same_bits(attend(everyone[row:], queries=last), expected[row:])
        long = [row for row in everyone if LENGTHS[row] >= 3]
        verified = attend(long, queries=slice(0, 3))
        assert same_bits(verified[:, last], expected[long])
        for back in (1, 2):
            assert same_bits(
                verified[:, 2 - back], attend(long, queries=slice(2 - back, 3 - back), back=back)[:, 0]
            )


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_attention(heads: Heads) -> None:
    """Compare chunks alone and among others, on one number of threads, which PyTorch's product depends on."""
    kernel = select(
        problem("attention_prefill", n=heads.head_dim, k=heads.group, phase="prefill", scheme="F32")
    )
    kv, table = pages(heads, LENGTHS, torch.float32)
    chunks = [min(length, 1 + 37 * idx) for idx, length in enumerate(LENGTHS)]
    q_T = randn(sum(chunks), heads.group * heads.kv_heads, heads.head_dim).split(chunks)

    def attend(rows: list[int]) -> Tensor:
        q = torch.cat([q_T[row] for row in rows])
        lens = (tuple(chunks[row] for row in rows), tuple(LENGTHS[row] for row in rows))
        return kernel.fn(q, kv, table[rows], *lens, window=heads.window, scale=0.3)

    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        alone = [attend([row]) for row in range(len(LENGTHS))]
        assert same_bits(attend(list(range(len(LENGTHS)))), torch.cat(alone))
        assert same_bits(attend([6, 2, 4]), torch.cat([alone[row] for row in (6, 2, 4)]))


@pytest.mark.skipif(EMULATED is None, reason="no other instruction set is emulated")
def test_the_emulated_instruction_set_is_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    """Read what MKL and oneDNN print about themselves with their first verbose call."""
    assert EMULATED is not None
    emulation = EMULATIONS[EMULATED]
    assert torch.backends.cpu.get_cpu_capability() == emulation.aten
    with (
        torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON),
        torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON),
    ):
        torch.mm(torch.ones(4, 64), torch.ones(64, 64))
        # Computed by oneDNN on every CPU, which `_int_mm` is not.
        torch.nn.functional.linear(torch.ones(8, 64).to_mkldnn(), torch.ones(64, 64).to_mkldnn())
    ctypes.CDLL(None).fflush(None)
    printed = capfd.readouterr().out.splitlines()
    [mkl] = [line for line in printed if line.startswith("MKL_VERBOSE") and "oneMKL" in line]
    [onednn] = [line for line in printed if "cpu,isa:" in line]
    assert onednn.endswith(emulation.onednn)
    if is_intel() or "MKL_ENABLE_INSTRUCTIONS" not in emulation.variables:
        assert emulation.mkl in mkl

"""Prefill attention in FP8 without a GPU: its reference by laws, its tiles in triton's interpreter, and the
choice and the compilation of its kernel."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.attention_prefill import fp8
from compress.kernels.attention_prefill.fp8_reference import HEAD_DIMS, KEYS, attention_prefill
from compress.kernels.attention_prefill.fp8_tiles import MORE_ROWS, ONE
from compress.kernels.compilers import nvrtc
from compress.kernels.operands.paged import PagedKV, empty_pages, power_of_two
from compress.kernels.problem import KernelDevice, Problem
from compress.kernels.select import refusals, select
from compress.models.attention import attend_with_scores, causal_mask
from compress.quant.kv import FP8_ATTENTION
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_source
from tests.support.triton_interpreter import INTERPRETED

CPU = torch.device("cpu")
ARCH = tiny_arch(LLAMA, head_dim=64)
H200_SHARED_BYTES = 232448


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pages(k_LKC: Tensor, v_LKC: Tensor, block_size: int = 16) -> tuple[PagedKV, Tensor]:
    """One sequence in the blocks 1, 2, ... of a cache, and its block table."""
    num_blocks = -(-len(k_LKC) // block_size)
    kv = empty_pages(FP8_ATTENTION, (k_LKC.shape[1], num_blocks + 1, block_size, k_LKC.shape[2]))
    kv.write_(block_size + torch.arange(len(k_LKC)), k_LKC, v_LKC)
    return kv, 1 + torch.arange(num_blocks).unsqueeze(0)


def attended(q_THC: Tensor, kv: PagedKV, table: Tensor, context_len: int, **facts: Any) -> Tensor:
    facts = {"window": None, "scale": q_THC.shape[2] ** -0.5, **facts}
    return attention_prefill(q_THC, kv, table, (len(q_THC),), (context_len,), **facts)


def exact(q_THC: Tensor, kv: PagedKV, table: Tensor, context_len: int, window: int | None = None) -> Tensor:
    """Attention over the numbers of the pages, without further rounding."""
    k, v = (each.double().unsqueeze(0) for each in kv.gather(table[0], context_len, torch.float32))
    seen = causal_mask(len(q_THC), context_len, window, q_THC.device)
    queries = q_THC.double().transpose(0, 1).unsqueeze(0)
    return attend_with_scores(queries, k, v, seen, q_THC.shape[2] ** -0.5, None, None).squeeze(0)


def distance(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("window", [None, 40])
def test_the_reference_is_attention_within_the_roundings(window: int | None) -> None:
    kv, table = pages(randn(300, 2, 64), randn(300, 2, 64, seed=1))
    q = randn(290, 6, 64, seed=2)
    error = distance(attended(q, kv, table, 300, window=window), exact(q, kv, table, 300, window))
    assert 2**-8 < error < 2**-4


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_key_that_has_most_of_the_weight_leaves_the_others_theirs(share: float) -> None:
    """Models give much weight to a first token without a value (arXiv 2309.17453); what is left for each of
    thousands of keys is far below the least number of e4m3. Only those of its own tile lose theirs."""
    length = 8192
    k, v = randn(length, 1, 64), randn(length, 1, 64, seed=1)
    q = randn(1, 1, 64, seed=2).sign()  # exact in e4m3, so that weights alone are rounded
    others = float(torch.logsumexp(k[1:, 0] @ q[0, 0] / 8, 0))
    score = others + math.log(share / (1 - share))
    k[0, 0] = q[0, 0] * 8 * score / float(q.square().sum())
    v[0] = 0
    kv, table = pages(k, v)
    lost = math.sqrt(KEYS / length)  # of a sum of random values
    assert distance(attended(q, kv, table, length), exact(q, kv, table, length)) < 2**-4 + lost


def test_later_numbers_of_a_tile_change_a_query_by_the_bits_that_their_scale_takes() -> None:
    k, q = randn(130, 1, 64), randn(130, 2, 64, seed=2)
    v = torch.randint(1, 8, (130, 1, 64), generator=torch.Generator().manual_seed(1)).float()
    plain = attended(q, *pages(k, v), 130)
    v[127] *= 2**5  # codes keep their bits while exponents reach
    assert torch.equal(attended(q, *pages(k, v), 130)[:127], plain[:127])
    v[127] *= 2**15
    assert not torch.equal(attended(q, *pages(k, v), 130)[:127], plain[:127])


def test_scales_are_powers_of_two_and_lose_no_bit_of_a_code() -> None:
    x = randn(40, 2, 64)
    x[3] = 0
    (kv, table), plain = pages(x, 100 * x), empty_pages("FP8_TOKEN_HEAD", (2, 4, 16, 64))
    plain.write_(16 + torch.arange(40), x, 100 * x)
    for ours, theirs in ((kv.k_scale, plain.k_scale), (kv.v_scale, plain.v_scale)):
        assert ours is not None
        assert theirs is not None
        assert (torch.frexp(ours.view(2, -1)[:, 16:56]).mantissa == 0.5).all()
        ratio = (ours / theirs).view(2, -1)[:, 16:56]
        assert ((ratio >= 1) & (ratio < 2)).all()
    for read, written in zip(kv.gather(table[0], 40, torch.float32), (x, 100 * x), strict=True):
        error = (read.transpose(0, 1) - written).abs()
        least = written.abs().amax(dim=2, keepdim=True) * 2**-14
        assert (error <= written.abs() * 2**-4 + least).all()
    assert kv.empty_like(5, 16).format == FP8_ATTENTION
    assert power_of_two(torch.tensor([1.0, 1.5, 2.0, 2**-40, torch.nan])).tolist()[:4] == [1, 2, 2, 2**-40]
    assert power_of_two(torch.tensor(torch.nan)).isnan()


def test_numbers_of_the_grid_with_equal_weights_are_averaged_exactly() -> None:
    values = torch.randint(-7, 8, (130, 2, 64), generator=torch.Generator().manual_seed(0)).float()
    kv, table = pages(torch.ones(130, 2, 64), values)
    ours = attended(randn(3, 4, 64), kv, table, 130)
    for query, length in enumerate((128, 129, 130)):
        mean = values[:length].mean(0).repeat_interleave(2, dim=0)
        assert torch.allclose(ours[query], mean, rtol=1e-5, atol=1e-6)


def test_a_key_with_all_of_the_weight_keeps_it() -> None:
    """Its weight is rounded, and so is the sum that it is divided by."""
    keys = torch.zeros(20, 1, 64)
    keys[7] = 30.0
    kv, table = pages(keys, randn(20, 1, 64))
    _, v_KLC = kv.gather(table[0], 20, torch.float32)
    assert torch.allclose(attended(torch.ones(1, 1, 64), kv, table, 20)[0, 0], v_KLC[0, 7], rtol=1e-6)


@pytest.mark.parametrize(
    ("device", "facts", "kernel"),
    [
        (KernelDevice("cuda", 90, torch.bfloat16), {}, "cuda.fp8"),
        (KernelDevice("cuda", 90, torch.float16), {"n": 64, "k": 8}, "cuda.fp8"),
        (KernelDevice("cuda", 90, torch.bfloat16), {"n": 96}, "triton.paged"),
        (KernelDevice("cuda", 90, torch.bfloat16), {"softcap": True}, "triton.paged"),
        (KernelDevice("cuda", 90, torch.bfloat16), {"sinks": True}, "triton.paged"),
        (KernelDevice("cuda", 90, torch.bfloat16), {"scheme": "FP8_TOKEN_HEAD"}, "triton.paged"),
        (KernelDevice("cuda", 80, torch.bfloat16), {}, "triton.paged"),
        (KernelDevice("cpu", 0, torch.float32), {}, "reference.fp8"),
        (KernelDevice("cpu", 0, torch.float32), {"sinks": True}, "reference.sdpa"),
        (KernelDevice("cpu", 0, torch.float32), {"n": 96}, "reference.sdpa"),
        (KernelDevice("cpu", 0, torch.float32), {"scheme": "FP8_TOKEN_HEAD"}, "reference.sdpa"),
    ],
)
def test_products_are_in_fp8_where_a_kernel_has_them_and_wider_elsewhere(
    device: KernelDevice, facts: dict[str, Any], kernel: str
) -> None:
    shape = {"n": 128, "k": 4, "scheme": FP8_ATTENTION}
    problem: Problem = device.problem("attention_prefill", phase="prefill", **{**shape, **facts})
    assert select(problem).name == kernel
    if kernel == "triton.paged":
        assert refusals(problem)["cuda.fp8"]


def test_the_engine_multiplies_prompts_in_fp8() -> None:
    prompt = tuple(torch.randint(61, (40,), generator=torch.Generator().manual_seed(0)).tolist())
    found = {}
    for kv_format in ("F32", "FP8_TOKEN_HEAD", FP8_ATTENTION):
        engine = Engine(tiny_source(ARCH), device=CPU, config=EngineConfig(kv_format=kv_format))
        params = SamplingParams(1, logprobs=True)
        (done,) = engine.generate([Request("a", prompt, params)])
        assert done.logprobs is not None
        found[kv_format] = done.logprobs[0]
        named = {row["op"]: (row["scheme"], row["kernel"]) for row in engine.kernel_report()}
        if kv_format == FP8_ATTENTION:
            assert named["attention_prefill"] == (FP8_ATTENTION, "reference.fp8")
            assert named["attention_decode"][0] == FP8_ATTENTION
    assert 0 < abs(found[FP8_ATTENTION] - found["F32"]) < 0.2
    assert found[FP8_ATTENTION] != found["FP8_TOKEN_HEAD"]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
def test_the_kernel_compiles(
    head_dim: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stages = fp8.stages_of(head_dim, H200_SHARED_BYTES)
    assert nvrtc.compile_cubin(fp8.source(dtype, head_dim, stages), 90)[:4] == b"\x7fELF"


def test_several_tiles_are_on_their_way() -> None:
    assert [fp8.stages_of(each, H200_SHARED_BYTES) for each in HEAD_DIMS] == [8, 6]
    assert all(fp8.stage_bytes(each) % 1024 == 0 for each in HEAD_DIMS), "tiles begin where swizzles do"


if INTERPRETED:
    from compress.kernels.attention_prefill.fp8_reference import _rounded_tiles
    from compress.kernels.attention_prefill.fp8_tiles import laid_out

    def unswizzled(rows: Tensor) -> Tensor:
        """The numbers of rows of 128 bytes [K, R, 128], whose pieces of 16 bytes are in swizzled places."""
        pieces = rows.contiguous().view(rows.shape[0], rows.shape[1], 8, 16)
        order = torch.arange(8) ^ (torch.arange(rows.shape[1]) % 8).unsqueeze(1)
        picked = pieces.gather(2, order[None, :, :, None].expand_as(pieces))
        return picked.flatten(2).view(torch.float8_e4m3fn).float()

    @pytest.mark.parametrize(
        ("head_dim", "block_size", "context_lens"),
        [(64, 16, (5, 130, 37)), (128, 64, (200, 64, 1)), (128, 128, (128,))],
    )
    def test_tiles_hold_the_numbers_under_one_scale_in_the_order_of_the_products(
        head_dim: int, block_size: int, context_lens: tuple[int, ...]
    ) -> None:
        counts = [-(-length // block_size) for length in context_lens]
        blocks = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, own in zip(table, blocks.split(counts), strict=True):
            row[: len(own)] = own
        kv = empty_pages(FP8_ATTENTION, (2, 1 + sum(counts), block_size, head_dim))
        for scale in (kv.k_scale, kv.v_scale):
            assert scale is not None
            scale.fill_(torch.nan)  # where nothing is written
        for row, length in zip(table.long(), context_lens, strict=True):
            positions = torch.arange(length)
            slots = row[positions // block_size] * block_size + positions % block_size
            sizes = 3 * torch.rand(length, 1, 1, generator=torch.Generator().manual_seed(length))
            k, v = (randn(length, 2, head_dim, seed=length + each) for each in (0, 1))
            kv.write_(slots, k, v * sizes)

        tiles = laid_out(kv, table, context_lens)
        place = torch.arange(KEYS)
        key = 16 * (place // 16) + 8 * (place % 4 // 2) + 2 * (place % 16 // 4) + place % 2
        for sequence, length in enumerate(context_lens):
            k, v = (_rounded_tiles(each) for each in kv.gather(table[sequence], length, torch.float32))
            for idx, first in enumerate(range(0, length, KEYS)):
                tile = int(tiles.table[sequence, idx])
                real = min(KEYS, length - first)
                scales = tiles.v[:, tile, head_dim + 1].contiguous().view(torch.float32)
                keys = unswizzled(tiles.k[:, tile])[:, :, :head_dim] * scales[:, 0, None, None]
                assert torch.allclose(keys[:, :real], k[:, first : first + real], rtol=1e-6)
                assert not keys[:, real:].any()
                turned = unswizzled(tiles.v[:, tile])[:, :head_dim] * scales[:, 1, None, None]
                values = torch.empty_like(turned)
                values[:, :, key] = turned
                assert torch.allclose(values[:, :, :real].mT, v[:, first : first + real], rtol=1e-6)
                assert not values[:, :, real:].any()
                assert (tiles.v[:, tile, head_dim] == ONE).all()
        assert tiles.v.shape[2] == head_dim + MORE_ROWS

    def test_a_number_that_is_none_makes_its_tile_none() -> None:
        kv, table = pages(randn(20, 2, 64), randn(20, 2, 64, seed=1))
        assert kv.k_scale is not None
        kv.k_scale.view(2, -1)[1, 18] = torch.nan
        tiles = laid_out(kv, table, (20,))
        scales = tiles.v[:, 0, 65].contiguous().view(torch.float32)[:, :2]
        assert scales.isnan().tolist() == [[False, False], [True, False]]

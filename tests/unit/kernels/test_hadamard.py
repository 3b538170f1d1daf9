"""Heads in their Hadamard transform: the matrix, attention that stays the same, codes that get better, and
what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.attention_decode.chunks import attention_decode
from compress.kernels.attention_prefill.sdpa import attention_prefill
from compress.kernels.hadamard.reference import hadamard
from compress.kernels.operands.paged import empty_pages
from compress.kernels.problem import KernelDevice
from compress.kernels.rope_store.reference import rope_store
from compress.kernels.select import refusals, select
from compress.models.layer_shape import Rope
from compress.models.rope import cos_sin
from compress.quant.kv import HADAMARD_HEAD_DIMS, INT4_HADAMARD, INT4_TOKEN_HEAD
from compress.runtime import kv_cache
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_source

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps
ARCH = tiny_arch(LLAMA, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_hidden_layers=2)
SIZE = 16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(size: int) -> Tensor:
    """The matrix of Sylvester's construction, by Kronecker products."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    whole = torch.ones(1, 1, dtype=torch.float64)
    while len(whole) < size:
        whole = torch.kron(two, whole)
    return whole / size**0.5


@pytest.mark.parametrize("size", [2, 4, 32, *HADAMARD_HEAD_DIMS, 512])
def test_the_transform_is_the_product_with_the_orthonormal_matrix(size: int) -> None:
    h_CC = matrix(size)
    torch.testing.assert_close(h_CC @ h_CC, torch.eye(size, dtype=torch.float64))
    x = randn(3, 5, size)
    bound = EPS * size.bit_length() * float(x.abs().max())
    torch.testing.assert_close(hadamard(x).double(), x.double() @ h_CC, rtol=0, atol=bound)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=2 * bound)
    spike = torch.zeros(size)
    spike[size // 3] = 1.0
    assert torch.equal(hadamard(spike).abs(), torch.full((size,), size**-0.5))
    with pytest.raises(AssertionError, match="no power of two"):
        hadamard(randn(2, 48))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_is_rounded_once_and_depends_on_nothing_else(dtype: torch.dtype) -> None:
    x = randn(7, 4, 128).to(dtype)
    y = hadamard(x)
    assert torch.equal(y, hadamard(x.to(torch.float32)).to(dtype))
    assert torch.equal(hadamard(x[2:3, 1]), y[2:3, 1])


@pytest.mark.parametrize("head_dim", HADAMARD_HEAD_DIMS)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_over_transformed_heads_is_the_plain_one(head_dim: int, window: int | None) -> None:
    """Keys, queries and values through the pages, in float32, for prompts and for decode rows."""
    num_heads, num_kv_heads, length = 6, 2, 45
    qkv = randn(length, (num_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.arange(length)
    tables = cos_sin(Rope(10000.0), head_dim, positions, torch.float32, length=length)
    slots = positions + SIZE
    table = torch.tensor([[1, 2, 3]])
    found = []
    for transforms in (False, True):
        kv = empty_pages("F32", (num_kv_heads, 4, SIZE, head_dim))
        q = rope_store(
            qkv,
            *tables,
            positions,
            slots,
            kv,
            num_heads=num_heads,
            qk_norm=None,
            eps=1e-5,
            hadamard=transforms,
        )
        facts = {"window": window, "scale": head_dim**-0.5}
        prompt = attention_prefill(q, kv, table, (length,), (length,), **facts)
        last = attention_decode(q[-1:], kv, table, torch.tensor([length]), q_len=1, **facts)
        found.append([hadamard(each) if transforms else each for each in (prompt, last)] + [kv.k])
    (plain, plain_last, plain_k), (ours, ours_last, ours_k) = found
    bound = 16 * EPS * head_dim**0.5 * float(plain.abs().max())
    torch.testing.assert_close(ours, plain, rtol=0, atol=bound)
    torch.testing.assert_close(ours_last, plain_last, rtol=0, atol=bound)
    assert not torch.allclose(ours_k, plain_k, atol=0.1)


def requests() -> list[Request]:
    """Prompts with a common beginning, greedy and drawn, and one that repeats itself."""
    shared = tuple(torch.randint(61, (3 * SIZE,), generator=torch.Generator().manual_seed(0)).tolist())
    params = SamplingParams(12, ignore_eos=True, logprobs=True, seed=3)
    drawn = replace(params, temperature=0.8)
    prompts = ((*shared, 5), (*shared, 7, 8, 9), shared[:20], (1, 2, 3) * 12)
    return [Request(str(idx), each, (params, drawn)[idx % 2]) for idx, each in enumerate(prompts)]


@pytest.mark.parametrize("speculative", [None, Speculative(NGram(), k=3)])
def test_without_codes_the_engine_serves_the_same_tokens(
    speculative: Speculative | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decode steps, shared beginnings and verification, all through the transform."""
    monkeypatch.setattr(kv_cache, "KV_FORMATS", (*kv_cache.KV_FORMATS, "F32_HADAMARD"))
    found = []
    for kv_format in ("F32", "F32_HADAMARD"):
        config = EngineConfig(
            kv_format=kv_format, speculative=speculative, prefix_cache=True, block_size=SIZE
        )
        engine = Engine(tiny_source(ARCH), device=CPU, config=config)
        found.append([engine.generate([each])[0] for each in requests()])
        assert engine.counts.prefix_hits > 0
        ops = {row["op"] for row in engine.kernel_report()}
        assert ("hadamard" in ops) == (kv_format != "F32")
    for plain, ours in zip(*found, strict=True):
        assert ours.tokens == plain.tokens
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(plain.logprobs), rtol=1e-4, atol=1e-4
        )


def error_of(kv_format: str, k_TKC: Tensor) -> float:
    """Mean square error of keys read back from four-bit pages."""
    kv = empty_pages(INT4_TOKEN_HEAD, (k_TKC.shape[1], 4, SIZE, k_TKC.shape[2]))
    transforms = kv_format == INT4_HADAMARD
    kv.write_(torch.arange(len(k_TKC)), *(2 * [hadamard(k_TKC) if transforms else k_TKC]))
    read = kv.gather(torch.arange(4), len(k_TKC), torch.float32)[0].transpose(0, 1)
    return float(((hadamard(read) if transforms else read) - k_TKC).square().mean())


def test_an_outlier_costs_the_codes_of_its_head_less() -> None:
    k = randn(60, 2, 128)
    even = error_of(INT4_HADAMARD, k) / error_of(INT4_TOKEN_HEAD, k)
    assert 0.9 < even < 1.1, "normal numbers are as easy either way"
    k[:, :, 17] *= 20
    assert error_of(INT4_HADAMARD, k) < 0.25 * error_of(INT4_TOKEN_HEAD, k)


def test_pages_are_those_of_the_format_without_the_transform() -> None:
    assert kv_bytes_per_token(ARCH, INT4_HADAMARD) == kv_bytes_per_token(ARCH, INT4_TOKEN_HEAD)
    cache = KVCache(ARCH, num_blocks=3, block_size=SIZE, kv_format=INT4_HADAMARD, device=CPU)
    assert cache.kv_format == INT4_HADAMARD
    assert cache.layer(0).format == INT4_TOKEN_HEAD


@pytest.mark.parametrize("head_dim", [32, 80, 96, 512])
def test_other_heads_are_refused_in_a_sentence(head_dim: int) -> None:
    arch = ARCH.replace(layers=tuple(replace(each, head_dim=head_dim) for each in ARCH.layers))
    with pytest.raises(
        UsageError, match=rf"64, 128, 256 dimensions.* heads of {head_dim}; choose INT4_TOKEN_HEAD\."
    ):
        kv_bytes_per_token(arch, INT4_HADAMARD)


@pytest.mark.parametrize("sm", [80, 90])
def test_a_gpu_transforms_heads_in_one_launch(sm: int) -> None:
    pytest.importorskip("triton")
    device = KernelDevice("cuda", sm, torch.bfloat16)
    assert select(device.problem("hadamard", n=128, k=4)).name == "triton.heads"
    assert "for heads of 64, 128, 256" in refusals(device.problem("hadamard", n=96, k=4))["triton.heads"]

"""Attention over a cache of latents: its two ways agree, short prompts have the bits of decode, and a cache
of latents holds what it says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit, UsageError
from compress.kernels.operands.rows import ActivationQuant, quantize
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.weights import Weights, dense
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES
from compress.runtime import latent_attention
from compress.runtime.deployment import Deployment
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from compress.runtime.latent_attention import LatentAttention
from compress.runtime.latent_linears import LatentLinears, absorbed_params
from compress.runtime.layer_attention import Projected
from compress.runtime.loader import load_layer
from compress.runtime.pass_memory import expanded_bytes
from compress.runtime.request import Request, SamplingParams
from compress.validate.roofline import work_of
from tests.support.tiny_source import MemorySource, tiny_shape, tiny_source

CPU = torch.device("cpu")
LATENT = Latent(q_rank=28, kv_rank=12, rope_dim=6, value_dim=10, interleaved=True)
ROPE = Rope(100.0, rotary_dim=6)
LENS = (5, 40, 1)
"""Rows of three sequences, each a whole one."""


def source_of(**changes: Any) -> MemorySource:
    shape = tiny_shape(num_kv_heads=4, num_heads=4, head_dim=16, latent=LATENT, rope=ROPE, **changes)
    return tiny_source(layers=(shape, shape))


class Pass:
    """The first layer of a model with three sequences in a cache."""

    def __init__(self, kv_format: str = "F32") -> None:
        source = source_of()
        deployment = Deployment(CPU, torch.float32, max_batch_size=8, max_step_tokens=64)
        self.layer = load_layer(source, 0, deployment)
        self.attention = LatentAttention(source.arch, deployment, kv_format, max_model_len=64)
        cache = KVCache(source.arch, num_blocks=13, block_size=16, kv_format=kv_format, device=CPU)
        self.pages = cache.layer(0)
        self.table_RB = torch.tensor([[3, 7, 1, 9], [2, 12, 4, 8], [6, 5, 10, 11]])
        width = LATENT.q_rank + LATENT.cached_width
        self.first_TF = torch.randn(sum(LENS), width, generator=torch.Generator().manual_seed(0))

    def projected(self, starts: tuple[int, ...], stops: tuple[int, ...]) -> Projected:
        """Return these positions of the sequences."""
        firsts = [sum(LENS[:idx]) for idx in range(3)]
        spans = list(zip(firsts, starts, stops, strict=True))
        rows = torch.cat([torch.arange(first + start, first + stop) for first, start, stop in spans])
        positions = [torch.arange(start, stop) for _, start, stop in spans]
        slots = [row[each // 16] * 16 + each % 16 for row, each in zip(self.table_RB, positions, strict=True)]
        return Projected(self.first_TF[rows], torch.cat(positions), torch.cat(slots), self.pages)

    def prefilled(self, starts: tuple[int, ...] = (0, 0, 0), **options: Any) -> Tensor:
        """Return attention of the positions from `starts` to the end of each sequence."""
        query_lens = tuple(stop - start for start, stop in zip(starts, LENS, strict=True))
        attend = self.attention.prefill(self.table_RB, query_lens, LENS, block_size=16, **options)
        return attend(self.layer, self.projected(starts, LENS))


@pytest.mark.parametrize("kv_format", ["F32", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD"])
def test_latents_and_the_heads_computed_from_them_are_attended_to_alike(kv_format: str) -> None:
    expanded, absorbed = (Pass(kv_format).prefilled(phase=phase) for phase in ("prefill", "decode"))
    assert expanded.shape == (sum(LENS), 4, LATENT.value_dim)
    torch.testing.assert_close(expanded, absorbed, rtol=2e-5, atol=2e-5)


def test_a_short_prompt_has_the_bits_of_decode() -> None:
    short = Pass()
    whole = short.prefilled(phase="decode")
    last = tuple(length - 1 for length in LENS)
    decode = short.attention.decode(short.table_RB, torch.tensor(LENS), q_len=1, block_size=16)
    decoded = decode(short.layer, short.projected(last, LENS))
    assert torch.equal(decoded, whole[torch.tensor([4, 44, 45])])


def test_rows_of_short_prompts_may_attend_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = Pass().prefilled(phase="decode")
    monkeypatch.setattr(latent_attention, "MOST_PARTIAL_BYTES", 1)
    assert torch.equal(Pass().prefilled(phase="decode"), at_once)


def test_a_cache_leaves_memory_for_the_heads_of_long_prompts() -> None:
    assert expanded_bytes(source_of().arch, torch.float16, 100) == 100 * 2 * 4 * 16 * 2
    assert expanded_bytes(tiny_source().arch, torch.float16, 100) == 0


def test_inputs_that_the_linear_rounds_are_rounded_once_for_both_ways() -> None:
    """Logits of prompts and of decode are those of the decoder with the linear's inputs rounded."""
    quantized = Pass()
    quant = ActivationQuant()
    assert quantized.layer.latent is not None
    rounded = replace(quantized.layer, latent=replace(quantized.layer.latent, kv_quant=quant))
    plain = quantized.prefilled(phase="prefill")
    quantized.layer = rounded
    expanded, absorbed = (quantized.prefilled(phase=phase) for phase in ("prefill", "decode"))
    torch.testing.assert_close(expanded, absorbed, rtol=2e-5, atol=2e-5)
    assert 1e-3 < (plain - expanded).norm() / plain.norm() < 0.1


def test_codes_whose_inputs_are_rounded_are_multiplied_exactly() -> None:
    """The dtype of their scales does not round weights once more."""
    source = source_of()
    deployment = Deployment(CPU, torch.float32, max_batch_size=8, max_step_tokens=64)
    weights = dict(source.layer(0))
    kv_up = dense(weights["attn.kv_up.weight"])
    coded = nearest_weight(kv_up, SCHEMES["FP8_DYNAMIC"], torch.bfloat16)
    weights["attn.kv_up.weight"] = coded

    def fused(name: str, of: Weights) -> FusedLinear:
        return fuse((name,), of, deployment)

    linears = LatentLinears.of(source.arch.layers[0], fused, weights, source.arch, deployment)
    x = torch.randn(9, LATENT.kv_rank, generator=torch.Generator().manual_seed(0))
    assert linears.kv_quant is not None
    rounded = quantize(x, linears.kv_quant).dequantize(torch.float32)
    expected = fuse(("attn.kv_up",), weights, deployment)(x, "prefill")
    torch.testing.assert_close(linears.kv_up(rounded, "prefill"), expected, rtol=1e-5, atol=1e-5)


def test_chunks_of_prompts_find_what_was_cached_before() -> None:
    whole = Pass().prefilled(phase="prefill")
    chunked = Pass()
    begin = chunked.attention.prefill(chunked.table_RB[:2], (3, 20), (3, 20), block_size=16, phase="prefill")
    begin(chunked.layer, chunked.projected((0, 0, 0), (3, 20, 0)))
    rest = chunked.prefilled((3, 20, 0), phase="prefill")
    own = torch.cat((torch.arange(3, 5), torch.arange(25, 45), torch.tensor([45])))
    torch.testing.assert_close(rest, whole[own], rtol=2e-5, atol=2e-5)


def test_few_positions_at_once_are_no_other_result(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    at_once = Pass().prefilled(phase="prefill")
    one_by_one = Pass()
    one_by_one.attention._expanded_positions = 16
    plain = LatentAttention._expanded

    def spy(self: LatentAttention, layer: Any, q_THC: Tensor, pages: Any, part: Any) -> Tensor:
        seen.append(sum(part.context_lens))
        return plain(self, layer, q_THC, pages, part)

    monkeypatch.setattr(latent_attention.LatentAttention, "_expanded", spy)
    torch.testing.assert_close(one_by_one.prefilled(phase="prefill"), at_once, rtol=2e-5, atol=2e-5)
    assert seen == list(LENS)


def test_a_position_costs_its_latents() -> None:
    arch = source_of().arch
    assert arch.cached_numbers == 2 * (12 + 6)
    assert kv_bytes_per_token(arch, "BF16") == 2 * 18 * 2
    assert kv_bytes_per_token(arch, "FP8_TOKEN_HEAD") == 2 * (18 + 4)
    cache = KVCache(arch, num_blocks=5, block_size=16, kv_format="INT8_TOKEN_HEAD", device=CPU)
    assert cache.block_bytes == 16 * kv_bytes_per_token(arch, "INT8_TOKEN_HEAD")
    pages = cache.layer(1)
    rows = torch.randn(16, 18)
    pages.write_(torch.arange(16, 32), rows)
    cache.copy_blocks([(1, 3)])
    latent, rotated = pages.gather(torch.tensor([3]), 12, torch.float32)
    torch.testing.assert_close(torch.cat((latent, rotated), dim=1), rows, rtol=0, atol=0.02)


def test_the_floor_of_decode_counts_products_with_latents() -> None:
    source = source_of()
    work = work_of(Engine(source, device=CPU))
    assert work.attention_flops_per_pair == 2 * 4 * 4 * 16
    assert work.decode_flops_per_pair == 2 * 2 * 4 * (12 + 6 + 12)
    (layer, _) = source.arch.layers
    still_dim = layer.head_dim - LATENT.rope_dim
    assert absorbed_params(source.arch) == 2 * 4 * (still_dim + LATENT.value_dim) * LATENT.kv_rank
    assert absorbed_params(tiny_source().arch) == 0


def test_formats_of_heads_are_refused() -> None:
    with pytest.raises(UsageError, match="holds latents"):
        Engine(source_of(), device=CPU, config=EngineConfig(kv_format="INT4_TOKEN_HEAD"))
    with pytest.raises(EnvironmentUnfit, match="without chunks of positions"):
        Engine(source_of(chunk=16), device=CPU)


def test_a_coded_cache_serves_nearly_the_same_tokens() -> None:
    source = source_of()
    requests = [Request("one", tuple(range(30)), SamplingParams(8, ignore_eos=True))]
    logits: dict[str, list[Tensor]] = {}
    for kv_format in ("F32", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD"):
        engine = Engine(source, device=CPU, config=EngineConfig(kv_format=kv_format))
        own = logits.setdefault(kv_format, [])
        engine.observer = lambda requests, positions, logits_RV, own=own: own.append(logits_RV.clone())
        engine.generate(requests)
    for kv_format, most in (("FP8_TOKEN_HEAD", 0.1), ("INT8_TOKEN_HEAD", 0.03)):
        error = (logits[kv_format][0] - logits["F32"][0]).norm() / logits["F32"][0].norm()
        assert 0 < error < most

"""The engine on a GPU: decode rows keep their bits in any company, and the result is the CPU's within rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.models.arch import Arch, LayerShape, Rope
from compress.models.decoder import Decoder
from compress.models.weights import MemorySource
from compress.runtime import engine as engine_module
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.sampler import gumbel, sample

pytestmark = pytest.mark.gpu


def make_source() -> MemorySource:
    layer = LayerShape(num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=1000, rope=Rope(10000.0))
    arch = Arch(
        family="llama",
        vocab_size=1013,
        hidden_size=384,
        max_position=512,
        layers=(layer, replace(layer, window=70), layer),
        norm_eps=1e-6,
        activation="silu",
        tied_head=True,
        qkv_bias=True,
        o_bias=False,
        ffn_bias=False,
        qk_norm=True,
        dtype="bfloat16",
        config={},
    )
    decoder = Decoder(arch).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    return MemorySource(decoder, dtype=torch.bfloat16)


def make_requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(1013, (length,), generator=generator).tolist()) for length in (40, 1, 300, 9, 127, 128, 63, 257)]
    return [
        Request(str(idx), prompt, SamplingParams(16, temperature=0.8 * (idx % 2), seed=idx, ignore_eos=True))
        for idx, prompt in enumerate(prompts)
    ]


def run(monkeypatch: pytest.MonkeyPatch, engine: Engine, requests: list[Request]) -> dict[tuple[int, int], Tensor]:
    """Logits by (request seed, position of the token they chose)."""
    rows: dict[tuple[int, int], Tensor] = {}

    def recording(logits_RV: Tensor, params: Any, positions: Any) -> Any:
        for row, each, position in zip(logits_RV, params, positions, strict=True):
            rows[each.seed, position] = row.clone()
        return sample(logits_RV, params, positions)

    monkeypatch.setattr(engine_module, "sample", recording)
    engine.generate(requests)
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_request_has_the_same_bits_alone_in_company_and_in_any_order(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    engine = Engine(make_source(), device=torch.device("cuda"), config=EngineConfig(dtype=dtype, kv_cache_bytes=1 << 28))
    requests = make_requests()
    together = run(monkeypatch, engine, requests)
    reversed_ = run(monkeypatch, engine, requests[::-1])
    alone = {key: row for request in requests for key, row in run(monkeypatch, engine, [request]).items()}
    assert len(together) == 8 * 16
    for key, row in together.items():
        assert torch.equal(row, reversed_[key]), key
        assert torch.equal(row, alone[key]), key


def test_scores_are_the_cpus_within_rounding() -> None:
    source = make_source()
    config = EngineConfig(dtype=torch.float32, kv_cache_bytes=1 << 28)
    tokens_BS = torch.randint(1013, (3, 200), generator=torch.Generator().manual_seed(2))
    on_cpu = Engine(source, device=torch.device("cpu"), config=config).runner.score(tokens_BS)
    on_gpu = Engine(source, device=torch.device("cuda"), config=config).runner.score(tokens_BS).cpu()
    depth = 3 * (2 * 384 + 512 + 1000)
    bound = 8 * torch.finfo(torch.float32).eps * depth**0.5 * float(on_cpu.abs().max())
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=bound)


def test_sampling_draws_the_same_tokens_as_on_the_cpu() -> None:
    seeds, positions = torch.arange(50) * 77_777, torch.arange(50)
    torch.testing.assert_close(gumbel(seeds.cuda(), positions.cuda(), 999).cpu(), gumbel(seeds, positions, 999), rtol=1e-12, atol=1e-12)
    logits = torch.randn(400, 999, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(1, temperature=0.9, top_k=row % 40, top_p=0.95, seed=row) for row in range(400)]
    assert torch.equal(sample(logits.cuda(), params, range(400)).tokens_R.cpu(), sample(logits, params, range(400)).tokens_R)


def test_the_default_dtype_is_the_checkpoints() -> None:
    assert Engine(make_source(), device=torch.device("cuda"), config=EngineConfig(kv_cache_bytes=1 << 26)).dtype == torch.bfloat16

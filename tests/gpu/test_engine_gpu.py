"""The engine on a GPU: decode rows keep their bits in any company; results are the CPU's within rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.layer_shape import LayerShape, Rope
from compress.models.random_source import INPUT_ABSMAX, RandomSource
from compress.models.weights import MemorySource
from compress.quant.scheme import SCHEMES, Scheme
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.sampler import gumbel, sample

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


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
    prompts = [
        tuple(torch.randint(1013, (length,), generator=generator).tolist())
        for length in (40, 1, 300, 9, 127, 128, 63, 257)
    ]
    return [
        Request(str(idx), prompt, SamplingParams(16, temperature=0.8 * (idx % 2), seed=idx, ignore_eos=True))
        for idx, prompt in enumerate(prompts)
    ]


KV_FORMATS = (
    None,
    "FP8_TOKEN_HEAD",
    "FP8_ATTENTION",
    "INT8_TOKEN_HEAD",
    "INT4_TOKEN_HEAD",
    "INT4_TOKEN_HEAD_HADAMARD",
)


def run(engine: Engine, requests: list[Request]) -> dict[tuple[int, int], Tensor]:
    """Logits by (request seed, position of the token they chose)."""
    rows: dict[tuple[int, int], Tensor] = {}

    def record(requests: Any, positions: Any, logits_RV: Tensor) -> None:
        for row, request, position in zip(logits_RV, requests, positions, strict=True):
            rows[request.params.seed, position] = row.clone()

    engine.observer = record
    engine.generate(requests)
    return rows


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_prompts_have_the_same_bits_launch_by_launch_captured_and_replayed(kv_format: str | None) -> None:
    config = EngineConfig(kv_cache_bytes=1 << 28, kv_format=kv_format, max_step_tokens=400)
    engine = Engine(make_source(), device=CUDA, config=config)
    generator = torch.Generator().manual_seed(2)
    lengths = (40, 300, 129, 399, 33, 290)
    prompts = [tuple(torch.randint(1013, (each,), generator=generator).tolist()) for each in lengths]
    requests = [
        Request(str(idx), prompt, SamplingParams(2, seed=idx, ignore_eos=True))
        for idx, prompt in enumerate(prompts)
    ]
    first = {key: row for request in requests for key, row in run(engine, [request]).items()}
    for order in (requests, requests[::-1], requests):  # other prompts of a size come in between
        again = {key: row for request in order for key, row in run(engine, [request]).items()}
        assert again.keys() == first.keys()
        assert all(torch.equal(row, first[key]) for key, row in again.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_request_has_the_same_bits_alone_in_company_and_in_any_order(dtype: torch.dtype) -> None:
    engine = Engine(
        make_source(), device=torch.device("cuda"), config=EngineConfig(dtype=dtype, kv_cache_bytes=1 << 28)
    )
    requests = make_requests()
    together = run(engine, requests)
    reversed_ = run(engine, requests[::-1])
    alone = {key: row for request in requests for key, row in run(engine, [request]).items()}
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


SERVED = {
    "BF16": None,
    **{name: SCHEMES[name] for name in ("W4A16_G128", "W4A16_G128_ASYM", "FP8_DYNAMIC", "FP8_STATIC")},
    **{name: SCHEMES[name] for name in ("INT8_STATIC_ASYM", "INT8_DYNAMIC_ASYM")},
}
SHAPE = LayerShape(num_heads=8, num_kv_heads=2, head_dim=128, intermediate_size=2048, rope=Rope(500000.0))


def random_engine(
    scheme: Scheme | None, *, kv_format: str | None = None, sync: bool = False, fp8_head: bool = True
) -> Engine:
    arch = make_source().arch.replace(
        vocab_size=4096,
        hidden_size=1024,
        max_position=4096,
        tied_head=False,
        qkv_bias=False,
        layers=(SHAPE, replace(SHAPE, window=200)) * 2,
    )
    head_scheme = SCHEMES["FP8_DYNAMIC"] if scheme is not None and fp8_head else None
    source = RandomSource(arch, device=CUDA, dtype=torch.bfloat16, scheme=scheme, head_scheme=head_scheme)
    config = EngineConfig(
        max_batch_size=65, max_model_len=1024, kv_cache_bytes=1 << 29, kv_format=kv_format, sync=sync
    )
    return Engine(source, device=CUDA, config=config)


def strangers(count: int, *, first_seed: int) -> list[Request]:
    """Prompts of 1 to 400 tokens; every other request is drawn, some with filters."""
    generator = torch.Generator().manual_seed(first_seed)
    requests = []
    for idx in range(first_seed, first_seed + count):
        length = int(torch.randint(1, 400, (1,), generator=generator))
        params = SamplingParams(
            24,
            temperature=0.7 * (idx % 2),
            top_k=20 * (idx % 4 == 1),
            seed=idx,
            ignore_eos=True,
            logprobs=True,
        )
        requests.append(
            Request(str(idx), tuple(torch.randint(4096, (length,), generator=generator).tolist()), params)
        )
    return requests


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("scheme", SERVED)
def test_a_request_has_the_same_tokens_alone_and_among_64_strangers(
    scheme: str, kv_format: str | None
) -> None:
    engine = random_engine(SERVED[scheme], kv_format=kv_format)
    decode = [row for row in engine.kernel_report() if row["phase"] == "decode" and row["op"] == "linear"]
    assert not any("reference" in row["kernel"] for row in decode)
    watched = strangers(3, first_seed=0)
    alone = [engine.generate([request])[0] for request in watched]
    for companions in (strangers(64, first_seed=100), strangers(7, first_seed=300)):
        for request, expected in zip(watched, alone, strict=True):
            done = engine.generate([*companions[:20], request, *companions[20:]])[min(20, len(companions))]
            assert (done.tokens, done.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("scheme", SERVED)
def test_graphs_and_overlap_change_no_token(scheme: str) -> None:
    requests = strangers(12, first_seed=7)
    ahead, in_step = (random_engine(SERVED[scheme], sync=sync).generate(requests) for sync in (False, True))
    assert [(each.tokens, each.logprobs) for each in ahead] == [
        (each.tokens, each.logprobs) for each in in_step
    ]


@pytest.mark.parametrize("scheme", SERVED)
def test_decoded_logits_are_the_scored_ones_within_rounding(scheme: str) -> None:
    engine = random_engine(SERVED[scheme], fp8_head="FP8" in scheme)
    rows = {}
    requests = [
        Request(each.id, each.prompt, replace(each.params, temperature=0.0))
        for each in strangers(5, first_seed=20)
    ]

    def record(requests: Any, positions: Any, logits_RV: Tensor) -> None:
        rows.update(
            {
                (each.id, position): row.clone()
                for row, each, position in zip(logits_RV, requests, positions, strict=True)
            }
        )

    engine.observer = record
    for done in engine.generate(requests):
        scored = engine.runner.score(torch.tensor([done.prompt + done.tokens]))[0]
        for position in range(len(done.prompt), len(done.prompt) + len(done.tokens)):
            expected = scored[position - 1]
            logits = rows[done.id, position]
            # Two roundings a layer and branch, on the way of sqrt(layers), and the least difference between
            # two inputs may take one to the next code: e4m3 has 3 bits of mantissa, int8 equal steps.
            step = INPUT_ABSMAX / 127 if "INT8" in scheme else 2.0 ** -(3 if "FP8" in scheme else 8)
            assert float((logits - expected).norm() / expected.norm()) < 4 * step / 2 * 8**0.5


def test_sampling_draws_the_same_tokens_as_on_the_cpu() -> None:
    seeds = torch.arange(50) * 77_777
    positions = torch.arange(50)
    torch.testing.assert_close(
        gumbel(seeds.cuda(), positions.cuda(), 999).cpu(),
        gumbel(seeds, positions, 999),
        rtol=1e-12,
        atol=1e-12,
    )
    logits = torch.randn(400, 999, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(1, temperature=0.9, top_k=row % 40, top_p=0.95, seed=row) for row in range(400)]
    assert torch.equal(
        sample(logits.cuda(), params, range(400)).tokens_R.cpu(), sample(logits, params, range(400)).tokens_R
    )


def test_the_default_dtype_is_the_checkpoints() -> None:
    assert (
        Engine(make_source(), device=torch.device("cuda"), config=EngineConfig(kv_cache_bytes=1 << 26)).dtype
        == torch.bfloat16
    )

"""Many requests on a GPU: up to 512 rows of a step keep their bits in any company, and neither the prefix
cache nor blocks that wait on the host change a token."""

from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Finished, Request, SamplingParams
from tests.gpu.test_speculative_gpu import CUDA, TARGETS, VOCAB, make_requests, make_source

pytestmark = pytest.mark.gpu
CONFIG = EngineConfig(max_batch_size=512, max_model_len=512, kv_cache_bytes=1 << 29)


def results(finished: list[Finished]) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
    return [(each.tokens, each.logprobs) for each in finished]


@pytest.mark.parametrize("target", TARGETS)
def test_a_request_has_its_bits_alone_and_among_hundreds(target: str) -> None:
    requests = make_requests(520)
    engine = Engine(make_source(target), device=CUDA, config=CONFIG)
    together = results(engine.generate(requests))
    for count in (1, 100, 300):
        assert results(engine.generate(requests[:count])) == together[:count]
    assert results(engine.generate(requests[400:401])) == together[400:401]


def prompts_alike() -> list[Request]:
    generator = torch.Generator().manual_seed(8)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (count,), generator=generator).tolist())

    shared = ids(300)
    prompts = [shared + ids(20), shared + ids(70), shared[:130] + ids(9), shared, ids(40), shared + ids(1)]
    params = SamplingParams(12, ignore_eos=True, logprobs=True)
    return [Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kv_format", [None, "FP8_TOKEN_HEAD"])
@pytest.mark.parametrize("at_once", [True, False])
def test_shared_blocks_give_the_tokens_of_blocks_of_ones_own(kv_format: str | None, at_once: bool) -> None:
    source = make_source("BF16")
    requests = prompts_alike()
    found = []
    for prefix_cache in (False, True):
        config = EngineConfig(kv_cache_bytes=1 << 27, kv_format=kv_format, prefix_cache=prefix_cache)
        engine = Engine(source, device=CUDA, config=config)
        groups = [requests] if at_once else [[each] for each in requests]
        found.append([each for group in groups for each in engine.generate(group)])
    cold, warm = found
    assert sum(each.cached_tokens for each in warm) >= 3 * 256 + 128
    assert not any(each.cached_tokens for each in cold)
    for plain, shared in zip(cold, warm, strict=True):
        assert plain.logprobs is not None
        assert shared.logprobs is not None
        assert plain.logprobs[0] == pytest.approx(shared.logprobs[0], abs=0.05)
        alike = list(
            takewhile(lambda pair: pair[0] == pair[1], zip(plain.tokens, shared.tokens, strict=True))
        )
        if (first := len(alike)) < len(plain.tokens):  # a tie, which the rounding of a chunk decided
            assert plain.logprobs[first] == pytest.approx(shared.logprobs[first], abs=0.05)


def test_requests_that_wait_on_the_host_go_on_with_the_same_bits() -> None:
    source = make_source("BF16")
    requests = [replace(each, params=replace(each.params, max_tokens=200)) for each in make_requests(24)]
    plain = results(Engine(source, device=CUDA, config=replace(CONFIG, max_batch_size=24)).generate(requests))
    size = 64 * kv_bytes_per_token(source.arch, "BF16")
    config = EngineConfig(
        max_batch_size=24, max_model_len=512, kv_cache_bytes=60 * size, swap_bytes=200 * size
    )
    engine = Engine(source, device=CUDA, config=config)
    assert results(engine.generate(requests)) == plain
    assert engine.counts.swapped_out == engine.counts.swapped_in > 0

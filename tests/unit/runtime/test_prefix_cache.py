"""Prompts that begin alike share blocks: fewer tokens are computed, and results are those without sharing."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from compress.runtime.block_pool import BlockPool
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.generation import Generation
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.prefix_cache import PrefixCache
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from tests.unit.runtime.test_engine import CPU, Recorder, make_source, tokens

SIZE = 16


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(61, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 6) -> Request:
    params = SamplingParams(max_tokens, ignore_eos=True, logprobs=True, seed=int(name))
    return Request(name, prompt, params)


def engine_of(*, prefix_cache: bool = True, **changes: object) -> Engine:
    return Engine(make_source(), device=CPU, config=EngineConfig(prefix_cache=prefix_cache, **changes))  # type: ignore[arg-type]


SHARED = ids(5 * SIZE, 0)
REQUESTS = [
    request("0", SHARED + ids(3, 1)),
    request("1", SHARED + ids(40, 2)),
    request("2", SHARED[: 3 * SIZE] + ids(20, 3)),
    request("3", SHARED),
    request("4", ids(50, 4)),
    request("5", SHARED + ids(3, 1)),
]


@pytest.mark.parametrize("kv_format", ["F32", "FP8_TOKEN_HEAD", "INT4_TOKEN_HEAD"])
@pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])
def test_sharing_changes_no_token_and_no_logit_beyond_the_tolerance_of_chunks(
    kv_format: str, together: bool
) -> None:
    found = []
    for prefix_cache in (False, True):
        recorder = Recorder()
        engine = recorder.watch(engine_of(prefix_cache=prefix_cache, kv_format=kv_format))
        groups = [REQUESTS] if together else [[each] for each in REQUESTS]
        finished = [each for group in groups for each in engine.generate(group)]
        found.append((tokens(finished), recorder.take(), finished, engine.counts))
    (plain, plain_rows, cold, _), (shared, shared_rows, warm, counts) = found
    assert shared == plain
    assert plain_rows.keys() == shared_rows.keys()
    for key, row in plain_rows.items():
        assert torch.allclose(shared_rows[key], row, rtol=1e-4, atol=1e-4)
    assert not any(each.cached_tokens for each in cold)
    # The last token of a prompt is always computed: 80 tokens leave four blocks of sixteen to share.
    assert [each.cached_tokens for each in warm] == [0, 80, 48, 64, 0, 80]
    assert counts.prefix_hits == 80 + 48 + 64 + 80
    assert counts.prefix_queried == sum(len(each.prompt) for each in REQUESTS)
    assert counts.reserved_positions == counts.live_tokens == counts.num_running == 0


def test_an_answer_is_found_by_the_next_turn_of_its_conversation() -> None:
    engine = engine_of()
    (first,) = engine.generate([request("0", SHARED, max_tokens=20)])
    (second,) = engine.generate([request("1", SHARED + first.tokens + ids(9, 5))])
    assert second.cached_tokens == 96  # of 99 whose keys and values were computed
    plain = engine_of(prefix_cache=False)
    (expected,) = plain.generate([request("1", SHARED + first.tokens + ids(9, 5))])
    assert second.tokens == expected.tokens


def test_a_burst_computes_its_common_beginning_once_within_the_budget() -> None:
    engine = engine_of(max_step_tokens=120, max_batch_size=6)
    burst = [request(str(idx), SHARED + ids(6, 10 + idx), max_tokens=1) for idx in range(6)]
    for each in burst:
        engine.add(each)
    done = engine.step()
    assert len(done) == 6  # 86 tokens of the first, 6 of each of the others
    assert sum(each.cached_tokens for each in done) == 5 * 80


def test_the_oldest_is_evicted_and_computed_again() -> None:
    source = make_source()
    size = SIZE * kv_bytes_per_token(source.arch, "F32")
    engine = engine_of(max_model_len=96, max_batch_size=1, kv_cache_bytes=(1 + 6) * size)
    prompts = [ids(70, seed) for seed in (20, 21, 20)]
    finished = [engine.generate([request(str(idx), prompt)])[0] for idx, prompt in enumerate(prompts)]
    assert engine.counts.evictions > 0
    assert finished[2].cached_tokens < 64
    assert finished[2].tokens == finished[0].tokens


def test_a_preempted_request_finds_what_it_had() -> None:
    source = make_source()
    size = SIZE * kv_bytes_per_token(source.arch, "F32")
    changes = {"max_model_len": 128, "max_batch_size": 4, "kv_cache_bytes": (1 + 14) * size}
    requests = [request(str(idx), ids(40 + idx, 30 + idx), max_tokens=40) for idx in range(4)]
    engines = [engine_of(prefix_cache=on, **changes) for on in (False, True)]
    plain, shared = (tokens(each.generate(requests)) for each in engines)
    assert engines[1].counts.preemptions > 0
    assert shared == plain
    assert engines[1].counts.reserved_positions == 0


def test_with_lookup_speculation_tokens_stay_the_same() -> None:
    speculative = Speculative(NGram(), k=3)
    for prompts in pairwise([SHARED * 2, SHARED * 2 + ids(5, 6), SHARED * 2]):
        requests = [request(str(idx), prompt, max_tokens=30) for idx, prompt in enumerate(prompts)]
        plain = engine_of(prefix_cache=False).generate(requests)
        both = engine_of(speculative=speculative)
        assert [tokens(both.generate(requests)) for _ in range(2)] == [tokens(plain)] * 2


def test_a_collision_of_keys_gives_no_request_the_blocks_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(9)
    cache = PrefixCache(pool, block_size=4, salt="")
    monkeypatch.setattr(PrefixCache, "key", lambda self, generation, idx: bytes([idx]))
    first, second = (
        Generation(replace(request("0", prompt), id=name), 0.0, list(prompt))
        for name, prompt in (("a", (1, 2, 3, 4, 5)), ("b", (1, 2, 3, 9, 5)))
    )
    first.blocks = pool.allocate(2)
    cache.insert(first, 5)
    assert cache.find(first, long=True) == first.blocks[:1]
    assert cache.find(second, long=True) == []


def test_caches_of_other_salts_find_nothing() -> None:
    pool = BlockPool(9)
    prompt = (1, 2, 3, 4, 5)
    caches = [PrefixCache(pool, block_size=4, salt=salt) for salt in ("one model", "another")]
    keys = []
    for cache in caches:
        generation = Generation(request("0", prompt), 0.0, list(prompt))
        generation.blocks = pool.allocate(2)
        cache.insert(generation, 4)
        keys.append(generation.block_keys)
    assert keys[0] != keys[1]


def test_a_short_prompt_does_not_share_with_a_long_one_of_the_same_step() -> None:
    pool = BlockPool(9)
    cache = PrefixCache(pool, block_size=4, salt="")
    generation = Generation(request("0", tuple(range(12))), 0.0, list(range(12)))
    generation.blocks = pool.allocate(3)
    cache.insert(generation, 12, long=True)
    assert cache.find(generation, long=True) == generation.blocks[:2]
    assert cache.find(generation, long=False) == []
    cache.begin_step()
    assert cache.find(generation, long=False) == generation.blocks[:2]


def test_blocks_that_nobody_holds_are_not_shared() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.share(blocks)

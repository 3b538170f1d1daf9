"""Many requests on a GPU: up to 512 rows of a step keep their bits in any company, and neither steps that are
launched before the last one is read, nor the prefix cache, shared prompts or blocks that wait on the host
change a token."""

from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.scheduled import Batch
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from compress.runtime.step_queue import StepQueue
from tests.gpu.test_rare_facts_gpu import FACTS
from tests.gpu.test_rare_facts_gpu import make_source as make_rare
from tests.gpu.test_speculative_gpu import (
    CUDA,
    TARGETS,
    VOCAB,
    make_requests,
    make_source,
    served_as_they_come,
    stopping,
)

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


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def prompts_alike() -> list[Request]:
    shared = random_ids(300, 8)
    own = [random_ids(count, count) for count in (20, 70, 9, 40, 1)]
    prompts = [shared + own[0], shared + own[1], shared[:130] + own[2], shared, own[3], shared + own[4]]
    params = SamplingParams(12, ignore_eos=True, logprobs=True)
    return [Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "kv_format", [None, "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD", "INT4_TOKEN_HEAD_HADAMARD"]
)
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
    assert_alike(cold, warm)


@pytest.mark.parametrize("speculative", [None, Speculative(NGram(), k=3)], ids=["plain", "speculative"])
@pytest.mark.parametrize("sync", [True, False])
def test_saved_states_give_the_tokens_of_states_of_ones_own(
    speculative: Speculative | None, sync: bool
) -> None:
    facts = FACTS["qwen 3.5"]
    layers = tuple(replace(each, experts=None) for each in facts["layers"])  # rounding may change a route
    source = make_rare({**facts, "layers": layers, "max_position": 2048, "vocab_size": VOCAB})
    requests = prompts_with_states()
    found = []
    for prefix_cache in (False, True):
        config = EngineConfig(
            kv_cache_bytes=1 << 27,
            prefix_cache=prefix_cache,
            speculative=speculative,
            sync=sync,
            max_step_tokens=1024,
        )
        engine = Engine(source, device=CUDA, config=config)
        together = requests[4:]
        found.append([engine.generate([each])[0] for each in requests[:4]] + engine.generate(together))
    cold, warm = found
    assert [each.cached_tokens for each in warm] == [0, 0, 640, 960, 640, 640, 0]
    assert_alike(cold, warm)


def prompts_with_states() -> list[Request]:
    """The second departs from the first after 640 tokens, the fourth goes on from the first."""
    shared, first, *rest = (random_ids(count, count) for count in (650, 330, 300, 40, 21, 9, 8, 1500))
    prompts = [shared + first, *(shared + each for each in rest[:2]), shared + first + rest[2]]
    prompts += [*(shared + each for each in rest[3:5]), rest[5]]
    params = SamplingParams(12, ignore_eos=True, logprobs=True)
    return [Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)]


def assert_alike(cold: list[Finished], warm: list[Finished]) -> None:
    """First log probabilities agree, and so do tokens up to one that rounding may decide."""
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


def coming_and_going(count: int) -> list[Request]:
    """Requests that end by length and by a token, some after a single token, some drawn."""
    return [
        replace(
            each,
            params=replace(
                each.params, ignore_eos=idx % 3 == 0, max_tokens=(1, 2, 9, 40)[idx % 4], logprobs=idx % 5 > 0
            ),
        )
        for idx, each in enumerate(make_requests(count))
    ]


class Launches:
    """Counts steps that admit, chunk or follow an end, and those of them that were launched ahead. With
    `strict`, an operation of torch that waits for the device is an error while one is launched.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = self.num_ahead = 0
        self.strict = False
        launch = StepQueue.launch

        def noted(queue: StepQueue, batch: Batch, *, defers: bool = False) -> None:
            self.num += 1
            self.num_ahead += len(queue) > 0
            torch.cuda.set_sync_debug_mode("error" if self.strict else "default")
            try:
                launch(queue, batch, defers=defers)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(StepQueue, "launch", noted)


@pytest.mark.parametrize("step_tokens", [2048, 40], ids=["whole", "chunks"])
def test_steps_that_begin_before_the_last_is_read_change_no_token(
    step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stopping(make_source("W4A16_G128"))
    requests = coming_and_going(40)
    config = EngineConfig(
        max_batch_size=6, max_model_len=512, kv_cache_bytes=1 << 28, max_step_tokens=step_tokens
    )
    in_step = Engine(source, device=CUDA, config=replace(config, sync=True))
    expected = served_as_they_come(in_step, requests)
    assert {reason for _, reason, _ in expected.values()} == {"stop", "length"}
    launches = Launches(monkeypatch)
    ahead = Engine(source, device=CUDA, config=config)
    for repeat in range(3):
        launches.num = launches.num_ahead = 0
        launches.strict = repeat == 2  # every graph is captured by then
        found = served_as_they_come(ahead, requests)
        assert found.keys() == expected.keys()
        for name, (tokens, reason, logprobs) in found.items():
            assert (tokens, reason) == expected[name][:2], name
            assert logprobs == (None if logprobs is None else pytest.approx(expected[name][2], abs=0.05))
    assert launches.num > 40
    assert launches.num_ahead > 0.8 * launches.num
    assert ahead.counts.reserved_positions == 0


def test_hundreds_that_come_and_go_ahead_have_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = coming_and_going(300)
    config = replace(CONFIG, max_batch_size=64)
    expected, found = (
        results(Engine(make_source("BF16"), device=CUDA, config=each).generate(requests))
        for each in (replace(config, sync=True), config)
    )
    assert found == expected


@pytest.mark.parametrize("length", [37, 64, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_completions_of_a_prompt_have_the_bits_of_separate_requests(target: str, length: int) -> None:
    (first, *_) = make_requests(1)
    prompt = tuple(range(5, 5 + length))
    requests = [
        replace(
            first,
            id=str(idx),
            prompt=prompt,
            params=replace(first.params, max_tokens=70, temperature=0.8 * (idx > 0), seed=idx),
        )
        for idx in range(6)
    ]
    engine = Engine(make_source(target), device=CUDA, config=replace(CONFIG, max_batch_size=8))
    separate = [results(engine.generate([each]))[0] for each in requests]
    assert engine.counts.shared_prompts == 0
    together = results(engine.generate([replace(each, group="one") for each in requests]))
    assert together == separate
    assert engine.counts.shared_prompts == 5
    assert engine.counts.copied_blocks == (5 if length % 64 else 0)

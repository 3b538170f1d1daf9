"""What a server asks of the engine: deadlines, priorities, likeliest tokens, counts, swap."""

import time
from dataclasses import replace

import pytest
import torch

from compress.errors import QueueFull, UsageError
from compress.quant.kv import transforms_heads
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KV_FORMATS, KVCache, kv_bytes_per_token
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_decoder import tiny_arch
from tests.unit.runtime.test_engine import CPU, Recorder, assert_same_bits, make_requests, make_source, tokens


def run(engine: Engine) -> list[Finished]:
    finished = []
    while engine.has_work:
        finished += engine.step()
    return finished


def test_a_request_ends_at_its_deadline_with_what_it_has_and_leaves_the_others_alone() -> None:
    engine = Engine(make_source(), device=CPU)
    first, second, third = make_requests(3, max_tokens=40)
    expected = tokens(engine.generate([first, third]))
    now_s = time.perf_counter()
    engine.add(first)
    engine.add(replace(second, deadline_s=now_s + 1e6))
    engine.add(replace(third, id="late", deadline_s=now_s))
    ended = engine.step()
    assert [(each.id, each.reason, each.tokens) for each in ended] == [("late", "deadline", ())]
    assert ended[0].admitted_s is None
    for _ in range(5):
        engine.step()
    finished = {each.id: each for each in run(engine)}
    assert finished["1"].reason == "length"
    assert finished["0"].tokens == expected["0"]


def test_a_running_request_is_ended_too() -> None:
    engine = Engine(make_source(), device=CPU)
    (request,) = make_requests(1, max_tokens=300)
    engine.add(replace(request, deadline_s=time.perf_counter() + 0.05))
    (finished,) = run(engine)
    assert finished.reason == "deadline"
    assert 0 < len(finished.tokens) < 300
    assert engine.counts.reserved_positions == 0


def test_the_urgent_are_admitted_first_and_lose_their_blocks_last() -> None:
    source = make_source()
    size = 16 * kv_bytes_per_token(source.arch, "F32")
    config = EngineConfig(max_model_len=160, max_batch_size=2, kv_cache_bytes=(1 + 12) * size)
    engine = Engine(source, device=CPU, config=config)
    requests = [
        Request(name, (idx + 1,) * 70, SamplingParams(60, ignore_eos=True), priority=priority)
        for idx, (name, priority) in enumerate((("patient", 3), ("urgent", -1), ("usual", 0)))
    ]
    finished = engine.generate(requests)
    admitted = {each.id: each.admitted_s or 0.0 for each in finished}
    assert admitted["urgent"] <= admitted["usual"] < admitted["patient"]
    assert engine.counts.preemptions > 0
    ended = {each.id: each.token_times_s[-1] for each in finished}
    assert ended["urgent"] < ended["usual"]


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    engine = Engine(make_source(), device=CPU, config=EngineConfig(max_waiting=2, max_batch_size=1))
    requests = make_requests(4, max_tokens=3)
    engine.add(requests[0])
    engine.add(requests[1])
    with pytest.raises(QueueFull):
        engine.add(requests[2])
    engine.step()
    engine.add(requests[2])  # one runs, two wait
    assert (engine.counts.num_running, engine.counts.num_waiting) == (1, 2)
    assert sorted(each.id for each in run(engine)) == ["0", "1", "2"]


@pytest.mark.parametrize("speculative", [None, Speculative(NGram(), k=3)], ids=["plain", "speculative"])
def test_likeliest_tokens_are_those_of_the_logits(speculative: Speculative | None) -> None:
    recorder = Recorder()
    engine = recorder.watch(Engine(make_source(), device=CPU, config=EngineConfig(speculative=speculative)))
    requests = [
        replace(each, params=replace(each.params, top_logprobs=idx))
        for idx, each in enumerate(make_requests(4))
    ]
    finished = engine.generate(requests)
    rows = recorder.take()
    assert finished[0].top_logprobs is None
    for request, each in list(zip(requests, finished, strict=True))[1:]:
        assert each.top_logprobs is not None
        assert each.logprobs is not None
        assert len(each.top_logprobs) == len(each.tokens) == len(each.logprobs)
        for place, likely in enumerate(each.top_logprobs):
            row_V = rows[request.params.seed, len(request.prompt) + place].double().log_softmax(-1)
            values, ids = row_V.sort(descending=True, stable=True)
            assert [token for token, _ in likely] == ids[: len(likely)].tolist()
            assert [logprob for _, logprob in likely] == pytest.approx(
                values[: len(likely)].tolist(), abs=1e-5
            )
            assert len(likely) == request.params.top_logprobs
            assert each.logprobs[place] == pytest.approx(float(row_V[each.tokens[place]]), abs=1e-5)


def test_likeliest_tokens_need_log_probabilities() -> None:
    with pytest.raises(UsageError, match="top_logprobs is 3; it must be at most 20, and 0 without logprobs"):
        SamplingParams(4, top_logprobs=3)
    with pytest.raises(UsageError, match="top_logprobs is 21"):
        SamplingParams(4, logprobs=True, top_logprobs=21)


def test_tokens_and_their_log_probabilities_can_be_read_as_they_come() -> None:
    engine = Engine(make_source(), device=CPU)
    (request,) = make_requests(1)
    engine.add(replace(request, params=replace(request.params, top_logprobs=2)))
    seen: list[int] = []
    logprobs: list[float] = []
    likely = []
    finished: list[Finished] = []
    while not finished:
        finished = engine.step()
        if not finished:
            likely += engine.top_logprobs_of(request.id, start=len(seen))
            logprobs += engine.logprobs_of(request.id, start=len(seen))
            seen += engine.tokens_of(request.id, start=len(seen))
            assert len(seen) == len(logprobs) == len(likely)
    assert finished[0].logprobs is not None
    assert finished[0].top_logprobs is not None
    assert (tuple(logprobs), tuple(likely)) == (finished[0].logprobs[:-1], finished[0].top_logprobs[:-1])


def test_counts_follow_requests_and_positions() -> None:
    engine = Engine(make_source(), device=CPU, config=EngineConfig(max_batch_size=2, kv_cache_bytes=1 << 20))
    for request in make_requests(3):
        engine.add(request)
    engine.step()
    counts = engine.counts
    assert (counts.num_running, counts.num_waiting) == (2, 1)
    assert counts.live_tokens == 40 + 1
    assert counts.reserved_positions == 48 + 16
    assert counts.cache_positions % 16 == 0
    run(engine)
    assert (engine.counts.live_tokens, engine.counts.reserved_positions) == (0, 0)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_blocks_come_back_bit_for_bit(kv_format: str) -> None:
    arch = tiny_arch(head_dim=64 if transforms_heads(kv_format) else 24)
    scales = [(0.5, 0.25)] * arch.num_layers
    cache = KVCache(arch, num_blocks=9, block_size=16, kv_format=kv_format, device=CPU, static_scales=scales)
    generator = torch.Generator().manual_seed(0)
    everything = list(cache._bytes_of_blocks())
    for each in everything:
        each.random_(generator=generator)
    before = [each.clone() for each in everything]
    held = cache.read_blocks(torch.tensor([3, 7, 1]))
    assert held.shape == (3, cache.block_bytes)
    cache.write_blocks(torch.tensor([2, 3, 8]), held)
    for each, old in zip(everything, before, strict=True):
        for source, target in ((3, 2), (7, 3), (1, 8)):
            assert torch.equal(each[:, target], old[:, source])
        for untouched in (0, 1, 4, 5, 6, 7):
            assert torch.equal(each[:, untouched], old[:, untouched])


@pytest.mark.parametrize("swap_blocks", [100, 5, 0], ids=["all", "some", "none"])
def test_swapped_requests_go_on_with_the_same_bits(swap_blocks: int) -> None:
    source = make_source()
    size = 16 * kv_bytes_per_token(source.arch, "F32")
    requests = [
        Request(str(idx), (idx + 1,) * (40 + idx), SamplingParams(40, seed=idx, ignore_eos=True))
        for idx in range(4)
    ]
    recorder = Recorder()
    expected = tokens(recorder.watch(Engine(source, device=CPU)).generate(requests))
    rows = recorder.take()
    config = EngineConfig(max_model_len=128, max_batch_size=4, kv_cache_bytes=15 * size)
    engine = recorder.watch(Engine(source, device=CPU, config=replace(config, swap_bytes=swap_blocks * size)))
    assert tokens(engine.generate(requests)) == expected
    if swap_blocks == 100:  # what is recomputed is summed in another order
        assert_same_bits(recorder.take(), rows)
    counts = engine.counts
    assert counts.preemptions > 0
    assert counts.swapped_out == counts.swapped_in
    assert (counts.swapped_out > 0) == (swap_blocks > 0)
    if swap_blocks == 100:
        assert counts.swapped_out == counts.preemptions


def test_who_is_cancelled_while_swapped_out_leaves_its_place() -> None:
    source = make_source()
    size = 16 * kv_bytes_per_token(source.arch, "F32")
    config = EngineConfig(
        max_model_len=128, max_batch_size=4, kv_cache_bytes=15 * size, swap_bytes=100 * size
    )
    engine = Engine(source, device=CPU, config=config)
    for idx in range(4):
        engine.add(Request(str(idx), (idx + 1,) * 40, SamplingParams(40, ignore_eos=True)))
    while not engine.counts.swapped_out:
        engine.step()
    engine.cancel("3")
    assert engine._swap is not None
    free = len(engine._swap._free)
    run(engine)
    assert len(engine._swap._free) == 100 >= free
    assert engine.counts.reserved_positions == 0


def test_a_target_for_the_time_between_tokens_changes_no_token() -> None:
    requests = make_requests(8)
    expected = tokens(Engine(make_source(), device=CPU).generate(requests))
    engine = Engine(make_source(), device=CPU, config=EngineConfig(itl_target_ms=0.01))
    finished: list[Finished] = []
    for request in requests:
        engine.add(request)
        finished += engine.step()
    assert tokens(finished + run(engine)) == expected

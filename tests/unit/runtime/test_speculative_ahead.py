"""Speculative steps that are launched before the last one is read give what steps give that wait for it.

On the CPU a launched step is done at once; `Late` is a device that is as late as it may be: a step runs when
the host waits for it, on what the memory that both reach holds then.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from compress.models.random_source import RandomSource
from compress.runtime import graphs
from compress.runtime.decode_run import DecodeRun, PendingTokens
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative import decoding, draft_model, head_proposer
from compress.runtime.speculative.decoding import SpeculativeDecoding
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.runtime.speculative.state import SpeculativeState
from tests.support.rehearsed_graphs import RehearsedGraphs
from tests.support.scripted_proposer import acceptance_of
from tests.support.slow import slow
from tests.unit.runtime.test_speculative_eagle3 import make_head
from tests.unit.runtime.test_speculative_engine import VOCAB, Noisy, make_source

CPU = torch.device("cpu")


class Ahead(Engine):
    """Runs ahead on the CPU."""

    num_ahead = 0

    @property
    def _overlaps(self) -> bool:
        return self._decoding.runs_ahead and self.observer is None


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a step that was launched ahead."""
    found = list[int]()
    launch_next = DecodeRun.launch_next

    def counted(run: DecodeRun) -> PendingTokens | None:
        step = launch_next(run)
        found.extend([1] * (step is not None))
        return step

    monkeypatch.setattr(DecodeRun, "launch_next", counted)
    return found


@dataclass
class _LateStep:
    """A step that runs when it is waited for."""

    queue: deque[Callable[[], None]]
    result: list[Any]

    def wait(self) -> None:
        while not self.result:
            self.queue.popleft()()
        self.result[0].wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result[0], name)


def make_late(engine: Engine) -> Engine:
    """Steps and transfers of its speculation run when a step is waited for, in their order."""
    queue = deque[Callable[[], None]]()
    steps = engine._speculation
    assert steps is not None
    launch = SpeculativeDecoding.launch
    state = steps._state
    load = steps._state.load
    send = state._send

    def late_launch() -> Any:
        steps._num_launched += 1
        known = dict(vars(steps))
        step = _LateStep(queue, [])

        def run() -> None:
            now = dict(vars(steps))
            vars(steps).update(
                known
                | {"_num_launched": known["_num_launched"] - 1, "last": now["last"], "total": now["total"]}
            )
            step.result.append(launch(steps))
            vars(steps).update(now)

        queue.append(run)
        return step

    def at_once(rows: Any) -> None:
        assert not queue  # every earlier step has been waited for
        load(rows)
        while queue:
            queue.popleft()()

    steps.launch = late_launch  # type: ignore[method-assign]
    state._send = lambda held: queue.append(lambda: send(held))  # type: ignore[method-assign]
    state.load = at_once  # type: ignore[method-assign]
    return engine


def stopping() -> RandomSource:
    source = make_source()
    arch = source.arch.replace(config={**source.arch.config, "eos_token_id": [7, 19, 30, 44]})
    return RandomSource(arch, device=CPU, dtype=torch.float32)


def proposers(source: RandomSource) -> dict[str, ProposerOptions]:
    return {"draft_model": DraftModel(Noisy(source, 0.05)), "eagle3": Eagle3(make_head(source.arch))}


def make_requests(seed: int, num_requests: int = 12) -> list[Request]:
    rng = random.Random(seed)
    requests = list[Request]()
    for idx in range(num_requests):
        prompt = tuple(
            rng.randrange(VOCAB if idx % 3 else 4) for _ in range(rng.choice([1, 2, 9, 15, 16, 17, 33, 60]))
        )
        params = SamplingParams(
            rng.choice([1, 2, 3, 5, 8, 18, 26]), temperature=rng.choice([0.0, 0.8]), seed=idx,
            top_k=rng.choice([0, 7]), ignore_eos=rng.random() < 0.3, logprobs=rng.random() < 0.3,
        )  # fmt: skip
        requests.append(Request(str(idx), prompt, params))
    return requests


def served(engine: Engine, requests: list[Request], seed: int) -> dict[str, tuple[Any, ...]]:
    """What came of requests that arrive between steps."""
    rng = random.Random(seed)
    waiting = deque(requests)
    finished = list[Finished]()
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.2):
            engine.add(waiting.popleft())
        finished += engine.step()
    assert all(len(each.token_times_s) == len(each.tokens) for each in finished)
    return {each.id: (each.tokens, each.reason, each.logprobs) for each in finished}


@pytest.mark.parametrize(("batch_size", "late"), [slow(1, True), (4, False), (4, True), slow(16, False)])
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_running_ahead_changes_no_token(name: str, batch_size: int, late: bool, launched: list[int]) -> None:
    source = stopping()
    reasons = set[str]()
    for seed in range(1 if batch_size == 16 else 2):
        requests = make_requests(seed, 16 if batch_size == 16 else 6)
        k = 1 + (2 * seed + batch_size) % 4
        config = EngineConfig(max_batch_size=batch_size, max_model_len=128)
        plain = served(Engine(source, device=CPU, config=config), requests, seed)
        reasons |= {reason for _, reason, _ in plain.values()}
        launched.clear()
        engine = Ahead(
            source, device=CPU, config=replace(config, speculative=Speculative(proposers(source)[name], k=k))
        )
        assert served(make_late(engine) if late else engine, requests, seed) == plain
        assert sum(acceptance_of(engine).accepted) < sum(acceptance_of(engine).proposed)
    assert reasons == {"stop", "length"}
    assert launched


def test_steps_of_who_looks_on_the_host_wait(launched: list[int]) -> None:
    source = stopping()
    requests = make_requests(1, 6)
    plain = served(Engine(source, device=CPU), requests, 1)
    launched.clear()
    engine = Ahead(source, device=CPU, config=EngineConfig(speculative=Speculative(NGram(), k=3)))
    assert served(engine, requests, 1) == plain
    assert sum(acceptance_of(engine).accepted) > 0
    assert not launched


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
@pytest.mark.parametrize(("rule", "rate"), [("coupled", None), ("rejection", None), ("coupled", 0.6)])
@pytest.mark.one_in(4)
def test_tokens_and_counts_of_a_batch_are_those_of_steps_that_wait(
    name: str, rule: Any, rate: float | None, late: bool, launched: list[int]
) -> None:
    """Counts, too: what is served once more than needed is not counted. No stop tokens, behind which accepted
    ones count.
    """
    source = make_source()
    requests = [replace(each, params=replace(each.params, ignore_eos=True)) for each in make_requests(5, 6)]
    config = EngineConfig(
        max_model_len=128, speculative=Speculative(proposers(source)[name], k=3, rule=rule, forced_rate=rate)
    )
    waiting = Engine(source, device=CPU, config=config)
    ahead = Ahead(source, device=CPU, config=config)
    expected = waiting.generate(requests)
    finished = (make_late(ahead) if late else ahead).generate(requests)
    assert [(each.tokens, each.logprobs) for each in finished] == [
        (each.tokens, each.logprobs) for each in expected
    ]
    counts = [
        (each.num_rows, each.proposed, each.accepted)
        for each in (acceptance_of(waiting), acceptance_of(ahead))
    ]
    assert counts[0] == counts[1]
    assert launched


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_padding_rows_and_warm_up_while_a_step_is_unread_change_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    source = stopping()
    requests = make_requests(8, 6)
    config = EngineConfig(max_batch_size=3, max_model_len=128)
    plain = served(Engine(source, device=CPU, config=config), requests, 8)
    for module in (decoding, draft_model, head_proposer):
        monkeypatch.setattr(module, "Graphs", RehearsedGraphs)
    engine = Ahead(
        source, device=CPU, config=replace(config, speculative=Speculative(proposers(source)[name], k=2))
    )
    assert served(engine, requests, 8) == plain
    assert launched


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_cancelled_request_leaves_the_others_their_tokens(late: bool, launched: list[int]) -> None:
    source = make_source()
    requests = [
        replace(each, params=replace(each.params, max_tokens=24, ignore_eos=True))
        for each in make_requests(5, 4)
    ]
    plain = {each.id: each.tokens for each in Engine(source, device=CPU).generate(requests)}
    speculative = Speculative(proposers(source)["draft_model"], k=3)
    engine = Ahead(source, device=CPU, config=EngineConfig(max_model_len=128, speculative=speculative))
    if late:
        make_late(engine)
    for request in requests:
        engine.add(request)
    finished = [each for _ in range(4) for each in engine.step()]
    assert not finished
    cancelled = engine.cancel("1")
    assert 0 < len(cancelled.tokens) < 24
    assert cancelled.tokens == plain["1"][: len(cancelled.tokens)]
    while engine.has_work:
        finished += engine.step()
    assert {each.id: each.tokens for each in finished} == {idx: plain[idx] for idx in "023"}
    assert launched


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_sequences_up_to_the_last_position_are_served(name: str, launched: list[int]) -> None:
    """A request with all its tokens may be served once more, behind the last position of the cache and of the
    rotary tables.
    """
    source = make_source(max_position_embeddings=48)
    requests = [
        Request(str(idx), (idx + 1,) * (48 - length), SamplingParams(length, seed=idx, ignore_eos=True))
        for idx, length in enumerate((9, 14, 19, 30))
    ]
    plain = Engine(source, device=CPU).generate(requests)
    proposer = (
        DraftModel(source) if name == "draft_model" else proposers(source)[name]
    )  # which always keeps all, or hardly ever
    finished = Ahead(
        source, device=CPU, config=EngineConfig(speculative=Speculative(proposer, k=7))
    ).generate(requests)
    assert [each.tokens for each in finished] == [each.tokens for each in plain]
    assert launched


def test_all_proposals_are_meant_where_none_are_counted_whatever_was_counted_before() -> None:
    state = SpeculativeState(max_rows=4, max_model_len=96, block_size=16, k=3, device=CPU)
    for num_rows, counts in ((4, [0, 2, 0, 1]), (2, None), (4, None)):
        state.propose(torch.zeros(num_rows, 3, dtype=torch.int64), counts)
        assert state.buffers.proposed_S[:num_rows].tolist() == (counts or [3] * num_rows)


def test_a_block_table_on_its_way_is_not_overwritten_by_the_next() -> None:
    """Nor by the one after, once the step before it is done."""
    state = SpeculativeState(max_rows=2, max_model_len=96, block_size=16, k=2, device=CPU)
    sent = deque[torch.Tensor]()
    state._send = sent.append  # type: ignore[method-assign]
    for num_blocks in range(1, 6):
        state.set_blocks({1: range(1, 1 + num_blocks)})
        for behind, held in enumerate([*sent][::-1][:2]):
            own = max(0, num_blocks - behind)
            assert held[1].tolist() == [16 * own, *range(1, 1 + own), *[0] * (held.shape[1] - 1 - own)]


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_block_tables_are_as_wide_as_the_longest_context_asks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, requests = stopping(), make_requests(3, 6)
    config = EngineConfig(max_batch_size=4, max_model_len=128)
    plain = served(Engine(source, device=CPU, config=config), requests, 3)
    monkeypatch.setattr(graphs, "SECTION_KEYS", 32)
    widths = set[int]()
    fed = SpeculativeState.fed
    monkeypatch.setattr(
        SpeculativeState,
        "fed",
        lambda state, *args, **given: widths.add(state.num_blocks) or fed(state, *args, **given),
    )
    engine = Ahead(
        source, device=CPU, config=replace(config, speculative=Speculative(proposers(source)[name], k=3))
    )
    assert served(engine, requests, 3) == plain
    assert widths >= {2, 4}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(("name", "num_blocks"), [("draft_model", 7), ("draft_model", 8), ("eagle3", 7)])
@pytest.mark.one_in(4)
def test_a_full_cache_limits_proposals_ends_runs_and_loses_nothing(
    name: str, num_blocks: int, late: bool, launched: list[int]
) -> None:
    source = stopping()
    options = proposers(source)[name]
    preempted = 0
    for seed in range(2):
        requests = [
            replace(
                each,
                prompt=each.prompt[:16],
                params=replace(each.params, max_tokens=30 + idx, ignore_eos=idx % 3 > 0),
            )
            for idx, each in enumerate(make_requests(seed, 5))
        ]
        plain = Engine(source, device=CPU, config=EngineConfig(max_model_len=96)).generate(requests)
        config = EngineConfig(max_model_len=96, kv_cache_bytes=1 << 20, speculative=Speculative(options, k=4))
        roomy = Engine(source, device=CPU, config=config)
        assert roomy._speculation is not None
        per_block = 16 * (roomy.kv_bytes_per_token + roomy._speculation._proposer.kv_bytes_per_token)
        engine = Ahead(source, device=CPU, config=replace(config, kv_cache_bytes=num_blocks * per_block))
        finished = (make_late(engine) if late else engine).generate(requests)
        # Recomputed keys are equal within rounding only: a token differs where two were as likely, which does
        # not happen here.
        assert [(each.tokens, each.reason) for each in finished] == [
            (each.tokens, each.reason) for each in plain
        ]
        assert engine._pool.num_free == num_blocks - 1
        preempted += engine.num_preemptions
    assert preempted
    assert launched

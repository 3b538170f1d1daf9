"""The engine on the CPU: results do not depend on company, and requests end as they should."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import QueueFull, UsageError
from compress.models.experts import Experts
from compress.models.weights import MemorySource
from compress.runtime import decode, graphs
from compress.runtime.decode_run import DecodeRun
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Finished, Request, SamplingParams
from tests.support.rehearsed_graphs import RehearsedGraphs
from tests.support.tiny_decoder import tiny_arch, tiny_source

CPU = torch.device("cpu")


def make_source() -> MemorySource:
    """Odd widths, normed heads, biases, two query heads a kv head."""
    return tiny_source(
        tiny_arch(hidden_size=39, intermediate_size=83, head_dim=24, max_position_embeddings=400)
    )


def make_requests(num_requests: int, *, max_tokens: int = 12) -> list[Request]:
    """Prompts of 1 to 150 tokens; the seed of a request is its number. Every other one is greedy."""
    generator = torch.Generator().manual_seed(1)
    lengths = [40, 1, 150, 9, 127, 128, 63, 17][:num_requests]
    prompts = [tuple(torch.randint(61, (length,), generator=generator).tolist()) for length in lengths]
    params = [
        SamplingParams(max_tokens, temperature=0.8 * (idx % 2), seed=idx, ignore_eos=True, logprobs=True)
        for idx in range(num_requests)
    ]
    return [
        Request(str(idx), prompt, each)
        for idx, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]


class Recorder:
    """Logits by (request seed, position of the token they chose), as the sampler got them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Tensor] = {}

    def watch(self, engine: Engine) -> Engine:
        engine.observer = self._record
        return engine

    def _record(self, requests: Any, positions: Any, logits_RV: Tensor) -> None:
        for row, request, position in zip(logits_RV, requests, positions, strict=True):
            self.rows[request.params.seed, position] = row.clone()

    def take(self) -> dict[tuple[int, int], Tensor]:
        rows = self.rows
        self.rows = {}
        return rows


def tokens(finished: Iterable[Finished]) -> dict[str, tuple[int, ...]]:
    return {each.id: each.tokens for each in finished}


def assert_same_bits(rows: dict[tuple[int, int], Tensor], expected: dict[tuple[int, int], Tensor]) -> None:
    assert rows.keys() <= expected.keys()
    different = [
        key
        for key, row in rows.items()
        if not torch.equal(row.view(torch.int32), expected[key].view(torch.int32))
    ]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_request_has_the_same_bits_alone_in_company_and_in_any_order(dtype: torch.dtype) -> None:
    recorder = Recorder()
    engine = recorder.watch(Engine(make_source(), device=CPU, config=EngineConfig(dtype=dtype)))
    requests = make_requests(8)
    together = engine.generate(requests)
    expected = recorder.take()
    assert len(expected) == 8 * 12
    for request in requests:
        assert tokens(engine.generate([request])) == tokens(
            [each for each in together if each.id == request.id]
        )
    assert_same_bits(recorder.take(), expected)
    assert tokens(engine.generate(requests[::-1])) == tokens(together)
    assert_same_bits(recorder.take(), expected)


def test_prefill_beside_decodes_changes_no_bits_of_either() -> None:
    recorder = Recorder()
    engine = recorder.watch(Engine(make_source(), device=CPU))
    requests = make_requests(8)
    together = engine.generate(requests)
    expected = recorder.take()
    finished: list[Finished] = []
    for request in requests:  # each arrives while those before it decode
        engine.add(request)
        finished += engine.step()
        finished += engine.step()
    while engine.has_work:
        finished += engine.step()
    assert tokens(finished) == tokens(together)
    assert_same_bits(recorder.take(), expected)


def test_steps_of_short_contexts_read_a_narrow_block_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end where a context grows long, and nothing that is generated changes."""
    requests = [
        Request(str(idx), tuple(range(3 + idx % 5)), SamplingParams(60, ignore_eos=True)) for idx in range(33)
    ]
    config = EngineConfig(max_batch_size=40, block_size=16)
    expected = tokens(Engine(make_source(), device=CPU, config=config).generate(requests))
    widths: set[int] = set()
    begin = decode.DecodeState.begin

    def watched(state: Any, num_rows: int, embed_VD: Tensor, **given: Any) -> Any:
        begun = begin(state, num_rows, embed_VD, **given)
        widths.add(begun[3].shape[1])
        assert int(begun[4].max()) <= begun[3].shape[1] * 16
        return begun

    monkeypatch.setattr(decode.DecodeState, "begin", watched)
    monkeypatch.setattr(decode, "SHORT_CONTEXT", 48)
    assert tokens(Engine(make_source(), device=CPU, config=config).generate(requests)) == expected
    assert len(widths) == 2
    assert min(widths) == 3
    widths.clear()
    monkeypatch.setattr(graphs, "SECTION_KEYS", 64)
    assert tokens(Engine(make_source(), device=CPU, config=config).generate(requests)) == expected
    assert sorted(widths)[:3] == [3, 4, 8]


@pytest.mark.parametrize("kv_blocks", [200, 17], ids=["roomy", "preempting"])
def test_running_one_step_ahead_changes_no_result(monkeypatch: pytest.MonkeyPatch, kv_blocks: int) -> None:
    """On the CPU a launched step is done at once, which changes nothing for who reads it a step later."""
    source = make_source()
    (free,) = Engine(source, device=CPU).generate(make_requests(1, max_tokens=30))
    ending = _with_arch(
        source, source.arch.replace(config={**source.arch.config, "eos_token_id": free.tokens[9]})
    )
    config = EngineConfig(
        max_model_len=192, kv_cache_bytes=kv_blocks * 16 * kv_bytes_per_token(source.arch, "F32")
    )
    requests = [
        Request(each.id, each.prompt, replace(each.params, max_tokens=20 + 3 * idx, ignore_eos=False))
        for idx, each in enumerate(make_requests(8))
    ]
    in_step, ahead = (Engine(ending, device=CPU, config=config) for _ in range(2))
    expected = in_step.generate(requests)
    monkeypatch.setattr(Engine, "_overlaps", property(lambda engine: engine is ahead))
    launches: list[int] = []
    launch_next = DecodeRun.launch_next
    monkeypatch.setattr(DecodeRun, "launch_next", lambda run: launches.append(1) or launch_next(run))
    finished = ahead.generate(requests)
    assert launches
    assert (ahead.num_preemptions > 0) == (kv_blocks == 17)
    assert {each.reason for each in expected} == {"stop", "length"}
    assert [(each.tokens, each.reason) for each in finished] == [
        (each.tokens, each.reason) for each in expected
    ]
    assert all(len(each.token_times_s) == len(each.tokens) for each in finished)


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_padding_rows_and_warm_up_steps_change_nothing(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    source = make_source()
    config = EngineConfig(max_batch_size=6)
    expected = [
        (each.tokens, each.logprobs)
        for each in Engine(source, device=CPU, config=config).generate(make_requests(8))
    ]
    monkeypatch.setattr(decode, "Graphs", RehearsedGraphs)
    monkeypatch.setattr(Engine, "_overlaps", property(lambda engine: ahead))
    finished = Engine(source, device=CPU, config=config).generate(make_requests(8))
    assert [(each.tokens, each.logprobs) for each in finished] == expected


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_tokens_arrive_step_by_step_and_are_those_of_the_finished_request(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(Engine, "_overlaps", property(lambda engine: ahead))
    engine = Engine(make_source(), device=CPU)
    requests = make_requests(4)
    streamed: dict[str, list[int]] = {each.id: [] for each in requests}
    for request in requests:
        engine.add(request)
    finished: dict[str, Finished] = {}
    most_new = 0
    while engine.has_work:
        finished |= {each.id: each for each in engine.step()}
        for name, got in streamed.items():
            done = finished.get(name)
            new = [*done.tokens[len(got) :]] if done else engine.tokens_of(name, start=len(got))
            most_new = max(most_new, len(new))
            got += new
    assert most_new == 1
    assert streamed == {name: [*each.tokens] for name, each in finished.items()}
    with pytest.raises(UsageError, match="no unfinished request has the id '0'"):
        engine.tokens_of("0")


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 9])
@pytest.mark.one_in(6)
def test_a_cancelled_request_keeps_what_it_has_and_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, after: int, ahead: bool
) -> None:
    source = make_source()
    expected = tokens(Engine(source, device=CPU).generate(make_requests(8)))
    monkeypatch.setattr(Engine, "_overlaps", property(lambda engine: ahead))
    engine = Engine(
        source,
        device=CPU,
        config=EngineConfig(max_batch_size=3, max_model_len=192, kv_cache_bytes=1 << 20),
    )
    num_free = engine._pool.num_free
    for request in make_requests(8):
        engine.add(request)
    finished = [each for _ in range(after) for each in engine.step()]
    ended = {each.id for each in finished}
    cancelled = [engine.cancel(name) for name in ("1", "2", "7") if name not in ended]
    while engine.has_work:
        finished += engine.step()
    assert {each.id for each in (*finished, *cancelled)} == expected.keys()
    assert len(finished) + len(cancelled) == 8
    for each in cancelled:
        assert each.reason == "cancelled"
        assert each.tokens == expected[each.id][: len(each.tokens)]
        assert len(each.tokens) == len(each.token_times_s)
    assert all(each.tokens == expected[each.id] for each in finished)
    assert engine._pool.num_free == num_free
    with pytest.raises(UsageError, match="no unfinished request has the id '7'"):
        engine.cancel("7")


def test_a_preempted_request_continues_as_if_undisturbed() -> None:
    recorder = Recorder()
    source = make_source()
    requests = make_requests(8, max_tokens=40)
    undisturbed = recorder.watch(Engine(source, device=CPU)).generate(requests)
    expected = recorder.take()
    blocks = 16 * kv_bytes_per_token(source.arch, "F32")
    small = recorder.watch(
        Engine(source, device=CPU, config=EngineConfig(max_model_len=192, kv_cache_bytes=20 * blocks))
    )
    recomputed = small.generate(requests)
    assert small.num_preemptions > 0

    # Recomputed keys come from prefill rows: equal within rounding, so a token may change only where two were
    # equally likely within it.
    bound = 64 * torch.finfo(torch.float32).eps * max(float(row.abs().max()) for row in expected.values())
    for key, row in recorder.take().items():
        assert float((row - expected[key]).abs().max()) < bound
    greedy = [row.topk(2).values for (seed, _), row in expected.items() if seed % 2 == 0]
    assert all(float(best - second) > 2 * bound for best, second in greedy)
    assert tokens(recomputed) == tokens(undisturbed)


def test_chunked_prefill_agrees_with_whole_prefill() -> None:
    recorder = Recorder()
    requests = make_requests(8)
    whole = recorder.watch(Engine(make_source(), device=CPU)).generate(requests)
    expected = recorder.take()
    chunked = recorder.watch(
        Engine(make_source(), device=CPU, config=EngineConfig(max_step_tokens=21))
    ).generate(requests)
    bound = 64 * torch.finfo(torch.float32).eps * max(float(row.abs().max()) for row in expected.values())
    assert all(float((row - expected[key]).abs().max()) < bound for key, row in recorder.take().items())
    assert tokens(chunked) == tokens(whole)


def test_scores_of_a_sequence_do_not_depend_on_the_others_and_leave_running_requests_alone() -> None:
    engine = Engine(make_source(), device=CPU)
    request = make_requests(1)[0]
    undisturbed = engine.generate([request])
    tokens_BS = torch.randint(61, (5, 77), generator=torch.Generator().manual_seed(4))
    engine.add(request)
    engine.step()
    scored = engine.runner.score(tokens_BS)
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    assert tokens(finished) == tokens(undisturbed)
    for row in range(5):
        assert torch.equal(engine.runner.score(tokens_BS[row : row + 1])[0], scored[row])


def test_logprobs_are_those_of_the_scored_sequence() -> None:
    engine = Engine(make_source(), device=CPU)
    (done,) = engine.generate(make_requests(1))
    assert done.logprobs is not None
    sequence = torch.tensor(done.prompt + done.tokens)
    scored = engine.runner.score(sequence.unsqueeze(0))[0].log_softmax(-1)
    expected = scored[len(done.prompt) - 1 : -1].gather(1, torch.tensor(done.tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=1e-4)


def test_generation_ends_at_end_of_sequence_unless_told_otherwise() -> None:
    source = make_source()
    prompt = make_requests(1)[0].prompt
    (free,) = Engine(source, device=CPU).generate([Request("x", prompt, SamplingParams(20, ignore_eos=True))])
    eos = free.tokens[5]
    arch = source.arch.replace(config={**source.arch.config, "eos_token_id": eos})
    ending = Engine(_with_arch(source, arch), device=CPU)
    (done,) = ending.generate([Request("x", prompt, SamplingParams(20))])
    assert (done.tokens, done.reason) == (free.tokens[: free.tokens.index(eos) + 1], "stop")
    (ignored,) = ending.generate([Request("x", prompt, SamplingParams(20, ignore_eos=True))])
    assert (ignored.tokens, ignored.reason, ignored.logprobs) == (free.tokens, "length", None)


def _with_arch(source: MemorySource, arch: Any) -> Any:
    class Renamed:
        def __init__(self) -> None:
            self.arch = arch
            self.outer = source.outer
            self.layer = source.layer
            self.kv_format = source.kv_format

    return Renamed()


def test_times_are_ordered_and_one_for_each_token() -> None:
    for done in Engine(make_source(), device=CPU).generate(make_requests(4)):
        assert len(done.token_times_s) == len(done.tokens) == 12
        assert [done.arrival_s, *done.token_times_s] == sorted([done.arrival_s, *done.token_times_s])


def test_a_decode_step_reads_every_linear_and_the_head_once() -> None:
    # Widths of whole blocks of columns: the CPU's kernels fill others up with zeros, and read them.
    arch = tiny_arch(vocab_size=96, hidden_size=96, intermediate_size=144, head_dim=24)
    engine = Engine(tiny_source(arch), device=CPU)
    assert engine.weight_bytes == 4 * (arch.num_linear_params + arch.vocab_size * arch.hidden_size)
    assert engine.kv_bytes_per_token == 4 * 3 * 2 * 2 * 24
    assert engine.expected_weight_bytes(1) == engine.expected_weight_bytes(64) == engine.weight_bytes


def test_a_decode_step_of_a_mixture_reads_more_experts_for_more_rows() -> None:
    arch = tiny_arch(vocab_size=96, hidden_size=96, intermediate_size=48, head_dim=24)
    experts = Experts(6, 2, 48)
    arch = arch.replace(layers=tuple(replace(layer, experts=experts) for layer in arch.layers))
    engine = Engine(tiny_source(arch), device=CPU)
    assert engine.expected_weight_bytes(1) == engine.weight_bytes == engine.weight_bytes_read(2)
    hit = 6 * (1 - (2 / 3) ** 3)
    assert engine.expected_weight_bytes(3) == pytest.approx(engine.weight_bytes_read(hit))
    assert engine.expected_weight_bytes(1000) == engine.weight_bytes_read(6)


def test_every_linear_is_reported_with_its_kernel_for_both_phases() -> None:
    engine = Engine(make_source(), device=CPU)
    rows = engine.kernel_report()
    for phase, m_max in (("decode", 8), ("prefill", 2048)):
        linears = [row for row in rows if row["op"] == "linear" and row["phase"] == phase]
        named = [(row["layer"], name) for row in linears for name in row["linear"].split("+")]
        assert named == [
            (idx, name) for idx, layer in enumerate(engine.arch.layers) for name in layer.linears
        ] + [(None, "head")]
        assert all(
            row["m_range"] == [1, m_max] and row["scheme"] == "F32" and "reference" in row["kernel"]
            for row in linears
        )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("r", (), SamplingParams(1)), "empty prompt"),
        (
            Request("r", (1,) * 390, SamplingParams(11)),
            "390 prompt tokens and asks for 11 more, 401 in all; this model has 400 positions. Shorten it.$",
        ),
        (Request("r", (1, 61), SamplingParams(1)), "outside 0..60"),
        (Request("r", (1, -1), SamplingParams(1)), "outside 0..60"),
        (Request("taken", (1,), SamplingParams(1)), "'taken' is in use"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_numbers(request_: Request, message: str) -> None:
    engine = Engine(make_source(), device=CPU)
    engine.add(Request("taken", (1,), SamplingParams(1)))
    with pytest.raises(UsageError, match=message):
        engine.add(request_)
    assert [each.id for each in engine.step()] == ["taken"]


def test_a_request_that_a_larger_engine_would_serve_is_told_what_to_raise() -> None:
    engine = Engine(make_source(), device=CPU, config=EngineConfig(max_model_len=100))
    with pytest.raises(UsageError, match=r"100 tokens at most\. Shorten it, or raise max_model_len"):
        engine.add(Request("r", (1,) * 90, SamplingParams(11)))


def test_a_refused_request_leaves_the_engine_free_for_the_next_ones() -> None:
    engine = Engine(make_source(), device=CPU, config=EngineConfig(max_waiting=2))
    good = [Request(str(idx), (1, idx), SamplingParams(2)) for idx in range(3)]
    with pytest.raises(UsageError, match="empty prompt"):
        engine.generate([*good[:2], Request("r", (), SamplingParams(1))])
    with pytest.raises(QueueFull):
        engine.generate(good)
    assert not engine.has_work
    assert [each.id for each in engine.generate(good[:2])] == ["0", "1"]


def test_sizes_that_contradict_one_another_are_refused_with_the_numbers() -> None:
    source = make_source()
    with pytest.raises(UsageError, match=r"max_model_len is 401; this model has positions 1..400"):
        Engine(source, device=CPU, config=EngineConfig(max_model_len=401))
    with pytest.raises(UsageError, match="fewer than one sequence of 300 tokens"):
        Engine(
            source,
            device=CPU,
            config=EngineConfig(
                max_model_len=300, kv_cache_bytes=200 * kv_bytes_per_token(source.arch, "F32")
            ),
        )
    with pytest.raises(UsageError, match="max_step_tokens 4"):
        EngineConfig(max_batch_size=8, max_step_tokens=4)
    assert Engine(source, device=CPU, config=EngineConfig(kv_cache_bytes=4 * 16 * 1152)).max_model_len == 48

"""Speculative decoding gives what plain decoding gives, bit for bit: whoever proposes, whatever the weights,
the cache and the company.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.random_source import RandomSource
from compress.models.weights import Weights, WeightSource, dense
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative import decoding, draft_model
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from tests.support.rehearsed_graphs import RehearsedGraphs
from tests.support.scripted_proposer import Scripted, acceptance_of
from tests.support.slow import slow
from tests.support.tiny_decoder import LLAMA, tiny_arch

CPU = torch.device("cpu")
VOCAB = 61
TARGETS = {
    "F32": None,
    "BF16": None,
    "W4A16": SCHEMES["W4A16_G128"],
    "FP8": SCHEMES["FP8_DYNAMIC"],
    "MOE": None,
    "MOE-W4A16": SCHEMES["W4A16_G128"],
}
MIXTURE: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key != "mlp_bias"},
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

PROPOSERS = ("ngram", "draft_model", "scripted")


def make_source(target: str = "F32", **changes: Any) -> RandomSource:
    facts = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
    }
    arch = tiny_arch(MIXTURE if target.startswith("MOE") else LLAMA, **{**facts, **changes})
    return RandomSource(arch, device=CPU, dtype=torch.float32, scheme=TARGETS[target])


class Noisy:
    """A draft that mostly agrees: the same weights, dense, each off by a tenth of their deviation."""

    kv_format = None

    def __init__(self, source: WeightSource, noise: float = 0.1) -> None:
        self.arch = source.arch
        self._source = source
        self._noise = noise

    def outer(self) -> Weights:
        return self._source.outer()

    def layer(self, layer_idx: int) -> Weights:
        generator = torch.Generator().manual_seed(layer_idx)
        weights = {
            name: dense(weight).to(torch.float32) for name, weight in self._source.layer(layer_idx).items()
        }
        return {
            name: weight
            + self._noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
            for name, weight in weights.items()
        }


def make_requests(num_requests: int = 20, *, max_tokens: int = 5) -> list[Request]:
    """Prompts of 1 to 140 tokens, some of which repeat themselves; every other one is drawn. Requests end at
    different times.
    """
    generator = torch.Generator().manual_seed(1)
    requests = []
    for idx in range(num_requests):
        length = [40, 1, 130, 9, 17, 16, 63, 2][idx % 8]
        prompt = tuple(
            (torch.randint(VOCAB, (length,), generator=generator) % (5 if idx % 3 else VOCAB)).tolist()
        )
        filters = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}][idx // 2 % 4]
        params = SamplingParams(
            max_tokens + idx % 9,
            temperature=0.7 * (idx % 2),
            seed=idx,
            ignore_eos=True,
            logprobs=True,
            **filters,
        )
        requests.append(Request(str(idx), prompt, params))
    return requests


@dataclass
class Recorded:
    finished: list[Finished]
    rows: dict[tuple[int, int], Tensor]

    @property
    def results(self) -> list[tuple[Any, ...]]:
        return [(each.id, each.tokens, each.reason, each.logprobs) for each in self.finished]


def record(engine: Engine, requests: Sequence[Request]) -> Recorded:
    """Results, and logits by (request seed, position of the token they chose)."""
    rows: dict[tuple[int, int], Tensor] = {}

    def observe(requests: Any, positions: Any, logits_RV: Tensor) -> None:
        for row, request, position in zip(logits_RV, requests, positions, strict=True):
            assert (request.params.seed, position) not in rows
            rows[request.params.seed, position] = row.clone()

    engine.observer = observe
    return Recorded(engine.generate(requests), rows)


def assert_same_bits(rows: dict[tuple[int, int], Tensor], expected: dict[tuple[int, int], Tensor]) -> None:
    assert rows.keys() == expected.keys()
    assert [
        key
        for key, row in rows.items()
        if not torch.equal(row.view(torch.int32), expected[key].view(torch.int32))
    ] == []


def proposer_named(name: str, source: WeightSource, finished: Sequence[Finished]) -> ProposerOptions:
    scripts = {idx: each.prompt + each.tokens for idx, each in enumerate(finished)}
    return {
        "ngram": NGram(),
        "draft_model": DraftModel(Noisy(source)),
        "scripted": Scripted(scripts, wrong_every=4),
    }[name]


@pytest.mark.parametrize(
    ("batch_size", "kv_format"),
    [slow(1, None), (4, "FP8_TOKEN_HEAD"), slow(16, None), slow(16, "FP8_TOKEN_HEAD")],
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.one_in(4)
def test_speculation_changes_no_bit(target: str, batch_size: int, kv_format: str | None) -> None:
    dtype = torch.bfloat16 if target == "BF16" else torch.float32
    source = make_source(target)
    requests = make_requests(20 if batch_size > 1 else 8)
    config = EngineConfig(dtype=dtype, max_batch_size=batch_size, max_model_len=160, kv_format=kv_format)
    plain = record(Engine(source, device=CPU, config=config), requests)
    for name in PROPOSERS:
        proposer = proposer_named(name, source, plain.finished)
        engine = Engine(source, device=CPU, config=replace(config, speculative=Speculative(proposer, k=3)))
        speculated = record(engine, requests)
        assert speculated.results == plain.results
        assert_same_bits(speculated.rows, plain.rows)
        assert acceptance_of(engine).acceptance_length > 1.02, name
        assert any(rate < 1 for rate in acceptance_of(engine).rates), name


@pytest.mark.parametrize("k", [slow(1), 7])
def test_any_number_of_proposals_changes_no_bit(k: int) -> None:
    source = make_source()
    requests = make_requests()
    plain = record(Engine(source, device=CPU), requests)
    for name in PROPOSERS:
        speculative = Speculative(proposer_named(name, source, plain.finished), k=k)
        speculated = record(
            Engine(source, device=CPU, config=EngineConfig(speculative=speculative)), requests
        )
        assert speculated.results == plain.results
        assert_same_bits(speculated.rows, plain.rows)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("kv_format", [slow(None), "FP8_TOKEN_HEAD"])
@pytest.mark.one_in(4)
def test_padding_rows_and_warm_up_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch, rule: Any, kv_format: str | None
) -> None:
    source = make_source()
    requests = make_requests(14)
    config = EngineConfig(max_batch_size=6, kv_format=kv_format)
    plain = record(Engine(source, device=CPU, config=config), requests)

    def run() -> list[list[tuple[Any, ...]]]:
        configs = [
            replace(config, speculative=Speculative(proposer_named(name, source, plain.finished), rule=rule))
            for name in PROPOSERS
        ]
        return [record(Engine(source, device=CPU, config=each), requests).results for each in configs]

    as_written = run()
    monkeypatch.setattr(decoding, "Graphs", RehearsedGraphs)
    monkeypatch.setattr(draft_model, "Graphs", RehearsedGraphs)
    assert run() == as_written
    assert (as_written[1] == plain.results) == (rule == "coupled")


@pytest.mark.parametrize("name", PROPOSERS)
def test_requests_that_arrive_while_others_are_verified_change_no_bit(name: str) -> None:
    source = make_source()
    requests = make_requests(12, max_tokens=12)
    plain = record(Engine(source, device=CPU), requests)
    engine = Engine(
        source,
        device=CPU,
        config=EngineConfig(speculative=Speculative(proposer_named(name, source, plain.finished))),
    )
    rows: dict[tuple[int, int], Tensor] = {}
    engine.observer = lambda requests, positions, logits: rows.update(
        {
            (each.params.seed, position): row.clone()
            for row, each, position in zip(logits, requests, positions, strict=True)
        }
    )
    finished: list[Finished] = []
    for request in requests:
        engine.add(request)
        finished += engine.step()
    while engine.has_work:
        finished += engine.step()
    assert {each.id: (each.tokens, each.logprobs) for each in finished} == {
        each.id: (each.tokens, each.logprobs) for each in plain.finished
    }
    assert_same_bits(rows, plain.rows)


def ending(source: RandomSource, eos: int) -> RandomSource:
    arch = source.arch.replace(config={**source.arch.config, "eos_token_id": eos})
    return RandomSource(arch, device=CPU, dtype=torch.float32)


def test_a_stop_token_inside_an_accepted_run_ends_the_request_there() -> None:
    free = make_source()
    requests = [
        Request(str(idx), (idx, 5, 7), SamplingParams(30, seed=idx, temperature=0.9)) for idx in range(8)
    ]
    unstopped = Engine(ending(free, VOCAB - 1), device=CPU).generate(
        [replace(each, params=replace(each.params, ignore_eos=True)) for each in requests]
    )
    eos = unstopped[0].tokens[6]
    plain = Engine(ending(free, eos), device=CPU).generate(requests)
    assert {each.reason for each in plain} == {"stop", "length"}
    scripts = {
        idx: each.prompt + each.tokens for idx, each in enumerate(unstopped)
    }  # which goes on behind the stop
    speculative = Speculative(Scripted(scripts), k=5)
    engine = Engine(ending(free, eos), device=CPU, config=EngineConfig(speculative=speculative))
    finished = engine.generate(requests)
    assert [(each.tokens, each.reason) for each in finished] == [(each.tokens, each.reason) for each in plain]
    assert any(
        (len(each.tokens) - 1) % 6 for each in finished if each.reason == "stop"
    )  # not the last token of its step
    assert all(len(each.token_times_s) == len(each.tokens) for each in finished)
    assert acceptance_of(engine).acceptance_length > 5  # every proposal was kept, but at the ends
    assert [each.tokens for each in engine.generate(requests)] == [
        each.tokens for each in plain
    ]  # once more, over used blocks


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 7])
def test_max_tokens_inside_an_accepted_run_is_kept(max_tokens: int) -> None:
    source = make_source()
    prompt = (3, 1, 4)
    (longer,) = Engine(source, device=CPU).generate(
        [Request("x", prompt, SamplingParams(12, ignore_eos=True))]
    )
    engine = Engine(
        source,
        device=CPU,
        config=EngineConfig(speculative=Speculative(Scripted({0: prompt + longer.tokens}), k=4)),
    )
    (done,) = engine.generate([Request("x", prompt, SamplingParams(max_tokens, ignore_eos=True))])
    assert (done.tokens, done.reason) == (longer.tokens[:max_tokens], "length")
    assert acceptance_of(engine).num_rows == -(
        -(max_tokens - 1) // 5
    )  # one step for each five after the first


def test_sequences_up_to_the_last_position_are_served() -> None:
    """Proposals would lie behind the longest sequence that the cache and the rotary tables hold."""
    source = make_source(max_position_embeddings=48)
    requests = [
        Request(str(idx), (idx + 1,) * (48 - 9 - idx), SamplingParams(9 + idx, seed=idx, ignore_eos=True))
        for idx in range(4)
    ]
    plain = Engine(source, device=CPU).generate(requests)
    for name in PROPOSERS:
        speculative = Speculative(proposer_named(name, source, plain), k=7)
        finished = Engine(source, device=CPU, config=EngineConfig(speculative=speculative)).generate(requests)
        assert [each.tokens for each in finished] == [each.tokens for each in plain]


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_full_cache_limits_proposals_and_preemption_loses_nothing(name: str) -> None:
    source = make_source()
    requests = make_requests(10, max_tokens=40)
    roomy = Engine(source, device=CPU).generate(requests)
    proposer = proposer_named(name, source, roomy)
    blocks = 16 * kv_bytes_per_token(source.arch, "F32")
    draft_blocks = blocks if name == "draft_model" else 0
    config = EngineConfig(
        max_model_len=192, kv_cache_bytes=18 * (blocks + draft_blocks), speculative=Speculative(proposer)
    )
    engine = Engine(source, device=CPU, config=config)
    finished = engine.generate(requests)
    assert engine.num_preemptions > 0
    # Recomputed keys are equal within rounding only: a token differs where two were as likely, which does not
    # happen here.
    assert [each.tokens for each in finished] == [each.tokens for each in roomy]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [2048, 21], ids=["whole", "chunked"])
def test_a_draft_that_is_the_model_itself_is_always_right(temperature: float, chunk: int) -> None:
    """So its cache holds the keys and values of every position, after prompts and after full acceptance; it
    draws with the same noise.
    """
    source = make_source()
    requests = [
        Request(each.id, each.prompt, SamplingParams(21, temperature=temperature, seed=idx, ignore_eos=True))
        for idx, each in enumerate(make_requests(8))
    ]
    config = EngineConfig(max_step_tokens=chunk, speculative=Speculative(DraftModel(source), k=4))
    engine = Engine(source, device=CPU, config=config)
    engine.generate(requests)
    accepted = acceptance_of(engine)
    assert accepted.rates == (1.0,) * 4
    assert accepted.num_rows == 8 * 4
    assert accepted.acceptance_length == 5


def test_rejected_proposals_leave_no_trace_in_the_drafts_cache() -> None:
    """A draft that is the model keeps being right after its proposals were replaced by wrong ones, which the
    model rejected.
    """
    source = make_source()
    requests = [
        Request(each.id, each.prompt, replace(each.params, temperature=0.0))
        for each in make_requests(6, max_tokens=30)
    ]
    engine = Engine(source, device=CPU, config=EngineConfig(speculative=Speculative(DraftModel(source), k=4)))
    speculation = engine._speculation
    assert speculation is not None
    propose = speculation._proposer.propose
    wrong = []

    def corrupted(rows: Any, state: Any) -> Any:
        drafts = propose(rows, state)
        wrong.append(len(wrong) % 3 == 1)
        return replace(drafts, tokens_RK=(drafts.tokens_RK + 1) % VOCAB) if wrong[-1] else drafts

    speculation._proposer.propose = corrupted  # type: ignore[method-assign]
    for request in requests:
        engine.add(request)
    seen = 0
    while engine.has_work:
        engine.step()
        if len(wrong) > seen:
            seen = len(wrong)
            assert sum(speculation.last.accepted) == (0 if wrong[-1] else sum(speculation.last.proposed))
    assert any(wrong)


def test_counts_are_those_of_the_steps() -> None:
    source = make_source()
    prompt = (3, 1, 4)
    (plain,) = Engine(source, device=CPU).generate(
        [Request("x", prompt, SamplingParams(21, ignore_eos=True))]
    )
    speculative = Speculative(
        Scripted({0: prompt + plain.tokens}, wrong_every=4), k=3
    )  # tokens 4, 8, ... of the sequence are wrong
    engine = Engine(source, device=CPU, config=EngineConfig(speculative=speculative))
    engine.generate([Request("x", prompt, SamplingParams(21, ignore_eos=True))])
    accepted = acceptance_of(engine)
    assert accepted.num_rows + sum(accepted.accepted) == 20
    assert accepted.proposed[0] >= accepted.proposed[1] >= accepted.proposed[2]
    assert accepted.acceptance_length == pytest.approx(20 / accepted.num_rows)
    assert Engine(source, device=CPU).acceptance is None


def test_the_forced_rate_is_met_and_changes_what_comes_out() -> None:
    source = make_source()
    requests = [
        Request(str(idx), (idx, 1, 2), SamplingParams(60, seed=idx, ignore_eos=True)) for idx in range(16)
    ]
    speculative = Speculative(DraftModel(Noisy(source, 3.0)), k=4, forced_rate=0.8)
    engine = Engine(source, device=CPU, config=EngineConfig(max_batch_size=16, speculative=speculative))
    finished = engine.generate(requests)
    rates = acceptance_of(engine).rates
    made = acceptance_of(engine)
    for place in range(4):
        reached = made.proposed[place] if place == 0 else made.accepted[place - 1]
        rate = made.accepted[place] / reached
        assert abs(rate - 0.8) < 5 * (0.8 * 0.2 / reached) ** 0.5 + 0.05, rates
    assert [each.tokens for each in finished] != [
        each.tokens for each in Engine(source, device=CPU).generate(requests)
    ]


def test_what_cannot_be_is_refused_with_the_numbers() -> None:
    source = make_source()
    for changes, message in (
        ({"k": 0}, "k is 0"),
        ({"k": 8}, "k is 8"),
        ({"rule": "x"}, "rule is 'x'"),
        ({"forced_rate": 1.5}, "is 1.5"),
    ):
        with pytest.raises(UsageError, match=message):
            Speculative(NGram(), **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="min_ngram is 3 and max_ngram 2"):
        NGram(max_ngram=2, min_ngram=3)
    with pytest.raises(UsageError, match="draft model has 50 tokens and the model 61"):
        Engine(
            source,
            device=CPU,
            config=EngineConfig(speculative=Speculative(DraftModel(make_source(vocab_size=50)))),
        )
    with pytest.raises(
        UsageError, match="draft model has 64 positions and the engine serves sequences of 256"
    ):
        Engine(
            source,
            device=CPU,
            config=EngineConfig(speculative=Speculative(DraftModel(make_source(max_position_embeddings=64)))),
        )

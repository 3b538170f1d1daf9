"""An EAGLE-3 head in the engine: it changes no bit, and proposes what its module says without cache, rings,
chunks and batches.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.eagle3 import Eagle3Head, default_layer_ids, eagle3_facts
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.weights import WeightSource, build_decoder
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative import decoding, head_proposer
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.speculation import Speculative
from tests.support.rehearsed_graphs import RehearsedGraphs
from tests.support.scripted_proposer import acceptance_of, checked_proposals
from tests.support.slow import slow
from tests.unit.runtime.test_speculative_engine import (
    TARGETS,
    VOCAB,
    assert_same_bits,
    make_requests,
    make_source,
    record,
)

CPU = torch.device("cpu")


def make_head(arch: Arch, **options: Any) -> Eagle3Head:
    facts = {"draft_vocab_size": VOCAB - 7, "layer_ids": (0, 1, 2), "seed": 3, **options}
    return random_eagle3(arch, device=CPU, dtype=torch.float32, **facts)


class Oracle:
    """The head's likeliest tokens, each from the whole sequence anew: the target's decoder layer by layer,
    then the head's module.
    """

    def __init__(self, source: WeightSource, head: Eagle3Head) -> None:
        self._target = build_decoder(source, dtype=torch.float32, device=CPU)
        self._module = head.decoder(dtype=torch.float32, device=CPU)
        self._head = head

    def continuation(self, tokens: Sequence[int], k: int) -> list[int]:
        tokens = list(tokens)
        attention = FullAttention()
        chosen = []
        states = [self._target.embed(torch.tensor([tokens]))]
        for layer in self._target.layers:
            states.append(layer(states[-1], torch.arange(len(tokens)), attention))
        hidden_1SD = self._module.fuse(
            torch.cat([states[idx] for idx in self._head.facts.layer_ids], dim=-1)
        )[:, :-1]
        for _ in range(k):
            embedded_1SD = self._target.embed(torch.tensor([tokens[1:]]))
            positions = torch.arange(len(tokens) - 1)
            out_11D = self._module(embedded_1SD, hidden_1SD, positions, attention)[:, -1:]
            chosen.append(
                int(self._head.vocabulary_W[self._module.head(self._module.norm(out_11D)).argmax()])
            )
            tokens.append(chosen[-1])
            hidden_1SD = torch.cat((hidden_1SD, out_11D), dim=1)
        return chosen


def checked_steps(
    engine: Engine, source: WeightSource, head: Eagle3Head, requests: list[Request], k: int
) -> int:
    """Rows whose proposals were those of the module; the engine has served the requests then."""
    return checked_proposals(engine, Oracle(source, head).continuation, requests, k)


def greedy(requests: list[Request]) -> list[Request]:
    return [replace(each, params=replace(each.params, temperature=0.0)) for each in requests]


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize(("k", "chunk"), [slow(1, 2048), (4, 2048), slow(4, 21), (7, 9)])
@pytest.mark.one_in(8)
def test_the_head_proposes_what_its_module_says(k: int, chunk: int, norm_before_residual: bool) -> None:
    source = make_source()
    requests = greedy(make_requests(6))
    head = make_head(source.arch)
    head = replace(head, facts=replace(head.facts, norm_before_residual=norm_before_residual))
    config = EngineConfig(max_step_tokens=chunk, max_batch_size=4, speculative=Speculative(Eagle3(head), k=k))
    assert checked_steps(Engine(source, device=CPU, config=config), source, head, requests, k) > 30


@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_rows_of_kept_proposals_are_made_anew_of_the_models_hidden_states(rate: float) -> None:
    """Keys and values that the head wrote from its own are replaced, of one proposal as of all k."""
    source = make_source()
    requests = greedy(make_requests(4, max_tokens=20))
    head = make_head(source.arch)
    engine = Engine(
        source, device=CPU, config=EngineConfig(speculative=Speculative(Eagle3(head), k=3, forced_rate=rate))
    )
    assert checked_steps(engine, source, head, requests, 3) > 20
    assert acceptance_of(engine).acceptance_length > 2


def test_preempted_requests_and_blocks_of_others_leave_the_heads_proposals_right() -> None:
    source = make_source()
    requests = greedy(make_requests(8, max_tokens=30))
    head = make_head(source.arch)
    position = (
        kv_bytes_per_token(source.arch, "F32")
        + kv_bytes_per_token(head.facts.arch, "F32")
        + 4 * 128 * 8 // 16
    )
    config = EngineConfig(
        max_model_len=192, kv_cache_bytes=18 * 16 * position, speculative=Speculative(Eagle3(head), k=3)
    )
    engine = Engine(source, device=CPU, config=config)
    assert checked_steps(engine, source, head, requests, 3) > 30
    assert engine.num_preemptions > 0


@pytest.mark.parametrize(
    ("batch_size", "kv_format"),
    [slow(1, None), (4, "FP8_TOKEN_HEAD"), slow(16, None), slow(16, "FP8_TOKEN_HEAD")],
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.one_in(4)
def test_a_head_changes_no_bit(target: str, batch_size: int, kv_format: str | None) -> None:
    dtype = torch.bfloat16 if target == "BF16" else torch.float32
    source = make_source(target)
    requests = make_requests(20 if batch_size > 1 else 8)
    config = EngineConfig(dtype=dtype, max_batch_size=batch_size, max_model_len=160, kv_format=kv_format)
    plain = record(Engine(source, device=CPU, config=config), requests)
    speculative = Speculative(Eagle3(make_head(source.arch)), k=3)
    engine = Engine(source, device=CPU, config=replace(config, speculative=speculative))
    speculated = record(engine, requests)
    assert speculated.results == plain.results
    assert_same_bits(speculated.rows, plain.rows)
    assert 0 < sum(acceptance_of(engine).accepted) < sum(acceptance_of(engine).proposed)


@pytest.mark.parametrize("scheme", ["W4A16_G128", "FP8_DYNAMIC"])
def test_a_quantized_head_changes_no_bit(scheme: str) -> None:
    source = make_source()
    requests = make_requests(8)
    plain = record(Engine(source, device=CPU), requests)
    head = make_head(source.arch, scheme=SCHEMES[scheme], head_scheme=SCHEMES["FP8_DYNAMIC"])
    engine = Engine(source, device=CPU, config=EngineConfig(speculative=Speculative(Eagle3(head), k=4)))
    assert record(engine, requests).results == plain.results


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.one_in(4)
def test_padding_rows_and_warm_up_steps_change_nothing(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    source = make_source()
    requests = make_requests(14)
    speculative = Speculative(Eagle3(make_head(source.arch)), rule=rule)
    config = EngineConfig(max_batch_size=6, speculative=speculative)
    as_written = record(Engine(source, device=CPU, config=config), requests).results
    monkeypatch.setattr(decoding, "Graphs", RehearsedGraphs)
    monkeypatch.setattr(head_proposer, "Graphs", RehearsedGraphs)
    assert record(Engine(source, device=CPU, config=config), requests).results == as_written


def test_requests_that_arrive_while_others_are_verified_change_no_bit() -> None:
    source = make_source()
    requests = make_requests(12, max_tokens=12)
    plain = {each.id: (each.tokens, each.logprobs) for each in Engine(source, device=CPU).generate(requests)}
    engine = Engine(
        source, device=CPU, config=EngineConfig(speculative=Speculative(Eagle3(make_head(source.arch))))
    )
    finished = []
    for request in requests:
        engine.add(request)
        finished += engine.step()
    while engine.has_work:
        finished += engine.step()
    assert {each.id: (each.tokens, each.logprobs) for each in finished} == plain


def test_with_rejection_nothing_outside_the_draft_vocabulary_is_proposed_and_all_of_it_may_come_out() -> None:
    source = make_source()
    head = make_head(source.arch, draft_vocab_size=20)
    engine = Engine(
        source, device=CPU, config=EngineConfig(speculative=Speculative(Eagle3(head), rule="rejection"))
    )
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    propose = proposer.propose
    words = set(head.vocabulary_W.tolist())

    def checked(rows: Any, state: Any) -> Any:
        drafts = propose(rows, state)
        probs_RKV = drafts.probs_SKV[: len(rows)]
        assert {*drafts.tokens_RK.flatten().tolist()} <= words
        assert torch.allclose(probs_RKV.sum(-1), torch.ones(()).double())
        assert probs_RKV[:, :, sorted(set(range(VOCAB)) - words)].abs().max() == 0
        return drafts

    proposer.propose = checked  # type: ignore[method-assign]
    requests = [
        Request(str(idx), (idx, 1), SamplingParams(40, temperature=1.0, seed=idx, ignore_eos=True))
        for idx in range(8)
    ]
    said = {token for each in engine.generate(requests) for token in each.tokens}
    assert said - words
    assert said & words


def test_sequences_up_to_the_last_position_are_served() -> None:
    source = make_source(max_position_embeddings=48)
    requests = [
        Request(str(idx), (idx + 1,) * (48 - 9 - idx), SamplingParams(9 + idx, seed=idx, ignore_eos=True))
        for idx in range(4)
    ]
    plain = Engine(source, device=CPU).generate(requests)
    engine = Engine(
        source, device=CPU, config=EngineConfig(speculative=Speculative(Eagle3(make_head(source.arch)), k=7))
    )
    assert [each.tokens for each in engine.generate(requests)] == [each.tokens for each in plain]


def test_a_head_of_another_model_is_refused_with_the_numbers() -> None:
    source = make_source()
    for other, message in (
        (make_source(vocab_size=50), "made for a model of 50 tokens and hidden size 128"),
        (
            make_source(num_hidden_layers=9),
            "reads it after layer 6; this one has 61 tokens, hidden size 128 and 2 layers",
        ),
        (make_source(max_position_embeddings=64), "has 64 positions and the engine serves sequences of 256"),
    ):
        head = make_head(other.arch, draft_vocab_size=40, layer_ids=None)
        with pytest.raises(UsageError, match=message):
            Engine(source, device=CPU, config=EngineConfig(speculative=Speculative(Eagle3(head))))
    with pytest.raises(UsageError, match=r"layers \[1, 3\] of a model that has 2"):
        eagle3_facts(source.arch, draft_vocab_size=9, layer_ids=(1, 3))


def test_default_layers_rise_and_exist() -> None:
    for num_layers in range(1, 60):
        ids = default_layer_ids(num_layers)
        assert list(ids) == sorted(set(ids))
        assert 0 <= ids[0] <= ids[-1] <= num_layers
    assert default_layer_ids(32) == (2, 16, 29)  # what vLLM takes where a config says nothing

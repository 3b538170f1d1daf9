"""Speculation on a GPU, its steps in graphs and launched ahead: the tokens and log probabilities of plain
decoding, bit for bit.
"""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape, Rope
from compress.models.random_source import RandomSource
from compress.quant.scheme import SCHEMES
from compress.runtime.decode_run import DecodeRun, PendingTokens
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
VOCAB = 4096
TARGETS = {"BF16": None, **{name: SCHEMES[name] for name in ("W4A16_G128", "FP8_DYNAMIC")}}


def make_source(target: str, *, num_layers: int = 4) -> RandomSource:
    """With fewer layers the same first ones: a draft that is sometimes right."""
    layer = LayerShape(num_heads=8, num_kv_heads=2, head_dim=128, intermediate_size=2048, rope=Rope(500000.0))
    facts: dict[str, Any] = {
        "tied_head": False,
        "qkv_bias": False,
        "o_bias": False,
        "ffn_bias": False,
        "qk_norm": False,
        "config": {},
    }
    shape: dict[str, Any] = {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 1024,
        "max_position": 4096,
    }
    layers = (layer, replace(layer, window=200), layer, layer)[:num_layers]
    arch = Arch(**shape, layers=layers, norm_eps=1e-6, activation="silu", dtype="bfloat16", **facts)
    return RandomSource(arch, device=CUDA, dtype=torch.bfloat16, scheme=TARGETS[target])


def make_requests(num_requests: int) -> list[Request]:
    """Prompts of 1 to 128 tokens, whose prefill does not depend on their company; every other request is
    drawn, some with filters.
    """
    generator = torch.Generator().manual_seed(5)
    requests = []
    for idx in range(num_requests):
        length = int(torch.randint(1, 129, (1,), generator=generator))
        prompt = (
            torch.randint(VOCAB, (length,), generator=generator) % (9 if idx % 3 == 0 else VOCAB)
        ).tolist()
        params = SamplingParams(
            20 + idx % 13,
            temperature=0.7 * (idx % 2),
            top_k=20 * (idx % 4 == 1),
            seed=idx,
            ignore_eos=True,
            logprobs=True,
        )
        requests.append(Request(str(idx), tuple(prompt), params))
    return requests


@pytest.mark.parametrize(
    ("batch_size", "kv_format"),
    [
        (1, None),
        (4, "FP8_TOKEN_HEAD"),
        (4, "FP8_ATTENTION"),
        (16, "INT8_TOKEN_HEAD"),
        (48, "INT4_TOKEN_HEAD"),
        (4, "INT4_TOKEN_HEAD_HADAMARD"),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_speculation_in_graphs_changes_no_bit(target: str, batch_size: int, kv_format: str | None) -> None:
    source = make_source(target)
    requests = make_requests(4 if batch_size == 1 else batch_size + batch_size // 4)
    config = EngineConfig(
        max_batch_size=batch_size, max_model_len=512, kv_cache_bytes=1 << 28, kv_format=kv_format
    )
    plain = [
        (each.tokens, each.logprobs) for each in Engine(source, device=CUDA, config=config).generate(requests)
    ]
    proposers: tuple[ProposerOptions, ...] = (
        NGram(),
        DraftModel(source),
        DraftModel(make_source(target, num_layers=2)),
    )
    for proposer in proposers:
        engine = Engine(source, device=CUDA, config=replace(config, speculative=Speculative(proposer, k=4)))
        for _ in range(2):  # with graphs captured on the way, and with all of them there
            assert [(each.tokens, each.logprobs) for each in engine.generate(requests)] == plain
        assert engine.acceptance is not None
        assert sum(engine.acceptance.proposed) > 0


def stopping(source: RandomSource) -> RandomSource:
    """The same weights; one token of forty ends a request."""
    arch = source.arch.replace(config={"eos_token_id": list(range(7, VOCAB, 40))})
    return RandomSource(arch, device=CUDA, dtype=torch.bfloat16, scheme=TARGETS["W4A16_G128"])


def served_as_they_come(engine: Engine, requests: list[Request]) -> dict[str, tuple[Any, ...]]:
    """One arrives with every fifth step, or when there is nothing else to do."""
    waiting = deque(requests)
    finished = list[Finished]()
    num_steps = 0
    while waiting or engine.has_work:
        if waiting and (num_steps % 5 == 0 or not engine.has_work):
            engine.add(waiting.popleft())
        finished += engine.step()
        num_steps += 1
    assert all(len(each.token_times_s) == len(each.tokens) for each in finished)
    return {each.id: (each.tokens, each.reason, each.logprobs) for each in finished}


def assert_ahead_changes_nothing(proposer: ProposerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends within a step, requests that come and go, blocks taken on the way; and counts, where nothing lies
    behind an end.
    """
    ahead = list[bool]()
    launch_next = DecodeRun.launch_next

    def noted(run: DecodeRun) -> PendingTokens | None:
        step = launch_next(run)
        ahead.append(step is not None)
        return step

    monkeypatch.setattr(DecodeRun, "launch_next", noted)
    source = stopping(make_source("W4A16_G128"))
    requests = make_requests(14)
    requests = [
        replace(each, params=replace(each.params, ignore_eos=idx % 3 == 0))
        for idx, each in enumerate(requests)
    ]
    config = EngineConfig(max_batch_size=6, max_model_len=512, kv_cache_bytes=1 << 28, block_size=16)
    plain = served_as_they_come(Engine(source, device=CUDA, config=config), requests)
    assert {reason for _, reason, _ in plain.values()} == {"stop", "length"}
    ahead.clear()
    for k in (1, 4, 7):
        engine = Engine(source, device=CUDA, config=replace(config, speculative=Speculative(proposer, k=k)))
        for _ in range(2):  # with graphs captured on the way, and with all of them there
            assert served_as_they_come(engine, requests) == plain
        assert sum(ahead) > 20
        ahead.clear()
    requests = [replace(each, params=replace(each.params, ignore_eos=True)) for each in requests]
    for rate in (None, 0.7):
        found = []
        for sync in (False, True):
            speculative = Speculative(proposer, k=4, forced_rate=rate)
            engine = Engine(source, device=CUDA, config=replace(config, sync=sync, speculative=speculative))
            tokens = [each.tokens for each in engine.generate(requests)]
            assert engine.acceptance is not None
            found.append(
                (tokens, engine.acceptance.num_rows, engine.acceptance.proposed, engine.acceptance.accepted)
            )
            assert bool(ahead) != sync
            ahead.clear()
        assert found[0] == found[1]


def test_draft_steps_launched_ahead_give_what_plain_steps_give(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_ahead_changes_nothing(DraftModel(make_source("W4A16_G128", num_layers=2)), monkeypatch)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_full_cache_ends_runs_and_all_requests_end_as_they_should(rule: Any) -> None:
    source = make_source("BF16")
    config = EngineConfig(
        max_batch_size=4,
        max_model_len=192,
        block_size=16,
        speculative=Speculative(DraftModel(source), k=4, rule=rule),
    )
    position = (
        2 * 4 * 2 * 2 * 128 * 2
    )  # of the model and of its draft: layers, keys and values, heads, dimensions, bytes
    engine = Engine(source, device=CUDA, config=replace(config, kv_cache_bytes=20 * 16 * position))
    requests = [
        Request(str(idx), (idx, 1, 2), SamplingParams(100 + idx, temperature=0.9, seed=idx, ignore_eos=True))
        for idx in range(8)
    ]
    assert [len(each.tokens) for each in engine.generate(requests)] == [100 + idx for idx in range(8)]
    assert engine.num_preemptions > 0
    assert engine.acceptance is not None
    assert engine.acceptance.acceptance_length > 3


def test_a_draft_that_is_the_model_itself_is_always_right() -> None:
    source = make_source("BF16")
    requests = [
        Request(str(idx), (idx, 1, 2), SamplingParams(21, seed=idx, ignore_eos=True)) for idx in range(4)
    ]
    config = EngineConfig(
        max_batch_size=4,
        max_model_len=512,
        kv_cache_bytes=1 << 28,
        speculative=Speculative(DraftModel(source), k=4),
    )
    engine = Engine(source, device=CUDA, config=config)
    engine.generate(requests)
    assert engine.acceptance is not None
    assert engine.acceptance.acceptance_length == 5


def test_rejection_sampling_in_graphs_runs_and_keeps_most_of_a_draft_that_is_the_model() -> None:
    source = make_source("BF16")
    speculative = Speculative(DraftModel(source), k=4, rule="rejection")
    config = EngineConfig(
        max_batch_size=4, max_model_len=512, kv_cache_bytes=1 << 28, speculative=speculative
    )
    engine = Engine(source, device=CUDA, config=config)
    engine.generate(
        [
            Request(str(idx), (idx, 1, 2), SamplingParams(41, temperature=1.0, seed=idx, ignore_eos=True))
            for idx in range(8)
        ]
    )
    assert engine.acceptance is not None
    assert engine.acceptance.acceptance_length > 4.9

"""Prompts that begin alike share what a head has computed of them: it proposes what it proposes without the
prefix cache, and the model's tokens and logits stay as they are."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from compress.models.delta_net import DeltaNet
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.mamba2 import Mamba2
from compress.models.random_mtp import random_mtp
from compress.models.weights import MemorySource
from compress.runtime.block_pool import BlockPool
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.generation import Generation
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.prefix_cache import PrefixCache
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel, DraftModelProposer
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.mtp import Mtp
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from tests.support.scripted_proposer import acceptance_of, checked_proposals
from tests.support.slow import slow
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime import test_speculative_eagle3, test_speculative_mtp
from tests.unit.runtime.test_speculative_ahead import Ahead, make_late
from tests.unit.runtime.test_speculative_engine import assert_same_bits, record

CPU = torch.device("cpu")
SIZE = 16
K = 3
VOCAB = 101
WIDE = DeltaNet(4, 2, 8, 12, 4)
LATENTS = tiny_shape(
    num_kv_heads=4,
    rope=Rope(10000.0, rotary_dim=8),
    latent=Latent(q_rank=0, kv_rank=20, rope_dim=8, value_dim=16, interleaved=False),
)
LAYERS: dict[str, tuple[Any, ...]] = {
    "full": (tiny_shape(), tiny_shape(num_kv_heads=1)),
    "latents": (LATENTS, LATENTS),
    "windows": (tiny_shape(), tiny_shape(window=21)),
    "delta nets": (
        tiny_shape(recurrence=WIDE, rope=None),
        tiny_shape(),
        tiny_shape(recurrence=WIDE, rope=None),
    ),
    "mamba": (
        tiny_shape(recurrence=Mamba2(4, 2, 16, 12, 4, conv_bias=True), rope=None),
        tiny_shape(),
    ),
}
WITH_STATES = ("delta nets", "mamba")


def source_of(layers: str) -> MemorySource:
    return tiny_source(layers=LAYERS[layers], max_position=1024)


def head_of(kind: str, source: MemorySource) -> tuple[ProposerOptions, Any]:
    """The options of a head, and what it is to propose."""
    if kind == "mtp":
        mtp = random_mtp(source.arch, device=CPU, dtype=torch.float32)
        return Mtp(mtp), test_speculative_mtp.Oracle(source, mtp).continuation
    eagle3 = random_eagle3(
        source.arch, device=CPU, dtype=torch.float32, draft_vocab_size=VOCAB - 7, layer_ids=(0, 1, 2), seed=3
    )
    return Eagle3(eagle3), test_speculative_eagle3.Oracle(source, eagle3).continuation


def engine_of(source: MemorySource, proposer: ProposerOptions | None, **changes: Any) -> Engine:
    speculative = None if proposer is None else Speculative(proposer, k=K)
    facts = {"prefix_cache": True, "max_batch_size": 4, "speculative": speculative, **changes}
    return Engine(source, device=CPU, config=EngineConfig(**facts))


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def request(name: int, prompt: tuple[int, ...], max_tokens: int = 7, temperature: float = 0.0) -> Request:
    params = SamplingParams(max_tokens, temperature=temperature, ignore_eos=True, logprobs=True, seed=name)
    return Request(str(name), prompt, params)


SHARED = ids(5 * SIZE, 0)
PROMPTS = [
    SHARED + ids(7, 1),
    SHARED + ids(40, 2),
    SHARED[: 3 * SIZE] + ids(20, 3),  # departs at the end of a block
    SHARED,
    SHARED + ids(7, 1)[:2],  # fewer than K + 1 tokens follow its last full block
    ids(50, 5),
    SHARED + ids(7, 1),
    SHARED[: 3 * SIZE + 5] + ids(90, 6),
]
LONG = ids(20 * SIZE + 5, 7)
LONG_PROMPTS = [
    LONG + ids(300, 8),
    LONG + ids(30, 9),
    LONG + ids(290, 10),
    LONG + ids(9, 11),
    LONG + ids(300, 8) + ids(7, 12),
    LONG,
    LONG[: 20 * SIZE + 2],
    LONG[: 20 * SIZE] + ids(50, 13),  # departs at the end of a block
]
"""Prompts of which states are saved."""


def prompts_of(layers: str) -> list[tuple[int, ...]]:
    return LONG_PROMPTS if layers in WITH_STATES else PROMPTS


EACH = pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("eagle3", "full"),
        ("mtp", "full"),
        ("mtp", "latents"),
        ("mtp", "windows"),
        ("mtp", "delta nets"),
        slow("eagle3", "delta nets"),
        slow("mtp", "mamba"),
    ],
)


@EACH
@pytest.mark.one_in(2)
def test_a_head_proposes_what_its_module_says_after_prefixes_too(kind: str, layers: str) -> None:
    source = source_of(layers)
    options, continuation = head_of(kind, source)
    requests = [request(idx, prompt, 4) for idx, prompt in enumerate(prompts_of(layers))]
    engine = engine_of(source, options, max_step_tokens=400)
    assert checked_proposals(engine, continuation, requests, K) > 0
    hits = engine.counts.prefix_hits
    assert hits > 0
    assert checked_proposals(engine, continuation, requests, K) > 0  # with more in the cache
    assert engine.counts.prefix_hits > 2 * hits or layers in WITH_STATES


@pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])
@EACH
@pytest.mark.one_in(3)
def test_a_head_has_the_keys_and_values_that_it_has_without_the_cache(
    kind: str, layers: str, together: bool
) -> None:
    source = source_of(layers)
    head, _ = head_of(kind, source)
    requests = [request(idx, prompt, 4) for idx, prompt in enumerate(prompts_of(layers))]
    _, expected = served(engine_of(source, head, prefix_cache=False), requests, 0)
    engine = engine_of(source, head, max_step_tokens=400)
    for group in [requests] if together else [[each] for each in requests]:
        assert compare(served(engine, group, 0)[1], expected) > 0
    hits = engine.counts.prefix_hits
    assert compare(served(engine, requests, 1)[1], expected) > 2 * len(requests)
    assert engine.counts.prefix_hits > 2 * hits > 0 or layers in WITH_STATES


def test_the_last_tokens_that_a_head_reads_again_are_never_taken_from_the_cache() -> None:
    source = source_of("full")
    for length, found in ((0, 64), (K, 64), (K + 1, 80), (2 * SIZE, 96)):
        engine = engine_of(source, head_of("eagle3", source)[0])
        prompt = SHARED + ids(length, 20)
        first, second = (engine.generate([request(0, prompt)])[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, found)
        assert first.tokens == second.tokens


def test_prompts_that_depart_at_the_end_of_a_block_share_those_before_it() -> None:
    """The head's row of the block's last token reads the token after it."""
    source = source_of("full")
    for place, found in ((3 * SIZE, 2 * SIZE), (3 * SIZE + 1, 3 * SIZE)):
        engine = engine_of(source, head_of("mtp", source)[0])
        other = (SHARED[place] + 1) % VOCAB
        prompts = SHARED, (*SHARED[:place], other, *ids(30, 21))
        finished = [engine.generate([request(idx, each)])[0] for idx, each in enumerate(prompts)]
        assert [each.cached_tokens for each in finished] == [0, found]


@pytest.mark.parametrize("kv_format", [None, "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.one_in(3)
def test_tokens_and_logits_have_the_bits_of_plain_decoding_with_the_same_prefixes(
    kind: str, kv_format: str | None
) -> None:
    source = source_of("full")
    prompts = [SHARED[: each + 3] + ids(9 + each, each) for each in (80, 32, 70, 16, 70, 48, 5)]
    requests = [
        request(idx, prompt, 9, temperature=0.7 * (idx % 2)) for idx, prompt in enumerate(prompts * 2)
    ]
    plain, speculating = (
        engine_of(source, options, kv_format=kv_format) for options in (None, head_of(kind, source)[0])
    )
    for group in (requests[:1], requests[1:7], requests[7:]):
        expected, found = record(plain, group), record(speculating, group)
        cached = [[each.cached_tokens for each in one.finished] for one in (expected, found)]
        assert cached[0] == cached[1]
        assert found.results == expected.results
        assert_same_bits(found.rows, expected.rows)
    assert speculating.counts.prefix_hits > 500
    assert sum(acceptance_of(speculating).proposed) > 0


@pytest.mark.parametrize("layers", WITH_STATES)
def test_with_states_tokens_and_logits_have_the_bits_of_other_speculation(layers: str) -> None:
    """More rows of prompts go one by one where states are kept for verifications."""
    source = source_of(layers)
    requests = [request(idx, prompt) for idx, prompt in enumerate(LONG_PROMPTS[:-2])]
    lookup, head = (engine_of(source, each) for each in (NGram(), head_of("mtp", source)[0]))
    for each in requests:
        expected, found = record(lookup, [each]), record(head, [each])
        assert found.finished[0].cached_tokens == expected.finished[0].cached_tokens
        assert found.results == expected.results
        common = found.rows.keys() & expected.rows.keys()
        assert_same_bits(
            {key: found.rows[key] for key in common}, {key: expected.rows[key] for key in common}
        )
        assert len(common) >= 7
    assert head.counts.prefix_hits > 1000


@dataclass(frozen=True)
class Proposed:
    """What was proposed after the tokens of a request, and the keys and values by which."""

    tokens: list[int]
    pages: list[torch.Tensor]


Steps = dict[tuple[str, int], Proposed]
"""By the request and the number of its tokens."""


def pages_of_all(proposer: Any) -> list[torch.Tensor]:
    """Return the keys and values, or latents, of all blocks."""
    caches: Any = [proposer._cache] if isinstance(proposer, DraftModelProposer) else proposer._kv_caches
    return [
        tensor for cache in caches for idx in range(len(cache._layers)) for tensor in cache.layer(idx).tensors
    ]


def pages_of(proposer: Any, generation: Generation) -> list[torch.Tensor]:
    """Return the keys and values, or latents, of all tokens but the last, whose next one is not known."""
    return [
        each[:, generation.blocks].flatten(1, 2)[:, : len(generation.tokens) - 1]
        for each in pages_of_all(proposer)
    ]


def served(
    engine: Engine, requests: Sequence[Request], seed: int, *, cancelled: str = ""
) -> tuple[dict[str, Finished], Steps]:
    """What came of requests that arrive between steps; one is cancelled when it has two tokens."""
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    propose = proposer.propose
    proposed: Steps = {}

    def noted(generations: Sequence[Generation], state: Any) -> Any:
        drafts = propose(generations, state)
        for each, tokens in zip(generations, drafts.tokens_RK.tolist(), strict=True):
            proposed[each.request.id, len(each.tokens)] = Proposed(tokens, pages_of(proposer, each))
        return drafts

    proposer.propose = noted  # type: ignore[method-assign]
    rng = random.Random(seed)
    waiting = deque(requests)
    finished = list[Finished]()
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.4):
            engine.add(waiting.popleft())
        finished += engine.step()
        if cancelled in engine._unfinished and len(engine.tokens_of(cancelled)) > 1:
            engine.cancel(cancelled)
    proposer.propose = propose  # type: ignore[method-assign]
    assert engine.counts.reserved_positions == engine.counts.live_tokens == 0
    return {each.id: each for each in finished}, proposed


def compare(found: Steps, expected: Steps, *, atol: float = 1e-4) -> int:
    """Return how many steps both have; these have the same proposals, of the same keys and values."""
    both = found.keys() & expected.keys()
    assert {key: found[key].tokens for key in both} == {key: expected[key].tokens for key in both}
    for key in both:
        for own, other in zip(found[key].pages, expected[key].pages, strict=True):
            torch.testing.assert_close(
                own, other, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
            )
    return len(both)


def workload(seed: int, *, with_states: bool) -> list[Request]:
    """Prompts that begin like earlier ones, of which some go on with their answers' lengths."""
    rng = random.Random(seed)
    prompts = [ids(330 if with_states else 40, 100 + seed)]
    for idx in range(7 if with_states else 13):
        begin = rng.choice(prompts)
        kept = rng.choice([len(begin), rng.randrange(len(begin)), len(begin) // SIZE * SIZE])
        longest = 700 if with_states else 150
        prompts.append((begin[:kept] + ids(rng.choice([1, 2, 5, 16, 40, 90]), 1000 * seed + idx))[:longest])
    return [
        request(idx, prompt, rng.choice([1, 2, 5, 9, 20]), temperature=rng.choice([0.0, 0.8]))
        for idx, prompt in enumerate(prompts)
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_step_tokens": 37},
    "few blocks": {"num_blocks": 15},
    "few blocks and chunks": {"num_blocks": 15, "max_step_tokens": 40},
    "FP8": {"kv_format": "FP8_TOKEN_HEAD"},
    "INT4 and chunks": {"kv_format": "INT4_TOKEN_HEAD", "max_step_tokens": 64},
    "shortest first": {"order": "shortest", "max_batch_size": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("kind", "layers"), [("eagle3", "full"), ("mtp", "latents"), ("mtp", "delta nets")])
@pytest.mark.one_in(20)
def test_any_workload_has_the_tokens_and_the_proposals_that_it_has_without_the_cache(
    kind: str, layers: str, options: str
) -> None:
    source = source_of(layers)
    changes = dict(OPTIONS[options])
    if "kv_format" in changes and layers == "latents":
        changes["kv_format"] = "FP8_TOKEN_HEAD"
    with_states = layers in WITH_STATES
    head, _ = head_of(kind, source)
    if (num_blocks := changes.pop("num_blocks", None)) is not None:
        roomy = engine_of(source, head)
        assert roomy._speculation is not None
        of_token = roomy.kv_bytes_per_token + roomy._speculation._proposer.kv_bytes_per_token
        changes |= {"kv_cache_bytes": (num_blocks * (4 if with_states else 1)) * SIZE * of_token}
    changes["max_model_len"] = 800 if with_states else 190
    evictions = hits = common = 0
    for seed in range(2):
        requests = workload(seed, with_states=with_states)
        results = []
        for prefix_cache in (False, True):
            engine = engine_of(source, head, prefix_cache=prefix_cache, **changes)
            results.append(served(engine, requests, seed, cancelled="6"))
        (plain, expected), (found, proposed) = results
        assert plain.keys() == found.keys()
        assert all(each.tokens == found[name].tokens for name, each in plain.items())
        # A code of the model's cache may be the next one where a prompt is computed in other chunks.
        common += compare(proposed, expected, atol=0.5 if "kv_format" in changes else 1e-4)
        hits += engine.counts.prefix_hits
        evictions += engine.counts.evictions
    assert common > 50
    assert hits > 300
    assert (evictions > 0) == (num_blocks is not None)


@pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize(("kind", "layers"), [("eagle3", "full"), slow("mtp", "delta nets")])
def test_steps_launched_ahead_change_no_token(kind: str, layers: str, late: bool) -> None:
    source = source_of(layers)
    head, _ = head_of(kind, source)
    with_states = layers in WITH_STATES
    for seed in range(2):
        requests = workload(seed, with_states=with_states)
        plain, _ = served(engine_of(source, head, prefix_cache=False), requests, seed)
        config = EngineConfig(prefix_cache=True, max_batch_size=4, speculative=Speculative(head, k=K))
        engine = Ahead(source, device=CPU, config=config)
        found, _ = served(make_late(engine) if late else engine, requests, seed)
        assert {name: each.tokens for name, each in found.items()} == {
            name: each.tokens for name, each in plain.items()
        }
        assert engine.counts.prefix_hits > 100


def test_the_next_turn_of_a_conversation_finds_the_answer_and_what_the_head_has_of_it() -> None:
    source = source_of("full")
    head, continuation = head_of("mtp", source)
    engine = engine_of(source, head)
    (first,) = engine.generate([request(0, SHARED, 40)])
    turn = request(1, SHARED + first.tokens + ids(9, 22))
    assert checked_proposals(engine, continuation, [turn], K) > 0
    assert engine.counts.prefix_hits == 112  # of 120 tokens; those that a step may write again are not kept


@pytest.mark.parametrize(
    ("begin", "length", "rate"), [(80, 38, 0.7), (80, 45, 0.7), (83, 33, 1.0), (84, 33, 1.0)]
)
def test_kept_proposals_of_an_answer_leave_the_rows_of_the_models_hidden_states(
    begin: int, length: int, rate: float
) -> None:
    """Several tokens of a step are kept, all of the last step's with a rate of 1. The next turn finds what
    the head has made of those before."""
    source = source_of("full")
    head, _ = head_of("mtp", source)
    config = EngineConfig(prefix_cache=True, speculative=Speculative(head, k=K, forced_rate=rate))
    engine = Engine(source, device=CPU, config=config)
    prompt = ids(begin, 0)
    (first,) = engine.generate([request(0, prompt, length)])
    assert acceptance_of(engine).acceptance_length > 1.5
    turn = [request(1, prompt + first.tokens + ids(9, 22), 1 + K)]
    _, found = served(engine, turn, 0)
    _, expected = served(engine_of(source, head, prefix_cache=False), turn, 0)
    assert engine.counts.prefix_hits == (begin + length - K - 2) // SIZE * SIZE
    key = "1", len(turn[0].prompt) + 1
    assert compare({key: found[key]}, expected) == 1


@pytest.mark.parametrize("layers", ["full", "delta nets"])
def test_completions_of_one_prompt_are_those_of_separate_requests(layers: str) -> None:
    source = source_of(layers)
    head, _ = head_of("mtp", source)
    prompt = LONG + ids(50, 23)
    requests = [request(idx, prompt, 9, temperature=0.8 * (idx > 0)) for idx in range(4)]
    _, expected = served(engine_of(source, head, prefix_cache=False), requests, 0)
    engine = engine_of(source, head, max_step_tokens=512)
    finished, found = served(engine, [replace(each, group="one") for each in requests], 0)
    assert compare(found, expected) == len(expected)
    assert [finished[str(idx)].cached_tokens for idx in range(4)] == [
        0,
        *[368 if layers == "full" else 352] * 3,
    ]


def test_a_preempted_request_goes_on_from_what_it_had() -> None:
    source = source_of("full")
    head, continuation = head_of("eagle3", source)
    roomy = engine_of(source, head)
    assert roomy._speculation is not None
    of_token = roomy.kv_bytes_per_token + roomy._speculation._proposer.kv_bytes_per_token
    engine = engine_of(source, head, max_model_len=128, kv_cache_bytes=15 * SIZE * of_token)
    requests = [request(idx, ids(40 + idx, 30 + idx), 40) for idx in range(4)]
    assert checked_proposals(engine, continuation, requests, K) > 30
    assert engine.num_preemptions > 0
    assert engine.counts.reserved_positions == 0


def test_a_draft_without_states_proposes_for_a_model_with_saved_states() -> None:
    """Its pages of a first block are copied with the model's."""
    source = source_of("delta nets")
    draft = DraftModel(tiny_source(layers=LAYERS["full"], max_position=1024))
    requests = [request(idx, prompt) for idx, prompt in enumerate(LONG_PROMPTS)]
    results = []
    for prefix_cache in (False, True):
        engine = engine_of(source, draft, prefix_cache=prefix_cache)
        results.append([served(engine, [each], 0) for each in requests])
        assert (engine.counts.prefix_hits > 1000) is prefix_cache
    for (plain, expected), (found, proposed) in zip(*results, strict=True):
        assert [each.tokens for each in found.values()] == [each.tokens for each in plain.values()]
        assert compare(proposed, expected) == len(expected) > 0


def test_a_block_with_rows_of_a_head_is_found_by_its_tokens_and_the_next() -> None:
    pool = BlockPool(9)
    cache = PrefixCache(pool, block_size=4, salt="", num_rewritten_rows=3, num_tokens_after=1)

    def generation(*prompt: int) -> Generation:
        return Generation(replace(request(0, prompt), id=str(prompt)), 0.0, list(prompt))

    first = generation(*range(14))
    first.blocks = pool.allocate(4)
    cache.insert(first, 14)
    assert first.num_cached_blocks == 2  # the last three of fourteen tokens are in no cached block
    assert cache.find(first, long=True) == first.blocks[:2]
    assert cache.find(generation(*range(9), 7, 7), long=True) == first.blocks[:2]
    assert cache.find(generation(*range(10)), long=True) == first.blocks[:1]
    assert cache.find(generation(*range(8), 7, 7, 7), long=True) == first.blocks[:1]


def test_the_cache_counts_the_bytes_of_a_head_in_its_blocks() -> None:
    source = source_of("full")
    head, _ = head_of("mtp", source)
    sizes = [engine_of(source, each, kv_cache_bytes=1 << 20)._pool.num_free for each in (None, head)]
    of_model, of_both = (
        kv_bytes_per_token(source.arch, "F32") + own
        for own in (0, kv_bytes_per_token(head.head.arch, "F32") + 2 * (K + 1) * 56 * 4 // SIZE)  # type: ignore[attr-defined]
    )
    assert sizes == [(1 << 20) // (SIZE * each) - 1 for each in (of_model, of_both)]


@pytest.mark.parametrize("kind", ["draft model", "eagle3", slow("mtp")])
def test_no_step_writes_to_the_pages_of_a_cached_block(kind: str) -> None:
    """Prompts end within a block and at its end, where the row of its last token is written again."""
    source = source_of("full")
    draft = DraftModel(source)
    engine = engine_of(source, draft if kind == "draft model" else head_of(kind, source)[0])
    assert engine._speculation is not None
    proposer: Any = engine._speculation._proposer
    propose = proposer.propose
    num_checked = 0

    def kept(generations: Sequence[Generation], state: Any) -> Any:
        nonlocal num_checked
        cached = sorted(engine._pool._cached)
        for tensor in pages_of_all(proposer):
            tensor[:, cached] = 7.0
        drafts = propose(generations, state)
        for tensor in pages_of_all(proposer):
            assert (tensor[:, cached] == 7.0).all()
        num_checked += len(cached)
        return drafts

    proposer.propose = kept
    for idx, length in enumerate((SIZE, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 3 * SIZE, 3 * SIZE + K)):
        engine.generate([request(idx, ids(length, idx), 2 * SIZE)])
    assert num_checked > 50

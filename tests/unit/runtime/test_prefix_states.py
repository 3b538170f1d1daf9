"""Models with delta nets go on from saved states: fewer tokens are computed, and results stay as they are."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import SavedState
from compress.models.delta_net import DeltaNet
from compress.models.latent import Latent
from compress.models.lightning import Lightning
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.relative_logits import RelativeLogits
from compress.models.weights import MemorySource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token, slot_bytes
from compress.runtime.prefix_states import LEAST_TOKENS
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.test_engine import CPU, Recorder, tokens

SIZE = 16
WIDE = DeltaNet(4, 2, 8, 12, 4)
HYBRID = tiny_shape(recurrence=WIDE, rope=None), tiny_shape(), tiny_shape(recurrence=WIDE, rope=None)
OF_CHANNELS = tiny_shape(recurrence=DeltaNet(4, 4, 8, 12, 4, rank=6, by_channel=True), rope=None)
LATENT = Latent(q_rank=0, kv_rank=20, rope_dim=8, value_dim=16, interleaved=False)
LAYERS = {
    "beside latents": (OF_CHANNELS, tiny_shape(rope=None, num_kv_heads=4, latent=LATENT), OF_CHANNELS),
    "hybrid": HYBRID,
    "two kinds": (*HYBRID, tiny_shape(recurrence=DeltaNet(3, 1, 16, 8, 2), rope=None)),
    "joined to attention": (
        tiny_shape(recurrence=Mamba2(4, 2, 16, 12, 4, conv_bias=True), joint=True),
        tiny_shape(recurrence=WIDE, joint=True),
    ),
    "selective state spaces": (
        tiny_shape(recurrence=Mamba1.of(56, 12, 4, 5, conv_bias=True), rope=None),
        tiny_shape(),
        tiny_shape(recurrence=Mamba1.of(40, 16, 3, 8, conv_bias=False, normed=False), rope=None),
    ),
    "constant decays": (
        tiny_shape(recurrence=replace(Lightning.of(4, 16), decay_rate=0.9), rope=None),
        tiny_shape(),
        tiny_shape(recurrence=replace(Lightning.of(4, 16), decay_rate=0.1), rope=None),
    ),
    "delta nets alone": (tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 1), rope=None),) * 2,
}


def source_of(layers: str = "hybrid") -> MemorySource:
    return tiny_source(layers=LAYERS[layers], max_position=2048)


def engine_of(layers: str = "hybrid", **changes: object) -> Engine:
    facts: dict[str, object] = {"prefix_cache": True, "max_model_len": 2048, **changes}
    return Engine(source_of(layers), device=CPU, config=EngineConfig(**facts))  # type: ignore[arg-type]


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(101, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 5) -> Request:
    params = SamplingParams(max_tokens, ignore_eos=True, logprobs=True, seed=int(name))
    return Request(name, prompt, params)


SHARED = ids(20 * SIZE, 0)
"""320 tokens."""
REQUESTS = [
    request("0", SHARED + ids(300, 1)),
    request("1", SHARED + ids(30, 2)),
    request("2", SHARED + ids(290, 3)),
    request("3", SHARED + ids(9, 4)),
    request("4", SHARED + ids(300, 1) + ids(7, 5)),
    request("5", ids(40, 6)),
]


SIZE_OF_BLOCK = 16 * kv_bytes_per_token(source_of().arch, "F32")
FEW_BYTES = 220 * SIZE_OF_BLOCK


def alone(engine: Engine, requests: list[Request]) -> list[Finished]:
    return [engine.generate([each])[0] for each in requests]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("speculative", [None, Speculative(NGram(), k=3)], ids=["plain", "speculative"])
@pytest.mark.one_in(8)
def test_results_are_those_without_saved_states(
    layers: str, together: bool, speculative: Speculative | None
) -> None:
    found: list[tuple[dict[str, tuple[int, ...]], dict[tuple[int, int], Tensor]]] = []
    for prefix_cache in (False, True):
        recorder = Recorder()
        engine = engine_of(layers, prefix_cache=prefix_cache, speculative=speculative, max_step_tokens=400)
        recorder.watch(engine)
        finished = engine.generate(REQUESTS) if together else alone(engine, REQUESTS)
        found.append((tokens(finished), recorder.take()))
        assert (engine.counts.prefix_hits > 0) is prefix_cache
        assert engine.counts.reserved_positions == 0
    (plain, plain_rows), (shared, shared_rows) = found
    assert shared == plain
    assert plain_rows.keys() == shared_rows.keys()
    for key, row in plain_rows.items():
        assert torch.allclose(shared_rows[key], row, rtol=1e-4, atol=1e-4)


def test_states_are_saved_at_the_end_of_a_prompt_and_where_one_departs() -> None:
    engine = engine_of()
    cached = [each.cached_tokens for each in alone(engine, REQUESTS)]
    # The first two find nothing, and the second leaves the state where it departs from the first; the fifth
    # goes on from the last full block of the first.
    assert cached == [0, 0, 320, 320, 608, 0]
    assert engine.counts.prefix_hits == 320 + 320 + 608


def test_of_prompts_that_depart_together_only_one_is_cut() -> None:
    engine = engine_of()
    engine.generate([request("0", SHARED + ids(60, 1))])
    for idx in range(1, 5):
        engine.add(request(str(idx), SHARED + ids(40, 1 + idx), max_tokens=1))
    assert [len(engine.step()), len(engine.step())] == [3, 1]
    (third,) = engine.generate([request("5", SHARED + ids(40, 9))])
    assert third.cached_tokens == 320


def test_the_next_turn_of_a_conversation_goes_on_from_its_last_prompt() -> None:
    engine = engine_of()
    (first,) = engine.generate([request("0", SHARED, max_tokens=20)])
    conversation = SHARED + first.tokens + ids(400, 5)
    (second,) = engine.generate([request("1", conversation)])
    assert second.cached_tokens == 288  # the model sees the last token of a prompt
    (third,) = engine.generate([request("2", conversation + second.tokens + ids(9, 6))])
    assert third.cached_tokens == 736
    plain = engine_of(prefix_cache=False)
    assert plain.generate([request("1", conversation)])[0].tokens == second.tokens


def test_a_prompt_takes_one_step_and_a_short_one_saves_nothing() -> None:
    engine = engine_of()
    for length, cached in ((LEAST_TOKENS, 0), (LEAST_TOKENS + 1, LEAST_TOKENS)):
        for idx in range(2):
            engine.add(request(str(idx), ids(length, length), max_tokens=1))
            (done,) = engine.step()
            assert done.cached_tokens == cached * idx


def test_where_the_budget_cuts_a_long_prompt_its_state_is_saved() -> None:
    engine = engine_of(max_step_tokens=512)
    long = ids(1800, 1)
    other = long[:1100] + ids(50, 2)
    assert [each.cached_tokens for each in alone(engine, [request("0", long), request("1", other)])] == [
        0,
        1024,
    ]


def test_states_that_a_budget_left_are_evicted_first_and_then_the_least_recent() -> None:
    prompts = [ids(300, 1), ids(300, 2), ids(1500, 3), ids(300, 2), ids(300, 1)]
    # There are two places: of the long prompt's states each evicts the one before it, and the first one that
    # of the first prompt.
    engine = engine_of(max_step_tokens=512, max_batch_size=2, kv_cache_bytes=FEW_BYTES)
    requests = [request(str(idx), each) for idx, each in enumerate(prompts)]
    assert [each.cached_tokens for each in alone(engine, requests)] == [0, 0, 0, 288, 0]


def test_the_last_state_of_a_prompt_is_kept_where_a_budget_left_it() -> None:
    engine = engine_of(max_step_tokens=512, max_batch_size=3, kv_cache_bytes=FEW_BYTES)
    long = ids(1100, 3)
    prompts = [ids(300, 1), ids(300, 2), long, ids(300, 4), long + ids(30, 5)]
    requests = [request(str(idx), each) for idx, each in enumerate(prompts)]
    assert [each.cached_tokens for each in alone(engine, requests)] == [0, 0, 0, 0, 1024]


def test_blocks_that_were_evicted_are_cached_again_with_their_state() -> None:
    """Two prompts that begin alike run at once, so that only one's blocks of the beginning are cached."""
    engine = engine_of(max_batch_size=2, kv_cache_bytes=FEW_BYTES, max_model_len=1024)
    long = SHARED + ids(300, 1)
    engine.generate([request("0", SHARED + ids(9, 2)), request("1", long)])
    max_tokens = 480
    while not engine.counts.evictions:  # these save nothing, and take some blocks of the beginning
        engine.generate([request(str(idx), ids(250, idx), max_tokens) for idx in range(2)])
        max_tokens += SIZE
    found = [engine.generate([request(str(idx), long)])[0].cached_tokens for idx in range(2)]
    assert found == [0, 608]


def test_a_preempted_request_goes_on_from_its_saved_state(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []
    restore = KVCache.restore_states

    def note(cache: KVCache, states: Sequence[SavedState]) -> None:
        restored.extend(each.num_tokens for each in states)
        restore(cache, states)

    monkeypatch.setattr(KVCache, "restore_states", note)
    changes = {"max_model_len": 480, "max_batch_size": 3, "kv_cache_bytes": FEW_BYTES // 3}
    requests = [request(str(idx), ids(310 + idx, 30 + idx), max_tokens=120) for idx in range(3)]
    engines = [engine_of(prefix_cache=on, **changes) for on in (False, True)]
    plain, shared = (tokens(each.generate(requests)) for each in engines)
    assert engines[1].counts.preemptions > 0
    assert restored
    assert set(restored) == {288}
    assert shared == plain


def test_other_completions_of_a_prompt_go_on_from_the_state_of_the_first() -> None:
    prompt = SHARED + ids(50, 7)
    requests = [replace(request(str(idx), prompt), group="one") for idx in range(4)]
    engine = engine_of(max_step_tokens=512)
    for number in range(2):
        for each in requests:
            engine.add(each)
        engine.add(request("9", ids(20, number)))
        running = []
        finished = []
        while engine.has_work:
            finished += engine.step()
            running.append(engine.counts.num_running)
        # The first one's prompt takes a step, after which all run; the second time all do at once.
        assert running[: 2 - number] == [1, 5][number:]
        finished.sort(key=lambda each: each.id)
        assert [each.cached_tokens for each in finished] == [352 * number, 352, 352, 352, 0]
        expected = tokens(engine_of(prefix_cache=False).generate(requests))
        assert {name: found for name, found in tokens(finished).items() if name != "9"} == expected


def test_a_draft_with_states_of_its_own_leaves_nothing_to_save() -> None:
    draft = Speculative(DraftModel(source_of("two kinds")), k=2)
    engine = engine_of(speculative=draft)
    assert [each.cached_tokens for each in alone(engine, REQUESTS[:1] * 2)] == [0, 0]


def test_places_are_as_many_as_requests_and_grow_with_the_cache() -> None:
    config = EngineConfig(max_batch_size=6)
    assert config.num_saved(1000) == 6
    assert config.num_saved(40_960) == 11


@pytest.mark.parametrize("layers", ["hybrid", "delta nets alone"])
def test_a_cache_that_fills_a_gpu_leaves_room_for_all_its_states(
    layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 24
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    arch = source_of(layers).arch
    of_token, of_state = kv_bytes_per_token(arch, "F32"), slot_bytes(arch, 1)
    config = EngineConfig(max_batch_size=40)
    sizes = {"bytes_per_token": of_token, "state_bytes": of_state}
    found = [
        config.size_cache(arch, torch.float32, torch.device("cuda"), **sizes, saved_bytes=saved)
        for saved in (0, of_state)
    ]
    num_blocks = found[1][1]
    assert num_blocks > 1
    assert num_blocks < found[0][1] or of_token == 0
    positions = (num_blocks - 1) * 64
    of_blocks = (positions + 41 * 64) * of_token
    assert of_blocks + 41 * of_state + config.num_saved(positions) * of_state <= 0.8 * free


def test_a_cache_that_fills_a_gpu_leaves_room_for_terms_of_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 26
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    config = EngineConfig(max_step_tokens=1024, max_batch_size=512)
    found = []
    for relative in (None, RelativeLogits(4, 500)):
        arch = tiny_source(layers=(tiny_shape(rope=None, relative=relative),)).arch
        of_token = kv_bytes_per_token(arch, "F32")
        _, num_blocks = config.size_cache(arch, torch.float32, torch.device("cuda"), bytes_per_token=of_token)
        found.append(num_blocks * of_token * 64)
    heads = tiny_shape().num_heads
    assert found[0] - found[1] == pytest.approx(1024 * heads * 504 * 4, rel=0.01)

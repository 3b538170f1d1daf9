"""An assistant in the engine: it changes no bit, and proposes the same in batches, graphs, chunks, with the
prefix cache, for requests of one group and after preemption.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.api import _speculative, load_engine
from compress.errors import UsageError
from compress.export import open_checkpoint
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.models.assistant import Assistant, OrderedEmbeddings
from compress.models.assistant_reader import read_assistant
from compress.models.random_assistant import random_assistant
from compress.models.random_source import RandomSource
from compress.models.weights import Weights, WeightSource
from compress.quant.kv import FP8_STATIC, KV_SCALES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KV_FORMATS, kv_bytes_per_token
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative import assistant as serving
from compress.runtime.speculative import decoding
from compress.runtime.speculative.assistant import AssistantModel, AssistantProposer
from compress.runtime.speculative.speculation import Speculative
from tests.support.rehearsed_graphs import RehearsedGraphs
from tests.support.scripted_proposer import acceptance_of, checked_proposals
from tests.support.slow import slow
from tests.support.tiny_assistant import CLUSTERS, TARGET, VOCAB, Pair, saved_pair
from tests.unit.runtime.test_speculative_eagle3 import greedy
from tests.unit.runtime.test_speculative_engine import assert_same_bits, make_requests, make_source, record

CPU = torch.device("cpu")
STORED_FORMATS = (None, *(each for each in KV_FORMATS if each not in DENSE_FORMATS.values()))
"""Formats of the cache: that of the dtype, and those of fewer bits."""
ORDERED = OrderedEmbeddings(num_centroids=61, top_k=20)


def requests(num: int, *, max_tokens: int = 14) -> list[Request]:
    """Requests of the vocabulary of a tiny Gemma 4, greedy and drawn."""
    made = make_requests(num, max_tokens=max_tokens)
    return [replace(each, prompt=tuple(token % (VOCAB - 1) + 1 for token in each.prompt)) for each in made]


def engine_of(source: WeightSource, assistant: Assistant, *, k: int = 3, **options: Any) -> Engine:
    how = {name: options.pop(name) for name in ("rule", "forced_rate") if name in options}
    config = EngineConfig(
        **{"max_batch_size": 4, "max_model_len": 160, **options},
        speculative=Speculative(AssistantModel(assistant), k=k, **how),
    )
    return Engine(source, device=CPU, config=config)


class Oracle:
    """What an engine of one request proposes for a sequence that is prefilled anew: in the first step after a
    prompt, whose next token is replaced."""

    def __init__(self, source: WeightSource, assistant: Assistant, k: int) -> None:
        self._engine = engine_of(source, assistant, k=k, max_batch_size=1, max_model_len=192)
        assert self._engine._speculation is not None
        proposer = self._engine._speculation._proposer
        self._propose = proposer.propose
        proposer.propose = self._noted  # type: ignore[method-assign]
        self._last = 0
        self._found = list[list[int]]()

    def _noted(self, rows: Any, state: Any) -> Any:
        rows[0].tokens[-1] = self._last
        state.last_SN[0, -1] = self._last
        drafts = self._propose(rows, state)
        self._found.append(drafts.tokens_RK[0].tolist())
        return drafts

    def continuation(self, tokens: Sequence[int], k: int) -> list[int]:
        """Return the proposals that follow some tokens."""
        self._found.clear()
        self._last = tokens[-1]
        params = SamplingParams(2, temperature=0.0, ignore_eos=True)
        self._engine.generate([Request("alone", tuple(tokens[:-1]), params)])
        return self._found[0]


@pytest.fixture(scope="module", params=["shared", slow("apart")])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved_pair(tmp_path_factory.mktemp("pair"), request.param, **CLUSTERS)


class Scaled:
    """A model with calibrated scales of keys and of values for a cache in FP8_STATIC."""

    kv_format = FP8_STATIC

    def __init__(self, source: WeightSource) -> None:
        self.arch = source.arch
        self._source = source

    def outer(self) -> Weights:
        return self._source.outer()

    def layer(self, layer_idx: int) -> Weights:
        has_keys = self.arch.layers[layer_idx].kv_source is None
        scales = {name: torch.tensor(0.02 + 0.01 * layer_idx) for name in KV_SCALES.values()}
        return {**self._source.layer(layer_idx), **(scales if has_keys else {})}


@pytest.mark.parametrize("kv_format", STORED_FORMATS)
@pytest.mark.one_in(10)
def test_an_assistant_of_gemma4_changes_no_bit_in_any_format_of_the_cache(
    kv_format: str | None, tmp_path: Path
) -> None:
    heads = {"head_dim": 64, "global_head_dim": 128}
    pair = saved_pair(tmp_path, of_target=heads, **CLUSTERS)
    source: WeightSource = open_checkpoint(pair.target_path)
    if kv_format == FP8_STATIC:
        source = Scaled(source)
    assistant = read_assistant(pair.assistant_path)
    config = EngineConfig(max_batch_size=4, max_model_len=160, kv_format=kv_format)
    wanted = requests(8, max_tokens=6)
    plain = record(Engine(source, device=CPU, config=config), wanted)
    for rate in (None, 0.7):
        engine = engine_of(source, assistant, kv_format=kv_format, forced_rate=rate)
        speculated = record(engine, wanted)
        if rate is None:
            assert speculated.results == plain.results
            assert_same_bits(speculated.rows, plain.rows)
        assert sum(acceptance_of(engine).proposed) > 0


@pytest.mark.parametrize(
    "target", ["F32", "BF16", slow("W4A16"), slow("FP8"), slow("MOE"), slow("MOE-W4A16")]
)
@pytest.mark.parametrize("ordered", [None, ORDERED], ids=["all", "ordered"])
def test_an_assistant_of_any_model_changes_no_bit(target: str, ordered: OrderedEmbeddings | None) -> None:
    dtype = torch.bfloat16 if target == "BF16" else torch.float32
    source = make_source(target)
    assistant = random_assistant(source.arch, device=CPU, dtype=dtype, ordered=ordered, seed=1)
    config = EngineConfig(dtype=dtype, max_batch_size=4, max_model_len=160)
    plain = record(Engine(source, device=CPU, config=config), make_requests(12))
    engine = engine_of(source, assistant, dtype=dtype)
    speculated = record(engine, make_requests(12))
    assert speculated.results == plain.results
    assert_same_bits(speculated.rows, plain.rows)
    assert 0 < sum(acceptance_of(engine).accepted) < sum(acceptance_of(engine).proposed)


@pytest.mark.parametrize(("rate", "k", "chunk"), [(0.7, 3, 2048), (1.0, 3, 21), (0.5, 7, 9)])
def test_proposals_are_those_of_the_sequence_alone(rate: float, k: int, chunk: int, pair: Pair) -> None:
    """Of rejected proposals, of one kept and of all k, nothing is left for the next step."""
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    engine = engine_of(source, assistant, k=k, forced_rate=rate, max_step_tokens=chunk)
    oracle = Oracle(source, assistant, k)
    assert checked_proposals(engine, oracle.continuation, greedy(requests(4, max_tokens=12)), k) > 10
    assert acceptance_of(engine).acceptance_length > 1.3


def test_preempted_requests_propose_as_before(pair: Pair) -> None:
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    position = kv_bytes_per_token(source.arch, "F32") + 4 * 4 * source.arch.hidden_size // 16
    engine = engine_of(
        source, assistant, max_batch_size=8, max_model_len=192, kv_cache_bytes=18 * 16 * position
    )
    oracle = Oracle(source, assistant, 3)
    assert checked_proposals(engine, oracle.continuation, greedy(requests(8, max_tokens=12)), 3) > 30
    assert engine.num_preemptions > 0


def test_requests_of_one_group_and_of_a_cached_prefix_propose_as_alone(pair: Pair) -> None:
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    engine = engine_of(source, assistant, prefix_cache=True)
    prompt = tuple(range(1, 38))
    params = SamplingParams(9, temperature=0.0, ignore_eos=True)
    texts = [Request(str(idx), prompt, params, group="one") for idx in range(3)]
    oracle = Oracle(source, assistant, 3)
    for _ in range(2):
        assert checked_proposals(engine, oracle.continuation, texts, 3) > 5
        texts = [replace(each, id=f"{each.id}-again", prompt=(*prompt, 3, 4)) for each in texts]
    assert engine.counts.prefix_hits > 0
    assert engine.counts.shared_prompts == 0  # its rings are no part of the blocks of the model


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_padding_rows_and_warm_up_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch, rule: Any, pair: Pair
) -> None:
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    wanted = requests(9, max_tokens=6)
    as_written = record(engine_of(source, assistant, max_batch_size=6, rule=rule), wanted).results
    monkeypatch.setattr(decoding, "Graphs", RehearsedGraphs)
    monkeypatch.setattr(serving, "Graphs", RehearsedGraphs)
    engine = engine_of(source, assistant, max_batch_size=6, rule=rule)
    assert record(engine, wanted).results == as_written


def test_no_more_rows_run_at_once_than_the_kernels_were_selected_for(pair: Pair) -> None:
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    whole = engine_of(source, assistant)
    parts = engine_of(source, assistant)
    assert parts._speculation is not None
    proposer = parts._speculation._proposer
    assert isinstance(proposer, AssistantProposer)
    proposer._max_rows = 3
    proposed = list[list[list[int]]]()
    for engine in (whole, parts):
        assert engine._speculation is not None
        own = engine._speculation._proposer
        propose = own.propose
        tokens = list[list[int]]()

        def noted(rows: Any, state: Any, propose: Any = propose, tokens: Any = tokens) -> Any:
            drafts = propose(rows, state)
            tokens += drafts.tokens_RK.tolist()
            return drafts

        own.propose = noted  # type: ignore[method-assign]
        engine.generate(greedy(requests(6)))
        proposed.append(tokens)
    assert proposed[0] == proposed[1]


def test_with_rejection_tokens_outside_the_chosen_clusters_have_no_probability(pair: Pair) -> None:
    source = open_checkpoint(pair.target_path)
    engine = engine_of(source, read_assistant(pair.assistant_path), rule="rejection")
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    propose = proposer.propose
    num_checked = 0

    def checked(rows: Any, state: Any) -> Any:
        nonlocal num_checked
        drafts = propose(rows, state)
        assert drafts.probs_SKV is not None
        for row_idx, row in enumerate(rows):
            if row.request.params.temperature:
                num_checked += 1
                probs_KV = drafts.probs_SKV[row_idx]
                assert int((probs_KV > 0).sum(-1).max()) <= 3 * VOCAB // 12
                assert torch.allclose(probs_KV.sum(-1), torch.ones(()).double())
        return drafts

    proposer.propose = checked  # type: ignore[method-assign]
    engine.generate(
        [replace(each, params=SamplingParams(9, 1.0, seed=idx)) for idx, each in enumerate(requests(6))]
    )
    assert num_checked > 10


def probs_of(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], Tensor]:
    """Return the distributions [K, V] of proposals by the request and the length of its sequence."""
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    propose = proposer.propose
    found: dict[tuple[str, int], Tensor] = {}

    def noted(rows: Any, state: Any) -> Any:
        drafts = propose(rows, state)
        assert drafts.probs_SKV is not None
        for row, probs_KV in zip(rows, drafts.probs_SKV, strict=False):
            found[row.request.id, len(row.tokens)] = probs_KV.clone()
        return drafts

    proposer.propose = noted  # type: ignore[method-assign]
    engine.generate(requests)
    return found


def test_with_rejection_distributions_have_the_same_bits_alone_and_in_company(pair: Pair) -> None:
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    drawn = [
        replace(each, params=SamplingParams(12, 1.0, seed=idx, ignore_eos=True))
        for idx, each in enumerate(requests(6))
    ]
    together = probs_of(engine_of(source, assistant, rule="rejection", sync=True), drawn)
    one = engine_of(source, assistant, rule="rejection", sync=True, max_batch_size=1)
    alone = probs_of(one, drawn)
    assert alone.keys() == together.keys()
    assert len(alone) > 20
    assert [key for key, probs_KV in alone.items() if not torch.equal(probs_KV, together[key])] == []


def test_sequences_up_to_the_last_position_are_served(pair: Pair) -> None:
    source = open_checkpoint(pair.target_path)
    longest = TARGET["max_position_embeddings"]
    wanted = [
        Request(
            str(idx), (idx + 1,) * (longest - 9 - idx), SamplingParams(9 + idx, seed=idx, ignore_eos=True)
        )
        for idx in range(3)
    ]
    plain = Engine(source, device=CPU).generate(wanted)
    engine = engine_of(source, read_assistant(pair.assistant_path), k=7, max_model_len=longest)
    assert [each.tokens for each in engine.generate(wanted)] == [each.tokens for each in plain]


def test_steps_launched_ahead_give_what_plain_steps_give(pair: Pair) -> None:
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    engines = [engine_of(source, assistant, sync=sync) for sync in (False, True)]
    assert engines[0]._speculation is not None
    assert engines[0]._speculation.runs_ahead
    ahead, waiting = (engine.generate(requests(9, max_tokens=6)) for engine in engines)
    assert [each.tokens for each in ahead] == [each.tokens for each in waiting]


def test_an_assistant_of_another_model_is_refused_before_it_is_loaded(pair: Pair) -> None:
    assistant = read_assistant(pair.assistant_path)
    source = RandomSource(
        open_checkpoint(pair.target_path).arch.replace(hidden_size=96), device=CPU, dtype=torch.float32
    )
    with pytest.raises(UsageError, match=r"hidden size 48; this one has 96 tokens and hidden size 96"):
        engine_of(source, assistant)


def test_an_assistant_with_fewer_positions_than_are_served_is_refused(tmp_path: Path) -> None:
    pair = saved_pair(tmp_path, text={"max_position_embeddings": 100})
    source = open_checkpoint(pair.target_path)
    assistant = read_assistant(pair.assistant_path)
    with pytest.raises(UsageError, match=r"the assistant has 100 positions.*sequences of 101 tokens"):
        engine_of(source, assistant, max_model_len=101)
    engine_of(source, assistant, max_model_len=100)


def test_an_assistant_is_named_by_its_directory_or_by_a_reference(pair: Pair) -> None:
    config = EngineConfig(max_model_len=64)
    engine = load_engine(
        str(pair.target_path), config, device="cpu", speculative=pair.assistant_path, num_draft_tokens=2
    )
    assert engine._speculation is not None
    assert isinstance(engine._speculation._proposer, AssistantProposer)
    with pytest.raises(UsageError, match=r"'nowhere', which is no directory.*a draft or an assistant"):
        _speculative("nowhere", pair.target_path, 2, offline=True)
    with pytest.raises(UsageError, match="unknown scheme 'hug://'"):
        _speculative("hug://org/name", pair.target_path, 2, offline=True)


def test_the_weights_that_a_pass_reads_are_counted(pair: Pair) -> None:
    assistant = read_assistant(pair.assistant_path)
    engine = engine_of(open_checkpoint(pair.target_path), assistant)
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    assert isinstance(proposer, AssistantProposer)
    linears = [
        *proposer._weights.linears,
        *(each for own in proposer._weights.layers for each in own.fused_linears),
    ]
    assert len(linears) == 3 + 4 * len(assistant.facts.own_layers)
    chosen = 4 * (3 * VOCAB // 12) * assistant.arch.hidden_size
    assert proposer.weight_bytes == sum(each.weight_bytes for each in linears) + chosen

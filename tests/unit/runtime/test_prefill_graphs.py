"""Passes of prompts that are filled up and read from memory that stays in place: the same tokens as plain
passes, whichever lengths come one after the other. On a CPU the pass itself stands in for its graph."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.tiles import FixedLists, dense_blocks, query_tiles
from compress.runtime import prefill_graphs
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.prefill_graphs import LEAST_STEP, MAX_ROWS, PrefillGraphs, filled_up, size_of
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
LENGTHS = (5, 60, 3, 17, 64, 33, 1, 49, 130, 7, 64, 61, 18)


def test_sizes_hold_a_pass_and_waste_little_of_it() -> None:
    sizes = [size_of(num_rows) for num_rows in range(1, MAX_ROWS + 1)]
    assert all(rows <= size < rows + max(LEAST_STEP, rows / 16) for rows, size in enumerate(sizes, 1))
    assert all(before <= after for before, after in pairwise(sizes))
    assert all(size_of(size) == size for size in sizes)
    assert len(set(sizes)) <= 80


def test_lists_in_place_are_the_lists_and_entries_that_do_nothing() -> None:
    lists = FixedLists(100, 4, 32, CPU)
    lists.load((30, 70), (100, 70))
    places = lists.query_tiles(16), *lists.dense_blocks(16)
    for query_lens, context_lens in (((30, 70), (100, 70)), ((100,), (300,)), ((1, 50, 49), (20, 50, 80))):
        lists.load(query_lens, context_lens)
        for ours, place in zip((lists.query_tiles(16), *lists.dense_blocks(16)), places, strict=True):
            assert ours.data_ptr() == place.data_ptr()
        tiles = query_tiles(query_lens, context_lens, 16, CPU)
        assert torch.equal(places[0][: len(tiles)], tiles)
        assert not places[0][len(tiles) :].any()
        blocks, table = dense_blocks(context_lens, 16, CPU)
        assert torch.equal(places[1][: len(blocks)], blocks)
        assert not places[1][len(blocks) :].any()
        assert torch.equal(places[2][: table.shape[0], : table.shape[1]], table)


def test_what_fills_a_pass_up_is_a_sequence_in_the_padding_block() -> None:
    batch = PrefillBatch(
        *(torch.arange(20) for _ in range(3)),
        torch.tensor([[3], [4]]),
        (15, 5),
        (15, 5),
        torch.tensor([14]),
        (None, 20),
    )
    filled = filled_up(batch, 4)
    assert filled.query_lens == filled.context_lens == (15, 5, 12)
    assert len(filled.tokens_T) == len(filled.positions_T) == len(filled.slots_T) == 32
    assert filled.slots_T[20:].tolist() == [0, 1, 2, 3] * 3
    assert filled.block_table_RB.tolist() == [[3, 0, 0], [4, 0, 0], [0, 0, 0]]
    whole = replace(batch, **{name: torch.arange(32) for name in ("tokens_T", "positions_T", "slots_T")})
    assert filled_up(whole, 4) is whole


def served(monkeypatch: pytest.MonkeyPatch | None, facts: dict[str, Any], **config: Any) -> list[list[int]]:
    """Return the tokens of requests that come one after the other, then together; with `monkeypatch` by
    passes that are filled up, and counted."""
    source = tiny_source(**facts)
    engine = Engine(source, device=CPU, config=EngineConfig(max_model_len=160, **config))
    if monkeypatch is not None:
        use_places(monkeypatch, engine.runner)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(101, (each,), generator=generator).tolist()) for each in LENGTHS]
    params = SamplingParams(4, ignore_eos=True)
    requests = [Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)]
    alone = [engine.generate([each])[0] for each in requests]
    return [list(each.tokens) for each in (*alone, *engine.generate(requests))]


def use_places(monkeypatch: pytest.MonkeyPatch, runner: Any) -> PrefillGraphs:
    """Make the runner fill passes up and read them from their place."""
    graphs: PrefillGraphs = runner._prefills
    plain = graphs._hidden

    def hidden(
        batch: PrefillBatch, short: bool, features: Features | None, lists: FixedLists | None
    ) -> Tensor:
        if lists is not None:  # the reference has no lists, only lengths
            batch = replace(batch, query_lens=lists.query_lens, context_lens=lists.context_lens)
            rows = len(lists.query_lens)
            batch = replace(batch, block_table_RB=batch.block_table_RB[:rows])
        return plain(batch, short, features, None)

    monkeypatch.setattr(graphs, "_fills", True)
    monkeypatch.setattr(graphs, "_hidden", hidden)
    return graphs


@pytest.mark.parametrize(
    "facts",
    [{}, {"qk_norm": True, "layers": (tiny_shape(window=5), tiny_shape())}],
    ids=["plain", "window"],
)
@pytest.mark.parametrize("max_step_tokens", [512, 23], ids=["whole", "chunked"])
def test_tokens_are_those_of_plain_passes(
    facts: dict[str, Any], max_step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"max_step_tokens": max_step_tokens}
    assert served(monkeypatch, facts, **config) == served(None, facts, **config)


def test_passes_of_a_size_share_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_source(), device=CPU, config=EngineConfig(max_model_len=160))
    graphs = use_places(monkeypatch, engine.runner)
    params = SamplingParams(1, ignore_eos=True)
    for idx, (length, num_places) in enumerate(((30, 1), (31, 1), (20, 1), (40, 2), (48, 2))):
        engine.generate([Request(str(idx), tuple(range(length)), params)])
        assert len(graphs._places) == num_places


def test_a_pass_beyond_the_limits_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_graphs, "MAX_SEQUENCES", 3)
    engine = Engine(tiny_source(), device=CPU, config=EngineConfig(max_model_len=160, max_step_tokens=100))
    graphs = use_places(monkeypatch, engine.runner)
    params = SamplingParams(1, ignore_eos=True)
    requests = [Request(str(idx), (idx + 1,) * 10, params) for idx in range(3)]
    for _ in range(2):
        engine.generate(requests)  # three chunks
        engine.generate([Request("long", (1,) * 97, params)])  # 104 rows are more than the budget
    assert not graphs._places


def test_verified_tokens_follow_passes_that_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_source()

    def run(fills: bool) -> list[list[int]]:
        config = EngineConfig(max_model_len=160, speculative=Speculative(DraftModel(source), k=2))
        engine = Engine(source, device=CPU, config=config)
        if fills:
            use_places(monkeypatch, engine.runner)
        params = SamplingParams(6, ignore_eos=True)
        return [
            list(engine.generate([Request(str(idx), tuple(range(length)), params)])[0].tokens)
            for idx, length in enumerate((30, 31, 29))
        ]

    assert run(True) == run(False)


def test_rows_of_features_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Engine(tiny_source(), device=CPU, config=EngineConfig(max_model_len=160)).runner

    def rows(length: int) -> Tensor:
        features = Features.empty((0, 1), length, runner.embedding)
        columns = -(-length // 16)
        batch = PrefillBatch(
            torch.arange(length),
            torch.arange(length),
            torch.arange(length) + 16,
            torch.arange(1, columns + 1).unsqueeze(0),
            (length,),
            (length,),
            torch.tensor([length - 1]),
            (None,),
        )
        runner.prefill(batch, short=False, features=features)
        return features.rows_TE

    plain = [rows(length) for length in (20, 30, 25)]
    use_places(monkeypatch, runner)
    for length, expected in zip((20, 30, 25), plain, strict=True):
        torch.testing.assert_close(rows(length), expected)

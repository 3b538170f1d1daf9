"""Indexers over latents are served: their keys have pages next to the latents, rows attend to the latents
that are chosen, and no way to serve a request changes what they compute. Sequences so short that every key is
chosen have no indexer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.paged_latents import slots_of
from compress.models.latent import Latent
from compress.models.weights import MemorySource
from compress.runtime.chosen_latents import RowContexts
from compress.runtime.engine import Engine
from compress.runtime.kv_cache import IndexedKept, KVCache, kv_bytes_per_token
from compress.runtime.pass_memory import choosing_bytes
from compress.runtime.request import Request, SamplingParams
from tests.support.slow import slow
from tests.support.tiny_source import LIKE_GLM5, LIKE_GLM53, LIKE_LARGE4, tiny_source
from tests.unit.runtime.ways_to_serve import (
    CPU,
    SIZE,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
    engine_of,
    ids,
)

TOP_K = 20


def source_of() -> MemorySource:
    return tiny_source(**LIKE_GLM5, max_position=2048)


def pooled_source() -> MemorySource:
    return tiny_source(**LIKE_GLM53, max_position=2048)


EACH = {"keys": source_of, "pools": pooled_source}
each_kind = pytest.mark.parametrize("kind", EACH)


def latents(source: MemorySource) -> list[Latent]:
    return [layer.latent for layer in source.arch.layers if layer.latent is not None]


def test_keys_of_indexers_have_pages_in_long_sequences_alone() -> None:
    arch = source_of().arch
    facts = {"num_blocks": 4, "block_size": SIZE, "kv_format": "F32", "device": CPU}
    long = KVCache(arch, **facts)
    short = KVCache(arch, **facts, num_positions=TOP_K)
    kinds = [isinstance(long.layer(idx), IndexedKept) for idx in range(5)]
    assert kinds == [True, False, False, False, True]
    assert not any(isinstance(short.layer(idx), IndexedKept) for idx in range(5))
    assert long.block_bytes - short.block_bytes == 2 * SIZE * 10 * 4
    for cache, num_positions in ((long, None), (short, TOP_K)):
        of_token = kv_bytes_per_token(arch, "F32", num_positions=num_positions)
        assert cache.block_bytes == SIZE * of_token
    assert kv_bytes_per_token(arch, "INT8_TOKEN_HEAD", dtype=torch.bfloat16) == 5 * (18 + 4) + 2 * 10 * 2
    assert choosing_bytes(arch, TOP_K, 4) == 0 < choosing_bytes(arch, TOP_K + 1, 4)


def test_keys_of_pools_have_the_numbers_of_their_weights_next_to_them() -> None:
    arch = pooled_source().arch
    short = kv_bytes_per_token(arch, "F32", num_positions=19)
    assert kv_bytes_per_token(arch, "F32", num_positions=20) - short == 2 * 10 * 4
    assert kv_bytes_per_token(arch, "F32") - short == 2 * (10 + 14) * 4
    assert choosing_bytes(arch, 19, 4) == 0 < choosing_bytes(arch, 20, 4)


def test_a_choice_of_pools_has_a_kernel_and_a_linear_of_its_own() -> None:
    ops = {row["linear"] for row in engine_of(pooled_source()).runner.kernel_report()}
    assert ops >= {"pool_choice", "attn.indexer.pool_gate"}
    assert "index_choice" not in ops


def test_layers_that_read_the_latents_of_another_have_index_keys_of_their_own() -> None:
    layers = LIKE_LARGE4["layers"]
    indexer = replace(LIKE_GLM5["layers"][0].latent.indexer, of_stream=True)
    indexed = tuple(replace(each, latent=replace(each.latent, indexer=indexer)) for each in layers)
    arch = tiny_source(**{**LIKE_LARGE4, "layers": indexed}).arch
    cache = KVCache(arch, num_blocks=3, block_size=SIZE, kv_format="F32", device=CPU)
    kept = [cache.layer(idx) for idx in range(5)]
    assert all(isinstance(each, IndexedKept) for each in kept)
    pages = [each.pages.rows.data_ptr() for each in kept]
    assert pages[0] == pages[1] == pages[3] != pages[2] == pages[4]
    assert len({each.index.rows.data_ptr() for each in kept}) == 5
    assert cache.block_bytes == SIZE * 4 * (28 + 20 + 5 * 10)


def test_a_short_engine_has_no_indexer_and_the_bits_of_a_long_one() -> None:
    source = source_of()
    requests = [
        Request(str(length), ids(length, length), SamplingParams(5, ignore_eos=True, logprobs=True))
        for length in (1, 9, 15)
    ]
    short = engine_of(source, max_model_len=TOP_K)
    long = engine_of(source, max_model_len=TOP_K + 1)
    assert short.kv_bytes_per_token < long.kv_bytes_per_token
    assert short.weight_bytes < long.weight_bytes
    ops = [{row["linear"] for row in each.runner.kernel_report()} for each in (short, long)]
    of_indexers = {"index_choice", *(f"attn.indexer.{each}" for each in ("q", "k", "weights"))}
    assert not ops[0] & of_indexers
    assert ops[1] >= of_indexers
    found, expected = (each.generate(requests) for each in (short, long))
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.logprobs for each in found] == [each.logprobs for each in expected]


def logits_of(engine: Engine, prompt: tuple[int, ...]) -> list[float]:
    params = SamplingParams(24, ignore_eos=True, logprobs=True)
    found = engine.generate([Request("a", prompt, params)])[0]
    assert found.logprobs is not None
    return [*found.tokens, *found.logprobs]


@each_kind
@pytest.mark.parametrize("length", [TOP_K - 1, 70, slow(3), slow(TOP_K)])
def test_a_sequence_has_its_bits_in_any_company(length: int, kind: str) -> None:
    source = EACH[kind]()
    prompt = ids(length, 7)
    own = logits_of(engine_of(source), prompt)
    params = SamplingParams(24, ignore_eos=True, logprobs=True)
    others = [Request(f"b{idx}", ids(size, idx), params) for idx, size in enumerate((1, 18, 150))]
    together = engine_of(source).generate([*others[:2], Request("a", prompt, params), others[2]])[2]
    assert together.logprobs is not None
    assert [*together.tokens, *together.logprobs] == own


@each_kind
@pytest.mark.parametrize("max_step_tokens", [7, slow(1), slow(33)])
def test_a_prompt_in_parts_has_the_tokens_of_the_whole(max_step_tokens: int, kind: str) -> None:
    source = EACH[kind]()
    prompt = ids(90, 3)
    whole = logits_of(engine_of(source), prompt)
    parts = logits_of(engine_of(source, max_step_tokens=max_step_tokens, max_batch_size=1), prompt)
    assert parts[:24] == whole[:24]
    torch.testing.assert_close(parts[24:], whole[24:], rtol=1e-4, atol=1e-4)


@each_kind
def test_a_prefix_that_is_cached_changes_no_token(kind: str) -> None:
    check_cached_prefix(EACH[kind]())


@each_kind
@pytest.mark.parametrize("swap_bytes", [0, 1 << 24])
@pytest.mark.one_in(8)
def test_requests_that_lose_their_blocks_go_on(swap_bytes: int, kind: str) -> None:
    check_preemption(EACH[kind](), swap_bytes=swap_bytes, slots=0)


@each_kind
@pytest.mark.parametrize("drafts", ["ngram", "draft model"])
@pytest.mark.one_in(4)
def test_speculation_changes_no_token(drafts: str, kind: str) -> None:
    check_speculation(EACH[kind](), drafts)


@each_kind
def test_scores_are_those_of_the_decoder_and_of_layers_read_one_by_one(kind: str) -> None:
    check_scores(EACH[kind]())


def test_pages_in_codes_are_chosen_from_as_they_are() -> None:
    """Latents that are gathered keep their codes and scales."""
    source = source_of()
    prompt = ids(70, 7)
    exact = logits_of(engine_of(source), prompt)
    coded = logits_of(engine_of(source, kv_format="INT8_TOKEN_HEAD"), prompt)
    assert exact != coded
    assert abs(exact[24] - coded[24]) < 0.05


def test_rows_of_every_pass_find_their_positions() -> None:
    table_RB = torch.tensor([[5, 7], [2, 0]])
    decoded = RowContexts.decoded(table_RB, torch.tensor([20, 3]), 2)
    prefilled = RowContexts.prefilled(table_RB, (2, 2), (20, 3))
    for found in (decoded, prefilled):
        assert found.ends_T.tolist() == [19, 20, 2, 3]
        assert torch.equal(found.table_TB, table_RB[[0, 0, 1, 1]])
        assert len(found.part(slice(1, 3))) == 2


def gathered(source: MemorySource, slots: Tensor) -> Tensor:
    cache = KVCache(source.arch, num_blocks=4, block_size=SIZE, kv_format="F32", device=CPU)
    kept = cache.layer(0)
    assert isinstance(kept, IndexedKept)
    kept.pages.rows.copy_(torch.arange(4 * SIZE).view(1, 4, SIZE, 1).expand_as(kept.pages.rows))
    rows = RowContexts(torch.tensor([[3, 1]]), torch.tensor([30]))
    pages, where = rows.chosen(kept.pages, slots, torch.tensor([slots.shape[1]]))
    assert where.ends_T.tolist() == [slots.shape[1]]
    assert where.table_TB.tolist() == [[0, 1]]
    return pages.rows[0, :, :, 0].flatten()


def test_chosen_slots_lie_in_pages_of_their_own() -> None:
    positions = torch.tensor([[0, 1, 2, 5, 8, 15, 16, 17, 20, 21, 22, 23, 24, 25, 26, 27, 29]])
    slots = torch.where(positions < SIZE, 3 * SIZE + positions, SIZE + positions - SIZE)
    assert torch.equal(slots_of(positions.unsqueeze(1), torch.tensor([[3, 1]]), SIZE)[0], slots)
    assert gathered(source_of(), slots)[: slots.shape[1]].tolist() == slots[0].tolist()

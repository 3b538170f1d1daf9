"""Indexers that choose blocks are served: a layer keeps their keys beside its own, a row attends to the
chosen blocks, and no way to serve a request changes what it computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.paged import DENSE_FORMATS, PagedKV
from compress.models.delta_net import DeltaNet
from compress.models.indexer import BlockIndexer
from compress.models.layer_shape import LayerShape, Rope
from compress.models.weights import MemorySource
from compress.quant.kv import transforms_heads
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.kv_cache import KV_FORMATS, IndexedKept, KVCache, kv_bytes_per_token
from compress.runtime.pass_memory import choosing_bytes
from compress.runtime.request import Request, SamplingParams
from tests.support.slow import slow
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import (
    CPU,
    REQUESTS,
    SIZE,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
    decoded,
    engine_of,
    ids,
    tokens_of,
)

OF_HEADS = BlockIndexer(num_heads=2, head_dim=20, block_size=12, top_blocks=4)
POOLED = BlockIndexer(num_heads=5, head_dim=16, block_size=6, top_blocks=5, pooled=True)
TOP_K = 48
KINDS: dict[str, tuple[LayerShape, ...]] = {
    "heads": (
        tiny_shape(block_indexer=OF_HEADS),
        tiny_shape(),
        tiny_shape(block_indexer=replace(OF_HEADS, block_size=16, top_blocks=3, local_blocks=2)),
        tiny_shape(block_indexer=OF_HEADS, rope=Rope(500.0, rotary_dim=8)),
    ),
    "pooled": (
        tiny_shape(output_gate=True, block_indexer=POOLED),
        tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),
        tiny_shape(block_indexer=replace(POOLED, block_size=16, top_blocks=2)),
        tiny_shape(block_indexer=POOLED, rope=Rope(500.0, rotary_dim=8)),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def source_of(kind: str, **changes: Any) -> MemorySource:
    return tiny_source(**{"layers": KINDS[kind], "qk_norm": True, "max_position": 512, **changes})


class WithoutIndexers:
    """A model whose layers have the same weights and no indexers."""

    kv_format = None

    def __init__(self, source: MemorySource) -> None:
        layers = tuple(replace(each, block_indexer=None) for each in source.arch.layers)
        self.arch = source.arch.replace(layers=layers)
        self._source = source

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = self._source.layer(layer_idx)
        return {name: each for name, each in weights.items() if ".indexer." not in name}


def logits_of(engine: Engine, requests: list[Request]) -> dict[str, list[Tensor]]:
    """Return the logits from which the tokens of each request are chosen."""
    found: dict[str, list[Tensor]] = {each.id: [] for each in requests}

    def record(served: Any, positions: Any, logits_RV: Tensor) -> None:
        for row, request in zip(logits_RV, served, strict=True):
            found[request.id].append(row.clone())

    engine.observer = record
    engine.generate(requests)
    return found


def test_a_layer_keeps_the_keys_of_its_indexer_beside_its_own() -> None:
    arch = source_of("heads").arch
    cache = KVCache(arch, num_blocks=4, block_size=SIZE, kv_format="FP8_TOKEN_HEAD", device=CPU)
    kept = [cache.layer(idx) for idx in range(4)]
    assert [isinstance(each, IndexedKept) for each in kept] == [True, False, True, True]
    first = kept[0]
    assert isinstance(first, IndexedKept)
    assert first.index.heads_and_width == (1, 20)
    per_token = 4 * 2 * 2 * (16 + 4) + 3 * 20 * 4
    assert kv_bytes_per_token(arch, "FP8_TOKEN_HEAD") == per_token
    assert cache.block_bytes == SIZE * per_token


@each_kind
def test_an_engine_of_short_sequences_has_no_indexers(kind: str) -> None:
    short = engine_of(source_of(kind), max_model_len=min(TOP_K, POOLED.top_k))
    plain = engine_of(WithoutIndexers(source_of(kind)), max_model_len=min(TOP_K, POOLED.top_k))
    assert short.kv_bytes_per_token == plain.kv_bytes_per_token
    assert short.kernel_report() == plain.kernel_report()
    kept = [short.runner._cache.layer(idx) for idx in range(4)]
    assert not any(isinstance(each, IndexedKept) for each in kept)
    longer = engine_of(source_of(kind))
    assert longer.kv_bytes_per_token > plain.kv_bytes_per_token
    assert choosing_bytes(short.arch, short.max_model_len, 4) == 0 < choosing_bytes(short.arch, 256, 4)
    assert [each["kernel"] for each in longer.kernel_report() if each["op"] == "block_choice"]


@each_kind
def test_a_row_that_sees_no_more_than_is_chosen_has_the_bits_of_attention_without_indexers(kind: str) -> None:
    """Next to a long sequence, by whose length the pass may choose, and alone."""
    few = Request("few", ids(19, 1), SamplingParams(13, ignore_eos=True))
    many = Request("many", ids(200, 2), SamplingParams(13, ignore_eos=True))
    plain = logits_of(engine_of(WithoutIndexers(source_of(kind))), [few])["few"]
    for requests in ([few], [few, many], [many, few]):
        found = logits_of(engine_of(source_of(kind)), requests)
        assert torch.equal(torch.stack(found["few"]), torch.stack(plain))


@each_kind
def test_logits_are_those_of_the_decoder_and_others_than_of_all_keys(kind: str) -> None:
    source = source_of(kind)
    request = Request("one", ids(150, 3), SamplingParams(9, ignore_eos=True))
    (done,) = engine_of(source).generate([request])
    sequence = torch.tensor([done.prompt + done.tokens[:-1]])
    expected = decoded(source, sequence)[0, 149:]
    found = torch.stack(logits_of(engine_of(source), [request])["one"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    without = torch.stack(logits_of(engine_of(WithoutIndexers(source_of(kind))), [request])["one"])
    assert float((found - without).abs().amax(1)[0]) > 1e-2


@each_kind
@pytest.mark.parametrize("max_step_tokens", [23, slow(64)])
def test_a_prompt_in_parts_has_the_tokens_of_a_whole_one(kind: str, max_step_tokens: int) -> None:
    source = source_of(kind)
    split = engine_of(source, max_step_tokens=max_step_tokens, prefix_cache=False)
    assert tokens_of(split) == tokens_of(engine_of(source, prefix_cache=False))


@each_kind
def test_rows_have_the_same_bits_in_any_company(kind: str) -> None:
    source = source_of(kind)
    together = logits_of(engine_of(source, prefix_cache=False), REQUESTS)
    for request in REQUESTS:
        own = logits_of(engine_of(source, prefix_cache=False), [request])[request.id]
        assert torch.equal(torch.stack(together[request.id]), torch.stack(own))


@each_kind
def test_a_prefix_that_is_cached_changes_no_token(kind: str) -> None:
    check_cached_prefix(source_of(kind))


@each_kind
@pytest.mark.parametrize("swap_bytes", [0, 1 << 24], ids=["recomputed", "swapped"])
@pytest.mark.one_in(4)
def test_requests_that_lose_their_blocks_go_on(kind: str, swap_bytes: int) -> None:
    check_preemption(source_of(kind), swap_bytes=swap_bytes)


@each_kind
@pytest.mark.parametrize("proposer", ["ngram", "draft model", "eagle3"])
@pytest.mark.one_in(4)
def test_speculation_changes_no_token(kind: str, proposer: str) -> None:
    check_speculation(source_of(kind), proposer)


@each_kind
def test_scores_are_those_of_the_decoder_and_of_layers_read_one_by_one(kind: str) -> None:
    check_scores(source_of(kind))


@pytest.mark.parametrize(
    "kv_format", [each for each in KV_FORMATS if each not in ("FP8_STATIC", *DENSE_FORMATS.values())]
)
@pytest.mark.one_in(3)
def test_every_format_of_the_cache_serves_rows_that_keep_their_bits(kv_format: str) -> None:
    """A format with transforms has them of heads of 64 dimensions and more."""
    head_dim = 64 if transforms_heads(kv_format) else 16
    indexer = replace(OF_HEADS, head_dim=64)
    layers = tuple(
        replace(each, block_indexer=each.block_indexer and indexer, head_dim=head_dim)
        for each in KINDS["heads"]
    )
    source = source_of("heads", layers=layers)
    together = engine_of(source, kv_format=kv_format).generate(REQUESTS)
    own = [engine_of(source, kv_format=kv_format).generate([each])[0].tokens for each in REQUESTS]
    assert [each.tokens for each in together] == own


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_choices", [1, 3])
def test_pages_of_chosen_slots_have_keys_values_and_scales_of_each_head(num_choices: int) -> None:
    pages = PagedKV(randn(3, 5, 4, 6, seed=1), randn(3, 5, 4, 6, seed=2), randn(3, 5, 4, seed=3), None)
    slots = torch.randint(20, (7, num_choices, 8), generator=torch.Generator().manual_seed(4))
    found = pages.gathered(slots)
    assert found.k.shape == (3, 14, 4, 6)
    assert found.v_scale is None
    for head in range(3):
        own = slots[:, head % num_choices].flatten()
        for name in ("k", "v", "k_scale"):
            theirs = getattr(pages, name)[head].flatten(0, 1)[own]
            assert torch.equal(getattr(found, name)[head].flatten(0, 1), theirs)

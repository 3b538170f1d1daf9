"""Models with relative logits and convolutions with a residual are served: layers keep blocks of the cache
and a slot of states, and no way to serve a request changes what they compute."""

from dataclasses import replace
from typing import Any

import pytest

from compress.kernels.operands.paged import DENSE_FORMATS
from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.models.experts import Experts
from compress.models.relative_logits import RelativeLogits
from compress.models.residual_conv import ResidualConvs
from compress.models.weights import MemorySource
from compress.quant.kv import transforms_heads
from compress.runtime.kv_cache import KV_FORMATS, JointKept, KVCache, kv_bytes_per_token, slot_bytes
from compress.runtime.request import Request, SamplingParams
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import (
    CPU,
    REQUESTS,
    SIZE,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
    engine_of,
)

ALWAYS = Experts(
    *(6, 3, 48),
    score="sigmoid",
    selection_bias=True,
    renormalize=True,
    always=1,
    one_output_scale=True,
)
LAYERS = (
    tiny_shape(rope=None, window=7, relative=RelativeLogits(4, 7), residual_convs=4, scaled_ffn=True),
    tiny_shape(
        rope=None,
        num_kv_heads=1,
        relative=RelativeLogits(3, 40, (0.4, 12)),
        residual_convs=4,
        experts=ALWAYS,
    ),
    tiny_shape(residual_convs=2),
    tiny_shape(relative=RelativeLogits(2, 150)),
)
FACTS: dict[str, Any] = {
    "qk_norm": True,
    "inverse_scale": True,
    "embed_norm": True,
    "embed_norm_weight": True,
    "head_vocab": 97,
}


def source_of(**changes: Any) -> MemorySource:
    return tiny_source(**{"layers": LAYERS, "max_position": 2048, **FACTS, **changes})


def test_a_layer_with_convolutions_keeps_blocks_and_states() -> None:
    arch = source_of().arch
    cache = KVCache(arch, num_blocks=4, block_size=SIZE, kv_format="F32", device=CPU)
    found = [cache.layer(idx) for idx in range(4)]
    assert [isinstance(each, JointKept) for each in found] == [True, True, True, False]
    kinds = [each.states.recurrence for each in found if isinstance(each, JointKept)]
    assert kinds == [ResidualConvs.of(heads * 16, 56, size) for heads, size in ((2, 4), (1, 4), (2, 2))]
    assert [each.num_channels for each in kinds] == [2 * (32 + 56), 2 * (16 + 56), 2 * (32 + 56)]
    inputs = 3 * 176 + 3 * 144 + 176
    assert slot_bytes(arch, 1) == sum(RecurrentStates.slot_bytes(each, 1) for each in kinds)
    assert slot_bytes(arch, 1) == 4 * (inputs + 176 + 144 + 176)
    assert kv_bytes_per_token(arch, "F32") == 4 * 2 * 16 * (2 + 1 + 2 + 2)


def test_a_prefix_that_is_cached_changes_no_token() -> None:
    check_cached_prefix(source_of())


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24], ids=["recomputed", "swapped"])
def test_requests_that_lose_their_blocks_go_on(swap_bytes: int) -> None:
    check_preemption(source_of(), swap_bytes=swap_bytes)


@pytest.mark.parametrize("kind", ["ngram", "draft model", "eagle3"])
def test_speculation_changes_no_token(kind: str) -> None:
    check_speculation(source_of(), kind)


def test_scores_are_those_of_the_decoder_and_of_layers_read_one_by_one() -> None:
    check_scores(source_of())


@pytest.mark.parametrize(
    "kv_format", [each for each in KV_FORMATS if each not in ("FP8_STATIC", *DENSE_FORMATS.values())]
)
@pytest.mark.one_in(3)
def test_every_format_of_the_cache_serves_rows_that_keep_their_bits(kv_format: str) -> None:
    """A format with transforms has them of heads of 64 dimensions and more."""
    wide = {"head_dim": 64} if transforms_heads(kv_format) else {}
    source = source_of(layers=tuple(replace(each, **wide) for each in LAYERS))
    together = engine_of(source, kv_format=kv_format).generate(REQUESTS)
    own = [engine_of(source, kv_format=kv_format).generate([each])[0].tokens for each in REQUESTS]
    assert [each.tokens for each in together] == own


def test_no_token_of_the_padding_is_drawn() -> None:
    """At a temperature at which all tokens are about as likely, hundreds are drawn of those that have
    logits."""
    source = source_of(head_vocab=5)
    params = SamplingParams(300, temperature=50.0, seed=1, ignore_eos=True)
    (done,) = engine_of(source).generate([Request("one", (1, 2, 3), params)])
    assert set(done.tokens) == set(range(5))

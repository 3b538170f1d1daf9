"""Models with shortcut-connected mixtures and experts that return their input are served, and no way to serve
a request changes what they compute."""

from dataclasses import replace
from typing import Any

import pytest

from compress.models.experts import Experts
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.shortcut import Shortcuts
from compress.models.weights import MemorySource
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import (
    REQUESTS,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
    engine_of,
)

DELAYED = Experts(
    *(6, 3, 48),
    shared_size=96,
    selection_bias=True,
    scale=6.0,
    zero_experts=3,
    delayed=True,
)
LATENT: dict[str, Any] = {
    "num_kv_heads": 4,
    "rope": Rope(1e4, rotary_dim=8),
    "latent": Latent(q_rank=28, kv_rank=24, rope_dim=8, value_dim=12, interleaved=True, rescaled=True),
}
LAYERS = (
    tiny_shape(**LATENT, experts=DELAYED),
    tiny_shape(**LATENT),
    tiny_shape(**LATENT, experts=replace(DELAYED, zero_experts=20)),
    tiny_shape(**LATENT),
)


def source_of(**changes: Any) -> MemorySource:
    return tiny_source(**{"layers": LAYERS, "max_position": 2048, "hyper": Shortcuts(), **changes})


def test_a_prefix_that_is_cached_changes_no_token() -> None:
    check_cached_prefix(source_of())


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24], ids=["recomputed", "swapped"])
def test_requests_that_lose_their_blocks_go_on(swap_bytes: int) -> None:
    check_preemption(source_of(), swap_bytes=swap_bytes)


@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_speculation_changes_no_token(kind: str) -> None:
    check_speculation(source_of(), kind)


def test_scores_are_those_of_the_decoder_and_of_layers_read_one_by_one() -> None:
    check_scores(source_of())


def test_rows_keep_their_tokens_in_any_company() -> None:
    source = source_of()
    together = engine_of(source).generate(REQUESTS)
    own = [engine_of(source).generate([each])[0].tokens for each in REQUESTS]
    assert [each.tokens for each in together] == own


def test_a_router_chooses_among_experts_without_weights_and_a_step_reads_none_of_them() -> None:
    engine = engine_of(source_of())
    routers = {(row["layer"], row["n"]) for row in engine.kernel_report() if row["op"] == "router"}
    assert routers == {(0, 9), (2, 26)}
    first, _, other, _ = engine.runner._weights.layers
    assert first.experts is not None
    assert other.experts is not None
    rows = 17 * (56 + 1) * 4  # of the router and its bias, in float32
    assert other.experts.bytes_read(2) - first.experts.bytes_read(2) == rows

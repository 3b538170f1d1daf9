"""Models with gated sums, normed outputs of heads and norms around experts on latents are served, and no way
to serve a request changes what they compute."""

from dataclasses import replace
from typing import Any

import pytest

from compress.models.experts import Experts
from compress.models.gated_sum import GatedSums
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

MIXTURE = Experts(
    *(6, 3, 48),
    score="sigmoid",
    selection_bias=True,
    renormalize=True,
    latent_size=40,
    latent_norms=True,
    router_scale=0.3,
)
LAYERS = (
    tiny_shape(output_gate=True, out_norm=True, window=7),
    tiny_shape(output_gate=True, out_norm=True, rope=None, experts=MIXTURE),
    tiny_shape(out_norm=True, num_kv_heads=1, experts=replace(MIXTURE, latent_size=24, top_k=1)),
    tiny_shape(),
)
FACTS: dict[str, Any] = {
    "norm_offset": 1.0,
    "plain_final_norm": True,
    "post_norm_eps": 1e-3,
    "embed_norm": True,
    "unit_qk_norm": True,
    "unit_norm_unrotated": True,
    "hyper": GatedSums(0.4),
}


def source_of(**changes: Any) -> MemorySource:
    return tiny_source(**{"layers": LAYERS, "max_position": 2048, **FACTS, **changes})


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


def test_rows_keep_their_tokens_in_any_company() -> None:
    source = source_of()
    together = engine_of(source).generate(REQUESTS)
    own = [engine_of(source).generate([each])[0].tokens for each in REQUESTS]
    assert [each.tokens for each in together] == own


def test_the_report_names_the_norms_of_latents_and_a_step_reads_them() -> None:
    engine = engine_of(source_of())
    rows = [row for row in engine.kernel_report() if row["linear"] == "norms of latents"]
    assert [(row["layer"], row["n"]) for row in rows] == [(1, 40), (2, 24)]
    assert {row["kernel"] for row in engine.kernel_report() if row["op"] == "router"} == {"reference"}
    norms = engine.runner._weights.layers[1].expert_norms
    assert norms is not None
    assert norms.weight_bytes == 4 * 3 * 40

"""Models with shortcut-connected mixtures and experts that return their input are served, and no way to serve
a request changes what they compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.kernels.problem import Phase
from compress.models.experts import Experts
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.shortcut import Shortcuts
from compress.models.weights import MemorySource, dense
from compress.runtime.deployment import Deployment
from compress.runtime.expert_linears import ExpertLinears
from compress.runtime.expert_loader import load_experts
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import (
    CPU,
    REQUESTS,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
    decoded,
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


@pytest.mark.parametrize("zero_experts", [0, 4])
def test_a_shared_expert_changes_no_score_where_a_kernel_computes_it_among_the_others(
    zero_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertLinears, "takes_shared", staticmethod(lambda *_args, **_facts: True))
    facts = Experts(6, 3, 48, shared_size=48, zero_experts=zero_experts, renormalize=True)
    source = tiny_source(layers=(tiny_shape(experts=facts), tiny_shape(experts=replace(facts, top_k=2))))
    engine = engine_of(source)
    for done in engine.generate(REQUESTS):
        tokens = torch.tensor([[*done.prompt, *done.tokens[:-1]]])
        expected = decoded(source, tokens)[0, -len(done.tokens) :].log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(done.tokens).unsqueeze(1)).flatten()
        torch.testing.assert_close(torch.tensor(done.logprobs), chosen, rtol=1e-4, atol=1e-4)
    first = engine.runner._weights.layers[0].experts
    assert first is not None
    assert first.has_shared("decode") == (zero_experts == 0)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_choose_no_expert_with_weights_read_nothing_of_one(
    phase: Phase, dtype: torch.dtype
) -> None:
    facts = Experts(4, 2, 48, zero_experts=3, score="sigmoid")
    source = tiny_source(layers=(tiny_shape(experts=facts),))
    weights = source.layer(0)
    router_ED = torch.zeros(7, 56)
    router_ED[:4, 0], router_ED[4:, 1] = 1, 1
    down = torch.full_like(dense(weights["moe.experts.3.down.weight"]), torch.inf)
    weights |= {"moe.router.weight": router_ED, "moe.experts.3.down.weight": down}
    deployment = Deployment(CPU, dtype, max_batch_size=8, max_step_tokens=512)
    experts = load_experts(source.arch, source.arch.layers[0], weights, deployment)
    assert experts is not None
    x_TD = torch.randn(5, 56, generator=torch.Generator().manual_seed(3)).to(dtype)
    x_TD[:, :2] = torch.tensor([-2.0, 2.0])  # experts 4 and 5, which have the largest scores
    x_TD[2, :2] = torch.tensor([2.0, -2.0])  # experts 0 and 1
    ids_TK, weights_TK = experts.route(x_TD, phase)
    assert ids_TK.tolist() == [[4, 5], [4, 5], [0, 1], [4, 5], [4, 5]]
    found_TD = experts(x_TD, phase)
    expected_TD = (x_TD.float() * weights_TK.sum(1, keepdim=True)).to(dtype)
    assert torch.equal(found_TD[[0, 1, 3, 4]], expected_TD[[0, 1, 3, 4]])
    assert found_TD[2].isfinite().all()

"""Layers with lightning attention, and sums with the normed residual, are served, and no way to serve a
request changes what they compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.kernels.operands.recurrent_states import RecurrentStates, pass_bytes
from compress.models.experts import Experts
from compress.models.lightning import Lightning
from compress.models.mamba2 import Mamba2
from compress.models.normed_sum import NormedSums
from compress.models.weights import MemorySource
from compress.runtime.deployment import Deployment
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token, slot_bytes
from compress.runtime.lightning_rows import as_mixer
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

HEADS = Lightning.of(4, 16)
LAYERS = (
    tiny_shape(recurrence=replace(HEADS, decay_rate=1.0), rope=None),
    tiny_shape(experts=Experts(6, 2, 48, renormalize=True)),
    tiny_shape(recurrence=replace(HEADS, decay_rate=0.4), rope=None, experts=Experts(6, 2, 48)),
    tiny_shape(),
)
FACTS: dict[str, Any] = {
    "hyper": NormedSums(3.5, 1.5, 2.5, 1.25, 3.0, 0.75),
    "recurrent_norm_eps": 1e-4,
}


def source_of(**changes: Any) -> MemorySource:
    return tiny_source(**{"layers": LAYERS, "max_position": 2048, **FACTS, **changes})


def test_a_slot_has_a_state_of_each_head_and_layers_with_other_decays_share_a_tensor() -> None:
    arch = source_of().arch
    cache = KVCache(arch, num_blocks=4, block_size=SIZE, kv_format="F32", device=CPU)
    first, third = cache.layer(0), cache.layer(2)
    assert isinstance(first, RecurrentStates)
    assert isinstance(third, RecurrentStates)
    assert first.heads.shape == (4, 1, 4, 16, 16)
    assert first.heads.untyped_storage().data_ptr() == third.heads.untyped_storage().data_ptr()
    assert slot_bytes(arch, 1) == 2 * RecurrentStates.slot_bytes(HEADS, 1)
    assert kv_bytes_per_token(arch, "F32") == 2 * 4 * 2 * 2 * 16


def test_a_pass_over_prompts_needs_the_states_of_a_mixer_and_rows_with_its_gates() -> None:
    mixer = Mamba2(4, 4, 16, 16, 1, conv_bias=False, normed=False)
    assert pass_bytes(HEADS, 1000, 3) == pass_bytes(mixer, 1000, 3) + 4 * 1000 * 5 * 64


def test_gates_and_steps_of_the_mixer_that_computes_it_are_one() -> None:
    weights = as_mixer(replace(HEADS, decay_rate=0.5), Deployment(CPU, torch.float32, 1, 64))
    gate = torch.nn.functional.silu(torch.tensor(weights.gate_factor))
    torch.testing.assert_close(gate, torch.tensor(1.0), rtol=0, atol=2e-7)
    step = torch.nn.functional.softplus(weights.dt_bias_H)
    torch.testing.assert_close(step, torch.ones(4), rtol=0, atol=2e-7)
    torch.testing.assert_close(-weights.decay_rate_H, 0.5 * torch.tensor([2.0**-n for n in (2, 4, 6, 8)]))


def test_the_report_of_kernels_names_the_recurrence_and_its_norm() -> None:
    rows = engine_of(source_of()).kernel_report()
    assert {(row["op"], row["linear"]) for row in rows} >= {
        ("mamba2", "mamba2"),
        ("rms_norm", "lightning.norm"),
    }


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


def test_sums_of_attention_alone_are_served() -> None:
    check_scores(source_of(layers=(tiny_shape(), tiny_shape(window=7))))


def test_rows_keep_their_tokens_in_any_company() -> None:
    source = source_of()
    together = engine_of(source).generate(REQUESTS)
    own = [engine_of(source).generate([each])[0].tokens for each in REQUESTS]
    assert [each.tokens for each in together] == own

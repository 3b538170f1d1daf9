"""Layers with a Mamba-1 mixer in place of attention are served: each keeps a slot of states, and no way to
serve a request changes what they compute."""

import pytest
import torch

from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.models.experts import Experts
from compress.models.mamba1 import Mamba1
from compress.models.weights import MemorySource
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token, slot_bytes
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import (
    CPU,
    SIZE,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
    engine_of,
)

MIXER = Mamba1.of(56, 12, 4, 5, conv_bias=True)
LAYERS = (
    tiny_shape(recurrence=MIXER, rope=None),
    tiny_shape(rope=None, experts=Experts(6, 2, 48)),
    tiny_shape(recurrence=MIXER, rope=None, experts=Experts(6, 2, 48)),
    tiny_shape(rope=None),
)


def source_of() -> MemorySource:
    return tiny_source(layers=LAYERS, max_position=2048)


def test_a_slot_has_the_inputs_of_the_convolution_and_a_state_of_each_channel() -> None:
    arch = source_of().arch
    cache = KVCache(arch, num_blocks=4, block_size=SIZE, kv_format="F32", device=CPU)
    kept = cache.layer(0)
    assert isinstance(kept, RecurrentStates)
    assert kept.inputs.shape == (4, 4, 56)
    assert kept.heads.shape == (4, 1, 1, 56, 12)
    assert RecurrentStates.slot_bytes(MIXER, 1) == 4 * (56 * 12 + 4 * 56)
    assert slot_bytes(arch, 1) == 2 * RecurrentStates.slot_bytes(MIXER, 1)
    assert kv_bytes_per_token(arch, "F32") == 2 * 4 * 2 * 2 * 16


def test_the_report_of_kernels_names_the_recurrence_its_convolution_and_its_inner_linears() -> None:
    names = {row["linear"] for row in engine_of(source_of()).kernel_report()}
    assert names >= {"selective_scan", "short_conv", "mamba1.x_proj", "mamba1.dt_proj"}


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


def test_a_model_of_mixers_alone_caches_no_keys() -> None:
    source = tiny_source(layers=(LAYERS[0],) * 2, max_position=2048)
    assert kv_bytes_per_token(source.arch, "F32") == 0
    check_scores(source)
    tokens_BS = torch.arange(40).view(1, -1)
    assert engine_of(source).runner.score(tokens_BS).isfinite().all()

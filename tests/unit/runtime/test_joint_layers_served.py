"""Layers in which a Mamba-2 mixer joins attention are served: each keeps blocks of the cache and a slot of
states, and no way to serve a request changes what they compute."""

import pytest
import torch

from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.models.mamba2 import Mamba2
from compress.models.weights import MemorySource
from compress.runtime.kv_cache import JointKept, KVCache, kv_bytes_per_token, slot_bytes
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import (
    CPU,
    SIZE,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
)

MAMBA = Mamba2(4, 2, 16, 12, 4, conv_bias=True, normed=False)
JOINT = tiny_shape(recurrence=MAMBA, joint=True)
LAYERS = (JOINT, tiny_shape(recurrence=MAMBA, rope=None), JOINT, tiny_shape())


def source_of() -> MemorySource:
    factors = (("attn.o", 0.9), ("mamba.x", 0.6), ("mamba.o", 0.7), ("ffn.gate", 0.8))
    return tiny_source(layers=LAYERS, linear_factors=factors, max_position=2048)


def test_a_joint_layer_keeps_blocks_and_states() -> None:
    arch = source_of().arch
    cache = KVCache(arch, num_blocks=4, block_size=SIZE, kv_format="FP8_TOKEN_HEAD", device=CPU)
    kinds = [type(cache.layer(idx)) for idx in range(4)]
    assert kinds[0] is kinds[2] is JointKept
    assert kinds[1] is RecurrentStates
    of_layer = 4 * (16 + 4)  # two heads of keys and two of values
    assert kv_bytes_per_token(arch, "FP8_TOKEN_HEAD") == 3 * of_layer
    assert cache.block_bytes == SIZE * 3 * of_layer
    assert slot_bytes(arch, 1) == 3 * RecurrentStates.slot_bytes(MAMBA, 1)
    slots = []
    for idx in (0, 1, 2):
        kept = cache.layer(idx)
        states = kept.states if isinstance(kept, JointKept) else kept
        assert isinstance(states, RecurrentStates)
        states.heads.fill_(idx + 1)
        slots.append(states)
    assert [float(each.heads.mean()) for each in slots] == [1, 2, 3]


def test_blocks_of_joint_layers_are_copied() -> None:
    cache = KVCache(source_of().arch, num_blocks=4, block_size=SIZE, kv_format="F32", device=CPU)
    tensors = []
    for idx in (0, 2):
        kept = cache.layer(idx)
        assert isinstance(kept, JointKept)
        tensors += list(kept.pages.tensors)
    for each in tensors:
        each[:, 1] = torch.randn(each[:, 1].shape)
    cache.copy_blocks([(1, 2)])
    cache.write_blocks(torch.tensor([3]), cache.read_blocks(torch.tensor([1])))
    for each in tensors:
        assert each[:, 1].any()
        for copy in (2, 3):
            assert torch.equal(each[:, copy], each[:, 1])
        assert not each[:, 0].any()


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

"""Layers in which a Mamba-2 mixer joins attention are served: each keeps blocks of the cache and a slot of
states, and no way to serve a request changes what they compute."""

from dataclasses import replace

import pytest
import torch

from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.models.mamba2 import Mamba2
from compress.models.weights import MemorySource
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import JointKept, KVCache, kv_bytes_per_token, slot_bytes
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from compress.runtime.streamed_model import StreamedModel
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.test_half_layers_served import (
    CPU,
    LONG,
    REQUESTS,
    SHARED,
    SIZE,
    alone,
    decoded,
    engine_of,
    ids,
    random_eagle3,
    tokens_of,
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
    source = source_of()
    engine = engine_of(source, prefix_cache=True)
    found = [engine.generate([each])[0] for each in REQUESTS]
    assert [each.tokens for each in found] == alone(source)
    assert found[3].cached_tokens == len(SHARED)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24], ids=["recomputed", "swapped"])
def test_requests_that_lose_their_blocks_go_on(swap_bytes: int) -> None:
    source = source_of()
    block = SIZE * kv_bytes_per_token(source.arch, "F32")
    requests = [replace(each, prompt=ids(40, idx), params=LONG) for idx, each in enumerate(REQUESTS)]
    plain = engine_of(source, prefix_cache=False)
    expected = [plain.generate([each])[0].tokens for each in requests]
    engine = engine_of(
        source,
        max_model_len=128,
        max_batch_size=4,
        kv_cache_bytes=14 * block + 4 * slot_bytes(source.arch, 1),
        swap_bytes=swap_bytes,
        prefix_cache=False,
    )
    assert [each.tokens for each in engine.generate(requests)] == expected
    assert engine.num_preemptions > 0


@pytest.mark.parametrize("kind", ["ngram", "draft model", "eagle3"])
def test_speculation_changes_no_token(kind: str) -> None:
    source = source_of()
    head = random_eagle3(
        source.arch, device=CPU, dtype=torch.float32, draft_vocab_size=90, layer_ids=(1, 2, 4), seed=3
    )
    options = {"ngram": NGram(), "draft model": DraftModel(source), "eagle3": Eagle3(head)}[kind]
    assert tokens_of(engine_of(source, speculative=Speculative(options, k=3))) == alone(source)


def test_scores_are_those_of_the_decoder_and_of_layers_read_one_by_one() -> None:
    source = source_of()
    tokens_BS = torch.tensor([ids(75, 8), ids(75, 9)])
    with torch.inference_mode():
        found = engine_of(source).runner.score(tokens_BS)
    assert torch.allclose(found, decoded(source, tokens_BS), rtol=1e-4, atol=1e-4)
    streamed = StreamedModel(source, device=CPU, config=EngineConfig(max_model_len=512))
    assert torch.equal(torch.cat(list(streamed.score(tokens_BS, batch_size=1))), found)

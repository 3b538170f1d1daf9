"""Models with relative logits and convolutions with a residual are served: layers keep blocks of the cache
and a slot of states, and no way to serve a request changes what they compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.kernels.operands.paged import DENSE_FORMATS
from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.models.experts import Experts
from compress.models.relative_logits import RelativeLogits
from compress.models.residual_conv import ResidualConvs
from compress.models.weights import MemorySource
from compress.quant.kv import transforms_heads
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KV_FORMATS, JointKept, KVCache, kv_bytes_per_token, slot_bytes
from compress.runtime.request import Request, SamplingParams
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


@pytest.mark.parametrize(
    "kv_format", [each for each in KV_FORMATS if each not in ("FP8_STATIC", *DENSE_FORMATS.values())]
)
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

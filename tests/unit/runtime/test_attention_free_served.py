"""Models whose layers are mixers alone, without attention and without an FFN, are served: a cache holds no
keys, its blocks are slots of states, and no way to serve a request changes what they compute."""

import pytest
import torch

from compress.errors import UsageError
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.recurrence import Recurrence
from compress.models.weights import MemorySource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token, slot_bytes
from compress.runtime.request import Request, SamplingParams
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.ways_to_serve import (
    CPU,
    SIZE,
    check_cached_prefix,
    check_scores,
    check_speculation,
    engine_of,
    ids,
)

MIXERS: dict[str, tuple[Recurrence, ...]] = {
    "mamba": (
        Mamba1.of(56, 12, 4, 5, conv_bias=True, normed=False),
        Mamba1.of(56, 12, 4, 5, conv_bias=True, unit_norms=True),
    ),
    "mamba2": (Mamba2(4, 2, 12, 14, 4, conv_bias=True),) * 2,
}
each_kind = pytest.mark.parametrize("kind", MIXERS)


def source_of(kind: str) -> MemorySource:
    layers = tuple(tiny_shape(recurrence=each, rope=None, only_half="mixer") for each in MIXERS[kind])
    return tiny_source(layers=layers * 2, max_position=2048)


@each_kind
def test_a_cache_has_slots_and_no_pages(kind: str) -> None:
    arch = source_of(kind).arch
    cache = KVCache(arch, num_blocks=4, block_size=SIZE, kv_format="F32", device=CPU)
    assert (cache.block_bytes, kv_bytes_per_token(arch, "F32")) == (0, 0)
    assert slot_bytes(arch, 1) > 4 * arch.state_numbers
    with pytest.raises(UsageError, match="has no attention"):
        kv_bytes_per_token(arch, "INT8_TOKEN_HEAD")


@each_kind
def test_scores_are_those_of_the_decoder_and_of_layers_read_one_by_one(kind: str) -> None:
    check_scores(source_of(kind))


@each_kind
def test_a_prefix_that_is_cached_changes_no_token(kind: str) -> None:
    check_cached_prefix(source_of(kind))


@each_kind
@pytest.mark.parametrize("how", ["ngram", "draft model"])
def test_speculation_changes_no_token(kind: str, how: str) -> None:
    check_speculation(source_of(kind), how)


@each_kind
def test_requests_beyond_the_length_of_the_model_are_bounded_by_blocks_alone(kind: str) -> None:
    """A cache without a limit has blocks for every request of a batch at the length of the model."""
    engine = Engine(source_of(kind), device=CPU, config=EngineConfig(max_batch_size=2))
    assert engine.max_model_len == 2048
    long = Request("long", ids(1500, 1), SamplingParams(5, ignore_eos=True))
    other = Request("other", ids(1300, 2), SamplingParams(5, ignore_eos=True))
    together = [each.tokens for each in engine.generate([long, other])]
    alone = [
        engine_of(source_of(kind), max_model_len=2048).generate([each])[0].tokens for each in (long, other)
    ]
    assert together == alone
    assert torch.tensor(together).shape == (2, 5)

"""A model read layer by layer gives the bits of the loaded one, and holds one layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UsageError
from compress.export import open_weights
from compress.models.weights import MemorySource, Weights
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.streamed_model import StreamedModel
from tests.support.tiny_cases import CASES
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_source, tiny_tokens
from tests.support.tiny_hf import saved
from tests.unit.calibrate.test_experts import MOE

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_batch_size=2, max_model_len=32)


def test_the_bits_are_those_of_the_loaded_model_for_every_kind_of_block(tmp_path: Path) -> None:
    for family in ("llama", "gemma2", "olmo2", "cohere2", "gpt_oss"):
        changes = next(case[1] for case in CASES.values() if case[0] == family)
        saved(tmp_path / family, family, changes, dtype=torch.bfloat16)
        check(open_weights(tmp_path / family))
    check(tiny_source(tiny_arch(MOE)))


def check(source: Any) -> None:
    tokens_NS = tiny_tokens(source.arch, 5, 24)
    loaded = Engine(source, device=CPU, config=CONFIG).runner
    streamed = StreamedModel(source, device=CPU, config=CONFIG)
    seen: list[int] = []
    for batch_size in (2, 5):
        found = list(streamed.score(tokens_NS, batch_size=batch_size, done=seen.append))
        batches = tokens_NS.split(batch_size)
        assert len(found) == len(batches)
        with torch.inference_mode():
            for logits, batch in zip(found, batches, strict=True):
                assert torch.equal(logits, loaded.score(batch)), source.arch.family
    assert seen == [*range(source.arch.num_layers)] * 2


@pytest.mark.parametrize("config", [LLAMA, QWEN3])
def test_each_layer_is_read_once(config: dict[str, Any]) -> None:
    source = tiny_source(tiny_arch(config))
    read: list[int] = []

    class Counted(MemorySource):
        def layer(self, layer_idx: int) -> Weights:
            read.append(layer_idx)
            return source.layer(layer_idx)

    counted = Counted.__new__(Counted)
    counted.__dict__.update(source.__dict__)
    list(
        StreamedModel(counted, device=CPU, config=CONFIG).score(tiny_tokens(source.arch, 6, 16), batch_size=1)
    )
    assert read == list(range(source.arch.num_layers))


def test_sequences_longer_than_the_model_are_refused() -> None:
    source = tiny_source(tiny_arch())
    streamed = StreamedModel(source, device=CPU, config=CONFIG)
    with pytest.raises(UsageError, match="the model length is 32"):
        next(streamed.score(tiny_tokens(source.arch, 1, 40), batch_size=1))


def test_a_length_that_the_model_does_not_have_is_refused_as_an_engine_refuses_it() -> None:
    source = tiny_source(tiny_arch(LLAMA, max_position_embeddings=40))
    for max_model_len in (0, 41):
        config = EngineConfig(max_batch_size=2, max_model_len=max_model_len)
        for load in (Engine, StreamedModel):
            with pytest.raises(UsageError, match=rf"max_model_len is {max_model_len}; .* positions 1\.\.40"):
                load(source, device=CPU, config=config)
    streamed = StreamedModel(source, device=CPU, config=EngineConfig(max_batch_size=2))
    with pytest.raises(UsageError, match="the model length is 40"):
        next(streamed.score(tiny_tokens(source.arch, 1, 41), batch_size=1))

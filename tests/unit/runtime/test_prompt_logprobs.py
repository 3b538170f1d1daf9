"""Log probabilities of a prompt's tokens are those that the engine's own sampler lists."""

import pytest
import torch

from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.prompt_logprobs import score_prompt
from compress.runtime.request import MAX_TOP_LOGPROBS, Request, SamplingParams
from tests.unit.runtime.test_speculative_engine import make_source


@pytest.mark.parametrize("vocab_size", [11, 61], ids=["fewer tokens than may be listed", "more"])
def test_the_likeliest_tokens_of_a_prompt_are_those_of_generation(vocab_size: int) -> None:
    source = make_source(vocab_size=vocab_size)
    engine = Engine(source, device=torch.device("cpu"), config=EngineConfig(max_model_len=64))
    params = SamplingParams(9, ignore_eos=True, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS)
    (generated,) = engine.generate([Request("a", (3, 1, 4), params)])
    scored = score_prompt(engine, [3, 1, 4, *generated.tokens], num_top=MAX_TOP_LOGPROBS)
    assert generated.logprobs is not None
    assert generated.top_logprobs is not None
    assert scored.logprobs[2:] == pytest.approx(generated.logprobs, abs=1e-4)
    for found, expected in zip(scored.top[2:], generated.top_logprobs, strict=True):
        assert len(found) == min(MAX_TOP_LOGPROBS, vocab_size)
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-4)
        assert {token for token, _ in found} == {token for token, _ in expected}

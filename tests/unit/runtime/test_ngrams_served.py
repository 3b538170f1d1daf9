"""Layers with embeddings of n-grams are served: each keeps the last tokens of a sequence and the last inputs
of their convolution beside its recurrence, and no way to serve a request changes what they compute."""

from dataclasses import replace

import pytest
import torch

from compress.errors import UsageError
from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.models.short_conv import ShortConv
from compress.models.weights import MemorySource
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import KVCache, NGramKept, slot_bytes
from compress.runtime.layer_embed import parted, with_layer_inputs
from compress.runtime.streamed_model import StreamedModel
from compress.runtime.token_digits import NUM_DIGITS, digits_of_tokens, tokens_of_digits
from tests.support.tiny_source import LIKE_QWEN4, tiny_source
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


def source_of() -> MemorySource:
    return tiny_source(**LIKE_QWEN4, max_position=2048)


def test_a_layer_keeps_tokens_and_inputs_beside_its_recurrence() -> None:
    arch = source_of().arch
    cache = KVCache(arch, num_blocks=4, block_size=SIZE, kv_format="F32", device=CPU)
    first, second = cache.layer(0), cache.layer(2)
    assert isinstance(first, NGramKept)
    assert isinstance(second, NGramKept)
    assert first.tokens.recurrence == ShortConv.of(2, 3)
    assert second.tokens.recurrence == ShortConv.of(3, 4)
    assert first.inputs.recurrence == ShortConv.of(3 * 56, 10)
    assert second.inputs.recurrence == ShortConv.of(3 * 56, 13)
    kept = [each for of in (first, second) for each in (of.states, of.tokens, of.inputs)]
    assert slot_bytes(arch, 1) == sum(RecurrentStates.slot_bytes(each.recurrence, 1) for each in kept)
    for idx, each in enumerate(kept):
        each.inputs.fill_(idx + 1)
    assert [float(each.inputs.mean()) for each in kept] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_digits_of_every_token_are_exact(dtype: torch.dtype) -> None:
    digits_VN = digits_of_tokens(70_000)
    assert digits_VN.shape == (70_000, NUM_DIGITS)
    assert torch.equal(tokens_of_digits(digits_VN.to(dtype)), torch.arange(70_000))


def test_rows_of_the_table_are_parted_into_embeddings_and_tokens() -> None:
    source = source_of()
    embed_VD = torch.randn(101, 56)
    table_VF = with_layer_inputs(embed_VD, source.outer(), source.arch)
    x_TD, inputs = parted(table_VF[5:9], source.arch)
    assert torch.equal(x_TD, embed_VD[5:9])
    assert inputs is not None
    assert [each.tolist() for each in inputs] == [[5, 6, 7, 8]] * 3


def test_a_prefix_that_is_cached_changes_no_token() -> None:
    check_cached_prefix(source_of())


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_is_cut_between_the_tokens_of_an_n_gram_has_the_same_rows(cut: int) -> None:
    """The budget of a step ends a chunk so many tokens into the prompt."""
    source = source_of()
    prompt = (7, 5, 9, 11, 5, 5, 3, 8)
    requests = [replace(REQUESTS[0], prompt=prompt)]
    whole = engine_of(source, prefix_cache=False).generate(requests)[0]
    parts = engine_of(source, prefix_cache=False, max_step_tokens=cut, max_batch_size=1).generate(requests)[0]
    assert parts.tokens == whole.tokens
    torch.testing.assert_close(parts.logprobs, whole.logprobs, rtol=1e-4, atol=1e-4)


def test_requests_that_lose_their_blocks_go_on() -> None:
    check_preemption(source_of(), slots=0)


@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_speculation_changes_no_token(kind: str) -> None:
    check_speculation(source_of(), kind)


def test_scores_are_those_of_the_decoder_and_no_layer_is_read_alone() -> None:
    source = source_of()
    check_scores(source, streamed=False)
    with pytest.raises(UsageError, match="or of n-grams"):
        StreamedModel(source, device=CPU, config=EngineConfig(max_model_len=512))

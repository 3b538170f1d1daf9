"""Which chunks of a step run together, and with which kernels."""

from typing import Any

import pytest
import torch

from compress.runtime.batch import PrefillBatch
from compress.runtime.generation import Generation
from compress.runtime.prefill import Prefill
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduled import PrefillChunk


def chunk(prompt_len: int, computed: int, num_tokens: int) -> PrefillChunk:
    prompt = tuple(range(prompt_len))
    generation = Generation(Request("", prompt, SamplingParams(1)), 0.0, list(prompt))
    generation.blocks = list(range(1, 2 + prompt_len // 4))
    generation.num_computed = computed
    generation.prefill_end = prompt_len
    return PrefillChunk(generation, num_tokens)


@pytest.mark.parametrize(
    ("chunks", "passes"),
    [
        ([(5, 0, 5), (8, 0, 8)], [((5,), True), ((8,), True)]),
        ([(5, 0, 5), (20, 0, 20), (3, 0, 3)], [((5, 3), True), ((20,), False)]),
        ([(40, 32, 8)], [((8,), True)]),
        ([(40, 36, 4), (5, 0, 5), (30, 26, 4)], [((5,), True), ((4, 4), True)]),
        ([(40, 32, 8), (40, 32, 8)], [((8, 8), False)]),
    ],
    ids=["short prompts", "a long one", "behind a cached prefix", "two of them", "too many of them"],
)
def test_batches_of_few_rows_are_short(
    chunks: list[tuple[int, int, int]], passes: list[tuple[tuple[int, ...], bool]]
) -> None:
    seen = []

    def run(batch: PrefillBatch, **how: Any) -> torch.Tensor:
        seen.append((batch.query_lens, how["short"]))
        return torch.zeros(len(batch.wanted_rows_W), 7)

    prefill = Prefill(run, block_size=4, short_prompt_rows=8, device=torch.device("cpu"))
    prefill.launch([chunk(*each) for each in chunks])
    assert seen == passes

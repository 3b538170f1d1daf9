"""Prompt lookup against a search that is written as it is said."""

import numpy as np
import pytest
import torch

from compress.runtime.speculative.ngram import NGram, continuation


def searched(tokens: list[int], limit: int, options: NGram) -> list[int]:
    for length in range(options.max_ngram, options.min_ngram - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length : start + length + limit]
    return []


@pytest.mark.parametrize("options", [NGram(), NGram(max_ngram=1), NGram(max_ngram=3, min_ngram=2)], ids=str)
def test_the_longest_ending_is_found_where_it_was_last(options: NGram) -> None:
    generator = torch.Generator().manual_seed(0)
    found = 0
    for case in range(400):
        vocab_size = 2 + case % 9
        length = 1 + case % 31
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        drafts = continuation(np.array(tokens), case % 5, options).tolist()
        assert drafts == searched(tokens, case % 5, options)
        found += bool(drafts)
    assert found > 100

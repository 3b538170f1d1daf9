"""The overlap of two texts against sets of tuples."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.corpus import Document, python_documents
from compress.data.overlap import overlap


@pytest.fixture(scope="module")
def evaluation() -> list[Document]:
    return list(python_documents("evaluation"))


def ngrams(document: Document, size: int) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", document.text.lower())
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["a", "b", "C", "d."]), max_size=14).map(" ".join), min_size=2, max_size=6
    ),
    size=st.integers(1, 4),
)
def test_overlap_counts_like_sets_of_tuples(texts, size):
    documents = [Document(str(idx), text) for idx, text in enumerate(texts)]
    calibration = documents[: len(documents) // 2]
    evaluation = documents[len(documents) // 2 :]
    seen = {gram for d in calibration for gram in ngrams(d, size)}
    held_out = [gram for d in evaluation for gram in ngrams(d, size)]
    shared = [gram for gram in held_out if gram in seen]
    found = overlap(calibration, evaluation, ngram=size)
    assert (found.num_shared, found.num_ngrams, found.example) == (
        len(shared),
        len(held_out),
        " ".join(shared[0]) if shared else None,
    )


def test_overlap_of_a_text_with_itself_is_whole_and_with_other_words_nothing(evaluation):
    assert overlap(evaluation, evaluation).shared_frac == 1.0
    other_words = [Document(d.id, re.sub(r"(\w+)", r"x\1x", d.text)) for d in evaluation]
    found = overlap(other_words, evaluation)
    assert (found.num_shared, found.example) == (0, None)
    assert found.num_ngrams > 50_000


def test_the_parts_of_the_embedded_text_share_little(evaluation):
    found = overlap(python_documents("calibration"), evaluation)
    assert found.num_ngrams > 50_000
    assert found.shared_frac < 0.03

"""The check that evaluation text does not occur in the text that a model was calibrated or trained on too."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.data.corpus import Document


@dataclass(frozen=True)
class Overlap:
    """Numbers of word n-grams of the evaluation text, and of those that the calibration text also has;
    `example` is the first shared one."""

    num_shared: int
    num_ngrams: int
    example: str | None

    @property
    def shared_frac(self) -> float:
        return self.num_shared / self.num_ngrams if self.num_ngrams else 0.0


def overlap(calibration: Iterable[Document], evaluation: Iterable[Document], *, ngram: int = 13) -> Overlap:
    """Count the word n-grams of the evaluation text (lower case, without punctuation, within a document) and
    those of them that occur in the calibration text.

    n-grams are compared by 64-bit hashes: for 10^7 against 10^5 the chance of one false match is below 10^-6.
    13 words is the length that GPT-3's contamination study settled on (arXiv 2005.14165, appendix C).
    """
    vocabulary: dict[str, int] = {}
    docs = [
        [vocabulary.setdefault(word, len(vocabulary) + 1) for word in _words(document)]
        for document in evaluation
    ]
    starts = [(doc_idx, start) for doc_idx, doc in enumerate(docs) for start in range(len(doc) - ngram + 1)]
    if not starts:
        return Overlap(0, 0, None)
    known, position_of = np.unique(
        np.concatenate([_ngram_hashes(doc, ngram) for doc in docs]), return_inverse=True
    )
    seen = np.zeros(len(known), dtype=np.bool_)
    for document in calibration:
        hashes = _ngram_hashes(
            [vocabulary.get(word, 0) for word in _words(document)], ngram
        )  # 0: a word that evaluation never has
        place = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        seen[place[known[place] == hashes]] = True
    shared = np.flatnonzero(seen[position_of])
    if not len(shared):
        return Overlap(0, len(starts), None)
    doc_idx, start = starts[shared[0]]
    names = list(vocabulary)
    return Overlap(
        len(shared), len(starts), " ".join(names[idx - 1] for idx in docs[doc_idx][start : start + ngram])
    )


def _words(document: Document) -> list[str]:
    return re.findall(r"\w+", document.text.lower())


def _ngram_hashes(word_ids: Sequence[int], ngram: int) -> NDArray[np.uint64]:
    """Return one hash for each start: a polynomial in mixed word ids modulo 2^64 (the mixing is the finaliser
    of splitmix64)."""
    num = max(len(word_ids) - ngram + 1, 0)
    mixed = np.asarray(word_ids, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes = np.zeros(num, dtype=np.uint64)
    for offset in range(ngram):
        hashes = hashes * np.uint64(0xD1342543DE82EF95) + mixed[offset : offset + num]
    return hashes

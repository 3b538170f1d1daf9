"""Token sets: determinism, the windows of convention A, exact byte counts, sampling laws."""

import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.data.corpus import Document, python_documents
from compress.data.tokenizer import load_tokenizer
from compress.data.tokens import load_token_set, save_token_set, tokenize
from compress.errors import StorageError, UnsupportedFormat, UsageError


@pytest.fixture(scope="module")
def evaluation() -> list[Document]:
    return list(python_documents("evaluation"))


@pytest.fixture(scope="module")
def tokenizer(evaluation) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator((d.text for d in evaluation), trainer)
    return tokenizer


def test_without_a_seed_the_windows_are_those_of_the_joined_text(tokenizer, evaluation):
    ids = tokenizer.encode("\n\n".join(d.text for d in evaluation), add_special_tokens=False).ids
    whole = tokenize(evaluation, tokenizer, num_samples=None, seq_len=128, seed=None, bos=None)
    assert whole.tokens_NS.flatten().tolist() == ids[: len(ids) // 128 * 128]
    first = tokenize(iter(evaluation), tokenizer, num_samples=300, seq_len=128, seed=None, bos=None)
    assert torch.equal(first.tokens_NS, whole.tokens_NS[:300])
    assert first.tokens_NS.dtype == torch.int32
    assert first.source["text_digest"] == whole.source["text_digest"]


@pytest.mark.parametrize("packing", ["concatenate", "first_tokens"])
def test_a_sample_depends_on_the_seed_and_the_text_but_not_on_the_order(tokenizer, evaluation, packing):
    def draw(documents, seed):
        return tokenize(
            documents, tokenizer, num_samples=16, seq_len=64, seed=seed, bos=None, packing=packing
        )

    shuffled = random.Random(0).sample(evaluation, len(evaluation))
    assert draw(evaluation, 1).digest() == draw(evaluation, 1).digest() == draw(shuffled, 1).digest()
    assert draw(evaluation, 1).digest() != draw(evaluation, 2).digest()


@pytest.mark.parametrize("packing", ["concatenate", "first_tokens"])
def test_a_larger_sample_begins_with_the_smaller_one(tokenizer, evaluation, packing):
    small, large = (
        tokenize(evaluation, tokenizer, num_samples=n, seq_len=64, seed=3, bos=None, packing=packing)
        for n in (5, 33)
    )
    assert torch.equal(small.tokens_NS, large.tokens_NS[:5])


def test_every_document_offers_one_excerpt_before_any_offers_a_second(tokenizer):
    documents = [Document(str(idx), f"only{idx} " * 4) for idx in range(30)] + [
        Document("book", "long story " * 20_000)
    ]
    drawn = tokenize(documents, tokenizer, num_samples=12, seq_len=64, seed=0, bos=None)
    text = tokenizer.decode(drawn.tokens_NS.flatten().tolist())
    assert {f"only{idx}" for idx in range(30)} <= set(re.findall(r"only\d+", text))
    assert "long story" in text


def test_a_sample_is_text_of_the_corpus(tokenizer, evaluation):
    drawn = tokenize(evaluation, tokenizer, num_samples=20, seq_len=64, seed=7, bos=None)
    texts = [d.text for d in evaluation]
    for row in drawn.tokens_NS.tolist():
        pieces = [
            piece for piece in tokenizer.decode(row).split("\n\n") if len(piece) > 20 and "�" not in piece
        ]
        assert all(any(piece.strip("\n") in text for text in texts) for piece in pieces)


def test_first_tokens_are_beginnings_of_documents_that_are_long_enough(tokenizer, evaluation):
    drawn = tokenize(
        evaluation, tokenizer, num_samples=10, seq_len=200, seed=0, bos=None, packing="first_tokens"
    )
    heads = {tuple(tokenizer.encode(d.text).ids[:200]) for d in evaluation}
    assert {tuple(row) for row in drawn.tokens_NS.tolist()} <= heads


def test_bos_stands_first_and_takes_no_text_away(tokenizer, evaluation):
    with_bos, without = (
        tokenize(evaluation, tokenizer, num_samples=8, seq_len=length, seed=None, bos=bos)
        for length, bos in ((33, 0), (32, None))
    )
    assert with_bos.tokens_NS[:, 0].tolist() == [0] * 8
    assert torch.equal(with_bos.tokens_NS[:, 1:], without.tokens_NS)
    assert with_bos.num_bytes == with_bos.num_scored_bytes == without.num_bytes > without.num_scored_bytes


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
def test_bytes_are_those_of_the_text_even_where_a_window_cuts_a_character(tokenizer, text):
    text = text.replace("<s>", "")
    documents = [Document("a", text + "€")]
    num_tokens = len(tokenizer.encode(text + "€").ids)
    tokens = tokenize(
        documents, tokenizer, num_samples=None, seq_len=1, seed=None, bos=None
    )  # a window per token cuts every character
    assert tokens.tokens_NS.shape == (num_tokens, 1)
    assert tokens.num_bytes == len((text + "€").encode())
    assert tokens.num_scored_bytes == 0


def test_bytes_of_a_sentencepiece_vocabulary():
    vocab = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "▁": 4, "h": 5, "é": 6, "▁h": 7}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "h")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    text = "h hé €"
    tokens = tokenize([Document("a", text)], tokenizer, num_samples=None, seq_len=1, seed=None, bos=None)
    assert tokens.num_bytes == len(text.encode())


def test_a_tokenizer_that_loses_bytes_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(UnsupportedFormat, match="number of bytes of a token"):
        tokenize([Document("a", "a")], tokenizer, num_samples=None, seq_len=1, seed=None, bos=None)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("packing", ["concatenate", "first_tokens"])
def test_too_little_text_is_said_with_numbers(tokenizer, seed, packing):
    with pytest.raises(
        UsageError,
        match=r"gives 0 windows of 512 text tokens .* 4 are needed; it has 1 documents with 15 characters",
    ):
        tokenize(
            [Document("a", "a few words now")],
            tokenizer,
            num_samples=4,
            seq_len=512,
            seed=seed,
            bos=None,
            packing=packing,
        )


@pytest.mark.parametrize(
    ("num_samples", "seq_len", "seed", "bos"), [(0, 8, 0, None), (4, 1, 0, 0), (None, 8, 0, None)]
)
def test_impossible_requests_are_refused(tokenizer, num_samples, seq_len, seed, bos):
    with pytest.raises(UsageError):
        tokenize(
            [Document("a", "text")], tokenizer, num_samples=num_samples, seq_len=seq_len, seed=seed, bos=bos
        )


def test_half_a_surrogate_pair_in_json_text_does_not_stop_a_run(tokenizer):
    tokens = tokenize(
        [Document("a", "x \ud83d y " * 20)], tokenizer, num_samples=1, seq_len=16, seed=0, bos=None
    )
    assert tokens.tokens_NS.shape == (1, 16)


def test_a_token_set_survives_its_file_and_the_file_is_deterministic(tokenizer, evaluation, tmp_path):
    facts = {"title": "Téxt", "license": "PSF-2.0", "tokenizer_digest": "sha256:0"}
    tokens = tokenize(evaluation, tokenizer, num_samples=4, seq_len=32, seed=0, bos=0, facts=facts)
    for name in ("a", "b"):
        save_token_set(tokens, tmp_path / name)
    loaded = load_token_set(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert loaded.digest() == tokens.digest()
    assert (loaded.source, loaded.num_bytes, loaded.num_scored_bytes) == (
        tokens.source,
        tokens.num_bytes,
        tokens.num_scored_bytes,
    )
    assert facts.items() <= loaded.source.items()


def test_files_that_are_no_token_set_are_refused(tmp_path):
    save_file({"tokens": torch.zeros(2, 2)}, tmp_path / "weights.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not a header")
    with pytest.raises(UnsupportedFormat):
        load_token_set(tmp_path / "weights.safetensors")
    for name in ("broken.safetensors", "missing.safetensors"):
        with pytest.raises(StorageError, match=name):
            load_token_set(tmp_path / name)


def test_a_tokenizer_is_loaded_without_its_truncation_and_padding(tokenizer, tmp_path):
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    copy.save(str(tmp_path / "tokenizer.json"))
    loaded, digest = load_tokenizer(tmp_path)
    text = "def function(argument): return argument"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids
    assert digest == load_tokenizer(tmp_path)[1]


def test_other_tokenizer_files_are_refused(tmp_path):
    with pytest.raises(UnsupportedFormat, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedFormat, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\n")
    with pytest.raises(StorageError, match=r"tokenizer\.json is a Git LFS pointer"):
        load_tokenizer(tmp_path)

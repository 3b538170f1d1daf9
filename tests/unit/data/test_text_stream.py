"""Text of generated tokens, piece by piece, against the tokenizer's own decoding of all of them at once."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from compress.data.text_stream import TextStream
from compress.registry.model_source import BUILTIN

BYTE_LEVEL = Tokenizer.from_file(str(BUILTIN["reference"] / "tokenizer.json"))
TEXTS = [
    "Hello wörld 日本語 🎉👩‍👩‍👧 x",
    "  two spaces\n\n  def f(): pass",
    "🎉" * 5,
    "\ufffd in the text \ufffd",
    "",
]


def sentencepiece() -> Tokenizer:
    """A tokenizer as SentencePiece exports have: spaces as U+2581, bytes as <0xNN>, one leading space dropped
    by the decoder.
    """
    words = ["▁the", "▁cat", "s", "▁", "h", "i", "▁s", "at"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {word: len(vocab) + idx for idx, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces_of(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.feed([token]) for token in tokens), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(TextStream(BYTE_LEVEL), ids)
    assert "".join(pieces) == text
    for piece in pieces:
        piece.encode("utf-8")  # whole characters: no half of a surrogate pair
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_any_tokens_in_any_portions_give_what_the_tokenizer_decodes() -> None:
    generator = random.Random(0)
    single_bytes = [idx for token, idx in BYTE_LEVEL.get_vocab().items() if len(token) == 1]
    for size in range(200):
        known = single_bytes if size % 2 else range(BYTE_LEVEL.get_vocab_size())
        ids = generator.choices(known, k=size % 24)
        portion = generator.randint(1, 5)
        stream = TextStream(BYTE_LEVEL)
        pieces = [stream.feed(ids[start : start + portion]) for start in range(0, len(ids), portion)]
        whole = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
        assert "".join(pieces) + stream.finish() == whole == stream.text
        assert stream.num_tokens == len(ids)


def test_a_leading_space_is_kept_inside_a_text_of_sentencepiece_tokens() -> None:
    tokenizer = sentencepiece()
    vocab = tokenizer.get_vocab()
    prompt = [vocab["▁the"]]
    ids = [
        vocab[word] for word in ("▁cat", "s", "▁s", "at", "▁", "<0xF0>", "<0x9F>", "<0x8E>", "<0x89>", "▁the")
    ]
    stream = TextStream(tokenizer, prompt=prompt)
    pieces = pieces_of(stream, ids)
    assert (
        tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(prompt + ids) == "the cats sat 🎉 the"
    )
    assert pieces[0] == " cat"
    assert pieces[5:9] == ["", "", "", "🎉"]


def test_text_ends_before_the_first_stop_string_wherever_tokens_cut_it() -> None:
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choice("ab\n#") for _ in range(20))
        stop = ["".join(generator.choice("ab\n#") for _ in range(generator.randint(1, 4))) for _ in range(2)]
        ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
        stream = TextStream(BYTE_LEVEL, stop=stop)
        shown = "".join(pieces_of(stream, ids))
        places = [place for place in (text.find(each) for each in stop) if place >= 0]
        assert shown == (text[: min(places)] if places else text)
        assert stream.stopped == bool(places)
        if places:
            ends = [text.find(each) + len(each) for each in stop if each in text]
            assert len(BYTE_LEVEL.decode(ids[: stream.num_tokens])) >= min(ends)
            assert stream.feed(ids) == ""


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_decided() -> None:
    letters = {letter: BYTE_LEVEL.token_to_id(letter) for letter in "abc"}
    stream = TextStream(BYTE_LEVEL, stop=["abc"])
    assert [stream.feed([letters[each]]) for each in "aaba"] == ["", "a", "", "aba"[:2]]
    assert stream.finish() == "a"


def test_special_tokens_have_no_text_and_cut_no_character() -> None:
    ids = BYTE_LEVEL.encode("né", add_special_tokens=False).ids
    end = BYTE_LEVEL.token_to_id("<|endoftext|>")
    assert "".join(pieces_of(TextStream(BYTE_LEVEL), [end, *ids, end])) == "né"


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    end = BYTE_LEVEL.token_to_id("<|endoftext|>")
    ids = [*BYTE_LEVEL.encode("né", add_special_tokens=False).ids, *[end] * 500, BYTE_LEVEL.token_to_id("x")]
    sizes = []

    class Counting:
        def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
            sizes.append(len(tokens))
            text: str = BYTE_LEVEL.decode(tokens, skip_special_tokens=skip_special_tokens)
            return text

    assert "".join(pieces_of(TextStream(Counting()), ids)) == "néx"  # type: ignore[arg-type]
    assert max(sizes) < 30


def test_a_prompt_that_ends_inside_a_character_is_continued_by_the_whole_character() -> None:
    ids = BYTE_LEVEL.encode("a 日本語 🎉", add_special_tokens=False).ids
    whole = BYTE_LEVEL.decode(ids)
    cuts = [cut for cut in range(1, len(ids)) if BYTE_LEVEL.decode(ids[:cut]).endswith("\ufffd")]
    assert len(cuts) > 4
    for cut in cuts:
        before = BYTE_LEVEL.decode(ids[:cut]).rstrip("\ufffd")
        assert before + "".join(pieces_of(TextStream(BYTE_LEVEL, prompt=ids[:cut]), ids[cut:])) == whole


def test_byte_level_prompts_do_not_change_the_text() -> None:
    tokenizer = BYTE_LEVEL
    ids = tokenizer.encode("wörld 🎉 and more of it", add_special_tokens=False).ids
    for cut in range(len(ids)):
        before = tokenizer.decode(ids[:cut])
        if not before.endswith("\ufffd"):
            assert before + "".join(
                pieces_of(TextStream(tokenizer, prompt=ids[:cut]), ids[cut:])
            ) == tokenizer.decode(ids)

"""Answers in rendered conversations, against texts whose answers were marked by hand; and which tokens count,
through encoding, excerpts, packing, windows and files."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from compress.data.answers import answer_spans
from compress.data.chat import ChatTemplate
from compress.data.corpus import Document
from compress.data.excerpts import EncodedExcerpt, Excerpt, Windows, encoded_excerpts, excerpts
from compress.data.tokens import TokenSet, load_token_set, save_token_set, tokenize
from compress.errors import StorageError, UnsupportedFormat, UsageError
from tests.support.chat_templates import (
    CASES,
    CHATML,
    MISTRAL,
    REASONING,
    SPECIAL,
    assistant,
    read_marks,
    user,
)

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls"]


def byte_level(*, trim_offsets: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([read_marks(case[3])[0] for case in CASES.values()] * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in SPECIAL_TOKENS]
    )
    return tokenizer


def sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=words, show_progress=False)
    texts = [read_marks(case[3])[0].replace("日", "") for case in CASES.values()]
    tokenizer.train_from_iterator(texts * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in SPECIAL_TOKENS]
    )
    return tokenizer


TOKENIZERS = {
    "byte level": lambda: byte_level(trim_offsets=False),
    "byte level, offsets without spaces": lambda: byte_level(trim_offsets=True),
    "sentencepiece": sentence_piece,
}


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request) -> Tokenizer:
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_that_were_marked_by_hand(name):
    source, messages, tools, marked = CASES[name]
    template = ChatTemplate(source, SPECIAL[source])
    text = template.render(messages, add_generation_prompt=False, tools=tools)
    expected_text, expected = read_marks(marked)
    assert text == expected_text
    assert answer_spans(template, messages, text, tools=tools) == expected


def test_a_conversation_without_an_answer_has_none():
    template = ChatTemplate(CHATML, {})
    assert answer_spans(template, [user("Hi")], template.render([user("Hi")])) == ()


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (CHATML.replace("m.content +", "m.content[:1] +"), [assistant("ab"), user("b")]),
        (REASONING, [user("1"), assistant("<think>Hm</think>One."), user("2"), assistant("Two.")]),
        (MISTRAL, [{"role": "system", "content": "s"}, user("1"), assistant("")]),
    ],
    ids=["changes an answer", "drops a part of an answer", "an empty answer"],
)
def test_a_template_that_hides_an_answer_is_refused(source, messages):
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    text = template.render(messages, add_generation_prompt=False)
    with pytest.raises(UsageError, match="Set `count: all`"):
        answer_spans(template, messages, text)


def test_generation_blocks_write_no_marks_unless_asked():
    source, messages, _, marked = CASES["generation blocks"]
    assert ChatTemplate(source, SPECIAL[source]).render(messages) == read_marks(marked)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_that_count_are_those_of_the_answers(tokenizer, name):
    text, spans = read_marks(CASES[name][3])
    ((ids, counted),) = encoded_excerpts(tokenizer, [Excerpt(text, spans)], "\n\n")
    assert ids == tokenizer.encode(text + "\n\n", add_special_tokens=False).ids
    decode = Tokenizer.decode
    counts = [idx for idx, each in zip(ids, counted, strict=True) if each]
    found = decode(tokenizer, counts, skip_special_tokens=False)
    assert "".join(found.split()) == "".join("".join(text[begin:end] for begin, end in spans).split())


def conversations(num: int, seed: int = 0) -> list[Document]:
    """Conversations in ChatML of random words, in which answers are capitals and all else is not."""
    rng = random.Random(seed)
    template = ChatTemplate(CHATML, SPECIAL[CHATML])
    documents = []
    for idx in range(num):
        messages = []
        for _ in range(rng.randint(1, 4)):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(1, 30))) for _ in range(2))
            messages += [user(question), assistant(answer.upper())]
        text = template.render(messages, add_generation_prompt=False)
        documents.append(Document(str(idx), text, answer_spans(template, messages, text)))
    return documents


@pytest.mark.parametrize("packing", ["concatenate", "first_tokens"])
@pytest.mark.parametrize("with_bos", [False, True])
def test_counted_tokens_are_answers_in_every_window(packing, with_bos):
    tokenizer = byte_level(trim_offsets=True)
    bos = tokenizer.token_to_id("<s>") if with_bos else None
    num, seq_len = (20, 24) if packing == "concatenate" else (10, 160)
    drawn = tokenize(
        conversations(60),
        tokenizer,
        num_samples=num,
        seq_len=seq_len,
        seed=3,
        bos=bos,
        packing=packing,
        separator="",
    )
    assert drawn.counted_NS.shape == drawn.tokens_NS.shape == (num, seq_len)
    assert bool(drawn.counted_NS[:, 1:].any(dim=1).all())
    end = tokenizer.token_to_id("<|im_end|>")
    starts = tokenizer.token_to_id("<|im_start|>")
    for ids, counted in zip(drawn.tokens_NS.tolist(), drawn.counted_NS.tolist(), strict=True):
        for idx, counts in zip(ids, counted, strict=True):
            word = tokenizer.decode([idx])
            if idx in (starts, bos):
                assert not counts
            elif idx != end and word.strip().isalpha():
                assert counts == word.strip().isupper(), word
    assert drawn.source["num_counted"] == int(drawn.counted_NS.sum())


def test_scored_bytes_are_those_of_the_counted_tokens():
    tokenizer = byte_level(trim_offsets=False)
    drawn = tokenize(conversations(40), tokenizer, num_samples=8, seq_len=32, seed=0, bos=None, separator="")
    texts = [
        tokenizer.decode([idx], skip_special_tokens=False)
        for ids, counted in zip(
            drawn.tokens_NS[:, 1:].tolist(), drawn.counted_NS[:, 1:].tolist(), strict=True
        )
        for idx, counts in zip(ids, counted, strict=True)
        if counts
    ]
    assert drawn.num_scored_bytes == sum(len(text.encode()) for text in texts)


def test_windows_without_a_predicted_answer_are_replaced_by_the_next_ones():
    tokenizer = byte_level(trim_offsets=False)
    questions = [Document(f"q{idx}", "rain " * 40, ()) for idx in range(20)]
    answers = [Document(f"a{idx}", "RAIN " * 40, ((0, 200),)) for idx in range(20)]
    drawn = tokenize(
        [*questions, *answers], tokenizer, num_samples=30, seq_len=16, seed=1, bos=None, separator=""
    )
    assert drawn.source["windows_without_counted"] > 0
    assert bool(drawn.counted_NS[:, 1:].any(dim=1).all())
    with pytest.raises(UsageError, match="in which nothing counts"):
        tokenize(questions, tokenizer, num_samples=2, seq_len=16, seed=1, bos=None)


def test_a_window_whose_only_answer_nothing_predicts_is_left_out():
    windows = Windows(4, 2, first_scored=1)
    flags = [True, False, False, False] + [False, True, False, False] + [False] * 4 + [True] * 4
    windows.add(EncodedExcerpt(list(range(16)), flags))
    assert windows.ids == [4, 5, 6, 7, 12, 13, 14, 15]
    assert windows.num_without == 2


def test_excerpts_keep_the_ranges_at_their_characters():
    document = conversations(1, seed=5)[0]
    size = 60
    pieces = excerpts(document, size)
    assert "".join(piece.text for piece in pieces).strip() == document.text.strip()
    counted = "".join(piece.text[begin:end] for piece in pieces for begin, end in piece.counted)
    assert counted == "".join(document.text[begin:end] for begin, end in document.counted)
    assert max(len(piece.text) for piece in pieces) <= size < len(document.text)


def test_a_larger_sample_begins_with_the_smaller_one_and_evaluation_counts_every_token():
    tokenizer = byte_level(trim_offsets=False)
    settings = {"seq_len": 24, "bos": None, "separator": ""}
    small, large = (
        tokenize(conversations(60), tokenizer, num_samples=num, seed=0, **settings) for num in (4, 17)
    )
    assert torch.equal(small.tokens_NS, large.tokens_NS[:4])
    assert torch.equal(small.counted_NS, large.counted_NS[:4])
    judged = tokenize(conversations(60), tokenizer, num_samples=4, seed=None, **settings)
    plain = [Document(each.id, each.text) for each in conversations(60)]
    assert judged.counted_NS is None
    assert judged.digest() == tokenize(plain, tokenizer, num_samples=4, seed=None, **settings).digest()


def test_what_counts_survives_its_file_and_is_in_the_digest(tmp_path: Path):
    tokens_NS = torch.arange(8, dtype=torch.int32).view(2, 4)
    counted_NS = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    whole = TokenSet(tokens_NS, 8, 6, {"title": "t"})
    some = TokenSet(tokens_NS, 8, 6, {"title": "t"}, counted_NS)
    save_token_set(some, tmp_path / "some.safetensors")
    save_token_set(whole, tmp_path / "whole.safetensors")
    assert torch.equal(load_token_set(tmp_path / "some.safetensors").counted_NS, counted_NS)
    assert load_token_set(tmp_path / "whole.safetensors").counted_NS is None
    digests = {each.digest() for each in (whole, some, TokenSet(tokens_NS, 8, 6, {}, ~counted_NS))}
    assert len(digests) == 3
    save_token_set(TokenSet(tokens_NS, 8, 6, {}, counted_NS[:1]), tmp_path / "bad.safetensors")
    with pytest.raises(StorageError, match="which tokens count"):
        load_token_set(tmp_path / "bad.safetensors")


def test_a_tokenizer_that_loses_its_place_is_refused():
    class Shuffled:
        def encode_batch(self, texts, add_special_tokens):
            return [type("E", (), {"ids": [1, 2], "offsets": [(2, 4), (0, 2)]})() for _ in texts]

    with pytest.raises(UnsupportedFormat, match="which characters a token stands for"):
        encoded_excerpts(Shuffled(), [Excerpt("abcd", ((0, 2),))])

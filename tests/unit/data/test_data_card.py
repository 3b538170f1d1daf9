"""Data cards: what they accept, what they refuse and where, and that each kind reads the same text as a
direct reading of its files.
"""

import bz2
import codecs
import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pytest

from compress.data import card as card_module
from compress.data.card import documents, load_card, pin, text_digest
from compress.data.corpus import Document, is_evaluation, python_documents
from compress.errors import RecipeError, StorageError, UsageError

CARDS = Path(__file__).resolve().parents[3] / "calib_data"
HEAD = "title: t\nlicense: CC0-1.0\nsource: made up\n"
ROWS = [
    {"id": f"row-{idx}", "text": f"Text {idx} über\n", "lang": "de" if idx % 3 else "en"} for idx in range(40)
]


def write_card(folder: Path, body: str) -> str:
    path = folder / "card.yaml"
    path.write_text(HEAD + body)
    return str(path)


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize("path", sorted(CARDS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_card_of_the_repository_is_valid(path):
    assert load_card(str(path)).facts["license"]


@pytest.mark.parametrize(
    ("file", "ref"), [("python.yaml", "builtin://python"), ("python-eval.yaml", "builtin://python-eval")]
)
def test_the_builtin_references_are_the_cards_of_the_repository(file, ref):
    assert load_card(str(CARDS / file)).spec == load_card(ref).spec


def test_builtin_documents_are_the_corpus():
    assert list(documents(load_card("builtin://python-eval"))) == list(python_documents("evaluation"))


def test_code_and_prose_are_the_corpus_in_two():
    whole = [document.id for document in documents(load_card("builtin://python-eval"))]
    code, prose = (
        [document.id for document in documents(load_card(f"builtin://python-eval/{kind}"))]
        for kind in ("code", "prose")
    )
    assert sorted(code + prose) == sorted(whole)
    assert "trace" in code
    assert all(name.startswith("topics/") for name in prose)


def test_an_unknown_builtin_gets_a_suggestion():
    with pytest.raises(UsageError, match="Did you mean 'builtin://python'"):
        load_card("builtin://pyton")


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd)],
)
def test_compressed_files_read_like_plain_ones(tmp_path, suffix, pack):
    (tmp_path / f"rows.jsonl{suffix}").write_bytes(pack(jsonl(ROWS)))
    card = load_card(write_card(tmp_path, f"kind: local\nformat: jsonl\npaths: [rows.jsonl{suffix}]\n"))
    assert list(documents(card)) == [Document(row["id"], row["text"]) for row in ROWS]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", b'{"text": "One."}\n{"text": "Two."}\n'),
        ("rows.csv", b"text,idx\nOne.,0\nTwo.,1\n"),
        ("rows.txt", b"One. Two."),
    ],
)
@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress)])
def test_a_byte_order_mark_is_no_text(tmp_path, name, text, suffix, pack):
    kind = name.split(".")[1]
    (tmp_path / f"{name}{suffix}").write_bytes(pack(codecs.BOM_UTF8 + text))
    card = load_card(write_card(tmp_path, f"kind: local\nformat: {kind}\npaths: [{name}{suffix}]\n"))
    assert " ".join(document.text for document in documents(card)) == "One. Two."


def test_globs_are_sorted_relative_to_the_card_and_no_file_is_read_twice(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt"):
        (tmp_path / "sub" / name).write_text(f"text of {name}\r\nend")
    card = load_card(write_card(tmp_path, "kind: local\nformat: txt\npaths: [sub/b.txt, 'sub/*.txt']\n"))
    monkeypatch.chdir("/")
    assert list(documents(card)) == [
        Document("b.txt", "text of b.txt\r\nend"),
        Document("a.txt", "text of a.txt\r\nend"),
    ]


def test_where_part_and_limit_select_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS))
    body = "kind: local\nformat: jsonl\npaths: [rows.jsonl]\n"
    ids = {
        rule: [d.id for d in documents(load_card(write_card(tmp_path, body + rule)))]
        for rule in ("where: {lang: en}", "limit: 5", "part: evaluation", "part: calibration")
    }
    assert ids["where: {lang: en}"] == [row["id"] for row in ROWS if row["lang"] == "en"]
    assert ids["limit: 5"] == [row["id"] for row in ROWS[:5]]
    assert ids["part: evaluation"] == [row["id"] for row in ROWS if is_evaluation(row["id"])]
    assert len(ids["part: evaluation"]) + len(ids["part: calibration"]) == len(ROWS)


def test_chat_turns_become_paragraphs_and_rows_without_id_are_numbered(tmp_path):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    (tmp_path / "chat.jsonl").write_bytes(jsonl([{"messages": turns}]))
    card = load_card(
        write_card(tmp_path, "kind: local\nformat: jsonl\npaths: [chat.jsonl]\ntext_field: messages\n")
    )
    assert list(documents(card)) == [Document("chat.jsonl:1", "User: Why?\n\nAssistant: Because.")]


def test_a_transcript_has_the_texts_of_parts_and_no_calls_of_tools(tmp_path):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "so?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
        {"role": "assistant", "content": "Because."},
    ]
    (tmp_path / "chat.jsonl").write_bytes(jsonl([{"text": turns}]))
    card = load_card(write_card(tmp_path, "kind: local\nformat: jsonl\npaths: [chat.jsonl]\n"))
    assert [each.text for each in documents(card)] == ["User: Why\nso?\n\nAssistant: Because."]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": 1, "content": "x"}, "the role of a message is text"),
        ({"role": "user", "content": None}, "the content of a message is text"),
        ({"role": "user", "content": 5}, "the content of a message is text"),
        ({"role": "user", "content": {"text": "x"}}, "the content of a message is text"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "the content of a message is text"),
    ],
)
def test_a_message_that_is_no_text_is_refused_where_it_stands(tmp_path, message, told):
    (tmp_path / "chat.jsonl").write_bytes(jsonl([{"text": "a"}, {"text": [message]}]))
    card = load_card(write_card(tmp_path, "kind: local\nformat: jsonl\npaths: [chat.jsonl]\n"))
    with pytest.raises(UsageError, match=rf"chat\.jsonl:2: field 'text': {told}"):
        list(documents(card))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"texts": "x"}\n', r"rows\.jsonl:1: the row has no field 'text'. Did you mean 'texts'"),
        (b'{"text": "x"}\n\n{"text": 3}\n', r"rows\.jsonl:3: field 'text' is neither"),
        (b'{"text": "x"\n', r"rows\.jsonl:1: not a JSON row"),
        (b'"x"\n', r"rows\.jsonl:1: a row of a jsonl file is an object"),
        (b'{"text": "x"}\n{"text": "\xff"}\n', r"rows\.jsonl:2: not UTF-8 text: .*byte 11 of the line"),
    ],
)
def test_a_bad_row_is_refused_where_it_stands(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    card = load_card(write_card(tmp_path, "kind: local\nformat: jsonl\npaths: [rows.jsonl]\n"))
    with pytest.raises(UsageError, match=message):
        list(documents(card))


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress), (".zst", zstd)])
def test_a_file_that_is_cut_off_is_not_taken_for_a_short_one(tmp_path, suffix, pack):
    packed = pack(jsonl(ROWS * 50))
    (tmp_path / f"rows.jsonl{suffix}").write_bytes(packed[: len(packed) // 2])
    card = load_card(write_card(tmp_path, f"kind: local\nformat: jsonl\npaths: [rows.jsonl{suffix}]\n"))
    with pytest.raises((StorageError, UsageError)):
        list(documents(card))


def test_a_missing_file_is_named(tmp_path):
    card = load_card(write_card(tmp_path, "kind: local\nformat: txt\npaths: ['no-*.txt']\n"))
    with pytest.raises(UsageError, match=r"names 'no-\*\.txt'"):
        list(documents(card))


@pytest.mark.parametrize(
    ("name", "stated"), [("own.jsonl", "jsonl"), ("own.jsonl.gz", "jsonl"), ("own.txt", "txt")]
)
def test_a_data_file_in_the_place_of_a_card_is_told_apart(tmp_path, name, stated):
    (tmp_path / name).write_bytes(jsonl(ROWS))
    with pytest.raises(UsageError, match=rf"'.*{name}' is a data file.*`format: {stated}`"):
        load_card(str(tmp_path / name))


def test_the_digest_guards_the_text_and_ignores_ids(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS))
    digest = text_digest(Document("other", row["text"]) for row in ROWS)
    body = f"kind: local\nformat: jsonl\npaths: [rows.jsonl]\ndigest: {digest}\n"
    card = load_card(write_card(tmp_path, body))
    assert len(list(documents(card))) == len(ROWS)
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS[1:]))
    with pytest.raises(UsageError, match=digest):
        list(documents(card))


def test_the_digest_sees_where_documents_end():
    assert text_digest([Document("a", "xy"), Document("b", "z")]) != text_digest(
        [Document("a", "x"), Document("b", "yz")]
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("kind: locl\n", r"card\.yaml:4:1: kind: unknown kind 'locl' of data card. Did you mean 'local'"),
        ("part: all\n", "a data card needs a kind"),
        (
            "kind: local\nformat: jsonl\npaths: [a]\ntext_feild: x\n",
            r"card\.yaml:7:1: text_feild: unknown key. Did you mean 'text_field'",
        ),
        (
            "kind: huggingface\ndataset: a/b\nsplit: train\n",
            "needs a `revision`, so that the same card always means the same text",
        ),
        (
            "kind: huggingface\ndataset: ../b\nsplit: train\nrevision: main\ntrust_remote_code: true\n",
            "trust_remote_code: unknown key",
        ),
        ("kind: local\nformat: txt\npaths: []\n", "paths"),
    ],
)
def test_a_wrong_card_is_refused_at_its_line(tmp_path, body, message):
    with pytest.raises(RecipeError, match=message):
        load_card(write_card(tmp_path, body))


HUB = "kind: huggingface\ndataset: org/name\nconfig: plain\nsplit: train\nrevision: {revision}\nlimit: 3\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_hub_dataset_is_streamed_at_its_commit(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS))
    calls = []
    load_dataset = datasets.load_dataset

    def local(path, **options):
        calls.append((path, options))
        return load_dataset(
            "json",
            data_files=str(tmp_path / "rows.jsonl"),
            split=options["split"],
            streaming=options["streaming"],
        )

    monkeypatch.setattr(datasets, "load_dataset", local)
    card = load_card(write_card(tmp_path, HUB.format(revision=COMMIT)))
    found = list(documents(card))
    assert [d.text for d in found] == [row["text"] for row in ROWS[:3]]
    assert len({d.id for d in found}) == 3
    assert calls == [("org/name", {"name": "plain", "split": "train", "revision": COMMIT, "streaming": True})]


def test_a_moving_revision_is_resolved_and_recorded(tmp_path, monkeypatch):
    import huggingface_hub

    class Info:
        sha = COMMIT

    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "dataset_info",
        lambda self, dataset, *, revision: Info if revision == "v1.0" else None,
    )
    pinned = pin(load_card(write_card(tmp_path, HUB.format(revision="v1.0"))))
    assert pinned.facts["revision"] == COMMIT
    assert pin(pinned) is pinned


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (
            ConnectionError("offline mode is enabled.\nmore"),
            StorageError,
            r"'org/name' .*offline mode is enabled\)",
        ),
        (
            ValueError("Unknown split 'train'."),
            UsageError,
            "cannot be read as its card says: Unknown split 'train'",
        ),
        (
            RuntimeError("Dataset scripts are no longer supported, but found name.py"),
            UsageError,
            "scripts are no longer supported",
        ),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(tmp_path, monkeypatch, raised, expected, message):
    import datasets

    def refuse(*_, **__):
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(expected, match=message):
        list(documents(load_card(write_card(tmp_path, HUB.format(revision=COMMIT)))))


def test_reading_a_card_touches_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(card_module, "_read", lambda _: pytest.fail("documents were read"))
    assert load_card(write_card(tmp_path, HUB.format(revision="main"))).facts["revision"] == "main"

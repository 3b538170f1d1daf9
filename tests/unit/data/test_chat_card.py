"""Cards of conversations: one text whatever the file, rules that select, templates, mixes and refusals."""

import json
import shutil
import struct
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from compress.data.card import documents, identity, load_card, text_digest
from compress.data.chat import ChatTemplate
from compress.data.conversation import ChatRenderer
from compress.data.mix import window_order
from compress.data.model_tokens import read_tokens
from compress.data.tokenizer import load_tokenizer
from compress.errors import RecipeError, StorageError, UsageError
from compress.registry.model_source import BUILTIN, ModelSource
from tests.support.chat_templates import CHATML, LLAMA_3, MISTRAL, SPECIAL, TOOLS

CARDS = Path(__file__).resolve().parents[3] / "calib_data"
HEAD = "title: t\nlicense: CC0-1.0\nsource: made up\nkind: local\n"
RENDERER = ChatRenderer(ChatTemplate(CHATML, SPECIAL[CHATML]))
ROWS = [
    {
        "id": f"row-{idx}",
        "messages": [
            {"role": "user", "content": f"{idx}?"},
            {"role": "assistant", "content": 'é, "so"\n' * idx},
        ]
        * (1 + idx % 2),
    }
    for idx in range(1, 9)
]


def write_card(folder: Path, body: str, name: str = "card.yaml") -> str:
    path = folder / name
    path.write_text(body if "kind: mix" in body else HEAD + body)
    return str(path)


def write_rows(folder: Path, rows=ROWS) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rendered(folder: Path, body: str, renderer: ChatRenderer = RENDERER):
    return list(documents(load_card(write_card(folder, body)), renderer))


@pytest.fixture
def chat_model(tmp_path: Path) -> ModelSource:
    """The bundled model's tokenizer and config with a chat template."""
    place = tmp_path / "model"
    place.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUILTIN["reference"] / name, place / name)
    (place / "chat_template.jinja").write_text(CHATML)
    return ModelSource(place, "toy", None, "sha256:" + "0" * 64)


JSONL = "format: jsonl\npaths: [rows.jsonl]\ntext_field: messages\n"


def test_a_conversation_has_the_same_text_in_every_kind_of_file(tmp_path):
    write_rows(tmp_path)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    lines = ["id,turns"] + [
        row["id"] + ',"' + json.dumps(row["messages"]).replace('"', '""') + '"' for row in ROWS
    ]
    (tmp_path / "rows.csv").write_text("\r\n".join(lines) + "\r\n")
    chat = "chat: {count: answers}\n"
    expected = rendered(tmp_path, JSONL + chat)
    template = ChatTemplate(CHATML, SPECIAL[CHATML])
    assert [each.text for each in expected] == [
        template.render(row["messages"], add_generation_prompt=False) for row in ROWS
    ]
    assert [each.id for each in expected] == [row["id"] for row in ROWS]
    assert all(each.counted for each in expected)
    assert (
        rendered(tmp_path, "format: parquet\npaths: [rows.parquet]\ntext_field: messages\n" + chat)
        == expected
    )
    assert rendered(tmp_path, "format: csv\npaths: [rows.csv]\ntext_field: turns\n" + chat) == expected


def test_columns_become_turns_and_rows_of_csv_are_chosen_by_their_text(tmp_path):
    (tmp_path / "rows.csv").write_text('n,q,a\n1,"Why,\n""so""?",Because.\n2,Who?,\n1,What?,That.\n')
    body = "format: csv\npaths: [rows.csv]\nwhere: {n: 1}\nchat: {fields: {user: q, assistant: a}}\n"
    first, second = rendered(tmp_path, body)
    assert first.text == (
        '<|im_start|>user\nWhy,\n"so"?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n'
    )
    assert (first.id, second.id) == ("rows.csv:1", "rows.csv:3")
    assert first.counted is None


def test_plain_text_comes_out_of_tables_too(tmp_path):
    (tmp_path / "rows.csv").write_text("text\nhello\nworld\n")
    parquet.write_table(pyarrow.table({"text": ["hello", "world"]}), tmp_path / "rows.parquet")
    for name in ("csv", "parquet"):
        found = rendered(tmp_path, f"format: {name}\npaths: [rows.{name}]\n")
        assert [each.text for each in found] == ["hello", "world"]


def test_the_system_prompt_is_for_conversations_that_have_none(tmp_path):
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "Hi"}]}
    write_rows(tmp_path, [own, ROWS[0]])
    first, second = rendered(tmp_path, JSONL + "chat: {system: given}\n")
    assert first.text.startswith("<|im_start|>system\nown<|im_end|>")
    assert second.text.startswith("<|im_start|>system\ngiven<|im_end|>")


def test_short_conversations_and_those_without_an_answer_are_left_out(tmp_path):
    question = {"id": "question", "messages": [{"role": "user", "content": "Hi"}]}
    write_rows(tmp_path, [question, *ROWS])

    def ids(body: str) -> list[str]:
        return [each.id for each in rendered(tmp_path, JSONL + body)]

    assert ids("chat: {}\n") == ["question", *(row["id"] for row in ROWS)]
    assert ids("chat: {count: answers}\n") == [row["id"] for row in ROWS]
    assert ids("chat: {min_turns: 4}\n") == [row["id"] for row in ROWS if len(row["messages"]) >= 4]
    lengths = {each.id: len(each.text) for each in rendered(tmp_path, JSONL + "chat: {}\n")}
    some = sorted(lengths.values())[4]
    assert ids(f"chat: {{}}\nmin_chars: {some}\n") == [name for name, size in lengths.items() if size >= some]


def test_tools_and_calls_reach_the_template_and_are_answers(tmp_path):
    card = load_card(str(CARDS / "chat-tools.yaml"))
    renderer = ChatRenderer(ChatTemplate(TOOLS, SPECIAL[TOOLS]))
    first = next(documents(card, renderer))
    assert '"name": "get_weather"' in first.text.partition("<|im_end|>")[0]
    answers = [first.text[begin:end] for begin, end in first.counted]
    assert len(answers) == 2
    assert answers[0].startswith('<tool_call>{"name": "get_weather"')
    assert answers[1].startswith("Yes: 14 mm")
    assert all(each.endswith("<|im_end|>") for each in answers)
    assert not any("rain_mm" in each for each in answers)  # what a tool returns is no answer


@pytest.mark.parametrize("source", [CHATML, LLAMA_3, MISTRAL, TOOLS])
@pytest.mark.parametrize("name", ["chat-jsonl", "chat-parquet", "chat-csv", "chat-tools"])
def test_the_example_cards_are_read_by_every_template(name, source):
    if name == "chat-tools" and source in (LLAMA_3, MISTRAL):
        pytest.skip("these templates have no turns of tools")
    found = list(
        documents(load_card(str(CARDS / f"{name}.yaml")), ChatRenderer(ChatTemplate(source, SPECIAL[source])))
    )
    assert len(found) == {"chat-csv": 10, "chat-tools": 6}.get(name, 12)
    for document in found:
        for begin, end in document.counted or ():
            assert document.text[begin:end].strip()


def test_the_digest_of_conversations_does_not_depend_on_a_template(tmp_path):
    write_rows(tmp_path)
    stored = list(documents(load_card(write_card(tmp_path, JSONL + "chat: {}\n"))))
    body = JSONL + f"chat: {{}}\ndigest: {text_digest(stored)}\nmin_chars: 60\n"
    assert rendered(tmp_path, body)
    assert rendered(tmp_path, body, ChatRenderer(ChatTemplate(MISTRAL, SPECIAL[MISTRAL])))
    write_rows(tmp_path, ROWS[1:])
    with pytest.raises(UsageError, match="has changed"):
        rendered(tmp_path, body)


def test_every_key_that_changes_the_text_changes_the_identity(tmp_path):
    write_rows(tmp_path)
    bodies = [
        "",
        "min_chars: 5\n",
        "separator: x\n",
        *(
            f"chat: {{{key}}}\n"
            for key in ("", "count: answers", "system: s", "min_turns: 2", "template: t", "tools_field: id")
        ),
        "chat: {variables: {a: 1}}\n",
    ]
    assert len({identity(load_card(write_card(tmp_path, JSONL + body))) for body in bodies}) == len(bodies)


def test_facts_of_a_plain_card_have_no_new_entries():
    assert load_card("builtin://python").facts.keys() == {
        "title", "license", "source", "language", "kind", "packing", "limit", "part",
    }  # fmt: skip


def test_a_token_set_counts_the_answers_and_says_what_it_is(chat_model):
    tokens, facts = read_tokens(
        chat_model, str(CARDS / "chat-jsonl.yaml"), num_samples=6, seq_len=64, seed=0, offline=True
    )
    assert facts["shape"] == "chat"
    assert facts["template_digest"].startswith("sha256:")
    tokenizer, _ = load_tokenizer(chat_model.path)
    text = (CARDS / "data" / "chat.jsonl").read_text()
    for ids, counted in zip(tokens.tokens_NS, tokens.counted_NS, strict=True):
        runs = "".join(
            tokenizer.decode([idx]) if counts else "\0"
            for idx, counts in zip(ids.tolist(), counted.tolist(), strict=True)
        ).split("\0")
        for run in filter(None, runs):
            answer = run.removesuffix("<|im_end|>")
            assert json.dumps(answer, ensure_ascii=False)[1:-1] in text
    whole, _ = read_tokens(
        chat_model, str(CARDS / "chat-csv.yaml"), num_samples=4, seq_len=64, seed=0, offline=True
    )
    assert whole.counted_NS is None


def test_the_beginning_of_sequence_is_not_written_twice(tmp_path):
    write_rows(tmp_path)
    template = ChatTemplate(LLAMA_3, SPECIAL[LLAMA_3])
    twice = rendered(tmp_path, JSONL + "chat: {count: answers}\n", ChatRenderer(template))
    once = rendered(tmp_path, JSONL + "chat: {count: answers}\n", ChatRenderer(template, "<|begin_of_text|>"))
    for before, after in zip(twice, once, strict=True):
        assert before.text == "<|begin_of_text|>" + after.text
        assert [before.text[b:e] for b, e in before.counted] == [after.text[b:e] for b, e in after.counted]


def test_a_model_without_a_template_is_refused_with_the_way_out(chat_model):
    (chat_model.path / "chat_template.jinja").unlink()
    with pytest.raises(
        UsageError, match=r"has none: its tokenizer is that of a base model. Leave out `chat`"
    ):
        read_tokens(
            chat_model, str(CARDS / "chat-jsonl.yaml"), num_samples=2, seq_len=64, seed=0, offline=True
        )


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0, 1.0), (0.2, 5.0, 1.7)])
def test_any_beginning_of_a_mix_has_the_proportions_to_a_window(weights):
    order = window_order(weights, 200)
    for num in (1, 7, 50, 200):
        for idx, weight in enumerate(weights):
            assert abs(order[:num].count(idx) - num * weight / sum(weights)) <= 1
    assert window_order(weights, 50) == order[:50]


def test_a_mix_has_the_windows_of_its_cards_in_the_proportion_of_the_weights(chat_model):
    settings = {"seq_len": 64, "seed": 3, "offline": True}
    tokens, facts = read_tokens(chat_model, str(CARDS / "mix.yaml"), num_samples=16, **settings)
    cards = {"chat-jsonl.yaml": 8, "chat-csv.yaml": 4, "builtin://python": 4}
    assert facts["shape"] == "chat and plain text"
    assert [each["num_samples"] for each in facts["cards"]] == list(cards.values())
    rows = {
        tuple(row): counted for row, counted in zip(tokens.tokens_NS.tolist(), tokens.counted_NS, strict=True)
    }
    for name, num in cards.items():
        ref = name if name.startswith("builtin") else str(CARDS / name)
        alone, _ = read_tokens(chat_model, ref, num_samples=num, **settings)
        counted_NS = torch.ones_like(alone.tokens_NS) if alone.counted_NS is None else alone.counted_NS
        for row, counted in zip(alone.tokens_NS.tolist(), counted_NS, strict=True):
            assert torch.equal(rows[tuple(row)], counted.bool())
    small, _ = read_tokens(chat_model, str(CARDS / "mix.yaml"), num_samples=5, **settings)
    assert torch.equal(small.tokens_NS, tokens.tokens_NS[:5])


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", UsageError, "the first line of a csv file"),
        ("a,a\n1,2\n", UsageError, "each once"),
        ("text\n1,2\n", UsageError, r"rows\.csv:1: the row has 2 fields and the header 1"),
        ('text\n"a"b\n', UsageError, "not a csv file"),
        ('text\n"a\n', UsageError, "not a csv file"),
        ("texts\na\n", UsageError, "no field 'text'. Did you mean 'texts'"),
    ],
)
def test_a_broken_csv_file_is_refused(tmp_path, content, error, message):
    (tmp_path / "rows.csv").write_text(content)
    with pytest.raises(error, match=message):
        rendered(tmp_path, "format: csv\npaths: [rows.csv]\n")


def test_a_long_field_of_csv_is_a_document(tmp_path):
    (tmp_path / "rows.csv").write_text("text\n" + "x" * 200_000 + "\n")
    (document,) = rendered(tmp_path, "format: csv\npaths: [rows.csv]\n")
    assert len(document.text) == 200_000


def undecodable() -> pyarrow.Array:
    """Return a column of texts whose second one is not UTF-8."""
    offsets, bytes_ = struct.pack("<3i", 0, 2, 4), b"ok\xff\xfe"
    return pyarrow.StringArray.from_buffers(2, pyarrow.py_buffer(offsets), pyarrow.py_buffer(bytes_))


@pytest.mark.parametrize(
    "column",
    [
        undecodable(),
        pyarrow.array([1 << 62] * 2, pyarrow.timestamp("us")),
        pyarrow.array([(1 << 31) - 1] * 2, pyarrow.date32()),
        pyarrow.array([1] * 2, pyarrow.timestamp("us", tz="Mars/Olympus")),
    ],
    ids=["text", "timestamp", "date", "zone"],
)
def test_a_column_that_a_card_does_not_name_is_not_read(tmp_path, column):
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "other": column}), tmp_path / "rows.parquet")
    body = "format: parquet\npaths: [rows.parquet]\n"
    assert [each.text for each in rendered(tmp_path, body)] == ["a", "b"]
    with pytest.raises(UsageError, match=r"rows\.parquet:[12]: 'other' (is not UTF-8 text|cannot be read)"):
        rendered(tmp_path, body + "id_field: other\n")


def test_a_column_of_parquet_that_is_there_twice_is_refused(tmp_path):
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "rows.parquet")
    with pytest.raises(UsageError, match="two columns are named 'text'"):
        rendered(tmp_path, "format: parquet\npaths: [rows.parquet]\n")


def test_a_broken_parquet_file_is_refused(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["hello"] * 100}), tmp_path / "rows.parquet")
    data = (tmp_path / "rows.parquet").read_bytes()
    for broken in (data[: len(data) // 2], b"hello", b"", data[:40] + b"\xff" * 40 + data[80:]):
        (tmp_path / "rows.parquet").write_bytes(broken)
        with pytest.raises(StorageError, match=r"rows\.parquet: cannot be read as parquet"):
            rendered(tmp_path, "format: parquet\npaths: [rows.parquet]\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "is not a list of messages"),
        ({"messages": "[1"}, "is not JSON"),
        ({"messages": [{"content": "x"}]}, "a message without a role"),
        ({"messages": [{"role": "user"}]}, "a message without content"),
        ({"messages": [{"role": "user", "content": 5}]}, "whose content is neither text nor a list"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "whose content is neither text nor a list"),
        ({"message": []}, "no field 'messages'. Did you mean 'message'"),
        ({"messages": ROWS[0]["messages"], "tools": 3}, "is no list of tools"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_where_it_stands(tmp_path, row, message):
    write_rows(tmp_path, [{**ROWS[0], "tools": []}, {"tools": [], **row}])
    with pytest.raises(UsageError, match=rf"rows\.jsonl:2.*{message}"):
        rendered(tmp_path, JSONL + "chat: {tools_field: tools}\n")


def test_what_a_template_refuses_names_the_conversation(tmp_path):
    write_rows(tmp_path)
    refusing = ChatTemplate("{{ raise_exception('no') }}", {})
    with pytest.raises(UsageError, match="conversation 'row-1'"):
        rendered(tmp_path, JSONL + "chat: {}\n", ChatRenderer(refusing))


MIX = "title: t\nlicense: l\nsource: s\nkind: mix\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("format: txt\npaths: [a]\nchat: {}\n", "a txt file has no conversations"),
        ("format: jsonl\npaths: [a]\nchat: {variables: {messages: 1}}\n", "`messages` is not free"),
        ("format: jsonl\npaths: [a]\nchat: {counts: answers}\n", "Did you mean 'count'"),
        (MIX + "cards: [{card: a}]\n", "cards"),
        (MIX + "cards: [{card: a}, {card: b, weight: 0}]\n", "weight"),
        (MIX + "packing: first_tokens\ncards: [{card: a}, {card: b}]\n", "no `packing` of its own"),
    ],
)
def test_a_wrong_card_is_refused(tmp_path, body, message):
    with pytest.raises(RecipeError, match=message):
        load_card(write_card(tmp_path, body))


def test_a_mix_of_mixes_is_refused_and_a_mix_has_no_documents(tmp_path):
    inner = write_card(
        tmp_path, MIX + "cards: [{card: builtin://python}, {card: builtin://python-eval}]\n", "a.yaml"
    )
    outer = write_card(tmp_path, MIX + "cards: [{card: a.yaml}, {card: builtin://python}]\n", "b.yaml")
    with pytest.raises(UsageError, match="which is a mix itself"):
        identity(load_card(outer))
    with pytest.raises(UsageError, match="is a mix, of which windows are drawn"):
        list(documents(load_card(inner)))

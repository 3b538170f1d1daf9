"""Data cards: YAML files that name a body of text with its source and licence, and are read as a stream of
documents. `card_spec.py` has their keys.

Every card has title, license and source, and may have a digest that the text must match. The references
`builtin://python` and `builtin://python-eval` name the embedded text without a file; with the suffix `/code`
or `/prose` they name one kind of it.

A local row and a Hub row hold their text in `text_field`: a text, or a list of chat turns `{role, content}`,
which become `Role: content` paragraphs, or what the model's chat template makes of them (`chat`). Nothing
downloaded is ever executed: dataset scripts and `trust_remote_code` are not supported.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from compress.data.card_spec import (
    CARD_KINDS,
    SEPARATOR,
    BuiltinCard,
    ChatShape,
    HuggingFaceCard,
    LocalCard,
    MixCard,
    RowsCard,
)
from compress.data.chat import is_conversation, transcript
from compress.data.conversation import ChatRenderer, conversation_text
from compress.data.corpus import (
    Category,
    Document,
    Part,
    TextHasher,
    belongs_to,
    is_of,
    python_documents,
)
from compress.data.table_files import csv_rows, parquet_rows
from compress.data.text_files import json_rows, text_lines
from compress.digest import digest_file, digest_json
from compress.errors import StorageError, UsageError, did_you_mean
from compress.recipe import parse_spec, read_source, read_yaml

CHAT = "chat"
TEXT = "plain text"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATA = re.compile(r"\.(?P<format>jsonl|txt|csv|parquet)(\.(xz|gz|bz2|zst))?$")
_ROWS = {"jsonl": json_rows, "csv": csv_rows}


@dataclass(frozen=True)
class Card:
    """A valid card; its relative paths start from `folder`."""

    spec: BuiltinCard | LocalCard | HuggingFaceCard | MixCard
    folder: Path
    ref: str

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the data for reports and model cards; they name no path of this machine."""
        spec = self.spec
        facts: dict[str, Any] = {
            key: getattr(spec, key)
            for key in ("title", "license", "source", "language", "kind", "packing", "limit")
        }
        if isinstance(spec, HuggingFaceCard):
            facts |= {key: getattr(spec, key) for key in ("dataset", "config", "split", "revision")}
        elif not isinstance(spec, MixCard):
            facts |= {"part": spec.part}
        if spec.min_chars:
            facts["min_chars"] = spec.min_chars
        if self.chat is not None:
            facts |= {"shape": CHAT, "chat": self.chat.model_dump(mode="json")}
        return facts

    @property
    def chat(self) -> ChatShape | None:
        """The form of its conversations; None where no chat template is applied."""
        return self.spec.chat if isinstance(self.spec, RowsCard) else None

    def parts(self) -> list[tuple["Card", float]]:
        """Return the cards of a mix with their weights, of any other card itself.

        Raises:
            RecipeError, UsageError: as `load_card`, or a part is a mix.
        """
        if not isinstance(self.spec, MixCard):
            return [(self, 1.0)]
        found = []
        for each in self.spec.cards:
            builtin = each.card.startswith("builtin://")
            card = load_card(each.card if builtin else str(self.folder / each.card))
            if isinstance(card.spec, MixCard):
                raise UsageError(
                    f"data card '{self.ref}' mixes '{each.card}', which is a mix itself: name its cards."
                )
            found.append((card, each.weight))
        return found

    @property
    def counts_answers(self) -> bool:
        """Whether statistics and losses count only the answers of some of its text."""
        chats = [part.chat for part, _ in self.parts()]
        return any(chat is not None and chat.count == "answers" for chat in chats)

    def shape(self) -> str:
        """Return what the text is like for a model: chat by its template, plain text, or both in a mix."""
        shapes = {TEXT if part.chat is None else CHAT for part, _ in self.parts()}
        return shapes.pop() if len(shapes) == 1 else f"{CHAT} and {TEXT}"


def shape_of(facts: Mapping[str, Any]) -> str:
    """Return what text is like for a model, from the facts of its card: chat by a template, or plain text."""
    return str(facts.get("shape", TEXT))


def load_card(ref: str) -> Card:
    """Return the card at a path or that of a builtin reference: `builtin://python` (calibration part) or
    `builtin://python-eval` (evaluation part), each also with `/code` or `/prose`. Uses no network.

    Raises:
        RecipeError: the file cannot be read or is not a valid card.
        UsageError: an unknown builtin, or the path of a data file.
    """
    if ref.startswith("builtin://"):
        return _builtin(ref)
    path = Path(ref)
    if match := _DATA.search(path.name):
        raise UsageError(
            f"'{ref}' is a data file, and a recipe names a data card: a YAML file with `kind: local`, title, "
            f"license, source, `paths: [{path.name}]` and `format: {match['format']}`."
        )
    text = read_source(path, file=ref, what="data card", hint="`builtin://python` needs no file.")
    raw, where = read_yaml(text, file=ref)
    if not isinstance(raw, dict):
        raise where.error((), "a data card is a mapping with the keys kind, title, license and source.")
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in CARD_KINDS:
        problem = f"unknown kind '{kind}' of data card" if kind is not None else "a data card needs a kind"
        raise where.error(("kind",), f"{problem}.{did_you_mean(str(kind), CARD_KINDS)}")
    return Card(cast(Any, parse_spec(CARD_KINDS[kind], raw, where)), path.parent, ref)


def pin(card: Card) -> Card:
    """Return the card with a Hub revision that may move (a tag, `main`) replaced by its present commit; any
    other card as it is.

    Raises:
        StorageError: the Hub cannot be reached, or has no such dataset or revision.
    """
    spec = card.spec
    if not isinstance(spec, HuggingFaceCard) or _COMMIT.fullmatch(spec.revision):
        return card
    import huggingface_hub  # slow to import; only Hub cards need it

    # The HTTP client's own error, whichever client it is.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        commit = huggingface_hub.HfApi().dataset_info(spec.dataset, revision=spec.revision).sha
    except (OSError, HTTPError) as error:
        raise _unreachable(spec, error) from error
    return dataclasses.replace(card, spec=spec.model_copy(update={"revision": commit}))


def check_at_hand(card: Card, *, offline: bool = False) -> None:
    """Check, without reading it, that the text can be read.

    Raises:
        UsageError: a local card names a file that does not exist.
        StorageError: a Hub card although the network must not be used (a dataset is streamed, never kept).
    """
    if isinstance(card.spec, MixCard):
        for part, _ in card.parts():
            check_at_hand(part, offline=offline)
    elif isinstance(card.spec, LocalCard):
        _files(card.spec, card)
    elif offline and isinstance(card.spec, HuggingFaceCard):
        raise StorageError(
            f"data card '{card.ref}' streams {card.spec.dataset} from the Hub, which --offline forbids. "
            "Name builtin://python or a card of local files."
        )


def documents(card: Card, renderer: ChatRenderer | None = None) -> Iterator[Document]:
    """Yield the card's documents in their fixed order. The digest of a card that has one is checked after the
    last document.

    Args:
        renderer: of the model that will read the conversations; without one each is its JSON.

    Raises:
        UsageError: a missing file, a row without the text field, or text that does not match the card's
            digest.
        StorageError: a file or dataset that cannot be read to the end.
        EnvironmentUnfit: builtin text on an interpreter without its sources.
    """
    for document in _as_stored(card):
        if renderer is not None and card.chat is not None:
            rendered = renderer.document(document, card.chat)
            if rendered is None:
                continue
            document = rendered
        if len(document.text) >= card.spec.min_chars:
            yield document


def _as_stored(card: Card) -> Iterator[Document]:
    """Yield all documents of a card before any is rendered or left out."""
    stream = islice(_read(card), card.spec.limit)
    if card.spec.digest is None:
        yield from stream
        return
    hasher = TextHasher()
    for document in stream:
        hasher.update(document)
        yield document
    if hasher.digest() != card.spec.digest:
        raise UsageError(
            f"the text of data card '{card.ref}' has changed: its digest is {hasher.digest()}, the card "
            f"expects {card.spec.digest}. Restore the text, or take the new digest into the card if the "
            "change is meant."
        )


def identity(card: Card) -> str:
    """Return the digest of everything that decides the card's text, without reading all of it: its facts and,
    for local files, their bytes. It is part of cache keys."""
    facts = dict(card.facts) | {"digest": card.spec.digest}
    if card.spec.separator != SEPARATOR:
        facts["separator"] = card.spec.separator
    if isinstance(card.spec, MixCard):
        facts["cards"] = [[identity(part), weight] for part, weight in card.parts()]
    elif isinstance(card.spec, LocalCard):
        facts["files"] = [digest_file(path) for path in _files(card.spec, card)]
        facts["fields"] = [
            card.spec.format,
            card.spec.text_field,
            card.spec.id_field,
            sorted(card.spec.where.items()),
        ]
    elif isinstance(card.spec, BuiltinCard):
        facts["text"] = text_digest(documents(card))
    return digest_json(facts)


def text_digest(stream: Iterable[Document]) -> str:
    """Return the digest of all texts of `stream`, in order."""
    hasher = TextHasher()
    for document in stream:
        hasher.update(document)
    return hasher.digest()


def _builtin(ref: str) -> Card:
    parts: dict[str, Part] = {"builtin://python": "calibration", "builtin://python-eval": "evaluation"}
    categories: dict[str, Category] = {"": "all", "/code": "code", "/prose": "prose"}
    known = {
        name + suffix: (part, category)
        for name, part in parts.items()
        for suffix, category in categories.items()
    }
    if ref not in known:
        raise UsageError(f"unknown embedded text '{ref}'.{did_you_mean(ref, known)}")
    part, category = known[ref]
    of_category = "" if category == "all" else f", {category}"
    facts = {
        "kind": "builtin",
        "name": "python",
        "part": part,
        "category": category,
        "title": f"Python standard library and language reference, {part} part{of_category}",
        "license": "PSF-2.0",
        "source": "module sources and pydoc topics of the running CPython, https://www.python.org",
    }
    return Card(BuiltinCard.model_validate(facts), Path(), ref)


def _read(card: Card) -> Iterator[Document]:
    match card.spec:
        case BuiltinCard(part=part, category=category):
            return (document for document in python_documents(part) if is_of(document.id, category))
        case LocalCard() as spec:
            return _local_documents(spec, card)
        case HuggingFaceCard():
            return _hub_documents(cast(HuggingFaceCard, pin(card).spec))
        case MixCard():
            raise UsageError(
                f"data card '{card.ref}' is a mix, of which windows are drawn; its documents are those of "
                "its cards."
            )


# ------------------------------------------------------------------------------------------------------------
# local files


def _local_documents(spec: LocalCard, card: Card) -> Iterator[Document]:
    for path in _files(spec, card):
        rows = _txt_document(path) if spec.format == "txt" else _row_documents(path, spec)
        yield from (document for document in rows if belongs_to(document.id, spec.part))


def _files(spec: LocalCard, card: Card) -> list[Path]:
    files: list[Path] = []
    for pattern in spec.paths:
        whole = card.folder / pattern
        names = [str(whole)] if os.path.isfile(whole) else sorted(glob.glob(str(whole), recursive=True))
        found = [Path(name) for name in names if os.path.isfile(name)]  # False for what no path can be
        if not found:
            raise UsageError(
                f"data card '{card.ref}' names '{pattern}', and there is no such file at '{whole}'; paths "
                "are relative to the card."
            )
        files += [path for path in found if path not in files]
    return files


def _row_documents(path: Path, spec: LocalCard) -> Iterator[Document]:
    wanted = spec.where if spec.format != "csv" else {key: str(value) for key, value in spec.where.items()}
    rows = parquet_rows(path, _columns(spec)) if spec.format == "parquet" else _ROWS[spec.format](path)
    for row_idx, row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            doc_id = row.get(spec.id_field)
            yield Document(
                f"{path.name}:{row_idx}" if doc_id is None else str(doc_id),
                _row_text(row, spec, f"{path}:{row_idx}"),
            )


def _columns(spec: LocalCard) -> set[str]:
    """Return the names of all columns that a card reads."""
    named = {spec.text_field, spec.id_field, *spec.where}
    if spec.chat is not None:
        named |= {*spec.chat.fields.values(), spec.chat.tools_field or spec.text_field}
    return named


def _txt_document(path: Path) -> Iterator[Document]:
    yield Document(path.name, "".join(text_lines(path)))


def _row_text(row: Mapping[str, Any], spec: RowsCard, at: str) -> str:
    field = spec.text_field
    if spec.chat is not None:
        return conversation_text(row, field, spec.chat, at)
    if field not in row:
        raise UsageError(f"{at}: the row has no field '{field}'.{did_you_mean(field, map(str, row))}")
    value = row[field]
    if isinstance(value, str):
        return value
    if is_conversation(value):
        try:
            return transcript(value)
        except UsageError as error:
            raise UsageError(f"{at}: field '{field}': {error}") from None
    raise UsageError(f"{at}: field '{field}' is neither text nor a list of messages with role and content.")


# ----------------------------------------------------------------------------------------------------------
# Hugging Face Hub


def _hub_documents(spec: HuggingFaceCard) -> Iterator[Document]:
    import datasets  # takes a second to import; only Hub cards need it
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    name = f"{spec.dataset}@{spec.revision[:12]}/{spec.split}"
    try:
        rows = datasets.load_dataset(
            spec.dataset, name=spec.config, split=spec.split, revision=spec.revision, streaming=True
        )
        for row_idx, row in enumerate(rows):
            yield Document(f"{name}:{row_idx}", _row_text(row, spec, f"{name}, row {row_idx}"))
    except (OSError, HTTPError) as error:
        raise _unreachable(spec, error) from error
    except (
        ValueError,
        RuntimeError,
    ) as error:  # no such config or split; a dataset that would need its own code
        raise UsageError(
            f"dataset '{spec.dataset}' cannot be read as its card says: {_first_line(error)}"
        ) from error


def _unreachable(spec: HuggingFaceCard, error: Exception) -> StorageError:
    return StorageError(
        f"dataset '{spec.dataset}' at revision '{spec.revision}' could not be read from the Hugging Face "
        f"Hub ({_first_line(error)}): check the name and the network, or use a local card or "
        "`builtin://python`, which need none."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

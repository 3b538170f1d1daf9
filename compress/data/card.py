"""Data cards: YAML files that name a body of text with its source and licence, and are read as a stream of
documents.

    {kind: builtin, name: python, part: calibration}
    {kind: local, paths: [news-*.jsonl.xz], format: jsonl}
    {kind: huggingface, dataset: org/name, config: ..., split: ..., revision: <commit or tag>}

Every card also has title, license and source, and may have a digest that the text must match. The references
`builtin://python` and `builtin://python-eval` name the embedded text without a file; with the suffix `/code`
or `/prose` they name one kind of it.

A local row and a Hub row hold their text in `text_field`: a text, or a list of chat turns `{role, content}`,
which become `Role: content` paragraphs. Nothing downloaded is ever executed: dataset scripts and
`trust_remote_code` are not supported.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, field_validator

from compress.data.chat import is_conversation, transcript
from compress.data.corpus import (
    Category,
    Document,
    Packing,
    Part,
    TextHasher,
    belongs_to,
    is_of,
    python_documents,
)
from compress.data.text_files import json_rows, text_lines
from compress.digest import digest_file, digest_json
from compress.errors import StorageError, UsageError, did_you_mean
from compress.recipe import MAX_TOKENS, Spec, parse_spec, read_source, read_yaml

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = r"^sha256:[0-9a-f]{64}$"


class CardSpec(Spec):
    """Keys that every card has, whatever its kind."""

    title: str = Field(min_length=1)
    license: str = Field(min_length=1, description="SPDX identifier where there is one")
    source: str = Field(min_length=1, description="URL or words: where the text comes from")
    language: str = "en"
    packing: Packing = Field(
        "concatenate",
        description="windows over documents joined by the separator, or the first tokens of each document",
    )
    separator: str = Field("\n\n", description="between documents when they are concatenated")
    limit: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="only the first so many documents; for a Hub dataset this bounds the download",
    )
    digest: str | None = Field(
        None, pattern=_DIGEST, description="expected digest of the whole text that the card names"
    )


class BuiltinCard(CardSpec):
    """The embedded text (`corpus.py`). Its bytes depend on the Python version; which documents are in a part
    does not."""

    kind: Literal["builtin"]
    name: Literal["python"]
    part: Part = "calibration"
    category: Category = Field("all", description="sources, pages of the language reference, or both")


class LocalCard(CardSpec):
    """Files, by paths relative to the card or absolute; `.xz .gz .bz2 .zst` are unpacked while reading."""

    kind: Literal["local"]
    paths: tuple[str, ...] = Field(
        min_length=1,
        description="files or glob patterns, relative to the card; read in sorted order per pattern",
    )
    format: Literal["jsonl", "txt"] = Field(description="jsonl: one document a row; txt: one document a file")
    text_field: str = "text"
    id_field: str = Field("id", description="names a row; `file:row` where a row has none")
    where: dict[str, str | int | bool] = Field(
        default_factory=dict, description="keep only jsonl rows with these values"
    )
    part: Part = Field(
        "all", description="keep only the rows whose id hashes into this part (1 in 16 is evaluation)"
    )


class HuggingFaceCard(CardSpec):
    """A dataset of the Hugging Face Hub; it is streamed and not kept on disk."""

    kind: Literal["huggingface"]
    dataset: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="org/name")
    config: str | None = None
    split: str = Field(min_length=1)
    revision: str = Field(
        "", validate_default=True, description="commit, or a tag or branch that is resolved to one"
    )
    text_field: str = "text"

    @field_validator("revision")
    @classmethod
    def _given(cls, revision: str) -> str:
        if not revision:
            raise ValueError(
                "a Hub dataset needs a `revision`, so that the same card always means the same text: "
                "give the commit hash from the dataset's history page, or a tag."
            )
        return revision


_KINDS: Mapping[str, type[CardSpec]] = {
    "builtin": BuiltinCard,
    "local": LocalCard,
    "huggingface": HuggingFaceCard,
}


@dataclass(frozen=True)
class Card:
    """A valid card; its relative paths start from `folder`."""

    spec: BuiltinCard | LocalCard | HuggingFaceCard
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
        else:
            facts |= {"part": spec.part}
        return facts


def load_card(ref: str) -> Card:
    """Return the card at a path or that of a builtin reference: `builtin://python` (calibration part) or
    `builtin://python-eval` (evaluation part), each also with `/code` or `/prose`. Uses no network.

    Raises:
        RecipeError: the file cannot be read or is not a valid card.
        UsageError: an unknown builtin.
    """
    if ref.startswith("builtin://"):
        return _builtin(ref)
    path = Path(ref)
    text = read_source(path, file=ref, what="data card", hint="`builtin://python` needs no file.")
    raw, where = read_yaml(text, file=ref)
    if not isinstance(raw, dict):
        raise where.error((), "a data card is a mapping with the keys kind, title, license and source.")
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        problem = f"unknown kind '{kind}' of data card" if kind is not None else "a data card needs a kind"
        raise where.error(("kind",), f"{problem}.{did_you_mean(str(kind), _KINDS)}")
    return Card(cast(Any, parse_spec(_KINDS[kind], raw, where)), path.parent, ref)


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
    if isinstance(card.spec, LocalCard):
        _files(card.spec, card)
    elif offline and isinstance(card.spec, HuggingFaceCard):
        raise StorageError(
            f"data card '{card.ref}' streams {card.spec.dataset} from the Hub, which --offline forbids. "
            "Name builtin://python or a card of local files."
        )


def documents(card: Card) -> Iterator[Document]:
    """Yield the card's documents in their fixed order. The digest of a card that has one is checked after the
    last document.

    Raises:
        UsageError: a missing file, a row without the text field, or text that does not match the card's
            digest.
        StorageError: a file or dataset that cannot be read to the end.
        EnvironmentUnfit: builtin text on an interpreter without its sources.
    """
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
    if isinstance(card.spec, LocalCard):
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


# ------------------------------------------------------------------------------------------------------------
# local files


def _local_documents(spec: LocalCard, card: Card) -> Iterator[Document]:
    for path in _files(spec, card):
        rows = _jsonl_documents(path, spec) if spec.format == "jsonl" else _txt_document(path)
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


def _jsonl_documents(path: Path, spec: LocalCard) -> Iterator[Document]:
    for row_idx, row in json_rows(path):
        if all(row.get(key) == value for key, value in spec.where.items()):
            doc_id = row.get(spec.id_field)
            yield Document(
                f"{path.name}:{row_idx}" if doc_id is None else str(doc_id),
                _row_text(row, spec.text_field, f"{path}:{row_idx}"),
            )


def _txt_document(path: Path) -> Iterator[Document]:
    yield Document(path.name, "".join(text_lines(path)))


def _row_text(row: Mapping[str, Any], field: str, at: str) -> str:
    if field not in row:
        raise UsageError(f"{at}: the row has no field '{field}'.{did_you_mean(field, map(str, row))}")
    value = row[field]
    if isinstance(value, str):
        return value
    if is_conversation(value):
        return transcript(value)
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
            yield Document(f"{name}:{row_idx}", _row_text(row, spec.text_field, f"{name}, row {row_idx}"))
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

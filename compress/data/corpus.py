"""The embedded text: what ships with every CPython, so that a fresh install calibrates and evaluates without
a download.

Two kinds of document: the sources of the standard library's modules (about 8 MB; code with much English in
docstrings and comments, id such as `json.decoder`) and the pages of the language reference in
`pydoc_data.topics` (about 0.4 MB of prose, id such as `topics/assignment`). Licence: PSF-2.0. Only the
standard library is imported here.

Parts. A document belongs to the evaluation part when sha256(id) is 0 modulo 16, else to the calibration part.
Only the name decides, so the parts of two Python versions never mix; the text itself is that of the running
interpreter.

Order. Documents come in the order of sha256(id), and the prose pages are spread evenly among the sources. So
any prefix is a fair mixture; in alphabetical order all of `asyncio` and no prose would come first.

Left out: tests, bundled or generated files and tables, and files that the build of this machine wrote
(`_sysconfigdata*`, `sitecustomize`).
"""

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.errors import EnvironmentUnfit

Part = Literal["calibration", "evaluation", "all"]
Category = Literal["all", "code", "prose"]
Packing = Literal["concatenate", "first_tokens"]  # how documents become windows (`tokens.py`)

_EVALUATION_ONE_IN = 16
_TOPIC_PREFIX = "topics/"

# Tests, other people's packages, demonstrations, bundles, tables written by a program (encodings,
# pydoc_data), and distutils, which shares long passages with `sysconfig` and is gone from Python 3.12.
#
# fmt: off
_SKIPPED_FOLDERS = frozenset({
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__",
    "idlelib", "turtledemo", "ensurepip", "encodings", "pydoc_data", "distutils", "lib-dynload",
})
# fmt: on
_SKIPPED_MODULES = frozenset({"html.entities", "sitecustomize", "usercustomize", "__hello__"})

# Pages that pydoc cuts out of a longer page (`augassign` is a section of `assignment`). The longer page
# stays, or the same text would be in both parts. Measured over 13-grams of words: these are at least a third
# copies, most of them wholly; no other page is above 6 %.
# fmt: off
_EXCERPT_TOPICS = frozenset({
    "augassign", "async", "class", "else", "for", "function", "if", "try", "while", "with",
    "attribute-access", "callable-types", "context-managers", "customization", "numeric-types",
    "sequence-types", "dynamic-features", "exceptions", "naming", "id-classes", "in", "continue",
    "typesseq-mutable",
})
# fmt: on


Spans = tuple[tuple[int, int], ...]
"""Ranges of characters of a text, each from its first to after its last, in order and apart."""


@dataclass(frozen=True)
class Document:
    """One text; `id` is unique in its corpus and decides which part it belongs to. `counted` are the ranges
    that calibration and training count, None where all of the text does."""

    id: str
    text: str
    counted: Spans | None = None


class TextHasher:
    """The digest of a stream of documents: sha256 over the length in bytes (8 bytes, little endian) and the
    UTF-8 bytes of each text. Ids do not count."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def update(self, document: Document) -> None:
        data = document.text.encode("utf-8", "surrogatepass")  # JSON may carry half a surrogate pair
        self._hasher.update(len(data).to_bytes(8, "little"))
        self._hasher.update(data)

    def digest(self) -> str:
        return "sha256:" + self._hasher.hexdigest()


def is_evaluation(doc_id: str) -> bool:
    """Return whether a document of this name is kept for evaluation (1 in 16, by hash of the name alone)."""
    return int.from_bytes(_name_hash(doc_id), "big") % _EVALUATION_ONE_IN == 0


def belongs_to(doc_id: str, part: Part) -> bool:
    return part == "all" or is_evaluation(doc_id) == (part == "evaluation")


def is_of(doc_id: str, category: Category) -> bool:
    """Return whether a document of the embedded text is of this category: a source (code) or a page
    (prose)."""
    return category in ("all", "prose" if doc_id.startswith(_TOPIC_PREFIX) else "code")


def python_documents(part: Part) -> Iterator[Document]:
    """Return the documents of one part of the embedded text, in the fixed mixed order described above.

    Raises:
        EnvironmentUnfit: this interpreter has no readable standard library sources or no `pydoc_data`.
    """
    sources = {name: path for name, path in _module_sources(_library_folder()) if belongs_to(name, part)}
    topics = {name: text for name, text in _topics() if belongs_to(name, part)}
    for name in _mixed_order(list(sources), list(topics)):
        if name in topics:
            yield Document(name, topics[name])
        elif text := _read_utf8(sources[name]):
            yield Document(name, text)


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _mixed_order(sources: list[str], topics: list[str]) -> list[str]:
    """Merge two lists, each in hash order, so that the i-th of n documents lies at (i + 1/2) / n of the
    whole."""
    placed = [
        ((2 * place + 1) * len(other), name)  # compares (2 i + 1) / (2 n) between the lists without fractions
        for names, other in ((sources, topics or [""]), (topics, sources or [""]))
        for place, name in enumerate(sorted(names, key=_name_hash))
    ]
    return [name for _, name in sorted(placed)]


def _library_folder() -> Path:
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "json" / "decoder.py").is_file():
        raise EnvironmentUnfit(
            f"the embedded text is the source of Python's standard library, and '{folder}' holds none (is "
            "it zipped or stripped?): use a regular CPython, or a data card with your own text"
        )
    return folder


def _module_sources(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (dotted module name, file) of every module that is neither a test nor generated, in no particular
    order."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        ]
        package = Path(parent).relative_to(folder).parts
        for file in files:
            stem, suffix = os.path.splitext(file)
            if suffix != ".py" or stem.startswith("_sysconfigdata"):
                continue
            name = ".".join(package if stem == "__init__" and package else (*package, stem))
            if name not in _SKIPPED_MODULES:
                yield name, Path(parent, file)


def _topics() -> Iterator[tuple[str, str]]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise EnvironmentUnfit(
            "the embedded text needs the module `pydoc_data` of Python's standard library, which this "
            "installation lacks: use a regular CPython, or a data card with your own text"
        ) from error
    for name, text in topics.items():
        if name not in _EXCERPT_TOPICS:
            yield _TOPIC_PREFIX + name, text


def _read_utf8(path: Path) -> str:
    """Return the text of a source file; it is empty when the file is not UTF-8 (a few modules declare another
    encoding)."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""

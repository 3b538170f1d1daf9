"""An endpoint that generates: how its body is read and how its answer is written."""

from collections.abc import Sequence
from typing import Any, Protocol

from compress.data.token_text import TokenTexts
from compress.llm import LLM
from compress.serve.ask import Ask
from compress.serve.body_fields import BodyFields
from compress.serve.choice import Choice, Piece
from compress.serve.settings import ServerSettings


class ChoiceWriter(Protocol):
    """Writes one text of an answer as JSON; it keeps what goes on from one piece to the next."""

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of an answer in one part; `piece` is its whole text."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """Return the choice of the first chunk of a stream, before any token; None where there is none."""
        ...

    def delta(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of a later chunk."""
        ...


class Endpoint(Protocol):
    """One of OpenAI's endpoints. `kind` is the `object` of an answer, `chunk_kind` that of a part of a
    stream.
    """

    path: str
    id_prefix: str
    kind: str
    chunk_kind: str
    known: frozenset[str]

    def read(self, fields: BodyFields, llm: LLM, settings: ServerSettings) -> Ask:
        """Return what a body asks for.

        Raises:
            Refusal: something in it is wrong.
            UsageError: the model cannot do what is asked, such as to answer a conversation.
        """
        ...

    def writer(self, ask: Ask, choice: Choice, texts: TokenTexts) -> ChoiceWriter:
        """Return the writer of one choice."""
        ...


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return pieces of one text as one."""
    return Piece(
        "".join(each.text for each in pieces),
        tuple(token for each in pieces for token in each.tokens),
        tuple(value for each in pieces for value in each.logprobs),
        tuple(top for each in pieces for top in each.top_logprobs),
        pieces[-1].finish_reason if pieces else None,
    )

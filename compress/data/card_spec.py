"""The keys of data cards, one class a kind of card.

    {kind: builtin, name: python, part: calibration}
    {kind: local, paths: [news-*.jsonl.xz], format: jsonl}
    {kind: huggingface, dataset: org/name, config: ..., split: ..., revision: <commit or tag>}
    {kind: mix, cards: [{card: chat.yaml, weight: 3}, {card: builtin://python}]}

A key that is left out changes nothing: neither the text nor the digest of what is made from it.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from compress.data.chat import DEFAULT_TEMPLATE
from compress.data.corpus import Category, Packing, Part
from compress.recipe import MAX_FACTOR, MAX_TOKENS, Spec

SEPARATOR = "\n\n"
TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "mark_generation", "name", "self"}
)
"""Names that a conversation or its rendering gives to a template."""
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
    separator: str = Field(
        SEPARATOR, description="between documents when they are concatenated; nothing between conversations"
    )
    min_chars: int = Field(
        0, ge=0, le=MAX_TOKENS, description="only documents with at least so many characters"
    )
    limit: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="only the first so many documents; for a Hub dataset this bounds the download",
    )
    digest: str | None = Field(
        None, pattern=_DIGEST, description="expected digest of the whole text that the card names"
    )

    @property
    def joined_by(self) -> str:
        """The text between two documents that are concatenated."""
        return self.separator


class BuiltinCard(CardSpec):
    """The embedded text (`corpus.py`). Its bytes depend on the Python version; which documents are in a part
    does not."""

    kind: Literal["builtin"]
    name: Literal["python"]
    part: Part = "calibration"
    category: Category = Field("all", description="sources, pages of the language reference, or both")


class ChatShape(Spec):
    """The form that a model's own chat template gives to the conversations of a card."""

    template: str = Field(
        DEFAULT_TEMPLATE, min_length=1, description="name of one of the tokenizer's chat templates"
    )
    system: str | None = Field(
        None, min_length=1, description="system prompt of conversations that have none of their own"
    )
    tools_field: str | None = Field(
        None, min_length=1, description="field of a row with the JSON schemas of its tools"
    )
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="role -> field, for rows with a field for each turn instead of a list of messages",
    )
    variables: dict[str, str | int | bool] = Field(
        default_factory=dict, description="further names that the template reads, as enable_thinking"
    )
    count: Literal["all", "answers"] = Field(
        "all", description="answers: calibration statistics and training losses count nothing but answers"
    )
    min_turns: int = Field(
        1, ge=1, le=MAX_TOKENS, description="only conversations of at least so many messages"
    )

    @field_validator("variables")
    @classmethod
    def _free(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(variables.keys() & TEMPLATE_NAMES):
            raise ValueError(f"the template's `{taken[0]}` is not free: the conversation decides it.")
        return variables


class RowsCard(CardSpec):
    """Keys of cards whose documents are the rows of a table."""

    text_field: str = "text"
    chat: ChatShape | None = Field(
        None, description="render conversations by the model's chat template; left out, as a plain transcript"
    )

    @property
    def joined_by(self) -> str:
        """The text between two documents; a template ends its conversations by itself."""
        if self.chat is not None and "separator" not in self.model_fields_set:
            return ""
        return self.separator


class LocalCard(RowsCard):
    """Files, by paths relative to the card or absolute; `.xz .gz .bz2 .zst` are unpacked while reading."""

    kind: Literal["local"]
    paths: tuple[str, ...] = Field(
        min_length=1,
        description="files or glob patterns, relative to the card; read in sorted order per pattern",
    )
    format: Literal["jsonl", "txt", "csv", "parquet"] = Field(
        description="jsonl, csv, parquet: one document a row; txt: one document a file"
    )
    id_field: str = Field("id", description="names a row; `file:row` where a row has none")
    where: dict[str, str | int | bool] = Field(
        default_factory=dict, description="keep only rows with these values; in csv all values are text"
    )
    part: Part = Field(
        "all", description="keep only the rows whose id hashes into this part (1 in 16 is evaluation)"
    )

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if self.chat is not None and self.format == "txt":
            raise ValueError("a txt file has no conversations: leave out `chat`, or give rows (jsonl).")
        return self


class HuggingFaceCard(RowsCard):
    """A dataset of the Hugging Face Hub; it is streamed and not kept on disk."""

    kind: Literal["huggingface"]
    dataset: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="org/name")
    config: str | None = None
    split: str = Field(min_length=1)
    revision: str = Field(
        "", validate_default=True, description="commit, or a tag or branch that is resolved to one"
    )

    @field_validator("revision")
    @classmethod
    def _given(cls, revision: str) -> str:
        if not revision:
            raise ValueError(
                "a Hub dataset needs a `revision`, so that the same card always means the same text: "
                "give the commit hash from the dataset's history page, or a tag."
            )
        return revision


class MixedCard(Spec):
    """One of the cards of a mix."""

    card: str = Field(
        min_length=1, description="path relative to the mix, or a builtin reference; no mix itself"
    )
    weight: float = Field(
        1.0, gt=0, le=MAX_FACTOR, description="share of the windows, relative to the others"
    )


class MixCard(CardSpec):
    """Windows of several cards, each drawn by the rules of its card, in the proportion of weights."""

    kind: Literal["mix"]
    cards: tuple[MixedCard, ...] = Field(min_length=2, max_length=64)

    @model_validator(mode="after")
    def _left_to_the_cards(self) -> Self:
        for key in ("packing", "separator", "min_chars", "limit", "digest"):
            if key in self.model_fields_set:
                raise ValueError(f"a mix has no `{key}` of its own: set it in its cards.")
        return self


CARD_KINDS: Mapping[str, type[CardSpec]] = {
    "builtin": BuiltinCard,
    "local": LocalCard,
    "huggingface": HuggingFaceCard,
    "mix": MixCard,
}

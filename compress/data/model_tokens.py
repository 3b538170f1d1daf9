"""Token sets for one model: the text of a data card, tokenized by the model's own tokenizer and checked
against its embedding."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.card import Card, check_at_hand, documents, identity, load_card, pin
from compress.data.card_spec import MixCard
from compress.data.chat import DEFAULT_TEMPLATE, ChatTemplate, load_chat_template, special_tokens
from compress.data.conversation import ChatRenderer
from compress.data.mix import mixed, window_order
from compress.data.tokenizer import check_tokenizer, encode, load_tokenizer
from compress.data.tokens import TokenSet, tokenize
from compress.digest import digest_bytes
from compress.errors import UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.config_file import read_config
from compress.models.family import family_of
from compress.models.max_position import why_no_longer
from compress.models.named_linears import stated_vocab_size
from compress.registry.model_source import ModelSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS_NAME = "tokens.safetensors"


def check_card(data: str, model_dir: Path | None) -> None:
    """Check before any work that the text of a card is there and that a model whose weights are in a
    directory has the tokenizer and the chat template that the card needs. No text is read.

    Raises:
        RecipeError, UsageError: the card is wrong, a file of it is missing, or the model has no chat template
            of the card's name.
        UnsupportedFormat: the model has no tokenizer, or its template is not valid.
    """
    card = load_card(data)
    check_at_hand(card)
    check_tokenizer(model_dir)
    if model_dir is None or next(model_dir.glob("*.safetensors"), None) is None:
        return
    for part, _ in card.parts():
        if part.chat is not None:
            _template(part, part.chat.template, model_dir, str(model_dir))


def read_tokens(
    source: ModelSource, data: str, *, num_samples: int | None, seq_len: int, seed: int | None, offline: bool
) -> tuple[TokenSet, dict[str, Any]]:
    """Return the token set of a card, made by the model's own tokenizer, and the card's facts. Windows start
    with BOS if the model's texts do.

    Raises:
        UsageError: too little text, or a tokenizer that belongs to another model.
        StorageError: the text cannot be read, or is on the Hub and `offline` is set.
    """
    card = load_card(data)
    check_at_hand(card, offline=offline)
    if not isinstance(card.spec, MixCard):
        tokens = _tokens_of(card, source, num_samples=num_samples, seq_len=seq_len, seed=seed)
        return tokens, tokens.source
    if num_samples is None:
        raise UsageError(
            f"data card '{data}' is a mix, of which a number of windows is drawn: set num_samples."
        )
    parts = card.parts()
    order = window_order([weight for _, weight in parts], num_samples)
    sets = {
        idx: _tokens_of(part, source, num_samples=order.count(idx), seq_len=seq_len, seed=seed)
        for idx, (part, _) in enumerate(parts)
        if idx in order
    }
    tokens = mixed(sets, order, {**card.facts, "shape": card.shape(), "seed": seed})
    return tokens, tokens.source


def _tokens_of(
    card: Card, source: ModelSource, *, num_samples: int | None, seq_len: int, seed: int | None
) -> TokenSet:
    """Return the token set of a card that is no mix."""
    card = pin(card)
    tokenizer, digest = load_tokenizer(source.path)
    bos = prepended_bos(tokenizer, source.path)
    renderer = None
    if card.chat is not None:
        template = _template(card, card.chat.template, source.path, source.name)
        renderer = ChatRenderer(template, "" if bos is None else tokenizer.id_to_token(bos) or "")
    facts = {**card.facts, "tokenizer_digest": digest}
    if renderer is not None:
        facts["template_digest"] = digest_bytes(renderer.template.source.encode())
    tokens = tokenize(
        documents(card, renderer),
        tokenizer,
        num_samples=num_samples,
        seq_len=seq_len,
        seed=seed,
        bos=bos,
        packing=card.spec.packing,
        separator=card.spec.joined_by,
        facts=facts,
    )
    _check_ids(tokens, source)
    return tokens


def _template(card: Card, name: str, model_dir: Path, model: str) -> ChatTemplate:
    """Return the chat template of `model` that a card names.

    Raises:
        UsageError: the model has none of that name.
    """
    found = load_chat_template(model_dir, None if name == DEFAULT_TEMPLATE else name)
    if found is None:
        raise UsageError(
            f"data card '{card.ref}' takes conversations by the chat template of {model}, which has "
            "none: its tokenizer is that of a base model. Leave out `chat`, which makes transcripts of them, "
            "or name a model with a chat template."
        )
    return found


def _check_ids(tokens: TokenSet, source: ModelSource) -> None:
    """Raise UsageError if the tokenizer gives ids that the embedding does not have."""
    config = read_config(source.path)
    vocab_size = _vocab_size(config)
    largest = int(tokens.tokens_NS.max())
    if vocab_size is not None and largest >= vocab_size:
        raise UsageError(
            f"the tokenizer of {source.name} gives the id {largest} and the model has {vocab_size} "
            "embeddings: they do not belong together."
        )


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the embeddings that a model has: by its family, or as the config of a model that the decoder
    does not support states them; None where it states none."""
    try:
        return family_of(config).read_config(config).vocab_size
    except UnsupportedArch:
        return stated_vocab_size(config)


def prepended_bos(tokenizer: "Tokenizer", model_dir: Path) -> int | None:
    """Return the beginning-of-sequence id that the tokenizer puts before every text; None where it puts
    none."""
    with_special = encode(tokenizer, ["a"], add_special_tokens=True)[0]
    without = encode(tokenizer, ["a"])[0]
    if with_special == without or not with_special:
        return None
    return with_special[0] if with_special[0] in stated_bos(tokenizer, model_dir) else None


def stated_bos(tokenizer: "Tokenizer", model_dir: Path) -> list[int]:
    """Return the beginning-of-sequence ids that the files of a model state: `config.json`, in a model of text
    and images also the config of its text model (Gemma 4, Llama 4), and `tokenizer_config.json`, which alone
    has one in Gemma 3 of 4B and more and in Mistral Small 3.1.
    """
    config = read_config(model_dir)
    text = config.get("text_config")
    inside = text.get("bos_token_id") if isinstance(text, Mapping) else None
    named = special_tokens(model_dir).get("bos_token")
    ids = (config.get("bos_token_id"), inside, None if named is None else tokenizer.token_to_id(named))
    return [each for each in ids if isinstance(each, int)]


def check_seq_len(seq_len: int, what: str, arch: Arch) -> None:
    """Raise UsageError if a sequence is longer than the model's positions."""
    if seq_len > arch.max_position:
        raise UsageError(
            f"{what} is {seq_len} tokens and the model has {arch.max_position} positions"
            f"{why_no_longer(arch)}. Give a smaller number."
        )


def data_identity(spec: Any, device: str) -> Mapping[str, str]:
    """Return the digest of the text that a spec's `data` names, for a cache key."""
    return {"data": identity(load_card(spec.data))}

"""An ask: the prompts of a request and how they are to be continued, for every endpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from compress.llm import LLM, SamplingParams
from compress.serve.refusal import Refusal
from compress.serve.settings import ServerSettings


@dataclass(frozen=True)
class Prompt:
    """The tokens of one prompt and its text."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Ask:
    """Prompts, and how to continue each of them `n` times.

    `params` are None where nothing is to be generated. With `echo` an answer begins with its prompt;
    `num_scored_top` asks for the log probabilities of the prompt's tokens, with so many of the likeliest ones
    (None: for none at all). A lower `priority` is served first among the requests of one client.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams | None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    num_scored_top: int | None = None
    priority: int = 0

    @property
    def num_choices(self) -> int:
        """The number of texts of the answer."""
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts, each counted once."""
        return sum(len(each.tokens) for each in self.prompts)


def check_lengths(prompts: Sequence[Prompt], max_tokens: int, llm: LLM) -> None:
    """Raise Refusal unless every prompt and its continuation fit the model."""
    limit = llm.engine.max_model_len
    for each in prompts:
        if not each.tokens:
            raise Refusal("a prompt is empty; give it at least one token.", param="prompt")
        if len(each.tokens) + max_tokens > limit:
            raise Refusal(
                f"the prompt has {len(each.tokens)} tokens and {max_tokens} more are asked for; this server "
                f"holds {limit} tokens at most. Shorten the prompt or lower max_tokens.",
                param="max_tokens" if len(each.tokens) < limit else "prompt",
                code="context_length_exceeded",
            )


def max_tokens_within(settings: ServerSettings, *, num_choices: int, num_top: int) -> int:
    """Return the most tokens that each of `num_choices` texts may have within the settings, where `num_top`
    likeliest tokens are listed for each of them."""
    return settings.max_call_tokens // (num_choices * max(num_top, 1))


def check_sizes(ask: Ask, llm: LLM, settings: ServerSettings) -> None:
    """Raise Refusal if the answer would be larger than the settings allow."""
    if ask.num_choices > settings.max_choices:
        raise Refusal(
            f"{len(ask.prompts)} prompts times n = {ask.n} are {ask.num_choices} texts; a request may ask "
            f"for {settings.max_choices}.",
            param="n" if ask.n > 1 else "prompt",
        )
    max_tokens = 0 if ask.params is None else ask.params.max_tokens
    if ask.num_choices * max_tokens > settings.max_call_tokens:
        raise Refusal(
            f"{ask.num_choices} texts of {max_tokens} tokens are more than the {settings.max_call_tokens} "
            "tokens that a request may ask for.",
            param="max_tokens",
        )
    num_top = 0 if ask.params is None else ask.params.top_logprobs
    entries = ask.num_choices * max_tokens * num_top
    entries += ask.n * ask.num_prompt_tokens * (ask.num_scored_top or 0)
    if entries > settings.max_call_tokens:
        raise Refusal(
            f"the answer would list {entries} likeliest tokens, and at most {settings.max_call_tokens} are "
            "listed. Ask for fewer logprobs, tokens or prompts.",
            param="logprobs",
        )
    if ask.num_scored_top is not None:
        _check_scored(ask.prompts, llm, settings)


def _check_scored(prompts: Sequence[Prompt], llm: LLM, settings: ServerSettings) -> None:
    limit = settings.max_scored_bytes // (4 * llm.engine.arch.vocab_size)
    longest = max(len(each.tokens) for each in prompts)
    if longest > limit:
        raise Refusal(
            f"the prompt has {longest} tokens, and log probabilities are given for prompts of at most "
            f"{limit}.",
            param="prompt",
        )

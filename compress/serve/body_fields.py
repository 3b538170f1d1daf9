"""The fields of a request body: those that are understood, those that may be left aside, and the rest,
which is refused, because a field that is silently ignored would change what the answer means.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from compress.errors import CompressError, did_you_mean
from compress.llm import SamplingParams
from compress.runtime.request import MAX_TOP_LOGPROBS
from compress.serve.refusal import Refusal
from compress.untrusted.fields import Fields, shown
from compress.untrusted.parse import Malformed, parse_json

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 128
_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow."""
MAX_SEED = (1 << 63) - 1
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"}
    | {"prompt_cache_retention", "spaces_between_special_tokens", "verbosity"}
)
"""Fields that change nothing here, whatever their value."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "echo": (False,),
    "bad_words": ([],),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (),
}
"""Fields that are not supported, and the values with which they change nothing; null is one for every
field.
"""
_SAMPLING = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "n"}
    | {"stream", "stream_options", "logprobs", "priority"}
)


class BodyFields(Fields):
    """The fields of a request body; an error names the field as its `param`."""

    def wrong(self, name: str, value: Any, wanted: str) -> CompressError:
        """Return the error for a field whose value is not what is wanted."""
        return Refusal(f"{name} is {shown(value)}; it must be {wanted}.", param=name)


def parse_body(data: bytes, known: frozenset[str]) -> BodyFields:
    """Return the fields of a body; `known` are those of the endpoint, in addition to the common ones.

    Raises:
        Refusal: it is not a JSON object, or has a field that would change the answer and is not supported.
    """
    try:
        content = parse_json(data)
    except Malformed as error:
        raise Refusal(f"the body is not JSON: {error}.", code="invalid_json") from None
    fields = BodyFields(content, "the body", Refusal)
    known = known | _SAMPLING
    for name, value in content.items():
        if name in known or name in _HARMLESS or value is None:
            continue
        if name not in _NEUTRAL:
            hint = did_you_mean(name, known)
            raise Refusal(
                f"the field {shown(name)} is not known.{hint}", param=name[:80], code="unknown_field"
            )
        if name == "min_tokens" and type(value) is int and value >= 0 and _has_max_tokens(content):
            continue
        if not any(_is(value, each) for each in _NEUTRAL[name]):
            raise Refusal(f"{name} is not supported; leave it out.", param=name, code="unsupported_field")
    return fields


def _has_max_tokens(content: Mapping[str, Any]) -> bool:
    """Return whether nothing ends a text before `max_tokens`."""
    return content.get("ignore_eos") is True and not content.get("stop")


def _is(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def read_params(fields: BodyFields, *, max_tokens: int, logprobs: bool, top_logprobs: int) -> SamplingParams:
    """Return the sampling parameters of a body. Without a seed a random one is drawn, so that requests
    differ. `max_tokens` is 0 where a prompt is scored and nothing is generated; the parameters have 1 then.

    Raises:
        Refusal: a value is out of range, or `min_tokens` is more than `max_tokens`.
    """
    min_tokens = fields.integer("min_tokens", 0, (1 << 31) - 1, default=0)
    if min_tokens > max_tokens:
        raise Refusal(
            f"min_tokens is {min_tokens} and at most {max_tokens} tokens are generated; lower min_tokens or "
            "raise max_tokens.",
            param="min_tokens",
        )
    temperature = fields.number("temperature", 0, 100, default=1.0)
    top_p = fields.number("top_p", 0, 1, default=1.0)
    if top_p == 0:
        raise fields.wrong("top_p", 0, "above 0 and at most 1")
    min_p = fields.number("min_p", 0, 1, default=0.0)
    if min_p == 1:
        raise fields.wrong("min_p", 1, "at least 0 and below 1")
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1) if fields.has("seed") else None
    return SamplingParams(
        max_tokens=max(max_tokens, 1),
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=top_p,
        top_k=max(fields.integer("top_k", -1, (1 << 31) - 1, default=0), 0),
        min_p=min_p,
        seed=secrets.randbelow(MAX_SEED) if seed is None else seed & MAX_SEED,
        ignore_eos=fields.flag("ignore_eos", default=False),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stop=_stop_strings(fields),
    )


def read_stream(fields: BodyFields) -> tuple[bool, bool]:
    """Return whether the answer is a stream, and whether that ends with the usage.

    Raises:
        Refusal: `stream_options` without `stream`, or with something unknown in it.
    """
    stream = fields.flag("stream", default=False)
    if not fields.has("stream_options"):
        return stream, False
    if not stream:
        raise Refusal("stream_options needs stream: true.", param="stream_options")
    options = fields.mapping("stream_options")
    unknown = sorted(set(options) - {"include_usage", "include_obfuscation", "continuous_usage_stats"})
    if unknown:
        raise Refusal(f"stream_options has an unknown field {shown(unknown[0])}.", param="stream_options")
    if options.get("continuous_usage_stats"):
        raise Refusal("continuous_usage_stats is not supported; leave it out.", param="stream_options")
    inside = BodyFields(options, "stream_options", Refusal)
    return stream, inside.flag("include_usage", default=False)


def read_n(fields: BodyFields, max_choices: int) -> int:
    """Return how many texts each prompt gets.

    Raises:
        Refusal: fewer than one, or more than an answer may have.
    """
    return fields.integer("n", 1, max_choices, default=1)


def read_priority(fields: BodyFields) -> int:
    """Return the priority among the requests of the same client; the lowest is served first."""
    return fields.integer("priority", -(1 << 31), 1 << 31, default=0)


def read_num_top(fields: BodyFields, name: str) -> int:
    """Return how many of the likeliest tokens are asked for."""
    return fields.integer(name, 0, MAX_TOP_LOGPROBS, default=0)


def _stop_strings(fields: BodyFields) -> tuple[str, ...]:
    if not fields.has("stop"):
        return ()
    strings = fields.texts("stop") if fields.is_list("stop") else [fields.text("stop")]
    if len(strings) > MAX_STOP_STRINGS or not all(0 < len(each) <= MAX_STOP_LENGTH for each in strings):
        raise Refusal(
            f"stop must be at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_LENGTH} characters.",
            param="stop",
        )
    return tuple(strings)

"""How many tokens of prompts a step takes, so that running requests wait no longer than wanted for their
next token.

A step that decodes and prefills takes d + p n seconds between the tokens of a running request: d for a step
without a prompt, p for each of n prompt tokens. Both follow the steps that were seen, by moving averages.
So chunks of prompts, and with them the last bits of a prompt's logits, depend on the machine; without a
target they do not.
"""

MIN_CHUNK = 64
"""Fewest prompt tokens of a step: a prompt always makes progress."""
FIRST_CHUNK = 512
"""Prompt tokens of a step before one was seen."""
_WEIGHT = 0.2


class StepBudget:
    """The largest number of prompt tokens of a step that keeps the time between tokens at `target_s` (None:
    any time will do).
    """

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._last_read_s: float | None = None
        self._num_between = 0

    @property
    def num_tokens(self) -> int | None:
        """Prompt tokens of the next step, if any request decodes in it; None: as many as fit."""
        if self._target_s is None:
            return None
        if self._token_s is None:
            return FIRST_CHUNK
        return max(MIN_CHUNK, int((self._target_s - (self._decode_s or 0.0)) / self._token_s))

    def read(self, now_s: float) -> None:
        """Note that the tokens of a decode step have come."""
        if self._last_read_s is not None:
            self._observe(now_s - self._last_read_s)
        self._last_read_s = now_s
        self._num_between = 0

    def launched(self, num_prompt_tokens: int, *, beside_decodes: bool) -> None:
        """Note the prompt tokens that were launched after the decodes of a step, or without any."""
        self._num_between = num_prompt_tokens
        if not beside_decodes:
            self._last_read_s = None

    def _observe(self, seconds: float) -> None:
        if not self._num_between:
            self._decode_s = _moved(self._decode_s, seconds)
        elif (rest_s := seconds - (self._decode_s or 0.0)) > 0:
            self._token_s = _moved(self._token_s, rest_s / self._num_between)


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)

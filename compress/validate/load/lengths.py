"""Lengths of prompts and outputs: lognormal around a median, within limits; a spread of zero is a fixed
length.

    length = clip(rint(lognormal(ln median, spread)), least, most)

Prompts are drawn first, then outputs, from one generator of numpy: a seed gives the same lengths everywhere.
"""

import math
from dataclasses import dataclass

import numpy as np

from compress.errors import UsageError


@dataclass(frozen=True)
class LengthLaw:
    """A law of lengths in tokens.

    Raises:
        UsageError: the limits leave no length, or a number is out of range.
    """

    median: int
    spread: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.median <= self.most or not 0 <= self.spread < math.inf:
            raise UsageError(
                f"lengths around {self.median} tokens with the spread {self.spread:g}, from {self.least} to "
                f"{self.most}, cannot be drawn: 1 <= least <= median <= most and spread >= 0 must hold."
            )

    @property
    def longest(self) -> int:
        """The longest length that can be drawn."""
        return self.most if self.spread > 0 else self.median

    def draw(self, num: int, rng: np.random.Generator) -> tuple[int, ...]:
        """Return `num` lengths."""
        drawn = rng.lognormal(math.log(self.median), self.spread, num)
        return tuple(np.clip(np.rint(drawn), self.least, self.most).astype(np.int64).tolist())


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths of the requests of a workload, in order."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(sum, zip(self.prompt_tokens, self.output_tokens, strict=True)))


def draw_lengths(num: int, *, prompt: LengthLaw, output: LengthLaw, seed: int) -> Lengths:
    """Return the lengths of `num` requests."""
    rng = np.random.default_rng(seed)
    prompt_tokens = prompt.draw(num, rng)
    return Lengths(prompt_tokens, output.draw(num, rng))

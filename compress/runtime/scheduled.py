"""The work of one step: requests to decode, and chunks of prompts."""

from dataclasses import dataclass

from compress.runtime.generation import Generation
from compress.runtime.prefix_states import StateCopies


@dataclass(frozen=True)
class PrefillChunk:
    """The next `num_tokens` tokens of a generation that is being prefilled, and of `followers` that share its
    blocks.
    """

    generation: Generation
    num_tokens: int
    followers: tuple[Generation, ...] = ()

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All that it prefills."""
        return self.generation, *self.followers

    @property
    def is_last(self) -> bool:
        """Whether it ends with the last known token, so that the model's logits choose the next one."""
        return self.generation.num_computed + self.num_tokens == len(self.generation.tokens)


@dataclass(frozen=True)
class Batch:
    """The work of one step: requests to decode, and chunks of prompts to prefill. Before either, the first
    block of each of `copies` is copied to the second. `states` is what it does with states, where sequences
    have some.
    """

    decodes: tuple[Generation, ...]
    prefills: tuple[PrefillChunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    states: StateCopies | None = None

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all prefill chunks."""
        return sum(each.num_tokens for each in self.prefills)

"""The steps that were launched and are not read yet: one, or two where a step is launched ahead.

A step decodes, then prefills. Both parts have their own tokens, which the host reads when the device has
chosen them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from compress.kernels.operands.recurrent_states import SavedState
from compress.runtime.decode_run import DecodeRun, Decoding, PendingTokens
from compress.runtime.generation import Generation
from compress.runtime.prefill import Prefill, PrefilledTokens
from compress.runtime.prefix_states import StateCopies
from compress.runtime.scheduled import Batch, PrefillChunk


@dataclass
class LaunchedStep:
    """A step on its way through the device. Prefill chunks that are `deferred` are launched when its decodes
    have been read.
    """

    decodes: Sequence[Generation]
    decoded: PendingTokens | None
    prefilled: PrefilledTokens | None
    num_prefill_tokens: int
    deferred: Sequence[PrefillChunk] = ()
    states: StateCopies | None = None
    shows_likeliest: bool = False

    @property
    def holds_logits(self) -> bool:
        """Whether its logits are read, which the next step may overwrite."""
        firsts = () if self.prefilled is None else self.prefilled.generations
        return self.shows_likeliest or _show_likeliest(firsts)


class BlockCopies(Protocol):
    """The copies of steps within pages; the device keeps their order."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second."""


class Copies(BlockCopies, Protocol):
    """The copies of steps within a cache, and the states that passes save."""

    def restore_states(self, states: Sequence[SavedState]) -> None:
        """Copy saved states to the slots of sequences."""

    def save_states(self, states: Sequence[SavedState]) -> None:
        """Have the passes that follow save these states, and no others."""


class StepQueue:
    """Launches steps, and returns them in that order. A `proposer` has pages of the same blocks."""

    def __init__(
        self, decoding: Decoding, prefill: Prefill, cache: Copies, proposer: BlockCopies | None = None
    ) -> None:
        self._decoding = decoding
        self._prefill = prefill
        self._cache = cache
        self._pages: tuple[BlockCopies, ...] = (cache,) if proposer is None else (cache, proposer)
        self._saves = False
        self._run: DecodeRun | None = None
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> LaunchedStep:
        """The step that was launched last. There is one."""
        return self._steps[-1]

    def pop_oldest(self) -> LaunchedStep:
        """Return the step that is to be read next."""
        return self._steps.popleft()

    def launch(self, batch: Batch, *, defers: bool = False) -> None:
        """Launch a step of this batch, or only its decodes if it `defers` its prefill chunks."""
        self._copy(batch)
        if batch.copies or not batch.decodes:
            self._run = None
        decoded = self._decode(batch.decodes) if batch.decodes else None
        step = LaunchedStep(
            batch.decodes,
            decoded,
            None,
            batch.num_prefill_tokens,
            batch.prefills,
            batch.states,
            shows_likeliest=_show_likeliest(batch.decodes),
        )
        if not defers:
            self.launch_deferred(step)
        self._steps.append(step)

    def _copy(self, batch: Batch) -> None:
        self._copy_blocks(batch.copies)
        if batch.states is None:
            return
        self._copy_blocks(batch.states.blocks)
        if batch.states.restored:
            self._cache.restore_states(batch.states.restored)

    def launch_deferred(self, step: LaunchedStep) -> None:
        """Launch the prefill chunks of a step that deferred them."""
        saved = () if step.states is None else step.states.saved
        if saved or self._saves:
            self._cache.save_states(saved)
        self._saves = bool(saved)
        step.prefilled = self._prefill.launch(step.deferred) if step.deferred else None
        step.deferred = ()
        if step.states is not None:
            self._copy_blocks(step.states.firsts)

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for pages in self._pages if pairs else ():
            pages.copy_blocks(pairs)

    def launch_next(self, running: Sequence[Generation]) -> bool:
        """Launch the decodes of the last step once more, if they are all that runs now, none of them has all
        its tokens, and each has a block for its next token; return whether that is so.

        Equal numbers are not enough: one request may have ended since, while another is prefilled.
        """
        run = self._run
        if run is None or list(run.generations) != list(running):
            return False
        decoded = run.launch_next()
        if decoded is not None:
            likeliest = self.newest.shows_likeliest  # the same requests
            self._steps.append(LaunchedStep(run.generations, decoded, None, 0, shows_likeliest=likeliest))
        return decoded is not None

    def _decode(self, generations: Sequence[Generation]) -> PendingTokens:
        """Launch a decode step of requests that have blocks for it."""
        run = self._run
        if run is not None and run.generations == generations and self._decoding.may_load_ahead(generations):
            decoded = run.launch_next()
            if decoded is not None:
                return decoded
        prefilled = self._steps[-1].prefilled if self._steps else None
        self._run = DecodeRun(self._decoding, generations, None if prefilled is None else prefilled.firsts)
        return self._run.first


def _show_likeliest(generations: Sequence[Generation]) -> bool:
    return any(each.request.params.top_logprobs for each in generations)

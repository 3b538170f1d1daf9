"""The states of sequences after some of their tokens, for models of which the prefix cache's blocks do not
hold all: a sequence goes on from a prefix only with the states after its last token.

States are large, so few are saved, each at the end of a full block:

- at the last full block of a prompt, from where the next turn of a conversation goes on;
- where a prompt departs from those before it: the next one that departs there goes on from there;
- where the budget of a step cuts a prompt. These are evicted before all others, of which the one that was
  used least recently is.

A prompt is cut at the first two, and what is left of it waits for the next step; other completions of the
same prompt wait until then. So a state is saved only `LEAST_TOKENS` or more after the one before it. Its
blocks are cached with it, and found from the next step on.

The first block of a sequence also names its slot of states (`kernels/operands/delta_states.py`), so nobody
shares it. The cache has a copy of it, which is copied once more for each request that finds it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from compress.kernels.operands.delta_states import SavedState
from compress.runtime.block_pool import BlockPool
from compress.runtime.generation import Generation
from compress.runtime.prefix_cache import PrefixCache

LEAST_TOKENS = 256
"""So many tokens of a prompt take longer than the pass that a cut adds."""


@dataclass
class StateCopies:
    """What a step begins with: pairs of blocks to be copied, states that are restored to the slots of
    sequences, and states that are saved from others, in this order. Of each kind all are read before any is
    written.
    """

    blocks: list[tuple[int, int]] = field(default_factory=list)
    restored: list[SavedState] = field(default_factory=list)
    saved: list[SavedState] = field(default_factory=list)


class PrefixStates:
    """The places of saved states, and the `copies` of the step that is being scheduled. A prompt is cut after
    a multiple of `multiple` tokens, which is one of the block size.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        pool: BlockPool,
        *,
        block_size: int,
        multiple: int,
        num_saved: int,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        self._prefixes = prefixes
        self._pool = pool
        self._block_size = block_size
        self._multiple = multiple
        self._least_tokens = least_tokens
        self._free = list(range(num_saved))
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._of_this_step: set[bytes] = set()
        prefixes.on_forget = self._forget
        self.copies = StateCopies()

    def begin_step(self) -> None:
        """Begin with no copies."""
        self.copies = StateCopies()
        self._of_this_step.clear()

    def usable(self, generation: Generation, found: list[int]) -> list[int]:
        """Return those of the blocks that begin a waiting request after which a state is saved."""
        generation.branch = len(found) * self._block_size
        generation.saved_tokens = 0
        count = len(found)
        while count and not self._has(self._prefixes.key(generation, count - 1)):
            count -= 1
        return found[:count]

    def begin(self, generation: Generation) -> None:
        """Give a request that goes on from the blocks of a prefix a first block and a slot of its own."""
        key = self._prefixes.key(generation, len(generation.blocks) - 1)
        self._places.move_to_end(key)
        generation.saved_tokens = len(generation.blocks) * self._block_size
        generation.first_copy = generation.blocks[0]
        (slot,) = self._pool.allocate(1, begins=True)
        generation.blocks[0] = slot
        self.copies.blocks.append((generation.first_copy, slot))
        self.copies.restored.append(SavedState(slot, self._places[key], generation.saved_tokens))

    def cuts(self, num_tokens: int) -> bool:
        """Return whether a prompt of so many tokens is cut at its last full block."""
        return num_tokens > self._least_tokens

    def cut(self, generation: Generation, end: int) -> int:
        """Return where a chunk of a prompt ends that could reach `end`: at the next place where it is cut to
        save the state, if one comes before."""
        for place in self._cuts(generation):
            is_far = place - generation.saved_tokens >= self._least_tokens
            if is_far and generation.num_computed < place < end:
                return place
        return end

    def save(self, generation: Generation) -> None:
        """Save the state of a sequence that is about to go on from the end of a block, and cache its blocks,
        if it has come far enough since the last time and there is room.
        """
        num_tokens = generation.num_computed
        if num_tokens % self._block_size or num_tokens - generation.saved_tokens < self._least_tokens:
            return
        idx = num_tokens // self._block_size - 1
        key = self._prefixes.key(generation, idx)
        if key not in self._places:
            if not self._copies_first(generation):
                return
            self._prefixes.insert(generation, num_tokens, long=False)
            is_cached = self._prefixes.block(generation, idx) is not None
            place = self._take_place() if is_cached else None
            if place is None:
                return
            self._places[key] = place
            self._places.move_to_end(key, last=num_tokens in self._cuts(generation))
            self._of_this_step.add(key)
            self.copies.saved.append(SavedState(generation.blocks[0], place, num_tokens))
        generation.saved_tokens = num_tokens

    def _has(self, key: bytes) -> bool:
        return key in self._places and key not in self._of_this_step

    def _cuts(self, generation: Generation) -> tuple[int, int]:
        """Return where a prompt departs from those before it, and its last full block ends."""
        last = len(generation.tokens) - 1
        return generation.branch - generation.branch % self._multiple, last - last % self._multiple

    def _copies_first(self, generation: Generation) -> bool:
        """Make sure that the cache has a copy of the first block; return whether there was room."""
        if generation.first_copy is not None:
            return True
        cached = self._prefixes.block(generation, 0)
        if cached is not None:
            self._pool.share([cached])
            generation.first_copy = cached
        elif self._pool.num_free:
            (generation.first_copy,) = self._pool.allocate(1)
            self.copies.blocks.append((generation.blocks[0], generation.first_copy))
        return generation.first_copy is not None

    def _take_place(self) -> int | None:
        """Return a free place, if need be that of the state that is evicted first; None if there are none."""
        if not self._free and self._places:
            self._forget(next(iter(self._places)))
        return self._free.pop() if self._free else None

    def _forget(self, key: bytes) -> None:
        """Free the place of a state, if one is saved."""
        place = self._places.pop(key, None)
        if place is not None:
            self._free.append(place)
            self.copies.saved = [each for each in self.copies.saved if each.place != place]

"""The states of sequences after some of their tokens, for models of which the prefix cache's blocks do not
hold all: a sequence goes on from a prefix only with the states after its last token.

States are large, so few are saved, each at the end of a full block:

- at the last full block of a prompt, from where the next turn of a conversation goes on;
- where a prompt departs from those before it: the next one that departs there goes on from there;
- where the budget of a step cuts a prompt that has a state saved further on. These are evicted first, the
  oldest of them before others, and then the state that was used least recently.

A pass over a prompt saves one state on its way (`kernels/operands/recurrent_states.py`), so a prompt is cut
where it departs, and other completions of it wait until its state is saved. A state is saved `LEAST_TOKENS`
or more after the one before it. Its blocks are cached with it, and found from the next step on.

The first block of a sequence also names its slot of states (`kernels/operands/recurrent_states.py`), so
nobody shares it. The cache has a copy of it, which is copied once more for each request that finds it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from compress.kernels.operands.recurrent_states import CHUNK, SavedState
from compress.runtime.block_pool import BlockPool
from compress.runtime.generation import Generation
from compress.runtime.prefix_cache import PrefixCache

LEAST_TOKENS = 256
"""Tokens of a prompt that are worth the memory of a state; so many or more are between two of a prompt."""


@dataclass
class StateCopies:
    """The copies of a step. Before its passes pairs of `blocks` are copied, all read before any is written,
    and states are `restored` to the slots of sequences. Passes save the states in `saved`. After them pairs
    of `firsts` are copied: the first blocks of sequences whose states are saved.
    """

    blocks: list[tuple[int, int]] = field(default_factory=list)
    restored: list[SavedState] = field(default_factory=list)
    saved: list[SavedState] = field(default_factory=list)
    firsts: list[tuple[int, int]] = field(default_factory=list)


class PrefixStates:
    """The places of saved states, and the `copies` of the step that is being scheduled. States are saved
    after a multiple of `multiple` tokens, which is one of the block size, and of `chunk` tokens of a pass.
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
        chunk: int = CHUNK,
    ) -> None:
        self._prefixes = prefixes
        self._pool = pool
        self._block_size = block_size
        self.multiple = multiple
        self._least_tokens = least_tokens
        self._chunk = chunk
        self._free = list(range(num_saved))
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._on_the_way: OrderedDict[bytes, None] = OrderedDict()
        """The keys of those that are evicted first."""
        self._of_this_step: set[bytes] = set()
        prefixes.on_forget = self._forget
        self.copies = StateCopies()

    def begin_step(self) -> None:
        """Begin with no copies."""
        self.copies = StateCopies()
        self._of_this_step.clear()

    def usable(self, generation: Generation, found: list[int]) -> list[int]:
        """Return those of the blocks that begin a waiting request after which a state is saved."""
        generation.branch = len(found) * self._block_size // self.multiple * self.multiple
        generation.saved_tokens = 0
        count = len(found)
        while count and not self._has(self._prefixes.key(generation, count - 1)):
            count -= 1
        return found[:count]

    def begin(self, generation: Generation) -> None:
        """Give a request that goes on from the blocks of a prefix a first block and a slot of its own."""
        key = self._prefixes.key(generation, len(generation.blocks) - 1)
        self._use(key)
        generation.saved_tokens = len(generation.blocks) * self._block_size
        generation.first_copy = generation.blocks[0]
        (slot,) = self._pool.allocate(1, begins=True)
        generation.blocks[0] = slot
        self.copies.blocks.append((generation.first_copy, slot))
        self.copies.restored.append(SavedState(slot, self._places[key], generation.saved_tokens))

    def awaits(self, first: Generation, found: list[int]) -> bool:
        """Return whether a waiting request, which finds these blocks, is to go on from a state that is yet to
        be saved of another one with the same prompt, or that its pass in this step saves."""
        last = self._last(first)
        is_coming = first.num_computed < last and self._is_far(first, last)
        return is_coming or first.saved_tokens > len(found) * self._block_size

    def cut(self, generation: Generation, end: int) -> int:
        """Return where a chunk of a prompt ends that could reach `end`: where the prompt departs from those
        before it, if a state is to be saved there."""
        branch = generation.branch
        if not generation.num_computed < branch < end or not self._can_save(generation, branch):
            return end
        is_saved = self._prefixes.key(generation, branch // self._block_size - 1) in self._places
        return end if is_saved else branch

    def save(self, generation: Generation, end: int) -> None:
        """Have the pass over the next chunk of a prompt, up to `end`, save the state after its last full
        block, or else that at the end of the chunk, and cache the blocks before it, where the prompt has come
        far enough since the last time and there is room.
        """
        last = self._last(generation)
        is_within = generation.num_computed < last <= end
        num_tokens = last if is_within and self._is_far(generation, last) else end
        if num_tokens % self.multiple or not self._can_save(generation, num_tokens):
            return
        if num_tokens > self._prefixes.num_cacheable(generation):
            return
        idx = num_tokens // self._block_size - 1
        key = self._prefixes.key(generation, idx)
        if not self._copies_first(generation):
            return
        self._prefixes.insert(generation, num_tokens, long=False)
        if key not in self._places:
            is_cached = self._prefixes.block(generation, idx) is not None
            place = self._take_place() if is_cached else None
            if place is None:
                return
            self._places[key] = place
            self._of_this_step.add(key)
            self.copies.saved.append(SavedState(generation.blocks[0], place, num_tokens))
            if num_tokens != generation.branch and last - num_tokens >= self._least_tokens:
                self._on_the_way[key] = None
        else:
            self._use(key)
        generation.saved_tokens = num_tokens

    def _last(self, generation: Generation) -> int:
        """Return where the last full block of a prompt ends that may be found."""
        return self._prefixes.num_findable(generation) // self.multiple * self.multiple

    def _can_save(self, generation: Generation, num_tokens: int) -> bool:
        """Return whether the next pass of a prompt can save the state after so many tokens, far enough from
        the last one."""
        in_pass = num_tokens - generation.num_computed
        return in_pass % self._chunk == 0 and self._is_far(generation, num_tokens)

    def _is_far(self, generation: Generation, num_tokens: int) -> bool:
        return num_tokens - generation.saved_tokens >= self._least_tokens

    def _use(self, key: bytes) -> None:
        self._places.move_to_end(key)
        self._on_the_way.pop(key, None)

    def _has(self, key: bytes) -> bool:
        return key in self._places and key not in self._of_this_step

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
            self.copies.firsts.append((generation.blocks[0], generation.first_copy))
        return generation.first_copy is not None

    def _take_place(self) -> int | None:
        """Return a free place, if need be that of the state that is evicted first; None if there are none."""
        if not self._free and self._places:
            self._forget(next(iter(self._on_the_way or self._places)))
        return self._free.pop() if self._free else None

    def _forget(self, key: bytes) -> None:
        """Free the place of a state, if one is saved."""
        self._on_the_way.pop(key, None)
        place = self._places.pop(key, None)
        if place is not None:
            self._free.append(place)
            self.copies.saved = [each for each in self.copies.saved if each.place != place]

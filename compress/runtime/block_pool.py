"""The blocks of a KV cache: which are free, how many requests hold each, and which are cached.

A block is held by one request, or by several that share a prefix (`prefix_cache.py`) or a whole prompt
(`scheduler.py`). One without a holder is free, or, where the prefix cache can find it, evictable: it keeps
its content until the place is needed. The block that was freed first is evicted first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from compress.kernels.operands.paged import PADDING_BLOCK


class BlockPool:
    """The blocks but the padding block. The block freed last is reused first, because its lines are the
    likeliest to be in the device's cache.

    `on_eviction` is called with each cached block that is taken for other tokens. With `num_first`, each
    sequence begins in one of so many blocks, which have the lowest ids and are taken for nothing else.
    """

    def __init__(self, num_blocks: int, *, num_first: int = 0) -> None:
        self._last_first = PADDING_BLOCK + num_first
        self._free = list(range(num_blocks - 1, self._last_first, -1))
        self._free_first = list(range(self._last_first, PADDING_BLOCK, -1))
        self._holders: dict[int, int] = {}
        self._cached: set[int] = set()
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.on_eviction: Callable[[int], None] = lambda block: None
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that can be taken, the evictable ones among them, without those that sequences
        begin in."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        """Number of blocks that some request holds."""
        return len(self._holders)

    def num_evictable_of(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are kept and held by nobody: sharing them makes as many fewer
        free.
        """
        return sum(block in self._evictable for block in blocks)

    def allocate(self, count: int, *, begins: bool = False) -> list[int]:
        """Take `count` blocks for new tokens, with which a sequence `begins` or goes on; the caller makes
        sure that so many are free, and that no more sequences are under way than can begin."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        first = [self._free_first.pop()] if begins and self._last_first > PADDING_BLOCK else []
        rest = [self._free.pop() if self._free else self._evict() for _ in range(count - len(first))]
        blocks = first + rest
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def is_shared(self, block: int) -> bool:
        """Return whether several requests hold a block."""
        return self._holders.get(block, 0) > 1

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to each of these blocks, which are cached or held."""
        for block in blocks:
            assert block in self._cached or block in self._holders, "a block is shared that holds nothing"
            self._evictable.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def cache(self, block: int) -> None:
        """Keep this held block when its last holder lets it go."""
        assert block in self._holders, "a block is to be cached that nobody holds"
        self._cached.add(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Take a holder from each of these blocks. Later blocks of a sequence are evicted before earlier
        ones.
        """
        for block in reversed(blocks):
            assert block in self._holders, "a block is freed that was not taken"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block <= self._last_first:
                self._free_first.append(block)
            elif block in self._cached:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._cached.remove(block)
        self.num_evictions += 1
        self.on_eviction(block)
        return block

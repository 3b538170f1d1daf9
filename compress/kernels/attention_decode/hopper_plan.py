"""Cuts contexts into slices and spreads them over blocks, for decode attention on Hopper (`hopper.py`)."""

from dataclasses import dataclass, replace

from compress.kernels.operands.paged import CODED_FORMATS, INT4_TOKEN_HEAD, SECTION_KEYS, SHORT_CONTEXT

CLUSTERS = {8: 15, 4: 30, 2: 66, 1: 132}
"""Numbers of blocks that may share a request and KV head, and how many such clusters an H200 holds with one
block on each multiprocessor. A cluster of more than two stays within one group of multiprocessors, and the
rest of the group is idle (`linear/stream_plan.py`)."""
MAX_LANES = 8
"""Lanes of one warp at most."""
_SUMS = 128
"""Registers of a thread for sums."""


@dataclass(frozen=True)
class Slicing:
    """How a context is cut: keys of a slice and lanes of slices, on which the bits depend; slices that a warp
    has on their way, warps of a block that add slices, whether the copy engine brings slices and whether
    other warps of the block compute their scores, on which only the time does."""

    keys: int
    lanes: int
    depth: int
    warps: int = 4
    engine: bool = False
    specialized: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * (64 if self.specialized else 32)


def slicing_of(kv_format: str, head_dim: int) -> Slicing:
    """Return how contexts of a format and head dimension are cut. Wide heads have more lanes: a slice of
    theirs has as many bytes as two of others, and a single request with eight KV heads would keep 32
    multiprocessors busy. Codes are a half or a quarter of the bytes, and so two slices are on their way."""
    lanes = 16 if head_dim <= 128 else 32
    if kv_format in CODED_FORMATS:
        return Slicing(keys=32, lanes=lanes, depth=2)
    return Slicing(keys=32 if head_dim <= 128 else 16, lanes=lanes, depth=1)


def section_keys_of(window: int | None) -> int | None:
    """Return the keys of a section; None for a layer whose window is no longer than that, whose contexts are
    summed as a whole."""
    return None if window is not None and window <= SECTION_KEYS else SECTION_KEYS


def row_eights_of(num_rows: int) -> int:
    """Return how many eights of query rows a block takes at once: their sums fill its registers. More rows
    need more blocks, each of which reads the keys again."""
    return 1 if num_rows <= 8 else 2


def row_bytes_of(kv_format: str, head_dim: int) -> int:
    """Return the bytes of a key."""
    return {INT4_TOKEN_HEAD: head_dim // 2}.get(
        kv_format, head_dim if kv_format in CODED_FORMATS else 2 * head_dim
    )


def is_tiled(kv_format: str, head_dim: int, block_size: int, keys: int) -> bool:
    """Return whether the copy engine can bring slices of so many keys: a block of the cache holds them, and
    their rows are 32 or 64 bytes or a multiple of 128."""
    row_bytes = row_bytes_of(kv_format, head_dim)
    return block_size % keys == 0 and (row_bytes in (32, 64) or row_bytes % 128 == 0)


def spread_of(
    pairs: int, num_rows: int, kv_format: str, head_dim: int, *, block_size: int, longest: int
) -> tuple[Slicing, int]:
    """Return how contexts are cut and how many blocks share one, given the number of pairs of request and KV
    head, of query rows of each, and of positions of a context at most. Each section of a context counts as a
    pair of its own.

    Few pairs have eight blocks each, whose two warps have a lane each. They copy slices by themselves, which
    takes less time from request to arrival than the copy engine; that brings long contexts of 16 bits, three
    slices at a time. Each lane of a long context has two warps then, because one alone takes longer over a
    slice than memory does: one computes scores, the other sums. Codes have them up to thirty pairs.
    While every block has a multiprocessor to itself, two slices of keys of 16 bits are on their way: nothing
    else hides how long one takes to arrive.
    More pairs than are there at once have two blocks each all the same, up to four pairs for a
    multiprocessor, because smaller blocks leave less to a last round of few; they have two warps where
    contexts are short, so that more of them are there at once. `docs/LOG.md` (2026-11-26, 2026-11-30) has
    the times.
    """
    slicing = slicing_of(kv_format, head_dim)
    eights = row_eights_of(num_rows)
    coded = kv_format in CODED_FORMATS
    is_long = longest > SHORT_CONTEXT
    tiled = is_tiled(kv_format, head_dim, block_size, slicing.keys)
    if slicing.lanes == 16 and pairs <= CLUSTERS[8] and num_rows <= 16:
        by_engine = is_long and tiled and not coded
        depth = 3 if by_engine else 2
        return replace(slicing, warps=2, depth=depth, engine=by_engine, specialized=is_long), 8
    slicing = replace(slicing, engine=tiled)
    if coded and slicing.engine and eights == 1 and pairs > 2 * CLUSTERS[4]:
        return _spread_of_codes(slicing, pairs, num_rows, kv_format, head_dim, longest=longest), 2
    cluster = cluster_of(pairs, eights, head_dim, slicing, coded=coded)
    if coded and tiled and is_long and eights == 1 and head_dim <= 128 and pairs <= CLUSTERS[4]:
        return replace(slicing, specialized=True), cluster
    if pairs <= CLUSTERS[cluster] and not coded and head_dim <= 128 and eights == 1:
        return replace(slicing, depth=2), cluster
    if kv_format == INT4_TOKEN_HEAD:
        small = head_dim <= 128 and num_rows <= 4  # two blocks fit, with room for the sums of all warps
        if small and cluster == 2 and pairs <= 2 * CLUSTERS[2]:
            slicing = replace(slicing, warps=8)
    elif cluster == 1 and has_few_sums(head_dim, eights):
        rounds = pairs / CLUSTERS[1]
        if rounds <= 4 and not 2.7 < rounds <= 3:  # three blocks fit, and nearly fill, a multiprocessor
            slicing, cluster = replace(slicing, warps=4 if is_long else 2), 2
    return slicing, cluster


def _spread_of_codes(
    slicing: Slicing, pairs: int, num_rows: int, kv_format: str, head_dim: int, *, longest: int
) -> Slicing:
    """Return how contexts of codes that the copy engine brings are cut, for two blocks to a pair.

    Codes arrive faster than eight warps of a multiprocessor work them off: where two blocks for each pair are
    there at once, they have eight warps each, if the sums of all of them leave room for a second block; a
    block with a multiprocessor to itself has two slices of eight bits on their way. More blocks than are
    there at once have four warps and one slice each on its way, so that three fit. Codes of eight bits of
    short contexts, of which a warp has one slice or two, arrive sooner without the engine.
    """
    one_slice = replace(slicing, depth=1)
    if head_dim > 128:
        return replace(one_slice, warps=8)
    if pairs > 2 * CLUSTERS[1]:
        return one_slice
    is_long = longest > SHORT_CONTEXT
    if kv_format == INT4_TOKEN_HEAD:
        return replace(one_slice, warps=8)
    if num_rows * head_dim <= 512 and is_long:
        return replace(slicing if pairs <= CLUSTERS[2] else one_slice, warps=8)
    return replace(slicing, engine=is_long)


def cluster_of(pairs: int, row_eights: int, head_dim: int, slicing: Slicing, *, coded: bool) -> int:
    """Return the number of blocks for each pair of request and KV head, given the number of pairs: as many
    as are there at once. Tiles of codes are smaller, so that a multiprocessor holds three blocks; of clusters
    of four, which stay in a group of multiprocessors, only two are quick."""
    of_small = 3 if coded and has_few_sums(head_dim, row_eights) else 2
    least = _least_cluster(row_eights, head_dim, slicing)
    return next(
        each
        for each in clusters_of(slicing)
        if each == least or pairs <= (of_small if each <= 2 else 2) * CLUSTERS[each]
    )


def has_few_sums(head_dim: int, row_eights: int) -> bool:
    """Return whether the registers of three blocks fit a multiprocessor."""
    return head_dim * row_eights <= 128


def _least_cluster(row_eights: int, head_dim: int, slicing: Slicing) -> int:
    """Return the smallest cluster whose accumulators fit the registers. Fewer blocks have more lanes in a
    warp, and each lane holds log2(lanes of the warp) sums of others next to its own."""
    sums = head_dim // 4 * row_eights
    lanes = slicing.lanes // slicing.warps
    clusters = clusters_of(slicing)
    return next(
        (each for each in reversed(clusters) if sums * (lanes // each).bit_length() <= _SUMS), clusters[0]
    )


def clusters_of(slicing: Slicing) -> tuple[int, ...]:
    """Return the sizes of clusters in which every warp has a lane and at most `MAX_LANES`."""
    return tuple(
        each for each in CLUSTERS if slicing.warps * each <= slicing.lanes <= MAX_LANES * slicing.warps * each
    )

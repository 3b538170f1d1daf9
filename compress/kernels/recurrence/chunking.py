"""Rows of a pass that a recurrence takes in chunks, and others, which it takes one after the other.

A few rows of a sequence go one after the other, so that their bits do not depend on how many rows a pass has
of it; and so do the last rows of more, which leave states of their own, as many as a slot keeps but one.
"""

FEW_ROWS = 16
"""So few rows take longer in chunks than one after the other."""
MOST_PROGRAMS = 8192
"""So many programs keep any GPU busy; those of sequences without a row only cost time."""


def few_rows(num_kept: int) -> int:
    """Return the most rows of a sequence in a pass that all go one after the other, where a slot keeps so
    many states."""
    return FEW_ROWS + num_kept - 1


def sequences_at_once(num_sequences: int, num_programs: int) -> int:
    """Return how many sequences of a pass over prompts a launch takes at once, at so many programs each. A
    graph has room for many more sequences than most passes have."""
    return max(1, min(num_sequences, MOST_PROGRAMS // num_programs))


def parts(length: int, num_kept: int, wanted: int) -> list[tuple[int, int]]:
    """Return the rows that go at once, of a sequence that has so many in a pass: one, or a long part, which
    ends where a state is wanted."""
    in_chunks = length - (num_kept - 1) if length > few_rows(num_kept) else 0
    ends = sorted({end for end in (wanted, in_chunks) if 0 < end <= in_chunks})
    ends += range(in_chunks + 1, length + 1)
    return list(zip([0, *ends], ends, strict=False))

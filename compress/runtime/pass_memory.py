"""The bytes that a pass of the runtime computes beyond its activations, from shapes alone: a cache that fills
the memory of a GPU leaves room for them."""

import torch

from compress.kernels.compressed_attention.entries import MOST_KEYS
from compress.kernels.index_choice.reference import MOST_GATHERED
from compress.models.arch import Arch
from compress.models.indexer import BlockIndexer, Indexer
from compress.models.layer_shape import LayerShape
from compress.runtime.kv_cache import BLOCK_SIZES, MOST_CHOSEN_BYTES

_INDEX_BYTES = 8


def expanded_bytes(arch: Arch, dtype: torch.dtype, positions: int) -> int:
    """Return the bytes of the keys and values of all heads that a layer computes of so many positions of
    latents, for long prompts; 0 where a cache holds keys and values."""
    heads = [2 * layer.num_heads * layer.head_dim for layer in arch.layers if layer.latent is not None]
    return max(heads, default=0) * positions * dtype.itemsize


def choosing_bytes(arch: Arch, positions: int, num_rows: int) -> int:
    """Return the bytes of what a layer with an indexer computes in a pass of so many rows, over sequences of
    so many positions: index keys of the rows that are scored at once, their scores by head, in float32, the
    keys and values that are chosen, and the blocks and chosen slots of all rows; 0 where no layer chooses.
    Kernels write fewer bytes of scores."""
    needed = [0]
    for facts in {layer.indexer for layer in arch.layers if layer.index_numbers(positions)}:
        if isinstance(facts, Indexer | BlockIndexer):
            keys = max(MOST_GATHERED, positions * facts.cached_numbers)
            scores = 3 * keys * facts.num_heads // facts.cached_numbers
            # means of blocks are normed and turned, those of pools weighted
            of_keys = 2 if isinstance(facts, Indexer) and not facts.pool_size else 3
            chosen = facts.top_k * (1 if isinstance(facts, Indexer) else facts.num_heads)
            of_rows = num_rows * _INDEX_BYTES * (2 * chosen + positions // min(BLOCK_SIZES))
            at_once = torch.float32.itemsize * (of_keys * keys + scores) + 2 * MOST_CHOSEN_BYTES
            needed.append(at_once + of_rows)
    return max(needed)


def gathered_bytes(arch: Arch, num_positions: int, num_sequences: int, num_rows: int) -> int:
    """Return the bytes of what a layer with compressed attention computes of the sequences of a pass, of so
    many positions each, in float32: all entries, twice, and the keys and what entries are computed of, twice
    the numbers of all positions or at most those of a few turns, and what rows attend to at once, three
    times; 0 where no layer has it."""
    layers = [layer for layer in arch.layers if layer.compressed is not None]
    of_row = max((layer.head_dim * num_positions for layer in layers), default=0)
    numbers = [layer.cached_numbers + layer.index_numbers(num_positions) for layer in layers]
    at_once = 2 * max(numbers, default=0) * num_positions * num_sequences
    of_entries = num_sequences * max((_entry_numbers(layer, num_positions) for layer in layers), default=0)
    of_rows = 3 * min(MOST_KEYS, num_rows * of_row)
    return (2 * of_entries + min(at_once, 5 * MOST_KEYS) + of_rows) * torch.float32.itemsize


def _entry_numbers(layer: LayerShape, num_positions: int) -> int:
    """Return the numbers of the entries of so many positions, with those that an indexer scores."""
    facts = layer.compressed
    if facts is None or not facts.rate:
        return 0
    is_scored = layer.index_numbers(num_positions) > 0
    scored = facts.indexer.head_dim if facts.indexer is not None and is_scored else 0
    return (layer.head_dim + scored) * (num_positions // facts.rate)


def terms_bytes(arch: Arch, num_rows: int) -> int:
    """Return the bytes of the terms of distance that attention adds to the scores of so many rows, float32
    [T, H, E], and of what they are computed of [T, H, R]; 0 where no layer has them."""
    of_row = (
        layer.num_heads * (layer.relative.extent + layer.relative.rank)
        for layer in arch.layers
        if layer.relative is not None
    )
    return num_rows * max(of_row, default=0) * torch.float32.itemsize

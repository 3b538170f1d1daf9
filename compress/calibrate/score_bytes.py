"""The bytes of scores that the canonical decoder holds at once while a layer computes some samples, from
shapes alone: of attention that computes them itself, because they have a cap, sinks or terms of distance, and
of indexers. Attention without these computes its scores a tile at a time and holds none.

Shapes: B samples, S sequence, P keys, H heads, N heads of an indexer.
"""

from compress.models.arch import Arch
from compress.models.chosen_keys import MOST_CHOSEN_FROM, MOST_SCORES
from compress.models.indexer import BlockIndexer, EntryIndexer, Indexer
from compress.models.layer_shape import LayerShape

_RELATIVE_BYTES = {4: 12, 2: 16}
"""Bytes of a score with terms of distance, by those of a value: scores, terms and their sums; in 16 bits
scores and terms before and after they are widened, too."""
_ALIBI_BYTES = {4: 8, 2: 10}
"""Bytes of a score from which the distance of the key takes something: scores and probabilities; in 16 bits
scores before and after they are widened, too."""
_SLOPE_BYTES = 4
"""Bytes of a distance times the slope of a head, which samples share."""
_CAP_BYTES = {4: 12, 2: 10}
"""Bytes of a score with a cap: before, between and after."""
_SINK_BYTES = {4: 8, 2: 10}
"""Bytes of a score with a sink as one more: scores and probabilities, in 16 bits twice."""
_HEAD_BYTES = 8
"""Bytes of a score of one head of an indexer, float32 before and after its activation."""
_BLOCK_BYTES = 12
"""Bytes of a product with a key in a block, float32 as it is, masked and padded."""
_PRODUCT_BYTES = 4
"""Bytes of a float32 product, and of a number of a key, which products of several samples copy for each
query."""
_MASK_BYTES = 2
"""Bytes of a key of a query and head in masks of chosen keys, beyond the mask in the dtype of the values."""
_CHOICE_BYTES = 23
"""Bytes of a score of which some are chosen, beyond its own."""


def score_bytes(arch: Arch, layer: LayerShape, num_samples: int, seq_len: int, *, value_bytes: int) -> int:
    """Return the bytes that a layer holds at its peak of scores of so many samples, B S of each head with P
    keys, when values of the computation have `value_bytes`: 4 or 2."""
    return max(
        _attention_bytes(arch, layer, num_samples, seq_len, value_bytes),
        _indexer_bytes(layer, num_samples, seq_len),
        _mask_bytes(layer, num_samples, seq_len, value_bytes),
    )


def _attention_bytes(arch: Arch, layer: LayerShape, num_samples: int, seq_len: int, value_bytes: int) -> int:
    """Return the bytes of scores [B, H, S, P] and of keys and values repeated for all heads."""
    if not layer.attends:
        return 0
    queries = num_samples * seq_len
    terms = 0
    if layer.relative is not None:
        of_score = _RELATIVE_BYTES[value_bytes]
        terms = queries * layer.num_heads * layer.relative.extent * value_bytes
    elif layer.alibi is not None:
        of_score = _ALIBI_BYTES[value_bytes]
        terms = _SLOPE_BYTES * layer.num_heads * seq_len**2
    elif arch.attn_softcap is not None:
        of_score = _CAP_BYTES[value_bytes]
    elif arch.has_sinks(layer):
        of_score = _SINK_BYTES[value_bytes]
    else:
        return 0
    num_keys = seq_len
    if layer.compressed is not None and layer.compressed.rate:
        num_keys += seq_len // layer.compressed.rate
    repeated = 2 * layer.num_heads * layer.head_dim * value_bytes * num_samples * num_keys
    return of_score * queries * layer.num_heads * num_keys + repeated + terms


def _indexer_bytes(layer: LayerShape, num_samples: int, seq_len: int) -> int:
    """Return the bytes of the scores of an indexer and of the choice, 0 where all keys are attended to."""
    facts = layer.indexer
    if facts is None or not layer.index_numbers(seq_len):
        return 0
    num_scored = num_samples * seq_len * (seq_len // _positions_of_key(facts))
    copied = facts.head_dim if num_samples > 1 else 0
    is_plain = isinstance(facts, BlockIndexer) and not facts.pooled
    of_key = (_BLOCK_BYTES if is_plain else _HEAD_BYTES) * facts.num_heads
    of_key = max(of_key, _PRODUCT_BYTES * (facts.num_heads + copied))
    at_once = (
        num_scored if isinstance(facts, BlockIndexer) else min(num_scored, MOST_SCORES // facts.num_heads)
    )
    chosen = _CHOICE_BYTES * min(num_scored, MOST_CHOSEN_FROM) + num_samples * seq_len**2
    return _PRODUCT_BYTES * num_scored + max(of_key * at_once, chosen)


def _mask_bytes(layer: LayerShape, num_samples: int, seq_len: int, value_bytes: int) -> int:
    """Return the bytes of the masks by which attention reads chosen keys; heads of KV heads have their own
    where each head of the indexer chooses for one."""
    facts = layer.indexer
    if facts is None or not layer.index_numbers(seq_len):
        return 0
    by_head = isinstance(facts, BlockIndexer) and not facts.pooled and facts.num_heads > 1
    return (_MASK_BYTES + value_bytes) * (layer.num_heads if by_head else 1) * num_samples * seq_len**2


def _positions_of_key(facts: Indexer | BlockIndexer | EntryIndexer) -> int:
    """Return how many positions a key that an indexer scores is of."""
    if isinstance(facts, EntryIndexer):
        return facts.rate
    if isinstance(facts, BlockIndexer):
        return facts.block_size if facts.pooled else 1
    return max(1, facts.pool_size)

"""The paged KV cache: a pair of tensors for each layer (widths may differ), or one of latents, and one set of
block ids for all layers.

A block is `block_size` consecutive positions of one sequence. The layout of a layer is [K, num_blocks,
block_size, C], so that the blocks of one sequence gathered along axis 1 are a dense [K, L, C], the operand of
an attention product, without another copy; latents are the same for all heads and K is 1. Block 0 belongs to
no sequence: block tables are padded with it, and padding rows write there. Formats are those of
`kernels/operands/paged.py`, and of latents some of them (`kernels/operands/paged_latents.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.attention_prefill.fp8_reference import KEYS
from compress.kernels.operands.paged import (
    DENSE_FORMATS,
    FP8_ATTENTION,
    FP8_STATIC,
    FP8_TOKEN_HEAD,
    INT4_TOKEN_HEAD,
    INT8_TOKEN_HEAD,
    PAGE_DTYPES,
    TOKEN_HEAD_FORMATS,
    PagedKV,
    empty_pages,
)
from compress.kernels.operands.paged_latents import LATENT_FORMATS, PagedLatents, Pages
from compress.kernels.operands.recurrent_states import (
    RecurrentStates,
    SavedState,
    Saving,
    StackedStates,
    pass_bytes,
)
from compress.kernels.step.host_memory import sent
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.recurrence import Recurrence
from compress.quant.kv import HADAMARD_HEAD_DIMS, INT4_HADAMARD, page_format, transforms_heads

BLOCK_SIZES = (16, 32, 64, 128)
KV_FORMATS = (*DENSE_FORMATS.values(), *TOKEN_HEAD_FORMATS, FP8_STATIC, INT4_HADAMARD)
MOST_CHOSEN_BYTES = 1 << 28
"""Bytes of chosen latents that are gathered for rows that attend at once."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class JointKept:
    """The pages and the states of a layer in which a recurrence joins attention, or that has convolutions."""

    pages: Pages
    states: RecurrentStates


@dataclass(frozen=True)
class NGramKept:
    """The states of a layer that adds embeddings of n-grams: those of its recurrence, the last tokens of
    sequences, and the last inputs of the convolution of these embeddings."""

    states: RecurrentStates
    tokens: RecurrentStates
    inputs: RecurrentStates


@dataclass(frozen=True)
class IndexedKept:
    """The pages of a layer with an indexer, and those of the keys of the indexer."""

    pages: Pages
    index: PagedLatents


Kept = Pages | RecurrentStates | JointKept | NGramKept | IndexedKept | None
"""A layer keeps pages or states of sequences, or both, and nothing where it has an FFN only."""


def kv_bytes_per_token(
    arch: Arch, kv_format: str, *, num_positions: int | None = None, dtype: torch.dtype | None = None
) -> int:
    """Return the bytes of one position in the caches of all layers, scales included. Sequences have
    `num_positions`, by default as many as the model; keys of indexers have the `dtype` of the model.

    Raises:
        UsageError: the format is unknown, or does not fit the heads or the latents, or there are none.
    """
    stored = _storage_dtype(kv_format)
    if page_format(kv_format) not in DENSE_FORMATS.values() and not arch.cached_numbers:
        raise UsageError(
            f"KV cache format {kv_format} rounds keys and values, and this model has no attention: leave the "
            "format out (`kv_cache` of a recipe)."
        )
    scale_bytes = _SCALE_BYTES if page_format(kv_format) in TOKEN_HEAD_FORMATS else 0
    own = sum(
        heads * (numbers * stored.itemsize + scale_bytes)
        for heads, numbers in (_stored(layer, kv_format) for layer in arch.layers)
    )
    longest = arch.max_position if num_positions is None else num_positions
    of_indexers = sum(layer.index_numbers(longest) for layer in arch.layers)
    return own + of_indexers * PAGE_DTYPES[_index_format(arch, kv_format, dtype)].itemsize


def _index_format(arch: Arch, kv_format: str, dtype: torch.dtype | None) -> str:
    """Return the format of the keys of indexers: dense, in the dtype of the model."""
    if dtype is None and kv_format in DENSE_FORMATS.values():
        return kv_format
    return DENSE_FORMATS[getattr(torch, arch.dtype) if dtype is None else dtype]


def slot_bytes(arch: Arch, num_kept: int) -> int:
    """Return the bytes of the states of one sequence in all layers that have some."""
    return sum(RecurrentStates.slot_bytes(state, num_kept) for state in arch.states)


def max_pass_bytes(arch: Arch, num_rows: int, num_sequences: int) -> int:
    """Return the bytes that a pass over prompts needs for more than its rows, in the layer with the most."""
    return max((pass_bytes(each, num_rows, num_sequences) for each in set(arch.states)), default=0)


def _stored(layer: LayerShape, kv_format: str) -> tuple[int, int]:
    """Return the vectors of one position, each of which may have a scale, and the stored elements of one.

    Raises:
        UsageError: the format does not fit the layer.
    """
    if not layer.attends or layer.kv_source is not None:
        return 0, 0
    if layer.compressed is not None:
        if kv_format not in DENSE_FORMATS.values():
            raise UsageError(
                f"KV cache format {kv_format} has scales for keys and values, and this model has compressed "
                "attention, whose cache holds what its entries are computed of, too: leave the format out."
            )
        return 1, layer.cached_numbers
    if layer.latent is None:
        return 2 * layer.num_kv_heads, _stored_dim(layer, kv_format)
    if kv_format not in LATENT_FORMATS:
        raise UsageError(
            f"KV cache format {kv_format} holds keys and values of heads, and this model has latent "
            f"attention, whose cache holds latents: take {FP8_TOKEN_HEAD} (`kv_cache: fp8_token_head` in a "
            f"recipe), {INT8_TOKEN_HEAD} (`kv_cache: int8`) or none."
        )
    return 1, layer.latent.cached_width


def chunk_multiple(kv_format: str) -> int:
    """Return the positions after a multiple of which a prompt may be cut without a change of its bits: those
    of a tile whose keys and values have one scale, in formats that have tiles."""
    return KEYS if kv_format == FP8_ATTENTION else 1


def _storage_dtype(kv_format: str) -> torch.dtype:
    if kv_format not in KV_FORMATS:
        raise UsageError(f"KV cache format '{kv_format}' is not known; formats are {', '.join(KV_FORMATS)}.")
    return PAGE_DTYPES[page_format(kv_format)]


def _stored_dim(layer: LayerShape, kv_format: str) -> int:
    """Return the number of stored elements of one position and head.

    Raises:
        UsageError: the format packs pairs of dimensions, and the head dimension is odd; or it transforms
            heads, and there is no transform of their dimension.
    """
    if transforms_heads(kv_format) and layer.head_dim not in HADAMARD_HEAD_DIMS:
        raise UsageError(
            f"KV cache format {kv_format} transforms heads of {', '.join(map(str, HADAMARD_HEAD_DIMS))} "
            f"dimensions, and this model has heads of {layer.head_dim}; choose {page_format(kv_format)}."
        )
    if page_format(kv_format) != INT4_TOKEN_HEAD:
        return layer.head_dim
    if layer.head_dim % 2:
        raise UsageError(
            f"KV cache format {INT4_TOKEN_HEAD} packs pairs of dimensions, and heads have "
            f"{layer.head_dim}; choose another format."
        )
    return layer.head_dim // 2


class KVCache:
    """The tensors of a KV cache. Blocks are addressed by id, positions by slot = block id * block_size +
    offset.

    `static_scales` are the scales of keys and of values for every layer, which format FP8_STATIC needs.
    Layers with recurrences have a slot of states for each of the first `num_slots` blocks, by default for
    all: the first block of a sequence is among them. `num_kept` is the most rows of a sequence in a step some
    of which may not be kept. Beside the slots there are places for `num_saved` states (`prefix_states.py`).
    Layers that read the keys and values of another have its pages. Where sequences have so many positions, by
    default as many as the model, that indexers choose some, the keys of indexers have pages in the `dtype` of
    the model.

    Raises:
        UsageError: the format is unknown or lacks its static scales, or the attention kernels do not serve
            the block size.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        num_blocks: int,
        block_size: int,
        kv_format: str,
        device: torch.device,
        static_scales: Sequence[tuple[float, float]] | None = None,
        num_slots: int | None = None,
        num_kept: int = 1,
        num_saved: int = 0,
        num_positions: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if block_size not in BLOCK_SIZES:
            raise UsageError(
                f"block_size is {block_size}; it must be one of {', '.join(map(str, BLOCK_SIZES))}."
            )
        if kv_format == FP8_STATIC and static_scales is None:
            raise UsageError(
                f"KV cache format {FP8_STATIC} needs a calibrated scale for the keys and the values of "
                "every layer, and this model has none. Quantize it with `kv_cache: fp8`, which finds "
                f"them; {FP8_TOKEN_HEAD} finds its scales as positions are written."
            )
        kv_bytes_per_token(arch, kv_format)  # refuses what the format does not fit
        self.block_size = block_size
        self.kv_format = kv_format
        scales = static_scales if static_scales is not None else [(1.0, 1.0)] * arch.num_layers
        self._device = device
        num_slots = num_blocks if num_slots is None else num_slots
        kinds = Counter(arch.states)
        self._slots, self._saved = (
            {
                kind: StackedStates.empty(kind, num_layers, slots, kept, device)
                for kind, num_layers in kinds.items()
            }
            for slots, kept in ((num_slots, num_kept), (num_saved, 1))
        )
        self._wanted_S2 = torch.zeros(num_slots, 2, dtype=torch.int32, device=device)
        self.shared: Mapping[int, int] = {idx: idx for idx in arch.kv_sources} | {
            idx: layer.kv_source for idx, layer in enumerate(arch.layers) if layer.kv_source is not None
        }
        """Layers with pages that several of them have -> the one whose keys and values these are."""
        longest = arch.max_position if num_positions is None else num_positions
        index_format = _index_format(arch, kv_format, dtype)
        self._layers: list[Kept] = []
        num_before: Counter[Recurrence] = Counter()

        def next_states(kind: Recurrence) -> RecurrentStates:
            num_before[kind] += 1
            return self._states(kind, num_before[kind] - 1)

        for layer, pair in zip(arch.layers, scales, strict=True):
            state = layer.state(arch.hidden_size)
            if layer.kv_source is not None:
                source = self._layers[layer.kv_source]
                self._layers.append(source.pages if isinstance(source, IndexedKept) else source)
            elif not layer.has_mixer:
                self._layers.append(None)
            elif not layer.attends:
                own, *of_ngrams = map(next_states, layer.states(arch.hidden_size))
                self._layers.append(NGramKept(own, *of_ngrams) if of_ngrams else own)
            else:
                pages = _empty(layer, longest, kv_format, num_blocks, block_size, device, pair)
                self._layers.append(pages if state is None else JointKept(pages, next_states(state)))
            if layer.compressed is None and (width := layer.index_numbers(longest)):
                pages_of_layer = self._layers[-1]
                assert isinstance(pages_of_layer, PagedKV | PagedLatents)
                index = PagedLatents.empty(index_format, num_blocks, block_size, width, device)
                self._layers[-1] = IndexedKept(pages_of_layer, index)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(each[:, 0].nbytes for each in self._bytes_of_blocks())

    def read_blocks(self, blocks_N: Tensor) -> Tensor:
        """Return the bytes of these blocks, uint8 [N, block_bytes]."""
        parts = [each.index_select(1, blocks_N).transpose(0, 1) for each in self._bytes_of_blocks()]
        return torch.cat([each.reshape(len(blocks_N), -1) for each in parts], dim=1)

    def write_blocks(self, blocks_N: Tensor, bytes_NB: Tensor) -> None:
        """Write what `read_blocks` returned to other blocks."""
        start = 0
        for each in self._bytes_of_blocks():
            num_heads, _, *rest = each.shape
            size = each[:, 0].nbytes
            part = bytes_NB[:, start : start + size].reshape(-1, num_heads, *rest)
            each.index_copy_(1, blocks_N, part.transpose(0, 1).contiguous())
            start += size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second; all are read before any is written."""
        if not self.block_bytes:
            return
        sources_N, targets_N = (
            sent(torch.tensor(blocks), self._device) for blocks in zip(*pairs, strict=True)
        )
        self.write_blocks(targets_N, self.read_blocks(sources_N))

    def restore_states(self, states: Sequence[SavedState]) -> None:
        """Copy saved states to the slots of sequences."""
        for kind, slots in self._slots.items():
            slots.restore(self._saved[kind], states)

    def save_states(self, states: Sequence[SavedState]) -> None:
        """Have the passes that follow save these states, and no others."""
        wanted_S2 = torch.zeros_like(self._wanted_S2, device="cpu")
        for slot, place, num_tokens in states:
            wanted_S2[slot, 0] = num_tokens
            wanted_S2[slot, 1] = place
        self._wanted_S2.copy_(sent(wanted_S2, self._device))

    def _states(self, kind: Recurrence, idx: int) -> RecurrentStates:
        """Return the slots of a layer of one kind, and where states are saved if any are."""
        slots = self._slots[kind].layer(idx)
        saved = self._saved[kind].layer(idx)
        if not len(saved.heads):
            return slots
        return replace(slots, saving=Saving(saved.inputs, saved.heads, self._wanted_S2))

    def _bytes_of_blocks(self) -> Iterator[Tensor]:
        """Yield views of all tensors that have blocks, as bytes: keys, values and their scales, and the keys
        of indexers."""
        for idx, kept in enumerate(self._layers):
            pages = kept.pages if isinstance(kept, JointKept | IndexedKept) else kept
            if isinstance(kept, IndexedKept):
                yield kept.index.rows.view(torch.uint8)
            if isinstance(pages, (PagedKV, PagedLatents)) and self.shared.get(idx, idx) == idx:
                for tensor in pages.tensors:
                    yield tensor.view(torch.uint8)

    def layer(self, layer_idx: int) -> Kept:
        """Return the pages of a layer, its states, or both."""
        return self._layers[layer_idx]


def _empty(
    layer: LayerShape,
    num_positions: int,
    kv_format: str,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    static_scales: tuple[float, float],
) -> Pages:
    """Return zeroed pages of a layer for sequences of at most `num_positions`."""
    if layer.latent is not None or layer.compressed is not None:
        width = layer.cached_numbers
        width += 0 if layer.compressed is None else layer.index_numbers(num_positions)
        return PagedLatents.empty(kv_format, num_blocks, block_size, width, device)
    shape = layer.num_kv_heads, num_blocks, block_size, layer.head_dim
    return empty_pages(page_format(kv_format), shape, device, static_scales=static_scales)

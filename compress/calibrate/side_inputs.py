"""The inputs of layers other than the stream of a rank's samples: the embeddings of tokens for each layer,
the tokens themselves, the keys and values of an earlier layer, or its latents, and the keys that the indexer
of an earlier layer has chosen.

An embedding for a layer depends on the token alone, so those of all tokens that occur are computed once. Keys
and values are those of the last pass through their layer: of the compressed layer, once it is compressed.
Latents are kept normed, with the dimensions that all keys share, which are not rotated, and choices as one
bit for each query and key.

Shapes: N samples, B of them, S sequence, U tokens that occur, L layers, P width of an embedding for a layer,
K kv heads, C head dimension, R width of a latent, W numbers of a position.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.calibrate.samples import Samples
from compress.models.arch import Arch
from compress.models.arch_params import reads_tokens
from compress.models.attention import FullAttention
from compress.models.choices import choice_sources
from compress.models.layer_embedding import inputs_of_tokens
from compress.models.layer_shape import LayerShape
from compress.models.ngram_layer import inputs_of_ngrams
from compress.models.weights import Weights, layer_embed_weights


@dataclass(frozen=True)
class SideInputs:
    """The inputs of layers other than the stream, for some samples.

    `inputs_ULP` are the embeddings of the tokens that occur, and `rows_NS` where in them each token lies;
    None where tokens have none. `tokens_NS` are the tokens int64, where layers read them. `kept` holds keys
    and then values [N, S, W] by layer, of those that later layers read, and `shapes` are those of these
    layers. `ngrams_of` are the facts of a model whose layers have embeddings of n-grams. `choices` are the
    keys [N, S, S / 8] that indexers have chosen, by layer, where later layers attend to them.
    """

    inputs_ULP: Tensor | None
    rows_NS: Tensor | None
    kept: Mapping[int, Samples]
    shapes: Mapping[int, LayerShape]
    tokens_NS: Tensor | None = None
    ngrams_of: Arch | None = None
    choices: Mapping[int, Samples] = field(default_factory=dict)

    @staticmethod
    def of(
        arch: Arch,
        outer: Weights,
        tokens_NS: Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device,
        own: slice = slice(None),
        on_host: bool = False,
    ) -> "SideInputs":
        """Return those of the samples `own` among samples with these tokens.

        Args:
            outer: the weights outside of the layers.
            own: the samples of a rank. The embeddings are those of the tokens of all, because a product of
                other rows may have other bits.
            on_host: keys and values are kept in host memory.
        """
        inputs_ULP = None
        rows_NS = None
        if arch.layer_embed_size:
            tokens_U, rows_NS = tokens_NS.to(torch.int64).cpu().unique(return_inverse=True)

            shape = len(tokens_U), arch.num_layers, arch.layer_embed_size
            inputs_ULP = torch.empty(shape, dtype=dtype, device=device)
            inputs_of_tokens(arch, layer_embed_weights(outer), tokens_U, inputs_ULP.flatten(1))
            rows_NS = rows_NS[own].to(device)
        layers = {idx: arch.layers[idx] for idx in arch.kv_sources}
        kept = {
            idx: Samples((*tokens_NS[own].shape, layer.cached_numbers), dtype, device, on_host=on_host)
            for idx, layer in layers.items()
        }
        own_NS = tokens_NS[own].to(device=device, dtype=torch.int64) if reads_tokens(arch) else None
        num_samples, seq_len = tokens_NS[own].shape
        choices = {
            idx: Samples((num_samples, seq_len, width), torch.uint8, device, on_host=on_host)
            for idx, width in choice_bytes(arch, seq_len).items()
        }
        ngrams_of = arch if arch.has_ngrams else None
        return SideInputs(inputs_ULP, rows_NS, kept, layers, own_NS, ngrams_of, choices)

    def twin(self) -> "SideInputs":
        """Return those of the same samples on their way through other layers."""
        kept, choices = (
            {idx: each.clone() for idx, each in of_layers.items()} for of_layers in (self.kept, self.choices)
        )
        return replace(self, kept=kept, choices=choices)

    @property
    def stores(self) -> list[Samples]:
        """The stores of what is kept of the samples between layers."""
        return [*self.kept.values(), *self.choices.values()]

    def attention(self, piece: slice) -> FullAttention:
        """Return attention that reads and keeps those of a piece of the samples."""
        attention = FullAttention()
        if self.inputs_ULP is not None and self.rows_NS is not None:
            attention.layer_inputs = _InputsOfPiece(self.inputs_ULP, self.rows_NS[piece])
        attention.tokens_BS = None if self.tokens_NS is None else self.tokens_NS[piece]
        if self.ngrams_of is not None:
            assert attention.tokens_BS is not None
            attention.layer_inputs = inputs_of_ngrams(self.ngrams_of, attention.tokens_BS, attention)
        attention.kept = _KeptOfPiece(self, piece)
        attention.choices = _ChoicesOfPiece(self, piece)
        return attention


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Return keys and values, or latents and what follows them, as one tensor [B, S, W]."""
    return torch.cat([each.flatten(2) for each in parts], dim=-1)


def parts_of_kept(kept_BSW: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """Return the parts that `joined` was given of a layer."""
    if shape.latent is not None:
        latent_BSR, shared_BSP = kept_BSW.split([shape.latent.kv_rank, shape.latent.rope_dim], dim=-1)
        return latent_BSR, shared_BSP
    k_BSF, v_BSF = kept_BSW.chunk(2, dim=-1)
    heads = (shape.num_kv_heads, -1)
    return k_BSF.unflatten(-1, heads), v_BSF.unflatten(-1, heads)


@dataclass(frozen=True)
class _InputsOfPiece(Mapping[int, Tensor]):
    """Layer -> the embeddings [B, S, P] of the tokens of a piece for it."""

    inputs_ULP: Tensor
    rows_BS: Tensor

    def __getitem__(self, layer_idx: int) -> Tensor:
        return self.inputs_ULP[self.rows_BS, layer_idx]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self.inputs_ULP.shape[1]


@dataclass(frozen=True)
class _KeptOfPiece(MutableMapping[int, tuple[Tensor, Tensor]]):
    """Layer -> its keys and values [B, S, K, C] of a piece, or its latents [B, S, R] and what all keys
    share."""

    inputs: SideInputs
    piece: slice

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        return parts_of_kept(self.inputs.kept[layer_idx][self.piece], self.inputs.shapes[layer_idx])

    def __setitem__(self, layer_idx: int, keys_values: tuple[Tensor, Tensor]) -> None:
        self.inputs.kept[layer_idx][self.piece] = joined(keys_values)

    def __delitem__(self, layer_idx: int) -> None:
        raise KeyError(layer_idx)

    def __iter__(self) -> Iterator[int]:
        return iter(self.inputs.kept)

    def __len__(self) -> int:
        return len(self.inputs.kept)


@dataclass(frozen=True)
class _ChoicesOfPiece(MutableMapping[int, Tensor]):
    """Layer -> the keys that its indexer has chosen for queries of a piece, bool [B, 1, S, S]."""

    inputs: SideInputs
    piece: slice

    def __getitem__(self, layer_idx: int) -> Tensor:
        packed_BSX = self.inputs.choices[layer_idx][self.piece]
        chosen_BSP = (packed_BSX.unsqueeze(-1) & _bits(packed_BSX.device)).ne(0).flatten(-2)
        return chosen_BSP[..., : packed_BSX.shape[1]].unsqueeze(1)

    def __setitem__(self, layer_idx: int, chosen_B1SP: Tensor) -> None:
        chosen_BSP = F.pad(chosen_B1SP.squeeze(1), (0, -chosen_B1SP.shape[-1] % 8))
        bits = chosen_BSP.unflatten(-1, (-1, 8)) * _bits(chosen_BSP.device)
        self.inputs.choices[layer_idx][self.piece] = bits.sum(dim=-1, dtype=torch.uint8)

    def __delitem__(self, layer_idx: int) -> None:
        raise KeyError(layer_idx)

    def __contains__(self, layer_idx: object) -> bool:
        return layer_idx in self.inputs.choices

    def __iter__(self) -> Iterator[int]:
        return iter(self.inputs.choices)

    def __len__(self) -> int:
        return len(self.inputs.choices)


def _bits(device: torch.device) -> Tensor:
    """Return the numbers of single bits of a byte."""
    return 2 ** torch.arange(8, device=device, dtype=torch.uint8)


def choice_bytes(arch: Arch, seq_len: int) -> dict[int, int]:
    """Return the bytes of a token that are kept of the choice of each layer whose choice later layers attend
    to, in samples of so many tokens."""
    width = -(-seq_len // 8)
    return {idx: width for idx in choice_sources(arch) if arch.layers[idx].index_numbers(seq_len)}

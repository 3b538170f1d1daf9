"""The inputs of layers other than the stream of a rank's samples: the embeddings of tokens for each layer,
and the keys and values of an earlier layer.

An embedding for a layer depends on the token alone, so those of all tokens that occur are computed once. Keys
and values are those of the last pass through their layer: of the compressed layer, once it is compressed.

Shapes: N samples, B of them, S sequence, U tokens that occur, L layers, P width of an embedding for a layer,
K kv heads, C head dimension.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.calibrate.samples import Samples
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.layer_embedding import inputs_of_tokens
from compress.models.weights import Weights, layer_embed_weights


@dataclass(frozen=True)
class SideInputs:
    """The inputs of layers other than the stream, for some samples.

    `inputs_ULP` are the embeddings of the tokens that occur, and `rows_NS` where in them each token lies;
    None where tokens have none. `kept` holds keys and then values [N, S, 2 K C] by layer, of those that later
    layers read, and `num_heads` the kv heads of each.
    """

    inputs_ULP: Tensor | None
    rows_NS: Tensor | None
    kept: Mapping[int, Samples]
    num_heads: Mapping[int, int]

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
            idx: Samples(
                (*tokens_NS[own].shape, 2 * layer.num_kv_heads * layer.head_dim),
                dtype,
                device,
                on_host=on_host,
            )
            for idx, layer in layers.items()
        }
        return SideInputs(
            inputs_ULP, rows_NS, kept, {idx: layer.num_kv_heads for idx, layer in layers.items()}
        )

    def twin(self) -> "SideInputs":
        """Return those of the same samples on their way through other layers."""
        return replace(self, kept={idx: each.clone() for idx, each in self.kept.items()})

    def attention(self, piece: slice) -> FullAttention:
        """Return attention that reads and keeps those of a piece of the samples."""
        attention = FullAttention()
        if self.inputs_ULP is not None and self.rows_NS is not None:
            attention.layer_inputs = _InputsOfPiece(self.inputs_ULP, self.rows_NS[piece])
        attention.kept = _KeptOfPiece(self, piece)
        return attention


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
    """Layer -> its keys and values [B, S, K, C] of a piece."""

    inputs: SideInputs
    piece: slice

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        heads = self.inputs.kept[layer_idx][self.piece].unflatten(-1, (2, -1))
        k_BSF, v_BSF = heads.unbind(-2)
        shape = (self.inputs.num_heads[layer_idx], -1)
        return k_BSF.unflatten(-1, shape), v_BSF.unflatten(-1, shape)

    def __setitem__(self, layer_idx: int, keys_values: tuple[Tensor, Tensor]) -> None:
        self.inputs.kept[layer_idx][self.piece] = torch.cat([each.flatten(2) for each in keys_values], dim=-1)

    def __delitem__(self, layer_idx: int) -> None:
        raise KeyError(layer_idx)

    def __iter__(self) -> Iterator[int]:
        return iter(self.inputs.kept)

    def __len__(self) -> int:
        return len(self.inputs.kept)

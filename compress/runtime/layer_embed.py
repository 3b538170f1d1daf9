"""Embeddings of tokens for each layer in serving (`models/layer_embedding.py`).

They depend on the token alone, so they are computed once, and follow those for the model in the rows
[D + L P] of one table. A pass takes the rows of its tokens and parts them.

Where layers read tokens themselves (a table of experts, embeddings of n-grams), rows go on with the token
(`token_digits.py`).

Shapes: T rows, D hidden, L layers, P width of an embedding for a layer, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.arch_params import reads_tokens
from compress.models.layer_embedding import inputs_of_tokens
from compress.models.weights import Weights, dense, layer_embed_weights
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.token_digits import NUM_DIGITS, digits_of_tokens, tokens_of_digits


@dataclass(frozen=True)
class LayerEmbedLinears:
    """The linears by which a layer reads its embeddings, and the norm of what it adds to the stream."""

    gate: FusedLinear
    out: FusedLinear
    norm: RowNorm

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of these weights."""
        return self.gate.weight_bytes + self.out.weight_bytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self.gate.report(layer_idx) + self.out.report(layer_idx)


def layer_embed_linears(
    fuse: Callable[[str], FusedLinear], weights: Weights, norm: Callable[[Tensor], RowNorm]
) -> LayerEmbedLinears | None:
    """Return the linears of a layer that read its embeddings, None where tokens have none."""
    if "layer_embed.gate.weight" not in weights:
        return None
    return LayerEmbedLinears(
        fuse("layer_embed.gate"), fuse("layer_embed.out"), norm(dense(weights["layer_embed.norm.weight"]))
    )


def with_layer_inputs(embed_VD: Tensor, outer: Weights, arch: Arch) -> Tensor:
    """Return the table [V, D + L P] of the embeddings of all tokens for the model, and for all layers where
    tokens have those; where layers read tokens, with the digits of each."""
    if reads_tokens(arch):
        return torch.cat((embed_VD, digits_of_tokens(arch.vocab_size).to(embed_VD)), dim=1)
    if not arch.layer_embed_size:
        return embed_VD
    width = arch.hidden_size + arch.num_layers * arch.layer_embed_size
    table_VF = embed_VD.new_empty(arch.vocab_size, width)
    table_VF[:, : arch.hidden_size] = embed_VD
    tokens_V = torch.arange(arch.vocab_size)
    inputs_of_tokens(arch, layer_embed_weights(outer), tokens_V, table_VF[:, arch.hidden_size :])
    return table_VF


def parted(rows_TF: Tensor, arch: Arch) -> tuple[Tensor, list[Tensor] | None]:
    """Return the embeddings [T, D] of rows of the table, and those [T, P] for each layer, or the tokens int64
    [T] for each; None where there are neither."""
    if reads_tokens(arch):
        x_TD, digits_TN = rows_TF.split([arch.hidden_size, NUM_DIGITS], dim=1)
        return x_TD.contiguous(), [tokens_of_digits(digits_TN)] * arch.num_layers
    if not arch.layer_embed_size:
        return rows_TF, None
    x_TD, inputs_TF = rows_TF.split([arch.hidden_size, rows_TF.shape[1] - arch.hidden_size], dim=1)
    return x_TD.contiguous(), list(inputs_TF.split(arch.layer_embed_size, dim=1))

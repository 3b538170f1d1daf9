"""Embeddings of a token for each layer (Gemma 3n and 4: per-layer embeddings, PLE).

    e_l = (norm(proj_l(embed(token)) / sqrt(D)) + sqrt(P) table_l[token]) / sqrt(2)     outside of the layers
    h   = h + norm_l(out_l(act(gate_l(h)) * e_l))                                       at the end of layer l

e depends on the token alone. Both lines keep the order of roundings of `transformers`.

Shapes: B batch, S sequence, L layers, P width of an embedding for a layer, D hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.embedding import token_embeddings
from compress.models.ffn import gated
from compress.models.linear import Linear
from compress.models.norms import norm_of

LAYER_EMBEDS = "layer_embeds"
"""The name of `LayerEmbeddings` in the decoder."""
PROJECTION = f"{LAYER_EMBEDS}.proj"
IN_LAYERS = ("gate", "out")
"""The linears of `LayerEmbeddings` and of `LayerEmbedding`; no scheme is theirs."""
_TOKENS_AT_ONCE = 4096


class LayerEmbeddings(nn.Module):
    """The embeddings of tokens for all layers. The table [V, L P] and the projection [L P, D] hold those of
    one layer after the other. A table that ends before the vocabulary does (`Arch.layer_embed_vocab`) has the
    rows of the first tokens."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        width = arch.num_layers * arch.layer_embed_size
        self.size = arch.layer_embed_size
        self.table = nn.Embedding(arch.layer_embed_rows, width)
        self.proj = Linear(arch.hidden_size, width, bias=False)
        self.norm = norm_of(arch, arch.layer_embed_size)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the embeddings [..., L, P] of tokens for all layers, given those for the model x
        [..., D]."""
        rows = self.table(in_table(tokens, self.table.weight))
        own = (rows * torch.full((), self.size**0.5, dtype=rows.dtype, device=rows.device)).unflatten(
            -1, (-1, self.size)
        )
        projected = (self.proj(x) * x.shape[-1] ** -0.5).unflatten(-1, (-1, self.size))
        return (self.norm(projected) + own) * 2**-0.5


def in_table(tokens: Tensor, table_VF: Tensor) -> Tensor:
    """Return the rows of the table that tokens have: their own, or the first beyond its end."""
    return tokens.where(tokens < len(table_VF), 0)


@torch.no_grad()
def inputs_of_tokens(
    arch: Arch,
    outer: Mapping[str, Tensor],
    tokens_U: Tensor,
    into_UF: Tensor,
) -> None:
    """Write the embeddings [U, L P] of tokens for all layers, computed in the dtype and on the device of that
    tensor. `outer` are the dense weights outside of the layers."""
    place: dict[str, Any] = {"device": into_UF.device, "dtype": into_UF.dtype}
    names = {name: f"{LAYER_EMBEDS}.{name}.weight" for name in ("table", "proj", "norm")}
    with torch.device("meta"):
        module = LayerEmbeddings(arch)
    table_VF = outer[names["table"]]
    module.proj.weight, module.norm.weight = (
        nn.Parameter(outer[names[name]].to(**place)) for name in ("proj", "norm")
    )
    for some, into_uF in zip(tokens_U.split(_TOKENS_AT_ONCE), into_UF.split(_TOKENS_AT_ONCE), strict=True):
        own = some.to(table_VF.device)
        module.table.weight = nn.Parameter(table_VF[in_table(own, table_VF)].to(**place))
        order_u = torch.arange(len(some), device=into_UF.device)
        embedded_uD = token_embeddings(arch, outer["embed.weight"], own).to(**place)
        into_uF.copy_(module(order_u, embedded_uD).flatten(1))


class LayerEmbedding(nn.Module):
    """The term out(act(gate(h)) * e), normed, that a layer adds to its output."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.gate = Linear(arch.hidden_size, arch.layer_embed_size, bias=False)
        self.out = Linear(arch.layer_embed_size, arch.hidden_size, bias=False)
        self.norm = norm_of(arch, arch.hidden_size)
        self.activation = arch.activation

    def forward(self, x_BSD: Tensor, layer_input_BSP: Tensor) -> Tensor:
        return self.norm(self.out(gated(self.activation, self.gate(x_BSD), layer_input_BSP)))

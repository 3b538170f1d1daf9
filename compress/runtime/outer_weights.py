"""The weights outside of the layers in serving: the embedding, learned positions, and the last norm and the
head.

Shapes: T rows, V vocabulary, D hidden, L layers, P embeddings of a token for a layer, N positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import DENSE_SCHEMES
from compress.models.arch import Arch
from compress.models.embedding import normed
from compress.models.hyper_connection import MeanOfStreams
from compress.models.sinusoids import sinusoid_table
from compress.models.weights import POSITIONS, Weights, WeightSource, dense, embed_norm_of
from compress.runtime.altup import StreamLinears, stream_linears
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.hyper_weights import OfStreams, head_hyper
from compress.runtime.latent_linears import absorbed_params
from compress.runtime.layer_embed import with_layer_inputs
from compress.runtime.row_norms import stream_norm, stream_scale

Joining = OfStreams | MeanOfStreams | StreamLinears
"""The weights by which the streams of the residual are joined, in one of four ways."""
_NORMED_ROWS = 1 << 12
"""Rows of the embedding that are normed at a time."""


@dataclass(frozen=True)
class OuterWeights:
    """The weights outside of the layers, as `ModelWeights` holds them."""

    embed_VD: Tensor
    positions_ND: Tensor | None
    norm: RowNorm | None
    head: FusedLinear
    hyper: Joining | None
    first: StreamLinears | None


def served_params(arch: Arch) -> int:
    """Return how many numbers dense weights of a model have in serving: with its parameters a tied head,
    which is a second copy of the embedding, and absorbed matrices."""
    tied = arch.tied_head * arch.vocab_size * arch.hidden_size
    return arch.num_params + tied + absorbed_params(arch)


def load_outer(source: WeightSource, deployment: Deployment) -> OuterWeights:
    """Load the weights outside of the layers.

    Raises:
        EnvironmentUnfit: as `load_model`.
    """
    outer = source.outer()
    return OuterWeights(
        embedding(outer, source.arch, deployment),
        position_embeddings(outer, source.arch, deployment),
        *output(outer, source.arch, deployment),
        head_streams(source.arch, outer, deployment),
        stream_linears(source.arch, outer, "embed", deployment),
    )


def embedding(outer: Weights, arch: Arch, deployment: Deployment) -> Tensor:
    """Return the embedding [V, D] of the outer weights, with those for each layer [V, D + L P] where tokens
    have them.

    Raises:
        EnvironmentUnfit: as `load_model`.
    """
    if deployment.dtype not in DENSE_SCHEMES:
        raise EnvironmentUnfit(
            f"the runtime computes in {', '.join(DENSE_SCHEMES.values())}, not in {deployment.dtype}."
        )
    norm_D = embed_norm_of(outer)
    norm_D = None if norm_D is None else deployment.placed(norm_D)
    embed_VD = _normed_table(arch, deployment.placed(dense(outer["embed.weight"])), norm_D)
    embed_VD = _scaled(embed_VD, arch.embed_scale / stream_scale(arch))
    return with_layer_inputs(embed_VD, outer, arch)


def position_embeddings(outer: Weights, arch: Arch, deployment: Deployment) -> Tensor | None:
    """Return the learned or sinusoidal embeddings [N, D] of positions, from position 0 on, as the stream
    takes them; None where the model has none."""
    if arch.position_offset is None:
        return None
    if arch.sinusoidal_positions:
        return _scaled(deployment.placed(sinusoid_table(arch)), 1 / stream_scale(arch))
    table_PD = deployment.placed(dense(outer[POSITIONS]))
    return _scaled(table_PD[arch.position_offset :].contiguous(), 1 / stream_scale(arch))


def with_positions(x_TD: Tensor, positions_ND: Tensor | None, positions_T: Tensor) -> Tensor:
    """Return the embeddings [T, D] of tokens with those of their positions added, if the model has any. Rows
    whose outputs are not read may have a position before the first one or after the last, and take the row of
    that one: padding where several tokens of a request are verified, rows that fill up a graph, and steps
    that were launched before the host saw that a request had ended."""
    if positions_ND is None:
        return x_TD
    return x_TD + F.embedding(positions_T.clamp(0, len(positions_ND) - 1), positions_ND)


def output(outer: Weights, arch: Arch, deployment: Deployment) -> tuple[RowNorm | None, FusedLinear]:
    """Return the last norm, None where the head has none, and the head of the outer weights.

    Raises:
        EnvironmentUnfit: no kernel serves the head.
    """
    head = {"head.weight": outer["embed.weight" if arch.tied_head else "head.weight"]}
    head |= {"head.bias": outer["head.bias"]} if arch.head_bias else {}
    norm = None
    if arch.norms_stream:
        norm = stream_norm(arch, outer, "norm", deployment, scale=arch.logit_scale)
    return norm, fuse(("head",), head, deployment)


def head_streams(arch: Arch, outer: Weights, deployment: Deployment) -> Joining | None:
    """Return what joins the streams for the last norm, None where there is one stream."""
    return stream_linears(arch, outer, "norm", deployment) or head_hyper(arch, outer, deployment)


def _normed_table(arch: Arch, embed_VD: Tensor, norm_D: Tensor | None) -> Tensor:
    """Return the embedding normed, if that of the model is, some rows at a time: a norm holds several float32
    copies of its rows."""
    if not arch.embed_norm:
        return embed_VD
    table_VD = torch.empty_like(embed_VD)
    for rows, own in zip(table_VD.split(_NORMED_ROWS), embed_VD.split(_NORMED_ROWS), strict=True):
        rows.copy_(normed(arch, own, norm_D))
    return table_VD


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale

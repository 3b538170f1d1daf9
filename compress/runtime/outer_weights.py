"""The weights outside of the layers in serving: the embedding, and the last norm and the head.

Shapes: V vocabulary, D hidden, L layers, P embeddings of a token for a layer.
"""

from dataclasses import dataclass

from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.operands.hyper import HyperWeights
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import DENSE_SCHEMES
from compress.models.arch import Arch
from compress.models.embedding import normed
from compress.models.hyper_connection import MeanOfStreams
from compress.models.weights import Weights, WeightSource, dense
from compress.runtime.altup import StreamLinears, stream_linears
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.hyper_weights import head_hyper
from compress.runtime.layer_embed import with_layer_inputs
from compress.runtime.row_norms import stream_norm, stream_scale

Joining = HyperWeights | MeanOfStreams | StreamLinears
"""The weights by which the streams of the residual are joined for a norm, in one of three ways."""


@dataclass(frozen=True)
class OuterWeights:
    """The weights outside of the layers, as `ModelWeights` holds them."""

    embed_VD: Tensor
    norm: RowNorm
    head: FusedLinear
    hyper: Joining | None
    first: StreamLinears | None


def load_outer(source: WeightSource, deployment: Deployment) -> OuterWeights:
    """Load the weights outside of the layers.

    Raises:
        EnvironmentUnfit: as `load_model`.
    """
    outer = source.outer()
    return OuterWeights(
        embedding(outer, source.arch, deployment),
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
    embed_VD = normed(arch, deployment.placed(dense(outer["embed.weight"])))
    embed_VD = _scaled(embed_VD, arch.embed_scale / stream_scale(arch))
    return with_layer_inputs(embed_VD, outer, arch)


def output(outer: Weights, arch: Arch, deployment: Deployment) -> tuple[RowNorm, FusedLinear]:
    """Return the last norm and the head of the outer weights.

    Raises:
        EnvironmentUnfit: no kernel serves the head.
    """
    head = {"head.weight": outer["embed.weight" if arch.tied_head else "head.weight"]}
    head |= {"head.bias": outer["head.bias"]} if arch.head_bias else {}
    norm = stream_norm(arch, outer, "norm", deployment, scale=arch.logit_scale)
    return norm, fuse(("head",), head, deployment)


def head_streams(arch: Arch, outer: Weights, deployment: Deployment) -> Joining | None:
    """Return what joins the streams for the last norm, None where there is one stream."""
    return stream_linears(arch, outer, "norm", deployment) or head_hyper(arch, outer, deployment)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale

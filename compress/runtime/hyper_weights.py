"""The hyper-connections, the gated residuals, the gated sums, the sums with the normed residual or the
shortcuts of a model as its kernels take them, from the parameters that a checkpoint has."""

import torch
from torch import Tensor

from compress.kernels.operands.hyper import HyperWeights
from compress.models.arch import Arch
from compress.models.gated_residual import GatedResiduals
from compress.models.gated_sum import GatedSums
from compress.models.hyper_connection import HyperConnections, MeanOfStreams
from compress.models.normed_sum import NormedSums
from compress.models.shortcut import Shortcuts
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.gated_residual import GatedResidualWeights, gated_residual_weights
from compress.runtime.gated_sum import GatedSumWeights, gated_sum_weights
from compress.runtime.normed_sum import NormedSumWeights, normed_sum_weights
from compress.runtime.shortcut import ShortcutSum, shortcut_sum

OfStreams = HyperWeights | GatedResidualWeights | GatedSumWeights | NormedSumWeights | ShortcutSum
"""The weights by which a half-layer reads the residual and adds to it."""


def hyper_weights(arch: Arch, weights: Weights, name: str, deployment: Deployment) -> OfStreams | None:
    """Return the hyper-connection, the gated residual, the gated sum, the sum with the normed residual or
    with two streams by its canonical name, None where there is none. The parameters of the first stay
    float32."""
    if isinstance(arch.hyper, Shortcuts):
        return shortcut_sum(weights, name)
    if isinstance(arch.hyper, GatedSums):
        return gated_sum_weights(arch, arch.hyper, weights, name, deployment)
    if isinstance(arch.hyper, NormedSums):
        return normed_sum_weights(arch, arch.hyper, weights, name, deployment)
    if isinstance(arch.hyper, GatedResiduals):
        if f"{name}.down.weight" not in weights:
            return None
        return gated_residual_weights(arch, arch.hyper, weights, name, deployment)
    if arch.hyper is None or f"{name}.weight" not in weights:
        return None

    def placed(leaf: str) -> Tensor:
        value = dense(weights[f"{name}.{leaf}"])
        return value.to(device=deployment.device, dtype=torch.float32).contiguous()

    return HyperWeights(arch.hyper, arch.norm_eps, placed("weight"), placed("bias"), placed("gains"))


def head_hyper(arch: Arch, outer: Weights, deployment: Deployment) -> OfStreams | MeanOfStreams | None:
    """Return what joins the streams for the last norm, None where there is one stream."""
    if isinstance(arch.hyper, HyperConnections) and arch.hyper.mean_head:
        return MeanOfStreams(arch.hyper.num_streams)
    return hyper_weights(arch, outer, "norm.hyper", deployment)

"""The hyper-connections of a model as its kernels take them, from the parameters that a checkpoint has."""

import torch
from torch import Tensor

from compress.kernels.operands.hyper import HyperWeights
from compress.models.arch import Arch
from compress.models.hyper_connection import MeanOfStreams
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment


def hyper_weights(arch: Arch, weights: Weights, name: str, deployment: Deployment) -> HyperWeights | None:
    """Return the hyper-connection by its canonical name, None where there is none. Its parameters stay
    float32."""
    if arch.hyper is None or f"{name}.weight" not in weights:
        return None

    def placed(leaf: str) -> Tensor:
        value = dense(weights[f"{name}.{leaf}"])
        return value.to(device=deployment.device, dtype=torch.float32).contiguous()

    return HyperWeights(arch.hyper, arch.norm_eps, placed("weight"), placed("bias"), placed("gains"))


def head_hyper(arch: Arch, outer: Weights, deployment: Deployment) -> HyperWeights | MeanOfStreams | None:
    """Return what joins the streams for the last norm, None where there is one stream."""
    if arch.hyper is not None and arch.hyper.mean_head:
        return MeanOfStreams(arch.hyper.num_streams)
    return hyper_weights(arch, outer, "norm.hyper", deployment)

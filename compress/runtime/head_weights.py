"""The parameters of query heads in serving, other than those of linears and norms, and their slopes.

Shapes: H heads, R numbers of a head, E distances.
"""

import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.relative_logits import PROFILES
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment


def sinks_of(weights: Weights, deployment: Deployment) -> Tensor | None:
    """Return the attention sinks of a layer, float32 [H], None where it has none."""
    if "attn.sinks" not in weights:
        return None
    return dense(weights["attn.sinks"]).to(device=deployment.device, dtype=torch.float32)


def slopes_of(arch: Arch, shape: LayerShape, deployment: Deployment) -> Tensor | None:
    """Return the slopes by which scores of a layer fall with the distance of keys, float32 [H], None where
    they do not."""
    if shape.alibi is None:
        return None
    return shape.alibi.slopes(shape.num_heads, arch.score_scale(shape)).to(deployment.device)


def growth_of(weights: Weights, deployment: Deployment) -> Tensor | None:
    """Return the scale and the base of the growth of each query head [2, H], None where a layer has none."""
    if "attn.growth_scale" not in weights:
        return None
    return deployment.placed(
        torch.stack([dense(weights[f"attn.growth_{each}"]) for each in ("scale", "base")])
    )


def profiles_of(weights: Weights, deployment: Deployment) -> Tensor | None:
    """Return the profiles of relative logits of a layer, float32 [R, E], None where it has none."""
    if PROFILES not in weights:
        return None
    return dense(weights[PROFILES]).to(device=deployment.device, dtype=torch.float32).contiguous()

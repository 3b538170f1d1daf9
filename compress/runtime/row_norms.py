"""The norms of a model as its kernels take them: factors of the model are folded into their weights.

What a norm adds to its weight, and the scale of the logits, are in a float32 weight (`RowNorm`). Where the
output h of every half-layer is scaled by r, a norm of that output takes r into its weight; in models without
one, the residual stream is g = h / r (`stream_scale`), so that outputs are added as they are: the embedding
is divided by r, and eps of a norm of the stream by r^2.

Shapes: D hidden, H heads, K kv heads, C head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.experts import ROUTER_NORM
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment


def stream_scale(arch: Arch) -> float:
    """Return r where the residual stream is h / r, 1 where it is h."""
    return arch.residual_scale if arch.block in ("pre", "parallel") else 1.0


def row_norm(
    arch: Arch,
    weight: Tensor,
    name: str = "",
    *,
    eps: float | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
) -> RowNorm:
    """Return a norm of a model, its output multiplied by `scale`, from the weight and the bias that a
    checkpoint has; those of the stream have a canonical name."""
    centered = arch.norm == "layer"
    offset = arch.offset_of(name)
    if centered or arch.norm_offset or scale != 1:
        weight = (weight.to(torch.float32) + offset) * scale
    if bias is not None:
        bias = bias.to(torch.float32) * scale
    return RowNorm(weight, arch.eps_of(name) if eps is None else eps, centered, bias)


def stream_norm(
    arch: Arch, weights: Weights, name: str, deployment: Deployment, *, scale: float = 1.0
) -> RowNorm:
    """Return a norm of the residual stream."""
    eps = arch.norm_eps / stream_scale(arch) ** 2
    if arch.unit_norms:
        weight = torch.ones(arch.hidden_size, dtype=deployment.dtype, device=deployment.device)
    else:
        weight = deployment.placed(dense(weights[f"{name}.weight"]))
    bias = deployment.placed(dense(weights[f"{name}.bias"])) if arch.norm_bias else None
    return row_norm(arch, weight, name, eps=eps, scale=scale, bias=bias)


def qk_norm(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> RowNorm | None:
    """Return the norms of queries and keys with a weight for every head, [H + K, C], and with as many biases
    where they have some; without keys of its own a layer has those of queries."""
    num_heads = {"q_norm": shape.num_heads}
    if shape.kv_source is None:
        num_heads["k_norm"] = shape.num_kv_heads
    if arch.has_unit_qk_norm(shape):
        size = sum(num_heads.values()), shape.head_dim
        return RowNorm(torch.ones(size, dtype=deployment.dtype, device=deployment.device), arch.norm_eps)
    if not arch.qk_norm:
        return None

    def of_heads(leaf: str) -> Tensor:
        parts = {name: deployment.placed(dense(weights[f"attn.{name}.{leaf}"])) for name in num_heads}
        each = (parts[name].view(-1, shape.head_dim).expand(count, -1) for name, count in num_heads.items())
        return torch.cat(tuple(each))

    bias = of_heads("bias") if arch.qk_norm_bias else None
    return row_norm(arch, of_heads("weight"), bias=bias)


@dataclass(frozen=True)
class BranchNorms:
    """The norms of the branches of a mixture (`Experts.branch_norms`): of the inputs of the experts and of
    the router, and of the outputs of the shared expert and of the others."""

    experts: RowNorm
    router: RowNorm
    shared_post: RowNorm
    experts_post: RowNorm


def branch_norms(
    arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment
) -> BranchNorms | None:
    """Return the norms of the branches of a mixture, None where it has none."""
    if shape.experts is None or not shape.experts.branch_norms:
        return None

    def before(name: str, scale: float = 1.0) -> RowNorm:
        return stream_norm(arch, weights, f"moe.{name}", deployment, scale=scale)

    def after(name: str) -> RowNorm:
        return row_norm(arch, deployment.placed(dense(weights[f"moe.{name}.weight"])))

    return BranchNorms(
        experts=before("experts_norm"),
        router=before(ROUTER_NORM, arch.hidden_size**-0.5),
        shared_post=after("shared_post_norm"),
        experts_post=after("experts_post_norm"),
    )

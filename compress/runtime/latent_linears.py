"""The linears of latent attention (arXiv 2405.04434) that follow the one by which a layer reads the stream,
with the kernels chosen for them.

The linear of keys and values is there twice, dense both times: whole, for many positions at once, and
absorbed, as one matrix by which queries of a head are multiplied and one for what the head attends to
(section 2.1.2). Where its scheme rounds inputs, the cache holds latents that are rounded already.

Shapes: T rows, F outputs of a linear, H heads, C head dimension, N of its dimensions that do not rotate,
V dimensions of a value, R numbers of a latent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.operands.rows import ActivationQuant, RowNorm, input_quant
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.latent import KV_NORM, Q_NORM, ROPE_NORM, Latent
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.quant.scheme import QuantizedWeight
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear, packed_bytes

RmsNorm = Callable[..., Any]
"""A kernel of `rms_norm` (`kernels/select.py`)."""


@dataclass(frozen=True)
class NormedLinear:
    """A linear and the norm of the latent that it reads; where it is `joined`, it reads the latent as it is
    after the normed one."""

    norm: RowNorm
    linear: FusedLinear
    joined: bool = False

    def __call__(self, latent_TF: Tensor, phase: Phase, rms_norm: RmsNorm) -> Tensor:
        """Return the outputs [T, F] of the linear."""
        quant = None if self.joined else self.linear.quant
        rows = rms_norm(latent_TF, self.norm.weight, self.norm.eps, quant)
        return self.linear(torch.cat((rows, latent_TF), dim=1) if self.joined else rows, phase)


@dataclass(frozen=True)
class BoundNorm:
    """A norm with its kernel."""

    norm: RowNorm
    kernel: BoundKernel

    def __call__(self, x_TF: Tensor) -> Tensor:
        """Return rows [T, F] normed."""
        norm = self.norm
        normed_TF: Tensor = self.kernel.kernel.fn(
            x_TF, norm.weight, norm.eps, None, centered=norm.centered, bias=norm.bias
        )
        return normed_TF

    def of_last(self, x_TF: Tensor) -> Tensor:
        """Return rows of which the last numbers, as many as the norm has weights, are normed."""
        size = len(self.norm.weight)
        return torch.cat((x_TF[:, :-size], self(x_TF[:, -size:].contiguous())), dim=1)


@dataclass(frozen=True)
class LatentLinears:
    """The linears of the latents of one layer; `q_up` is None where queries have no latent, and `kv_norm`
    where those of keys and values are an earlier layer's. `rope_norm` is the norm of what keys share."""

    facts: Latent
    head_dim: int
    q_up: NormedLinear | None
    kv_norm: RowNorm | None
    kv_quant: ActivationQuant | None
    kv_up: FusedLinear
    absorbed_k: BoundKernel
    absorbed_v: BoundKernel
    rope_norm: BoundNorm | None = None

    @staticmethod
    def of(
        shape: LayerShape,
        fuse: Callable[[str, Weights], FusedLinear],
        weights: Weights,
        arch: Arch,
        deployment: Deployment,
    ) -> "LatentLinears":
        """Return the linears of a layer; `fuse` binds one of a name to its kernels."""
        latent = shape.latent
        assert latent is not None

        def norm(name: str) -> RowNorm:
            weight = deployment.placed(dense(weights[f"{name}.weight"]))
            scale = latent.scale_of(name, arch.hidden_size)
            return RowNorm(weight if scale == 1 else weight.to(torch.float32) * scale, arch.latent_eps)

        still_dim = shape.head_dim - latent.rope_dim
        kv_up = weights["attn.kv_up.weight"]
        kv_quant = input_quant((kv_up,), deployment.device)
        kv_up_FR = dense(kv_up)
        if kv_quant is not None and isinstance(kv_up, QuantizedWeight):
            kv_up_FR = kv_up.dequantize(deployment.dtype)  # these codes are multiplied exactly
        heads_HFR = kv_up_FR.unflatten(0, (shape.num_heads, -1))
        q_up = None
        if latent.q_rank:
            q_up = NormedLinear(norm(Q_NORM), fuse("attn.q_up", weights), latent.gated)
        rope_norm = None
        if ROPE_NORM in shape.latent_norm_sizes:
            problem = deployment.kernel_device.problem("rms_norm", n=latent.rope_dim)
            rope_norm = BoundNorm(norm(ROPE_NORM), BoundKernel.of(problem))
        k_HNR, v_HVR = heads_HFR.split([still_dim, latent.value_dim], dim=1)
        return LatentLinears(
            latent,
            shape.head_dim,
            q_up,
            norm(KV_NORM) if shape.kv_source is None else None,
            kv_quant,
            fuse("attn.kv_up", {"attn.kv_up.weight": kv_up_FR}),
            _head_linear(k_HNR.transpose(1, 2), deployment),
            _head_linear(v_HVR, deployment),
            rope_norm,
        )

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The linears of many positions in execution order."""
        return (self.kv_up,) if self.q_up is None else (self.q_up.linear, self.kv_up)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads of these weights."""
        absorbed = packed_bytes(self.absorbed_k.packed) + packed_bytes(self.absorbed_v.packed)
        return absorbed + (0 if self.q_up is None else self.q_up.linear.weight_bytes)

    def split(self, first_TF: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the queries or their latents, and the latents of keys and values with the dimensions of
        keys that rotate, that the first linear leaves side by side; no latents where they are an earlier
        layer's."""
        if self.kv_norm is None:
            return first_TF, None
        width = self.facts.cached_width
        q_TF, latent_TF = first_TF.split([first_TF.shape[1] - width, width], dim=1)
        return q_TF, latent_TF

    def with_gates(self, first_TF: Tensor, phase: Phase, rms_norm: RmsNorm) -> Tensor:
        """Return the queries, the latents of keys and values with the dimensions that rotate, and the outputs
        of the gates of attention side by side, in place of what the first linear computes; for latents that
        are `gated`."""
        assert self.q_up is not None
        latent_TR, kv_TF = self.split(first_TF)
        assert kv_TF is not None
        q_TF, gates_TF = self.facts.split_gates(self.q_up(latent_TR, phase, rms_norm), self.head_dim)
        return torch.cat((q_TF, kv_TF, gates_TF), dim=1)

    def absorb(self, q_THC: Tensor) -> Tensor:
        """Return queries [T, H, R] that latents are keys of."""
        still_THN = q_THC[..., : self.head_dim - self.facts.rope_dim]
        absorbed_THR: Tensor = self.absorbed_k.kernel.fn(still_THN, self.absorbed_k.packed)
        return absorbed_THR

    def values(self, attended_THR: Tensor) -> Tensor:
        """Return the values [T, H, V] of the latents that were attended to."""
        values_THV: Tensor = self.absorbed_v.kernel.fn(attended_THR, self.absorbed_v.packed)
        return values_THV

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`: decode reads the absorbed matrices, prefill `kv_up`."""
        rows = [row for each in self.fused_linears for row in each.report(layer_idx)]
        own = [row for row in rows if row["phase"] == "prefill" or row["linear"] != "attn.kv_up"]
        absorbed = {"attn.kv_up (keys)": self.absorbed_k, "attn.kv_up (values)": self.absorbed_v}
        return own + [each.report(layer=layer_idx, linear=name) for name, each in absorbed.items()]


def latent_of(shape: LayerShape) -> Latent:
    """Return the latents of a layer that has them."""
    assert shape.latent is not None
    return shape.latent


def absorbed_params(arch: Arch) -> int:
    """Return how many numbers the absorbed matrices of a model have."""
    return sum(
        layer.num_heads * (layer.head_dim - layer.latent.rope_dim + layer.value_dim) * layer.latent.kv_rank
        for layer in arch.layers
        if layer.latent is not None
    )


def check_shared_rounding(
    layer_idx: int, reader: LatentLinears, source_idx: int, source: LatentLinears | None
) -> None:
    """Check that a layer rounds the latents that it reads of another as that layer does, whose cache holds
    them rounded.

    Raises:
        EnvironmentUnfit: it does not.
    """
    assert source is not None
    ours = reader.kv_quant
    theirs = source.kv_quant
    static = any(each is not None and each.static_scale is not None for each in (ours, theirs))
    if static or ours != theirs:
        raise EnvironmentUnfit(
            f"layers {source_idx} and {layer_idx} share a cache of latents, and their attn.kv_up round them "
            "in two ways; the runtime serves linears there that round no inputs, or by one scheme with "
            "scales of each token."
        )


def _head_linear(w_HOI: Tensor, deployment: Deployment) -> BoundKernel:
    """Return the kernel of a linear of each head, with its matrices."""
    num_outputs, num_inputs = w_HOI.shape[1:]
    bound = BoundKernel.of(deployment.kernel_device.problem("head_linear", n=num_outputs, k=num_inputs))
    assert bound.kernel.repack is not None
    packed = bound.kernel.repack(tuple(w_HOI), dtype=deployment.dtype, device=deployment.device, gated=False)
    return BoundKernel(bound.kernel, bound.problem, packed)

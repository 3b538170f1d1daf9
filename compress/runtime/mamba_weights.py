"""The parameters of a Mamba-2 mixer in serving: its first linears as one product, and the others."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import MambaWeights, padded_rows
from compress.models.arch import Arch
from compress.models.mamba2 import NORM, Mamba2
from compress.models.weights import Weights, dense
from compress.quant.scheme import QuantizedWeight
from compress.runtime.deployment import Deployment


def with_padded_dt(linears: Sequence[str], weights: Weights) -> Weights:
    """Return the weights of a layer with zero rows at the end of `mamba.dt`, the last of its first linears,
    whose rows are few and of any number."""
    rows = sum(weights[f"{linear}.weight"].shape[0] for linear in linears)
    name = f"{linears[-1]}.weight"
    return {**weights, name: _padded(weights[name], padded_rows(rows) - rows)}


def mamba_weights(mamba: Mamba2, weights: Weights, arch: Arch, deployment: Deployment) -> MambaWeights:
    """Return the parameters other than the linears. The channels of the convolution, on disk x, B and C, take
    the order of the linears. Factors of these three multiply its weights, which then are in float32."""

    def in_float32(name: str) -> Tensor:
        return dense(weights[name]).to(device=deployment.device, dtype=torch.float32)

    def by_linear(name: str) -> Tensor:
        sizes = [mamba.value_size, mamba.key_size, mamba.key_size]
        return torch.cat(deployment.placed(dense(weights[name])).split(sizes)[::-1])

    conv_FW = by_linear("mamba.conv.weight").squeeze(1).contiguous()
    factors = [arch.factor_of(f"mamba.{name}") for name in ("C", "B", "x")]
    if factors != [1, 1, 1]:
        sizes = (mamba.key_size, mamba.key_size, mamba.value_size)
        of_channels = [torch.full((size, 1), each) for size, each in zip(sizes, factors, strict=True)]
        conv_FW = conv_FW.to(torch.float32) * torch.cat(of_channels).to(deployment.device)
    return MambaWeights(
        conv_FW,
        by_linear("mamba.conv.bias") if mamba.conv_bias else None,
        -in_float32("mamba.A_log").exp(),
        in_float32("mamba.dt_bias"),
        in_float32("mamba.D"),
        deployment.placed(dense(weights[NORM])) if mamba.normed else None,
        mamba.num_key_heads,
        arch.eps_of("mamba.norm"),
        arch.factor_of("mamba.gate"),
        arch.factor_of("mamba.dt"),
    )


def _padded(weight: Tensor | QuantizedWeight, rows: int) -> Tensor | QuantizedWeight:
    """Return a weight [O, I] with so many zero rows more. Their scales are those of its last row."""
    if isinstance(weight, Tensor):
        return F.pad(weight, (0, 0, 0, rows))
    scheme = weight.scheme
    more = scheme.num_scale_rows(weight.shape[0] + rows) - len(weight.scale_OG)
    codes = weight.codes_OI.view(torch.uint8)
    return replace(
        weight,
        codes_OI=F.pad(codes, (0, 0, 0, rows)).view(weight.codes_OI.dtype),
        scale_OG=torch.cat((weight.scale_OG, weight.scale_OG[-1:].expand(more, -1))),
        zero_point_OG=None if weight.zero_point_OG is None else F.pad(weight.zero_point_OG, (0, 0, 0, more)),
    )

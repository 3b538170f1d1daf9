"""Fuse the linears of a group: stack them, choose a kernel for each phase, and repack their weights once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.rows import input_quant
from compress.kernels.problem import Phase
from compress.kernels.select import candidates, refusals, select
from compress.models.arch import Arch
from compress.models.weights import Weights, dense
from compress.quant.scheme import QuantizedWeight
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear, SchemeSlice

ROWS_MULTIPLE = 64
"""Rows of a linear that all kernels of dense linears serve a multiple of."""
COLUMNS_MULTIPLE = 128
"""Columns of a linear that the decode kernels of dense linears serve a multiple of."""


def fuse_padded(name: str, weight_OI: Tensor, deployment: Deployment) -> FusedLinear:
    """Bind a linear of few outputs, which stays dense. Rows of zeros follow its own, so that every kernel of
    dense linears serves it.

    Raises:
        EnvironmentUnfit: as `fuse`.
    """
    padded = F.pad(weight_OI, (0, 0, 0, -len(weight_OI) % ROWS_MULTIPLE))
    return fuse((name,), {f"{name}.weight": padded}, deployment)


def fuse(
    linears: Sequence[str],
    weights: Weights,
    deployment: Deployment,
    *,
    activation: str | None = None,
    factor: float = 1.0,
) -> FusedLinear:
    """Stack linears that read one input, choose their kernels and repack their weights.

    `activation` names the activation of gate and up: a decode kernel applies it if one can and both have the
    same scheme. `factor` multiplies the outputs.

    Raises:
        EnvironmentUnfit: no kernel supports a linear.
    """

    def scheme_of(linear: str) -> str | None:
        weight = weights[f"{linear}.weight"]
        return weight.scheme.name if isinstance(weight, QuantizedWeight) else None

    runs = [(scheme, tuple(run)) for scheme, run in groupby(linears, key=scheme_of)]
    activation = activation if len(runs) == 1 else None
    slices = tuple(_bind_slice(run, scheme, weights, deployment, activation) for scheme, run in runs)
    return FusedLinear(slices, factor)


def output_factor(arch: Arch, linears: Sequence[str]) -> float:
    """Return the factor of the outputs of a group: that of its one linear. What reads the outputs of several
    multiplies them itself."""
    return arch.factor_of(linears[0]) if len(linears) == 1 else 1.0


def _bind_slice(
    linears: tuple[str, ...],
    scheme: str | None,
    weights: Weights,
    deployment: Deployment,
    activation: str | None,
) -> SchemeSlice:
    """Select the decode and the prefill kernel of linears of one scheme, and repack the weights once for each
    layout.
    """
    stacked = [weights[f"{linear}.weight"] for linear in linears]
    out_features = sum(weight.shape[0] for weight in stacked)
    in_features = stacked[0].shape[1]
    device = deployment.kernel_device
    packed: dict[Any, Any] = {}
    bound: dict[Phase, BoundKernel] = {}
    for phase in ("decode", "prefill"):
        problem = device.problem("linear", n=out_features, k=in_features, phase=phase, scheme=scheme)
        if activation is not None and phase == "decode":
            gated = replace(problem, activation=activation)
            problem = gated if len(refusals(gated)) < len(candidates("linear")) else problem
        kernel = select(problem)
        assert kernel.repack is not None, f"linear kernel {kernel.name} has no repack"
        if kernel.repack not in packed:
            packed[kernel.repack] = kernel.repack(
                stacked,
                dtype=deployment.dtype,
                device=deployment.device,
                gated=problem.activation is not None,
            )
        bound[phase] = BoundKernel(kernel, problem, packed[kernel.repack])
    return SchemeSlice(
        linears,
        bound["decode"],
        bound["prefill"],
        bias_O=_bias(linears, weights, deployment),
        quant=input_quant(stacked, deployment.device),
        quantize=select(device.problem("quantize_rows", n=in_features, scheme=scheme)).fn,
    )


def _bias(linears: Sequence[str], weights: Weights, deployment: Deployment) -> Tensor | None:
    """Return the biases of linears side by side, zeros for those that have none; None where none has one."""
    names = {linear: f"{linear}.bias" for linear in linears}
    if not any(name in weights for name in names.values()):
        return None
    zeros = {linear: torch.zeros(weights[f"{linear}.weight"].shape[0]) for linear in linears}
    return torch.cat(
        [
            deployment.placed(dense(weights[name])) if name in weights else deployment.placed(zeros[linear])
            for linear, name in names.items()
        ]
    )

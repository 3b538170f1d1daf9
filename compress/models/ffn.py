"""The FFN of a decoder: with gates (arXiv 2002.05202), which are silu or gelu, or gpt-oss's clamped form; or
without one, and then with gelu, relu, its square (arXiv 2109.08668) or xIELU (`xielu.py`). The input of
`down` may be normed (arXiv 2210.06423), and gates may be squares of relu then."""

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.altup import mean_of_pairs
from compress.models.arch import Arch
from compress.models.experts import SILU_CAPPED
from compress.models.layer_shape import XIELU, LayerShape
from compress.models.linear import linear_of
from compress.models.moe import ExpertFfn
from compress.models.norms import norm_of
from compress.models.tap import Tap
from compress.models.xielu import initial_parameters, xielu, xielu_numbers

CLAMPED = "swiglu_clamped"
"""The activation of gpt-oss and MiniMax-M3, whose gate and up are clamped."""
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
"""The slope of the sigmoid and the range of values in `swiglu_clamped`."""
OUTPUT_GATE = "sigmoid"
"""The function of the gate of attention (`LayerShape.output_gate`)."""


def activation(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    if name == "relu2":
        return F.relu(x).square()
    if name == OUTPUT_GATE:
        return torch.sigmoid(x)
    if name == "softplus":
        return F.softplus(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_pytorch_tanh" else "none")


def gated(name: str, gate: Tensor, up: Tensor, cap: float | None = None) -> Tensor:
    """Return the input of `down`: act(gate) * up, with a cap min(act(gate), cap) * max(min(up, cap), -cap),
    or act(min(gate, cap)) in place of the first in `SILU_CAPPED`; or gpt-oss's clamped form of it."""
    if name == SILU_CAPPED:
        assert cap is not None
        return F.silu(gate.clamp(max=cap)) * up.clamp(min=-cap, max=cap)
    if name != CLAMPED:
        activated = activation(name, gate)
        return activated * up if cap is None else activated.clamp(max=cap) * up.clamp(min=-cap, max=cap)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(min=-SWIGLU_LIMIT, max=SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))


def sparse_gate(gate: Tensor, sparsity: float) -> Tensor:
    """Return the excess [..., F] of each gate over the quantile `sparsity` of a normal distribution with the
    mean and the deviation of its row, at least 0, computed in float32 (arXiv 2506.06644)."""
    x = gate.to(torch.float32)
    mean_1 = mean_of_pairs(x)
    deviation_1 = mean_of_pairs((x - mean_1).square()).sqrt()
    return F.relu(x - (mean_1 + deviation_1 * NormalDist().inv_cdf(sparsity))).to(gate.dtype)


class Ffn(ExpertFfn):
    """The linears `gate`, where the layer has gates, `up` and `down`, the parameters of xIELU where it is the
    activation, and the factor of the outputs where they have one, which the layer multiplies."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: nn.Parameter
    eps: nn.Parameter

    def __init__(self, arch: Arch, shape: LayerShape, module: str = "ffn") -> None:
        super().__init__()
        for name in ("gate", "up", "down") if shape.gated else ("up", "down"):
            self.add_module(name, linear_of(arch, shape, f"{module}.{name}"))
        self.activation = shape.activation_of(module, arch.activation)
        self.is_gated = shape.gated
        self.cap = shape.cap_of(module)
        self.sparsity = shape.gate_sparsity
        self.has_sub_norm = shape.sub_norms
        if shape.sub_norms:
            self.sub_norm = norm_of(arch, shape.intermediate_size)
        if shape.scaled_ffn:
            self.factor = nn.Parameter(torch.ones(1))
        if arch.activation == XIELU:
            for name, value in initial_parameters().items():
                self.register_parameter(name, nn.Parameter(value))

    def forward(self, x_BSD: Tensor, tap: Tap) -> Tensor:
        tap("ffn_in", x_BSD)
        mid_BSF = self.mid(x_BSD)
        tap("ffn_mid", mid_BSF)
        return self.down(mid_BSF)

    def mid(self, x_BSD: Tensor) -> Tensor:
        """Return the input of `down`."""
        mid_BSF = self._product(x_BSD)
        return self.sub_norm(mid_BSF) if self.has_sub_norm else mid_BSF

    def _product(self, x_BSD: Tensor) -> Tensor:
        """Return the product [B, S, F] of the activated gate and `up`, or the activated `up` where there is
        no gate."""
        if self.activation == XIELU:
            fixed = self.beta.detach(), self.eps.detach()  # no training changes them
            return xielu(self.up(x_BSD), xielu_numbers(self.alpha_p, self.alpha_n, *fixed))
        if not self.is_gated:
            return activation(self.activation, self.up(x_BSD))
        gate_BSF = self.gate(x_BSD)
        gate_BSF = gate_BSF if self.sparsity is None else sparse_gate(gate_BSF, self.sparsity)
        return gated(self.activation, gate_BSF, self.up(x_BSD), self.cap)

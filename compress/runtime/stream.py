"""The residual stream of a pass in serving, and the linears that read it.

Shapes: T rows, D hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, RowNorm
from compress.kernels.problem import Phase
from compress.runtime.fused_linear import FusedLinear, Rows
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.norm_gates import NormGate
from compress.runtime.outer_weights import Joining


@dataclass(frozen=True)
class Reader:
    """A linear that reads the residual stream, and the norm of its input; None where it reads it as it is.
    A mixture of experts is no linear and takes rows that are not quantized. `hyper` joins the streams of the
    residual, where it has several, and `gate` computes the gates of the norm, where it has some."""

    norm: RowNorm | None
    linear: FusedLinear | None
    hyper: Joining | None = None
    gate: NormGate | None = None

    @property
    def quant(self) -> ActivationQuant | None:
        """How the linear wants its rows quantized."""
        return None if self.linear is None else self.linear.quant

    def prepares_input(self, phase: Phase) -> bool:
        """Return whether the linear norms and quantizes the stream itself."""
        if self.linear is None or self.norm is None or self.gate is not None:
            return False
        return self.linear.prepares_input(phase, self.norm)


@dataclass(frozen=True)
class Stream:
    """The residual stream x [T, D], or n streams one after the other [T, n D], and, where a kernel has
    computed them already, the input of its reader and those of the experts and of the router [T, D] of a
    mixture whose branches are normed apart."""

    x_TD: Tensor
    rows: Rows | None = None
    branch_rows: tuple[Tensor, ...] = ()


def mixer_reader(layer: LayerWeights) -> Reader:
    """Return what reads the stream before a layer. Where linears that stay dense read it, too, the rows are
    not quantized."""
    compressor = None if layer.compressed is None else layer.compressed.compressor
    dense = (layer.delta, layer.head_gate, layer.laurel, layer.relative, compressor, layer.indexer)
    has_dense = any(each is not None for each in dense)
    return Reader(layer.attn_norm, None if has_dense else layer.qkv, layer.attn_hyper, layer.attn_norm_gate)


def ffn_reader(layer: LayerWeights) -> Reader:
    """Return what reads the stream after the first half of a layer."""
    reads_ffn = layer.experts is None or layer.branch_norms is not None
    linear = layer.gate_up if reads_ffn else None
    return Reader(layer.ffn_norm, linear, layer.ffn_hyper, layer.ffn_norm_gate)


def same_quant(first: ActivationQuant | None, second: ActivationQuant | None) -> bool:
    """Return whether two linears quantize a row alike, by nothing but the row."""
    if first is None or second is None:
        return False
    how = [(each.dtype, each.group_size, each.symmetric) for each in (first, second)]
    if how[0] != how[1]:
        return False
    return first.static_scale is None and second.static_scale is None

"""The second halves of layers in serving, after attention or a recurrence: an FFN or a mixture of experts,
and one more where tokens have embeddings for each layer.

Shapes: T rows, D the hidden size, F the width of an FFN, L latents of experts, P embeddings for a layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.rows import Branch
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.layer_shape import UNGATED
from compress.runtime.fused_linear import Rows
from compress.runtime.layer_embed import LayerEmbedLinears
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.row_norms import BranchNorms

Half = Callable[..., Tensor | tuple[Branch, Branch]]
"""Computes the output [T, D] of half a layer; it adds a `residual` to its output if it is given one."""


class FfnHalves:
    """The second halves of the layers of one architecture, with a kernel of `act_mul`."""

    def __init__(self, arch: Arch, act_mul: Callable[..., Any]) -> None:
        self._arch = arch
        self._act_mul = act_mul

    def of_ffn(
        self,
        layer: LayerWeights,
        rows: Rows,
        branch_rows: tuple[Tensor, ...],
        phase: Phase,
        tokens_T: Tensor | None = None,
    ) -> Half:
        """Return the half-layer of the FFN or the experts, which reads `rows`, and `branch_rows` where the
        branches of a mixture are normed apart. `tokens_T` are read where a table chooses experts."""
        half: Half = self._ffn
        if layer.branch_norms is not None:
            half = partial(self._branches, layer.branch_norms, branch_rows)
        elif layer.experts is not None:
            half = partial(self._mixture, tokens_T=tokens_T)
        return partial(half, layer, rows, phase)

    def of_embed(self, embed: LayerEmbedLinears, x_TD: Tensor, input_TP: Tensor, phase: Phase) -> Tensor:
        """Return what a layer adds to the stream [T, D] for the embeddings of the tokens, before its norm."""
        gate_TP = embed.gate(x_TD, phase)
        rows: Rows = self._act_mul(gate_TP, self._arch.activation, embed.out.quant, up_TF=input_TP)
        return embed.out(rows, phase)

    def _ffn(
        self, layer: LayerWeights, rows: Rows, phase: Phase, *, residual: Tensor | None = None
    ) -> Tensor:
        """Return the output [T, D] of the FFN, or of the shared expert, plus `residual` if given."""
        assert layer.gate_up is not None
        assert layer.down is not None
        mid_TF = layer.gate_up(rows, phase)
        if not layer.gate_up.applies_gate(phase):
            facts = {
                "xielu_4": layer.xielu_4,
                "gate_factor": self._arch.factor_of("ffn.gate"),
                "gated": layer.shape.gated,
                "cap": layer.shape.ffn_cap,
                "sparsity": layer.shape.gate_sparsity,
            }
            activation = layer.shape.activation_of("ffn", self._arch.activation)
            if layer.ffn_sub_norm is not None:
                product_TF = self._product(mid_TF, activation, facts)
                return layer.down(layer.ffn_sub_norm.rows(product_TF), phase, residual=residual)
            mid_TF = self._act_mul(mid_TF, activation, layer.down.quant, **facts)
        if not layer.shape.scaled_ffn:
            return layer.down(mid_TF, phase, residual=residual)
        scaled_TD = layer.down(mid_TF, phase) * layer.ffn_scale
        return scaled_TD if residual is None else residual + scaled_TD

    def _product(self, mid_TF: Tensor, activation: str, facts: dict[str, Any]) -> Tensor:
        """Return what gate and up compute, not quantized. Kernels compute `relu2` only without a gate, so
        that up is multiplied here."""
        if not facts["gated"] or activation not in UNGATED:
            product_TF: Tensor = self._act_mul(mid_TF, activation, None, **facts)
            return product_TF
        gate_TF, up_TF = mid_TF.chunk(2, dim=-1)
        if facts["gate_factor"] != 1:
            gate_TF = gate_TF * facts["gate_factor"]
        activated_TF: Tensor = self._act_mul(gate_TF.contiguous(), activation, None, gated=False)
        return activated_TF * up_TF

    def _mixture(
        self,
        layer: LayerWeights,
        rows: Rows,
        phase: Phase,
        *,
        residual: Tensor | None = None,
        tokens_T: Tensor | None = None,
    ) -> Tensor:
        """Return the output [T, D] of a mixture of experts, plus `residual` if given; of experts that are
        delayed, that of the shared expert and theirs [T, 2 D]."""
        assert layer.experts is not None
        assert isinstance(rows, Tensor)
        if layer.experts.facts.delayed:
            shared_TD = self._ffn(layer, rows, phase)
            return torch.cat((shared_TD, layer.experts(rows, phase)), dim=1)
        joins = layer.experts.has_shared(phase)
        scale = layer.experts.facts.shared_scale
        gate_T1: Tensor | float | None = None if scale == 1 else scale
        if layer.shared_gate is not None:
            gate_T1 = torch.sigmoid(layer.shared_gate(rows, phase, out_dtype=torch.float32)[:, :1])
        if joins:
            return layer.experts(rows, phase, residual=residual, shared_weight=gate_T1)
        if gate_T1 is not None:
            shared_TD = (gate_T1 * self._ffn(layer, rows, phase)).to(rows.dtype)
            residual = shared_TD if residual is None else residual + shared_TD
        elif layer.down is not None:
            residual = self._ffn(layer, rows, phase, residual=residual)
        if layer.latent_in is None or layer.latent_out is None:
            return layer.experts(rows, phase, residual=residual, tokens_T=tokens_T)
        latents_TL = layer.latent_in(rows, phase)
        norms = layer.expert_norms
        if norms is None:
            routed_TL = layer.experts(latents_TL, phase, router_input=rows)
        else:
            routed_TL = layer.experts.normed(norms.latents(latents_TL), rows, phase, norms.outputs)
        return layer.latent_out(routed_TL, phase, residual=residual)

    def _branches(
        self,
        norms: BranchNorms,
        branch_rows: tuple[Tensor, ...],
        layer: LayerWeights,
        shared_rows: Rows,
        phase: Phase,
    ) -> tuple[Branch, Branch]:
        """Return the outputs of a mixture whose branches are normed apart: of its experts, and of the shared
        one."""
        assert layer.experts is not None
        experts_TD, router_TD = branch_rows
        shared_TD = self._ffn(layer, shared_rows, phase)
        routed_TD = layer.experts(experts_TD, phase, router_input=router_TD)
        return Branch(routed_TD, norms.experts_post), Branch(shared_TD, norms.shared_post)

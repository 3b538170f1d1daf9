"""The forward of one decoder layer in serving, with the kernels selected for it.

    x = x + o(attention(q, cache)),  q = rope_store(qkv(norm(x)))
    x = x + down(act(gate) * up),    gate, up = gate_up(norm(x))

`model_runner.py` runs a whole model with it; an EAGLE-3 head (`speculative/eagle3.py`) runs its one layer,
whose q, k and v have another input.

Shapes: T rows, D hidden, F outputs of a fused linear, H heads, C head dimension, B blocks of the longest
sequence, R sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.rows import RawRows
from compress.kernels.problem import Op, Phase
from compress.kernels.select import select
from compress.models.arch import Arch, LayerShape, Rope
from compress.models.rope import cos_sin
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear, Rows
from compress.runtime.loader import LayerWeights

Attend = Callable[[LayerShape, Tensor, PagedKV], Tensor]
"""Attention of one pass: (layer shape, q [T, H, C], the layer's pages with all keys and values written) ->
[T, H, C]."""
_PER_HEAD_OPS: tuple[Op, ...] = ("rope_store", "attention_decode", "attention_prefill")


class LayerRunner:
    """Runs layers of one architecture over pages of one KV cache format.

    Raises:
        EnvironmentUnfit: no kernel here serves a norm, the activation, rotary embeddings or attention.
    """

    def __init__(self, arch: Arch, deployment: Deployment, kv_format: str, *, max_model_len: int) -> None:
        self._arch = arch

        def bound(op: Op, n: int, k: int = 0, *, scheme: str | None = None) -> BoundKernel:
            phase: Phase = "prefill" if op == "attention_prefill" else "decode"
            problem = deployment.kernel_device.problem(op, n=n, k=k, phase=phase, scheme=scheme)
            return BoundKernel(select(problem), problem)

        widest_ffn = max(layer.intermediate_size for layer in arch.layers)
        self._ops = {
            "rms_norm": bound("rms_norm", arch.hidden_size),
            "act_mul": bound("act_mul", widest_ffn),
        }
        self._rms_norm = self._ops["rms_norm"].kernel.fn
        self._act_mul = self._ops["act_mul"].kernel.fn
        self._head_ops = {
            (op, key): bound(op, key[0], key[1], scheme=kv_format)
            for key in sorted({_head_key(layer) for layer in arch.layers})
            for op in _PER_HEAD_OPS
        }
        # One position more than a sequence has: a step launched ahead, before the host sees that a request
        # has ended, reads it.
        positions = torch.arange(max_model_len + 1, device=deployment.device)
        self._rope_tables = {
            key: cos_sin(*key, positions, deployment.dtype)
            for key in {_rope_key(layer) for layer in arch.layers}
        }

    def layer(
        self,
        layer: LayerWeights,
        x_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        kv: PagedKV,
        attend: Attend,
        phase: Phase,
    ) -> Tensor:
        """Return the output [T, D] of a layer; its keys and values are in the cache afterwards."""
        qkv_TF = layer.qkv(self.normed(x_TD, layer.attn_norm, layer.qkv, phase), phase)
        return self.after_qkv(layer, qkv_TF, x_TD, positions_T, slots_T, kv, attend, phase)

    def after_qkv(
        self,
        layer: LayerWeights,
        qkv_TF: Tensor,
        residual_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        kv: PagedKV,
        attend: Attend,
        phase: Phase,
    ) -> Tensor:
        """Return the output [T, D] of a layer from its q, k and v, side by side in `qkv_TF`, and the residual
        stream.
        """
        q_THC = self.queries(layer, qkv_TF, positions_T, slots_T, kv)
        x_TD = layer.o(
            attend(layer.shape, q_THC, kv).reshape(qkv_TF.shape[0], -1), phase, residual=residual_TD
        )
        mid_TF = layer.gate_up(self.normed(x_TD, layer.ffn_norm, layer.gate_up, phase), phase)
        if not layer.gate_up.applies_gate(phase):
            mid_TF = self._act_mul(mid_TF, self._arch.activation, layer.down.quant)
        return layer.down(mid_TF, phase, residual=x_TD)

    def queries(
        self, layer: LayerWeights, qkv_TF: Tensor, positions_T: Tensor, slots_T: Tensor, kv: PagedKV
    ) -> Tensor:
        """Return the rotated queries [T, H, C] and write the rotated keys and the values to the cache."""
        shape = layer.shape
        eps = self._arch.norm_eps
        rope_store = self._head_ops["rope_store", _head_key(shape)].kernel.fn
        tables = self._rope_tables[_rope_key(shape)]
        q_THC: Tensor = rope_store(
            qkv_TF,
            *tables,
            positions_T,
            slots_T,
            kv,
            num_heads=shape.num_heads,
            qk_norm=layer.qk_norm,
            eps=eps,
        )
        return q_THC

    def normed(self, x_TD: Tensor, weight_D: Tensor, linear: FusedLinear, phase: Phase) -> Rows:
        """Return the input of a fused linear: x normalized, and quantized as it reads it.

        Where the kernel of the linear does both itself, x is returned raw, with the weights of the norm.
        """
        if linear.prepares_input(phase):
            return RawRows(x_TD, weight_D, self._arch.norm_eps, linear.quant)
        normed: Rows = self._rms_norm(x_TD, weight_D, self._arch.norm_eps, linear.quant)
        return normed

    def norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        """Return x normalized, [T, D], without quantization."""
        normed_TD: Tensor = self._rms_norm(x_TD, weight_D, self._arch.norm_eps, None)
        return normed_TD

    def attend_decode(self, block_table_RB: Tensor, context_lens_R: Tensor, *, q_len: int) -> Attend:
        """Return attention for the last `q_len` rows of each sequence; `context_lens` count them."""

        def attend(shape: LayerShape, q_THC: Tensor, kv: PagedKV) -> Tensor:
            fn = self._head_ops["attention_decode", _head_key(shape)].kernel.fn
            out: Tensor = fn(
                q_THC,
                kv,
                block_table_RB,
                context_lens_R,
                q_len=q_len,
                window=shape.window,
                scale=_scale(shape),
            )
            return out

        return attend

    def attend_prefill(
        self, block_table_RB: Tensor, query_lens: tuple[int, ...], context_lens: tuple[int, ...]
    ) -> Attend:
        """Return attention for `query_lens[r]` rows of each sequence; `context_lens` count them."""

        def attend(shape: LayerShape, q_THC: Tensor, kv: PagedKV) -> Tensor:
            fn = self._head_ops["attention_prefill", _head_key(shape)].kernel.fn
            out: Tensor = fn(
                q_THC, kv, block_table_RB, query_lens, context_lens, window=shape.window, scale=_scale(shape)
            )
            return out

        return attend

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op that is not a linear."""
        rows = [bound.report(layer=None, linear=op) for op, bound in self._ops.items()]
        return rows + [bound.report(layer=None, linear=op) for (op, _), bound in self._head_ops.items()]


def _head_key(shape: LayerShape) -> tuple[int, int]:
    """Return the head dimension and the query heads per KV head, by which attention kernels are selected."""
    return shape.head_dim, shape.num_heads // shape.num_kv_heads


def _rope_key(shape: LayerShape) -> tuple[Rope | None, int]:
    return shape.rope, shape.head_dim


def _scale(shape: LayerShape) -> float:
    return shape.head_dim**-0.5

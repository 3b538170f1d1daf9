"""The canonical decoder (`models/decoder.py`) as a graph of ONNX operators, with a KV cache.

    inputs   input_ids, position_ids int64 [B, S], attention_mask int64 [B, P + S] (0: padding),
             past_key_values.N.key and .value [B, K, P, C]
    outputs  logits [B, S, V], present.N.key and .value [B, K, P + S, C]

These are the names and shapes that ONNX Runtime GenAI passes. Keys are stored normed and rotated. Masks
follow from the places of tokens in the row, rotations from `position_ids`, so that padding on either side is
left out. Linears take rows [T, I], T = B * S. Norms, angles, scores and softmax are float32 whatever the
dtype of the graph, as in the decoder.

Shapes: B batch, S sequence, P past, T tokens, D hidden, H heads, K kv heads, R query heads of a kv head, C
head dimension, V vocabulary.
"""

import torch

from compress.export.onnx.graph import Graph, element_type
from compress.export.onnx.linears import Linears
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape, Rope
from compress.models.rope import in_halves, inverse_frequencies
from compress.models.sinusoids import sinusoid_table
from compress.models.weights import POSITIONS

F32 = torch.float32
I64 = torch.int64
HIDDEN_SCORE = float(torch.finfo(F32).min)
"""Score of a key that a query does not see; finite, so that a row without keys has no NaN."""
BATCH = "batch_size"
SEQUENCE = "sequence_length"
PAST = "past_sequence_length"
TOTAL = "total_sequence_length"
"""Names of the sizes that are free."""
PAST_NAME = "past_key_values.%d.{}"
PRESENT_NAME = "present.%d.{}"


class DecoderGraph:
    """Adds the operators of a model to a graph."""

    def __init__(self, graph: Graph, arch: Arch, linears: Linears, dtype: torch.dtype) -> None:
        self._graph = graph
        self._arch = arch
        self._linear = linears
        self._dtype = dtype
        self._rotations: dict[tuple[Rope, int], tuple[str, str]] = {}
        self._masks: dict[int | None, str] = {}

    def add(self) -> None:
        """Add the whole model, from its inputs to its outputs."""
        graph = self._graph
        arch = self._arch
        tokens_BS = graph.input("input_ids", I64, [BATCH, SEQUENCE])
        self._mask_BP = graph.input("attention_mask", I64, [BATCH, TOTAL])
        positions_BS = graph.input("position_ids", I64, [BATCH, SEQUENCE])
        self._shape_BS = graph.op("Shape", tokens_BS)
        rows = graph.constant([-1, 1, 1], I64)
        self._positions_T11 = self._cast(graph.op("Reshape", positions_BS, rows), F32, I64)
        tokens_T = graph.op("Reshape", tokens_BS, graph.constant([-1], I64))
        x_TD = graph.op("Gather", self._linear.weight("embed.weight"), tokens_T)
        x_TD = self._unit_norm(x_TD) if arch.embed_norm else x_TD
        x_TD = self._scaled(x_TD, arch.embed_scale)
        if arch.position_offset is not None:
            x_TD = graph.op("Add", x_TD, self._positions(positions_BS))
        for idx in range(arch.num_layers):
            x_TD = self._layer(x_TD, idx)
        x_TD = self._scaled(self._norm(x_TD, "norm"), arch.logit_scale)
        logits_TV = self._linear.tied_head(x_TD) if arch.tied_head else self._linear(x_TD, "head")
        logits_BSV = self._by_sequence(self._capped(logits_TV, arch.logit_softcap), [arch.vocab_size])
        graph.output(logits_BSV, "logits", self._dtype, [BATCH, SEQUENCE, arch.vocab_size])

    def _positions(self, positions_BS: str) -> str:
        """Return the embeddings [T, D] of positions: rows of the learned table, or of that of sinusoids, a
        constant of the graph."""
        graph = self._graph
        rows_T = graph.op("Reshape", positions_BS, graph.constant([-1], I64))
        if self._arch.sinusoidal_positions:
            table_ND = self._cast(graph.constant(sinusoid_table(self._arch), F32), self._dtype, F32)
            return graph.op("Gather", table_ND, rows_T)
        if self._arch.position_offset:
            rows_T = graph.op("Add", rows_T, graph.constant(self._arch.position_offset, I64))
        return graph.op("Gather", self._linear.weight(POSITIONS), rows_T)

    def _layer(self, x_TD: str, idx: int) -> str:
        arch = self._arch
        graph = self._graph
        name = f"layers.{idx}"
        has_pre = arch.block_of(arch.layers[idx]) != "post"
        has_post = arch.norms_outputs(arch.layers[idx])
        is_bare = not has_pre or arch.layers[idx].bare_input
        normed = x_TD if is_bare else self._norm(x_TD, f"{name}.attn_norm")
        attended = self._attention(normed, idx)
        if has_post:
            attended = self._norm(attended, f"{name}.attn_post_norm")
        read_TD = x_TD
        x_TD = graph.op("Add", x_TD, self._scaled(attended, arch.residual_scale))
        if not arch.shares_norm:
            read_TD = read_TD if arch.block == "parallel" else x_TD
            normed = self._norm(read_TD, f"{name}.ffn_norm") if has_pre else read_TD
        ffn = self._ffn(normed, f"{name}.ffn", gated=arch.layers[idx].gated)
        if has_post:
            ffn = self._norm(ffn, f"{name}.ffn_post_norm")
        x_TD = graph.op("Add", x_TD, self._scaled(ffn, arch.residual_scale))
        if arch.layer_scalar:
            x_TD = graph.op("Mul", x_TD, self._linear.weight(f"{name}.layer_scalar"))
        return x_TD

    def _ffn(self, x_TD: str, name: str, *, gated: bool) -> str:
        graph = self._graph
        up = self._linear(x_TD, f"{name}.up")
        if not gated:
            return self._linear(self._activated(up), f"{name}.down")
        gate = self._activated(self._linear(x_TD, f"{name}.gate"))
        return self._linear(graph.op("Mul", gate, up), f"{name}.down")

    def _activated(self, x_TF: str) -> str:
        """Return the activation of the model of each number."""
        graph = self._graph
        if self._arch.activation == "relu":
            return graph.op("Relu", x_TF)
        if self._arch.activation == "relu2":
            positive = graph.op("Relu", x_TF)
            return graph.op("Mul", positive, positive)
        if self._arch.activation == "silu":
            return graph.op("Mul", x_TF, graph.op("Sigmoid", x_TF))
        form = "tanh" if self._arch.activation == "gelu_pytorch_tanh" else "none"
        return graph.op("Gelu", x_TF, approximate=form)

    def _attention(self, x_TD: str, idx: int) -> str:
        """Add attention of a layer; return the output of its `o` [T, D]."""
        shape = self._arch.layers[idx]
        graph = self._graph
        name = f"layers.{idx}.attn"
        q_THC = self._heads(self._linear(x_TD, f"{name}.q"), f"{name}.q", shape)
        if self._arch.queries_grow(shape):
            q_THC = graph.op("Mul", q_THC, self._growth())
        q_THC = self._scaled(q_THC, self._arch.score_scale(shape))
        keys = self._linear(x_TD, f"{name}.k")
        values = keys if shape.keys_are_values else self._linear(x_TD, f"{name}.v")
        k_BKPC = self._cached("key", idx, self._heads(keys, f"{name}.k", shape))
        v_TKC = self._split(values, shape.head_dim)
        if shape.keys_are_values:
            v_TKC = self._in_order(v_TKC, f"{name}.k", shape.head_dim)
        if self._arch.v_norm:
            v_TKC = self._unit_norm(v_TKC)
        v_BKPC = self._cached("value", idx, v_TKC)
        out_BKRSC = self._attend(q_THC, k_BKPC, v_BKPC, shape)
        heads = [shape.num_heads, shape.head_dim]
        out_BHSC = self._reshape_by(out_BKRSC, [BATCH, heads[0], SEQUENCE, heads[1]])
        out_BSHC = graph.op("Transpose", out_BHSC, perm=[0, 2, 1, 3])
        out_TF = graph.op("Reshape", out_BSHC, graph.constant([-1, heads[0] * heads[1]], I64))
        return self._linear(out_TF, f"{name}.o")

    def _attend(self, q_THC: str, k_BKPC: str, v_BKPC: str, shape: LayerShape) -> str:
        """Return attention [B, K, R, S, C] of scaled queries."""
        graph = self._graph
        group = shape.num_heads // shape.num_kv_heads
        q_BSHC = self._by_sequence(q_THC, [shape.num_heads, shape.head_dim])
        q_BHSC = graph.op("Transpose", q_BSHC, perm=[0, 2, 1, 3])
        q_BKRSC = self._reshape_by(q_BHSC, [BATCH, shape.num_kv_heads, group, SEQUENCE, shape.head_dim])
        axis = graph.constant([2], I64)
        k_BK1CP = graph.op("Unsqueeze", graph.op("Transpose", k_BKPC, perm=[0, 1, 3, 2]), axis)
        scores = self._cast(graph.op("MatMul", q_BKRSC, k_BK1CP), F32)
        scores = self._capped(scores, self._arch.attn_softcap, F32)
        scores = graph.op("Add", scores, self._mask(shape.window))
        probs = self._cast(graph.op("Softmax", scores, axis=-1), self._dtype, F32)
        return graph.op("MatMul", probs, graph.op("Unsqueeze", v_BKPC, axis))

    def _heads(self, x_TF: str, name: str, shape: LayerShape) -> str:
        """Return queries or keys by head [T, H, C], normed, in canonical order and rotated."""
        arch = self._arch
        graph = self._graph
        has_norm = arch.qk_norm and not arch.rotates_first
        x = self._norm(x_TF, f"{name}_norm") if has_norm and arch.whole_qk_norm else x_TF
        x = self._split(x, shape.head_dim)
        x = self._norm(x, f"{name}_norm") if has_norm and not arch.whole_qk_norm else x
        x = self._unit_norm(x) if arch.has_unit_qk_norm(shape) else x
        if shape.rope is None:
            return self._norm(x, f"{name}_norm") if arch.norms_rotated else x
        x = self._in_order(x, name, shape.head_dim, shape.leading_dim)
        cos, sin = self._rotation(shape.rope, shape.head_dim)
        halves = graph.constant([shape.head_dim // 2] * 2, I64)
        first, second = graph.ops("Split", x, halves, num_outputs=2, axis=-1)
        rotated = [
            graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin)),
            graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin)),
        ]
        x = graph.op("Concat", *rotated, axis=-1)
        if not arch.norms_rotated:
            return x
        assert self._linear.order(name) is None, "the weight of the norm is in the order of the stored rows"
        return self._norm(x, f"{name}_norm")

    def _in_order(self, x_THC: str, name: str, head_dim: int, leading_dim: int = 0) -> str:
        """Return heads in canonical order, from the order of the stored rows; with `leading_dim`, in that of
        the halves that rotate."""
        order = self._linear.order(name)
        if order is None and not leading_dim:
            return x_THC
        order_C = torch.arange(head_dim) if order is None else order[:head_dim]
        order_C = in_halves(order_C, leading_dim)
        return self._graph.op("Gather", x_THC, self._graph.constant(order_C, I64), axis=-1)

    def _rotation(self, rope: Rope, head_dim: int) -> tuple[str, str]:
        """Return cos and sin [T, 1, C/2] of the positions."""
        if (rope, head_dim) not in self._rotations:
            graph = self._graph
            frequencies = inverse_frequencies(rope, head_dim)
            angles = graph.op("Mul", self._positions_T11, graph.constant(frequencies, F32))
            cos = graph.op("Cos", angles)
            sin = graph.op("Sin", angles)
            if rope.attention_factor != 1:
                num_rotated = (rope.rotary_dim or head_dim) // 2
                factors = torch.ones(head_dim // 2)
                factors[:num_rotated] = rope.attention_factor
                cos = graph.op("Mul", cos, graph.constant(factors, F32))
                sin = self._scaled(sin, rope.attention_factor, F32)
            self._rotations[rope, head_dim] = (
                self._cast(cos, self._dtype, F32),
                self._cast(sin, self._dtype, F32),
            )
        return self._rotations[rope, head_dim]

    def _growth(self) -> str:
        """Return the factor of queries [T, 1, 1] by position."""
        graph = self._graph
        assert self._arch.query_growth is not None
        factor, num_positions = self._arch.query_growth
        shifted = graph.op("Add", self._positions_T11, graph.constant(self._arch.growth_offset, F32))
        steps = graph.op("Floor", graph.op("Div", shifted, graph.constant(num_positions, F32)))
        one = graph.constant(1, F32)
        grown = self._scaled(graph.op("Log", graph.op("Add", one, steps)), factor, F32)
        return self._cast(graph.op("Add", one, grown), self._dtype, F32)

    def _cached(self, part: str, idx: int, new_TKC: str) -> str:
        """Return keys or values of all positions [B, K, P + S, C]: those of the cache, and new ones."""
        graph = self._graph
        shape = self._arch.layers[idx]
        heads = [shape.num_kv_heads, shape.head_dim]
        new_BKSC = graph.op("Transpose", self._by_sequence(new_TKC, heads), perm=[0, 2, 1, 3])
        past = PAST_NAME.format(part) % idx
        graph.input(past, self._dtype, [BATCH, heads[0], PAST, heads[1]])
        all_BKPC = graph.op("Concat", past, new_BKSC, axis=2)
        present = PRESENT_NAME.format(part) % idx
        graph.output(all_BKPC, present, self._dtype, [BATCH, heads[0], TOTAL, heads[1]])
        return all_BKPC

    def _mask(self, window: int | None) -> str:
        """Return what is added to scores [B, 1, 1, S, P + S]: 0 for keys that a query sees."""
        if window not in self._masks:
            graph = self._graph
            zero = graph.constant(0, I64)
            one = graph.constant(1, I64)
            total = graph.op("Gather", graph.op("Shape", self._mask_BP), one)
            past = graph.op("Sub", total, graph.op("Gather", self._shape_BS, one))
            queries_S1 = graph.op("Unsqueeze", graph.op("Range", past, total, one), graph.constant([1], I64))
            keys_P = graph.op("Range", zero, total, one)
            seen = graph.op("LessOrEqual", keys_P, queries_S1)
            if window is not None:
                begin = graph.op("Sub", queries_S1, graph.constant(window, I64))
                seen = graph.op("And", seen, graph.op("Greater", keys_P, begin))
            real_B1P = graph.op(
                "Unsqueeze", graph.op("Greater", self._mask_BP, zero), graph.constant([1], I64)
            )
            seen = graph.op("And", seen, real_B1P)
            added = graph.op("Where", seen, graph.constant(0.0, F32), graph.constant(HIDDEN_SCORE, F32))
            self._masks[window] = graph.op("Unsqueeze", added, graph.constant([1, 2], I64))
        return self._masks[window]

    def _norm(self, x: str, name: str) -> str:
        """Return the norm over the last dimension, times its weight, and with its bias where it has one."""
        graph = self._graph
        arch = self._arch
        of_layer = name.split(".", 2)[2] if name.startswith("layers.") else name
        x_f32 = self._cast(x, F32)
        if arch.norm == "layer":
            last = graph.constant([-1], I64)
            x_f32 = graph.op("Sub", x_f32, graph.op("ReduceMean", x_f32, last, keepdims=1))
        normed = self._unit(x_f32, arch.eps_of(of_layer))
        if arch.unit_norms and not of_layer.startswith("attn."):
            return self._cast(normed, self._dtype, F32)
        weight = self._linear.of_norm(f"{name}.weight")
        if arch.norm == "rms" and not arch.norm_offset:
            return graph.op("Mul", self._cast(normed, self._dtype, F32), weight)
        weight = self._cast(weight, F32)
        if offset := arch.offset_of(of_layer):
            weight = graph.op("Add", weight, graph.constant(offset, F32))
        scaled = graph.op("Mul", normed, weight)
        if arch.qk_norm_bias if of_layer.startswith("attn.") else arch.norm_bias:
            scaled = graph.op("Add", scaled, self._cast(self._linear.of_norm(f"{name}.bias"), F32))
        return self._cast(scaled, self._dtype, F32)

    def _unit_norm(self, x: str) -> str:
        """Return x divided by the root of the mean square over its last dimension."""
        return self._cast(self._unit(self._cast(x, F32), self._arch.norm_eps), self._dtype, F32)

    def _unit(self, x_f32: str, eps: float) -> str:
        graph = self._graph
        square = graph.op("Mul", x_f32, x_f32)
        mean = graph.op("ReduceMean", square, graph.constant([-1], I64), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(eps, F32)))
        return graph.op("Div", x_f32, root)

    def _scaled(self, x: str, factor: float, dtype: torch.dtype | None = None) -> str:
        """Return x times a number, rounded to the dtype of the graph or to `dtype`."""
        if factor == 1:
            return x
        return self._graph.op("Mul", x, self._graph.constant(factor, dtype or self._dtype))

    def _capped(self, x: str, cap: float | None, dtype: torch.dtype | None = None) -> str:
        """Return cap * tanh(x / cap)."""
        if cap is None:
            return x
        dtype = dtype or self._dtype
        quotient = self._graph.op("Div", x, self._graph.constant(cap, dtype))
        return self._scaled(self._graph.op("Tanh", quotient), cap, dtype)

    def _split(self, x_TF: str, head_dim: int) -> str:
        """Return [T, H, C] of [T, H * C]."""
        return self._graph.op("Reshape", x_TF, self._graph.constant([0, -1, head_dim], I64))

    def _by_sequence(self, x: str, sizes: list[int]) -> str:
        """Return [B, S, *sizes] of rows [T, ...]."""
        return self._reshape_by(x, [BATCH, SEQUENCE, *sizes])

    def _reshape_by(self, x: str, sizes: list[int | str]) -> str:
        """Return x in a shape of which some sizes are those of `input_ids`."""
        graph = self._graph
        places = {BATCH: 0, SEQUENCE: 1}
        parts = [
            graph.op("Gather", self._shape_BS, graph.constant([places[size]], I64))
            if isinstance(size, str)
            else graph.constant([size], I64)
            for size in sizes
        ]
        return graph.op("Reshape", x, graph.op("Concat", *parts, axis=0))

    def _cast(self, x: str, dtype: torch.dtype, current: torch.dtype | None = None) -> str:
        """Return x in a dtype; `current` is the dtype that it has, by default that of the graph."""
        if dtype == (current or self._dtype):
            return x
        return self._graph.op("Cast", x, to=element_type(dtype))

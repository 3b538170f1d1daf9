"""Attention of a layer in serving, with the kernels selected for it: queries and keys are normed and rotated,
keys and values written to the cache, and the queries attend to it.

A pass over all layers has one `Attend`, made for its sequences. Shapes: T rows, F outputs of the linear of
q, k and v, H heads, C head dimension, B blocks of the longest sequence, R sequences, P positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.paged_latents import Pages
from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.kernels.operands.relative import RelativeTerm
from compress.kernels.operands.selective import ScanRows
from compress.kernels.operands.tiles import FixedLists
from compress.kernels.problem import Op, Phase
from compress.models.altup import mean_of_pairs
from compress.models.arch import Arch
from compress.models.ffn import activation
from compress.models.layer_shape import LayerShape, Rope
from compress.models.query_growth import query_growth
from compress.models.rope import cos_sin
from compress.quant.kv import page_format, transforms_heads
from compress.runtime.block_linears import BlockRows
from compress.runtime.chosen_blocks import BlockChoice
from compress.runtime.chunked_attention import DecodeChunks, PrefillChunks, chunk_sizes
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel
from compress.runtime.index_linears import IndexRows
from compress.runtime.kv_cache import NGramKept
from compress.runtime.layer_convs import ConvPart
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.recurrent_ops import RecurrentOps
from compress.runtime.row_contexts import RowContexts, row_parts

EARLY_MIXTURE_ROWS = 32
"""Rows of a mixture of experts up to which decode attention starts before its queries are turned. On an H200
a step of 64 rows of Qwen3-30B-A3B in W4 takes 2.4 % longer with it, and one of 16 rows 0.4 % less
(`docs/LOG.md`, 2026-11-26)."""


@dataclass(frozen=True)
class Projected:
    """The queries, keys and values of a layer, side by side as their linear leaves them [T, F], their
    positions, and the slots of the layer's pages that they belong to. Of a recurrence a gate follows them,
    and in place of pages it has states; the beta and decays of a delta net [T, H + D] are apart, and so are
    gates that a linear of latents computes [T, Z], the factors of what each head attends to, float32 [T, H],
    the numbers of heads of relative logits, float32 [T, H, R], what entries are computed of in compressed
    attention [T, F], with the weights of the heads of its indexer, and the `index` rows of another indexer.
    With a `conv`, which has states, too, they are rows that it is added to, and with the weights `conv_FW` of
    a convolution its inputs. `scan` has the operands of the recurrence of a Mamba-1 mixer."""

    qkv_TF: Tensor
    positions_T: Tensor
    slots_T: Tensor
    kv: Pages | RecurrentStates
    beta_decay_TH: Tensor | None = None
    gate_TZ: Tensor | None = None
    gates_TH: Tensor | None = None
    relative_THR: Tensor | None = None
    conv: ConvPart | None = None
    conv_FW: Tensor | None = None
    scan: ScanRows | None = None
    raw_TF: Tensor | None = None
    index: IndexRows | BlockRows | None = None


Attend = Callable[[LayerWeights, Projected], Tensor]
"""Attention of one pass: (layer, what its first linear leaves) -> [T, H, C], with latents or narrower
values [T, H, V], of a recurrence [T, H V], of a convolution [T, F], of compressed attention the input of the
last linear [T, F]; what the cache stores of the rows is in it afterwards."""


class LayerAttention:
    """Attention of the layers of one architecture over pages of one KV cache format.

    Raises:
        EnvironmentUnfit: no kernel here serves rotary embeddings or attention.
    """

    def __init__(self, arch: Arch, deployment: Deployment, kv_format: str, *, max_model_len: int) -> None:
        self._arch = arch
        self._transforms_heads = transforms_heads(kv_format)

        attending = [layer for layer in arch.layers if layer.attends]

        def bound(op: Op, key: tuple[int, int], phase: Phase = "decode") -> BoundKernel:
            attends = op.startswith("attention")
            alike = [layer for layer in attending if _head_key(layer) == key]
            problem = deployment.kernel_device.problem(
                op,
                n=key[0],
                k=key[1],
                phase=phase,
                scheme=None if op == "hadamard" else page_format(kv_format),
                softcap=attends and arch.attn_softcap is not None,
                sinks=attends and any(map(arch.has_sinks, alike)),
                relative=attends and any(layer.relative is not None for layer in alike),
                alibi=attends and any(layer.alibi is not None for layer in alike),
            )
            return BoundKernel.of(problem)

        self._ops: dict[tuple[Op, tuple[int, int]], BoundKernel] = {}
        for key in sorted({_head_key(layer) for layer in attending}):
            self._ops["rope_store", key] = bound("rope_store", key)
            self._ops["attention_decode", key] = bound("attention_decode", key)
            self._ops["attention_prefill", key] = bound("attention_prefill", key, "prefill")
            if self._transforms_heads:
                self._ops["hadamard", key] = bound("hadamard", key)
        self._recurrent = RecurrentOps(arch, deployment)
        # One position more than a sequence has: a step launched ahead, before the host sees that a request
        # has ended, reads it.
        positions = torch.arange(max_model_len + 1, device=deployment.device)
        self._rope_tables = {
            key: cos_sin(*key, positions, deployment.dtype, length=max_model_len)
            for key in {_rope_key(layer) for layer in attending}
        }
        self._growth_P = growth_of_positions(arch, positions, deployment.dtype)
        self._score_growth = {
            each: each.growth_at(positions)
            for each in {layer.relative for layer in attending if layer.relative is not None}
        }
        self._chunk_sizes = chunk_sizes(arch, max_model_len)
        self._blocks = BlockChoice(arch, deployment, self._rope_tables)

    def decode(
        self, block_table_RB: Tensor, context_lens_R: Tensor, *, q_len: int, block_size: int
    ) -> Attend:
        """Return attention for the last `q_len` rows of each sequence; `context_lens` count them."""
        chunks = {
            chunk: DecodeChunks(
                block_table_RB, context_lens_R, q_len=q_len, chunk=chunk, block_size=block_size
            )
            for chunk in self._chunk_sizes
        }
        sequences = self._recurrent.decoded(block_table_RB, context_lens_R, q_len)
        rows = None
        if self._blocks.may_choose(block_table_RB.shape[1] * block_size):
            rows = RowContexts.decoded(block_table_RB, context_lens_R, q_len)
        is_first = True

        def attend(layer: LayerWeights, projected: Projected) -> Tensor:
            nonlocal is_first
            if isinstance(projected.kv, RecurrentStates):
                is_convolution = projected.conv is not None or projected.conv_FW is not None
                is_first = is_first and is_convolution
                return self._recurrent.recurred(layer, projected, sequences)
            fn, facts = self._kernel("attention_decode", layer, projected)
            gains = layer.experts is None or len(projected.qkv_TF) <= EARLY_MIXTURE_ROWS
            q_THC = self.queries(layer, projected, early=gains and not is_first)
            is_first = False
            if rows is not None and projected.index is not None:
                return self._to_blocks(layer, projected, q_THC, rows, slice(None))

            def attention(table_RB: Tensor, lens_R: Tensor) -> Tensor:
                out: Tensor = fn(q_THC, projected.kv, table_RB, lens_R, q_len=q_len, **facts)
                return out

            if layer.shape.chunk in chunks:
                return self._restored(layer, chunks[layer.shape.chunk].attend(attention))
            return self._restored(layer, attention(block_table_RB, context_lens_R))

        return attend

    def prefill(
        self,
        block_table_RB: Tensor,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        lists: FixedLists | None = None,
        *,
        block_size: int,
        phase: Phase,
    ) -> Attend:
        """Return attention for `query_lens[r]` rows of each sequence; `context_lens` count them. `lists` are
        those of the chunks, for a CUDA graph (`takes_lists`). It is the same in both phases."""
        del phase
        whole = block_table_RB, query_lens, context_lens
        chunks = {
            chunk: PrefillChunks.of(*whole, chunk=chunk, block_size=block_size) for chunk in self._chunk_sizes
        }
        sequences = self._recurrent.prefilled(*whole, lists)
        groups = row_parts(*whole, self._blocks.least) if self._blocks.may_choose(max(context_lens)) else []

        def attend(layer: LayerWeights, projected: Projected) -> Tensor:
            if isinstance(projected.kv, RecurrentStates):
                return self._recurrent.recurred(layer, projected, sequences)
            q_THC = self.queries(layer, projected)
            fn, facts = self._kernel("attention_prefill", layer, projected)
            if projected.index is not None and groups:
                attended = [
                    self._restored(layer, fn(q_THC[each.rows], projected.kv, *each.whole, **facts))
                    if each.choosing is None
                    else self._to_blocks(layer, projected, q_THC, each.choosing, each.rows)
                    for each in groups
                ]
                return torch.cat(attended)
            operands = whole
            if layer.shape.chunk in chunks:
                parts = chunks[layer.shape.chunk]
                operands = parts.table_RB, parts.query_lens, parts.context_lens
            if lists is not None:
                facts["lists"] = lists
            return self._restored(layer, fn(q_THC, projected.kv, *operands, **facts))

        return attend

    def queries(self, layer: LayerWeights, projected: Projected, *, early: bool = False) -> Tensor:
        """Return the rotated queries [T, H, C] and write the rotated keys and the values to the cache, all of
        them in the Hadamard transform of their head in a format with that transform. `early`: the
        attention of this layer may start before this launch does its work, as `attention_decode/hopper.py`
        has it; not in the first layer of a pass."""
        shape = layer.shape
        norm = layer.qk_norm
        if isinstance(projected.index, BlockRows):
            self._blocks.store(shape, projected.index, projected.positions_T, projected.slots_T)
        rope_store = self._ops["rope_store", _head_key(shape)].kernel.fn
        tables = self._rope_tables[_rope_key(shape)]
        q_THC: Tensor = rope_store(
            projected.qkv_TF,
            *tables,
            projected.positions_T,
            projected.slots_T,
            projected.kv,
            num_heads=shape.num_heads,
            qk_norm=None if norm is None else norm.weight,
            qk_bias=None if norm is None else norm.bias,
            eps=self._arch.norm_eps,
            whole=self._arch.whole_qk_norm and norm is not None,
            rotates_first=self._arch.norms_rotated,
            centered=norm is not None and norm.centered,
            growth_P=self._growth_P if self._arch.queries_grow(shape) else None,
            v_norm=self._arch.v_norm,
            hadamard=self._transforms_heads,
            leading_dim=shape.leading_dim,
            value_dim=shape.value_dim,
            early=early and projected.index is None,
        )
        return q_THC

    def _to_blocks(
        self, layer: LayerWeights, projected: Projected, q_THC: Tensor, rows: RowContexts, own: slice
    ) -> Tensor:
        """Return attention of some rows, whose contexts are given, to the blocks that an indexer chooses."""
        fn, facts = self._kernel("attention_decode", layer, projected)
        assert isinstance(projected.kv, PagedKV)
        assert isinstance(projected.index, BlockRows)
        index = projected.index.of(own)
        operands = q_THC[own], projected.kv, index, projected.positions_T[own], rows
        return self._restored(layer, self._blocks.attended(layer, *operands, partial(fn, **facts)))

    @property
    def takes_lists(self) -> bool:
        """Whether prefill attention can be captured in a CUDA graph."""
        kernels = [bound.kernel for (op, _), bound in self._ops.items() if op == "attention_prefill"]
        of_attention = (
            not self._chunk_sizes
            and self._blocks.least is None
            and all(kernel.takes_lists for kernel in kernels)
        )
        return of_attention and self._recurrent.takes_lists

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op and kind of head."""
        rows = [bound.report(layer=None, linear=op) for (op, _), bound in self._ops.items()]
        return rows + self._blocks.kernel_report() + self._recurrent.kernel_report()

    def _kernel(
        self, op: Op, layer: LayerWeights, projected: Projected
    ) -> tuple[Callable[..., Tensor], dict[str, Any]]:
        """Return the attention kernel of a layer and the facts of the layer that it takes."""
        shape = layer.shape
        facts: dict[str, Any] = {
            "window": shape.window,
            "scale": self._arch.score_scale(shape),
            "softcap": self._arch.attn_softcap,
            "sinks_H": layer.sinks,
        }
        if projected.relative_THR is not None:
            assert shape.relative is not None
            assert layer.profiles_RE is not None
            growth_P = self._score_growth[shape.relative]
            growth_T = None
            if growth_P is not None:  # rows whose outputs are not read may have any position
                growth_T = growth_P[projected.positions_T.long().clamp(0, len(growth_P) - 1)]
            facts["relative"] = RelativeTerm(projected.relative_THR, layer.profiles_RE, growth_T)
        if layer.slopes_H is not None:
            facts["slopes_H"] = layer.slopes_H
        return self._ops[op, _head_key(shape)].kernel.fn, facts

    def _restored(self, layer: LayerWeights, attended_THC: Tensor) -> Tensor:
        """Return what was attended to out of the transform of the values, which is its own inverse, and
        without the zeros that fill narrower values [T, H, V]."""
        if self._transforms_heads:
            attended_THC = self._ops["hadamard", _head_key(layer.shape)].kernel.fn(attended_THC)
        value_dim = layer.shape.value_dim
        return attended_THC if value_dim == layer.shape.head_dim else attended_THC[..., :value_dim]


def heads_out(layer: LayerWeights, attended_THC: Tensor, eps: float) -> Tensor:
    """Return what heads of attention return [T, H, C], normed if it is."""
    if not layer.shape.out_norm:
        return attended_THC
    x_THC = attended_THC.to(torch.float32)
    return (x_THC * torch.rsqrt(mean_of_pairs(x_THC.square()) + eps)).to(attended_THC.dtype)


def growth_of_positions(arch: Arch, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factor of queries by position [P], None where they do not grow."""
    return None if arch.query_growth is None else query_growth(arch, positions).to(dtype)


def _head_key(shape: LayerShape) -> tuple[int, int]:
    """Return the head dimension and the query heads per KV head, by which attention kernels are selected."""
    return shape.head_dim, shape.num_heads // shape.num_kv_heads


def _rope_key(shape: LayerShape) -> tuple[Rope | None, int]:
    return shape.rope, shape.head_dim


def with_ngrams(
    layer: LayerWeights,
    x_TE: Tensor,
    digits_TN: Tensor,
    where: Projected,
    attend: Attend,
    phase: Phase,
    kept: NGramKept,
) -> Tensor:
    """Return the streams [T, n D] with the embeddings of n-grams that a layer adds to them. `where` are the
    rows of the pass, whose states are `kept`."""
    assert layer.ngrams is not None

    def convolve(rows_TF: Tensor, conv_FW: Tensor, states: RecurrentStates) -> Tensor:
        return attend(layer, replace(where, qkv_TF=rows_TF, kv=states, conv_FW=conv_FW))

    return layer.ngrams.added(x_TE, digits_TN, kept, convolve, phase)


def gates_of_heads(layer: LayerWeights, rows_TD: Tensor, phase: Phase) -> Tensor:
    """Return the factors of what each head attended to, float32 [T, H]."""
    assert layer.head_gate is not None
    assert layer.shape.head_gate is not None
    out_TH = layer.head_gate(rows_TD, phase, out_dtype=torch.float32)[:, : layer.shape.num_heads]
    return activation(layer.shape.head_gate, out_TH)


def relative_states(layer: LayerWeights, rows_TD: Tensor, phase: Phase) -> Tensor:
    """Return the numbers of each head of relative logits, float32 [T, H, R]."""
    assert layer.relative is not None
    assert layer.shape.relative is not None
    out_TF = layer.relative(rows_TD, phase, out_dtype=torch.float32)
    heads = (layer.shape.num_heads, layer.shape.relative.rank)
    return out_TF[:, : heads[0] * heads[1]].unflatten(1, heads)


def joint_output(
    layer: LayerWeights,
    attention: Callable[..., Tensor],
    recurred_TZ: Tensor,
    phase: Phase,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the output [T, D] of attention plus that of the recurrence that joins it, and `residual` if
    given."""
    assert layer.recurrent_o is not None
    return layer.recurrent_o(recurred_TZ, phase, residual=attention(residual=residual))

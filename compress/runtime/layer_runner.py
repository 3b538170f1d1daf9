"""The forward of one decoder layer in serving, with the kernels selected for it.

    x = x + o(attention(qkv(norm(x)), cache))  (`layer_attention.py`)
    x = x + o(sigmoid(gate(norm(x))) * attention(qkv(norm(x)), cache)), where attention has an output gate
        or one of each head, which may be a softplus
    x = x + o(attention(qkv(norm(x)), cache)) + recurrent_o(recurrence(qkv(norm(x)), states)), where a
        recurrence joins attention, whose linears `qkv` holds, too
    x = x + down(act(gate) * up),    gate, up = gate_up(norm(x)), or x + experts(norm(x)), or with branches
    x = x + norm(norm(shared(norm(x))) + norm(experts(norm(x))))

A layer may have one of the two halves only, and an FFN without gates is down(act(up(norm(x)))).

Norms, the rows that linears read and additions to x are those of `stream_ops.py`. Where tokens have
embeddings for each layer, a layer ends with x = x + norm(out(act(gate(x)) * e)) of its own; where a layer has
embeddings of n-grams, it begins with them (`ngrams.py`). Where both halves read one input, it is normed once,
or by a norm of each. The stream x may be a fraction of the hidden states (`loader.py`). Where it is several
streams, each half reads a mixture of them and is added to each (`models/hyper_connection.py`); with AltUp a
layer computes one stream, and the others follow (`altup.py`).

`model_runner.py` runs a whole model with it; an EAGLE-3 head (`speculative/eagle3.py`) runs its one layer,
whose q, k and v have another input.

Shapes: T rows, D hidden, F outputs of a fused linear.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import LaurelRows
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.arch_params import is_compressed
from compress.models.ffn import OUTPUT_GATE
from compress.models.manifest_facts import BLOCKS, NORMS
from compress.runtime.altup import LAUREL_SCALE
from compress.runtime.block_linears import BlockRows
from compress.runtime.compressed_attention import CompressedAttention
from compress.runtime.convolutions import Convolutions
from compress.runtime.deployment import Deployment
from compress.runtime.ffn_halves import FfnHalves
from compress.runtime.fused_linear import BoundKernel, Rows
from compress.runtime.index_linears import IndexRows
from compress.runtime.kv_cache import IndexedKept, JointKept, Kept, NGramKept
from compress.runtime.latent_attention import LatentAttention
from compress.runtime.layer_attention import (
    Attend,
    LayerAttention,
    Projected,
    gates_of_heads,
    heads_out,
    joint_output,
    relative_states,
    with_ngrams,
)
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.stream import Reader, Stream, ffn_reader, mixer_reader
from compress.runtime.stream_ops import StreamOps


class LayerRunner:
    """Runs layers of one architecture over pages of one KV cache format; `attention` is theirs.

    Raises:
        EnvironmentUnfit: no kernel here serves a norm, the activation, rotary embeddings or attention, or the
            runtime does not serve the kind of norm or block.
    """

    def __init__(self, arch: Arch, deployment: Deployment, kv_format: str, *, max_model_len: int) -> None:
        self._arch = arch
        if arch.norm not in NORMS or arch.block not in BLOCKS:
            raise EnvironmentUnfit(
                f"the runtime serves norms {', '.join(NORMS)} in blocks {', '.join(BLOCKS)}; this model has "
                f"norm '{arch.norm}' in block '{arch.block}'."
            )

        self.attention = _attention_of(arch)(arch, deployment, kv_format, max_model_len=max_model_len)

        self.ops = StreamOps(arch, deployment)
        gated = [
            layer.linear_shape(linear, arch.hidden_size)[1]
            for layer in arch.layers
            for linear in layer.linears
            if linear.endswith((".down", "lightning.o")) or (layer.has_output_gate and linear == "attn.o")
        ]
        act_mul = deployment.kernel_device.problem("act_mul", n=max(gated, default=arch.hidden_size), k=0)
        self._bound_act_mul = BoundKernel.of(act_mul)
        self._act_mul = self._bound_act_mul.kernel.fn
        self._halves = FfnHalves(arch, self._act_mul)

    def layer(
        self,
        layer: LayerWeights,
        stream: Stream,
        positions_T: Tensor,
        slots_T: Tensor,
        kv: Kept,
        attend: Attend,
        phase: Phase,
        reader: Reader | None = None,
        *,
        input_TP: Tensor | None = None,
    ) -> Stream:
        """Return the stream after a layer; its keys and values are in the cache afterwards.

        `reader` reads the stream next. Where the layer ends in a norm, the stream comes with its rows.
        `input_TP` are the embeddings of the tokens for this layer, where they have them, or the tokens
        themselves, where layers read those (`token_digits.py`).
        """
        where = positions_T, slots_T, kv, attend
        if layer.altup is not None:
            predicted_TE, first = self.ops.predicted(stream.x_TD, layer.altup, mixer_reader(layer), phase)
            y_TD = self._one_stream(layer, first, *where, phase, None, None).x_TD
            streams_TE, read_TD = self.ops.corrected(y_TD, predicted_TE, layer.altup)
            embed = layer.layer_embed
            if embed is None or input_TP is None:
                return Stream(streams_TE)
            term_TD = self._halves.of_embed(embed, read_TD, input_TP, phase)
            return Stream(self.ops.add_to_others_(streams_TE, term_TD, embed.norm))
        return self._one_stream(layer, stream, *where, phase, reader, input_TP)

    def _one_stream(
        self,
        layer: LayerWeights,
        stream: Stream,
        positions_T: Tensor,
        slots_T: Tensor,
        kv: Kept,
        attend: Attend,
        phase: Phase,
        reader: Reader | None,
        input_TP: Tensor | None,
    ) -> Stream:
        """Return the stream after the halves of a layer; the arguments are those of `layer`."""
        if layer.qkv is None or kv is None:
            return self._after_mixer(layer, stream, phase, reader, input_TP=input_TP)
        convs = None
        if isinstance(kv, NGramKept):
            assert input_TP is not None
            where = Projected(stream.x_TD, positions_T, slots_T, kv.states)
            stream = Stream(with_ngrams(layer, stream.x_TD, input_TP, where, attend, phase, kv))
            kv = kv.states
        factors_TF = None
        if self._arch.shares_norm:
            qkv_rows, ffn_rows = self.ops.rows_of_both(layer, stream.x_TD, phase)
        elif self._arch.block == "parallel":
            qkv_rows, ffn_rows = (
                self.ops.rows(Stream(stream.x_TD), each(layer), phase) for each in (mixer_reader, ffn_reader)
            )
        else:
            qkv_rows, factors_TF = self.ops.entered(stream, mixer_reader(layer), phase)
            ffn_rows = None
        index_pages = kv.index if isinstance(kv, IndexedKept) else None
        kv = kv.pages if isinstance(kv, IndexedKept) else kv
        qkv_TF, index = self._projected(layer, qkv_rows, index_pages, phase)
        joining = None
        if layer.convs is not None:
            assert isinstance(kv, JointKept)
            convs = Convolutions(
                layer, layer.convs, Projected(qkv_TF, positions_T, slots_T, kv.states), attend
            )
            qkv_TF, kv = convs.with_keys_values(qkv_TF), kv.pages
        elif isinstance(kv, JointKept):
            size = (layer.shape.num_heads + 2 * layer.shape.num_kv_heads) * layer.shape.head_dim
            joining = Projected(qkv_TF[:, size:], positions_T, slots_T, kv.states)
            qkv_TF, kv = qkv_TF[:, :size], kv.pages
        projected = Projected(qkv_TF, positions_T, slots_T, kv, index=index)
        if layer.selective is not None:
            projected = layer.selective.scanned(projected, partial(attend, layer), phase)
        if layer.delta is not None:
            assert isinstance(qkv_rows, Tensor)
            beta_decay_TH, gate_TZ = layer.delta.of_rows(qkv_rows, phase)
            if joining is None:
                projected = replace(projected, beta_decay_TH=beta_decay_TH, gate_TZ=gate_TZ)
            else:
                joining = replace(joining, beta_decay_TH=beta_decay_TH, gate_TZ=gate_TZ)
        if layer.head_gate is not None:
            assert isinstance(qkv_rows, Tensor)
            projected = replace(projected, gates_TH=gates_of_heads(layer, qkv_rows, phase))
        if layer.relative is not None:
            assert isinstance(qkv_rows, Tensor)
            projected = replace(projected, relative_THR=relative_states(layer, qkv_rows, phase))
        if layer.compressed is not None:
            projected = replace(projected, raw_TF=layer.compressed.raw(qkv_rows, phase))
        laurel = None
        if layer.laurel is not None:
            assert isinstance(qkv_rows, Tensor)
            laurel = layer.laurel.of_rows(qkv_rows, phase)
        return self.after_qkv(
            layer,
            projected,
            stream.x_TD,
            attend,
            phase,
            reader,
            joining=joining,
            ffn_rows=ffn_rows,
            input_TP=input_TP,
            factors_TF=factors_TF,
            convs=convs,
            laurel=laurel,
        )

    def _projected(
        self, layer: LayerWeights, rows: Rows, index_pages: PagedLatents | None, phase: Phase
    ) -> tuple[Tensor, IndexRows | BlockRows | None]:
        """Return what attention, or a recurrence, reads of the rows: the outputs of the first linears, those
        of an output gate last, and what an indexer computes, whose keys have pages of their own."""
        assert layer.qkv is not None
        qkv_TF = layer.qkv(rows, phase)
        if self._arch.qkv_clip is not None:
            qkv_TF.clamp_(-self._arch.qkv_clip, self._arch.qkv_clip)
        index: IndexRows | BlockRows | None = None
        if layer.indexer is not None:
            assert isinstance(rows, Tensor)
            assert index_pages is not None
            index = layer.indexer.of_rows(rows, qkv_TF, index_pages, phase)
        if layer.latent is None:
            return qkv_TF, index
        assert isinstance(self.attention, LatentAttention)
        return self.attention.with_gates(layer, qkv_TF, phase), index

    def store(
        self,
        layer: LayerWeights,
        x_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        kept: PagedKV | PagedLatents | IndexedKept,
        phase: Phase,
    ) -> None:
        """Write the keys and values of rows before a layer with attention, and compute nothing else of it."""
        rows = self.ops.rows(Stream(x_TD), mixer_reader(layer), phase)
        pages, index_pages = (kept.pages, kept.index) if isinstance(kept, IndexedKept) else (kept, None)
        qkv_TF, index = self._projected(layer, rows, index_pages, phase)
        if layer.shape.has_output_gate:
            qkv_TF = qkv_TF[:, : -layer.shape.num_heads * layer.shape.value_dim]
        projected = Projected(qkv_TF, positions_T, slots_T, pages, index=index)
        if layer.compressed is not None:
            projected = replace(projected, raw_TF=layer.compressed.raw(rows, phase))
        if isinstance(self.attention, LayerAttention):
            self.attention.queries(layer, projected)
        else:
            self.attention.queries(layer, projected, phase)

    def after_qkv(
        self,
        layer: LayerWeights,
        projected: Projected,
        residual_TD: Tensor,
        attend: Attend,
        phase: Phase,
        reader: Reader | None = None,
        *,
        joining: Projected | None = None,
        ffn_rows: Rows | None = None,
        input_TP: Tensor | None = None,
        factors_TF: Tensor | None = None,
        convs: Convolutions | None = None,
        laurel: LaurelRows | None = None,
    ) -> Stream:
        """Return the stream after a layer from its q, k and v, and the stream before it. `joining` are the
        inputs of a recurrence that joins attention. `ffn_rows` are given where the FFN reads the same input
        as attention, `input_TP` as to `layer`. `factors_TF` are those by which attention is added to several
        streams. `convs` are added to the outputs of both halves, and `laurel` to the stream with attention.
        """
        assert layer.o is not None
        half: Callable[..., Tensor] = partial(layer.o, self._attended(layer, projected, attend), phase)
        if joining is not None:
            half = partial(joint_output, layer, half, attend(layer, joining), phase)
        if convs is not None:
            half = partial(convs.after_attention, half)
        if not layer.shape.has_ffn:
            return self.ops.added(
                half, residual_TD, layer.attn_post_norm, reader, scale=layer.scale, factors_TF=factors_TF
            )
        norms = layer.branch_norms
        also = () if norms is None else (norms.experts, norms.router)
        stream = self.ops.added(
            half,
            residual_TD,
            layer.attn_post_norm,
            ffn_reader(layer),
            also=also,
            scale=1.0 if laurel is None else LAUREL_SCALE,
            factors_TF=factors_TF,
            hyper=layer.attn_hyper,
            laurel=laurel,
        )
        return self._after_mixer(
            layer, stream, phase, reader, ffn_rows=ffn_rows, input_TP=input_TP, convs=convs
        )

    def _after_mixer(
        self,
        layer: LayerWeights,
        stream: Stream,
        phase: Phase,
        reader: Reader | None,
        *,
        ffn_rows: Rows | None = None,
        input_TP: Tensor | None = None,
        convs: Convolutions | None = None,
    ) -> Stream:
        """Return the stream after a layer from the stream before its FFN, or its experts; the arguments are
        those of `after_qkv`."""
        factors_TF = None
        if ffn_rows is None:
            ffn_rows, factors_TF = self.ops.entered(stream, ffn_reader(layer), phase)
        ffn_half = self._halves.of_ffn(layer, ffn_rows, stream.branch_rows, phase, input_TP)
        if convs is not None:
            ffn_half = partial(convs.after_ffn, ffn_half)
        embed = layer.layer_embed
        if embed is None or layer.altup is not None:
            return self.ops.added(
                ffn_half,
                stream.x_TD,
                layer.ffn_post_norm,
                reader,
                scale=layer.scale,
                factors_TF=factors_TF,
                hyper=layer.ffn_hyper,
            )
        assert input_TP is not None
        stream = self.ops.added(ffn_half, stream.x_TD, layer.ffn_post_norm, None)
        embed_half = partial(self._halves.of_embed, embed, stream.x_TD, input_TP, phase)
        return self.ops.added(embed_half, stream.x_TD, embed.norm, reader, scale=layer.scale)

    def _attended(self, layer: LayerWeights, projected: Projected, attend: Attend) -> Rows:
        """Return the input of the last linear of attention, or of a recurrence. The outputs of a gate follow
        q, k and v."""

        def attended(of: Projected) -> Tensor:
            return heads_out(layer, attend(layer, of), self._arch.norm_eps)

        if layer.lightning is not None:
            return layer.lightning.gated(projected, partial(attend, layer), self._act_mul)
        if projected.gates_TH is not None:
            attended_THC = attended(projected)
            return (attended_THC * projected.gates_TH.unsqueeze(-1)).to(attended_THC.dtype).flatten(1)
        if not layer.shape.has_output_gate:
            attended_TF = attended(projected).flatten(1)
            return attended_TF if layer.attn_sub_norm is None else layer.attn_sub_norm.rows(attended_TF)
        assert layer.o is not None
        size = layer.shape.num_heads * layer.shape.value_dim
        attended_TF = attended(replace(projected, qkv_TF=projected.qkv_TF[:, :-size])).flatten(1)
        rows: Rows = self._act_mul(projected.qkv_TF[:, -size:], OUTPUT_GATE, layer.o.quant, up_TF=attended_TF)
        return rows

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op that is not a linear."""
        rows = [*self.ops.kernel_report(), self._bound_act_mul.report(layer=None, linear="act_mul")]
        return rows + self.attention.kernel_report()


def _attention_of(arch: Arch) -> type[LayerAttention | LatentAttention | CompressedAttention]:
    """Return the class of the attention of a model."""
    if is_compressed(arch):
        return CompressedAttention
    return LatentAttention if arch.has_latents else LayerAttention

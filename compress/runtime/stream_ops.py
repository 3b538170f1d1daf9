"""The operations on the residual stream of a pass in serving: norms, the rows that linears read of it, and
the addition of the output of a half-layer.

Where the outputs of half-layers are normed (`Arch.block`), one kernel norms an output, adds it to the stream
and norms the stream for the linear that follows, which is the next layer's or the head, and for the branches
of a mixture. It also multiplies the stream after a layer by the factor of the layer, where layers have one.
Where the residual is several streams, a kernel joins them before each half and norms their mixture, or they
are joined by gates (`gated_residual.py`), and a kernel adds the output of the half to each
(`models/hyper_connection.py`). With AltUp kernels predict the streams before a layer and correct them after
it (`models/altup.py`). With gated sums (`gated_sum.py`) both have factors of channels, and with sums of
the normed residual (`normed_sum.py`) constant ones.

Shapes: T rows, D hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.altup import AltUpWeights
from compress.kernels.operands.hyper import HyperWeights
from compress.kernels.operands.rows import Branch, LaurelRows, RawRows, RowNorm
from compress.kernels.problem import Op, Phase
from compress.models.arch import Arch
from compress.models.gated_residual import GatedResiduals
from compress.models.hyper_connection import HyperConnections
from compress.runtime.altup import StreamLinears
from compress.runtime.deployment import Deployment
from compress.runtime.ffn_halves import Half
from compress.runtime.fused_linear import BoundKernel, Rows
from compress.runtime.gated_residual import GatedResidualWeights
from compress.runtime.gated_sum import GatedSumWeights
from compress.runtime.hyper_weights import OfStreams
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.normed_sum import NormedSumWeights
from compress.runtime.shortcut import ShortcutSum
from compress.runtime.stream import Reader, Stream, ffn_reader, same_quant


class StreamOps:
    """The kernels that read and write the residual stream of one architecture.

    Raises:
        EnvironmentUnfit: no kernel here serves one of them.
    """

    def __init__(self, arch: Arch, deployment: Deployment) -> None:
        self._softcap = arch.logit_softcap
        self._head_vocab = arch.head_vocab

        def bound(op: Op, n: int, k: int = 0) -> BoundKernel:
            return BoundKernel.of(deployment.kernel_device.problem(op, n=n, k=k))

        self._ops = {"rms_norm": bound("rms_norm", arch.hidden_size)}
        if any(map(arch.ends_in_norm, arch.layers)):
            self._ops["post_norm"] = bound("post_norm", arch.hidden_size)
        if isinstance(arch.hyper, HyperConnections | GatedResiduals):
            sizes = arch.hidden_size, arch.hyper.num_streams
            if arch.norms_stream:
                self._ops["hyper_mix"] = bound("hyper_mix", *sizes)
            self._ops["hyper_spread"] = bound("hyper_spread", *sizes)
        if arch.altup_streams:
            updates: tuple[Op, ...] = ("altup_first", "altup_predict", "altup_correct", "altup_join")
            if arch.layer_embed_size:
                updates += ("altup_add",)
            self._ops |= {op: bound(op, arch.hidden_size, arch.altup_streams) for op in updates}
        if arch.logit_softcap is not None:
            self._ops["soft_cap"] = bound("soft_cap", arch.vocab_size)
        self._rms_norm = self._ops["rms_norm"].kernel.fn

    def added(
        self,
        half: Half,
        residual_TD: Tensor,
        post_norm: RowNorm | None,
        reader: Reader | None,
        *,
        also: tuple[RowNorm, ...] = (),
        scale: float = 1.0,
        factors_TF: Tensor | None = None,
        hyper: OfStreams | None = None,
        laurel: LaurelRows | None = None,
    ) -> Stream:
        """Return the stream plus the output of a half-layer, normed if it is, multiplied by `scale`, and the
        rows of the reader and of `also` where that kernel computes them too. The terms of `laurel` are added
        to the stream first; a model that has them norms the outputs of half-layers. Without `factors_TF` the
        residual is one stream, to which a gated sum, or one with the normed residual, adds by `hyper`, or two
        with shortcuts; these compute no rows. No model with `hyper` has that norm, `scale` or `also`
        (`arch_checks.py`)."""
        assert laurel is None or post_norm is not None
        if hyper is not None:
            assert post_norm is None
            assert scale == 1
            assert not also
        if isinstance(hyper, GatedSumWeights | NormedSumWeights):
            return Stream(hyper.added(_of_one_branch(half()), residual_TD, self.norm))
        if isinstance(hyper, ShortcutSum):
            return Stream(hyper.added(_of_one_branch(half()), residual_TD))
        if factors_TF is not None:
            return Stream(self._ops["hyper_spread"].kernel.fn(half(), residual_TD, factors_TF))
        if post_norm is None:
            sum_TD = _of_one_branch(half(residual=residual_TD))
            return Stream(sum_TD if scale == 1 else sum_TD * scale)
        following, quant = (None, None) if reader is None else (reader.norm, reader.quant)
        return Stream(
            *self._ops["post_norm"].kernel.fn(
                half(), residual_TD, post_norm, following, quant, also=also, scale=scale, laurel=laurel
            )
        )

    def rows_of_both(self, layer: LayerWeights, x_TD: Tensor, phase: Phase) -> tuple[Rows, Rows]:
        """Return the inputs of q, k, v and of gate, up, or of experts, where one norm serves both."""
        norm = layer.attn_norm
        assert norm is not None
        qkv, gate_up = (Reader(norm, each) for each in (layer.qkv, ffn_reader(layer).linear))
        if qkv.prepares_input(phase) and gate_up.prepares_input(phase):
            return self.rows(Stream(x_TD), qkv, phase), self.rows(Stream(x_TD), gate_up, phase)
        quant = qkv.quant if same_quant(qkv.quant, gate_up.quant) else None
        rows: Rows = self._rms_norm(
            x_TD, norm.weight, norm.eps, quant, centered=norm.centered, bias=norm.bias
        )
        return rows, rows

    def rows(self, stream: Stream, reader: Reader, phase: Phase) -> Rows:
        """Return the input of a linear: the stream normalized, and quantized as the linear reads it.

        Where the kernel of the linear does both itself, the stream is returned raw, with the weights of the
        norm.
        """
        return self.entered(stream, reader, phase)[0]

    def entered(self, stream: Stream, reader: Reader, phase: Phase) -> tuple[Rows, Tensor | None]:
        """Return `rows`, and the factors by which the output of the half-layer is added to the residual where
        that is several streams."""
        if isinstance(reader.hyper, GatedResidualWeights):
            return reader.hyper.enter(stream.x_TD, phase)
        if isinstance(reader.hyper, HyperWeights):
            mix = self._ops["hyper_mix"].kernel.fn
            rows, factors_TF = mix(stream.x_TD, reader.hyper, reader.norm, reader.quant)
            return rows, factors_TF
        if isinstance(reader.hyper, StreamLinears):
            products = reader.hyper.of_streams(stream.x_TD, phase)
            stream = Stream(self._ops["altup_join"].kernel.fn(stream.x_TD, products))
        elif reader.hyper is not None and not isinstance(reader.hyper, GatedSumWeights | NormedSumWeights):
            stream = Stream(reader.hyper(stream.x_TD))
        return self._normed(stream, reader, phase), None

    def _normed(self, stream: Stream, reader: Reader, phase: Phase) -> Rows:
        norm = reader.norm
        if stream.rows is not None or norm is None:
            return stream.x_TD if stream.rows is None else stream.rows
        if reader.gate is not None:
            return reader.gate.rows(self.norm(stream.x_TD, norm), reader.quant, phase)
        if reader.prepares_input(phase):
            return RawRows(stream.x_TD, norm.weight, norm.eps, reader.quant)
        normed: Rows = self._rms_norm(
            stream.x_TD, norm.weight, norm.eps, reader.quant, centered=norm.centered, bias=norm.bias
        )
        return normed

    def first_streams(self, x_TD: Tensor, linears: StreamLinears, phase: Phase) -> Tensor:
        """Return the streams of AltUp [T, n D] before the first layer from the embeddings [T, D]."""
        streams_TE: Tensor = self._ops["altup_first"].kernel.fn(x_TD, linears.of_rows(x_TD, phase))
        return streams_TE

    def predicted(
        self, streams_TE: Tensor, altup: AltUpWeights, reader: Reader, phase: Phase
    ) -> tuple[Tensor, Stream]:
        """Return the streams [T, n D] that AltUp predicts before a layer, and the first of them with the rows
        of its reader, unless the linear norms the stream itself."""
        following = None if reader.prepares_input(phase) else reader.norm
        predicted_TE, rows = self._ops["altup_predict"].kernel.fn(streams_TE, altup, following, reader.quant)
        first_TD = predicted_TE[:, : len(altup.scale_D)]
        return predicted_TE, Stream(first_TD.contiguous() if rows is None else first_TD, rows)

    def corrected(self, y_TD: Tensor, predicted_TE: Tensor, altup: AltUpWeights) -> tuple[Tensor, Tensor]:
        """Return the streams [T, n D] of AltUp after a layer with the output y, and the first of them as the
        layer reads it for the embeddings of the tokens [T, D]."""
        streams_TE, read_TD = self._ops["altup_correct"].kernel.fn(y_TD, predicted_TE, altup)
        return streams_TE, read_TD

    def add_to_others_(self, streams_TE: Tensor, term_TD: Tensor, norm: RowNorm) -> Tensor:
        """Add the norm of a term [T, D] to all streams of AltUp [T, n D] but the first, in place, and return
        them."""
        added_TE: Tensor = self._ops["altup_add"].kernel.fn(term_TD, streams_TE, norm)
        return added_TE

    def norm(self, x_TD: Tensor, norm: RowNorm) -> Tensor:
        """Return x normalized, [T, D], without quantization."""
        normed_TD: Tensor = self._rms_norm(
            x_TD, norm.weight, norm.eps, None, centered=norm.centered, bias=norm.bias
        )
        return normed_TD

    def capped(self, logits_TV: Tensor) -> Tensor:
        """Return float32 logits with the cap of the model, which they may be overwritten by; those of tokens
        that the head only pads are the least number."""
        if self._softcap is not None:
            logits_TV = self._ops["soft_cap"].kernel.fn(logits_TV, self._softcap)
        if self._head_vocab:
            logits_TV[:, self._head_vocab :] = torch.finfo(logits_TV.dtype).min
        return logits_TV

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op."""
        return [bound.report(layer=None, linear=op) for op, bound in self._ops.items()]


def _of_one_branch(output: Tensor | tuple[Branch, Branch]) -> Tensor:
    """Return the output of a half-layer whose branches are not normed apart."""
    assert isinstance(output, Tensor)
    return output

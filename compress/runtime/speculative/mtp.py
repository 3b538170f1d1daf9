"""An MTP head (arXiv 2412.19437; `models/mtp.py`) in serving: the layer of the target's own checkpoint that
predicts a further token. It shares the target's embedding, and its head unless it has one of its own.

Drafting reads the matrix of logits once for every token, so on a GPU it reads a copy in FP8 where that is
dense, which is half of the bytes. Nothing but proposals depends on it.

Shapes: R requests, T rows, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.mtp import MtpHead
from compress.models.weights import dense, norm_weights
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES
from compress.runtime.batch import PrefillBatch
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.layer_attention import Attend
from compress.runtime.layer_runner import LayerRunner
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.loader import load_layer
from compress.runtime.model_runner import ModelRunner
from compress.runtime.row_norms import stream_norm
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.head_proposer import HeadCache, HeadProposer, PromptRows
from compress.runtime.speculative.proposer import ProposerSetting
from compress.runtime.speculative.speculation import MAX_K
from compress.runtime.speculative.state import FedRows
from compress.runtime.stream import Stream


@PROPOSERS.register("mtp")
@dataclass(frozen=True)
class Mtp:
    """Options of an MTP head: its weights, of the target model. Where `further` heads predict the tokens
    after that of the first, each proposes one, and the last of them all others."""

    head: MtpHead
    further: tuple[MtpHead, ...] = ()

    def build(self, setting: ProposerSetting) -> HeadProposer:
        """Load the head.

        Raises:
            UsageError: the head was made for a model of another vocabulary or hidden size.
        """
        found, wanted = ((arch.vocab_size, arch.hidden_size) for arch in (self.head.arch, setting.arch))
        if found != wanted:
            raise UsageError(
                f"the MTP head was made for a model of {found[0]} tokens and hidden size {found[1]}; this "
                f"one has {wanted[0]} tokens and hidden size {wanted[1]}."
            )
        first = LoadedMtp(self.head, setting)
        # A step feeds the last k + m rows of a request, and decode attention serves MAX_K + 1.
        num_heads = max(1, min(setting.k, MAX_K + 1 - setting.k))
        further = [LoadedMtp(each, setting, first) for each in self.further[: num_heads - 1]]
        heads = (first, *further)
        chain = () if self.head.facts.feeds == "target" else heads[:-1]
        return HeadProposer(heads, setting, chain=chain)


@dataclass(frozen=True)
class MtpWeights:
    """The weights of a head in the layouts of its kernels. `head` is its own matrix of logits or a copy of
    the target's, None where that itself is read."""

    target_norm: RowNorm
    embed_norm: RowNorm
    hidden_norm: RowNorm
    fc: FusedLinear
    layer: LayerWeights
    norm: RowNorm
    head: FusedLinear | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes that one pass of one row reads, without the target's head."""
        own = 0 if self.head is None else self.head.weight_bytes
        return self.fc.weight_bytes + self.layer.bytes_read() + own


def load_mtp(head: MtpHead, deployment: Deployment, first: MtpWeights | None = None) -> MtpWeights:
    """Load the weights of a head, and choose the kernels of its linears. A copy of the target's matrix of
    logits is that of the `first` head where there is one.

    Raises:
        EnvironmentUnfit: no kernel supports a linear.
    """

    def norm(name: str) -> RowNorm:
        own = {f"norm.{leaf}": each for leaf, each in norm_weights(head.weights, name).items()}
        return stream_norm(head.arch, own, "norm", deployment)

    return MtpWeights(
        target_norm=norm("target_norm"),
        embed_norm=norm("embed_norm"),
        hidden_norm=norm("hidden_norm"),
        fc=fuse(("fc",), head.weights, deployment),
        layer=load_layer(head, 0, deployment),
        norm=norm("norm"),
        head=_own_head(head, deployment) if first is None or head.facts.own_head else first.head,
    )


def _own_head(head: MtpHead, deployment: Deployment) -> FusedLinear | None:
    """Return the matrix of logits that is the head's own, or a copy of the target's, on a GPU in fewer bits;
    None where the target's is read."""
    on_cpu = deployment.device.type == "cpu"
    if head.facts.own_head:
        if on_cpu:
            return fuse(("head",), head.weights, deployment)
        head_VD: Tensor | None = dense(head.weights["head.weight"])
    else:
        head_VD = None if on_cpu else head.target_head()
    if head_VD is None:
        return None
    weight = nearest_weight(deployment.placed(head_VD), SCHEMES["FP8_DYNAMIC"], deployment.dtype)
    return fuse(("head",), {"head.weight": weight}, deployment)


class LoadedMtp:
    """A head on the device (`head_proposer.py`)."""

    kind = "MTP head"

    def __init__(self, head: MtpHead, setting: ProposerSetting, first: "LoadedMtp | None" = None) -> None:
        self.arch = head.arch
        self.feature_layers: tuple[int, ...] = (setting.arch.num_layers,)
        self._deployment = setting.deployment
        self._feeds_stream = head.facts.feeds == "stream"
        self._weights: MtpWeights = load_mtp(
            head, setting.deployment, None if first is None else first._weights
        )
        self.weight_bytes = self._weights.weight_bytes

    def begin(self, target: ModelRunner, *, max_model_len: int, max_rows: int) -> None:
        """Select the kernels of the layer; embeddings and logits are those of the target."""
        del max_rows
        self._target = target
        kv_format = DENSE_FORMATS[self._deployment.dtype]
        self._layers = LayerRunner(self.arch, self._deployment, kv_format, max_model_len=max_model_len)

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`: of `fc`, of the layer and of the other ops."""
        weights = self._weights
        head = [] if weights.head is None else weights.head.report(None)
        return [*weights.fc.report(None), *weights.layer.report(0), *head, *self._layers.kernel_report()]

    def fused(self, features_TE: Tensor, phase: Phase) -> Tensor:
        """Return f [T, D]: hidden states after the target's last layer, normed."""
        return self._layers.ops.norm(features_TE, self._weights.target_norm)

    def store(self, rows: PromptRows, cache: HeadCache, phase: Phase) -> None:
        """Write the keys and values of rows of prompts."""
        x_TD = self._joined(rows.tokens_T, rows.hidden_TD, phase)
        where = rows.positions_T, rows.slots_T, cache.pages
        self._layers.store(self._weights.layer, x_TD, *where, phase)

    def prefilled(self, rows: PromptRows, batch: PrefillBatch, cache: HeadCache, phase: Phase) -> Tensor:
        """Return what the next head reads [T, D] of all rows of the chunks of prompts."""
        attend = self._layers.attention.prefill(
            batch.block_table_RB,
            batch.query_lens,
            batch.context_lens,
            block_size=cache.block_size,
            phase=phase,
        )
        x_TD = self._joined(rows.tokens_T, rows.hidden_TD, phase)
        return self._after(x_TD, (rows.positions_T, rows.slots_T), cache, attend, phase)

    def hidden(self, fed: FedRows, hidden_TD: Tensor, cache: HeadCache, *, q_len: int) -> Tensor:
        """Return what further rows read of rows that read these hidden states, at the ends of their contexts:
        g [T, D], or the stream before its norm."""
        attend = self._layers.attention.decode(
            fed.table_RB, fed.context_lens_R, q_len=q_len, block_size=cache.block_size
        )
        x_TD = self._joined(fed.tokens_T, hidden_TD, "decode")
        return self._after(x_TD, (fed.positions_T, fed.slots_T), cache, attend, "decode")

    def _after(
        self, x_TD: Tensor, where: tuple[Tensor, Tensor], cache: HeadCache, attend: Attend, phase: Phase
    ) -> Tensor:
        """Return what further rows read of rows with this input, at these positions and slots."""
        after = self._layers.layer(self._weights.layer, Stream(x_TD), *where, cache.pages, attend, phase)
        return after.x_TD if self._feeds_stream else self._layers.ops.norm(after.x_TD, self._weights.norm)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V], by the head's own matrix, the target's or a copy of it."""
        head = self._weights.head
        normed_RD = self._layers.ops.norm(hidden_RD, self._weights.norm) if self._feeds_stream else hidden_RD
        if head is None:
            return self._target.logits_of_normed(normed_RD)
        return self._layers.ops.capped(head(normed_RD, "decode", out_dtype=torch.float32))

    def _joined(self, tokens_T: Tensor, hidden_TD: Tensor, phase: Phase) -> Tensor:
        """Return the input [T, D] of the layer."""
        weights = self._weights
        embedded_TD = F.embedding(tokens_T, self._target.stream_embedding)
        norm = self._layers.ops.norm
        pair = torch.cat((norm(embedded_TD, weights.embed_norm), norm(hidden_TD, weights.hidden_norm)), dim=1)
        return weights.fc(pair, phase)

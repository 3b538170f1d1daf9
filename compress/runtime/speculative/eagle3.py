"""An EAGLE-3 head (arXiv 2503.01840; `models/eagle3.py`) in serving.

Its logits span the target's whole vocabulary, with minus infinity outside the head's.

Shapes: R requests, T rows, D hidden, E features, F outputs of q, k and v, V vocabulary, W vocabulary of the
head.
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
from compress.models.eagle3 import Eagle3Head, check_one_stream
from compress.models.weights import dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.layer_attention import Projected
from compress.runtime.layer_runner import LayerRunner
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.loader import fuse_groups
from compress.runtime.model_runner import ModelRunner
from compress.runtime.row_norms import row_norm, stream_scale
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.head_proposer import HeadCache, HeadProposer, PromptRows
from compress.runtime.speculative.proposer import ProposerSetting
from compress.runtime.speculative.state import FedRows
from compress.runtime.stream import Reader, Stream


@PROPOSERS.register("eagle3")
@dataclass(frozen=True)
class Eagle3:
    """Options of an EAGLE-3 head: its weights, trained for the target model."""

    head: Eagle3Head

    def build(self, setting: ProposerSetting) -> HeadProposer:
        """Load the head.

        Raises:
            UsageError: the head was made for a model of another vocabulary, hidden size or depth, or the
                residual of the model is several streams.
        """
        facts = self.head.facts
        target = setting.arch
        check_one_stream(target)
        found = (facts.arch.vocab_size, facts.arch.hidden_size)
        wanted = (target.vocab_size, target.hidden_size)
        if found != wanted or facts.layer_ids[-1] > target.num_layers:
            raise UsageError(
                f"the EAGLE-3 head was made for a model of {found[0]} tokens and hidden size {found[1]}, "
                f"and reads it after layer {facts.layer_ids[-1]}; this one has {wanted[0]} tokens, hidden "
                f"size {wanted[1]} and {target.num_layers} layers."
            )
        return HeadProposer((LoadedEagle3(self.head, setting),), setting)


@dataclass(frozen=True)
class Eagle3Weights:
    """The weights of a head in the layouts of its kernels. `layer.attn_norm` is the norm of the embedding."""

    fc: FusedLinear
    hidden_norm: RowNorm
    layer: LayerWeights
    norm: RowNorm
    head: FusedLinear

    @property
    def weight_bytes(self) -> int:
        """Bytes that one pass of the head reads."""
        return sum(each.weight_bytes for each in (self.fc, *self.layer.fused_linears, self.head))


def load_eagle3(head: Eagle3Head, deployment: Deployment, *, target_scale: float = 1.0) -> Eagle3Weights:
    """Fuse the linears of a head and repack its weights for a deployment. The target's embedding table holds
    embeddings divided by `target_scale`.

    Raises:
        EnvironmentUnfit: no kernel supports a linear.
    """
    arch = head.facts.arch
    prefix = "layers.0."
    own = {
        name.removeprefix(prefix): weight for name, weight in head.weights.items() if name.startswith(prefix)
    }

    def norm(name: str, eps: float | None = None) -> RowNorm:
        weight = dense(head.weights[f"{name}.weight"]).to(device=deployment.device, dtype=deployment.dtype)
        return row_norm(arch, weight, eps=eps)

    groups = fuse_groups(arch, arch.layers[0], own, deployment)
    layer = LayerWeights(
        shape=arch.layers[0],
        attn_norm=norm(
            f"{prefix}embed_norm", None if head.embed_VD is not None else arch.norm_eps / target_scale**2
        ),
        qk_norm=None,
        ffn_norm=norm(f"{prefix}ffn_norm"),
        qkv=groups.qkv,
        o=groups.o,
        gate_up=groups.gate_up,
        down=groups.down,
        kv_scales=None,
    )
    outer = {name: fuse((name,), head.weights, deployment) for name in ("fc", "head")}
    return Eagle3Weights(outer["fc"], norm(f"{prefix}hidden_norm"), layer, norm("norm"), outer["head"])


class LoadedEagle3:
    """A head on the device (`head_proposer.py`)."""

    kind = "EAGLE-3 head"

    def __init__(self, head: Eagle3Head, setting: ProposerSetting) -> None:
        self.arch = head.facts.arch
        self.feature_layers = head.facts.layer_ids
        self._stored = head
        self._deployment = setting.deployment
        self._weights = load_eagle3(head, setting.deployment, target_scale=stream_scale(setting.arch))
        self.weight_bytes = self._weights.weight_bytes

    def begin(self, target: ModelRunner, *, max_model_len: int, max_rows: int) -> None:
        """Select the kernels of the layer, and allocate logits."""
        deployment = self._deployment
        own = self._stored.embed_VD
        self._embed_VD = target.stream_embedding if own is None else deployment.placed(own)
        kv_format = DENSE_FORMATS[deployment.dtype]
        self._layers = LayerRunner(self.arch, deployment, kv_format, max_model_len=max_model_len)
        self._vocabulary_W = self._stored.vocabulary_W.to(deployment.device)
        shape = max_rows, self.arch.vocab_size
        self._logits_SV = torch.full(shape, float("-inf"), dtype=torch.float32, device=deployment.device)

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`: of `fc`, of the layer, of the head and of the other ops."""
        weights = self._weights
        rows = [row for each in weights.layer.fused_linears for row in each.report(0)]
        return [*weights.fc.report(None), *rows, *weights.head.report(None), *self._layers.kernel_report()]

    def fused(self, features_TE: Tensor, phase: Phase) -> Tensor:
        """Return f [T, D] of the target's hidden states after each of its layers that the head reads."""
        return self._weights.fc(features_TE, phase)

    def store(self, rows: PromptRows, cache: HeadCache, phase: Phase) -> None:
        """Write the keys and values of rows of prompts."""
        qkv_TF, _ = self._qkv(rows.tokens_T, rows.hidden_TD, phase)
        projected = Projected(qkv_TF, rows.positions_T, rows.slots_T, cache.keys_values)
        self._layers.attention.queries(self._weights.layer, projected)

    def hidden(self, fed: FedRows, hidden_TD: Tensor, cache: HeadCache, *, q_len: int) -> Tensor:
        """Return g [T, D] of rows that read these hidden states, at the ends of their contexts."""
        qkv_TF, residual_TD = self._qkv(fed.tokens_T, hidden_TD, "decode")
        attend = self._layers.attention.decode(
            fed.table_RB, fed.context_lens_R, q_len=q_len, block_size=cache.block_size
        )
        projected = Projected(qkv_TF, fed.positions_T, fed.slots_T, cache.keys_values)
        return self._layers.after_qkv(self._weights.layer, projected, residual_TD, attend, "decode").x_TD

    def _qkv(self, tokens_T: Tensor, hidden_TD: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """Return q, k and v, concatenated, and the residual that the layer adds to."""
        weights = self._weights
        norm = self._layers.ops.norm
        embed_norm = weights.layer.attn_norm
        assert embed_norm is not None
        normed_TD = norm(hidden_TD, weights.hidden_norm)
        pair = torch.cat((norm(F.embedding(tokens_T, self._embed_VD), embed_norm), normed_TD), dim=1)
        residual_TD = normed_TD if self._stored.facts.norm_before_residual else hidden_TD
        return weights.layer.qkv(pair, phase), residual_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V] of the target's vocabulary, which the next call overwrites."""
        head = self._weights.head
        logits_RV = self._logits_SV[: len(hidden_RD)]
        normed = self._layers.ops.rows(Stream(hidden_RD), Reader(self._weights.norm, head), "decode")
        return logits_RV.index_copy_(1, self._vocabulary_W, head(normed, "decode", out_dtype=torch.float32))

"""Load a model for serving: fuse its linears, choose a kernel for each, and repack the weights once, layer by
layer.

`load_model` streams a `WeightSource` onto the device; the linears of a linear group become one `FusedLinear`
(`fusing.py`).

Factors of a model are folded here. The embedding table holds scaled embeddings, those of norms are in their
weights (`row_norms.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import MambaWeights
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.delta_net import DeltaNet
from compress.models.experts import LATENT_IN, LATENT_OUT
from compress.models.layer_shape import XIELU, LayerShape
from compress.models.mamba2 import Mamba2
from compress.models.relative_logits import RELATIVE
from compress.models.short_conv import ShortConv
from compress.models.weights import LayerSource, Weights, WeightSource, dense
from compress.models.xielu import PARAMETERS, xielu_numbers
from compress.quant.kv import KV_SCALES
from compress.runtime.altup import (
    AltUpWeights,
    LaurelLinears,
    StreamLinears,
    altup_weights,
    laurel_linears,
)
from compress.runtime.compressed_linears import CompressedLinears, compressed_linears
from compress.runtime.delta_linears import DeltaLinears
from compress.runtime.deployment import Deployment
from compress.runtime.expert_linears import ExpertLinears
from compress.runtime.expert_loader import load_experts
from compress.runtime.fused_linear import FusedLinear, packed_bytes
from compress.runtime.fusing import fuse, fuse_padded, output_factor
from compress.runtime.gated_residual import GatedResidualWeights
from compress.runtime.head_weights import growth_of, profiles_of, sinks_of
from compress.runtime.hyper_weights import OfStreams, hyper_weights
from compress.runtime.latent_linears import LatentLinears, check_shared_rounding
from compress.runtime.layer_convs import LayerConvs, layer_convs
from compress.runtime.layer_embed import LayerEmbedLinears, layer_embed_linears
from compress.runtime.mamba_weights import mamba_weights, with_padded_dt
from compress.runtime.ngrams import NGramWeights, ngram_weights
from compress.runtime.norm_gates import NormGate
from compress.runtime.outer_weights import Joining, load_outer
from compress.runtime.row_norms import (
    BranchNorms,
    branch_norms,
    qk_norm,
    row_norm,
    stream_norm,
)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer in the layouts of its kernels. Norms that its block does not have are None, as
    are the norm and the linears of a half that the layer does not have. The FFN is `gate_up` and `down`, or
    `experts`; a mixture of experts with a shared one has all of them. With `branch_norms`, `ffn_norm` is that
    of the input of the shared expert.

    `qk_norm` holds a weight for every query and key head, [H + K, C], of a layer without keys of its own
    [H, C], or None where heads are not normalized.
    `kv_scales` are the static scales of keys and of values in the cache, or None where the source has none.
    `scale` is the factor of the layer's output. With `latent`, `qkv` are the linears of latents and of
    queries without one, and it those that read latents; `growth_2H` are the parameters by which its queries
    grow. `layer_embed` reads the embeddings of tokens for the layer. `latent_in` and `latent_out` come
    before and after experts that act on latents. `xielu_4` are the numbers of the activation of its FFN,
    float32, None where it has none. `recurrent_o` is the last linear of a recurrence that joins attention,
    whose own is `o`. `attn_hyper` and `ffn_hyper` join the streams of the residual for the two halves.
    `altup` computes the other streams of the residual, and `laurel` a residual around attention.
    `attn_norm_gate` and `ffn_norm_gate` are the gates of the two norms.
    `altup` computes the other streams of the residual, and `laurel` a residual around attention. `relative`
    computes the numbers of heads of which `profiles_RE`, float32, make terms of scores. `convs` are added to
    keys, values and the outputs of halves, and `ffn_scale` is the factor of the outputs of its FFN.
    `ngrams` are embeddings of n-grams.
    With `compressed`, `qkv` are the linears of latents of queries and of keys, and it has the others but `o`.
    """

    shape: LayerShape
    attn_norm: RowNorm | None
    qkv: FusedLinear | None
    qk_norm: RowNorm | None
    o: FusedLinear | None
    ffn_norm: RowNorm | None
    gate_up: FusedLinear | None
    down: FusedLinear | None
    kv_scales: tuple[float, float] | None
    attn_post_norm: RowNorm | None = None
    ffn_post_norm: RowNorm | None = None
    sinks: Tensor | None = None
    experts: ExpertLinears | None = None
    branch_norms: BranchNorms | None = None
    head_gate: FusedLinear | None = None
    shared_gate: FusedLinear | None = None
    latent_in: FusedLinear | None = None
    latent_out: FusedLinear | None = None
    scale: float = 1.0
    latent: LatentLinears | None = None
    growth_2H: Tensor | None = None
    delta: DeltaLinears | None = None
    mamba: MambaWeights | None = None
    conv_FW: Tensor | None = None
    layer_embed: LayerEmbedLinears | None = None
    xielu_4: Tensor | None = None
    recurrent_o: FusedLinear | None = None
    attn_hyper: OfStreams | None = None
    ffn_hyper: OfStreams | None = None
    altup: AltUpWeights | None = None
    laurel: LaurelLinears | None = None
    attn_norm_gate: NormGate | None = None
    ffn_norm_gate: NormGate | None = None
    relative: FusedLinear | None = None
    profiles_RE: Tensor | None = None
    convs: LayerConvs | None = None
    ffn_scale: float = 1.0
    ngrams: NGramWeights | None = None
    compressed: CompressedLinears | None = None

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The fused linears in execution order, without those of latents."""
        of_mixture = (self.shared_gate, self.latent_in, self.latent_out)
        of_mixer = (self.qkv, self.head_gate, self.relative, self.o, self.recurrent_o)
        linears = (*of_mixer, *of_mixture, self.gate_up, self.down)
        return tuple(each for each in linears if each is not None)

    def bytes_read(self, experts_hit: float | None = None) -> int:
        """Return the bytes that a decode step reads; by default one of a single row."""
        own = sum(each.weight_bytes for each in self.fused_linears if not self._is_unused(each, "decode"))
        parts = (*self._with_linears, self.attn_hyper, self.ffn_hyper)
        own += sum(each.weight_bytes for each in parts if each is not None)
        own += packed_bytes((self.mamba, self.conv_FW, self.convs, self.profiles_RE))
        if self.experts is None:
            return own
        hit = self.experts.facts.top_k if experts_hit is None else experts_hit
        return own + self.experts.bytes_read(hit)

    @property
    def _with_linears(self) -> tuple[Any, ...]:
        first = self.latent, self.delta, self.layer_embed, self.altup, self.laurel
        return (*first, self.attn_norm_gate, self.ffn_norm_gate, self.ngrams, self.compressed)

    def _is_unused(self, linear: FusedLinear, phase: Phase) -> bool:
        """Return whether the rows of a phase go through the shared expert among the others."""
        if self.experts is None or not self.experts.has_shared(phase):
            return False
        return linear is self.gate_up or linear is self.down

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        rows = [
            row
            for each in self.fused_linears
            for row in each.report(layer_idx)
            if not self._is_unused(each, row["phase"])
        ]
        gated = (each for each in (self.attn_hyper, self.ffn_hyper) if isinstance(each, GatedResidualWeights))
        rows += [row for each in (*self._with_linears, *gated) if each for row in each.report(layer_idx)]
        return rows if self.experts is None else rows + self.experts.report(layer_idx)


OF_LINEARS = StreamLinears, GatedResidualWeights
"""The weights of streams outside of the layers that are linears."""


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a whole model. A tied head is a second copy of the embedding, in the layout of its
    kernel. Rows of `embed_VD` go on with the embeddings of a token for each layer, where it has them. `hyper`
    joins the streams of the residual for the last norm, where it has several, and `first` are the linears by
    which those of AltUp begin. `positions_ND` are the learned embeddings of positions, where it has them.
    """

    arch: Arch
    deployment: Deployment
    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm: RowNorm | None
    head: FusedLinear
    hyper: Joining | None = None
    first: StreamLinears | None = None
    positions_ND: Tensor | None = None

    @property
    def kv_scales(self) -> list[tuple[float, float]] | None:
        """Static scales of keys and of values for every layer, or None unless all layers with keys and values
        of their own have them. The numbers of others are not read."""
        of_layers = [layer.kv_scales if layer.shape.cached_numbers else (1.0, 1.0) for layer in self.layers]
        scales = [each for each in of_layers if each is not None]
        return scales if len(scales) == len(self.layers) else None

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step of one row reads: all linears and the head, as their decode kernels store
        them; of experts those that one row is routed to."""
        return self.bytes_read()

    def bytes_read(self, experts_hit: float | None = None) -> int:
        """Return the bytes of weights that a decode step reads whose rows are routed to so many experts of a
        layer; by default one of a single row."""
        return sum(layer.bytes_read(experts_hit) for layer in self.layers) + self._outer_bytes

    def expected_bytes_read(self, num_rows: int) -> int:
        """Return the bytes of weights that a step of so many rows reads, if all experts are as likely;
        without experts those of one row."""
        total = self._outer_bytes
        for layer in self.layers:
            mixture = layer.experts
            total += layer.bytes_read(None if mixture is None else mixture.facts.expected_hit(num_rows))
        return total

    @property
    def _outer_bytes(self) -> int:
        """The bytes that a decode step reads of the linears outside of the layers."""
        of_streams = [each for each in (self.first, self.hyper) if isinstance(each, OF_LINEARS)]
        return self.head.weight_bytes + sum(each.weight_bytes for each in of_streams)


def load_model(source: WeightSource, deployment: Deployment) -> ModelWeights:
    """Stream a model onto the device, layer by layer.

    Raises:
        EnvironmentUnfit: the runtime does not compute in this dtype, no kernel supports a linear, or layers
            that share latents round them in several ways.
    """
    outer = load_outer(source, deployment)
    layers = tuple(load_layer(source, layer_idx, deployment) for layer_idx in range(source.arch.num_layers))
    for layer_idx, layer in enumerate(layers):
        kv_source = layer.shape.kv_source
        if layer.latent is not None and kv_source is not None:
            check_shared_rounding(layer_idx, layer.latent, kv_source, layers[kv_source].latent)
    return ModelWeights(
        arch=source.arch,
        deployment=deployment,
        embed_VD=outer.embed_VD,
        layers=layers,
        norm=outer.norm,
        head=outer.head,
        hyper=outer.hyper,
        positions_ND=outer.positions_ND,
        first=outer.first,
    )


def load_layer(source: LayerSource, layer_idx: int, deployment: Deployment) -> LayerWeights:
    """Load one layer.

    Raises:
        EnvironmentUnfit: as `load_model`.
    """
    arch = source.arch
    shape = arch.layers[layer_idx]
    weights = source.layer(layer_idx)

    def before(name: str) -> RowNorm | None:
        name = f"{name}.norm" if name in shape.gated_norms else name
        exists = arch.unit_norms or f"{name}.weight" in weights
        return stream_norm(arch, weights, name, deployment) if exists else None

    def after(name: str) -> RowNorm | None:
        if f"{name}.weight" not in weights:
            return None
        weight = _dense(weights, f"{name}.weight", deployment)
        return row_norm(arch, weight, name, scale=arch.residual_scale)

    def one(name: str) -> FusedLinear:
        return fuse((name,), weights, deployment)

    def norm_of_embed(weight: Tensor) -> RowNorm:
        return row_norm(arch, deployment.placed(weight))

    fused = fuse_groups(arch, shape, weights, deployment)
    return LayerWeights(
        shape=shape,
        attn_norm=before("attn_norm"),
        qk_norm=qk_norm(arch, shape, weights, deployment) if shape.attends else None,
        ffn_norm=before("ffn_norm") or before("moe.shared_norm"),
        qkv=fused.qkv,
        o=fused.o,
        gate_up=fused.gate_up,
        down=fused.down,
        recurrent_o=fused.recurrent_o,
        sinks=sinks_of(weights, deployment),
        experts=load_experts(arch, shape, weights, deployment),
        branch_norms=branch_norms(arch, shape, weights, deployment),
        head_gate=_gate("attn.head_gate", weights, deployment),
        relative=_gate(RELATIVE, weights, deployment),
        profiles_RE=profiles_of(weights, deployment),
        convs=layer_convs(weights, deployment),
        ffn_scale=_dense(weights, "ffn.factor", deployment).item() if shape.scaled_ffn else 1.0,
        shared_gate=_gate("moe.shared_gate", weights, deployment),
        latent_in=_of_mixture(LATENT_IN, weights, deployment),
        latent_out=_of_mixture(LATENT_OUT, weights, deployment),
        kv_scales=_kv_scales(weights),
        attn_post_norm=after("attn_post_norm"),
        ffn_post_norm=after("ffn_post_norm"),
        latent=_latent(arch, shape, weights, deployment),
        growth_2H=growth_of(weights, deployment),
        delta=_delta(arch, shape, weights, deployment),
        mamba=_mamba(arch, shape, weights, deployment),
        conv_FW=_short_conv(shape, weights, deployment),
        layer_embed=layer_embed_linears(one, weights, norm_of_embed),
        attn_hyper=hyper_weights(arch, weights, "attn_hyper", deployment),
        ffn_hyper=hyper_weights(arch, weights, "ffn_hyper", deployment),
        altup=altup_weights(arch, weights, deployment),
        laurel=laurel_linears(arch, weights, deployment),
        attn_norm_gate=NormGate.of(shape, "attn_norm", weights, deployment),
        ffn_norm_gate=NormGate.of(shape, "ffn_norm", weights, deployment),
        ngrams=ngram_weights(arch, shape.ngrams, weights, deployment),
        scale=_dense(weights, "layer_scalar", deployment).item() if arch.layer_scalar else 1.0,
        xielu_4=_xielu(arch, shape, weights, deployment),
        compressed=compressed_linears(shape, weights, arch.norm_eps, deployment),
    )


@dataclass(frozen=True)
class FusedGroups:
    """The fused linears that all rows of a layer go through, None for those that it does not have; a mixture
    without a shared expert has none in place of its FFN."""

    qkv: FusedLinear | None
    o: FusedLinear | None
    gate_up: FusedLinear | None
    down: FusedLinear | None
    recurrent_o: FusedLinear | None


def fuse_groups(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> FusedGroups:
    """Fuse the linear groups of a layer that all rows go through."""
    groups = {group.name: group for group in shape.groups}
    if isinstance(shape.recurrence, Mamba2):
        weights = with_padded_dt(groups["qkv"].linears, weights)

    def fused(name: str, activation: str | None = None) -> FusedLinear | None:
        if name not in groups:
            return None
        linears = groups[name].linears
        factor = output_factor(arch, linears)
        return fuse(linears, weights, deployment, activation=activation, factor=factor)

    prefix = "" if shape.experts is None else "shared."
    return FusedGroups(
        fused("qkv"),
        fused("o"),
        fused(f"{prefix}gate_up", arch.fused_activation(shape)),
        fused(f"{prefix}down"),
        fused("recurrent_o"),
    )


def _latent(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> LatentLinears | None:
    """Return the linears of latents of a layer, None where it has none."""
    if shape.latent is None:
        return None

    def one(name: str, of: Weights) -> FusedLinear:
        return fuse((name,), of, deployment)

    return LatentLinears.of(shape, one, weights, arch, deployment)


def _delta(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> DeltaLinears | None:
    """Return the parameters of the delta net of a layer, None where it has none."""
    if not isinstance(shape.recurrence, DeltaNet):
        return None
    return DeltaLinears.of(shape.recurrence, weights, arch.eps_of("delta.norm"), deployment)


def _mamba(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> MambaWeights | None:
    """Return the parameters of the Mamba-2 mixer of a layer, None where it has none."""
    if not isinstance(shape.recurrence, Mamba2):
        return None
    return mamba_weights(shape.recurrence, weights, arch, deployment)


def _short_conv(shape: LayerShape, weights: Weights, deployment: Deployment) -> Tensor | None:
    """Return the weights of the short convolution of a layer [F, W], None where it has none."""
    if not isinstance(shape.recurrence, ShortConv):
        return None
    return _dense(weights, "conv.conv.weight", deployment).squeeze(1).contiguous()


def _of_mixture(name: str, weights: Weights, deployment: Deployment) -> FusedLinear | None:
    """Return a linear before or after the experts of a layer, None where the layer has none."""
    linear = f"moe.{name}"
    return fuse((linear,), weights, deployment) if f"{linear}.weight" in weights else None


def _gate(name: str, weights: Weights, deployment: Deployment) -> FusedLinear | None:
    """Return the gate of the shared expert, that of the heads, or the linear of relative logits, None where
    the layer has none."""
    weight = weights.get(f"{name}.weight")
    return None if weight is None else fuse_padded(name, dense(weight), deployment)


def _xielu(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> Tensor | None:
    """Return the numbers of the activation of a layer's FFN, float32 [4] in a model of any dtype, None where
    it has none."""
    if arch.activation != XIELU or not shape.has_ffn:
        return None
    stored = (dense(weights[f"ffn.{name}"], torch.float32) for name in PARAMETERS)
    return xielu_numbers(*stored).to(deployment.device)


def _kv_scales(weights: Weights) -> tuple[float, float] | None:
    k_scale, v_scale = (weights.get(name) for name in KV_SCALES.values())
    return None if k_scale is None or v_scale is None else (float(dense(k_scale)), float(dense(v_scale)))


def _dense(weights: Weights, name: str, deployment: Deployment) -> Tensor:
    return deployment.placed(dense(weights[name]))

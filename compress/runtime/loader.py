"""Load a model for serving: fuse its linears, choose a kernel for each, and repack the weights once, layer by
layer.

`load_model` streams a `WeightSource` onto the device; the linears of a linear group become one `FusedLinear`
(`fusing.py`).

Factors of a model are folded here. The embedding table holds scaled embeddings, those of norms are in their
weights (`row_norms.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import MambaWeights
from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.delta_net import DeltaNet
from compress.models.experts import LATENT_IN, LATENT_OUT
from compress.models.layer_shape import XIELU, LayerShape
from compress.models.lightning import Lightning
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.relative_logits import RELATIVE
from compress.models.short_conv import ShortConv
from compress.models.weights import LayerSource, Weights, WeightSource, dense
from compress.models.xielu import PARAMETERS, xielu_numbers
from compress.quant.kv import KV_SCALES
from compress.runtime.altup import (
    altup_weights,
    laurel_linears,
)
from compress.runtime.block_linears import block_linears
from compress.runtime.compressed_linears import compressed_linears
from compress.runtime.delta_linears import DeltaLinears
from compress.runtime.deployment import Deployment
from compress.runtime.expert_loader import load_experts
from compress.runtime.expert_norms import ExpertNorms
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse, fuse_padded, output_factor
from compress.runtime.head_weights import growth_of, profiles_of, sinks_of, slopes_of
from compress.runtime.hyper_weights import hyper_weights
from compress.runtime.index_linears import index_linears
from compress.runtime.latent_linears import LatentLinears, check_shared_rounding
from compress.runtime.layer_convs import layer_convs
from compress.runtime.layer_embed import layer_embed_linears
from compress.runtime.layer_weights import LayerWeights, ModelWeights
from compress.runtime.lightning_rows import LightningRows, as_mixer
from compress.runtime.mamba_weights import mamba_weights, with_padded_dt
from compress.runtime.ngrams import ngram_weights
from compress.runtime.norm_gates import NormGate
from compress.runtime.outer_weights import load_outer
from compress.runtime.row_norms import (
    branch_norms,
    qk_norm,
    row_norm,
    stream_norm,
)
from compress.runtime.selective_linears import SelectiveLinears
from compress.runtime.sub_norms import SubNorm


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
        slopes_H=slopes_of(arch, shape, deployment),
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
        expert_norms=ExpertNorms.of(arch, shape, weights, deployment),
        attn_sub_norm=SubNorm.of(arch, "attn.sub_norm", fused.o, weights, deployment),
        ffn_sub_norm=SubNorm.of(arch, "ffn.sub_norm", fused.down, weights, deployment),
        kv_scales=_kv_scales(weights),
        attn_post_norm=after("attn_post_norm"),
        ffn_post_norm=after("ffn_post_norm"),
        latent=_latent(arch, shape, weights, deployment),
        growth_2H=growth_of(weights, deployment),
        delta=_delta(arch, shape, weights, deployment),
        mamba=_mamba(arch, shape, weights, deployment),
        lightning=_lightning(arch, shape, fused.o, weights, deployment),
        selective=_selective(arch, shape, weights, deployment),
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
        compressed=compressed_linears(arch, shape, weights, deployment),
        indexer=index_linears(arch, shape, weights, deployment)
        or block_linears(arch, shape, weights, deployment),
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
    """Return the parameters of the Mamba-2 mixer of a layer, or of the one that computes its lightning
    attention, None where it has neither."""
    if isinstance(shape.recurrence, Lightning):
        return as_mixer(shape.recurrence, deployment)
    if not isinstance(shape.recurrence, Mamba2):
        return None
    return mamba_weights(shape.recurrence, weights, arch, deployment)


def _lightning(
    arch: Arch, shape: LayerShape, o: FusedLinear | None, weights: Weights, deployment: Deployment
) -> LightningRows | None:
    """Return what norms and gates the lightning attention of a layer, None where it has none."""
    if not isinstance(shape.recurrence, Lightning):
        return None
    return LightningRows.of(shape.recurrence, o, weights, arch, deployment)


def _selective(
    arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment
) -> SelectiveLinears | None:
    """Return the parameters of the Mamba-1 mixer of a layer, None where it has none."""
    if not isinstance(shape.recurrence, Mamba1):
        return None
    return SelectiveLinears.of(shape.recurrence, weights, arch, deployment)


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

"""The weights of a model as the serving forward reads them: linears with their kernels, norms, factors."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.kernels.operands.altup import AltUpWeights
from compress.kernels.operands.recurrent_states import MambaWeights
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.runtime.altup import LaurelLinears, StreamLinears
from compress.runtime.block_linears import BlockLinears
from compress.runtime.compressed_linears import CompressedLinears
from compress.runtime.delta_linears import DeltaLinears
from compress.runtime.deployment import Deployment
from compress.runtime.expert_linears import ExpertLinears
from compress.runtime.expert_norms import ExpertNorms
from compress.runtime.fused_linear import FusedLinear, packed_bytes
from compress.runtime.gated_residual import GatedResidualWeights
from compress.runtime.hyper_weights import OfStreams
from compress.runtime.index_linears import IndexLinears
from compress.runtime.latent_linears import LatentLinears
from compress.runtime.layer_convs import LayerConvs
from compress.runtime.layer_embed import LayerEmbedLinears
from compress.runtime.lightning_rows import LightningRows
from compress.runtime.ngrams import NGramWeights
from compress.runtime.norm_gates import NormGate
from compress.runtime.outer_weights import Joining
from compress.runtime.row_norms import BranchNorms
from compress.runtime.selective_linears import SelectiveLinears
from compress.runtime.sub_norms import SubNorm


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
    before and after experts that act on latents, and `expert_norms` norm what these experts read and return.
    `xielu_4` are the numbers of the activation of its FFN,
    float32, None where it has none. `recurrent_o` is the last linear of a recurrence that joins attention,
    whose own is `o`. `attn_hyper` and `ffn_hyper` join the streams of the residual for the two halves.
    `attn_norm_gate` and `ffn_norm_gate` are the gates of the two norms. `altup` computes the other
    streams of the residual, and `laurel` a residual around attention. `relative` computes the numbers of
    heads of which `profiles_RE`, float32, make terms of scores. `convs` are added to keys, values and the
    outputs of halves, and `ffn_scale` is the factor of the outputs of its FFN. `ngrams` are embeddings of
    n-grams. With `compressed`, `qkv` are the linears of latents of queries and of keys, and it has the
    others but `o`. `indexer` chooses keys, None where the layer has none or sequences need none.
    `slopes_H`, float32, are those by which scores of heads fall with the distance of keys.
    `attn_sub_norm` and `ffn_sub_norm` norm what `o` and `down` read, and `lightning` norms and gates it after
    a recurrence that the kernel of `mamba` computes.
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
    slopes_H: Tensor | None = None
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
    lightning: LightningRows | None = None
    selective: SelectiveLinears | None = None
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
    indexer: IndexLinears | BlockLinears | None = None
    expert_norms: ExpertNorms | None = None
    attn_sub_norm: SubNorm | None = None
    ffn_sub_norm: SubNorm | None = None

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
        parts = (*self._with_linears, self.altup, self.attn_hyper, self.ffn_hyper)
        own += sum(each.weight_bytes for each in parts if each is not None)
        own += packed_bytes((self.mamba, self.conv_FW, self.convs, self.profiles_RE))
        if self.experts is None:
            return own
        hit = self.experts.facts.top_k if experts_hit is None else experts_hit
        return own + self.experts.bytes_read(hit)

    @property
    def _with_linears(self) -> tuple[Any, ...]:
        first = self.latent, self.delta, self.selective, self.layer_embed, self.laurel
        others = self.ngrams, self.compressed, self.indexer, self.expert_norms
        last = (*others, self.lightning, self.attn_sub_norm, self.ffn_sub_norm)
        return (*first, self.attn_norm_gate, self.ffn_norm_gate, *last)

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

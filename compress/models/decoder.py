"""The canonical decoder: the one module tree into which every checkpoint is brought.

    h = embed(tokens)                                          (+ learned positions)
    per layer:  h = h + o(attention(rope(q), rope(k), v)),  q, k, v = linears of attn_norm(h)
                h = h + down(act(gate(x)) * up(x)),         x = ffn_norm(h)
    logits = head(norm(h))

A layer may have one of the two halves only, and an FFN without gates is down(act(up(x))). q, k and v may be
normed, and v may be what k is before its norm. RMSNorm (arXiv 1910.07467), grouped queries (arXiv
2305.13245), gated FFN (arXiv 2002.05202); the gates are silu or gelu. Norms may follow the halves of a layer
instead, or as well, the halves may run side by side (`Arch.block`), and a layer may multiply its output by a
number. The residual may be several streams (`hyper_connection.py`, `gated_residual.py`), which layers then
take and return one after the other in place of D numbers, or of which layers compute one (`altup.py`);
outputs may be added to the normed residual (`normed_sum.py`). A mixture of experts (`moe.py`) may take the
place of the FFN, and a gated delta net (`delta_net.py`), a Mamba-1 or Mamba-2 mixer (`mamba1.py`,
`mamba2.py`), lightning attention (`lightning.py`) or a short convolution (`short_conv.py`) that of attention,
or it joins attention. Tokens may have embeddings for each layer (`layer_embedding.py`), or n-grams of them
(`ngrams.py`), a layer may read the keys and values of an earlier one, and a low-rank residual may be added
around attention (`laurel.py`).
Linears are separate (q, k, v, o, gate, up, down) so that a method sees each one. Calibration, training and
the golden tests run this forward; the serving runtime has its own fused step, which is tested against it. Not
supported: dropout, encoder-decoder.

Shapes: B batch, S sequence, D hidden, H heads, K kv heads, C head dimension, F ffn, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor, nn

from compress.models.altup import with_others_plus
from compress.models.altup_layer import AltUp
from compress.models.arch import Arch
from compress.models.attention import AttentionFn, FullAttention, layer_input_of
from compress.models.compressed_attention import CompressedAttention
from compress.models.embedding import Embedding, LearnedPositions
from compress.models.ffn import Ffn
from compress.models.gated_norm import stream_norm_of
from compress.models.gated_residual_layer import half_residual
from compress.models.half_layer import HalfLayer, Residual, StagedHalf, as_it_is, one_stream
from compress.models.laurel import Laurel
from compress.models.layer_embedding import LayerEmbedding, LayerEmbeddings
from compress.models.layer_shape import Half
from compress.models.linear_groups import RECURRENT_OUT, LinearGroup
from compress.models.logits import capped
from compress.models.moe import Moe
from compress.models.ngram_layer import NGramEmbedding, take_ngrams
from compress.models.norms import UnitNorm, final_norm, norm_of, norm_of_latents
from compress.models.recurrent_mixers import recurrent_mixer
from compress.models.residual_conv import OF_ATTENTION, OF_FFN, ResidualConv
from compress.models.self_attention import Attention, LatentAttention
from compress.models.sinusoids import SinusoidalPositions
from compress.models.smoothing_pair import SmoothingPair
from compress.models.smoothing_pairs import smoothing_pairs_of
from compress.models.tap import Tap, no_tap
from compress.models.token_mixer import TokenMixer


class DecoderLayer(nn.Module):
    """One decoder layer. `linear(name)` and the parameter names are the canonical ones relative to the layer
    (`attn.q`, `ffn.down`, ...). Norms that its block does not have are identities; there are no modules of a
    half that it does not have."""

    def __init__(self, arch: Arch, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.arch = arch
        self.shape = arch.layers[layer_idx]
        norm_over_hidden = partial(norm_of, arch, arch.hidden_size)
        ranks = dict.fromkeys(self.shape.gated_norms, self.shape.norm_gate_rank)
        self.has_pre = arch.block_of(self.shape) != "post" and arch.norms_stream
        has_post = arch.norms_outputs(self.shape)

        def norm(name: str, exists: bool) -> nn.Module:
            return stream_norm_of(arch, name, ranks.get(name, 0)) if exists else nn.Identity()

        def unit_of(name: str) -> UnitNorm:
            return UnitNorm(arch.eps_of(name), centered=False)

        if self.shape.has_mixer:
            self.attn_norm = norm("attn_norm", self.has_pre and not self.shape.bare_input)
            latent = self.shape.latent
            if self.shape.recurrence is not None:
                mixer = recurrent_mixer(arch, self.shape, self.shape.recurrence)
                self.add_module(self.shape.recurrence.module, mixer)
            compressed = self.shape.compressed
            if compressed is not None:
                self.add_module("attn", CompressedAttention(arch, self.shape, compressed))
            elif self.shape.attends and latent is None:
                self.attn = Attention(arch, self.shape)
            elif latent is not None:
                self.attn = LatentAttention(arch, self.shape, latent)
            self.attn_post_norm = norm("attn_post_norm", has_post)
            if arch.hyper is not None:
                norms = unit_of("attn_post_norm"), self.attn_norm
                self.attn_hyper = half_residual(arch, self.shape, arch.hyper, "mixer", *norms)
        if self.shape.has_ffn:
            experts = self.shape.experts
            norms_apart = experts is not None and experts.branch_norms
            self.ffn_norm = norm("ffn_norm", self.has_pre and not arch.shares_norm and not norms_apart)
            if experts is None:
                self.ffn = Ffn(arch, self.shape)
            else:
                parts = (
                    partial(Ffn, arch, self.shape),
                    norm_over_hidden,
                    partial(norm_of_latents, arch, experts),
                )
                self.moe = Moe(experts, arch.hidden_size, *parts)
            self.ffn_post_norm = norm("ffn_post_norm", arch.ends_in_norm(self.shape))
            if arch.hyper is not None:
                norms = unit_of("ffn_post_norm"), self.ffn_norm
                self.ffn_hyper = half_residual(arch, self.shape, arch.hyper, "ffn", *norms)
        if self.shape.residual_convs is not None:
            size = arch.hidden_size, self.shape.residual_convs
            self.attn_conv, self.ffn_conv = (ResidualConv(name, *size) for name in (OF_ATTENTION, OF_FFN))
        if arch.layer_embed_size:
            self.layer_embed = LayerEmbedding(arch)
        if arch.altup_streams:
            self.altup = AltUp(arch)
        if arch.laurel_rank:
            self.laurel = Laurel(arch)
        if self.shape.ngrams is not None:
            self.ngrams = NGramEmbedding(arch, self.shape.ngrams)
        if arch.layer_scalar:
            self.layer_scalar = nn.Parameter(torch.ones(1))

    @property
    def is_parallel(self) -> bool:
        """Whether both halves read the input of the layer."""
        return self.arch.block == "parallel"

    def forward(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap = no_tap) -> Tensor:
        if not self.arch.altup_streams:
            return self._end(self._halves_of(x_BSD, positions, attention, tap), attention)
        predicted_BSE, first_BSD = self.altup.before(x_BSD)
        y_BSD = self._halves_of(first_BSD, positions, attention, tap)
        return self._end(self.altup.after(predicted_BSE, y_BSD), attention)

    def _halves_of(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Return the stream after both halves of the layer."""
        if self.shape.ngrams is not None:
            x_BSD = self.ngrams.added(x_BSD, attention, self.layer_idx)
        before_BSD = x_BSD
        normed_BSD = x_BSD
        if self.shape.has_mixer:
            read_BSD, leave = self.residual("mixer")(x_BSD)
            normed_BSD = self.attn_norm(read_BSD)
            mixed = self._joint if self.shape.joint else partial(self._mixer, layer_idx=self.layer_idx)
            attended_BSD = mixed(normed_BSD, positions, attention, tap=tap)
            x_BSD = leave(self._after("attn", attended_BSD, attention))
            x_BSD = self.laurel(x_BSD, normed_BSD) if self.arch.laurel_rank else x_BSD
        if self.shape.has_ffn:
            read_BSD, leave = self.residual("ffn")(x_BSD)
            read_BSD = before_BSD if self.is_parallel else read_BSD
            read_BSD = normed_BSD if self.arch.shares_norm else self.ffn_norm(read_BSD)
            ffn = self.ffn if self.shape.experts is None else partial(self.moe, attention=attention)
            ffn_BSD = ffn(read_BSD, tap)
            x_BSD = leave(self._after("ffn", ffn_BSD, attention))
        return x_BSD

    def _after(self, half: str, y_BSD: Tensor, attention: AttentionFn | None = None) -> Tensor:
        """Return what a half adds to the residual, from its output: with a factor, normed, or with a
        convolution added."""
        if half == "ffn" and self.shape.scaled_ffn:
            y_BSD = y_BSD * self.ffn.factor
        if self.shape.residual_convs is not None:
            conv = self.attn_conv if half == "attn" else self.ffn_conv
            return conv.added(y_BSD, attention, self.layer_idx)
        norm = self.attn_post_norm if half == "attn" else self.ffn_post_norm
        normed_BSD: Tensor = norm(y_BSD)
        return normed_BSD

    def residual(self, half: Half) -> Residual:
        """Return how a half reads the residual, and adds its output to it."""
        if self.arch.hyper is None:
            return partial(one_stream, scale=self.arch.residual_scale)
        hyper = self.attn_hyper if half == "mixer" else self.ffn_hyper
        return hyper.enter

    def mixer_input(self, x_BSD: Tensor) -> Tensor:
        """Return what the norm before attention reads [B, S, D] of the residual before the layer."""
        if self.arch.altup_streams:
            return self.altup.before(x_BSD)[1]
        return self.residual("mixer")(x_BSD)[0]

    @property
    def _mixer(self) -> TokenMixer:
        """The module of the first half, which mixes positions; the recurrence where that joins attention."""
        recurrence = self.shape.recurrence
        mixer: TokenMixer = getattr(self, "attn" if recurrence is None else recurrence.module)
        return mixer

    def _joint(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Return the sum of attention and of a recurrence of one input."""
        tap("attn_in", x_BSD)
        attended_BSF = self.attn.heads(x_BSD, positions, attention, layer_idx=self.layer_idx)
        tap("attn_out", attended_BSF)
        recurred_BSF = self._mixer.heads(x_BSD, positions, attention, layer_idx=self.layer_idx)
        tap(RECURRENT_OUT, recurred_BSF)
        return self._mixer.o(recurred_BSF) + self.attn.o(attended_BSF)

    def _end(self, x_BSD: Tensor, attention: AttentionFn) -> Tensor:
        """Return the output of the layer from the stream after its last half."""
        if self.arch.layer_embed_size:
            read_BSD = x_BSD[..., : self.arch.hidden_size]
            read_BSD = read_BSD * self.altup.output_scale if self.arch.altup_streams else read_BSD
            term_BSD = self.layer_embed(read_BSD, layer_input_of(attention, self.layer_idx))
            x_BSD = with_others_plus(x_BSD, term_BSD) if self.arch.altup_streams else x_BSD + term_BSD
        return x_BSD * self.layer_scalar if self.arch.layer_scalar else x_BSD

    def halves(self) -> tuple[HalfLayer | StagedHalf, ...]:
        """Return the half-layers, attention and FFN, that `forward` runs one after the other; there are none
        in models that are not `staged`."""
        assert self.arch.staged
        mixer = (self._attention_half(),) if self.shape.has_mixer else ()
        return (*mixer, self._ffn_half()) if self.shape.has_ffn else mixer

    def _attention_half(self) -> HalfLayer | StagedHalf:
        norm = self.attn_norm
        post = partial(self._after, "attn")
        residual = self.residual("mixer")
        end = as_it_is if self.shape.has_ffn else self._end
        if self.shape.joint:
            first, *last = self.shape.attention_groups
            return StagedHalf(((first,), tuple(last)), norm, self._joint, post, residual, end)
        if not self.shape.has_latent_norms:
            heads = partial(self._mixer.heads, layer_idx=self.layer_idx)
            return HalfLayer(("attn_in", "attn_out"), norm, heads, self._mixer.o, post, residual, end)
        first, q_up, *others, o = self.shape.attention_groups
        of_latents = ((q_up,), tuple(others)) if self.shape.compressed is not None else ((q_up, *others),)

        def inner(x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
            return self.attn(x_BSD, positions, attention, self.layer_idx, tap)

        return StagedHalf(((first,), *of_latents, (o,)), norm, inner, post, residual, end)

    def _ffn_half(self) -> HalfLayer | StagedHalf:
        norm = self.ffn_norm
        post = partial(self._after, "ffn")
        residual = self.residual("ffn")
        if self.shape.experts is None:

            def mid(x_BSD: Tensor, positions: Tensor, attention: AttentionFn) -> Tensor:
                return self.ffn.mid(x_BSD)

            return HalfLayer(("ffn_in", "ffn_mid"), norm, mid, self.ffn.down, post, residual, self._end)
        of_moe = self.shape.groups[len(self.shape.attention_groups) :]
        stages = tuple(
            tuple(group for group in of_moe if group.name.endswith(end)) for end in ("gate_up", "down")
        )

        def inner(x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
            return self.moe(x_BSD, tap, attention)

        return StagedHalf(stages, norm, inner, post, residual, self._end, self.moe)

    def linear(self, name: str) -> nn.Linear:
        module = self.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module

    def groups(self) -> list[LinearGroup]:
        """Return the linear groups of this layer, in execution order."""
        return list(self.shape.groups)

    def smoothing_pairs(self) -> list[SmoothingPair]:
        """Return the places where a per-channel scale can be moved into the producer without changing the
        function, in execution order."""
        return smoothing_pairs_of(self)


class Decoder(nn.Module):
    """The whole model. Its parameters have the canonical names that checkpoints are imported to and exported
    from."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embed = Embedding(arch)
        if arch.position_offset is not None:
            of_kind = SinusoidalPositions if arch.sinusoidal_positions else LearnedPositions
            self.positions = of_kind(arch)
        if arch.layer_embed_size:
            self.layer_embeds = LayerEmbeddings(arch)
        self.layers = nn.ModuleList(DecoderLayer(arch, idx) for idx in range(arch.num_layers))
        self.norm = final_norm(arch)
        self.head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=arch.head_bias)
        if arch.tied_head:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens_BS: Tensor, positions: Tensor | None = None, attention: AttentionFn | None = None
    ) -> Tensor:
        """Return logits [B, S, V]. Positions default to 0..S-1, attention to the whole sequence."""
        return capped(self.arch, self.head(self.hidden(tokens_BS, positions, attention)))

    def hidden(
        self, tokens_BS: Tensor, positions: Tensor | None = None, attention: AttentionFn | None = None
    ) -> Tensor:
        """Return the final normed hidden states [B, S, D], the input of the head."""
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        attend = attention if attention is not None else FullAttention()
        x_BSD = self.embedded(tokens_BS, positions, attend)
        for layer in self.layers:
            x_BSD = layer(x_BSD, positions, attend)
        return self.norm(x_BSD)

    def embedded(self, tokens_BS: Tensor, positions: Tensor, attention: AttentionFn) -> Tensor:
        """Return the input [B, S, D] of the first layer; `attention` has the tokens afterwards, and their
        embeddings for each layer, where they have them."""
        x_BSD = self.embed(tokens_BS)
        if self.arch.position_offset is not None:
            x_BSD = x_BSD + self.positions(positions).to(x_BSD.dtype)
        if isinstance(attention, FullAttention):
            attention.tokens_BS = tokens_BS
        if self.arch.layer_embed_size:
            assert isinstance(attention, FullAttention)
            inputs_BSLP = self.layer_embeds(tokens_BS, x_BSD[..., : self.arch.hidden_size])
            attention.layer_inputs = dict(enumerate(inputs_BSLP.unbind(-2)))
        elif self.arch.has_ngrams:
            take_ngrams(self.arch, tokens_BS, attention)
        return x_BSD

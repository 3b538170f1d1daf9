"""The attention of a layer: its linears, the norms of heads, the rotation, and what a cache stores.

Shapes: B batch, S sequence, D hidden, H heads, K kv heads, C head dimension, F outputs of a linear, R width
of a latent, P dimensions that all keys share.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import AttentionFn, choices_of, kept_by
from compress.models.block_indexer_layer import BlockIndexerLayer
from compress.models.choices import choice_source, choice_sources
from compress.models.ffn import OUTPUT_GATE, activation, gated
from compress.models.latent import KV_LATENT, Q_LATENT, Latent
from compress.models.layer_shape import LayerShape
from compress.models.linear import Linear, linear_of
from compress.models.norms import Norm, norm_of, unit_norm
from compress.models.query_growth import learned_growth, query_growth
from compress.models.residual_conv import OF_KEYS, OF_VALUES, ResidualConv
from compress.models.rope import cos_sin, in_halves, rotate
from compress.models.tap import Tap, no_tap
from compress.models.token_indexer import TokenIndexer
from compress.models.token_mixer import TokenMixer


class Attention(TokenMixer):
    """Attention with its linears; `v` is absent where the keys are the values, `gate` where outputs have
    none, and `k` and `v` where those of another layer are read."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    gate: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        for group in shape.attention_groups:
            for linear in group.linears:
                if linear.startswith("attn."):
                    self.add_module(linear.removeprefix("attn."), linear_of(arch, shape, linear))
        if arch.qk_norm:
            q_size, k_size = arch.qk_norm_sizes(shape)
            heads = (shape.num_heads, shape.num_kv_heads) if arch.own_qk_norm else (1, 1)
            self.q_norm = norm_of(arch, q_size, heads=heads[0], bias=arch.qk_norm_bias)
            if shape.kv_source is None:
                self.k_norm = norm_of(arch, k_size, heads=heads[1], bias=arch.qk_norm_bias)
        if shape.head_gate is not None:
            self.head_gate = Linear(arch.hidden_size, shape.num_heads, bias=False)
        if arch.has_sinks(shape):
            self.sinks = nn.Parameter(torch.zeros(shape.num_heads))
        if shape.relative is not None:
            self.relative = Linear(arch.hidden_size, shape.num_heads * shape.relative.rank, bias=False)
            self.profiles = nn.Parameter(torch.zeros(shape.relative.rank, shape.relative.extent))
        if shape.residual_convs is not None:
            sizes = shape.num_kv_heads * shape.head_dim, shape.residual_convs
            self.k_conv, self.v_conv = (ResidualConv(name, *sizes) for name in (OF_KEYS, OF_VALUES))
        if arch.learned_growth:
            self.growth_scale = nn.Parameter(torch.zeros(shape.num_heads))
            self.growth_base = nn.Parameter(torch.ones(shape.num_heads))
        if shape.sub_norms:
            self.sub_norm = norm_of(arch, shape.num_heads * shape.head_dim)
        if shape.block_indexer is not None:
            self.indexer: nn.Module = BlockIndexerLayer(shape.block_indexer, arch, shape)
        self.arch = arch

    def heads(
        self,
        x_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
        *,
        layer_idx: int,
    ) -> Tensor:
        """Return the concatenated outputs of all attention heads, gated or normed if they are: the input of
        `o`."""
        shape = self.shape
        leading = x_BSD.shape[:-1]
        cos_sin_SC = cos_sin(shape.rope, shape.head_dim, positions, x_BSD.dtype)
        queries_BSHC, gate_BSF, latent_BSR = self.queries(x_BSD, tap)
        q_BSHC = self._rotated("q", queries_BSHC, cos_sin_SC)
        if self.arch.queries_grow(shape):
            growth_S = query_growth(self.arch, positions)
            q_BSHC = q_BSHC * growth_S.to(q_BSHC.dtype).view(-1, 1, 1)
        if self.arch.learned_growth:
            growth_SH = learned_growth(self.growth_scale, self.growth_base, positions, q_BSHC.dtype)
            q_BSHC = q_BSHC * growth_SH.unsqueeze(-1)
        relative_BSHE = None
        if shape.relative is not None:
            relative_BSHE = self._relative(x_BSD)
            of_scores_S = shape.relative.growth_at(positions)
            if of_scores_S is not None:
                q_BSHC = _grown(q_BSHC, of_scores_S)
                relative_BSHE = _grown(relative_BSHE, of_scores_S)
        keys_values = self.attended(x_BSD, cos_sin_SC, attention, tap, layer_idx)
        facts = {
            "scale": self.arch.score_scale(shape) if self.arch.inverse_scale else self.arch.attn_scale,
            "softcap": self.arch.attn_softcap,
            "sinks": self.sinks if self.arch.has_sinks(shape) else None,
            "chunk": shape.chunk,
            "relative": relative_BSHE,
            "slopes": self._slopes(q_BSHC.device),
            "source": shape.kv_source if keys_values[0] is None else None,
            "kept": True if layer_idx in self.arch.kv_sources and shape.latent is None else None,
        }
        rare: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
        rare |= self.choice(x_BSD, latent_BSR, positions, attention, layer_idx)
        out_BSHC = attention(layer_idx, q_BSHC, *keys_values, window=shape.window, **rare)
        out_BSHC = out_BSHC[..., : shape.value_dim]
        if shape.out_norm:
            out_BSHC = unit_norm(out_BSHC, self.arch.norm_eps)
        if shape.head_gate is not None:
            gate_BSH = activation(shape.head_gate, self.head_gate(x_BSD).to(torch.float32))
            out_BSHC = out_BSHC * gate_BSH.to(out_BSHC.dtype).unsqueeze(-1)
        out_BSF = out_BSHC.reshape(*leading, -1)
        if shape.sub_norms:
            return self.sub_norm(out_BSF)
        return out_BSF if gate_BSF is None else gated(OUTPUT_GATE, gate_BSF, out_BSF)

    def queries(self, x_BSD: Tensor, tap: Tap = no_tap) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the queries [B, S, H, C], normed where norms come first, and not rotated; the output gate
        [B, S, F] before its function, None where there is none; and the normed latent of queries [B, S, R],
        None where they have none."""
        del tap
        return self._heads_of("q", self._clipped(self.q(x_BSD))), self._output_gate(x_BSD), None

    def _output_gate(self, x_BSD: Tensor) -> Tensor | None:
        """Return what `gate` computes of the input of attention."""
        return self.gate(x_BSD) if self.shape.output_gate else None

    def choice(
        self,
        x_BSD: Tensor,
        latent_BSR: Tensor | None,
        positions: Tensor,
        attention: AttentionFn,
        layer_idx: int,
    ) -> dict[str, Any]:
        """Return what `attention` takes to attend to chosen keys; nothing where it attends to all. An indexer
        reads the input of attention, and over latents the normed one of its queries."""
        del latent_BSR, attention, layer_idx
        indexer = self.shape.block_indexer
        if indexer is None or indexer.top_k >= self.arch.max_position:
            return {}
        index_keys, choose = self.indexer(x_BSD, positions)
        return {"index_keys": index_keys, "choose": choose}

    def attended(
        self,
        x_BSD: Tensor,
        cos_sin_SC: tuple[Tensor, Tensor],
        attention: AttentionFn,
        tap: Tap,
        layer_idx: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the keys and values of this call, none where `attention` has them of another layer."""
        if self.shape.kv_source is not None:
            return None, None
        return self.keys_values(x_BSD, cos_sin_SC, tap, attention, layer_idx)

    def keys_values(
        self,
        x_BSD: Tensor,
        cos_sin_SC: tuple[Tensor, Tensor],
        tap: Tap = no_tap,
        attention: AttentionFn | None = None,
        layer_idx: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return what a cache stores: keys [B, S, K, C], normed and rotated, and values [B, S, K, C], which
        zeros fill up to C where they are narrower. Convolutions go on from what `attention` has of the
        layer."""
        del tap
        k_BSF = self._clipped(self.k(x_BSD))
        v_BSF = k_BSF if self.shape.keys_are_values else self._clipped(self.v(x_BSD))
        if self.shape.residual_convs is not None:
            k_BSF = self.k_conv.added(k_BSF, attention, layer_idx)
            v_BSF = self.v_conv.added(v_BSF, attention, layer_idx)
        v_BSKC = v_BSF.unflatten(-1, (-1, self.shape.value_dim))
        if self.arch.v_norm:
            v_BSKC = unit_norm(v_BSKC, self.arch.norm_eps)
        if self.shape.value_dim < self.shape.head_dim:
            v_BSKC = F.pad(v_BSKC, (0, self.shape.head_dim - self.shape.value_dim))
        return self._rotated("k", self._heads_of("k", k_BSF), cos_sin_SC), v_BSKC

    def _relative(self, x_BSD: Tensor) -> Tensor:
        """Return the terms of scores by the distance of keys [B, S, H, E]."""
        assert self.shape.relative is not None
        states_BSHR = self.relative(x_BSD).unflatten(-1, (-1, self.shape.relative.rank))
        terms_BSHE: Tensor = states_BSHR @ self.profiles.to(states_BSHR.dtype)
        return terms_BSHE

    def _clipped(self, x: Tensor) -> Tensor:
        """Return the output of a linear of queries, keys or values within the bounds of the model."""
        clip = self.arch.qkv_clip
        return x if clip is None else x.clamp(-clip, clip)

    def _slopes(self, device: torch.device) -> Tensor | None:
        """Return the slopes by which scores fall with the distance of keys [H], None where they do not."""
        alibi = self.shape.alibi
        if alibi is None:
            return None
        return alibi.slopes(self.shape.num_heads, self.arch.score_scale(self.shape)).to(device)

    def _rotated(self, name: str, x: Tensor, cos_sin_SC: tuple[Tensor, Tensor]) -> Tensor:
        """Return queries or keys [..., C] rotated, and normed where norms come last."""
        x = rotate(in_halves(x, self.shape.leading_dim), *cos_sin_SC)
        return self.get_submodule(f"{name}_norm")(x) if self.arch.norms_rotated else x

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        """Return queries or keys [..., F] by head, normed where norms come first, and not rotated."""
        if self.arch.qk_norm and self.arch.whole_qk_norm:
            x = self.get_submodule(f"{name}_norm")(x)
        x = x.unflatten(-1, (-1, self.shape.head_dim))
        if self.arch.qk_norm and not (self.arch.whole_qk_norm or self.arch.rotates_first):
            x = self.get_submodule(f"{name}_norm")(x)
        return unit_norm(x, self.arch.norm_eps) if self.arch.has_unit_qk_norm(self.shape) else x


class LatentAttention(Attention):
    """Attention whose queries, keys and values are linears of latents (`latent.py`). Where layers share the
    latents of keys and values, `attention` keeps those of this call; each layer computes keys and values of
    its own from them."""

    q_down: nn.Linear
    q_up: nn.Linear
    kv_down: nn.Linear
    kv_up: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, latent: Latent) -> None:
        super().__init__(arch, shape)
        self.latent = latent
        for name, size in shape.latent_norm_sizes.items():
            scale = latent.scale_of(name, arch.hidden_size)
            self.add_module(name.removeprefix("attn."), Norm(size, arch.latent_eps, scale=scale))
        self.indexer: TokenIndexer
        if latent.indexer is not None:
            sizes = {"hidden_size": arch.hidden_size, "q_rank": latent.q_rank}
            self.indexer = TokenIndexer(latent.indexer, shape.rope, latent.rope_dim, **sizes)

    def queries(self, x_BSD: Tensor, tap: Tap = no_tap) -> tuple[Tensor, Tensor | None, Tensor | None]:
        head_dim = self.shape.head_dim
        if not self.latent.q_rank:
            return self.latent.queries(self.q(x_BSD), head_dim), self._output_gate(x_BSD), None
        latent_BSR = self.q_down(x_BSD)
        normed_BSR = self.get_submodule("q_latent_norm")(latent_BSR)
        read_BSR = torch.cat((normed_BSR, latent_BSR), dim=-1) if self.latent.gated else normed_BSR
        tap(Q_LATENT, read_BSR)
        q_BSF = self.q_up(read_BSR)
        if not self.latent.gated:
            return self.latent.queries(q_BSF, head_dim), self._output_gate(x_BSD), normed_BSR
        q_BSF, gate_BSF = self.latent.split_gates(q_BSF, head_dim)
        return self.latent.queries(q_BSF, head_dim), gate_BSF, normed_BSR

    def choice(
        self,
        x_BSD: Tensor,
        latent_BSR: Tensor | None,
        positions: Tensor,
        attention: AttentionFn,
        layer_idx: int,
    ) -> dict[str, Any]:
        facts = self.latent.indexer
        if facts is None:
            source = choice_source(self.arch, layer_idx)
            if source is None or not self.arch.layers[source].index_numbers(self.arch.max_position):
                return {}
            choices = choices_of(attention)
            chooses = source in choices or self.arch.layers[source].index_numbers(x_BSD.shape[1])
            return {"chosen": choices[source]} if chooses else {}
        if facts.top_k >= self.arch.max_position:
            return {}

        read_BSR = x_BSD if facts.of_stream else latent_BSR
        assert read_BSR is not None

        def choose(keys_BPI: Tensor, seen_SP: Tensor) -> Tensor | None:
            chosen = self.indexer.choice(x_BSD, read_BSR, positions, keys_BPI, seen_SP)
            if chosen is not None and layer_idx in choice_sources(self.arch):
                choices_of(attention)[layer_idx] = chosen
            return chosen

        return {"index_keys": self.indexer.keys(x_BSD, positions), "choose": choose}

    def keys_values(
        self,
        x_BSD: Tensor,
        cos_sin_SC: tuple[Tensor, Tensor],
        tap: Tap = no_tap,
        attention: AttentionFn | None = None,
        layer_idx: int = 0,
    ) -> tuple[Tensor, Tensor]:
        del attention, layer_idx
        return self._heads_of_latents(self.latents(x_BSD), cos_sin_SC, tap)

    def attended(
        self,
        x_BSD: Tensor,
        cos_sin_SC: tuple[Tensor, Tensor],
        attention: AttentionFn,
        tap: Tap,
        layer_idx: int,
    ) -> tuple[Tensor, Tensor]:
        source = self.shape.kv_source
        latents = self.latents(x_BSD) if source is None else kept_by(attention)[source]
        if layer_idx in self.arch.kv_sources:
            kept_by(attention)[layer_idx] = latents
        return self._heads_of_latents(latents, cos_sin_SC, tap)

    def latents(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed latents of keys and values [B, S, R], and the dimensions that all keys share
        [B, S, P], normed if they are, and not rotated."""
        sizes = [self.latent.kv_rank, self.latent.rope_dim]
        latent_BSR, rotated_BSP = self.kv_down(x_BSD).split(sizes, dim=-1)
        if self.latent.rope_norm:
            rotated_BSP = self.get_submodule("rope_norm")(rotated_BSP)
        return self.get_submodule("kv_latent_norm")(latent_BSR), rotated_BSP

    def _heads_of_latents(
        self, latents: tuple[Tensor, Tensor], cos_sin_SC: tuple[Tensor, Tensor], tap: Tap
    ) -> tuple[Tensor, Tensor]:
        """Return the keys [B, S, H, C], rotated, and the values of latents."""
        latent_BSR, rotated_BSP = latents
        tap(KV_LATENT, latent_BSR)
        k_BSHC, v_BSHC = self.latent.keys_values(self.kv_up(latent_BSR), rotated_BSP, self.shape.head_dim)
        return rotate(k_BSHC, *cos_sin_SC), v_BSHC


def _grown(x_BSHX: Tensor, growth_S: Tensor) -> Tensor:
    """Return queries, or terms of their scores, times the factor of their position, which is float32."""
    wide = torch.promote_types(torch.float32, x_BSHX.dtype)
    return (x_BSHX.to(wide) * growth_S.view(-1, 1, 1)).to(x_BSHX.dtype)

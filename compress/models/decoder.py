"""The canonical decoder: the one module tree into which every checkpoint is brought.

    h = embed(tokens)
    per layer:  h = h + o(attention(rope(q), rope(k), v)),  q, k, v = linears of attn_norm(h)
                h = h + down(act(gate(x)) * up(x)),         x = ffn_norm(h)
    logits = head(norm(h))

q, k and v may be normed, and v may be what k is before its norm. RMSNorm (arXiv 1910.07467), grouped queries
(arXiv 2305.13245), gated FFN (arXiv 2002.05202); the gates are silu or gelu. Norms may follow the halves of a
layer instead, or as well, the halves may run side by side (`Arch.block`), and a layer may multiply its output
by a number. A mixture of experts (`moe.py`) may take the place of the FFN. Linears are separate (q, k, v, o,
gate, up, down) so that a method sees each one. Calibration, training and the golden tests run this forward;
the serving runtime has its own fused step, which is tested against it. Not supported: dropout,
encoder-decoder.

Shapes: B batch, S sequence, D hidden, H heads, K kv heads, C head dimension, F ffn, V vocabulary, O out,
I in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import AttentionFn, FullAttention
from compress.models.ffn import Ffn
from compress.models.layer_shape import LayerShape, LinearGroup
from compress.models.linear import linear_of
from compress.models.moe import Moe
from compress.models.norms import final_norm, norm_of, unit_norm
from compress.models.rope import cos_sin, rotate
from compress.models.tap import Tap, no_tap


@dataclass(frozen=True)
class SmoothingPair:
    """A producer whose output channels may be divided by s while the columns of the `linears` that read
    `tap` are multiplied by s.

    `producer` is a norm (its weight is divided) or a linear (its rows and bias are). With grouped queries
    the columns of `o` repeat the channels of `v`: column h * C + c reads channel (h // repeat) * C + c,
    so one s serves `repeat` query heads. `offset` is what the norm adds to its weight.
    """

    producer: str
    tap: str
    linears: tuple[str, ...]
    head_dim: int = 0
    repeat: int = 1
    offset: float = 0.0


def embedded(arch: Arch, embed_VD: Tensor, tokens: Tensor) -> Tensor:
    """Return the embeddings [..., D] of token ids. Their scale is rounded to their dtype first, as
    `transformers` does: that of Gemma's bfloat16 models with 3072 channels is 55.5, not 55.4."""
    x = F.embedding(tokens, embed_VD)
    if arch.embed_scale == 1:
        return x
    return x * torch.full((), arch.embed_scale, dtype=x.dtype, device=x.device)


def capped(arch: Arch, logits: Tensor) -> Tensor:
    """Return the logits of a model from the products with its head."""
    cap = arch.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


class Embedding(nn.Embedding):
    """The embedding of a model, with its scale."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch.vocab_size, arch.hidden_size)
        self.arch = arch

    def forward(self, tokens: Tensor) -> Tensor:
        return embedded(self.arch, self.weight, tokens)


class Attention(nn.Module):
    """Attention with its linears; `v` is absent where the keys are the values."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        for group in shape.attention_groups:
            for linear in group.linears:
                self.add_module(linear.removeprefix("attn."), linear_of(arch, shape, linear))
        if arch.qk_norm:
            q_size, k_size = arch.qk_norm_sizes(shape)
            self.q_norm = norm_of(arch, q_size)
            self.k_norm = norm_of(arch, k_size)
        if arch.attn_sinks:
            self.sinks = nn.Parameter(torch.zeros(shape.num_heads))
        self.arch = arch

    def forward(
        self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, layer_idx: int, tap: Tap
    ) -> Tensor:
        tap("attn_in", x_BSD)
        out = self.heads(x_BSD, positions, attention, layer_idx=layer_idx)
        tap("attn_out", out)
        return self.o(out)

    def heads(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, *, layer_idx: int) -> Tensor:
        """Return the concatenated outputs of all attention heads: the input of `o`."""
        shape = self.shape
        leading = x_BSD.shape[:-1]
        q_BSHC = self._heads_of("q", self.q(x_BSD))
        cos_sin_SC = cos_sin(shape.rope, shape.head_dim, positions, x_BSD.dtype)
        q_BSHC = rotate(q_BSHC, *cos_sin_SC)
        if self.arch.queries_grow(shape):
            growth_S = query_growth(self.arch, positions)
            q_BSHC = q_BSHC * growth_S.to(q_BSHC.dtype).view(-1, 1, 1)
        k_BSKC, v_BSKC = self.keys_values(x_BSD, cos_sin_SC)
        facts = {
            "scale": self.arch.attn_scale,
            "softcap": self.arch.attn_softcap,
            "sinks": self.sinks if self.arch.attn_sinks else None,
            "chunk": shape.chunk,
        }
        rare: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
        out_BSHC = attention(layer_idx, q_BSHC, k_BSKC, v_BSKC, window=shape.window, **rare)
        return out_BSHC.reshape(*leading, -1)

    def keys_values(self, x_BSD: Tensor, cos_sin_SC: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what a cache stores: keys [B, S, K, C], normed and rotated, and values [B, S, K, C]."""
        k_BSF = self.k(x_BSD)
        v_BSF = k_BSF if self.shape.keys_are_values else self.v(x_BSD)
        v_BSKC = v_BSF.unflatten(-1, (-1, self.shape.head_dim))
        if self.arch.v_norm:
            v_BSKC = unit_norm(v_BSKC, self.arch.norm_eps)
        return rotate(self._heads_of("k", k_BSF), *cos_sin_SC), v_BSKC

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        """Return queries or keys [..., F] by head, normed and not rotated."""
        if self.arch.qk_norm and self.arch.whole_qk_norm:
            x = self.get_submodule(f"{name}_norm")(x)
        x = x.unflatten(-1, (-1, self.shape.head_dim))
        if self.arch.qk_norm and not self.arch.whole_qk_norm:
            x = self.get_submodule(f"{name}_norm")(x)
        return unit_norm(x, self.arch.norm_eps) if self.arch.has_unit_qk_norm(self.shape) else x


def query_growth(arch: Arch, positions: Tensor) -> Tensor:
    """Return the factor of the query at each position in layers whose queries grow, float32."""
    assert arch.query_growth is not None
    factor, num_positions = arch.query_growth
    return 1 + factor * torch.log(1 + torch.floor((positions + arch.growth_offset) / num_positions))


@dataclass(frozen=True)
class ExpertHalf:
    """The half-layer of a mixture of experts, end(x + scale * post(moe(norm(x)))). Its linears have taps of
    two stages: before the gates and ups, and before the downs."""

    stages: tuple[tuple[LinearGroup, ...], tuple[LinearGroup, ...]]
    norm: Callable[[Tensor], Tensor]
    moe: Moe
    post: Callable[[Tensor], Tensor]
    scale: float
    end: Callable[[Tensor], Tensor]

    def enter(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Run to all taps; return x."""
        self.moe(self.norm(x_BSD), tap)
        return x_BSD

    def pass_through(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Run the whole half-layer."""
        return self.end(add_scaled(x_BSD, self.post(self.moe(self.norm(x_BSD), tap)), self.scale))


@dataclass(frozen=True)
class HalfLayer:
    """end(x + scale * post(out(inner(norm(x))))), attention or the FFN of a layer, with what its two taps
    part."""

    taps: tuple[str, str]
    norm: Callable[[Tensor], Tensor]
    inner: Callable[[Tensor, Tensor, AttentionFn], Tensor]
    out: nn.Linear
    post: Callable[[Tensor], Tensor]
    scale: float
    end: Callable[[Tensor], Tensor]

    def enter(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """To the first tap; x."""
        tap(self.taps[0], self.norm(x_BSD))
        return x_BSD

    def cross(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """To the second tap; the value there."""
        value = self.inner(self.norm(x_BSD), positions, attention)
        tap(self.taps[1], value)
        return value

    def leave(self, x_BSD: Tensor, value: Tensor) -> Tensor:
        """Run a half-layer from its second tap to its end."""
        return self.end(add_scaled(x_BSD, self.post(self.out(value)), self.scale))

    def pass_through(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Run a whole half-layer, through both taps."""
        return self.leave(x_BSD, self.cross(x_BSD, positions, attention, tap))


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return x + scale * y."""
    return x + y if scale == 1 else x + y * scale


class DecoderLayer(nn.Module):
    """One decoder layer. `linear(name)` and the parameter names are the canonical ones relative to the layer
    (`attn.q`, `ffn.down`, ...). Norms that its block does not have are identities."""

    def __init__(self, arch: Arch, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.arch = arch
        self.shape = arch.layers[layer_idx]
        norm_over_hidden = partial(norm_of, arch, arch.hidden_size)
        has_pre = arch.block != "post"
        has_post = arch.block in ("post", "sandwich")

        def norm(exists: bool) -> nn.Module:
            return norm_over_hidden() if exists else nn.Identity()

        self.attn_norm = norm(has_pre)
        self.attn = Attention(arch, self.shape)
        self.attn_post_norm = norm(has_post)
        experts = self.shape.experts
        norms_apart = experts is not None and experts.branch_norms
        self.ffn_norm = norm(has_pre and not self.is_parallel and not norms_apart)
        if experts is None:
            self.ffn = Ffn(arch, self.shape)
        else:
            self.moe = Moe(experts, arch.hidden_size, partial(Ffn, arch, self.shape), norm_over_hidden)
        self.ffn_post_norm = norm(has_post)
        if arch.layer_scalar:
            self.layer_scalar = nn.Parameter(torch.ones(1))

    @property
    def is_parallel(self) -> bool:
        """Whether both halves read the same input."""
        return self.arch.block == "parallel"

    def forward(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap = no_tap) -> Tensor:
        scale = self.arch.residual_scale
        normed_BSD = self.attn_norm(x_BSD)
        attended_BSD = self.attn(normed_BSD, positions, attention, self.layer_idx, tap)
        x_BSD = add_scaled(x_BSD, self.attn_post_norm(attended_BSD), scale)
        ffn = self.ffn if self.shape.experts is None else self.moe
        ffn_BSD = ffn(normed_BSD if self.is_parallel else self.ffn_norm(x_BSD), tap)
        return self._end(add_scaled(x_BSD, self.ffn_post_norm(ffn_BSD), scale))

    def _end(self, x_BSD: Tensor) -> Tensor:
        """Return the output of the layer from the stream after its last half."""
        return x_BSD * self.layer_scalar if self.arch.layer_scalar else x_BSD

    def halves(self) -> tuple[HalfLayer, HalfLayer | ExpertHalf]:
        """Return the two half-layers, attention and FFN, that `forward` runs one after the other; a layer
        whose halves run side by side has none."""
        assert not self.is_parallel
        heads = partial(self.attn.heads, layer_idx=self.layer_idx)
        scale = self.arch.residual_scale
        attention = HalfLayer(
            ("attn_in", "attn_out"),
            self.attn_norm,
            heads,
            self.attn.o,
            self.attn_post_norm,
            scale,
            end=lambda x_BSD: x_BSD,
        )
        if self.shape.experts is not None:
            of_moe = self.shape.groups[2:]
            stages = tuple(
                tuple(group for group in of_moe if group.name.endswith(end)) for end in ("gate_up", "down")
            )
            return attention, ExpertHalf(
                (stages[0], stages[1]), self.ffn_norm, self.moe, self.ffn_post_norm, scale, self._end
            )
        return (
            attention,
            HalfLayer(
                ("ffn_in", "ffn_mid"),
                self.ffn_norm,
                lambda x_BSD, positions, attention: self.ffn.gated(x_BSD),
                self.ffn.down,
                self.ffn_post_norm,
                scale,
                self._end,
            ),
        )

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
        qkv, _, *others = self.shape.groups
        v_to_o = self._value_pairs()
        if self.shape.experts is not None:
            return self._expert_pairs(v_to_o)
        gate_up, down = others
        up_to_down = SmoothingPair("ffn.up", down.tap, down.linears)
        if self.arch.block in ("post", "parallel"):
            # Nothing before q, k and v and before gate and up belongs to one of them alone.
            return [*v_to_o, up_to_down]
        return [
            SmoothingPair("attn_norm", qkv.tap, qkv.linears, offset=self.arch.norm_offset),
            *v_to_o,
            SmoothingPair("ffn_norm", gate_up.tap, gate_up.linears, offset=self.arch.norm_offset),
            up_to_down,
        ]

    def _value_pairs(self) -> list[SmoothingPair]:
        """Return the pair of v and o. There is none where the values are normed, which would undo a part of
        the scale, or are the keys, too, which would be scaled with them."""
        if self.shape.keys_are_values or self.arch.v_norm:
            return []
        o = self.shape.attention_groups[1]
        repeat = self.shape.num_heads // self.shape.num_kv_heads
        return [SmoothingPair("attn.v", o.tap, o.linears, head_dim=self.shape.head_dim, repeat=repeat)]

    def _expert_pairs(self, v_to_o: list[SmoothingPair]) -> list[SmoothingPair]:
        """Return the pairs of a mixture of experts. The norm before it is in none, because the router reads
        it, too, and its columns would change; nor is an `up` that is clamped."""
        qkv = self.shape.groups[0]
        pairs = list(v_to_o)
        if self.arch.block not in ("post", "parallel"):
            pairs.insert(0, SmoothingPair("attn_norm", qkv.tap, qkv.linears, offset=self.arch.norm_offset))
        if self.arch.activation == "swiglu_clamped":
            return pairs
        downs = [group for group in self.shape.groups if group.name.endswith(".down")]
        return [
            *pairs,
            *(
                SmoothingPair(f"{down.linears[0].removesuffix('.down')}.up", down.tap, down.linears)
                for down in downs
            ),
        ]


class Decoder(nn.Module):
    """The whole model. Its parameters have the canonical names that checkpoints are imported to and exported
    from."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embed = Embedding(arch)
        self.layers = nn.ModuleList(DecoderLayer(arch, idx) for idx in range(arch.num_layers))
        self.norm = final_norm(arch)
        self.head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
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
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, positions, attend)
        return self.norm(x_BSD)

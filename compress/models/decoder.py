"""The canonical decoder: the one module tree into which every checkpoint is brought.

    h = embed(tokens)
    per layer:  h = h + o(attention(rope(q), rope(k), v)),  q, k, v = linears of attn_norm(h)
                h = h + down(act(gate(x)) * up(x)),         x = ffn_norm(h)
    logits = head(norm(h))

q and k may be normed per head. Pre-norm, RMSNorm (arXiv 1910.07467), grouped queries (arXiv 2305.13245),
gated FFN (arXiv 2002.05202); the gates are silu or gelu. Linears are separate (q, k, v, o, gate, up,
down) so that a method sees each one. Calibration, training and the golden tests run this forward; the
serving runtime has its own fused step, which is tested against it. Not supported: dropout, parallel
residuals, encoder-decoder, experts.

Shapes: B batch, S sequence, D hidden, H heads, K kv heads, C head dimension, F ffn, V vocabulary, O out,
I in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch, LayerShape, LinearGroup
from compress.models.attention import AttentionFn, FullAttention
from compress.models.norm_gradient import norm_cpu
from compress.models.rope import cos_sin, rotate

Tap = Callable[[str, Tensor], None]
"""A hook that is called with (tap name, input of a linear group); the names are attn_in, attn_out, ffn_in
and ffn_mid."""


def no_tap(name: str, x: Tensor) -> None:
    """Ignore the input: the tap of a forward that nobody observes."""


def activation(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_pytorch_tanh" else "none")


@dataclass(frozen=True)
class SmoothingPair:
    """A producer whose output channels may be divided by s while the columns of the `linears` that read
    `tap` are multiplied by s.

    `producer` is a norm (its weight is divided) or a linear (its rows and bias are). With grouped queries
    the columns of `o` repeat the channels of `v`: column h * C + c reads channel (h // repeat) * C + c,
    so one s serves `repeat` query heads.
    """

    producer: str
    tap: str
    linears: tuple[str, ...]
    head_dim: int = 0
    repeat: int = 1


class Linear(nn.Linear):
    """A linear whose weight may have fewer bits than its input; each product widens it and discards the wide
    copy."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return norm_cpu(x, self.weight, self.eps)
        x_f32 = x.to(torch.float32)
        normed = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        for name in ("q", "k", "v", "o"):
            self.add_module(name, _linear(arch, shape, f"attn.{name}"))
        if arch.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, arch.norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, arch.norm_eps)
        self.qk_norm = arch.qk_norm

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
        q_BSHC = self.q(x_BSD).view(*leading, shape.num_heads, shape.head_dim)
        if self.qk_norm:
            q_BSHC = self.q_norm(q_BSHC)
        cos_sin_SC = cos_sin(shape.rope, shape.head_dim, positions, x_BSD.dtype)
        q_BSHC = rotate(q_BSHC, *cos_sin_SC)
        k_BSKC, v_BSKC = self.keys_values(x_BSD, cos_sin_SC)
        return attention(layer_idx, q_BSHC, k_BSKC, v_BSKC, window=shape.window).reshape(*leading, -1)

    def keys_values(self, x_BSD: Tensor, cos_sin_SC: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what a cache stores: keys [B, S, K, C], normed and rotated, and values [B, S, K, C]."""
        shape = self.shape
        k_BSKC, v_BSKC = (
            each(x_BSD).view(*x_BSD.shape[:-1], shape.num_kv_heads, shape.head_dim)
            for each in (self.k, self.v)
        )
        if self.qk_norm:
            k_BSKC = self.k_norm(k_BSKC)
        return rotate(k_BSKC, *cos_sin_SC), v_BSKC


class Ffn(nn.Module):
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape) -> None:
        super().__init__()
        for name in ("gate", "up", "down"):
            self.add_module(name, _linear(arch, shape, f"ffn.{name}"))
        self.activation = arch.activation

    def forward(self, x_BSD: Tensor, tap: Tap) -> Tensor:
        tap("ffn_in", x_BSD)
        mid_BSF = self.gated(x_BSD)
        tap("ffn_mid", mid_BSF)
        return self.down(mid_BSF)

    def gated(self, x_BSD: Tensor) -> Tensor:
        """Return the input of `down`."""
        return activation(self.activation, self.gate(x_BSD)) * self.up(x_BSD)


@dataclass(frozen=True)
class HalfLayer:
    """x + out(inner(norm(x))), attention or the FFN of a layer, with what its two taps part."""

    taps: tuple[str, str]
    norm: nn.Module
    inner: Callable[[Tensor, Tensor, AttentionFn], Tensor]
    out: nn.Linear

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
        return x_BSD + self.out(value)

    def pass_through(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        """Run a whole half-layer, through both taps."""
        return self.leave(x_BSD, self.cross(x_BSD, positions, attention, tap))


class DecoderLayer(nn.Module):
    """One decoder layer. `linear(name)` and the parameter names are the canonical ones relative to the layer
    (`attn.q`, `ffn.down`, ...)."""

    def __init__(self, arch: Arch, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.shape = arch.layers[layer_idx]
        self.attn_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attn = Attention(arch, self.shape)
        self.ffn_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.ffn = Ffn(arch, self.shape)

    def forward(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap = no_tap) -> Tensor:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), positions, attention, self.layer_idx, tap)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD), tap)

    def halves(self) -> tuple[HalfLayer, HalfLayer]:
        """Return the two half-layers, attention and FFN, that `forward` runs one after the other."""
        heads = partial(self.attn.heads, layer_idx=self.layer_idx)
        return (
            HalfLayer(("attn_in", "attn_out"), self.attn_norm, heads, self.attn.o),
            HalfLayer(
                ("ffn_in", "ffn_mid"),
                self.ffn_norm,
                lambda x_BSD, positions, attention: self.ffn.gated(x_BSD),
                self.ffn.down,
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
        qkv, o, gate_up, down = self.shape.groups
        head_dim = self.shape.head_dim
        repeat = self.shape.num_heads // self.shape.num_kv_heads
        return [
            SmoothingPair("attn_norm", qkv.tap, qkv.linears),
            SmoothingPair("attn.v", o.tap, o.linears, head_dim=head_dim, repeat=repeat),
            SmoothingPair("ffn_norm", gate_up.tap, gate_up.linears),
            SmoothingPair("ffn.up", down.tap, down.linears),
        ]


class Decoder(nn.Module):
    """The whole model. Its parameters have the canonical names that checkpoints are imported to and exported
    from."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embed = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(arch, idx) for idx in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        if arch.tied_head:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens_BS: Tensor, positions: Tensor | None = None, attention: AttentionFn | None = None
    ) -> Tensor:
        """Return logits [B, S, V]. Positions default to 0..S-1, attention to the whole sequence."""
        return self.head(self.hidden(tokens_BS, positions, attention))

    def hidden(
        self, tokens_BS: Tensor, positions: Tensor | None = None, attention: AttentionFn | None = None
    ) -> Tensor:
        """Final normed hidden states [B, S, D]."""
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        attend = attention if attention is not None else FullAttention()
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, positions, attend)
        return self.norm(x_BSD)


def _linear(arch: Arch, shape: LayerShape, name: str) -> nn.Linear:
    rows, columns = shape.linear_shape(name, arch.hidden_size)
    return Linear(columns, rows, bias=arch.has_bias(name))

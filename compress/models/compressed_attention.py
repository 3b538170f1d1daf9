"""Compressed attention in the canonical decoder (`compressed.py` has the arithmetic).

What a cache holds of a position is its key, which is the value, and what entries are computed of: entries
are computed anew from all positions in each call. Where an indexer chooses entries, contexts are so short
that it chooses all of them (`Arch.max_position`), and its parameters are carried along.

Shapes: B batch, S sequence, D hidden, H heads, C head dimension, R dimensions that rotate, P positions of a
cache, E entries, F numbers of a position that a compressor computes, O outputs of a linear, G groups.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import AttentionFn
from compress.models.compressed import OUT_TAP, Compressed, entries, turned
from compress.models.indexer import IndexerParameters
from compress.models.latent import Q_LATENT
from compress.models.layer_shape import LayerShape, Rope
from compress.models.linear import Linear, linear_of
from compress.models.norms import Norm, unit_norm
from compress.models.rope import cos_sin
from compress.models.tap import Tap, no_tap
from compress.models.token_mixer import TokenMixer


class Compressor(nn.Module):
    """The linears, the parameter for places and the norm by which entries are computed."""

    def __init__(self, facts: Compressed, hidden_size: int, head_dim: int, eps: float) -> None:
        super().__init__()
        width = facts.num_series * head_dim
        self.facts = facts
        self.kv = Linear(hidden_size, width, bias=False)
        self.gate = Linear(hidden_size, width, bias=False)
        self.positions = nn.Parameter(torch.zeros(facts.rate, width))
        self.norm = Norm(head_dim, eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the numbers [B, S, F] of which entries are computed."""
        return torch.cat((self.kv(x_BSD), self.gate(x_BSD)), dim=-1)

    def entries(self, raw_BPF: Tensor, rope: Rope | None) -> Tensor:
        """Return the entries [B, E, C] of positions from the first on, normed and turned."""
        summed = entries(self.facts, raw_BPF, self.positions).to(raw_BPF.dtype)
        starts_E = torch.arange(summed.shape[1], device=summed.device) * self.facts.rate
        angles = cos_sin(rope, self.facts.rope_dim, starts_E, summed.dtype)
        return turned(self.norm(summed).unsqueeze(-2), angles).squeeze(-2)


class CompressedAttention(TokenMixer):
    """Attention to the positions of a window and to compressed entries."""

    q_down: nn.Linear
    q_up: nn.Linear
    kv: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, facts: Compressed) -> None:
        super().__init__()
        self.arch = arch
        self.shape = shape
        self.facts = facts
        for name in ("q_down", "q_up", "kv", "o"):
            self.add_module(name, linear_of(arch, shape, f"attn.{name}"))
        self.o_down = nn.ModuleList(linear_of(arch, shape, name) for name in facts.out_linears)
        self.q_latent_norm = Norm(facts.q_rank, arch.norm_eps)
        self.kv_norm = Norm(shape.head_dim, arch.norm_eps)
        self.sinks = nn.Parameter(torch.zeros(shape.num_heads))
        if facts.rate:
            self.compressor = Compressor(facts, arch.hidden_size, shape.head_dim, arch.norm_eps)
        if facts.indexer is not None:
            self.indexer = IndexerParameters(facts.indexer.dense_shapes(arch.hidden_size, facts.q_rank))

    def heads(
        self,
        x_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
        *,
        layer_idx: int,
    ) -> Tensor:
        """Return the outputs of all `o_down` [B, S, G O]: the input of `o`."""
        rope = self.shape.rope
        cos_sin_SR = cos_sin(rope, self.facts.rope_dim, positions, x_BSD.dtype)
        latent_BSO = self.q_latent_norm(self.q_down(x_BSD))
        tap(Q_LATENT, latent_BSO)
        q_BSHC = self.q_up(latent_BSO).unflatten(-1, (-1, self.shape.head_dim))
        q_BSHC = turned(unit_norm(q_BSHC, self.arch.norm_eps), cos_sin_SR)
        cached_BS1F = turned(self.kv_norm(self.kv(x_BSD)).unsqueeze(-2), cos_sin_SR)
        of_entries: dict[str, Any] = {}
        if self.facts.rate:
            raw_BS1F = self.compressor(x_BSD).unsqueeze(-2)
            cached_BS1F = torch.cat((cached_BS1F, raw_BS1F), dim=-1)
            compress = partial(self.compressor.entries, rope=rope)
            of_entries = {"compress": compress, "rate": self.facts.rate}
        out_BSHC = attention(
            layer_idx,
            q_BSHC,
            cached_BS1F,
            cached_BS1F,
            window=self.shape.window,
            scale=self.shape.head_dim**-0.5,
            sinks=self.sinks,
            **of_entries,
        )
        out_BSHC = turned(out_BSHC, cos_sin_SR, back=True)
        groups = out_BSHC.flatten(-2).chunk(self.facts.out_groups, dim=-1)
        outputs = []
        for idx, (linear, group_BSF) in enumerate(zip(self.o_down, groups, strict=True)):
            tap(f"{OUT_TAP}.{idx}", group_BSF)
            outputs.append(linear(group_BSF))
        return torch.cat(outputs, dim=-1)

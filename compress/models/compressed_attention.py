"""Compressed attention in the canonical decoder (`compressed.py` has the arithmetic).

What a cache holds of a position is its key, which is the value, and what entries are computed of, those that
an indexer scores among them: entries are computed anew from all positions in each call. An indexer computes
nothing more where it chooses every entry.

Shapes: B batch, S sequence, D hidden, H heads, C head dimension, R dimensions that rotate, P positions of a
cache, E entries, F numbers of a position that a compressor computes, O outputs of a linear, G groups, N heads
and I head dimension of an indexer.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import AttentionFn
from compress.models.chosen_keys import chosen_keys, index_scores
from compress.models.compressed import OUT_TAP, Compressed, entries, turned
from compress.models.indexer import EntryIndexer
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
        self.raw_width = facts.raw_width(head_dim)
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


class EntryChooser(Compressor):
    """The indexer of a layer: a compressor of the entries that it scores, and the linears of its queries and
    of the weights of its heads."""

    def __init__(self, facts: Compressed, indexer: EntryIndexer, hidden_size: int, eps: float) -> None:
        super().__init__(facts, hidden_size, indexer.head_dim, eps)
        self.widths = indexer
        self.q = Linear(facts.q_rank, indexer.num_heads * indexer.head_dim, bias=False)
        self.weights = Linear(hidden_size, indexer.num_heads, bias=False)

    @torch.no_grad()
    def choose(
        self,
        latent_BSO: Tensor,
        x_BSD: Tensor,
        cos_sin_SR: tuple[Tensor, Tensor],
        rope: Rope | None,
        raw_BPF: Tensor,
        seen_SE: Tensor,
    ) -> Tensor | None:
        """Return bool [B, 1, S, E], True for the entries that queries of these latents attend to, or None
        where those are all that they see. `raw_BPF` are the numbers of all positions that the cache holds,
        and this compressor's are the last of them."""
        if seen_SE.shape[-1] <= self.widths.top_entries:
            return None
        q_BSNI = turned(self.q(latent_BSO).unflatten(-1, (-1, self.widths.head_dim)), cos_sin_SR)
        weights_BSN = self.weights(x_BSD).to(torch.float32) * self.widths.score_scale
        entries_BEI = self.entries(raw_BPF[..., -self.raw_width :], rope)
        scores_BSE = index_scores(q_BSNI, entries_BEI, weights_BSN)
        return chosen_keys(scores_BSE, seen_SE, self.widths.top_entries).unsqueeze(1)


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
            self.indexer = EntryChooser(facts, facts.indexer, arch.hidden_size, arch.norm_eps)

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
            raw = [self.compressor(x_BSD)]
            of_entries = {"compress": partial(self._entries, rope), "rate": self.facts.rate}
            if self.facts.indexer is not None:
                raw.append(self.indexer(x_BSD))
                of_entries["choose"] = partial(self.indexer.choose, latent_BSO, x_BSD, cos_sin_SR, rope)
            cached_BS1F = torch.cat((cached_BS1F, *(each.unsqueeze(-2) for each in raw)), dim=-1)
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

    def _entries(self, rope: Rope | None, raw_BPF: Tensor) -> Tensor:
        """Return the entries [B, E, C] that queries attend to."""
        return self.compressor.entries(raw_BPF[..., : self.compressor.raw_width], rope)

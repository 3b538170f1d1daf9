"""Statistics of the inputs of a layer's linears over all samples, summed in the fixed order that `stats.py`
defines.

A rank observes its own shards. The partial sums of a linear group are then sent to the rank that compresses
the group, which finishes the tree of merges; the tree is the same whichever rank computed its parts
(`stats.MergeTree`).

Shapes: N samples, B of them at once, S sequence, T = B S tokens, D features.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from compress.calibrate.experts import (
    DEFAULT_POLICY,
    ExpertPolicy,
    Tokens,
    TokenSample,
    complete_starved,
    expert_of,
    layer_kinds,
)
from compress.calibrate.kv import Forward
from compress.calibrate.layer_run import LayerRun
from compress.calibrate.samples import Samples
from compress.calibrate.side_inputs import SideInputs
from compress.calibrate.stats import (
    AbsMax,
    InputStats,
    MergeTree,
    Node,
    Range,
    SourceStat,
    Stat,
    StatFactory,
)
from compress.context import OneRank, Ranks
from compress.models.attention import AttentionFn, FullAttention
from compress.models.decoder import DecoderLayer
from compress.models.experts import ALL_TOKENS
from compress.models.linear_groups import LinearGroup
from compress.models.moe import TOKENS
from compress.models.tap import no_tap

Trees = dict[tuple[str, type[Stat]], MergeTree[Stat]]
"""(tap, type of the statistic) -> the sums of one rank."""
Stats = dict[str, InputStats]
"""Tap -> statistics of the input that is read there."""
TokenWeights = Mapping[str, Tensor]
"""Tap -> weight of each token in sums of squares, float32 [N, S], 1 on average; on the CPU."""
_OBSERVING = "observing a layer"


def observe(
    layer: Forward,
    run: LayerRun,
    factories: Sequence[StatFactory],
    *,
    into: Samples | None = None,
    source_layer: Forward | None = None,
    token_weights: TokenWeights | None = None,
    source_experts: DecoderLayer | None = None,
) -> Trees:
    """Run the rank's samples through `layer` and return the sums of every tap over its shards.

    Args:
        into: receives the outputs of `layer`; None drops them.
        source_layer: what the source's samples, if the run has any, go through; they are replaced by its
            outputs.
        token_weights: of the rank's samples, by tap; None, or a tap without them, weighs all tokens alike.
        source_experts: the source's layer, whose experts compute what the source has at an expert's taps, for
            the tokens that `layer` routes to it.
    """
    trees: Trees = {}
    for shard_idx, pieces in run.pieces().items():
        sums: dict[tuple[str, type[Stat]], Stat] = {}
        for piece in pieces:
            source_taps: Mapping[str, Tensor] = {}
            if source_layer is not None and run.source_samples is not None:
                source_taps = _taps_of(source_layer, run.source_samples, piece, run, run.source_samples)
            taps = _taps_of(layer, run.samples, piece, run, into)
            chosen = {name: taps.pop(name) for name in list(taps) if name.startswith(TOKENS)}
            if source_experts is not None and source_taps:
                source_taps = {**source_taps, **_source_at_experts(source_experts, taps, chosen, source_taps)}
            for tap, x_BSD in taps.items():
                weights_BS = token_weights[tap][piece] if token_weights and tap in token_weights else None
                counted_T = _counted_rows(tap, run.counted_NS, piece, chosen, x_BSD)
                rows = run.memory.retry_on_oom(
                    partial(_rows, x_BSD, source_taps.get(tap), weights_BS, counted_T), _OBSERVING
                )
                for factory in layer_kinds(tap, factories) if chosen else factories:
                    stat = factory()
                    stat = sums.setdefault((tap, type(stat)), stat)
                    if factory is Tokens:
                        seen = _tokens_of(tap, chosen, x_BSD)
                        stat.update(seen if counted_T is None else seen[counted_T])
                        continue
                    # A range must hold for tokens that do not count, too: they are served.
                    is_range = counted_T is not None and isinstance(stat, AbsMax | Range)
                    of_stat = (x_BSD.flatten(0, -2), None) if is_range else rows[stat.is_quadratic]
                    if of_stat[0].numel():  # without a token, an empty sum keeps the order of the merges
                        run.memory.retry_on_oom(partial(_update, stat, *of_stat), _OBSERVING)
        for key in list(sums):
            trees.setdefault(key, MergeTree()).push(shard_idx, sums.pop(key))
    return trees


def _counted_rows(
    tap: str, counted_NS: Tensor | None, piece: slice, chosen: Mapping[str, Tensor], x_BSD: Tensor
) -> Tensor | None:
    """Return which rows of a tap count, bool [T]; None where all do. An expert that sees some tokens has rows
    for these alone."""
    if counted_NS is None:
        return None
    counted_T = counted_NS[piece].flatten().to(x_BSD.device)
    num_rows = x_BSD.numel() // x_BSD.shape[-1]
    if num_rows == len(counted_T):
        return counted_T
    return counted_T[_tokens_of(tap, chosen, x_BSD).squeeze(1)]


def _tokens_of(tap: str, chosen: Mapping[str, Tensor], x_BSD: Tensor) -> Tensor:
    """Return the indices of the tokens that were routed to the expert of a tap; of another tap all rows."""
    expert = expert_of(tap)
    return x_BSD.flatten(0, -2) if expert is None else chosen[f"{TOKENS}.{expert}"]


@torch.no_grad()
def _source_at_experts(
    source_layer: DecoderLayer,
    taps: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    source_taps: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return what the source has at the taps of experts, for the tokens that are observed there."""
    x_TD = source_taps[ALL_TOKENS].flatten(0, -2)
    found = dict[str, Tensor]()
    for tap, observed in taps.items():
        expert = expert_of(tap)
        if expert is None or not observed.numel():
            continue
        tokens = chosen[f"{TOKENS}.{expert}"].squeeze(1)
        x_tD = x_TD if len(observed) == len(x_TD) else x_TD[tokens]
        x_tD = source_layer.moe.input_of(expert, x_tD)
        ffn = source_layer.get_submodule(f"moe.experts.{expert}")
        found[tap] = x_tD if tap.startswith("moe_in.") else ffn.mid(x_tD)  # type: ignore[operator]
    return found


def observe_on_one_rank(
    layer: DecoderLayer,
    x_NSD: Tensor,
    factories: Sequence[type[Stat]],
    policy: ExpertPolicy = DEFAULT_POLICY,
    side_inputs: SideInputs | None = None,
) -> Stats:
    """Return the statistics of every tap over all samples, computed in this process alone; those of starved
    experts are completed."""
    trees = observe(layer, LayerRun.on_one_rank(x_NSD, side_inputs=side_inputs), factories)
    stats = gather_everywhere(trees, observed_kinds(layer, factories), OneRank())
    if layer.shape.experts is not None:
        complete_starved(stats, layer, stats[ALL_TOKENS], factories, policy)
    return stats


def observed_kinds(layer: DecoderLayer, kinds: Sequence[type[Stat]]) -> tuple[type[Stat], ...]:
    """Return the types of the statistics that an observation of a layer collects at some tap."""
    return tuple(kinds) if layer.shape.experts is None else (*kinds, Tokens, TokenSample)


def gather_layer(
    trees: Trees,
    layer: DecoderLayer,
    kinds: Sequence[type[Stat]],
    owners: Mapping[str, int],
    run: LayerRun,
    *,
    groups: Sequence[LinearGroup] | None = None,
) -> tuple[Stats, dict[int, int]]:
    """Return the finished statistics of the taps that this rank owns, and the tokens of the experts among
    them; those of starved experts are completed. `groups` are those observed, all of the layer if None.
    Empties `trees`."""
    groups = layer.groups() if groups is None else groups
    if layer.shape.experts is None or not any(tap == ALL_TOKENS for tap, _ in trees):
        return gather_to_owners(trees, groups, kinds, owners, run.ranks), {}
    everywhere = {key: trees.pop(key) for key in list(trees) if key[0] == ALL_TOKENS}
    of_layer = gather_everywhere(everywhere, observed_kinds(layer, kinds), run.ranks)
    of_experts = [group for group in groups if expert_of(group.tap) is not None]
    others = [group for group in groups if expert_of(group.tap) is None and group.tap != ALL_TOKENS]
    stats = gather_to_owners(trees, others, kinds, owners, run.ranks)
    stats |= gather_to_owners(trees, of_experts, (*kinds, Tokens), owners, run.ranks)
    if owners.get(ALL_TOKENS) == run.ranks.rank:
        stats |= of_layer
    return stats, complete_starved(stats, layer, of_layer[ALL_TOKENS], kinds, run.experts)


def _taps_of(
    layer: Forward, samples: Samples, piece: slice, run: LayerRun, into: Samples | None
) -> dict[str, Tensor]:
    """Return tap -> input [B, S, D] of a piece of samples; the layer's output is stored in `into`, if
    given."""
    x_BSD = run.memory.retry_on_oom(lambda: samples[piece], _OBSERVING)
    taps: dict[str, Tensor] = {}
    attention = run.attention(samples, piece)
    y_BSD = run.memory.retry_on_oom(lambda: forward(layer, x_BSD, taps.__setitem__, attention), _OBSERVING)
    if into is not None:
        # Without a norm before it, a tap is the samples themselves, in whose place outputs may be stored.
        for name, tap_BSD in taps.items():
            if tap_BSD.data_ptr() == x_BSD.data_ptr():
                taps[name] = tap_BSD.clone()
        into[piece] = y_BSD
    return taps


def _rows(
    x_BSD: Tensor,
    source_BSD: Tensor | None,
    weights_BS: Tensor | None,
    counted_T: Tensor | None,
) -> dict[bool, tuple[Tensor, Tensor | None]]:
    """Return the inputs of a tap and of the source's that count, [T, D]: False -> as they are, True -> times
    the roots of the token weights."""
    x_TD = x_BSD.flatten(0, -2)
    source_TD = None if source_BSD is None else source_BSD.flatten(0, -2)
    weights_T = None if weights_BS is None else weights_BS.flatten()
    if counted_T is not None and len(x_TD):  # an expert without a token has none of the source's either
        x_TD = x_TD[counted_T]
        source_TD = None if source_TD is None else source_TD[counted_T]
        weights_T = None if weights_T is None else weights_T[counted_T.to(weights_T.device)]
    if weights_T is None:
        return dict.fromkeys((False, True), (x_TD, source_TD))
    roots_T1 = weights_T.sqrt().to(x_TD).unsqueeze(1)
    return {
        False: (x_TD, source_TD),
        True: (x_TD * roots_T1, None if source_TD is None else source_TD * roots_T1),
    }


def _update(stat: Stat, x_TD: Tensor, source_TD: Tensor | None) -> None:
    """Add rows to a statistic. Statistics allocate before they add, so an update that ran out of memory can
    be tried again."""
    if isinstance(stat, SourceStat) and source_TD is not None:
        stat.update_with_source(x_TD, source_TD)
    else:
        stat.update(x_TD)


def gather_everywhere(trees: Trees, factories: Sequence[StatFactory], ranks: Ranks) -> Stats:
    """Return the finished statistics of every tap on every rank; meant for small ones. Empties `trees`."""
    kinds = [type(factory()) for factory in factories]
    own = [
        (tap, kinds.index(kind), [node.to_parts() for node in tree.nodes()])
        for (tap, kind), tree in trees.items()
    ]
    merged: Trees = {}
    for of_rank in ranks.all_gather(own):
        for tap, idx, nodes in of_rank:
            for parts in nodes:
                merged.setdefault((tap, kinds[idx]), MergeTree()).join(Node.from_parts(parts, factories[idx]))
    stats: Stats = {}
    for (tap, _), tree in merged.items():
        stats.setdefault(tap, InputStats()).add(tree.root())
    return stats


def gather_to_owners(
    trees: Trees,
    groups: Sequence[LinearGroup],
    kinds: Sequence[type[Stat]],
    owners: Mapping[str, int],
    ranks: Ranks,
) -> Stats:
    """Return the finished statistics of the taps that this rank owns; `owners` is tap -> rank. Empties
    `trees`."""
    stats: Stats = {}
    for group in groups:
        owner = owners[group.tap]
        for kind in kinds:
            tree = trees.pop((group.tap, kind), MergeTree[Stat]())
            merged = MergeTree[Stat]()
            for source in range(ranks.size):
                own = [node.to_parts() for node in tree.nodes()] if ranks.rank == source else []
                nodes = ranks.send(own, source=source, to=owner) or []
                while nodes:  # a node must not be kept here while it is merged and halved
                    merged.join(Node.from_parts(nodes.pop(0), kind))
            if ranks.rank == owner:
                stats.setdefault(group.tap, InputStats()).add(merged.root())
    return stats


def replay_(layer: Forward, samples: Samples, run: LayerRun) -> None:
    """Replace samples of the run by the outputs of the layer for them."""
    for piece in itertools.chain(*run.pieces().values()):
        samples[piece] = run.memory.retry_on_oom(
            lambda piece=piece: forward(layer, samples[piece], no_tap, run.attention(samples, piece)),
            "replaying a layer",
        )


@torch.no_grad()
def forward(
    layer: Forward, x_BSD: Tensor, tap: Callable[[str, Tensor], None], attention: AttentionFn | None = None
) -> Tensor:
    """Return the layer's output [B, S, D]; `tap` receives the inputs of its linears."""
    positions = torch.arange(x_BSD.shape[1], device=x_BSD.device)
    return layer(x_BSD, positions, FullAttention() if attention is None else attention, tap)

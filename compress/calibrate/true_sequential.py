"""A layer whose linear groups are compressed one after the other: q, k and v; then o, which reads what they
compute; then gate and up; then down.

    for each half of the layer:   observe the first tap,                              compress its linears
                                  observe the second, computed by these linears,      compress its linear
                                  x := x + that linear (second tap's value)

GPTQ's "true sequential" order (arXiv 2210.17323, in its published code): a linear also makes up for what the
linears before it in its own layer lost. Statistics that compare with the source (`SourceStat`) get the
source's activations at the same tap, computed by its own linears. Only the norms are computed twice: the
value at a second tap is kept until its linear is compressed, and the samples end as the outputs of the
compressed layer, with the bits that a replay gives.

A group is observed only after the one before it is compressed, so of several ranks one compresses at a time;
they share the observation. In a mixture of experts all gates and ups are compressed from one observation, and
then all downs, and in latent attention the linears of its input, those of the latents, and o; the half-layer
is run for each of these stages and once more to its end.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.calibrate.kv import Forward
from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import LayerPass, LayerState, needed_stats
from compress.calibrate.observe import gather_layer, gather_to_owners, observe, replay_
from compress.calibrate.samples import Samples
from compress.models.arch import Arch
from compress.models.decoder import DecoderLayer
from compress.models.half_layer import HalfLayer, StagedHalf
from compress.models.latent import KV_LATENT
from compress.models.linear_groups import LINEAR_GROUPS
from compress.models.weights import refill_


def compress_true_sequential(
    state: LayerState,
    arch: Arch,
    passes: Sequence[LayerPass],
    *,
    prefetch_next: Callable[[], None],
    on_kv_ready: Callable[[], None],
) -> None:
    """Compress a layer of `arch` while the samples go through it; afterwards they are the outputs of the
    compressed layer.

    Args:
        prefetch_next: called once both copies of the layer are on the device.
        on_kv_ready: called when the linears of keys and values are compressed and the samples are still the
            layer's inputs.
    """
    run = state.run
    layer = run.build_layer(arch, state.layer_idx, state.loaded_weights())
    source_layer = layer  # not used without the source's samples
    if run.source_samples is not None:
        source_layer = run.build_layer(arch, state.layer_idx, state.loaded_weights())
    prefetch_next()
    for half, source_half in zip(layer.halves(), source_layer.halves(), strict=True):
        if isinstance(half, StagedHalf):
            assert isinstance(source_half, StagedHalf)
            _compress_stages(half, source_half, state, layer, source_layer, passes, on_kv_ready)
            continue
        assert isinstance(source_half, HalfLayer)
        first, second = half.taps
        _compress_group(first, state, layer, passes, half.enter, source_half.enter)
        if first == LINEAR_GROUPS["qkv"].tap:
            on_kv_ready()
        with run.memory.also_evict(run.samples.empty_like(half.out.in_features)) as values:
            _compress_group(second, state, layer, passes, half.cross, source_half.pass_through, into=values)
            for piece in itertools.chain(*run.pieces().values()):
                run.samples[piece] = run.memory.retry_on_oom(
                    partial(_leave, half, run, values, piece), "replaying a layer"
                )


def _compress_stages(
    half: StagedHalf,
    source_half: StagedHalf,
    state: LayerState,
    layer: DecoderLayer,
    source_layer: DecoderLayer,
    passes: Sequence[LayerPass],
    on_kv_ready: Callable[[], None],
) -> None:
    """Compress the groups of one stage after the other and take the samples through the half-layer. Groups of
    one stage read nothing that another one computes, so the ranks share them."""
    run = state.run
    if half.moe is not None:
        half.moe.taps_see_all = run.experts.starved == "all_tokens"
    kinds = needed_stats(passes)
    for groups in half.stages:
        is_last = groups is half.stages[-1]
        trees = observe(
            half.enter,
            run,
            kinds,
            source_layer=source_half.pass_through if is_last else source_half.enter,
            token_weights=state.guide.token_weights,
            source_experts=None if half.moe is None else source_layer,
        )
        owners = {group.tap: idx % run.ranks.size for idx, group in enumerate(groups)}
        stats, tokens = gather_layer(trees, layer, kinds, owners, run, groups=groups)
        own = [group for group in groups if owners[group.tap] == run.ranks.rank]
        part = replace(state, groups=own, stats=stats, tokens=tokens)
        for each in passes:
            each.apply(part)
        linears = [linear for group in groups for linear in group.linears]
        for results in run.ranks.all_gather(state.results_for(linears)):
            state.merge_results(results)
        for linear in linears:
            if linear in state.quantized:
                refill_(layer.linear(linear), state.quantized[linear])
        if any(group.tap == KV_LATENT or "attn.k" in group.linears for group in groups):
            on_kv_ready()
    if half.moe is not None:
        half.moe.taps_see_all = False
    replay_(half.pass_through, run.samples, run)


@torch.no_grad()
def _leave(half: HalfLayer, run: LayerRun, values: Samples, piece: slice) -> Tensor:
    return half.leave(run.samples[piece], values[piece], run.attention(run.samples, piece))


def _compress_group(
    tap: str,
    state: LayerState,
    layer: DecoderLayer,
    passes: Sequence[LayerPass],
    observed: Forward,
    source_observed: Forward,
    *,
    into: Samples | None = None,
) -> None:
    """Compress the linears of one tap on the rank whose turn it is, from the statistics of all ranks, and set
    them in `layer`."""
    run = state.run
    (group,) = (group for group in layer.groups() if group.tap == tap)
    owner = layer.groups().index(group) % run.ranks.size
    kinds = needed_stats(passes)
    trees = observe(
        observed,
        run,
        kinds,
        into=into,
        source_layer=source_observed,
        token_weights=state.guide.token_weights,
    )
    stats = gather_to_owners(trees, [group], kinds, {tap: owner}, run.ranks)
    part = replace(state, groups=[group] if run.ranks.rank == owner else [], stats=stats)
    for each in passes:
        each.apply(part)
    state.merge_results(run.ranks.broadcast(state.results_for(group.linears), source=owner))
    for linear in group.linears:
        if linear in state.quantized:
            refill_(layer.linear(linear), state.quantized[linear])

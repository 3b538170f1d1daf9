"""The layer-by-layer runner: one layer on the device at a time, one observation feeds every pass, the
compressed layer feeds the next.

    for each layer:  observe   x -> layer(x), statistics of every tap, samples in order
                     apply     each pass on the layer's float32 weights and the statistics
                     cache     if requested: scales of the KV cache, from the compressed linears (`kv.py`)
                     store     the layer's file (a resume point: complete or absent)
                     replay    x := compressed layer (x)

With `true_sequential` the linear groups of a layer are observed and compressed one after the other instead
(`true_sequential.py`).

A statistic that compares x with the source model's own activations (`SourceStat`) makes the runner keep
these, too, for the same samples, and take them through the layers of the source: a second store of
activations, and one more pass over each layer.

The next layer is read while this one is compressed, and this one's file is written while it is replayed, so
memory does not grow with the number of layers. A layer is replayed from what its file holds, so an
interrupted and resumed run replays the same numbers as one that was not interrupted and gives the same bits.
How many samples go through a layer at once is fixed, so the result does not depend on memory.

With several ranks each has its own samples, and all have every layer. The linear groups of a layer are
assigned to ranks by cost; the statistics of a group are gathered where it is compressed, and its codes are
sent to all. Sums are made in one order whichever rank makes them (`stats.py`), so the number of ranks changes
no bit either.

Shapes: N samples, S sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from compress.calibrate.at_once import compress_at_once
from compress.calibrate.experts import DEFAULT_POLICY, ExpertPolicy
from compress.calibrate.guide import GuideFiles
from compress.calibrate.kv import READ, Forward, KeysValues, calibrate_cache
from compress.calibrate.layer_files import (
    check_finite,
    is_stored,
    on_host,
    placed,
    store_layer,
    stored_dtype,
    stored_rows,
)
from compress.calibrate.layer_run import LayerRun, piece_tokens_of, sample_range, shards_of_rank
from compress.calibrate.layer_state import LayerPass, LayerState, Row, needed_stats
from compress.calibrate.memory_guard import MemoryGuard
from compress.calibrate.observe import Stats, gather_everywhere, observe, replay_
from compress.calibrate.samples import Samples
from compress.calibrate.side_inputs import SideInputs
from compress.calibrate.stats import SourceStat, StatFactory
from compress.calibrate.streaming import LayerPrefetcher, LayerWriter, return_freed_blocks
from compress.calibrate.true_sequential import compress_true_sequential
from compress.context import Context
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, load_weights, save_weights
from compress.models.weights import Weights, WeightSource, dense, embedding_tables, rounded_to
from compress.quant.scheme import Schemes


@dataclass(frozen=True)
class Compression:
    """The work that the runner does on every layer.

    Args:
        passes: applied in order; with `true_sequential` none may change linears outside of its group.
        scheme: of each linear, to read stored layers back; None if all stay dense.
        true_sequential: compress the linear groups of a layer one after the other.
        kv_scales: also find and store the static scales of the KV cache, for every layer that makes keys and
            values.
        guide: token weights and output moments from gradients; without, all tokens count the same.
        pruned: shapes that the passes leave, if they change them; it has as many layers.
        experts: what becomes of the statistics of experts that see few tokens.
        counted_NS: the tokens of the calibration set that sums over tokens count, bool [N, S]; None: all.
    """

    passes: Sequence[LayerPass]
    scheme: Schemes | None = None
    true_sequential: bool = False
    kv_scales: bool = False
    guide: GuideFiles | None = None
    pruned: Arch | None = None
    experts: ExpertPolicy = DEFAULT_POLICY
    counted_NS: Tensor | None = None

    @property
    def compares_with_source(self) -> bool:
        """Whether a pass needs the source's activations."""
        return any(isinstance(kind(), SourceStat) for kind in needed_stats(self.passes))


def run_sequential(
    source: WeightSource,
    tokens_NS: Tensor,
    compression: Compression,
    out: Path,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
) -> list[Row]:
    """Compress every layer of `source` into the canonical store at `out`; files already there are resume
    points.

    Every rank of `ctx.ranks` calls this with the same arguments; rank 0 writes.

    Args:
        tokens_NS: calibration token ids [N, S].
        compute_dtype: of the activations; statistics are float32 in any case.

    Returns:
        On rank 0 one row per linear in execution order and, with `kv_scales`, one for the keys and one for
        the values after the linears of each layer. On other ranks nothing.

    Raises:
        UnsupportedFormat: a weight of the source is NaN or infinite.
        Interrupted: at a layer boundary, when a signal asked for it.
        RankStopped, EnvironmentUnfit: another rank failed.
        EnvironmentUnfit: the device has too little memory, even with all samples on the host.
    """
    arch = source.arch
    arch_after = compression.pruned or arch
    leads = ctx.ranks.rank == 0
    last = arch.num_layers - 1
    run = _start(source, tokens_NS, compression, out, ctx, compute_dtype)
    # Halves that run side by side read one input: neither can be compressed before the other is observed.
    # With AltUp or LAuReL more than the residual is between the halves.
    true_sequential = compression.true_sequential and arch.staged
    compress = compress_true_sequential if true_sequential else compress_at_once
    stored = ctx.ranks.from_lead(lambda: [is_stored(out, idx, ctx) for idx in range(arch.num_layers)])

    def read(idx: int) -> Weights:
        if stored[idx]:
            return load_weights(out / layer_name(idx), compression.scheme, prefix=f"layers.{idx}.")
        return source.layer(idx)

    with LayerPrefetcher(read, run.device) as layers, LayerWriter() as writer:
        for idx in range(arch.num_layers):
            weights: Weights = layers.take(idx)
            prefetch_next = partial(layers.start, idx + 1) if idx < last else _do_nothing
            if stored[idx]:
                if run.source_samples is not None:
                    replay_(run.build_layer(arch, idx, source.layer(idx)), run.source_samples, run)
            else:
                writer.wait()
                ctx.boundary(idx, arch.num_layers, f"layer {idx} of {arch.num_layers}")
                ctx.ranks.barrier()  # no rank begins a layer that rank 0 does not begin
                state = _layer_state(arch, idx, weights, compression, run)
                del weights  # a weight that a pass replaces must not be kept here
                on_kv_ready = _do_nothing
                if compression.kv_scales and arch.layers[idx].cached_numbers:
                    on_kv_ready = partial(_scale_cache, state, arch_after)
                compress(
                    state, arch, compression.passes, prefetch_next=prefetch_next, on_kv_ready=on_kv_ready
                )
                weights = state.release_weights(stored_dtype(arch))
                rows = state.all_rows()
                del state, on_kv_ready
                if leads:
                    writer.write(partial(store_layer, out, idx, on_host(weights), rows, ctx))
            if idx < last and (stored[idx] or not true_sequential):
                prefetch_next()
                replay_(run.build_layer(arch_after, idx, weights), run.samples, run)
            del weights  # before the next layer is taken
        writer.wait()
    ctx.progress.update(arch.num_layers, arch.num_layers, "all layers")
    if not leads:
        return []
    return [row for idx in range(arch.num_layers) for row in stored_rows(out, idx, ctx)]


def _start(
    source: WeightSource,
    tokens_NS: Tensor,
    compression: Compression,
    out: Path,
    ctx: Context,
    compute_dtype: torch.dtype,
) -> LayerRun:
    """Return the run before the first layer; rank 0 writes the weights outside of the layers to `out`."""
    arch = source.arch
    device = torch.device(ctx.device)
    ranks = ctx.ranks
    if device.type == "cpu":
        return_freed_blocks(arch)
    shards = shards_of_rank(len(tokens_NS), rank=ranks.rank, num_ranks=ranks.size)
    own = sample_range(shards)
    outer = _outer(source, out if ranks.rank == 0 else None)
    # First, because samples begin on the host where they find no room.
    side_inputs = MemoryGuard(ctx.progress).retry_on_oom(
        partial(SideInputs.of, arch, outer, tokens_NS, dtype=compute_dtype, device=device, own=own),
        "computing embeddings for each layer",
    )
    samples = _embedded(arch, outer, tokens_NS[own], device, compute_dtype)
    del outer
    compares = compression.compares_with_source
    source_samples = samples.clone() if compares else None
    source_side_inputs = side_inputs.twin() if compares else None
    stores = [samples, *side_inputs.stores]
    if source_samples is not None and source_side_inputs is not None:
        stores += [source_samples, *source_side_inputs.stores]
    memory = MemoryGuard(ctx.progress, *stores)
    counted_NS = compression.counted_NS
    return LayerRun(
        samples,
        source_samples,
        shards,
        ranks,
        memory,
        compute_dtype,
        compression.experts,
        piece_tokens_of(arch),
        None if counted_NS is None else counted_NS[own],
        side_inputs,
        source_side_inputs,
    )


def _layer_state(
    arch: Arch, idx: int, weights: Weights, compression: Compression, run: LayerRun
) -> LayerState:
    on_device = run.memory.retry_on_oom(partial(placed, weights, idx, run.device), "placing a layer")
    guide = None if compression.guide is None else compression.guide.layer(idx, run.sample_range)
    return LayerState.start(arch, idx, on_device, run, guide)


def _scale_cache(state: LayerState, arch: Arch) -> None:
    """Find the scales of the keys and values that the layer computes now; the samples must be its inputs."""
    run = state.run
    dtype = stored_dtype(arch)
    weights = state.stored_weights(dtype, *READ)
    cached = KeysValues.from_weights(arch, state.layer_idx, weights, dtype=run.dtype, device=run.device)

    def observe_samples(layer: Forward, factories: Sequence[StatFactory]) -> Stats:
        return gather_everywhere(observe(layer, run, factories), factories, run.ranks)

    state.cache, rows = calibrate_cache(cached, observe_samples, stored_dtype=dtype)
    state.rows |= dict(zip(state.cache, rows, strict=True))


def _do_nothing() -> None:
    """Take the place of a callback where there is nothing to do."""


def _outer(source: WeightSource, out: Path | None) -> Weights:
    """Return the weights outside of the layers, and write them to `out` if it is given."""
    outer = rounded_to(source.outer(), stored_dtype(source.arch))
    check_finite({name: dense(value) for name, value in outer.items()}, "outer")
    if out is not None:
        save_weights(out / OUTER_NAME, outer)
    return outer


def _embedded(
    arch: Arch, outer: Weights, tokens_NS: Tensor, device: torch.device, dtype: torch.dtype
) -> Samples:
    """Return the inputs of the first layer."""
    tables = embedding_tables(outer, device, dtype)
    samples = Samples((*tokens_NS.shape, arch.stream_size), dtype, device)
    for idx, tokens_S in enumerate(tokens_NS.to(device=device, dtype=torch.int64)):
        samples[idx : idx + 1] = tables.embedded(arch, tokens_S).unsqueeze(0)
    return samples

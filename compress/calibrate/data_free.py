"""The runner for methods that read no activation: each layer is read, compressed and written, and no sample
goes through any layer.

    read      layer i + 1, in a thread
    compress  the passes on layer i
    write     layer i - 1, its resume point last, in a thread

The three overlap, so a run takes about as long as the slowest of them. The files and resume points are those
of `sequential.py`. One process does all of it, because the disk bounds the time.
"""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from compress.calibrate.layer_files import check_finite, is_stored, on_host, placed, store_layer, stored_dtype
from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import LayerPass, LayerState, needed_stats
from compress.calibrate.memory_guard import MemoryGuard
from compress.calibrate.samples import Samples
from compress.calibrate.stats import InputStats
from compress.calibrate.streaming import LayerPrefetcher, LayerWriter, return_freed_blocks
from compress.context import Context, OneRank
from compress.errors import Interrupted
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, save_weights
from compress.models.weights import Weights, WeightSource, dense, rounded_to


def run_data_free(source: WeightSource, passes: Sequence[LayerPass], out: Path, ctx: Context) -> None:
    """Compress every layer of `source` into the canonical store at `out`; files already there are resume
    points.

    Args:
        passes: applied in order; none may need a statistic.

    Raises:
        UnsupportedFormat: a weight of the source is NaN or infinite.
        Interrupted: before a layer, when a signal asked for it; every layer that was rounded is stored.
        EnvironmentUnfit: the device has too little memory for a layer.
    """
    assert not needed_stats(passes), "a pass that needs statistics has to be run by `run_sequential`"
    arch = source.arch
    run = _without_samples(arch, ctx)
    if run.device.type == "cpu":
        return_freed_blocks(arch)
    missing = [idx for idx in range(arch.num_layers) if not is_stored(out, idx, ctx)]
    at_once = 1 if run.device.type == "cpu" else 2  # a digest beside the next file, where cores are free
    with LayerPrefetcher(source.layer, run.device) as layers, LayerWriter(at_once) as writer:
        if missing:
            layers.start(missing[0])
        outer = rounded_to(source.outer(), stored_dtype(arch))
        check_finite({name: dense(value) for name, value in outer.items()}, "outer")
        writer.write(partial(save_weights, out / OUTER_NAME, outer))
        del outer
        for idx, following in zip_longest(missing, missing[1:]):
            try:
                ctx.boundary(idx, arch.num_layers, f"layer {idx} of {arch.num_layers}")
            except Interrupted:
                writer.wait()  # what was rounded is a resume point
                raise
            weights: Weights = layers.take(idx)
            if following is not None:
                layers.start(following)
            state = _layer_state(arch, idx, weights, run)
            del weights  # a weight that a pass replaces must not be kept here
            for each in passes:
                each.apply(state)
            rows = state.all_rows()
            tensors = on_host(state.release_weights(stored_dtype(arch)))
            writer.write(partial(store_layer, out, idx, tensors, rows, ctx))
            del state, tensors
        writer.wait()
    ctx.progress.update(arch.num_layers, arch.num_layers, "all layers")


def _without_samples(arch: Arch, ctx: Context) -> LayerRun:
    """Return a run of no samples in this process alone."""
    samples = Samples((0, 1, arch.stream_size), torch.float32, torch.device(ctx.device))
    return LayerRun(samples, None, {}, OneRank(), MemoryGuard(ctx.progress), torch.float32)


def _layer_state(arch: Arch, idx: int, weights: Weights, run: LayerRun) -> LayerState:
    """Return the state of a layer with all of its linear groups, and without a statistic of any input."""
    on_device = run.memory.retry_on_oom(partial(placed, weights, idx, run.device), "placing a layer")
    state = LayerState.start(arch, idx, on_device, run)
    state.groups = list(arch.layers[idx].groups)
    state.stats = {group.tap: InputStats() for group in state.groups}
    return state

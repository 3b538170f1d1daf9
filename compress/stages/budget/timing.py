"""The time of a linear group on this device: the loader's own kernel on random weights, called as a decode
step calls it.

The kernel runs over several copies of the weights, more bytes in sum than the device's caches hold, in one
CUDA graph: each launch reads cold memory and overlaps its neighbours as in serving. The median over replays
counts. On a CPU the same launches are timed by the clock. `scripts/bench_kernels.py` measures more carefully,
with checks; this is quick enough to be a step of a stage.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.linear_groups import LinearGroup
from compress.models.random_source import random_weight
from compress.quant.scheme import Scheme
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse, output_factor

COLD_BYTES = {"cuda": 200_000_000, "cpu": 0}
"""Bytes that the copies of the weights must exceed, so that every launch reads cold memory: an H200 has 50 MB
of L2."""
MAX_COPIES = 32
LAUNCHES = 32
REPLAYS = 15
_ADDS_RESIDUAL = ("o", "recurrent_o", "down")


def measure_linear_us(
    arch: Arch,
    layer_idx: int,
    group: LinearGroup,
    scheme: Scheme | None,
    *,
    rows: int,
    deployment: Deployment,
) -> float:
    """Return the median microseconds of the product of a linear group for `rows` tokens.

    The time includes the quantization of the input where the scheme has one.

    Raises:
        EnvironmentUnfit: no kernel on this device serves the product.
    """
    generator = torch.Generator(deployment.device).manual_seed(0)
    layer = arch.layers[layer_idx]
    shapes = {linear: layer.linear_shape(linear, arch.hidden_size) for linear in group.linears}
    weights = {
        f"{each}.weight": random_weight(shape, scheme, dtype=deployment.dtype, generator=generator)
        for each, shape in shapes.items()
    }
    gate = arch.fused_activation(layer) if group.name == "gate_up" else None
    factor = output_factor(arch, group.linears)
    fused = partial(fuse, group.linears, weights, deployment, activation=gate, factor=factor)
    copies = [fused()]
    cold = COLD_BYTES[deployment.device.type]
    while len(copies) < MAX_COPIES and len(copies) * copies[0].weight_bytes < cold:
        copies.append(fused())
    n, k = layer.group_shape(group, arch.hidden_size)
    x_TI = torch.randn(rows, k, dtype=deployment.dtype, device=deployment.device, generator=generator)
    residual_TO = None
    if group.name in _ADDS_RESIDUAL:
        residual_TO = torch.randn(
            rows, n, dtype=deployment.dtype, device=deployment.device, generator=generator
        )
    launches = [_launch(each, x_TI, residual_TO) for each in copies] * -(-LAUNCHES // len(copies))
    with torch.inference_mode():
        return (_graph_seconds if deployment.device.type == "cuda" else _clock_seconds)(launches) * 1e6


def _launch(linear: FusedLinear, x_TI: Tensor, residual_TO: Tensor | None) -> Callable[[], Tensor]:
    return lambda: linear(x_TI, "decode", residual=residual_TO)


def _graph_seconds(launches: Sequence[Callable[[], Tensor]]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:  # compilation and workspaces come before the capture
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times_ms = [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]
    return statistics.median(times_ms) / 1e3 / len(launches)


def _clock_seconds(launches: Sequence[Callable[[], Tensor]]) -> float:
    seconds = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        for launch in launches:
            launch()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / len(launches)

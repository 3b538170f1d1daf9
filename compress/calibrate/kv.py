"""Calibrated scales of a KV cache, and whether one scale for a whole layer can hold its keys and its values.

    scale = largest |x| over the calibration set / 448        x ~ e4m3(x / scale) * scale

A layer has one scale for its keys and one for its values. x is what the cache of the served model holds: keys
after norm and rotation, values as projected, computed by the quantized linears of the layer on inputs from
quantized layers.

An e4m3 number errs by a few percent of itself (root mean square 0.026) down to 2^-6; below, its steps no
longer shrink, and under 2^-10 all becomes zero. So outliers take the range of a scale when some heads are
2^-14 of the largest number of the layer, or smaller. The error of the whole tensor does not show this loss,
because outliers decide it and they are kept well. The error channel by channel does:

    error of a head = sqrt(mean over its channels of  E[(x' - x)^2] / E[x^2])

A channel of v can be multiplied by anything and its column of o divided by it without changing the model, and
so can a pair of rotated channels of k with its pair of q. This error is invariant to both; that of the whole
tensor is not. A lost channel counts 1 / C. The worst head of a layer is compared with its error under a scale
for every position and head, measured in the same pass: the advice is to use these scales where they help.

Shapes: B batch, S sequence, D hidden, T tokens, K kv heads, C head dimension, F = K C.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from compress.calibrate.stats import AbsMax, InputStats, StatFactory
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.attention import AttentionFn
from compress.models.decoder import DecoderLayer
from compress.models.rope import cos_sin
from compress.models.tap import Tap
from compress.models.weights import Weights, dense, stored_as
from compress.quant.kv import FP8_STATIC, FP8_TOKEN_HEAD, KV_SCALES, round_to_e4m3
from compress.quant.numerics import static_input_scale
from compress.quant.scheme import FP8_MAX, SCHEMES

Row = dict[str, Any]
Forward = Callable[[Tensor, Tensor, AttentionFn, Tap], Tensor]
"""(x [B, S, D], positions [S], attention, tap) -> [B, S, D]: a layer, a part of one, or another function
observed like one."""
Observe = Callable[[Forward, Sequence[StatFactory]], Mapping[str, InputStats]]
"""A function that returns the statistics of every tap of a forward over all samples."""

COARSE = 0.1
"""Error from which a head counts as lost, four times that of e4m3 in range. With the keys of one of eight
layers at 0.05 the mean KL of the whole cache grows from 0.0027 to 0.0028 on the bundled model, at 0.20 to
0.0068, at 0.73 to 0.068 (`scripts/bench_kv.py`)."""
_SATURATED = FP8_MAX + 16.0
"""Largest magnitude that rounds to 448, half a step above it; larger numbers are clipped."""
READ = ("attn_norm.", "attn_hyper.", "altup.", "attn.k", "attn.v.", "attn.v_conv.")
"""Prefixes of the names of the parameters that compute keys and values."""


@dataclass(frozen=True)
class KeysValues:
    """The part of a layer that fills its cache; its taps are `k` and `v` [B, S, F], float32, in units of
    their scales."""

    layer: DecoderLayer
    scales: Mapping[str, Tensor]

    @staticmethod
    def from_weights(
        arch: Arch, layer_idx: int, weights: Weights, *, dtype: torch.dtype, device: torch.device
    ) -> "KeysValues":
        """Return the part of a layer with these weights; its other parameters stay on the meta device."""
        with torch.device("meta"):
            layer = DecoderLayer(arch, layer_idx).requires_grad_(False)
        read = {
            name: dense(value).to(device=device, dtype=stored_as(name, dtype))
            for name, value in weights.items()
            if name.startswith(READ)
        }
        layer.load_state_dict(read, strict=False, assign=True)
        return KeysValues(layer, {name: torch.ones((), device=device) for name in KV_SCALES})

    def __call__(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        del attention
        shape = self.layer.shape
        angles = cos_sin(shape.rope, shape.head_dim, positions, x_BSD.dtype)
        read_BSD = self.layer.mixer_input(x_BSD)
        k_BSKC, v_BSKC = self.layer.attn.keys_values(self.layer.attn_norm(read_BSD), angles)
        stored = {"k": k_BSKC, "v": v_BSKC[..., : shape.value_dim]}
        for name, heads_BSKC in stored.items():
            tap(name, heads_BSKC.flatten(-2).to(torch.float32) / self.scales[name])
        return x_BSD


class CacheError:
    """Errors of e4m3 for numbers in units of their scale: sums of squares by channel, and counts of values
    that are clipped or become zero."""

    is_quadratic = False

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self._squares_3F: Tensor | None = None
        self._counts_2: Tensor | None = None
        self.num_values = 0

    def update(self, x_TD: Tensor) -> None:
        heads_TKC = x_TD.unflatten(-1, (self._num_heads, -1))
        own_TK1 = (heads_TKC.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        by_tensor = round_to_e4m3(x_TD)
        by_head = (round_to_e4m3(heads_TKC / own_TK1) * own_TK1).flatten(-2)
        squares_3F = torch.stack([each.square().sum(0) for each in (x_TD, by_tensor - x_TD, by_head - x_TD)])
        counts_2 = torch.stack([(x_TD.abs() > _SATURATED).sum(), ((by_tensor == 0) & (x_TD != 0)).sum()])
        self._squares_3F = squares_3F if self._squares_3F is None else self._squares_3F.add_(squares_3F)
        self._counts_2 = counts_2 if self._counts_2 is None else self._counts_2.add_(counts_2)
        self.num_values += x_TD.numel()

    def merge(self, other: "CacheError") -> None:
        if other._squares_3F is not None and other._counts_2 is not None:
            self._squares_3F = (
                other._squares_3F if self._squares_3F is None else self._squares_3F.add_(other._squares_3F)
            )
            self._counts_2 = (
                other._counts_2 if self._counts_2 is None else self._counts_2.add_(other._counts_2)
            )
            self.num_values += other.num_values

    def complete_(self, target: Self, num_tokens: int) -> None:
        """Do nothing: keys and values are those of all tokens."""

    def compact(self) -> None:
        """Keep the sums as they are, because they are small."""

    def rescale_(self, scale_D: Tensor) -> None:
        raise AssertionError("a cache is observed after all smoothing")

    def facts(self) -> Row:
        """Return the shares of values that are clipped and that become zero, and the errors of the worst
        head."""
        assert self._squares_3F is not None
        assert self._counts_2 is not None
        signal_F, *errors = self._squares_3F
        by_tensor_K, by_head_K = (
            torch.where(signal_F > 0, error_F / signal_F, 0.0).view(self._num_heads, -1).mean(-1).sqrt()
            for error_F in errors
        )
        saturated, flushed = self._counts_2.tolist()
        return {
            "saturated_frac": saturated / self.num_values,
            "flushed_frac": flushed / self.num_values,
            "worst_head": int(by_tensor_K.argmax()),
            "error": float(by_tensor_K.max()),
            "error_token_head": float(by_head_K.max()),
        }


def calibrate_cache(
    cached: KeysValues, observe: Observe, *, stored_dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[Row]]:
    """Return the scales of one layer by canonical name, float32 scalars, and two report rows: one for its
    keys, one for its values.

    A scale is rounded to the model's dtype, in which some consumers store it, before anything is measured
    with it.

    Raises:
        UsageError: keys or values reach NaN or infinity.
    """
    layer_idx = cached.layer.layer_idx
    num_heads = cached.layer.shape.num_kv_heads
    amax = {name: _largest(stats, layer_idx, name) for name, stats in observe(cached, [AbsMax]).items()}
    scales = {name: static_input_scale(amax[name], SCHEMES["FP8_STATIC"], stored_dtype) for name in KV_SCALES}
    rounded = observe(KeysValues(cached.layer, scales), [partial(CacheError, num_heads)])
    rows: list[Row] = []
    for name, scale in scales.items():
        rows.append(
            {
                "layer": layer_idx,
                "cache": name,
                "amax": float(amax[name]),
                "scale": float(scale),
                **rounded[name][CacheError].facts(),
            }
        )
    return {KV_SCALES[name]: scale for name, scale in scales.items()}, rows


def cache_warning(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return advice about heads that one scale for a layer loses, None if there are none."""
    lost = [row for row in rows if row["error"] > COARSE]
    if not lost:
        return None
    worst = max(lost, key=lambda row: float(row["error"]))
    names = {"k": "keys", "v": "values"}
    layers = {name: sorted({row["layer"] for row in lost if row["cache"] == name}) for name in names}
    where = " and ".join(
        f"the {names[name]} of layer {', '.join(map(str, idxs))}" for name, idxs in layers.items() if idxs
    )
    better = max(row["error_token_head"] for row in lost)
    advice = (
        f"Scales for each position and head leave {better:.2g}: the outliers share heads with the rest. Keep "
        "this cache in 16 bits."
    )
    if better <= COARSE:
        advice = (
            f"Scales for each position and head ({FP8_TOKEN_HEAD}, `kv_cache: fp8_token_head`) hold the same "
            f"heads within {better:.2g}."
        )
    return (
        f"{FP8_STATIC} spends its range on outliers in {where}: head {worst['worst_head']} of layer "
        f"{worst['layer']} is left with a relative error of {worst['error']:.2g} ({COARSE} is the limit, "
        f"0.03 usual). {advice}"
    )


def _largest(stats: InputStats, layer_idx: int, name: str) -> Tensor:
    largest = stats[AbsMax].max()
    if not bool(torch.isfinite(largest)):
        raise UsageError(
            f"layer {layer_idx}, {name} of the cache: the calibration data drives it to NaN or infinity. "
            "Check the checkpoint."
        )
    return largest

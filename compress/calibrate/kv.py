"""Calibrated scales of a KV cache, and whether one scale for a whole layer can hold its keys and its values.

    scale = largest |x| over the calibration set / 448        one for the keys, one for the values of a layer; x ~ e4m3(x / scale) * scale

x is what the cache of the served model holds: keys behind norm and rotation, values as projected, by the layer whose linears are rounded
already, behind layers that are.

An e4m3 number errs by a few percent of itself (0.026 at the mean of squares) down to 2^-6; below, its steps no longer shrink, and under
2^-10 all becomes zero. A scale is thus spent on outliers when some heads lie 2^-14 and more below the largest number of the layer. What is
lost then does not show in the error of the whole tensor, which the outliers decide and they are kept well. It shows channel by channel:

    error of a head = sqrt(mean over its channels of  E[(x' - x)^2] / E[x^2])

A channel of v can be multiplied by anything and its column of o divided without changing the model, and so can a pair of rotated channels
of k with its pair of q; this number does not change with either, the one of the whole tensor does. A lost channel counts 1 / C.
The worst head of a layer is compared with the same error under scales of its own for every position and head, measured beside it: the
advice is to take them, where they help.

Shapes: B batch, S sequence, D hidden, T tokens, K kv heads, C head dimension, F = K C.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.calibrate.stats import AbsMax, InputStats, StatFactory
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.attention import AttentionFn
from compress.models.decoder import DecoderLayer, Tap
from compress.models.rope import cos_sin
from compress.models.weights import Weights, dense
from compress.quant.kv import FP8_STATIC, FP8_TOKEN_HEAD, KV_SCALES, round_to_e4m3
from compress.quant.numerics import static_input_scale
from compress.quant.scheme import FP8_MAX, SCHEMES

Row = dict[str, Any]
Forward = Callable[[Tensor, Tensor, AttentionFn, Tap], Tensor]
"""(x [B, S, D], positions [S], attention, tap) -> [B, S, D]: a layer, or what is watched in its place."""
Observe = Callable[[Forward, Sequence[StatFactory]], Mapping[str, InputStats]]
"""Statistics of every tap of a forward over all samples."""

COARSE = 0.1
"""Error from which a head is said to be lost, four times that of e4m3 in range. With the keys of one of eight layers at 0.05 the mean KL of
the whole cache grows from 0.0027 to 0.0028 on the bundled model, at 0.20 to 0.0068, at 0.73 to 0.068 (`scripts/bench_kv.py`)."""
_SATURATED = FP8_MAX + 16.0
"""What lies beyond is cut, not rounded: half a step behind the largest number."""
READ = ("attn_norm.", "attn.k", "attn.v.")
"""What the parameters begin with that fill a cache."""


@dataclass(frozen=True)
class KeysValues:
    """The part of a layer that fills its cache; taps are `k` and `v` [B, S, F], float32, in units of their scales."""

    layer: DecoderLayer
    scales: Mapping[str, Tensor]

    @staticmethod
    def from_weights(
        arch: Arch, layer_idx: int, weights: Weights, *, dtype: torch.dtype, device: torch.device
    ) -> "KeysValues":
        """Only what is read leaves the meta device."""
        with torch.device("meta"):
            layer = DecoderLayer(arch, layer_idx).requires_grad_(False)
        read = {
            name: dense(value).to(device=device, dtype=dtype)
            for name, value in weights.items()
            if name.startswith(READ)
        }
        layer.load_state_dict(read, strict=False, assign=True)
        return KeysValues(layer, {name: torch.ones((), device=device) for name in KV_SCALES})

    def __call__(self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, tap: Tap) -> Tensor:
        del attention
        shape = self.layer.shape
        angles = cos_sin(shape.rope, shape.head_dim, positions, x_BSD.dtype)
        for name, x_BSKC in zip(
            KV_SCALES, self.layer.attn.keys_values(self.layer.attn_norm(x_BSD), angles), strict=True
        ):
            tap(name, x_BSKC.flatten(-2).to(torch.float32) / self.scales[name])
        return x_BSD


class CacheError:
    """What e4m3 makes of numbers given in units of their scale: squares by channel, and counts of what is cut or becomes zero."""

    is_quadratic = False

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._squares_3F: Tensor | None = None
        self._counts_2: Tensor | None = None
        self.num_values = 0

    def update(self, x_TD: Tensor) -> None:
        heads_TKC = x_TD.unflatten(-1, (-1, self._head_dim))
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

    def park(self) -> None:
        """It is small."""

    def rescale_(self, scale_D: Tensor) -> None:
        raise AssertionError("a cache is observed behind all smoothing")

    def facts(self) -> Row:
        """Shares of numbers that are cut and that become zero, and the errors of the worst head."""
        assert self._squares_3F is not None
        assert self._counts_2 is not None
        signal_F, *errors = self._squares_3F
        by_tensor_K, by_head_K = (
            torch.where(signal_F > 0, error_F / signal_F, 0.0).view(-1, self._head_dim).mean(-1).sqrt()
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
    """The scales of one layer by canonical name, float32 scalars, and what they do: a row for its keys, a row for its values.

    A scale is rounded to the model's dtype, in which some consumers keep it, before anything is measured with it.

    Raises:
        UsageError: keys or values reach NaN or infinity.
    """
    layer_idx = cached.layer.layer_idx
    head_dim = cached.layer.shape.head_dim
    amax = {name: _largest(stats, layer_idx, name) for name, stats in observe(cached, [AbsMax]).items()}
    scales = {name: static_input_scale(amax[name], SCHEMES["FP8_STATIC"], stored_dtype) for name in KV_SCALES}
    rounded = observe(KeysValues(cached.layer, scales), [partial(CacheError, head_dim)])
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
    """What to do about heads that one scale a layer loses; None when there are none."""
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
        f"Scales for each position and head ({FP8_TOKEN_HEAD}, `kv_cache: fp8_token_head`) hold the same heads within {better:.2g}."
        if better <= COARSE
        else f"Scales for each position and head leave {better:.2g}: the outliers share heads with the rest. Keep this cache in 16 bits."
    )
    return (
        f"{FP8_STATIC} spends its range on outliers in {where}: beside them head {worst['worst_head']} of layer {worst['layer']} is left "
        f"with a relative error of {worst['error']:.2g} ({COARSE} is the limit, 0.03 usual). {advice}"
    )


def _largest(stats: InputStats, layer_idx: int, name: str) -> Tensor:
    largest = stats[AbsMax].max()
    if not bool(torch.isfinite(largest)):
        raise UsageError(
            f"layer {layer_idx}, {name} of the cache: the calibration data drives it to NaN or infinity. Check the checkpoint."
        )
    return largest

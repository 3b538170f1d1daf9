"""What a quantized KV cache costs in accuracy: every format against the same model with keys and values as
they are.

    python -m scripts.bench_kv                                 the bundled model and text, at its full context
    python -m scripts.bench_kv --model ./my-model --data my-eval.yaml --seq-len 8192 --out benchmarks/kv.json

Prints a table over formats: bytes of a position, mean KL with its interval over windows, p99, top-1
agreement, and the mean KL of the first and of the last quarter of the windows' positions: an error that grows
with the context shows there first. Weights stay as they are. The scales of FP8_STATIC are calibrated on text
of their own.

Then the same model again with the keys of one head scaled by 2^p (`kv_outliers.py`): it computes the same to
the last bit, and one scale for a layer must choose whom to keep. `error` is what calibration says of the head
that lost most (`calibrate/kv.py`). `--channel-outliers` instead scales one channel of every head, which a
scale a head serves badly; a Hadamard transform spreads it:

    python -m scripts.bench_kv --device cpu --formats INT4_TOKEN_HEAD INT4_TOKEN_HEAD_HADAMARD --outliers \
        --channel-outliers 2 4 --out benchmarks/kv_hadamard.json
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.kv import cache_warning
from compress.calibrate.layer_state import Row
from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.data.model_tokens import read_tokens
from compress.data.tokens import TokenSet
from compress.export import open_weights
from compress.kernels.operands.paged import TOKEN_HEAD_FORMATS
from compress.models.arch import Arch
from compress.models.canonical import layer_name, load_weights
from compress.models.weights import WeightSource
from compress.pipeline import pick_device, resolve_source
from compress.quant.kv import FP8_STATIC, INT4_HADAMARD, KV_DENSE
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.validate.accuracy import Accuracy, measure_accuracy, score_window
from scripts.bench_setup import markdown, write_results
from scripts.kv_outliers import ChannelOutliers, Outliers

FORMATS = ("BF16", FP8_STATIC, *TOKEN_HEAD_FORMATS)
OUTLIER_LAYER = 3
OUTLIER_HEAD = 1
OUTLIER_CHANNEL = 5


@dataclass(frozen=True)
class Calibrated:
    """A source with the static scales of its KV cache, as the sequential runner stored its layers."""

    base: WeightSource
    directory: Path
    rows: list[Row]
    kv_format: str = FP8_STATIC

    @property
    def arch(self) -> Arch:
        return self.base.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self.base.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return load_weights(self.directory / layer_name(layer_idx), None)

    @property
    def worst_error(self) -> float:
        return max(float(row["error"]) for row in self.rows)


class Watched:
    """Two engines as `measure_accuracy` wants them, window by window, which keeps the KL of every position on
    the way."""

    def __init__(self, dense: Engine, quantized: Engine) -> None:
        self._dense = dense
        self._quantized = quantized
        self._kl: list[Tensor] = []

    def source(self, tokens_1S: Tensor) -> Tensor:
        self._logits_SV = self._dense.runner.score(tokens_1S)[0]
        return self._logits_SV.unsqueeze(0)

    def candidate(self, tokens_1S: Tensor) -> Tensor:
        logits_1SV = self._quantized.runner.score(tokens_1S)
        self._kl.append(score_window(self._logits_SV, logits_1SV[0], tokens_1S[0]).kl)
        return logits_1SV

    def quarters(self) -> tuple[float, float]:
        """Mean KL of the first and of the last quarter of the scored positions."""
        kl_NT = torch.stack(self._kl)
        quarter = kl_NT.shape[1] // 4
        return float(kl_NT[:, :quarter].mean()), float(kl_NT[:, -quarter:].mean())


def row_of(kv_format: str, engine: Engine, accuracy: Accuracy, first: float, last: float) -> dict[str, Any]:
    return {
        "kv_format": kv_format,
        "bytes_per_token": engine.kv_bytes_per_token,
        "kl_mean": accuracy.kl_mean.value,
        "kl_mean_interval": [accuracy.kl_mean.lower, accuracy.kl_mean.upper],
        "kl_p99": accuracy.kl_p99.value,
        "kl_max": accuracy.kl_max,
        "top1": accuracy.top1.value,
        "ppl_ratio": accuracy.ppl_ratio.value,
        "kl_first_quarter": first,
        "kl_last_quarter": last,
    }


def measure(
    args: argparse.Namespace, device: torch.device, scratch: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    source = resolve_source(args.model)
    weights = open_weights(source.path)
    length = args.seq_len or weights.arch.max_position
    read = {"seq_len": length, "offline": True}
    tokens, _ = read_tokens(source, args.data, num_samples=args.num_samples, seed=None, **read)
    calibration, _ = read_tokens(
        source, args.calibration, num_samples=args.calibration_samples, seed=0, **read
    )

    def engine(of: WeightSource, kv_format: str) -> Engine:
        return Engine(
            of,
            device=device,
            config=EngineConfig(max_batch_size=1, max_model_len=length, kv_format=kv_format),
        )

    dense = engine(weights, KV_DENSE)
    rows = []
    for idx, (model, of, formats) in enumerate(models(args, weights)):
        measured: WeightSource = of
        worst = dict[str, float]()
        if FP8_STATIC in formats:
            calibrated = calibrate(of, calibration.tokens_NS, device, scratch / str(idx))
            measured, worst = calibrated, {"error": calibrated.worst_error}
            if warning := cache_warning(calibrated.rows):
                print(f"{model}: {warning}", file=sys.stderr)
        for kv_format in formats:
            error = worst if kv_format == FP8_STATIC else {}
            rows.append(
                {
                    "model": model,
                    **compared(kv_format, dense, engine(measured, kv_format), tokens, device),
                    **error,
                }
            )
            print(f"{model}, {kv_format}: KL {rows[-1]['kl_mean']:.2e}", file=sys.stderr, flush=True)
    facts = {
        "model": source.name,
        "evaluation": args.data,
        "num_samples": args.num_samples,
        "seq_len": length,
    }
    return rows, facts | {"calibration": args.calibration, "calibration_samples": args.calibration_samples}


def models(args: argparse.Namespace, weights: WeightSource) -> Iterator[tuple[str, WeightSource, list[str]]]:
    """Yield a name, the weights and the formats of the model as it is, and with keys that have outliers."""
    yield "as it is", weights, args.formats
    for power in args.outliers:
        formats = [KV_DENSE, *args.formats] if power == max(args.outliers) else [FP8_STATIC]
        name = f"keys of layer {OUTLIER_LAYER}, head {OUTLIER_HEAD} x 2^{power}"
        yield name, Outliers(weights, OUTLIER_LAYER, OUTLIER_HEAD, power), formats
    for power in args.channel_outliers:
        name = f"channel {OUTLIER_CHANNEL} of all keys x 2^{power}"
        yield name, ChannelOutliers(weights, OUTLIER_CHANNEL, power), args.formats


def calibrate(source: WeightSource, tokens_NS: Tensor, device: torch.device, out: Path) -> Calibrated:
    out.mkdir()
    dtype = compute_dtype(str(device), getattr(torch, source.arch.dtype))
    ctx = Context(str(device), 0, out)
    return Calibrated(
        source,
        out,
        run_sequential(source, tokens_NS, Compression([], kv_scales=True), out, ctx, compute_dtype=dtype),
    )


def compared(
    kv_format: str, dense: Engine, quantized: Engine, tokens: TokenSet, device: torch.device
) -> dict[str, Any]:
    watched = Watched(dense, quantized)
    accuracy = measure_accuracy(
        watched.source,
        watched.candidate,
        tokens.tokens_NS.to(device),
        num_bytes=tokens.num_scored_bytes,
        batch_size=1,
    )
    return row_of(kv_format, quantized, accuracy, *watched.quarters())


def table(rows: list[dict[str, Any]]) -> str:
    header = (
        "model",
        "KV cache",
        "bytes/token",
        "mean KL",
        "95 % interval",
        "p99 KL",
        "top-1",
        "first quarter",
        "last quarter",
        "error",
    )
    return markdown(
        header,
        [
            (
                row["model"], row["kv_format"], f"{row['bytes_per_token']:,}", f"{row['kl_mean']:.2e}",
                "{:.2e} .. {:.2e}".format(*row["kl_mean_interval"]), f"{row['kl_p99']:.2e}",
                f"{row['top1']:.4f}", f"{row['kl_first_quarter']:.2e}", f"{row['kl_last_quarter']:.2e}",
                f"{row['error']:.3f}" if "error" in row else "",
            )
            for row in rows
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument("--data", default="builtin://python-eval", help="evaluation text: a data card")
    parser.add_argument(
        "--calibration", default="builtin://python", help="calibration text of the static scales: a data card"
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=(*FORMATS, INT4_HADAMARD))
    parser.add_argument(
        "--outliers",
        nargs="*",
        type=int,
        default=[12, 14, 16, 20],
        help="powers of two; all formats for the largest",
    )
    parser.add_argument(
        "--channel-outliers", nargs="*", type=int, default=[], help="powers of two; the same, of one channel"
    )
    parser.add_argument("--num-samples", type=int, default=24)
    parser.add_argument("--calibration-samples", type=int, default=32)
    parser.add_argument(
        "--seq-len", type=int, default=None, help="of a window; the model's longest by default"
    )
    parser.add_argument("--device", default=None)
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="write the result file here, e.g. benchmarks/kv.json"
    )
    args = parser.parse_args()
    device = torch.device(pick_device(args.device))
    with tempfile.TemporaryDirectory() as scratch:
        rows, facts = measure(args, device, Path(scratch))
    print(table(rows))
    if args.out is not None:
        write_results(args.out, rows, device=device, commit=args.commit, facts=facts)


if __name__ == "__main__":
    main()

"""What the end of the model says about each linear: how much a token counts, and which rows of a weight err together.

To second order, the KL that an error of one linear causes is a sum over tokens of (g d)^2 / 2, where d is the error of its output and g the
gradient, at that output, of log p of labels drawn from the model's own predictions (`calibrate/gradients.py`). A layer's squared output
error, which GPTQ and its kin minimise, takes every token and every direction of the output for equally important. Two factors of what it
leaves out:

    weights   E[|g|^2 x x^T] in the place of E[x x^T]: tokens count by what their gradient is (GuidedQuant, arXiv 2505.07004)
    outputs   E[u u^T], u = g / |g|: rows whose errors the rest of the model adds up should err in opposite ways (the output factor of
              YAQA, arXiv 2505.22988, which takes g)

How large a gradient is, the weights say already; with g itself the few tokens of large ones would decide the second factor alone, which is
then as noisy as their number is small. Noise of few tokens is taken out again by shrinking what lies off the diagonal. So an eighth of the
windows is enough, and the tokens of the others count as the mean. Mean KL on the bundled model, linears compressed in turn, two seeds:
with u and shrunk 0.0203 from all windows, 0.0203 from a quarter, 0.0204 from an eighth, 0.0210 from a sixteenth; with g, not shrunk, 0.0203
from all, 0.0214 from a quarter.

Both come from walks forward and back over the source model and are kept in files of the stage's scratch. Output moments come from the first
walk alone. They have segments of rows, across which they are zero: whole, they would outgrow the layer.

Shapes: N samples, S sequence, T tokens of one sample, O out, R rows of a segment.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.artifact.tensors import load_tensors, save_tensors
from compress.calibrate.gradients import EmbedAndHead, GradientVisitor, visit_gradients
from compress.calibrate.stats import InputStats
from compress.context import Context
from compress.models.arch import LinearGroup
from compress.models.decoder import DecoderLayer
from compress.models.weights import WeightSource
from compress.recipe import Spec

SEGMENT_ROWS = 2048
"""Largest segment of rows."""
TOKENS_OF_A_WALK = 1 << 16
"""Tokens that are walked together, in whole samples: their inputs of all layers are what is held on the way."""
TOKENS_OF_A_PRODUCT = 1 << 12
"""Tokens whose gradients are summed by one product."""
WEIGHTS_NAME = "guide-weights.safetensors"


class Guide(Spec):
    """How far the calibration follows the end of the model."""

    kind: Literal["gradients"] = "gradients"
    share: float = Field(
        0.8,
        ge=0,
        le=1,
        description="of a token's weight that its gradient decides; the rest is the same for all tokens",
    )
    windows: float = Field(
        0.125, gt=0, le=1, description="share of the calibration windows that gradients are taken on"
    )

    def walked(self, num_samples: int) -> list[int]:
        """Which samples, evenly spread."""
        num = max(1, round(self.windows * num_samples))
        return [idx * num_samples // num for idx in range(num)]


@dataclass(frozen=True)
class OutputMoment:
    """E[u u^T] of stacked rows, 1 on average on the diagonal, as square segments in the order of the rows."""

    segments: tuple[Tensor, ...]

    def rows(self, begin: int, end: int) -> "OutputMoment":
        """That of some rows."""
        found = []
        first = 0
        for segment in self.segments:
            inside = slice(max(begin - first, 0), max(end - first, 0))
            if len(piece := segment[inside, inside]):
                found.append(piece)
            first += len(segment)
        return OutputMoment(tuple(found))

    def rescaled(self, scale_O: Tensor) -> "OutputMoment":
        """After outputs were divided by a scale, and the gradients multiplied."""
        pieces = zip(self.segments, scale_O.cpu().split([len(each) for each in self.segments]), strict=True)
        return OutputMoment(
            tuple(segment * scale_R.to(segment).outer(scale_R.to(segment)) for segment, scale_R in pieces)
        )


@dataclass(frozen=True)
class LayerGuide:
    """By tap: float32 weights [N, S], 1 on average, and the output moment of the linears behind it."""

    token_weights: Mapping[str, Tensor]
    output_moments: Mapping[str, OutputMoment]


def make_guide(
    spec: Guide, source: WeightSource, tokens_NS: Tensor, ctx: Context, *, compute_dtype: torch.dtype
) -> None:
    """Write the guide of every layer into the scratch directory, if it is not there.

    Raises:
        UsageError: the model's logits are not finite.
        Interrupted: between layers, when the context says so.
    """
    if (ctx.scratch / WEIGHTS_NAME).exists():
        return
    walked = torch.tensor(spec.walked(len(tokens_NS)))
    draws_NS = torch.rand(tokens_NS.shape, generator=ctx.rng("guide", "labels"))
    squares: dict[str, list[Tensor]] = {}
    ends = EmbedAndHead.load(source, compute_dtype=compute_dtype, device=torch.device(ctx.device))
    for begin, walk in enumerate(walked.split(max(1, TOKENS_OF_A_WALK // tokens_NS.shape[1]))):
        visitor = _Visitor(squares, outputs_to=ctx.scratch if begin == 0 else None)
        visit_gradients(
            source,
            tokens_NS[walk],
            visitor,
            ctx,
            compute_dtype=compute_dtype,
            draws_NS=draws_NS[walk],
            ends=ends,
        )
        visitor.write()
    shared = {
        name: torch.ones(tokens_NS.shape).index_copy(0, walked, _weights(torch.stack(rows).cpu(), spec.share))
        for name, rows in squares.items()
    }
    save_tensors(ctx.scratch / WEIGHTS_NAME, shared)  # last: where it is, the rest is too


class GuideFiles:
    """The guide that `make_guide` has written."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._weights = load_tensors(scratch / WEIGHTS_NAME)

    def layer(self, layer_idx: int, samples: slice = slice(None)) -> LayerGuide:
        segments: dict[str, list[Tensor]] = {}
        for name, segment in sorted(load_tensors(_outputs_file(self._scratch, layer_idx)).items()):
            segments.setdefault(name.partition("/")[0], []).append(segment)
        weights = {tap: self._weights[f"{layer_idx}/{tap}"][samples] for tap in segments}
        return LayerGuide(weights, {tap: OutputMoment(tuple(each)) for tap, each in segments.items()})


class _Visitor(GradientVisitor):
    """Notes the squared gradient of each token, and sums a layer's output moments, which are written when the next layer comes."""

    def __init__(self, squares: dict[str, list[Tensor]], *, outputs_to: Path | None) -> None:
        self._squares = squares
        self._outputs_to = outputs_to
        self._layer_idx = 0
        self._sums = dict[str, Tensor]()
        self._num_tokens = Counter[str]()
        self._waiting: dict[str, list[Tensor]] = {}

    def enter(self, layer: DecoderLayer, stats: Mapping[str, InputStats]) -> None:
        self.write()
        self._layer_idx = layer.layer_idx

    def see(
        self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        g_TO = torch.cat([gradients[name] for name in group.linears], dim=1)
        sizes_T = torch.linalg.vector_norm(g_TO, dim=1, dtype=torch.float32)
        self._squares.setdefault(f"{layer.layer_idx}/{group.tap}", []).append(sizes_T.square())
        if self._outputs_to is None:
            return
        self._num_tokens[group.tap] += len(g_TO)
        waiting = self._waiting.setdefault(group.tap, [])
        waiting.append(g_TO * (1 / sizes_T).nan_to_num_(posinf=0).to(g_TO.dtype).unsqueeze(1))
        if sum(map(len, waiting)) >= TOKENS_OF_A_PRODUCT:
            self._add(group.tap)

    def _add(self, tap: str) -> None:
        """The directions that wait for company become one product for each segment: its sums outweigh a few tokens. They are rounded to the
        dtype of the gradients, as the whole will be."""
        for idx, g_TR in enumerate(torch.cat(self._waiting.pop(tap)).split(SEGMENT_ROWS, dim=1)):
            name = f"{tap}/{idx:04d}"
            moment_RR = (g_TR.t() @ g_TR).to(torch.float32)
            self._sums[name] = moment_RR if name not in self._sums else self._sums[name].add_(moment_RR)

    def write(self) -> None:
        for tap in list(self._waiting):
            self._add(tap)
        if self._outputs_to is not None and self._sums:
            moments = {
                name: _moment(sum_RR, self._num_tokens[name.partition("/")[0]])
                for name, sum_RR in self._sums.items()
            }
            halved = {name: moment_RR.to(torch.bfloat16).cpu() for name, moment_RR in moments.items()}
            save_tensors(_outputs_file(self._outputs_to, self._layer_idx), halved)
        self._sums = {}
        self._num_tokens = Counter()


def _moment(sum_RR: Tensor, num_tokens: int) -> Tensor:
    """1 on average on the diagonal; where no gradient arrives, zero. What lies off the diagonal shrinks by R / (R + T), the more the fewer
    the tokens are that R^2 numbers were estimated from, as the best mixture with the diagonal does (Ledoit and Wolf 2004)."""
    mean = sum_RR.diagonal().mean()
    rows = len(sum_RR)
    moment_RR = sum_RR / mean if float(mean) > 0 else sum_RR
    shrunk_RR = moment_RR * (num_tokens / (rows + num_tokens))
    shrunk_RR.diagonal().copy_(moment_RR.diagonal())
    return shrunk_RR


def _weights(squares_NS: Tensor, share: float) -> Tensor:
    mean = squares_NS.mean()
    return (1 - share) + share * squares_NS / mean if float(mean) > 0 else torch.ones_like(squares_NS)


def _outputs_file(scratch: Path, layer_idx: int) -> Path:
    return scratch / f"guide-{layer_idx:05d}.safetensors"

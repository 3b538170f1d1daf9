"""Gradients as a guide for calibration: how much each token counts, and which rows of a weight should err in
opposite ways.

To second order, the KL that an error of one linear causes is a sum over tokens of (g d)^2 / 2, where d is the
error of its output and g the gradient, at that output, of log p of labels drawn from the model's own
predictions (`calibrate/gradients.py`). A layer's squared output error, which GPTQ and its kin minimise,
treats all tokens and all directions of the output as equally important. A guide adds two factors:

    weights   E[|g|^2 x x^T] in the place of E[x x^T]: tokens count by their gradient
              (GuidedQuant, arXiv 2505.07004)
    outputs   E[u u^T], u = g / |g|: rows whose errors the rest of the model adds up should err in opposite
              ways (the output factor of YAQA, arXiv 2505.22988, which takes g)

The weights already hold the size of a gradient. With g in the place of u the few tokens of large gradients
would decide the second factor alone and make it as noisy as a mean over so few. The noise of few tokens is
reduced by shrinking the values off the diagonal. So an eighth of the windows is enough, and the tokens of the
others count as the mean. Mean KL on the bundled model with `true_sequential`, two seeds: with u and shrunk
0.0203 from all windows, 0.0203 from a quarter, 0.0204 from an eighth, 0.0210 from a sixteenth; with g, not
shrunk, 0.0203 from all, 0.0214 from a quarter.

Both factors come from walks forward and back over the source model and are kept in files of the stage's
scratch directory. Output moments come from the first walk only. They are block-diagonal, with segments of
rows, because a whole one would be larger than the layer.

Shapes: N samples, S sequence, T tokens of one sample, O out, R rows of a segment.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.artifact.resume import ResumePoint
from compress.calibrate.experts import expert_of
from compress.calibrate.gradients import EmbedAndHead, GradientVisitor, visit_gradients
from compress.calibrate.stats import InputStats
from compress.context import Context
from compress.models.decoder import DecoderLayer
from compress.models.linear_groups import LinearGroup
from compress.models.weights import WeightSource
from compress.recipe import Spec

SEGMENT_ROWS = 2048
"""Largest number of rows of a segment of an output moment."""
WALK_TOKENS = 1 << 16
"""Largest number of tokens of one walk, in whole samples; a walk holds their inputs of all layers."""
PRODUCT_TOKENS = 1 << 12
"""Number of tokens whose gradients one product sums."""
WEIGHTS_NAME = "guide-weights.safetensors"


class Guide(Spec):
    """Options of the guide of a recipe: how far calibration follows gradients."""

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
        """Return the indices of the samples that gradients are taken on, evenly spread."""
        num = max(1, round(self.windows * num_samples))
        return [idx * num_samples // num for idx in range(num)]


@dataclass(frozen=True)
class OutputMoment:
    """E[u u^T] of stacked rows, 1 on average on the diagonal, as square segments in the order of the rows;
    zero between segments."""

    segments: tuple[Tensor, ...]

    def rows(self, begin: int, end: int) -> "OutputMoment":
        """Return the moment of the rows begin .. end - 1."""
        found = []
        first = 0
        for segment in self.segments:
            inside = slice(max(begin - first, 0), max(end - first, 0))
            if len(piece := segment[inside, inside]):
                found.append(piece)
            first += len(segment)
        return OutputMoment(tuple(found))

    def rescaled(self, scale_O: Tensor) -> "OutputMoment":
        """Return the moment after outputs were divided by a scale, which multiplies the gradients by it."""
        pieces = zip(self.segments, scale_O.cpu().split([len(each) for each in self.segments]), strict=True)
        return OutputMoment(
            tuple(segment * scale_R.to(segment).outer(scale_R.to(segment)) for segment, scale_R in pieces)
        )


@dataclass(frozen=True)
class LayerGuide:
    """The guide of one layer, by tap: token weights, float32 [N, S], 1 on average, and the output moment of
    the linear group."""

    token_weights: Mapping[str, Tensor]
    output_moments: Mapping[str, OutputMoment]


def make_guide(
    spec: Guide,
    source: WeightSource,
    tokens_NS: Tensor,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
    counted_NS: Tensor | None = None,
) -> None:
    """Write the guide of every layer into the scratch directory, unless it is there. `counted_NS` are the
    tokens whose predictions count, None: all.

    Raises:
        UsageError: the model's logits are not finite.
        Interrupted: between layers, when a signal asked for it.
    """
    if GuideFiles(ctx).are_whole(source.arch.num_layers):
        return
    walked = torch.tensor(spec.walked(len(tokens_NS)))
    draws_NS = torch.rand(tokens_NS.shape, generator=ctx.rng("guide", "labels"))
    squares: dict[str, list[Tensor]] = {}
    outer_modules = EmbedAndHead.load(source, compute_dtype=compute_dtype, device=torch.device(ctx.device))
    for begin, walk in enumerate(walked.split(max(1, WALK_TOKENS // tokens_NS.shape[1]))):
        visitor = _Visitor(squares, outputs_to=ctx if begin == 0 else None)
        visit_gradients(
            source,
            tokens_NS[walk],
            visitor,
            ctx,
            compute_dtype=compute_dtype,
            draws_NS=draws_NS[walk],
            counted_NS=None if counted_NS is None else counted_NS[walk],
            outer_modules=outer_modules,
        )
        visitor.write()
    shared = {
        name: torch.ones(tokens_NS.shape).index_copy(0, walked, _weights(torch.stack(rows).cpu(), spec.share))
        for name, rows in squares.items()
    }
    _weights_point(ctx).save_tensors(shared)


class GuideFiles:
    """The guide in the scratch directory, as `make_guide` wrote it."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._weights: dict[str, Tensor] | None = None

    def are_whole(self, num_layers: int) -> bool:
        """Return whether all of it is there, undamaged."""
        points = [_outputs_point(self._ctx, idx) for idx in range(num_layers)]
        return all(point.load_tensors() is not None for point in (_weights_point(self._ctx), *points))

    def layer(self, layer_idx: int, samples: slice = slice(None)) -> LayerGuide:
        self._weights = self._weights or _weights_point(self._ctx).saved_tensors()
        segments: dict[str, list[Tensor]] = {}
        for name, segment in sorted(_outputs_point(self._ctx, layer_idx).saved_tensors().items()):
            segments.setdefault(name.partition("/")[0], []).append(segment)
        weights = {tap: self._weights[f"{layer_idx}/{tap}"][samples] for tap in segments}
        return LayerGuide(weights, {tap: OutputMoment(tuple(each)) for tap, each in segments.items()})


class _Visitor(GradientVisitor):
    """Records the squared gradient of each token and sums a layer's output moments, which it writes before
    the next layer."""

    def __init__(self, squares: dict[str, list[Tensor]], *, outputs_to: Context | None) -> None:
        self._squares = squares
        self._outputs_to = outputs_to
        self._layer_idx = 0
        self._sums = dict[str, Tensor]()
        self._num_tokens = Counter[str]()
        self._waiting: dict[str, list[Tensor]] = {}

    def start_layer(self, layer: DecoderLayer, stats: Mapping[str, InputStats]) -> None:
        self.write()
        self._layer_idx = layer.layer_idx

    def add_sample(
        self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        if expert_of(group.tap) is not None:
            return  # the tokens of an expert weigh the same: the compressed model may route others to it
        g_TO = torch.cat([gradients[name] for name in group.linears], dim=1)
        sizes_T = torch.linalg.vector_norm(g_TO, dim=1, dtype=torch.float32)
        self._squares.setdefault(f"{layer.layer_idx}/{group.tap}", []).append(sizes_T.square())
        if self._outputs_to is None:
            return
        self._num_tokens[group.tap] += len(g_TO)
        waiting = self._waiting.setdefault(group.tap, [])
        waiting.append(g_TO * (1 / sizes_T).nan_to_num_(posinf=0).to(g_TO.dtype).unsqueeze(1))
        if sum(map(len, waiting)) >= PRODUCT_TOKENS:
            self._add(group.tap)

    def _add(self, tap: str) -> None:
        """Add the collected directions of a tap as one product for each segment: the sums are much larger
        than a few tokens. The product is rounded to the dtype of the gradients, as the total will be."""
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
            _outputs_point(self._outputs_to, self._layer_idx).save_tensors(halved)
        self._sums = {}
        self._num_tokens = Counter()


def _moment(sum_RR: Tensor, num_tokens: int) -> Tensor:
    """Return the moment with 1 on average on the diagonal, or zeros if no gradient arrives. Values off the
    diagonal shrink by T / (R + T), more if R^2 numbers were estimated from fewer tokens T, like the best
    mixture with the diagonal (Ledoit and Wolf 2004)."""
    mean = sum_RR.diagonal().mean()
    rows = len(sum_RR)
    moment_RR = sum_RR / mean if float(mean) > 0 else sum_RR
    shrunk_RR = moment_RR * (num_tokens / (rows + num_tokens))
    shrunk_RR.diagonal().copy_(moment_RR.diagonal())
    return shrunk_RR


def _weights(squares_NS: Tensor, share: float) -> Tensor:
    mean = squares_NS.mean()
    return (1 - share) + share * squares_NS / mean if float(mean) > 0 else torch.ones_like(squares_NS)


def _outputs_point(ctx: Context, layer_idx: int) -> ResumePoint:
    return ResumePoint(ctx.scratch / f"guide-{layer_idx:05d}.safetensors", ctx.progress.log)


def _weights_point(ctx: Context) -> ResumePoint:
    return ResumePoint(ctx.scratch / WEIGHTS_NAME, ctx.progress.log)

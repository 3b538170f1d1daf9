"""`quantize`: smoother x rounder x scheme over every decoder linear, layer by layer, resumable at each layer."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import Tensor

from compress.artifact.context import Context
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.dataset import load_token_set
from compress.calibrate.sequential import LayerPass, LayerState, run_sequential
from compress.calibrate.stats import SecondMoment, Stat, StatFactory
from compress.errors import UnsupportedFormat
from compress.methods import ROUNDERS, SMOOTHERS, Rounder, Smoother
from compress.methods.gptq import Gptq
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name
from compress.models.surgery import fold_
from compress.quant.numerics import grouped, min_max_scale, output_error, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme, scheme_named
from compress.recipe import ByKind, Spec, checked_by
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.calibrate import TOKENS_NAME, Calibrate
from compress.stages.weights import open_weights


def _specs(methods: Any) -> Mapping[str, type[Spec]]:
    return {name: cast(type[Spec], method) for name, method in methods.items()}


class Quantize(Spec):
    """Which codes weights get, and how scales and roundings are found."""

    scheme: Annotated[str, checked_by(scheme_named)] = Field(
        "W4A16_G128", description=f"one of {', '.join(SCHEMES)}", json_schema_extra={"enum": list(SCHEMES)}
    )
    smooth: Annotated[Spec, ByKind(lambda: _specs(SMOOTHERS))] | None = None
    round: Annotated[Spec, ByKind(lambda: _specs(ROUNDERS))] = Gptq()


class SmoothPass:
    """Finds and folds the smoother's scale for every pair of a layer, and moves the statistics along."""

    def __init__(self, smoother: Smoother, scheme: Scheme, stored_dtype: torch.dtype) -> None:
        self._smoother, self._scheme, self._stored_dtype = smoother, scheme, stored_dtype

    def stats(self) -> Mapping[str, StatFactory]:
        return self._smoother.stats()

    def apply(self, state: LayerState) -> None:
        for pair in state.pairs:
            stacked_OI = torch.cat([state.weights[f"{linear}.weight"] for linear in pair.linears])
            stats = state.stats[pair.tap]
            scale_I = self._smoother.scale(
                stacked_OI, stats, self._scheme, scale_dtype=self._stored_dtype, head_repeat=(pair.repeat, pair.head_dim)
            )
            folded_I = fold_(state.weights, pair, scale_I, stored_dtype=self._stored_dtype)
            for stat in stats.values():
                stat.rescale_(folded_I)


class RoundPass:
    """Rounds every group of linears and notes, per linear, the output error before (plain nearest rounding) and after."""

    def __init__(self, rounder: Rounder, scheme: Scheme, stored_dtype: torch.dtype) -> None:
        self._rounder, self._scheme, self._stored_dtype = rounder, scheme, stored_dtype

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment, **self._rounder.stats()}

    def apply(self, state: LayerState) -> None:
        for group in state.groups:
            stats = state.stats[group.tap]
            weights = [state.weights[f"{linear}.weight"] for linear in group.linears]
            rounded = self._rounder.round(torch.cat(weights), stats, self._scheme, scale_dtype=self._stored_dtype)
            pieces = _split_rows(rounded.weight, [weight.shape[0] for weight in weights])
            for linear, weight, piece in zip(group.linears, weights, pieces, strict=True):
                state.quantized[linear] = piece
                state.row(linear).update(error_after=output_error(weight, piece.dequantize(), _moment(stats)), **rounded.facts)


class BaselinePass:
    """Notes the output error of plain nearest rounding before anything is changed: what the methods are compared with."""

    def __init__(self, scheme: Scheme, stored_dtype: torch.dtype) -> None:
        self._scheme, self._stored_dtype = scheme, stored_dtype

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment}

    def apply(self, state: LayerState) -> None:
        for group in state.groups:
            h_II = _moment(state.stats[group.tap])
            for linear in group.linears:
                weight = state.weights[f"{linear}.weight"]
                scale, zero_point = min_max_scale(grouped(weight, self._scheme), self._scheme, self._stored_dtype)
                nearest = round_to_nearest(weight, self._scheme, scale, zero_point)
                state.row(linear).update(error_before=output_error(weight, nearest.dequantize(), h_II))


def quantization_passes(spec: Quantize, stored_dtype: torch.dtype) -> list[LayerPass]:
    """The passes of a spec, in order."""
    scheme = scheme_named(spec.scheme)
    passes: list[LayerPass] = [BaselinePass(scheme, stored_dtype)]
    if spec.smooth is not None:
        passes.append(SmoothPass(cast(Smoother, spec.smooth), scheme, stored_dtype))
    passes.append(RoundPass(cast(Rounder, spec.round), scheme, stored_dtype))
    return passes


def compute_dtype(device: str, stored_dtype: torch.dtype) -> torch.dtype:
    """The model's own dtype on a GPU; float32 on a CPU, most of which have no fast 16-bit arithmetic."""
    return torch.float32 if torch.device(device).type == "cpu" else stored_dtype


def _moment(stats: Mapping[str, Stat]) -> Tensor:
    moment = stats["second_moment"]
    assert isinstance(moment, SecondMoment)
    return moment.mean()


def _split_rows(weight: QuantizedWeight, rows: list[int]) -> list[QuantizedWeight]:
    codes, scales = weight.codes_OI.split(rows), weight.scale_OG.split(rows)
    zeros = [None] * len(rows) if weight.zero_point_OG is None else list(weight.zero_point_OG.split(rows))
    return [QuantizedWeight(weight.scheme, *each) for each in zip(codes, scales, zeros, strict=True)]


def _depends(spec: Quantize, device: str) -> Mapping[str, str]:
    """The kind of device: a CPU computes in float32, a GPU in the model's dtype, and neither goes on from the other's resume points."""
    return {"device": torch.device(device).type}


def _refuse_quantized(arch: Arch) -> None:
    """Raises UnsupportedFormat when the model's config says that its weights are codes already."""
    said = arch.config.get("quantization_config")
    if said:
        raise UnsupportedFormat(
            f"the model is quantized already (quant_method '{said.get('quant_method')}'): codes of codes would add a second error to the "
            "first. Name the dense model that it was made from."
        )


def _estimate(spec: Quantize, facts: PlanFacts) -> Estimate:
    """Peak: one layer twice (compute dtype and float32), its largest Hessians, and the activations of the whole calibration set."""
    arch, scheme = facts.arch, scheme_named(spec.scheme)
    _refuse_quantized(arch)
    calib = facts.specs.get("calibrate") or Calibrate()
    assert isinstance(calib, Calibrate)
    width = 4 if facts.device == "cpu" else 2
    num_tokens = calib.num_samples * calib.seq_len
    layer = max(arch.layers, key=lambda each: each.intermediate_size)
    shapes = [layer.linear_shape(name, arch.hidden_size) for name in layer.linears]
    params = sum(rows * columns for rows, columns in shapes)
    hessians = 4 * sum(columns**2 for columns in {columns for _, columns in shapes} | {arch.hidden_size})
    largest = max(columns for _, columns in shapes)
    peak = params * (width + 4) + 2 * hessians + 3 * 4 * largest**2 + num_tokens * arch.hidden_size * width
    codes = sum(scheme.weight_bytes(*each.linear_shape(name, arch.hidden_size)) for each in arch.layers for name in each.linears)
    outer = 2 * arch.vocab_size * arch.hidden_size * (1 if arch.tied_head else 2)
    inputs = [2 * arch.hidden_size, layer.num_heads * layer.head_dim, layer.intermediate_size]
    grams = arch.num_layers * num_tokens * 2.0 * (sum(size**2 for size in inputs) - 2 * arch.hidden_size**2)
    rounding = 2.0 * sum(rows * columns**2 for rows, columns in shapes) * arch.num_layers * (42 if spec.smooth is not None else 2)
    flops = 2 * 2.0 * arch.num_linear_params * num_tokens + grams + rounding
    return Estimate(peak, codes + outer, flops, notes=(f"{scheme.name}, {arch.num_layers} layers one at a time",))


@STAGES.stage(
    "quantize",
    version=1,
    takes=(Port.DENSE, Port.CALIB),
    gives=Port.QUANTIZED,
    spec=Quantize,
    estimate=_estimate,
    depends=_depends,
)
def quantize(spec: Quantize, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    source, scheme = open_weights(inputs[Port.DENSE].path), scheme_named(spec.scheme)
    _refuse_quantized(source.arch)
    if source.arch.dtype not in ("bfloat16", "float16", "float32"):
        raise UnsupportedFormat(f"the model's dtype '{source.arch.dtype}' is not one that scales can be stored in.")
    stored_dtype = getattr(torch, source.arch.dtype)
    rows = run_sequential(
        source,
        load_token_set(inputs[Port.CALIB].path / TOKENS_NAME).tokens_NS,
        quantization_passes(spec, stored_dtype),
        ctx.scratch,
        ctx,
        scheme=scheme,
        compute_dtype=compute_dtype(ctx.device, stored_dtype),
    )
    for name in (OUTER_NAME, *(layer_name(idx) for idx in range(source.arch.num_layers))):
        os.link(ctx.scratch / name, out.path / name)
    arch, layers = source.arch.to_json()
    shapes = [{"scheme": scheme.name, **layer} for layer in layers]
    out.describe(role="quantized", arch=arch, layers=shapes, scheme=scheme.to_json(), facts={"layers": rows})

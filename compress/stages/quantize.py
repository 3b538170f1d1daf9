"""`quantize`: smoother x target x rounder x refiner x scheme over every decoder linear, layer by layer, resumable at each layer; the head,
if asked, after them, by plain rounding to nearest."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, cast

import torch
from pydantic import Field, model_validator

from compress.artifact.context import Context
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.dataset import load_token_set
from compress.calibrate.kv import cache_warning
from compress.calibrate.sequential import LayerPass, Row, run_sequential
from compress.errors import UnsupportedFormat, UsageError, did_you_mean
from compress.export import open_weights
from compress.methods import REFINERS, ROUNDERS, SMOOTHERS, TARGETS, Refiner, Rounder, Smoother, Target
from compress.methods.awq import Awq
from compress.methods.descent import Descent
from compress.methods.gptq import Gptq
from compress.methods.passes import BaselinePass, RoundPass, SmoothPass
from compress.methods.smoothquant import SmoothQuant
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, load_weights, save_weights
from compress.models.weights import dense
from compress.quant.kv import FP8_STATIC, KV_CACHES, kv_cache_named
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, ModelScheme, QuantizedWeight, Scheme, scheme_named
from compress.recipe import ByKind, Spec, checked_by
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.calibrate import TOKENS_NAME, Calibrate

HEAD_ROWS = 8192
"""Rows of a head that are rounded at once; rows are independent."""
HEAD_SCHEMES = tuple(each.name for each in SCHEMES.values() if each.num_bits == 8 and each.activation != "tensor")
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fast": {"round": {"kind": "rtn", "scale": "hessian"}},
    "balanced": {"target": {"kind": "gptaq"}, "round": {"kind": "gptq"}, "refine": {"kind": "descent"}},
}
"""What a preset says for the keys that a recipe leaves out. Mean KL at W4A16_G128 on the bundled model, three seeds
(`scripts/bench_quality.py`, CPU): plain rounding 0.0916, GPTQ with min-max scales 0.0353, balanced without its target 0.0297. What the
target adds, mean of the seeds (each of them gains) on a quarter of the calibration tokens (`--num-samples 32 --eval-samples 32`):

    strength     none      0.25      0.5       1 (one seed; it had 0.0309 without)
    mean KL      0.0311    0.0292    0.0290    0.0325
    time         1         1.4       1.4
"""


def _specs(methods: Any) -> Mapping[str, type[Spec]]:
    return {name: cast(type[Spec], method) for name, method in methods.items()}


def _preset_named(name: str | None) -> None:
    if name is not None and name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'.{did_you_mean(name, PRESETS)}")


def _scheme_of_a_head(name: str | None) -> None:
    if name is not None and scheme_named(name).name not in HEAD_SCHEMES:
        raise UsageError(f"a head is rounded to nearest, without calibration, so it takes {' or '.join(HEAD_SCHEMES)}, not {name}.")


def _kv_cache(name: str | None) -> None:
    if name is not None:
        kv_cache_named(name)


class Quantize(Spec):
    """Which codes weights get, and how scales and roundings are found."""

    scheme: Annotated[str, checked_by(scheme_named)] = Field(
        "W4A16_G128", description=f"one of {', '.join(SCHEMES)}", json_schema_extra={"enum": list(SCHEMES)}
    )
    head: Annotated[str | None, checked_by(_scheme_of_a_head)] = Field(
        None,
        description=f"scheme of the output head, {' or '.join(HEAD_SCHEMES)}; left out, it stays dense",
        json_schema_extra={"enum": [*HEAD_SCHEMES, None]},
    )
    preset: Annotated[str | None, checked_by(_preset_named)] = Field(
        None,
        exclude=True,  # what is kept, in cache keys, locks and manifests, is what it stands for
        description="`fast` or `balanced` settings for those of smooth, target, round and refine that are left out",
        json_schema_extra={"enum": [*PRESETS, None]},
    )
    smooth: Annotated[Spec, ByKind(lambda: _specs(SMOOTHERS))] | None = None
    target: Annotated[Spec, ByKind(lambda: _specs(TARGETS))] | None = None
    round: Annotated[Spec, ByKind(lambda: _specs(ROUNDERS))] = Gptq()
    refine: Annotated[Spec, ByKind(lambda: _specs(REFINERS))] | None = None
    kv_cache: Annotated[str | None, checked_by(_kv_cache)] = Field(
        None,
        exclude_if=lambda name: name is None,  # so that what was made before there was this key keeps its cache key
        description="KV cache to serve with: `fp8` calibrates a scale for the keys and one for the values of each layer; the others find a "
        "scale for each position and head as they go; left out, keys and values stay in 16 bits",
        json_schema_extra={"enum": [*KV_CACHES, None]},
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, raw: Any) -> Any:
        """An explicit key stands, `null` included; it replaces the whole of what the preset has under that key."""
        if not isinstance(raw, Mapping) or not isinstance(raw.get("preset"), str) or raw["preset"] not in PRESETS:
            return raw  # None, or a value that its field refuses
        return {**PRESETS[raw["preset"]], **raw}

    @model_validator(mode="after")
    def _refuse_what_does_nothing(self) -> Self:
        """Measured on the bundled model, mean KL of FP8_DYNAMIC: RTN 0.0091, AWQ + RTN 0.0091, GPTQ 0.0064, AWQ + GPTQ 0.0065."""
        if isinstance(self.smooth, Awq) and scheme_named(self.scheme).type == "float":
            raise ValueError(
                f"smooth: awq does nothing for {self.scheme}: it gives large channels finer integer steps, and the steps of a float are "
                "relative already. Leave out `smooth`."
            )
        if isinstance(self.smooth, SmoothQuant) and scheme_named(self.scheme).activation is None:
            raise ValueError(
                f"smooth: smoothquant does nothing for {self.scheme}: it moves outliers out of the inputs, which this scheme leaves in 16 "
                "bits. Use `awq`, or leave out `smooth`."
            )
        return self

    def method(self) -> str:
        """Smoother, target, rounder and refiner in one line, every setting said: what a preset stands for can be read here."""
        parts = {"smooth": self.smooth, "target": self.target, "round": self.round, "refine": self.refine}
        return "; ".join(f"{name}: {_settings(each)}" for name, each in parts.items() if each is not None)

    def model_scheme(self) -> ModelScheme:
        return ModelScheme(scheme_named(self.scheme), None if self.head is None else scheme_named(self.head))

    def kv_format(self) -> str | None:
        return None if self.kv_cache is None else kv_cache_named(self.kv_cache)


def _settings(spec: Spec) -> str:
    settings = spec.model_dump(mode="json")
    kind = settings.pop("kind")
    return f"{kind} ({', '.join(f'{key} {json.dumps(value)}' for key, value in settings.items())})"


def quantization_passes(spec: Quantize, stored_dtype: torch.dtype) -> list[LayerPass]:
    """The passes of a spec, in order."""
    scheme = scheme_named(spec.scheme)
    passes: list[LayerPass] = [BaselinePass(scheme, stored_dtype)]
    if spec.smooth is not None:
        passes.append(SmoothPass(cast(Smoother, spec.smooth), scheme, stored_dtype))
    refiner, target = cast(Refiner | None, spec.refine), cast(Target | None, spec.target)
    passes.append(RoundPass(cast(Rounder, spec.round), scheme, stored_dtype, refiner, target))
    return passes


def compute_dtype(device: str, stored_dtype: torch.dtype) -> torch.dtype:
    """The model's own dtype on a GPU; float32 on a CPU, most of which have no fast 16-bit arithmetic."""
    return torch.float32 if torch.device(device).type == "cpu" else stored_dtype


def outer_bytes(arch: Arch, scheme: ModelScheme) -> int:
    """Embedding and head on disk, in 16 bits unless the head has a scheme."""
    dense_bytes = 2 * arch.vocab_size * arch.hidden_size
    if arch.tied_head:
        return dense_bytes
    return dense_bytes + (dense_bytes if scheme.head is None else scheme.head.weight_bytes(arch.vocab_size, arch.hidden_size))


def _place(stored: Path, place: Path) -> None:
    """A finished layer becomes part of the artifact without a copy, where the file system knows hard links."""
    try:
        os.link(stored, place)
    except OSError:
        shutil.copyfile(stored, place)


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


def _refuse_tied_head(spec: Quantize, arch: Arch) -> None:
    """Raises UnsupportedFormat when the head that is to be quantized is the embedding."""
    if spec.head is not None and arch.tied_head:
        raise UnsupportedFormat(
            f"the model's head is tied to its embedding, which stays dense: a head in {spec.head} would be a second, different matrix, and "
            "no format has a place for it. Leave out `head`."
        )


def _quantize_head(stored: Path, place: Path, scheme: Scheme, device: torch.device) -> None:
    """The outer weights with codes for the head; blocks of rows, because float32 copies of a whole head would be the peak of the stage."""
    outer = load_weights(stored, None)
    rows = dense(outer["head.weight"]).split(HEAD_ROWS)
    blocks = [nearest_weight(each.to(device), scheme, each.dtype) for each in rows]
    codes, scales = (torch.cat([part.cpu() for part in parts]) for parts in zip(*((b.codes_OI, b.scale_OG) for b in blocks), strict=True))
    save_weights(place, outer | {"head.weight": QuantizedWeight(scheme, codes, scales)})


def _estimate(spec: Quantize, facts: PlanFacts) -> Estimate:
    """Peak: one layer twice (compute dtype and float32), its largest Hessians, and the activations of the whole calibration set; with a
    target, also those of the source model, and their moments with the others."""
    arch, scheme = facts.arch, scheme_named(spec.scheme)
    _refuse_quantized(arch)
    _refuse_tied_head(spec, arch)
    calib = facts.specs.get("calibrate") or Calibrate()
    assert isinstance(calib, Calibrate)
    width = 4 if facts.device == "cpu" else 2
    num_tokens = calib.num_samples * calib.seq_len
    layer = max(arch.layers, key=lambda each: each.intermediate_size)
    shapes = {name: layer.linear_shape(name, arch.hidden_size) for name in layer.linears}
    inputs = {layer.linears[name]: columns for name, (_, columns) in shapes.items()}  # tap -> features
    stacked = max(sum(shapes[n][0] * shapes[n][1] for n in shapes if layer.linears[n] == tap) for tap in inputs)
    hessians, largest = 4 * sum(size**2 for size in inputs.values()), 4 * max(inputs.values()) ** 2
    # Observing holds the merge tree's statistics; rounding holds those of the layer, and copies of a stack of linears or of the largest H.
    streams = 1 if spec.target is None else 2  # of activations: of the compressed model, and of the source
    working = max(4 * streams * hessians, streams * hessians + 6 * 4 * stacked, streams * hessians + 6 * largest)
    params = sum(rows * columns for rows, columns in shapes.values())
    peak = params * (width + 4) + streams * num_tokens * arch.hidden_size * width + working
    codes = sum(scheme.weight_bytes(*each.linear_shape(name, arch.hidden_size)) for each in arch.layers for name in each.linears)
    outer = outer_bytes(arch, spec.model_scheme())
    kv_format = spec.kv_format()
    kv_note = [] if kv_format is None else [f"KV cache {kv_format}, {kv_bytes_per_token(arch, kv_format):,} bytes a token"]
    forward = (1 + streams) * 2.0 * arch.num_linear_params * num_tokens
    grams = streams * 2.0 * num_tokens * arch.num_layers * sum(size**2 for size in inputs.values())
    sweeps = spec.refine.sweeps if isinstance(spec.refine, Descent) else 0
    searches = (22 if spec.smooth is not None else 2) + 2 * sweeps + (6 if spec.target is not None else 0)  # in float64, as two
    in_float32 = 2.0 * arch.num_layers * searches * sum(rows * columns**2 for rows, columns in shapes.values())
    slower = 1 if facts.device == "cpu" else 5  # float32 products beside bf16 ones on tensor cores (51 against 250 TFLOP/s sustained, H200)
    flops = forward + grams + slower * in_float32
    return Estimate(
        peak,
        codes + outer,
        flops,
        num_launches=8 * (1 + sweeps) * arch.num_layers * sum(inputs.values()),
        notes=(f"{scheme.name}, {arch.num_layers} layers one at a time", f"{spec.preset or 'method'}: {spec.method()}", *kv_note),
    )


@STAGES.stage(
    "quantize",
    version=3,
    takes=(Port.DENSE, Port.CALIB),
    gives=Port.QUANTIZED,
    spec=Quantize,
    estimate=_estimate,
    depends=_depends,
)
def quantize(spec: Quantize, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    source, scheme = open_weights(inputs[Port.DENSE].path), spec.model_scheme()
    _refuse_quantized(source.arch)
    _refuse_tied_head(spec, source.arch)
    if source.arch.dtype not in ("bfloat16", "float16", "float32"):
        raise UnsupportedFormat(f"the model's dtype '{source.arch.dtype}' is not one that scales can be stored in.")
    stored_dtype = getattr(torch, source.arch.dtype)
    rows = run_sequential(
        source,
        load_token_set(inputs[Port.CALIB].path / TOKENS_NAME).tokens_NS,
        quantization_passes(spec, stored_dtype),
        ctx.scratch,
        ctx,
        scheme=scheme.layers,
        compute_dtype=compute_dtype(ctx.device, stored_dtype),
        kv_scales=spec.kv_format() == FP8_STATIC,
    )
    for name in map(layer_name, range(source.arch.num_layers)):
        _place(ctx.scratch / name, out.path / name)
    if scheme.head is None:
        _place(ctx.scratch / OUTER_NAME, out.path / OUTER_NAME)
    else:
        _quantize_head(ctx.scratch / OUTER_NAME, out.path / OUTER_NAME, scheme.head, torch.device(ctx.device))
    arch, layers = source.arch.to_json()
    shapes = [{"scheme": scheme.layers.name, **layer} for layer in layers]
    facts = {"method": spec.method(), "layers": [row for row in rows if "linear" in row], **_cache_facts(spec, rows, ctx)}
    out.describe(role="quantized", arch=arch, layers=shapes, scheme=scheme.to_json(), facts=facts)


def _cache_facts(spec: Quantize, rows: list[Row], ctx: Context) -> dict[str, Any]:
    """What the manifest says of a quantized KV cache: its format and, where scales are calibrated, what they do to each layer."""
    if (kv_format := spec.kv_format()) is None:
        return {}
    cached = [row for row in rows if "cache" in row]
    if warning := cache_warning(cached):
        ctx.progress.say(warning)
    return {"kv_cache": {"format": kv_format, "layers": cached, "warning": warning}}

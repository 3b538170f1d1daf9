"""`quantize`: smoother x target x rounder x refiner x scheme over every decoder linear, layer by layer, resumable at each layer; the head,
if asked, after them, by plain rounding to nearest."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self, cast

import torch
from pydantic import Discriminator, Field, Tag, model_validator
from torch import Tensor

from compress.artifact.context import Context
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.arithmetic import compute_dtype, has_bfloat16_tiles
from compress.calibrate.dataset import load_token_set
from compress.calibrate.estimate import Work, flops, host_bytes, num_columns, peak_bytes
from compress.calibrate.kv import cache_warning
from compress.calibrate.sequential import LayerPass, Row, run_sequential
from compress.digest import digest_json
from compress.errors import UnsupportedFormat, UsageError, did_you_mean
from compress.export import open_weights
from compress.methods import REFINERS, ROUNDERS, SMOOTHERS, TARGETS, Refiner, Rounder, Smoother, Target
from compress.methods.descent import Descent
from compress.methods.gptq import Gptq
from compress.methods.passes import BaselinePass, RoundPass, SmoothPass
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, layer_name, load_weights, save_weights
from compress.models.overrides import decide, described, overridden
from compress.models.weights import WeightSource, dense
from compress.quant.kv import FP8_STATIC, KV_CACHES, kv_cache_named
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import DENSE, SCHEMES, ModelScheme, QuantizedWeight, Scheme, Schemes, commonest, scheme_named
from compress.recipe import ByKind, Spec, checked_by
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.stages import STAGES, Estimate, Inputs, PlanFacts, Port
from compress.stages.calibrate import TOKENS_NAME, Calibrate
from compress.stages.mixed import Mixed, choose, depends, effort, largest_bytes, scheme_or_dense, units_of

COLUMNS_OF_A_LAUNCH = 128
"""That are rounded, or descended, in one on a GPU (`kernels/columns.py`)."""
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


def _schemes_of_overrides(overrides: Mapping[str, str]) -> None:
    for name in overrides.values():
        scheme_or_dense(name)


def _kind_of_scheme(value: Any) -> str:
    return "mixed" if isinstance(value, Mapping | Mixed) else "name"


class Quantize(Spec):
    """Which codes weights get, and how scales and roundings are found."""

    scheme: Annotated[
        Annotated[str, checked_by(scheme_named), Field(json_schema_extra={"enum": list(SCHEMES)}), Tag("name")]
        | Annotated[Mixed, Tag("mixed")],
        Discriminator(_kind_of_scheme),
    ] = Field("W4A16_G128", description=f"one of {', '.join(SCHEMES)}; or `{{kind: mixed}}`, which chooses among several")
    overrides: Annotated[dict[str, str], checked_by(_schemes_of_overrides)] = Field(
        default_factory=dict,
        exclude_if=lambda overrides: not overrides,  # as `kv_cache`
        description=f"linears with another scheme: shell pattern over canonical names (`layers.0.*`, `*.ffn.down`) -> scheme or `{DENSE}`; "
        "the first pattern that matches decides",
        json_schema_extra={"additionalProperties": {"enum": [*SCHEMES, DENSE]}},
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
        if self.smooth is None:
            return self
        names = [*(self.scheme.schemes if isinstance(self.scheme, Mixed) else (self.scheme,)), *self.overrides.values()]
        schemes = [scheme for scheme in map(scheme_or_dense, names) if scheme is not None]
        reasons = [cast(Smoother, self.smooth).idle(scheme) for scheme in schemes]
        if None not in reasons:
            kind = self.smooth.model_dump()["kind"]
            raise ValueError(f"smooth: {kind} does nothing for {' and '.join(dict.fromkeys(s.name for s in schemes))}: {reasons[0]}")
        return self

    def method(self) -> str:
        """Smoother, target, rounder and refiner in one line, every setting said: what a preset stands for can be read here."""
        parts = {"smooth": self.smooth, "target": self.target, "round": self.round, "refine": self.refine}
        return "; ".join(f"{name}: {_settings(each)}" for name, each in parts.items() if each is not None)

    def model_scheme(self, arch: Arch) -> ModelScheme:
        """Raises UsageError: an override decides nothing, or linears over one input would differ."""
        assert isinstance(self.scheme, str), "mixed precision is known when it is solved"
        return overridden(scheme_named(self.scheme), self.patterns, arch, head=self.head_scheme)

    def possible_schemes(self, arch: Arch) -> list[ModelScheme]:
        """What the model may come to have: each scheme everywhere, and last all of them, if they are still to be chosen.

        Raises:
            UsageError: as `model_scheme`.
        """
        if not isinstance(self.scheme, Mixed):
            return [self.model_scheme(arch)]
        units = units_of(self.scheme, decide(self.patterns, arch), arch)
        picks = [[unit.schemes[min(idx, len(unit.schemes) - 1)] for unit in units] for idx in range(len(self.scheme.schemes))]
        picks.append([unit.schemes[idx % len(unit.schemes)] for idx, unit in enumerate(units)])
        possible = [{linear: scheme for unit, scheme in zip(units, each, strict=True) for linear in unit.linears} for each in picks]
        return [commonest(each, head=self.head_scheme) for each in possible if any(each.values())]

    @property
    def patterns(self) -> dict[str, Scheme | None]:
        return {pattern: scheme_or_dense(name) for pattern, name in self.overrides.items()}

    @property
    def head_scheme(self) -> Scheme | None:
        return None if self.head is None else scheme_named(self.head)

    def kv_format(self) -> str | None:
        return None if self.kv_cache is None else kv_cache_named(self.kv_cache)


def _settings(spec: Spec) -> str:
    settings = spec.model_dump(mode="json")
    kind = settings.pop("kind")
    return f"{kind} ({', '.join(f'{key} {json.dumps(value)}' for key, value in settings.items())})"


def quantization_passes(spec: Quantize, schemes: Schemes, stored_dtype: torch.dtype) -> list[LayerPass]:
    """The passes of a spec, in order."""
    passes: list[LayerPass] = [BaselinePass(schemes, stored_dtype)]
    if spec.smooth is not None:
        passes.append(SmoothPass(cast(Smoother, spec.smooth), schemes, stored_dtype))
    refiner, target = cast(Refiner | None, spec.refine), cast(Target | None, spec.target)
    passes.append(RoundPass(cast(Rounder, spec.round), schemes, stored_dtype, refiner, target))
    return passes


def linear_bytes(arch: Arch, scheme: ModelScheme) -> int:
    """All linears of the layers on disk, in 16 bits where they are dense."""
    sizes = []
    for idx, layer in enumerate(arch.layers):
        for name in layer.linears:
            shape, of_linear = layer.linear_shape(name, arch.hidden_size), scheme.of(f"layers.{idx}.{name}")
            sizes.append(2 * shape[0] * shape[1] if of_linear is None else of_linear.weight_bytes(*shape))
    return sum(sizes)


def most_linear_bytes(spec: Quantize, arch: Arch) -> int:
    """All linears of the layers on disk, at most: mixed precision keeps a budget.

    Raises:
        UsageError: a budget of bytes that cannot be kept.
    """
    if not isinstance(spec.scheme, Mixed):
        return linear_bytes(arch, spec.model_scheme(arch))
    units = units_of(spec.scheme, decide(spec.patterns, arch), arch)
    return largest_bytes(spec.scheme, arch, units, outer_bytes(arch, spec.head_scheme))


def outer_bytes(arch: Arch, head: Scheme | None) -> int:
    """Embedding and head on disk, in 16 bits unless the head has a scheme."""
    dense_bytes = 2 * arch.vocab_size * arch.hidden_size
    if arch.tied_head:
        return dense_bytes
    return dense_bytes + (dense_bytes if head is None else head.weight_bytes(arch.vocab_size, arch.hidden_size))


def _place(stored: Path, place: Path) -> None:
    """A finished layer becomes part of the artifact without a copy, where the file system knows hard links."""
    try:
        os.link(stored, place)
    except OSError:
        shutil.copyfile(stored, place)


def _depends(spec: Quantize, device: str) -> Mapping[str, str]:
    """The kind of device and what it computes in: neither goes on from the other's resume points. And the order of overrides, which a
    mapping in the key does not keep."""
    order = {"overrides": digest_json(list(spec.overrides))} if spec.overrides else {}
    mixed = depends(spec.scheme, device) if isinstance(spec.scheme, Mixed) else {}
    computed_in = {"compute": "bfloat16"} if torch.device(device).type == "cpu" and has_bfloat16_tiles() else {}
    return {"device": torch.device(device).type, **computed_in, **order, **mixed}


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
    """One layer at a time, so nothing but the disk and the time grows with their number; see `calibrate/estimate.py`. With a target, also
    the activations of the source model, and their moments with the others."""
    arch, scheme = facts.arch, spec.possible_schemes(facts.arch)[-1]
    _refuse_quantized(arch)
    _refuse_tied_head(spec, arch)
    calib = facts.specs.get("calibrate") or Calibrate()
    assert isinstance(calib, Calibrate)
    work = Work(arch, calib.num_samples, calib.seq_len, facts.device, facts.num_ranks, compares=spec.target is not None)
    kv_format = spec.kv_format()
    kv_note = [] if kv_format is None else [f"KV cache {kv_format}, {kv_bytes_per_token(arch, kv_format):,} bytes a token"]
    sweeps = spec.refine.sweeps if isinstance(spec.refine, Descent) else 0
    searches = (22 if spec.smooth is not None else 2) + 2 * sweeps + (6 if spec.target is not None else 0)  # in float64, as two
    in_dtype, in_float32 = flops(work, searches=searches)
    slower = 1 if facts.device == "cpu" else 5  # float32 products beside bf16 ones on tensor cores (51 against 250 TFLOP/s sustained, H200)
    peak, total = peak_bytes(work), in_dtype + slower * in_float32
    if isinstance(spec.scheme, Mixed):
        width = work.width
        before, more = effort(spec.scheme, arch, num_samples=calib.num_samples, seq_len=calib.seq_len, width=width)
        peak, total = max(peak, before), total + more
    host = host_bytes(work)
    pinned = (f"{host / 2**30:.1f} GiB of pinned host memory a GPU, for the layer that is read ahead",) if host else ()
    return Estimate(
        peak,
        most_linear_bytes(spec, arch) + outer_bytes(arch, scheme.head),
        total,
        num_launches=8 * (1 + sweeps) * num_columns(work) // (1 if facts.device == "cpu" else COLUMNS_OF_A_LAUNCH),
        notes=(_scheme_note(spec, scheme, arch), f"{spec.preset or 'method'}: {spec.method()}", *kv_note, *pinned),
    )


def _scheme_note(spec: Quantize, scheme: ModelScheme, arch: Arch) -> str:
    if not isinstance(spec.scheme, Mixed):
        return f"{scheme.name}, {arch.num_layers} layers one at a time"
    return (
        f"each projection of {arch.num_layers} layers gets one of {', '.join(spec.scheme.schemes)}: the least predicted KL with "
        f"{spec.scheme.budget.text}; linears of layers at most {most_linear_bytes(spec, arch) / 1e9:.3f} GB"
    )


def _schemes(spec: Quantize, source: WeightSource, tokens_NS: Tensor, ctx: Context) -> tuple[ModelScheme, dict[str, Any]]:
    """The scheme of every linear, and facts of how it was chosen where it was."""
    arch = source.arch
    if not isinstance(spec.scheme, Mixed):
        return spec.model_scheme(arch), {}
    chosen, facts = choose(
        spec.scheme,
        units_of(spec.scheme, decide(spec.patterns, arch), arch),
        source,
        tokens_NS,
        ctx,
        compute_dtype=compute_dtype(ctx.device, getattr(torch, arch.dtype)),
        outer_bytes=outer_bytes(arch, spec.head_scheme),
    )
    return replace(chosen, head=spec.head_scheme), {"mixed": facts}


def quantize_layers(spec: Quantize, inputs: Inputs, ctx: Context) -> tuple[ModelScheme, dict[str, Any], list[Row]]:
    """Compress every layer into the scratch directory, on all ranks together: schemes, facts of how they were chosen, and the rows of the
    layer report. Rank 0 chooses."""
    source = open_weights(inputs[Port.DENSE].path)
    stored_dtype, tokens_NS = getattr(torch, source.arch.dtype), load_token_set(inputs[Port.CALIB].path / TOKENS_NAME).tokens_NS
    chosen = ctx.ranks.broadcast(_schemes(spec, source, tokens_NS, ctx) if ctx.ranks.rank == 0 else None)
    assert chosen is not None
    scheme, explained = chosen
    rows = run_sequential(
        source,
        tokens_NS,
        quantization_passes(spec, scheme, stored_dtype),
        ctx.scratch,
        ctx,
        scheme=scheme,
        compute_dtype=compute_dtype(ctx.device, stored_dtype),
        kv_scales=spec.kv_format() == FP8_STATIC,
    )
    return scheme, explained, rows


@STAGES.stage(
    "quantize",
    version=4,
    takes=(Port.DENSE, Port.CALIB),
    gives=Port.QUANTIZED,
    spec=Quantize,
    estimate=_estimate,
    depends=_depends,
    together=quantize_layers,
)
def quantize(spec: Quantize, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    source = open_weights(inputs[Port.DENSE].path)
    _refuse_quantized(source.arch)
    _refuse_tied_head(spec, source.arch)
    if source.arch.dtype not in ("bfloat16", "float16", "float32"):
        raise UnsupportedFormat(f"the model's dtype '{source.arch.dtype}' is not one that scales can be stored in.")
    scheme, explained, rows = quantize_layers(spec, inputs, ctx)
    for name in map(layer_name, range(source.arch.num_layers)):
        _place(ctx.scratch / name, out.path / name)
    if scheme.head is None:
        _place(ctx.scratch / OUTER_NAME, out.path / OUTER_NAME)
    else:
        _quantize_head(ctx.scratch / OUTER_NAME, out.path / OUTER_NAME, scheme.head, torch.device(ctx.device))
    arch, layers = described(source.arch, scheme)
    linears = [row for row in rows if "linear" in row]
    facts = {"method": spec.method(), "layers": linears, **explained, **_cache_facts(spec, rows, ctx)}
    out.describe(role="quantized", arch=arch, layers=layers, scheme=scheme.to_json(), facts=facts)


def _cache_facts(spec: Quantize, rows: list[Row], ctx: Context) -> dict[str, Any]:
    """What the manifest says of a quantized KV cache: its format and, where scales are calibrated, what they do to each layer."""
    if (kv_format := spec.kv_format()) is None:
        return {}
    cached = [row for row in rows if "cache" in row]
    if warning := cache_warning(cached):
        ctx.progress.say(warning)
    return {"kv_cache": {"format": kv_format, "layers": cached, "warning": warning}}

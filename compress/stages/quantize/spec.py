"""What a recipe says of quantization: smoother x target x rounder x refiner x scheme, presets for them,
exceptions, head, KV cache."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from compress.calibrate.guide import Guide
from compress.errors import UnsupportedFormat, UsageError, did_you_mean
from compress.methods.quantize import REFINERS, ROUNDERS, SMOOTHERS, TARGETS, Smoother
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptq import Gptq
from compress.models.arch import Arch
from compress.models.overrides import decide, overridden
from compress.quant.kv import KV_CACHES, kv_cache_named
from compress.quant.scheme import DENSE, SCHEMES, ModelScheme, Scheme, commonest, scheme_named
from compress.recipe import ByKind, Spec, checked_by
from compress.stages import specs_of
from compress.stages.budget.costs import schemes_by_group
from compress.stages.budget.spec import Mixed, scheme_or_dense
from compress.stages.quantize.tune import Tune

HEAD_SCHEMES = tuple(
    each.name for each in SCHEMES.values() if each.num_bits == 8 and each.activation != "tensor"
)
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"round": {"kind": "rtn", "scale": "hessian"}},
    "balanced": {
        "guide": {"kind": "gradients"},
        "target": {"kind": "gptaq"},
        "round": {"kind": "gptq"},
        "refine": {"kind": "descent", "sweeps": 2, "coupled_rounds": 3},
        "true_sequential": True,
    },
    "best": {
        "guide": {"kind": "gradients", "windows": 0.5},
        "target": {"kind": "gptaq"},
        "round": {"kind": "gptq"},
        "refine": {"kind": "descent", "sweeps": 4, "coupled_rounds": 6},
        "true_sequential": True,
        "tune": {"kind": "scales"},
    },
}
"""What a preset says for the keys that a recipe leaves out. Mean KL at W4A16_G128 on the bundled model, three
seeds (`scripts/bench_quality.py`, H200, `benchmarks/quality.json`): plain rounding 0.0917, fast 0.0510, GPTQ
with min-max scales 0.0361; with searched scales and descent 0.0304, towards the source 0.0268, linears in
turn 0.0229, tokens weighed 0.0225, rows coupled (balanced) 0.0204, best 0.0190.
"""


def _preset_named(name: str | None) -> None:
    if name is not None and name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'.{did_you_mean(name, PRESETS)}")


def _scheme_of_a_head(name: str | None) -> None:
    if name is not None and scheme_named(name).name not in HEAD_SCHEMES:
        raise UsageError(
            f"a head is rounded to nearest, without calibration, so it takes {' or '.join(HEAD_SCHEMES)}, "
            f"not {name}."
        )


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
        Annotated[
            str,
            checked_by(scheme_or_dense),
            Field(json_schema_extra={"enum": [*SCHEMES, DENSE]}),
            Tag("name"),
        ]
        | Annotated[Mixed, Tag("mixed")],
        Discriminator(_kind_of_scheme),
    ] = Field(
        "W4A16_G128",
        description=f"one of {', '.join(SCHEMES)}; `{DENSE}`, for a KV cache alone or with overrides; or "
        f"`{{kind: mixed}}`, which chooses among several",
    )
    overrides: Annotated[dict[str, str], checked_by(_schemes_of_overrides)] = Field(
        default_factory=dict,
        exclude_if=lambda overrides: not overrides,  # as `kv_cache`
        description="linears with another scheme: shell pattern over canonical names (`layers.0.*`, "
        f"`*.ffn.down`) -> scheme or `{DENSE}`; the first pattern that matches decides",
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
        description="`fast`, `balanced` or `best` settings for those of guide, smooth, target, round, "
        "refine, tune and true_sequential that are left out",
        json_schema_extra={"enum": [*PRESETS, None]},
    )
    guide: Guide | None = Field(
        None,
        exclude_if=lambda guide: guide is None,  # as `kv_cache`
        description="what counts in the calibration, by gradients of the model's own predictions; left out, "
        "every token and row the same",
    )
    smooth: Annotated[Spec, ByKind(lambda: specs_of(SMOOTHERS))] | None = None
    target: Annotated[Spec, ByKind(lambda: specs_of(TARGETS))] | None = None
    round: Annotated[Spec, ByKind(lambda: specs_of(ROUNDERS))] = Gptq()
    refine: Annotated[Spec, ByKind(lambda: specs_of(REFINERS))] | None = None
    true_sequential: bool = Field(
        False,
        exclude_if=lambda true_sequential: not true_sequential,  # as `kv_cache`
        description="the linears of a layer are rounded one group after the other, each behind those before "
        "it; not with `smooth`",
    )
    tune: Tune | None = Field(
        None,
        exclude_if=lambda tune: tune is None,  # as `kv_cache`
        description="scales trained end to end against the source, once every layer is rounded; the whole "
        "model must fit the device",
    )
    kv_cache: Annotated[str | None, checked_by(_kv_cache)] = Field(
        None,
        exclude_if=lambda name: (
            name is None
        ),  # so that what was made before there was this key keeps its cache key
        description="KV cache to serve with: `fp8` calibrates a scale for the keys and one for the values of "
        "each layer; the others find a scale for each position and head as they go; left out, keys and "
        "values stay in 16 bits",
        json_schema_extra={"enum": [*KV_CACHES, None]},
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, raw: Any) -> Any:
        """An explicit key stands, `null` included; it replaces the whole of what the preset has under that
        key."""
        if (
            not isinstance(raw, Mapping)
            or not isinstance(raw.get("preset"), str)
            or raw["preset"] not in PRESETS
        ):
            return raw  # None, or a value that its field refuses
        filled = {**PRESETS[raw["preset"]], **raw}
        if filled.get("smooth") is not None and "true_sequential" not in raw:
            filled.pop(
                "true_sequential", None
            )  # the two exclude one another, and the recipe asks for the first
        return filled

    @model_validator(mode="after")
    def _refuse_what_nothing_guides(self) -> Self:
        if self.guide is None and isinstance(self.refine, Descent) and self.refine.coupled_rounds:
            raise ValueError(
                "refine: coupled_rounds need to know which rows err together: add `guide: {kind: "
                "gradients}`, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_does_nothing(self) -> Self:
        if self.only_cache:
            said = [
                name
                for name in ("preset", "guide", "smooth", "target", "refine", "tune", "head")
                if getattr(self, name) is not None
            ]
            said += ["true_sequential"] if self.true_sequential else []
            said += ["round"] if self.round != Gptq() else []
            if said:
                raise ValueError(
                    f"`scheme: {DENSE}` quantizes the KV cache alone and rounds no weight: leave out "
                    f"{' and '.join(said)}."
                )
            if self.kv_cache is None:
                raise ValueError(
                    f"`scheme: {DENSE}` without `kv_cache` and overrides quantizes nothing. Leave out the "
                    "stage instead."
                )
        if self.smooth is None:
            return self
        if self.true_sequential:
            raise ValueError(
                "true_sequential: a smoother folds scales into linears that are codes by then. Leave out one "
                "of the two, or say "
                "`true_sequential: false`."
            )
        names = [
            *(self.scheme.schemes if isinstance(self.scheme, Mixed) else (self.scheme,)),
            *self.overrides.values(),
        ]
        schemes = [scheme for scheme in map(scheme_or_dense, names) if scheme is not None]
        reasons = [cast(Smoother, self.smooth).idle(scheme) for scheme in schemes]
        if reasons and None not in reasons:
            kind = self.smooth.model_dump()["kind"]
            raise ValueError(
                f"smooth: {kind} does nothing for {' and '.join(dict.fromkeys(s.name for s in schemes))}: "
                f"{reasons[0]}"
            )
        return self

    @property
    def only_cache(self) -> bool:
        """Whether weights stay as they are and the KV cache alone is quantized."""
        return self.scheme == DENSE and not self.overrides

    def method(self) -> str:
        """Everything that finds scales and codes in one line, every setting said: what a preset stands for
        can be read here."""
        if self.only_cache:
            return "none: weights stay dense"
        parts = {
            name: getattr(self, name) for name in ("guide", "smooth", "target", "round", "refine", "tune")
        }
        said = [f"{name}: {_settings(each)}" for name, each in parts.items() if each is not None]
        return "; ".join([*said, *(["true_sequential"] if self.true_sequential else [])])

    def model_scheme(self, arch: Arch) -> ModelScheme | None:
        """None where all weights stay dense.

        Raises:
            UsageError: an override decides nothing, or linears over one input would differ.
        """
        assert isinstance(self.scheme, str), "mixed precision is known when it is solved"
        return (
            None
            if self.only_cache
            else overridden(scheme_or_dense(self.scheme), self.patterns, arch, head=self.head_scheme)
        )

    def possible_schemes(self, arch: Arch) -> list[ModelScheme | None]:
        """What the model may come to have: each scheme everywhere, and last all of them, if they are still to
        be chosen.

        Raises:
            UsageError: as `model_scheme`.
        """
        if not isinstance(self.scheme, Mixed):
            return [self.model_scheme(arch)]
        groups = schemes_by_group(self.scheme, decide(self.patterns, arch), arch)
        picks = [
            [each.schemes[min(idx, len(each.schemes) - 1)] for each in groups]
            for idx in range(len(self.scheme.schemes))
        ]
        picks.append([each.schemes[idx % len(each.schemes)] for idx, each in enumerate(groups)])
        possible = [
            {linear: scheme for each, scheme in zip(groups, picked, strict=True) for linear in each.linears}
            for picked in picks
        ]
        return [commonest(each, head=self.head_scheme) for each in possible if any(each.values())]

    @property
    def patterns(self) -> dict[str, Scheme | None]:
        return {pattern: scheme_or_dense(name) for pattern, name in self.overrides.items()}

    @property
    def head_scheme(self) -> Scheme | None:
        return None if self.head is None else scheme_named(self.head)

    def kv_format(self) -> str | None:
        return None if self.kv_cache is None else kv_cache_named(self.kv_cache)

    def check_model(self, arch: Arch) -> None:
        """Raises UnsupportedFormat: the model's weights are codes already, or the head that is to be
        quantized is the embedding."""
        said = arch.config.get("quantization_config")
        if said:
            raise UnsupportedFormat(
                f"the model is quantized already (quant_method '{said.get('quant_method')}'): codes of codes "
                "would add a second error to "
                "the first. Name the dense model that it was made from."
            )
        if self.head is not None and arch.tied_head:
            raise UnsupportedFormat(
                f"the model's head is tied to its embedding, which stays dense: a head in {self.head} would "
                "be a second, different matrix, "
                "and no format has a place for it. Leave out `head`."
            )


def _settings(spec: Spec) -> str:
    settings = spec.model_dump(mode="json")
    kind = settings.pop("kind")
    return f"{kind} ({', '.join(f'{key} {json.dumps(value)}' for key, value in settings.items())})"

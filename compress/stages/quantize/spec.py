"""The recipe keys of `quantize`: scheme, smoother, rounding target, rounder, refiner, presets for them,
overrides, head and KV cache."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from compress.calibrate.experts import DEFAULT_POLICY, MIN_TOKENS, ExpertPolicy, StarvedPolicy
from compress.calibrate.guide import Guide
from compress.distill.scales import tunes
from compress.errors import UsageError, did_you_mean
from compress.methods.quantize import REFINERS, ROUNDERS, SMOOTHERS, TARGETS, Rounder, Smoother
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptq import Gptq
from compress.quant.kv import FP8_STATIC, KV_CACHES, kv_cache_named
from compress.quant.scheme import DENSE, SCHEMES, Scheme, scheme_named
from compress.recipe import ByKind, Spec, checked_by
from compress.stages import specs_of
from compress.stages.budget.spec import Mixed, scheme_or_dense
from compress.stages.quantize.tune import Tune

HEAD_SCHEMES = tuple(
    each.name for each in SCHEMES.values() if each.num_bits == 8 and not each.has_static_inputs
)
"""Schemes that an output head can have: 8 bits, and no calibrated input scale, because a head is rounded
without calibration."""
_DEFAULT_SCHEME = "W4A16_G128"
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
"""The keys that each preset fills in where a recipe leaves them out.

Mean KL at W4A16_G128 on the bundled model, three seeds (`scripts/bench_quality.py`, H200,
`benchmarks/quality.json`): plain rounding 0.0917, fast 0.0510, GPTQ with min-max scales 0.0361; with searched
scales and descent 0.0304, with the source's outputs as rounding target 0.0268, with true_sequential 0.0229,
with weighed tokens 0.0225, with coupled rows (balanced) 0.0204, best 0.0190.
"""


def _is_unset(value: object) -> bool:
    """Return whether a key that was added later has its default. It is left out of the cache key then, so
    that older results keep theirs."""
    return not value


def _check_preset(name: str | None) -> None:
    if name is not None and name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'.{did_you_mean(name, PRESETS)}")


def _check_head(name: str | None) -> None:
    if name is not None and scheme_named(name).name not in HEAD_SCHEMES:
        raise UsageError(
            f"a head is rounded to nearest, without calibration, so it takes {' or '.join(HEAD_SCHEMES)}, "
            f"not {name}."
        )


def _check_kv_cache(name: str | None) -> None:
    if name is not None:
        kv_cache_named(name)


def _check_overrides(overrides: Mapping[str, str]) -> None:
    for name in overrides.values():
        scheme_or_dense(name)


def _has_scales_to_tune(raw: Mapping[str, Any]) -> bool:
    """Return whether one of the schemes that a recipe names, if they have no mistake, has scales that `tune`
    trains."""
    name = raw.get("scheme", _DEFAULT_SCHEME)
    overrides = raw.get("overrides")
    names = [name, *(overrides.values() if isinstance(overrides, Mapping) else ())]
    known = [SCHEMES.get(each) for each in names if isinstance(each, str)]
    return len(known) < len(names) or None in known or any(tunes(each) for each in known if each is not None)


def _kind_of_scheme(value: Any) -> str:
    return "mixed" if isinstance(value, Mapping | Mixed) else "name"


class StarvedExperts(Spec):
    """The treatment of an expert to which the calibration text routes few tokens."""

    min_tokens: int = Field(
        MIN_TOKENS, ge=1, le=1_000_000_000, description="an expert with fewer tokens is starved"
    )
    starved: StarvedPolicy = Field(
        "shrink",
        description="`shrink` completes the statistics of a starved expert to `min_tokens` with those of all "
        "tokens; `all_tokens` shows every token to every expert; `keep` takes what there is",
    )

    def policy(self) -> ExpertPolicy:
        """Return the policy that the runner follows."""
        return ExpertPolicy(self.min_tokens, self.starved)


class Quantize(Spec):
    """The codes that weights get, and how scales and codes are found."""

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
        _DEFAULT_SCHEME,
        description=f"one of {', '.join(SCHEMES)}; `{DENSE}`, for a KV cache alone or with overrides; or "
        f"`{{kind: mixed}}`, which chooses among several",
    )
    overrides: Annotated[dict[str, str], checked_by(_check_overrides)] = Field(
        default_factory=dict,
        exclude_if=_is_unset,
        description="linears with another scheme: shell pattern over canonical names (`layers.0.*`, "
        f"`*.ffn.down`) -> scheme or `{DENSE}`; the first pattern that matches decides",
        json_schema_extra={"additionalProperties": {"enum": [*SCHEMES, DENSE]}},
    )
    head: Annotated[str | None, checked_by(_check_head)] = Field(
        None,
        description=f"scheme of the output head, {' or '.join(HEAD_SCHEMES)}; left out, it stays dense",
        json_schema_extra={"enum": [*HEAD_SCHEMES, None]},
    )
    preset: Annotated[str | None, checked_by(_check_preset)] = Field(
        None,
        exclude=True,  # cache keys, locks and manifests hold the keys that it fills in
        description="`fast`, `balanced` or `best`: fills in guide, smooth, target, round, refine, tune and "
        "true_sequential where they are left out",
        json_schema_extra={"enum": [*PRESETS, None]},
    )
    guide: Guide | None = Field(
        None,
        description="weigh tokens and rows of the calibration by gradients of the model's own predictions; "
        "left out, all weigh the same",
        exclude_if=_is_unset,
    )
    smooth: Annotated[Spec, ByKind(lambda: specs_of(SMOOTHERS))] | None = Field(
        None,
        description="a scale for each input channel, moved from the activations into the weights "
        "before rounding",
    )
    target: Annotated[Spec, ByKind(lambda: specs_of(TARGETS))] | None = Field(
        None, description="the weights that rounding approximates; left out, the linear's own"
    )
    round: Annotated[Spec, ByKind(lambda: specs_of(ROUNDERS))] = Field(
        Gptq(), description="how weights become codes and scales"
    )
    refine: Annotated[Spec, ByKind(lambda: specs_of(REFINERS))] | None = Field(
        None, description="how codes and scales are improved once they are found"
    )
    true_sequential: bool = Field(
        False,
        exclude_if=_is_unset,
        description="round the linear groups of a layer one after the other, each on the outputs of the "
        "rounded groups before it; not with `smooth`",
    )
    experts: StarvedExperts | None = Field(
        None,
        description="mixtures of experts: what becomes of experts that see few tokens; left out, "
        f"`{{min_tokens: {MIN_TOKENS}, starved: shrink}}`",
        exclude_if=_is_unset,
    )
    tune: Tune | None = Field(
        None,
        description="train the scales end to end against the source once every layer is rounded; the whole "
        "model must fit the device",
        exclude_if=_is_unset,
    )
    kv_cache: Annotated[str | None, checked_by(_check_kv_cache)] = Field(
        None,
        description="KV cache to serve with: `fp8` calibrates a scale for the keys and one for the values of "
        "each layer; the others find a scale for each position and head while serving, `int4_hadamard` of "
        "heads in their Hadamard transform (64, 128 or 256 dimensions), `fp8_attention` powers of two, so "
        "that attention of prompts multiplies in FP8, too; left out, keys and values stay in 16 bits",
        json_schema_extra={"enum": [*KV_CACHES, None]},
        exclude_if=_is_unset,
    )
    measure_error: bool = Field(
        False,
        exclude_if=_is_unset,
        description="run the calibration text through the layers to report the error of every linear, also "
        "where rounding reads no activation; methods that read activations report it in any case",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, raw: Any) -> Any:
        """Fill in the keys of the preset. An explicit key, `null` included, replaces all that the preset has
        under it."""
        name = raw.get("preset") if isinstance(raw, Mapping) else None
        if not isinstance(name, str) or name not in PRESETS:
            return raw  # no preset, or a value that its field refuses
        filled = {**PRESETS[name], **raw}
        if "tune" not in raw and not _has_scales_to_tune(raw):
            filled.pop("tune", None)
        if filled.get("smooth") is not None and "true_sequential" not in raw:
            filled.pop(
                "true_sequential", None
            )  # the two exclude each other, and the recipe asks for `smooth`
        return filled

    @model_validator(mode="after")
    def _check_coupled_rounds(self) -> Self:
        if self.guide is None and isinstance(self.refine, Descent) and self.refine.coupled_rounds:
            raise ValueError(
                "refine: coupled_rounds need the gradients of a guide, which tell how errors of rows add up: "
                "add `guide: {kind: gradients}`, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_tune(self) -> Self:
        if self.tune is not None and not _has_scales_to_tune(
            {"scheme": self.scheme, "overrides": self.overrides}
        ):
            raise ValueError(
                f"tune: {self.scheme} has no scales to train: they are one byte, or of blocks of rows. Leave "
                "`tune` out."
            )
        return self

    @model_validator(mode="after")
    def _check_dense(self) -> Self:
        if not self.only_cache:
            return self
        optional = ("preset", "guide", "smooth", "target", "refine", "tune", "head")
        given = [name for name in optional if getattr(self, name) is not None]
        given += [name for name in ("true_sequential", "measure_error") if getattr(self, name)]
        given += ["round"] if self.round != Gptq() else []
        if given:
            raise ValueError(
                f"`scheme: {DENSE}` quantizes the KV cache alone and rounds no weight: leave out "
                f"{' and '.join(given)}."
            )
        if self.kv_cache is None:
            raise ValueError(
                f"`scheme: {DENSE}` without `kv_cache` and overrides quantizes nothing. Leave out the stage "
                "instead."
            )
        return self

    @model_validator(mode="after")
    def _check_smoother(self) -> Self:
        if self.smooth is None:
            return self
        if self.true_sequential:
            raise ValueError(
                "true_sequential: a smoother folds scales into linears that are codes by then. Leave out one "
                "of the two, or set `true_sequential: false`."
            )
        names = self.scheme.schemes if isinstance(self.scheme, Mixed) else (self.scheme,)
        schemes = [scheme_or_dense(name) for name in (*names, *self.overrides.values())]
        quantized = [scheme for scheme in schemes if scheme is not None]
        reasons = [cast(Smoother, self.smooth).no_effect_on(scheme) for scheme in quantized]
        if reasons and None not in reasons:
            kind = self.smooth.model_dump()["kind"]
            every = " and ".join(dict.fromkeys(scheme.name for scheme in quantized))
            raise ValueError(f"smooth: {kind} does nothing for {every}: {reasons[0]}")
        return self

    @model_validator(mode="after")
    def _check_one_scale(self) -> Self:
        if not cast(Rounder, self.round).one_scale:
            return self
        names = self.scheme.schemes if isinstance(self.scheme, Mixed) else (self.scheme,)
        schemes = [scheme_or_dense(name) for name in (*names, *self.overrides.values())]
        if any(each is not None and each.activation != "tensor" for each in schemes):
            raise ValueError("round: `scale: matrix` is for schemes with static inputs, such as FP8_STATIC.")
        if self.refine is not None or self.tune is not None:
            raise ValueError(
                "round: `scale: matrix` gives linears one scale, which `refine` and `tune` would make many. "
                "Leave them out."
            )
        return self

    @property
    def only_cache(self) -> bool:
        """Whether weights stay as they are and the KV cache alone is quantized."""
        return self.scheme == DENSE and not self.overrides

    @property
    def needs_activations(self) -> bool:
        """Whether codes, scales or requested errors depend on activations, for which the stage takes
        calibration text."""
        if isinstance(self.scheme, Mixed) or self.measure_error or self.kv_format() == FP8_STATIC:
            return True
        if self.only_cache:
            return False
        if any(each is not None for each in (self.guide, self.smooth, self.target, self.refine, self.tune)):
            return True
        schemes = [scheme_or_dense(name) for name in (self.scheme, *self.overrides.values())]
        has_static_inputs = any(each is not None and each.has_static_inputs for each in schemes)
        return has_static_inputs or bool(cast(Rounder, self.round).needs())

    @property
    def patterns(self) -> dict[str, Scheme | None]:
        """Pattern of an override -> its scheme, None for dense."""
        return {pattern: scheme_or_dense(name) for pattern, name in self.overrides.items()}

    @property
    def head_scheme(self) -> Scheme | None:
        """The scheme of the head, None where it stays dense."""
        return None if self.head is None else scheme_named(self.head)

    @property
    def expert_policy(self) -> ExpertPolicy:
        """The treatment of experts that see few tokens."""
        return DEFAULT_POLICY if self.experts is None else self.experts.policy()

    def kv_format(self) -> str | None:
        """Return the format of the KV cache, None where keys and values stay in 16 bits."""
        return None if self.kv_cache is None else kv_cache_named(self.kv_cache)

    def method(self) -> str:
        """Return everything that finds scales and codes in one line, with every setting that a preset filled
        in."""
        if self.only_cache:
            return "none: weights stay dense"
        names = ("guide", "smooth", "target", "round", "refine", "tune")
        parts = {name: getattr(self, name) for name in names}
        lines = [f"{name}: {_settings(each)}" for name, each in parts.items() if each is not None]
        return "; ".join([*lines, *(["true_sequential"] if self.true_sequential else [])])


def _settings(spec: Spec) -> str:
    settings = spec.model_dump(mode="json")
    kind = settings.pop("kind")
    return f"{kind} ({', '.join(f'{key} {json.dumps(value)}' for key, value in settings.items())})"

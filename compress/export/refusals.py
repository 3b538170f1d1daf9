"""Refusals of a model before a format of it is written: errors that state the broken rules, and the formats
that can hold the model, or how many scales would change.
"""

from collections.abc import Iterator, Sequence

import torch

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, ExportFormat, GraphFormat, OneScaleFormat, Rule
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.quant.kv import FP8_STATIC, FP8_TOKEN_HEAD
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import DENSE, QuantizedWeight

WIDEST = "compressed-tensors"
"""The format that takes most schemes."""
TAKE_ONE_SCALE = "Quantize with `round: {kind: rtn, scale: matrix}`, or export compressed-tensors."
"""The advice of errors about a format that stores one scale for a linear."""


def check_rules(name: str, arch: Arch, scheme: ModelScheme | None, kv_format: str | None = None) -> None:
    """Refuse a format before anything is written; no scheme means dense weights, with a quantized KV cache
    in most formats.

    Raises:
        UnsupportedFormat: naming every broken rule, and the formats that have none.
        EnvironmentUnfit: a package that the format needs is not installed.
    """
    form = FORMATS.get(name)
    if isinstance(form, GraphFormat):
        form.check()
    broken = _broken_rules(form, name, arch, scheme, kv_format)
    if broken:
        others = _other_formats(name, broken, arch, scheme, kv_format)
        raise UnsupportedFormat(
            f"scheme {DENSE if scheme is None else scheme.name} cannot be exported as {name}: "
            f"{_in_one_line(broken)}{others}"
        )


def _broken_rules(
    form: ExportFormat, name: str, arch: Arch, scheme: ModelScheme | None, kv_format: str | None
) -> list[Rule]:
    """Return the broken rules of a format; where a graph does not express the model, those alone, because no
    other scheme would help."""
    has_graph = isinstance(form, GraphFormat)
    if isinstance(form, GraphFormat) and (facts := form.broken_facts(arch)):
        return facts
    broken = [] if scheme is None else form.broken_rules(arch, scheme)
    if has_graph and kv_format is not None:
        problem = f"the graph keeps keys and values as they are, not in {kv_format}."
        broken.append(Rule("kv-cache", problem))
    if scheme is None and not has_graph and (form.static_kv is None or form.static_kv.alone is None):
        broken.append(Rule("dense-weights", f"{name} has no word for a model whose linears are all dense."))
    if kv_format == FP8_STATIC and arch.has_latents and not has_graph:
        broken.append(
            Rule(
                "kv-scales",
                f"the scales of {kv_format} are those of keys and values, and caches of {arch.family} models "
                f"hold latents. {FP8_TOKEN_HEAD} needs no scales in a checkpoint.",
            )
        )
    elif kv_format == FP8_STATIC and form.static_kv is None and not has_graph:
        broken.append(
            Rule(
                "kv-scales", f"{name} has no place for the calibrated scales of {kv_format} keys and values."
            )
        )
    return broken


def _in_one_line(rules: Sequence[Rule]) -> str:
    return " ".join(f"[{rule.name}] {rule.problem}" for rule in rules)


def _other_formats(
    refused: str, broken: Sequence[Rule], arch: Arch, scheme: ModelScheme | None, kv_format: str | None
) -> str:
    """Return the sentence that names the formats that can hold a model which `refused` cannot, whose broken
    rules these are; where there is none, the sentence with those of the widest format, if they are others."""
    rules = {
        name: _broken_rules(form, name, arch, scheme, kv_format)
        for name, form in sorted(FORMATS.items(), key=lambda item: item[0] != WIDEST)
        if name != refused and not _takes_one_scale(form, scheme)
    }
    able = [name for name, its in rules.items() if not its]
    if able:
        return f" {' and '.join(filter(None, (', '.join(able[:-1]), able[-1])))} can hold it."
    remaining = [rule for rule in rules.get(WIDEST, ()) if rule not in broken]
    if not remaining:
        return ""
    return f" No other format can hold it as it is; in {WIDEST} this remains: {_in_one_line(remaining)}"


def _takes_one_scale(form: ExportFormat, scheme: ModelScheme | None) -> bool:
    """Return whether a format has one scale for each linear of some of these schemes, which may have more."""
    return (
        isinstance(form, OneScaleFormat)
        and scheme is not None
        and any(form.takes_one_scale(each) for each in scheme.all)
    )


def check_scales(name: str, source: WeightSource) -> None:
    """Refuse a format whose scales cannot represent the same numbers. Every quantized weight is read if the
    format has a dtype of its own, or one scale for the weights of a linear.

    Raises:
        UnsupportedFormat: with the number of scales that would change.
    """
    form = FORMATS.get(name)
    if isinstance(form, OneScaleFormat):
        _check_one_scale(name, form, source)
    dtype = form.scale_dtype
    if dtype is None or dtype == torch.float32:  # which holds the scales of every dtype of a model
        return
    num_changed = 0
    num_scales = 0
    for weight in _quantized_weights(source):
        num_changed += count_changed(weight.scale_OG, dtype)
        num_scales += weight.scale_OG.numel()
    if num_changed:
        raise UnsupportedFormat(
            f"[exact-scales] {name} keeps scales in {_name(dtype)}, which holds {num_scales - num_changed:,} "
            "of this model's "
            f"{num_scales:,} {source.arch.dtype} scales exactly; {num_changed:,} would change, and weights "
            "with them. "
            "compressed-tensors keeps them as they are."
        )


def _check_one_scale(name: str, form: OneScaleFormat, source: WeightSource) -> None:
    """Raise UnsupportedFormat where linears that take one scale have several."""
    taking = (each for each in _quantized_weights(source) if form.takes_one_scale(each.scheme))
    several = sum(not each.has_one_scale for each in taking)
    if several:
        raise UnsupportedFormat(
            f"[one-scale] {name} stores one scale for all weights of a linear, and {several:,} linears have "
            f"one for each row. {TAKE_ONE_SCALE}"
        )


def count_changed(scale_OG: torch.Tensor, dtype: torch.dtype) -> int:
    """Count the scales that `dtype` does not represent exactly; overflow and underflow count."""
    return int((scale_OG.to(dtype).to(torch.float64) != scale_OG.to(torch.float64)).sum())


def _quantized_weights(source: WeightSource) -> Iterator[QuantizedWeight]:
    yield from (value for value in source.outer().values() if isinstance(value, QuantizedWeight))
    for idx in range(source.arch.num_layers):
        yield from (value for value in source.layer(idx).values() if isinstance(value, QuantizedWeight))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

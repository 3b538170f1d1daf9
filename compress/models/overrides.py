"""Which linears a pattern names, and what that makes of one scheme for all: per-layer overrides.

Patterns are shell patterns (`*`, `?`, `[...]`) over canonical names, `layers.3.ffn.down`. They are tried in order and the first that
matches a linear decides it. Linears that read one input are one product in every consumer (q, k and v; gate and up), so they must come out
alike.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from compress.errors import UsageError, did_you_mean
from compress.models.arch import Arch
from compress.quant.scheme import ModelScheme, Scheme, commonest, name_of, with_exceptions


def linear_names(arch: Arch) -> list[str]:
    """Every linear of the layers by its canonical name, in execution order."""
    return [f"layers.{idx}.{linear}" for idx, layer in enumerate(arch.layers) for linear in layer.linears]


def linears_by_input(arch: Arch) -> Iterator[tuple[str, ...]]:
    """Yield the canonical names of the linears of every linear group of the model."""
    for idx, layer in enumerate(arch.layers):
        for group in layer.groups:
            yield tuple(f"layers.{idx}.{linear}" for linear in group.linears)


def described(arch: Arch, scheme: ModelScheme | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """As `Arch.to_json`, each layer with its scheme: what a manifest says of a quantized model."""
    facts, layers = arch.to_json()
    if scheme is None:
        return facts, layers
    of_layers = [scheme.facts_of_layer(idx, layer.linears) for idx, layer in enumerate(arch.layers)]
    return facts, [said | layer for said, layer in zip(of_layers, layers, strict=True)]


def overridden(
    layers: Scheme | None, overrides: Mapping[str, Scheme | None], arch: Arch, *, head: Scheme | None = None
) -> ModelScheme:
    """`layers` (None: dense) for every linear but those that a pattern of `overrides` gives another scheme, or none.

    Raises:
        UsageError: a pattern decides no linear, linears over one input would differ, or nothing is left to quantize.
    """
    decided = decide(overrides, arch)
    schemes = {linear: decided.get(linear, layers) for linear in linear_names(arch)}
    if not any(schemes.values()):
        raise UsageError(
            "overrides leave every linear of the layers dense: there is nothing to quantize. Leave out the stage instead, or the overrides "
            "where `scheme: dense` is to quantize the KV cache alone."
        )
    scheme = commonest(schemes, head=head) if layers is None else with_exceptions(layers, decided, head=head)
    for linears in linears_by_input(arch):
        names = {linear: name_of(scheme.of(linear)) for linear in linears}
        if len(set(names.values())) > 1:
            said = ", ".join(f"{linear} {name}" for linear, name in names.items())
            raise UsageError(
                "overrides: linears that read one input are one product for every consumer, so they need one scheme, and these would get "
                f"several: {said}. Give all of them the same, with a pattern that matches each or with one for each."
            )
    return scheme


def decide(overrides: Mapping[str, Scheme | None], arch: Arch) -> dict[str, Scheme | None]:
    """Linear -> what the first pattern that matches it says; linears that none matches are absent.

    Raises:
        UsageError: a pattern matches nothing, or nothing that those before it have left.
    """
    names = linear_names(arch)
    decided: dict[str, Scheme | None] = {}
    for pattern, scheme in overrides.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"overrides: the pattern '{pattern}' matches no linear.{_nearest(pattern, names)}"
            )
        left = [name for name in matched if name not in decided]
        if not left:
            raise UsageError(
                f"overrides: the pattern '{pattern}' decides nothing: patterns before it match all that it does, and the first counts. "
                "Put it before them, or leave it out."
            )
        decided.update(dict.fromkeys(left, scheme))
    return decided


def _nearest(pattern: str, names: list[str]) -> str:
    """The name or the pattern of a kind of linear that was probably meant, else the kinds there are."""
    if pattern == "head":
        return " The head has a key of its own, `head`."
    kinds = list(dict.fromkeys("*." + name.split(".", 2)[2] for name in names))
    for theirs, ours in (
        ("model.", ""),
        ("self_attn", "attn"),
        ("mlp", "ffn"),
        ("_proj", ""),
    ):  # as checkpoints have them
        pattern = pattern.replace(theirs, ours)
    near = did_you_mean(pattern, [*names, *kinds])
    return near if near.startswith(" Did you mean") else did_you_mean(pattern, kinds)

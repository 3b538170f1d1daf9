"""Per-layer overrides: which linears a pattern names, and how they change one scheme for all.

Patterns are shell patterns (`*`, `?`, `[...]`, `{gate,up}`) over canonical names, `layers.3.ffn.down`. They
are tried in order and the first that matches a linear decides it. Linears that read one input are one product
in every consumer (q, k and v; gate and up), so they must get the same scheme.
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from compress.errors import UsageError, did_you_mean
from compress.models.arch import Arch
from compress.quant.model_scheme import ModelScheme, commonest, with_exceptions
from compress.quant.scheme import Scheme, name_of

MAX_NAMED = 12
"""Most linears that one sentence names."""


def linear_names(arch: Arch) -> list[str]:
    """Return every linear of the layers by its canonical name, in execution order."""
    return [f"layers.{idx}.{linear}" for idx, layer in enumerate(arch.layers) for linear in layer.linears]


def linears_by_input(arch: Arch) -> Iterator[tuple[str, ...]]:
    """Yield the canonical names of the linears that need one scheme: those of a linear group, or of all
    experts."""
    for idx, layer in enumerate(arch.layers):
        for group in layer.units:
            yield tuple(f"layers.{idx}.{linear}" for linear in group.linears)


def described(arch: Arch, scheme: ModelScheme | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what a manifest states of a quantized model: `Arch.to_json`, each layer with its scheme."""
    facts, layers = arch.to_json()
    if scheme is None:
        return facts, layers
    of_layers = [scheme.facts_of_layer(idx, layer.linears) for idx, layer in enumerate(arch.layers)]
    return facts, [widths | layer for widths, layer in zip(of_layers, layers, strict=True)]


def overridden(
    layers: Scheme | None, overrides: Mapping[str, Scheme | None], arch: Arch, *, head: Scheme | None = None
) -> ModelScheme:
    """Return the scheme of each linear: `layers` (None: dense) for all but those that a pattern of
    `overrides` gives another scheme, or none.

    Raises:
        UsageError: a pattern decides no linear, linears over one input would differ, or nothing is left to
            quantize.
    """
    if not overrides and layers is not None:
        return ModelScheme(layers, head)
    decided = decide(overrides, arch)
    schemes = {linear: decided.get(linear, layers) for linear in linear_names(arch)}
    if not any(schemes.values()):
        raise UsageError(
            "overrides leave every linear of the layers dense: there is nothing to quantize. Leave out the "
            "stage instead, or the overrides "
            "where `scheme: dense` is to quantize the KV cache alone."
        )
    scheme = commonest(schemes, head=head) if layers is None else with_exceptions(layers, decided, head=head)
    for linears in linears_by_input(arch):
        names = {linear: name_of(scheme.for_linear(linear)) for linear in linears}
        if len(set(names.values())) > 1:
            given = ", ".join(f"{linear} {name}" for linear, name in list(names.items())[:MAX_NAMED])
            raise UsageError(
                "overrides: linears that read one input are one product for every consumer, and so are those "
                "of all experts of a layer; they need one scheme, and these would get "
                f"several: {given}. Give all of them the same, with a pattern that matches each or with one "
                "for each."
            )
    return scheme


def decide(overrides: Mapping[str, Scheme | None], arch: Arch) -> dict[str, Scheme | None]:
    """Return what the first matching pattern gives each linear; linears that none matches are absent.

    Raises:
        UsageError: a pattern matches nothing, or nothing that those before it have left.
    """
    names = linear_names(arch)
    decided: dict[str, Scheme | None] = {}
    for pattern, scheme in overrides.items():
        matched = [name for name in names if any(fnmatchcase(name, each) for each in alternatives(pattern))]
        if not matched:
            raise UsageError(
                f"overrides: the pattern '{pattern}' matches no linear.{_nearest(pattern, names)}"
            )
        left = [name for name in matched if name not in decided]
        if not left:
            raise UsageError(
                f"overrides: the pattern '{pattern}' decides nothing: patterns before it match all that it "
                "does, and the first counts. "
                "Put it before them, or leave it out."
            )
        decided.update(dict.fromkeys(left, scheme))
    return decided


def alternatives(pattern: str) -> list[str]:
    """Expand a pattern with braces: `*.ffn.{gate,up}` is `*.ffn.gate` and
    `*.ffn.up`."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    before = pattern[: braces.start()]
    after = pattern[braces.end() :]
    return [each for choice in braces[1].split(",") for each in alternatives(before + choice + after)]


_MAMBA2 = ("mamba", "{gate,x,B,C,dt}")
"""The module of a Mamba-2 mixer and its first linears."""

_LIGHTNING = (
    ("self_attn.qkv_proj", "lightning.{q,k,v,gate}"),
    ("self_attn.output_gate", "lightning.gate"),
    ("self_attn.out_proj", "lightning.o"),
)
"""The linears of lightning attention on disk, and here."""


def _nearest(pattern: str, names: list[str]) -> str:
    """Return the linear or pattern that was probably meant, else the kinds of linears there are."""
    if pattern == "head":
        return " The head has a key of its own, `head`."
    mixer, first = ("mamba1", "{x,gate}") if any(".mamba1." in each for each in names) else _MAMBA2
    kinds = list(dict.fromkeys("*." + name.split(".", 2)[2] for name in names))
    for disk_name, canonical_name in (
        *(_LIGHTNING if any(".lightning." in each for each in names) else ()),
        ("model.", ""),
        ("backbone.", ""),
        ("mixer.in_proj", ".".join(_MAMBA2)),
        ("mixer.out_proj", "mamba.o"),
        ("mixer.up_proj", "ffn.up"),
        ("mixer.down_proj", "ffn.down"),
        ("mixer.shared_experts", "moe.shared"),
        ("mixer.experts", "moe.experts"),
        ("mixer", "attn"),
        ("self_attn", "attn"),
        ("linear_attn", "delta"),
        ("conv.in_proj", "conv.{B,C,x}"),
        ("conv.out_proj", "conv.o"),
        ("mamba.in_proj", f"{mixer}.{first}"),
        ("mamba.out_proj", f"{mixer}.o"),
        ("mlp", "ffn"),
        ("_proj", ""),
    ):  # as checkpoints have them
        pattern = pattern.replace(disk_name, canonical_name)
    near = did_you_mean(pattern, [*names, *kinds])
    return near if near.startswith(" Did you mean") else did_you_mean(pattern, kinds)

"""Limits that GPTQ and AWQ checkpoints share: one weight-only integer scheme for all linears of the layers,
in whole words, with scales in float16.
"""

import re
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import Rule
from compress.export.refusals import count_changed
from compress.models.arch import Arch
from compress.models.family import Family, family_of_arch
from compress.models.layout import blocks_taken
from compress.models.stored_tensors import places_of
from compress.quant.model_scheme import ModelScheme
from compress.quant.packing import codes_in_whole_words
from compress.quant.scheme import Scheme, name_of

GROUP_SIZES = (None, 32, 64, 128)
"""Group sizes of vLLM's Marlin kernels, which serve both formats."""


def packed_rules(arch: Arch, scheme: ModelScheme, quant_method: str, *, bits: Collection[int]) -> list[Rule]:
    """Return the broken rules of a checkpoint that packs codes of one scheme along K or N in 32-bit words."""
    layers = scheme.layers
    rules = []
    if len(scheme.of_layers) > 1:
        names = ", ".join(each.name for each in scheme.of_layers)
        rules.append(
            Rule(
                "one-scheme",
                f"layers have several schemes ({names}); one for all linears, or dense ones beside it, can "
                "be said.",
            )
        )
    if layers.type != "int" or layers.activation is not None:
        rules.append(
            Rule("weight-only", f"{layers.name} is not a scheme of integer weights with 16-bit inputs.")
        )
    if layers.num_bits not in bits:
        rules.append(
            Rule(
                "bits",
                f"{layers.num_bits} bits; {' and '.join(map(str, sorted(bits)))} are read by consumers.",
            )
        )
    if layers.group_size not in GROUP_SIZES:
        rules.append(
            Rule(
                "group-size",
                f"groups of {layers.group_size}; vLLM reads groups of 32, 64 and 128 and whole channels.",
            )
        )
    rules += layout_rules(arch, scheme, quant_method)
    rules += whole_group_rules(arch, scheme)
    per_word = codes_in_whole_words(layers.num_bits)
    for name, (out_features, in_features) in quantized_shapes(arch, scheme):
        if out_features % per_word or in_features % per_word:
            rules.append(
                Rule(
                    "whole-words",
                    f"{name} is {out_features} x {in_features}, not multiples of the {per_word} codes that "
                    "fill whole words.",
                )
            )
    return rules


def whole_group_rules(arch: Arch, scheme: ModelScheme) -> list[Rule]:
    """Return a broken rule for each K of quantized linears that is no multiple of the group size of their
    scheme, with the name of the first of them; vLLM would floor the number of groups."""
    found = [(name, size, each.group_size) for name, size, each in quantized_linears(arch, scheme)]
    if scheme.head is not None:
        found.append(("head", arch.hidden_size, scheme.head.group_size))
    broken: dict[tuple[int, int], dict[str, None]] = {}
    for name, size, group_size in found:
        if group_size is not None and size % group_size:
            broken.setdefault((size, group_size), {})[name] = None
    return [
        Rule(
            "whole-groups",
            f"{next(iter(names))} has K = {size}, {_like(names)}not a multiple of {group_size}.",
        )
        for (size, group_size), names in broken.items()
    ]


def _like(names: Collection[str]) -> str:
    """Return how a sentence counts linears but the first, with its comma."""
    others = len(names) - 1
    return f"like {others} other linear{'s' if others > 1 else ''}, " if others else ""


def layout_rules(arch: Arch, scheme: ModelScheme, quant_method: str) -> list[Rule]:
    """Return the broken rules of any checkpoint that a stock config describes."""
    rules = []
    family = family_of_arch(arch).in_format(quant_method)
    if reason := family.why_unstated(arch):
        rules.append(Rule("uniform-layers", reason))
    to_one = family.holds_all_experts
    experts = [
        name
        for idx, layer in enumerate(arch.layers)
        for name in (f"layers.{idx}.{linear}" for linear in layer.linears if ".experts.0." in linear)
        if scheme.for_linear(name) is not None and to_one(name)
    ]
    if experts:
        rules.append(
            Rule(
                "experts-apart",
                f"checkpoints of {arch.family} have the weights of all experts of a layer in one tensor, and "
                "no consumer reads codes from it. Leave the experts dense: `overrides: {'*.moe.experts.*': "
                "dense}`.",
            )
        )
    if scheme.head is not None and arch.tied_head:
        rules.append(
            Rule(
                "tied-head",
                "the head is the embedding, which stays dense; a tied head has no tensors of its own on "
                "disk.",
            )
        )
    return rules + _tensor_rules(arch, scheme, family)


def _tensor_rules(arch: Arch, scheme: ModelScheme, family: Family) -> list[Rule]:
    """Return the broken rules of linears that are not a tensor of their own on disk, or whose rows have
    another order there."""
    rules: dict[str, Rule] = {}
    for idx, layer in enumerate(arch.layers):
        for linear in layer.linears:
            members = family.stacked_modules(f"layers.{idx}.{linear}")
            names = sorted({name_of(scheme.for_linear(each)) for each in members})
            if len(names) > 1:
                problem = f"{family.to_disk(members[0])} is one tensor and needs one scheme, not {names}."
                rules.setdefault("stacked-linears", Rule("stacked-linears", problem))
            own = scheme.for_linear(f"layers.{idx}.{linear}")
            if own is None or own.block_rows == 1 or not members:
                continue
            inner = [each.split(".", 2)[2] for each in members]
            num_rows = [layer.linear_shape(each, arch.hidden_size)[0] for each in inner]
            places = places_of(family, arch, [f"{each}.weight" for each in members], num_rows)
            if blocks_taken(places[inner.index(linear)].rows, own.block_rows) is None:
                rules.setdefault(
                    "whole-blocks-on-disk",
                    Rule(
                        "whole-blocks-on-disk",
                        f"rows of {linear} lie on disk in blocks of {own.block_rows} with those of other "
                        "heads or linears, whose scales differ.",
                    ),
                )
    return list(rules.values())


def whole_words(size: int, num_bits: int) -> int:
    """`size` codes rounded up to whole words."""
    per_word = codes_in_whole_words(num_bits)
    return -(-size // per_word) * per_word


def float16_scales(scale_OG: Tensor) -> Tensor:
    """Convert scales [O, G] to float16 [G, O], each number exactly.

    Raises:
        UnsupportedFormat: a scale is no number of float16.
    """
    return exact_scales(scale_OG, torch.float16).t().contiguous()


def exact_scales(scale_OG: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert scales to a dtype, each number exactly.

    Raises:
        UnsupportedFormat: a scale is no number of that dtype.
    """
    changed = count_changed(scale_OG, dtype)
    if changed:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedFormat(
            f"[exact-scales] {changed:,} of {scale_OG.numel():,} scales of a linear are not numbers of "
            f"{name}."
        )
    return scale_OG.to(dtype).contiguous()


def start_of(part: str) -> str:
    """Return the start of a pattern that names a module in every program, with `model.` before its name or
    without."""
    return rf"^(model\.)?{re.escape(part.removeprefix('model.'))}"


def in_layers(linears: Sequence[str]) -> list[str]:
    """Return the linears that belong to a numbered layer: all but the head."""
    return [linear for linear in linears if re.search(r"\.\d+\.", linear)]


def shapes(arch: Arch) -> list[tuple[str, tuple[int, int]]]:
    """Return the names of the linears of layers with [O, I], sorted; one that differs between layers comes
    with each of its shapes."""
    return sorted(
        {
            (name, layer.linear_shape(name, arch.hidden_size))
            for layer in dict.fromkeys(arch.layers)
            for name in layer.linears
        }
    )


def quantized_linears(arch: Arch, scheme: ModelScheme) -> Iterator[tuple[str, int, Scheme]]:
    """Yield the name in its layer, K and the scheme of every quantized linear of the layers."""
    for idx, layer in enumerate(arch.layers):
        for name in layer.linears:
            if (each := scheme.for_linear(f"layers.{idx}.{name}")) is not None:
                yield name, layer.linear_shape(name, arch.hidden_size)[1], each


def quantized_shapes(arch: Arch, scheme: ModelScheme) -> list[tuple[str, tuple[int, int]]]:
    """Return `shapes` of those linears that some layer has quantized, and of the head if it is quantized."""
    found = {("head", (arch.vocab_size, arch.hidden_size))} if scheme.head is not None else set()
    for idx, layer in enumerate(arch.layers):
        quantized = [name for name in layer.linears if scheme.for_linear(f"layers.{idx}.{name}") is not None]
        found |= {(name, layer.linear_shape(name, arch.hidden_size)) for name in quantized}
    return sorted(found)

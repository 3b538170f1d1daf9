"""Experts of mixtures in compressed-tensors checkpoints, as transformers 5.23 loads them.

It has the experts of a layer in one tensor, so it decodes them while it loads, all by the scheme of one
group: the first with a pattern that names experts, else the first of any. It takes packed symmetric codes,
and FP8 with channel scales next to experts in the model's dtype; it rounds no inputs of experts.
"""

from collections.abc import Collection, Sequence

from compress.export.config_groups import PACK_FORMAT, format_of
from compress.models.arch import Arch
from compress.models.family import family_of_arch
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Scheme

ALL_EXPERTS = r"re:.*\.experts\."
"""The pattern of all linears of experts, by the names of transformers."""
_PART = ".experts."
NOT_GATHERED = (
    "gemma4",
    "gemma4_text",
    "granitemoehybrid",
    "qwen3_vl_moe",
    "mistral3",
    "aria",
    "aria_text",
    "dbrx",
    "minimax_m3_vl_text",
    "hy_v4",
    "inkling_text",
    "muse_spark",
    "longcat_flash",
)
"""Families whose experts transformers has in one tensor and does not gather from tensors of each."""
JOINED = ("minimax_m3_vl",)
"""Families whose gates and ups of FFNs transformers joins while it loads, the stored shapes of packed codes,
too, which then have another size: 'ckpt: torch.Size([4]) vs model:torch.Size([2])'."""
SHARED_RENAMED = ("hy_v3",)
"""Families whose shared expert transformers has under another name than checkpoints, which configs state."""

_CONVOLUTIONS = "the convolutions of delta nets"
GATHERED = {
    **dict.fromkeys(("kimi_linear", "bailing_hybrid", "glm5_next"), _CONVOLUTIONS),
    "step3p7": "the gates and ups of experts",
    "dots3_note": "the gates and ups of experts in its vision tower",
}
"""Families -> what transformers gathers from tensors of each: the convolutions of q, k and v, or tensors
with the gates and with the ups of all experts; in a model with n-grams their tables, too. Where experts, or
other linears next to dense ones, have codes other than FP8, it drops what it gathers and has no codes: 'Ckpt
contains: 0'."""

Group = tuple[Scheme, list[str]]
"""A scheme and the names of its linears."""


def with_pattern_of_experts(
    groups: Sequence[Group], scheme: ModelScheme, linears: Collection[str], *, head: str
) -> list[Group]:
    """Add the pattern of all experts to the group that has them, where several groups are written and one has
    all.
    """
    of_experts = {scheme.for_linear(each) for each in linears if _PART in each}
    if len(groups) == 1 or len(of_experts) != 1:
        return list(groups)
    return [
        (each, [*targets, ALL_EXPERTS] if {each} == of_experts and targets != [head] else targets)
        for each, targets in groups
    ]


def has_several_schemes(arch: Arch, scheme: ModelScheme) -> bool:
    """Return whether the experts of some layer have several schemes, no scheme one of them."""
    return any(
        len({scheme.for_linear(f"layers.{idx}.{linear}") for linear in layer.linears if _PART in linear}) > 1
        for idx, layer in enumerate(arch.layers)
    )


def why_transformers_refuses(arch: Arch, scheme: ModelScheme, quant_method: str) -> str | None:
    """Return why transformers does not load the mixtures of a checkpoint, or None where it does."""
    family = family_of_arch(arch).in_format(quant_method)
    apart = [
        f"layers.{idx}.{linear}"
        for idx, layer in enumerate(arch.layers)
        for linear in layer.linears
        if ".experts." in linear and not family.holds_all_experts(f"layers.{idx}.{linear}")
    ]
    if arch.family in SHARED_RENAMED and any(".moe.shared." in linear for linear, _ in scheme.exceptions):
        return "has the shared expert under another name, so that it finds no scheme of its own for it"
    schemes = {scheme.for_linear(each) for each in apart}
    one = next(iter(schemes)) if len(schemes) == 1 else None
    if arch.family in NOT_GATHERED and schemes:
        return "has all experts of a layer in one tensor, and does not gather them from tensors of each"
    dropped = _gathered(arch)
    if dropped is not None and not _has_fp8_experts(one, scheme):
        return f"drops {dropped} of checkpoints with other experts than FP8"
    if arch.family in JOINED and not all(map(_is_channel_fp8, scheme.all)):
        return "joins gates and ups of FFNs while it loads, and takes FP8 with channel scales there"
    if not schemes or _is_channel_fp8(one) or (one is not None and _is_packed(one)):
        return None
    if _has_fp8_experts(one, scheme):
        return None
    return (
        "takes experts of one symmetric packed scheme, or of FP8 with channel scales and without static ones "
        "of inputs"
    )


def _gathered(arch: Arch) -> str | None:
    """Return what transformers gathers from several tensors of a checkpoint, None where nothing."""
    if arch.has_ngrams:
        return "the tables of n-grams"
    found = GATHERED.get(arch.family)
    if found == _CONVOLUTIONS:
        return found if arch.has_recurrences else None
    return found if arch.has_experts else None


def _has_fp8_experts(of_experts: Scheme | None, scheme: ModelScheme) -> bool:
    """Return whether transformers decodes experts as FP8: of theirs, or of other linears where experts have
    no scheme."""
    if of_experts is not None:
        return _is_channel_fp8(of_experts)
    return all(map(_is_channel_fp8, scheme.all))


def _is_packed(scheme: Scheme) -> bool:
    return (scheme.scale_type, scheme.num_bits) == ("e8m0", 4) or (
        format_of(scheme) == PACK_FORMAT and scheme.symmetric
    )


def _is_channel_fp8(scheme: Scheme | None) -> bool:
    if scheme is None or scheme.has_static_inputs:
        return False
    return (scheme.type, scheme.num_bits, scheme.block_rows, scheme.scale_type) == ("float", 8, 1, None)

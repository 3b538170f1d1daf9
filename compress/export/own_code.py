"""Models of which `transformers` loads no checkpoint, or none with codes."""

from collections.abc import Iterable

from compress.export.config_groups import PACK_FORMAT, format_of
from compress.models.alibi import Alibi
from compress.models.arch import Arch
from compress.quant.scheme import Scheme

BY_CODE = (
    "kimi_k2",
    "minimax_m1",
    "minimax_text_01",
    "vlm",
    "phi4mm",
    "NemotronH_Nano_Omni_Reasoning_V3",
)
PLAIN_ALONE = {
    "ernie4_5_vl_moe": (
        "joins experts of text and of images, which have a tensor for each linear, and reads no scales of "
        "theirs"
    ),
    "openai-gpt": "has linears of another class in GPT (Conv1D), into which it loads no codes",
    "gpt2": "has linears of another class in GPT-2 (Conv1D), into which it loads no codes",
    "inkling_mm_model": (
        "splits a tensor of gate and up while it loads, and finds neither codes nor scales of the parts"
    ),
    "qianfan_ocr": (
        "splits a tensor of q, k and v in the vision tower, and builds that step for plain checkpoints only "
        "('you can only have one to many')"
    ),
}
"""Families of which transformers 5.23 loads plain checkpoints only, and why."""
_OUT_PROJ = (
    "initializes `out_proj.weight` at load, which packed weights do not have ('Linear' object has no "
    "attribute 'weight')"
)
UNPACKED_ALONE = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _OUT_PROJ),
    "falcon": (
        "multiplies by the `weight` of a linear in its own way, which packed weights do not have "
        "('FalconLinear' object has no attribute 'weight')"
    ),
    "gpt_bigcode": (
        "initializes `c_proj.weight` at load, which packed weights do not have ('Linear' object has no "
        "attribute 'weight')"
    ),
    "nanochat": (
        "initializes `o_proj.weight` at load, which packed weights do not have ('Linear' object has no "
        "attribute 'weight')"
    ),
}
"""Families of which transformers 5.23 loads no weights that are packed in words, and why."""
SPLIT_AT_LOAD = {
    "molmo2": (
        "splits stacked linears while it loads, and builds that step for no checkpoint whose scales it reads "
        "there ('you can only have one to many')"
    ),
}
"""Families whose codes transformers 5.23 does not load in formats that it decodes during loading (fp8, and
codes with zero points), and why."""


def why_no_class(arch: Arch) -> str | None:
    """Return why transformers loads no checkpoint of a model without its own code, None where it does."""
    has_query_latent = any(layer.latent is not None and layer.latent.q_rank for layer in arch.layers)
    if arch.family == "bailing_hybrid" and has_query_latent:
        return "its class of Ling 3.0 has no latent of queries"
    if arch.family == "bailing_hybrid" and any(each.ffn_cap or each.expert_cap for each in arch.layers):
        return "its class of Ling 3.0 computes no caps of the activations of experts"
    alibi = arch.layers[0].alibi
    if arch.family == "mpt" and alibi is not None and alibi.exponent != Alibi.exponent:
        return f"its class of MPT has the slopes of alibi_bias_max = {Alibi.exponent:g} alone"
    if arch.family == "dbrx" and arch.qkv_clip is None:
        return "its class of DBRX computes nothing where no clip_qkv is stated"
    if arch.family not in BY_CODE:
        return None
    return f"it knows the model_type {arch.family} by the code of a checkpoint only"


def why_no_codes_of(arch: Arch, schemes: Iterable[Scheme]) -> str | None:
    """Return why transformers loads no codes of these schemes that are packed in words or have zero points,
    None where it does or none are."""
    coded = list(schemes)
    if any(format_of(each).endswith(PACK_FORMAT) for each in coded) and arch.family in UNPACKED_ALONE:
        return UNPACKED_ALONE[arch.family]
    return None if all(each.symmetric for each in coded) else why_no_codes_at_load(arch)


def why_no_codes_at_load(arch: Arch) -> str | None:
    """Return why transformers decodes no codes of a model while it loads, None where it does."""
    return SPLIT_AT_LOAD.get(arch.family)


def why_no_codes(arch: Arch) -> str | None:
    """Return why transformers loads no checkpoint of a model with codes, None where that depends on them."""
    return why_no_class(arch) or PLAIN_ALONE.get(arch.family)

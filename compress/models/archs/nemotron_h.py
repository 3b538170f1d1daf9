"""Nemotron-H (NVIDIA, arXiv 2504.03624), Nemotron Nano 2 (arXiv 2508.14444) and Nemotron 3: a layer is a
Mamba-2 mixer, attention without positions, an FFN without gates, or a mixture of experts without gates.

The class of `transformers` takes `time_step_min` for a bound of the steps of time in prompts, and for none in
decode; the decoder bounds neither, as the model's first code and vLLM do. The two layers that predict a
further token are read where they have attention and experts: they are the halves of one (`mtp.py`).
"""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.archs.glm4_moe import SIGMOID_MIXTURE
from compress.models.config_facts import only_own_code
from compress.models.experts import LATENT_IN, LATENT_OUT, MAX_EXPERT_SIZE
from compress.models.family import FAMILIES, Family, family_of_arch
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, LINEAR, no_layer
from compress.models.mamba2_config import (
    MAMBA_FIELDS,
    MAMBA_FIXED,
    MAMBA_MODULES,
    mamba2_of,
)
from compress.models.mixture import EXPERT, ExpertLayout, Mixture
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import MtpNames
from compress.untrusted.fields import Fields

_MOE = "moe"
_OF_LETTER = {"M": LINEAR, "*": FULL, "-": "mlp", "E": _MOE}
_TYPES = {"mamba": LINEAR, "attention": FULL} | {kind: kind for kind in _OF_LETTER.values()}
_LATENT = "moe_latent_size"
_PATTERN = "hybrid_override_pattern"
_MTP_PATTERN = "mtp_hybrid_override_pattern"
_MTP_TYPES = "mtp_layers_block_type"
_LISTS = ("layers_block_type", "layer_types")
_APART = ExpertLayout({f"{EXPERT}{each}": f"mixer.experts.*.{each}_proj" for each in ("up", "down")})
_SPELLED = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling, and their number, which programs take from
    the types, too. Refuse an `auto_map` to other code than the model's own from before it was in
    `transformers`."""
    only_own_code(config, ("NemotronHConfig", "NemotronHForCausalLM", "NemotronHModel"))
    types = _types_of(config)
    return {"layer_types": types, "num_hidden_layers": len(types)}


def _types_of(config: Fields) -> list[str]:
    """Return the types of the layers in the standard spelling; those of the class of `transformers` where a
    config states none.

    Raises:
        UnsupportedArch: a layer has another type, or two fields differ in one.
    """
    stated = {name: config.texts(name) for name in _LISTS if config.has(name)}
    if config.has(_PATTERN):
        stated[_PATTERN] = list(config.text(_PATTERN))
    known = {**_TYPES, **_OF_LETTER}
    for name, types in stated.items():
        if others := sorted({*types} - {*known}):
            raise UnsupportedArch(
                f"{config.where} has layers of the type {', '.join(others)} ({name}); the decoder has "
                f"{', '.join(_OF_LETTER if name == _PATTERN else _TYPES)}."
            )
    found = {name: [known[each] for each in types] for name, types in stated.items()}
    if not found:
        return [LINEAR, _MOE, FULL, "mlp"]
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            raise config.wrong(name, ", ".join(stated[name]), f"the types of {first}")
    return found[first]


def _has_experts(config: Fields, num_layers: int) -> list[bool]:
    return [kind == _MOE for kind in _types_of(config)[:num_layers]]


def _latents(config: Fields) -> dict[str, Any]:
    """Return the facts of the latents that the experts act on (Nemotron 3 Super), none without them."""
    if not config.has(_LATENT):
        return {}
    size = config.integer(_LATENT, 1, MAX_EXPERT_SIZE)
    return {"latent_size": size, "latent_bias": config.flag("mlp_bias", default=False)}


_MIXTURE = Mixture(
    {**SIGMOID_MIXTURE.fields, "shared_size": "moe_shared_expert_intermediate_size"},
    facts=SIGMOID_MIXTURE.facts,
    is_sparse=_has_experts,
    read_more=_latents,
)


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of both layers that predict a further token as one, attention and experts.

    Raises:
        UsageError: they are others, or no layer of the model has attention or experts.
    """
    sparse = [layer for layer in target.layers if layer.experts is not None]
    mixers = [layer for layer in target.layers if layer.attends]
    if not sparse or not mixers or _types_of_mtp(target) != [FULL, _MOE]:
        raise UsageError(
            f"the layers that predict a further token of this {target.family} model are not one with "
            "attention and one with experts; draft with a smaller model or by n-grams instead."
        )
    experts = sparse[-1]
    return replace(
        mixers[-1], only_half=None, experts=experts.experts, intermediate_size=experts.intermediate_size
    )


def _types_of_mtp(target: Arch) -> list[str]:
    """Return the types of the layers that predict further tokens, in the standard spelling."""
    stated = family_of_arch(target).stated(target.config)
    config = Fields(stated, f"the config of this {target.family} model", UnsupportedArch)
    types = [FULL, _MOE]
    if config.has(_MTP_PATTERN):
        types = list(config.text(_MTP_PATTERN))
    elif config.has(_MTP_TYPES):
        types = list(config.texts(_MTP_TYPES))
    return [{**_TYPES, **_OF_LETTER}.get(each, each) for each in types]


def mtp_names(part: str) -> MtpNames:
    """Return the names of the layers that predict a further token inside of a module on disk."""
    names = MtpNames(
        {
            "embed_norm": f"{part}.layers.0.enorm",
            "hidden_norm": f"{part}.layers.0.hnorm",
            "fc": f"{part}.layers.0.eh_proj",
            "norm": f"{part}.layers.1.final_layernorm",
        },
        f"{part}.layers.",
        shape=_shape_of_mtp,
        halves_apart=True,
    )
    return names if part == "mtp" else replace(names, in_vllm=(part, "mtp"))


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    computed_otherwise="Steps of time have no lower bound, as in the model's first code and vLLM; the "
    "class of transformers bounds those of prompts by time_step_min where it is not 0.",
    ffn_bias="mlp_bias",
    rotated_layers=no_layer,
    half_layers=True,
    gated=False,
    spelled=_SPELLED,
    implied=_implied,
    recurrence=mamba2_of,
    mixture=_MIXTURE,
    mtp=mtp_names("mtp"),
    aliases={"head_dim": "attention_head_dim"},
    outer_modules={"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    layer_prefix="backbone.layers.",
    layer_modules={
        **{name: f"mixer.{each.rpartition('.')[2]}" for name, each in LAYER_MODULES.items()},
        **{name: each.replace("mamba.", "mixer.") for name, each in MAMBA_MODULES.items()},
        "attn": "mixer",
        "attn_norm": "norm",
        "ffn_norm": "norm",
        "moe.router": "mixer.gate",
        "moe.selection_bias": "mixer.gate.e_score_correction_bias",
        "moe.shared.up": "mixer.shared_experts.up_proj",
        "moe.shared.down": "mixer.shared_experts.down_proj",
        f"moe.{LATENT_IN}": "mixer.fc1_latent_proj",
        f"moe.{LATENT_OUT}": "mixer.fc2_latent_proj",
    },
    expert_layouts=(_APART,),
    known_fields=MAMBA_FIELDS
    | frozenset({*_MIXTURE.fields.values(), *_LISTS, _PATTERN})
    | {
        "auto_map",
        "expand",
        "mlp_bias",
        _LATENT,
        _MTP_PATTERN,
        _MTP_TYPES,
        "num_nextn_predict_layers",
        "time_step_min",
    },
    fixed_fields={
        **{name: value for name, value in MAMBA_FIXED.items() if name != "hidden_act"},
        "mamba_hidden_act": "silu",
        "n_shared_experts": 1,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 1.0,
        "use_bias": False,
    },
    defaults={
        "head_dim": 128,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "num_key_value_heads": 8,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    in_memory={"backbone.": "model."},
    ignored_tensors=r"rotary_emb\.inv_freq$|^mtp\.",
)

FAMILIES.add("nemotron_h", NEMOTRON_H)

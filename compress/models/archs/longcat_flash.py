"""LongCat-Flash (Meituan, arXiv 2509.01322): shortcut-connected mixtures over latent attention.

A layer on disk is two here. Both have latent attention with rescaled latents and a dense FFN. The first also
has experts next to its FFN, which is the shared expert of their mixture here, and their output is added after
the second (`shortcut.py`). Some of the experts among which tokens choose return their input and have no
weights. The bias of selection is added to the scores, which are a softmax over all of these, and not to the
weights.

`transformers` 5.23 has gates and ups for experts without weights, too, which it stores and never reads; they
travel through untouched.
"""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.config_facts import implies_own_code
from compress.models.experts import MAX_EXPERT_SIZE
from compress.models.family import FAMILIES, Family
from compress.models.latent import Latent
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.limits import MAX_LAYERS
from compress.models.mixture import Mixture, apart
from compress.models.module_names import LAYER_MODULES
from compress.models.shortcut import Shortcuts
from compress.untrusted.fields import Fields

_LAYERS = "num_layers"
_FFN_SIZE = "ffn_hidden_size"
_FIELDS = {
    "num_experts": "n_routed_experts",
    "zero_experts": "zero_expert_num",
    "top_k": "moe_topk",
    "expert_size": "expert_ffn_hidden_size",
    "shared_size": _FFN_SIZE,
    "scale": "routed_scaling_factor",
}
_own_code = implies_own_code("LongcatFlashConfig", "LongcatFlashModel", "LongcatFlashForCausalLM")


def _implied(config: Fields) -> dict[str, Any]:
    """Return the number of layers, two for each that the config counts."""
    return {**_own_code(config), "num_hidden_layers": 2 * config.integer(_LAYERS, 1, MAX_LAYERS // 2)}


def _latent(config: Fields) -> Latent:
    """Return the latents of a layer, which are rescaled."""
    return replace(latent_of(True)(config), rescaled=True)


def _every_second(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts: the first of every two."""
    del config
    return [idx % 2 == 0 for idx in range(num_layers)]


def _facts(config: Fields) -> dict[str, Any]:
    """Return the facts of the model.

    Raises:
        UnsupportedArch: there is no dense FFN next to the experts.
    """
    config.integer(_FFN_SIZE, 1, MAX_EXPERT_SIZE)
    return {"hyper": Shortcuts()}


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the number of layers on disk.

    Raises:
        UnsupportedArch: the two FFNs of a layer on disk differ in width.
    """
    widths = {
        layer.experts.shared_size if layer.experts else layer.intermediate_size for layer in arch.layers
    }
    if len(widths) > 1:
        raise UnsupportedArch(
            f"dense FFNs have {' and '.join(map(str, sorted(widths)))} channels; the config of this family "
            "states one number for those next to experts and the others."
        )
    return {_LAYERS: arch.num_layers // 2}


def _in_halves(modules: dict[str, str]) -> dict[str, str]:
    """Return names of modules of which a layer on disk has two, numbered after the first part."""
    parts = {name: theirs.partition(".") for name, theirs in modules.items()}
    return {
        name: f"{first}.{{half}}.{rest}" if rest else f"{first}.{{half}}"
        for name, (first, _, rest) in parts.items()
    }


_ATTENTION = {
    name: theirs for name, theirs in LAYER_MODULES.items() if name.startswith("attn") or name == "ffn_norm"
}

FAMILIES.add(
    "longcat_flash",
    Family(
        model_type="longcat_flash",
        architecture="LongcatFlashForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        latent=_latent,
        facts=_facts,
        implied=_implied,
        restated=_restated,
        spelled={"num_hidden_layers": _LAYERS, "intermediate_size": _FFN_SIZE},
        dense_size=_FFN_SIZE,
        mixture=Mixture(
            _FIELDS,
            facts={"selection_bias": True, "delayed": True},
            is_sparse=_every_second,
        ),
        layer_modules={
            **_in_halves({**_ATTENTION, **LATENT_MODULES}),
            **{f"ffn.{name}": f"mlps.1.{name}_proj" for name in ("gate", "up", "down")},
            **{f"moe.shared.{name}": f"mlps.0.{name}_proj" for name in ("gate", "up", "down")},
            "moe.router": "mlp.router.classifier",
            "moe.selection_bias": "mlp.router.e_score_correction_bias",
        },
        layers_in_pairs=True,
        expert_layouts=(apart("mlp.experts"),),
        unread_experts=True,
        known_fields=frozenset({*_FIELDS.values(), "attention_bias", "auto_map"}),
        fixed_fields={
            "router_bias": False,
            "zero_expert_type": "identity",
            "attention_method": "MLA",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "norm_topk_prob": False,
        },
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000000.0,
            "max_position_embeddings": 131072,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "routed_scaling_factor": 6.0,
            _LAYERS: 28,
            _FFN_SIZE: 12288,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "moe_topk": 12,
            "expert_ffn_hidden_size": 2048,
        },
        ignored_tensors=r"rotary_emb\.inv_freq$|^model\.mtp\.",
    ),
)

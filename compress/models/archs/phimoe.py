"""Phi-3.5-MoE (Microsoft, arXiv 2404.14219): experts of which SparseMixer chooses two, one after the other,
norms with biases, LongRoPE, and biases of attention and of the head where they are stated. Phi-mini-MoE and
Phi-tiny-MoE (SlimMoE, arXiv 2506.18349) are smaller in heads and experts; their own code (`modeling_slimmoe`)
was not compared: they are computed as the class of `transformers` computes their configs."""

from typing import Any

from compress.models.archs.phi3 import check_rope_of_phi
from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import same_window
from compress.models.limits import FACTORS
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_FACTORS_OF_LENGTHS = ("short_mscale", "long_mscale")
_NOTE = (
    "Sequences longer than original_max_position_embeddings take the long factors of LongRoPE, as in the "
    "model's own code and vLLM; the class of transformers takes the short ones for every length."
)


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True, "head_bias": config.flag("lm_head_bias")}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the rope, whose factor of cos and sin is stated twice, for short and for long sequences; refuse
    others of Phi-3's ropes and code of a checkpoint's own but that which `transformers` took over.

    Raises:
        UnsupportedArch: the two factors differ, or it is another rope or other code.
    """
    only_own_code(config, ("PhiMoEConfig", "PhiMoEModel", "PhiMoEForCausalLM"))
    check_rope_of_phi(config)
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    rope = config.fields(name, default={})
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return {}
    short, long = (rope.number(each, *FACTORS) for each in _FACTORS_OF_LENGTHS)
    if short != long:
        raise rope.wrong("long_mscale", long, f"short_mscale, {short:g}: one factor is computed here")
    stated = {each: value for each, value in config.mapping(name).items() if each not in _FACTORS_OF_LENGTHS}
    return {"rope_parameters": {**stated, "attention_factor": short}}


FAMILIES.add(
    "phimoe",
    Family(
        model_type="phimoe",
        architecture="PhimoeForCausalLM",
        other_names=("PhiMoEForCausalLM",),
        computed_otherwise=_NOTE,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=same_window,
        facts=_facts,
        implied=_implied,
        mixture=Mixture(
            {
                "num_experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "expert_size": "intermediate_size",
            },
            facts={"score": "sparsemixer"},
            read_more=lambda config: {"jitter": config.number("router_jitter_noise", 0, 1)},
        ),
        layer_modules={**LAYER_MODULES, "moe.router": "block_sparse_moe.gate"},
        expert_layouts=(
            apart("block_sparse_moe.experts", ("w1", "w3", "w2")),
            AS_IN_MEMORY,
        ),
        in_memory_inside={"block_sparse_moe.gate": "mlp.router"},
        known_fields=frozenset(
            {
                "attention_bias",
                "auto_map",
                "input_jitter_noise",
                "lm_head_bias",
                "num_experts_per_tok",
                "num_local_experts",
                "sliding_window",
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            "lm_head_bias": False,
        },
    ),
)

"""gpt-oss 20b and 120b (arXiv 2508.10925): windows on every other layer, attention sinks, biases everywhere,
a clamped gate, and experts weighted by the softmax over the chosen ones. Checkpoints with MXFP4 experts are
read as the bfloat16 numbers that their blocks encode."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import windows_by_layer_type
from compress.models.limits import MAX_POSITIONS
from compress.models.mixture import Mixture, in_one
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"


def _windows(config: Fields, num_layers: int) -> list[int | None]:
    if config.has("layer_types"):
        return windows_by_layer_type(config, num_layers)
    window = config.integer("sliding_window", 1, MAX_POSITIONS) if config.has("sliding_window") else None
    return [None if idx % 2 else window for idx in range(num_layers)]


def _facts(config: Fields) -> dict[str, Any]:
    return {"attn_sinks": True, "activation": "swiglu_clamped"}


FAMILIES.add(
    "gpt_oss",
    Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=_windows,
        facts=_facts,
        mixture=Mixture(
            {
                "num_experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "expert_size": "intermediate_size",
            },
            facts={"score": "softmax_topk", "router_bias": True, "expert_bias": True},
        ),
        layer_modules={**LAYER_MODULES, "moe.router": "mlp.router"},
        expert_layouts=(
            in_one(
                _GATE_UP, _DOWN, suffixes={"weight": "", "bias": "_bias"}, transposed=True, interleaved=True
            ),
            in_one(_GATE_UP, _DOWN, suffixes={"weight": "", "bias": "_bias"}, interleaved=True, mxfp4=True),
        ),
        known_fields=frozenset(
            {
                "attention_bias",
                "sliding_window",
                "layer_types",
                "num_local_experts",
                "num_experts_per_tok",
            }
        ),
        fixed_fields={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": _YARN,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "max_position_embeddings": 131072,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
    ),
)

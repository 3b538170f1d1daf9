"""StarCoder2 (BigCode, arXiv 2402.19173): LayerNorm with a bias, an FFN without gates, whose activation is
gelu, one sliding window in all layers, and biases of all linears, or of none."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import same_window
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True}


FAMILIES.add(
    "starcoder2",
    Family(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        qkv_bias="use_bias",
        o_bias="use_bias",
        ffn_bias="use_bias",
        gated=False,
        windows=same_window,
        facts=_facts,
        spelled={"rms_norm_eps": "norm_epsilon"},
        layer_modules={**LAYER_MODULES, "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"},
        known_fields=frozenset(
            {"norm_epsilon", "sliding_window", "use_bias", "residual_dropout", "embedding_dropout"}
        ),  # dropout is for training only
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "use_bias": True,
        },
    ),
)

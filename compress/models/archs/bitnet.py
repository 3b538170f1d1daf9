"""BitNet b1.58 2B4T (Microsoft, arXiv 2504.12285): Llama whose last linears read what is normed (Sub-LN),
with the square of relu as the function of gates. Its linears multiply weights of -1, 0 or 1 times a number by
inputs that are rounded to 8 bits, which the `quantization_config` of checkpoints states (`export/bitnet.py`).
"""

from dataclasses import replace

from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with the norms before their last linears."""
    del config
    return tuple(replace(layer, sub_norms=True) for layer in layers)


FAMILIES.add(
    "bitnet",
    Family(
        model_type="bitnet",
        architecture="BitNetForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        heads_span_hidden=True,
        shapes=_shapes,
        implied=implies_own_code("BitNetConfig", "BitNetModel", "BitNetForCausalLM"),
        layer_modules={
            **LAYER_MODULES,
            "attn.sub_norm": "self_attn.attn_sub_norm",
            "ffn.sub_norm": "mlp.ffn_sub_norm",
        },
        known_fields=frozenset({"attention_bias", "auto_map"}),
        defaults={
            "hidden_act": "relu2",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_key_value_heads": 5,
            "max_position_embeddings": 2048,
        },
    ),
)

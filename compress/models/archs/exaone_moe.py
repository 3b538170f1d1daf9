"""K-EXAONE (LG AI Research, 2026): the attention of EXAONE 4 with norms before the halves of a layer, a first
layer that is dense, and experts chosen by the sigmoids of the router with a bias that their weights do not
have. Layers that predict further tokens have a dense FFN (`mtp.py`)."""

from dataclasses import replace

from compress.models.arch import Arch
from compress.models.archs.exaone4 import layers_with_rope, types_of_layers
from compress.models.archs.glm4_moe import MIXTURE_MODULES, SIGMOID_MIXTURE
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import windows_by_layer_type
from compress.models.mixture import (
    AS_IN_MEMORY,
    Mixture,
    apart,
    shared_of,
    sparse_by_type_or_count,
    state_types,
)
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import IN_MTP, last_attention_layer, with_dense_ffn

_FIELDS = {**SIGMOID_MIXTURE.fields, "num_experts": "num_experts"}
_SHARED = "num_shared_experts"


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of the layer that predicts a further token: attention with a rope and without a
    window, and a dense FFN."""
    rope = next((layer.rope for layer in target.layers if layer.rope is not None), None)
    return with_dense_ffn(target, replace(last_attention_layer(target), rope=rope, window=None))


FAMILIES.add(
    "exaone_moe",
    Family(
        model_type="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        qk_norm=True,
        windows=windows_by_layer_type,
        rotated_layers=layers_with_rope,
        mixture=Mixture(
            _FIELDS,
            facts=SIGMOID_MIXTURE.facts,
            is_sparse=sparse_by_type_or_count,
            state_sparse=state_types,
            read_more=shared_of(_SHARED),
        ),
        mtp=replace(IN_MTP, shape=_shape_of_mtp),
        layer_modules={
            **LAYER_MODULES,
            **MIXTURE_MODULES,
            "moe.selection_bias": "mlp.e_score_correction_bias",
        },
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        implied=types_of_layers,
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                _SHARED,
                "first_k_dense_replace",
                "mlp_layer_types",
                "sliding_window",
                "sliding_window_pattern",
                "layer_types",
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "num_key_value_heads": 32,
            "intermediate_size": 16384,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            _SHARED: 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        ignored_tensors=r"rotary_emb\.inv_freq$|^mtp\.",
    ),
)

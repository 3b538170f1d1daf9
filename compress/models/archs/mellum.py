"""Mellum 2 (JetBrains, 2026): Qwen3's mixture with windows by the type of a layer, and a rope of its own for
each type. The layer that predicts a further token has a window unless a config states another type
(`mtp.py`)."""

from dataclasses import replace

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.archs.qwen3_moe import QWEN3_MOE
from compress.models.family import FAMILIES
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import SLIDING, no_window, windows_by_layer_type
from compress.models.mixture import SPARSE_LAYER, Mixture, sparse_by_type, state_types
from compress.models.mtp_names import IN_MTP
from compress.models.mtp_types import shape_by_types
from compress.untrusted.fields import Fields

_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "renormalize": "norm_topk_prob",
}


def _windows(config: Fields, num_layers: int) -> list[int | None]:
    """Return the windows of the layers; where a config states no types, no layer has one."""
    read = windows_by_layer_type if config.has("layer_types") else no_window
    return read(config, num_layers)


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of the layer that predicts a further token. Raises as `shape_by_types`."""
    config = Fields(target.config, "the config of this mellum model", UnsupportedArch)
    return shape_by_types(target, config, [SLIDING], [SPARSE_LAYER])


FAMILIES.add(
    "mellum",
    replace(
        QWEN3_MOE,
        model_type="mellum",
        architecture="MellumForCausalLM",
        windows=_windows,
        mtp=replace(IN_MTP, shape=_shape_of_mtp),
        mixture=Mixture(_FIELDS, is_sparse=sparse_by_type, state_sparse=state_types),
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                "attention_bias",
                "sliding_window",
                "layer_types",
                "mlp_layer_types",
                "num_mtp_layers",
                "num_nextn_predict_layers",
                "mtp_layer_types",
                "mtp_mlp_layer_types",
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 7168,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        ignored_tensors=r"rotary_emb\.inv_freq$|^mtp\.",
    ),
)

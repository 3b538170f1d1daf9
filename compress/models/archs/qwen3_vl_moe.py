"""Qwen3-VL mixtures of experts (arXiv 2511.21631): the text model is Qwen3's mixture with the rope of
Qwen3-VL. All experts of a layer are in one tensor; checkpoints have its matrices transposed, and some
versions of `transformers` wrote them as they are in memory; codes are written for each expert, as vLLM reads
them. The weights of the chosen experts are always
renormalized."""

from dataclasses import replace

from compress.models.archs.qwen3_moe import QWEN3_MOE
from compress.models.family import FAMILIES
from compress.models.layer_types import no_window
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart, sparse_by_step, state_steps
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_TEXT = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    windows=no_window,
    implied=rope_of_text,
    mixture=Mixture(
        {
            "num_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "expert_size": "moe_intermediate_size",
        },
        facts={"renormalize": True},
        is_sparse=sparse_by_step,
        state_sparse=state_steps,
    ),
    expert_layouts=(
        replace(AS_IN_MEMORY, transposed=True),
        AS_IN_MEMORY,
        apart("mlp.experts", methods=("compressed-tensors",)),
    ),
    known_fields=frozenset(
        {
            "attention_bias",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "decoder_sparse_step",
            "mlp_only_layers",
        }
    ),
    fixed_fields={"norm_topk_prob": True},
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "max_position_embeddings": 128000,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
    },
)
FAMILIES.add(
    "qwen3_vl_moe",
    wrapper("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _TEXT, **LANGUAGE_MODEL_NAMES),
)

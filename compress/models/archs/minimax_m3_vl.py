"""MiniMax-M3 (MiniMax, 2026) with its vision tower: the text model is `minimax_m3_vl_text`. Checkpoints name
the experts as those of MiniMax-M2, and `transformers` has other names for them in memory."""

from compress.models.archs.minimax_m3_vl_text import MINIMAX_M3
from compress.models.family import FAMILIES
from compress.models.mixture import BARE, apart, in_one
from compress.models.module_names import LAYER_MODULES, STACKED_GATE_UP
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

_MOE = "block_sparse_moe"
_TOWER = "vision_tower.vision_model"
_PATCHES = "patch_merge_mlp"
_INDEXER = {name: f"self_attn.index_{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
_INSIDE = {
    f"{_MOE}.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    **{f"{_MOE}.{name}": f"mlp.{name}" for name in ("experts", "gate", "shared_experts")},
    **{module: f"self_attn.indexer.{name}" for name, module in _INDEXER.items()},
}
"""Modules of layers on disk -> those in memory."""
_STACKED = in_one(
    f"{_MOE}.experts.gate_up_proj",
    f"{_MOE}.experts.down_proj",
    suffixes=BARE,
    modules={
        **STACKED_GATE_UP,
        **dict.fromkeys(("moe.shared.gate", "moe.shared.up"), f"{_MOE}.shared_experts.gate_up_proj"),
    },
)
"""The layout that `transformers` has in memory, with other modules as they are on disk."""

FAMILIES.add(
    "minimax_m3_vl",
    wrapper(
        "minimax_m3_vl",
        "MiniMaxM3SparseForConditionalGeneration",
        sized(
            MINIMAX_M3,
            vocab_size=200064,
            hidden_size=6144,
            num_hidden_layers=60,
            num_attention_heads=64,
        ),
        text_ties=True,
        layer_modules={
            **LAYER_MODULES,
            **{
                f"attn.indexer.{name[0]}": module
                for name, module in _INDEXER.items()
                if name.endswith("_proj")
            },
            **{f"attn.indexer.{name}": module for name, module in _INDEXER.items() if name.endswith("_norm")},
            "moe.router": f"{_MOE}.gate",
            "moe.selection_bias": f"{_MOE}.e_score_correction_bias",
            **{f"moe.shared.{name}": f"{_MOE}.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
        },
        expert_layouts=(apart(f"{_MOE}.experts", ("w1", "w3", "w2")), _STACKED),
        in_memory_inside=_INSIDE,
        **{
            **LLAVA_NAMES,
            "in_memory": {
                "language_model.model.": "model.language_model.",
                "language_model.lm_head": "lm_head",
                f"{_TOWER}.embeddings.patch_embedding.": "model.vision_tower.embeddings.proj.",
                f"{_TOWER}.encoder.layers.": "model.vision_tower.layers.",
                f"{_TOWER}.": "model.vision_tower.",
                f"{_PATCHES}.linear_1.": "model.multi_modal_projector.merge_linear_1.",
                f"{_PATCHES}.linear_2.": "model.multi_modal_projector.merge_linear_2.",
                "multi_modal_projector.": "model.multi_modal_projector.",
            },
            "untouched": (*LLAVA_NAMES["untouched"], _PATCHES),
        },
    ),
)

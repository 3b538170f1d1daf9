"""Inkling (Thinking Machines, 2026) with its towers for images and for sound, as it is published: the rows of
gate and up take turns in one tensor, and modules have names of their own."""

from dataclasses import replace

from compress.models.archs.inkling_text import INKLING_TEXT
from compress.models.family import FAMILIES
from compress.models.mixture import BARE, apart, in_one
from compress.models.wrapper import wrapper

_EXPERTS = in_one(
    "mlp.experts.w13_weight",
    "mlp.experts.w2_weight",
    suffixes=BARE,
    interleaved=True,
    always={
        "gate": "mlp.shared_experts.shared_w13_weight",
        "up": "mlp.shared_experts.shared_w13_weight",
        "down": "mlp.shared_experts.shared_w2_weight",
    },
)

_TEXT = replace(
    INKLING_TEXT,
    outer_modules={
        "embed": "model.llm.embed",
        "embed.norm": "model.llm.embed_norm",
        "norm": "model.llm.norm",
        "head": "model.llm.unembed",
    },
    layer_prefix="model.llm.layers.",
    layer_modules={
        "attn_norm": "attn_norm",
        "attn": "attn",
        "attn.q": "attn.wq_du",
        "attn.k": "attn.wk_dv",
        "attn.v": "attn.wv_dv",
        "attn.o": "attn.wo_ud",
        "attn.q_norm": "attn.q_norm",
        "attn.k_norm": "attn.k_norm",
        "attn.relative": "attn.wr_du",
        "attn.profiles": "attn.rel_logits_proj.proj",
        "attn.k_conv": "attn.k_sconv",
        "attn.v_conv": "attn.v_sconv",
        "attn_conv": "attn_sconv",
        "ffn_norm": "mlp_norm",
        "ffn.gate": "mlp.w13_dn",
        "ffn.up": "mlp.w13_dn",
        "ffn.down": "mlp.w2_md",
        "ffn.factor": "mlp.global_scale",
        "ffn_conv": "mlp_sconv",
        "moe.router": "mlp.gate",
        "moe.selection_bias": "mlp.gate.bias",
        "moe.factor": "mlp.gate.global_scale",
    },
    rows_in_turns=frozenset({"mlp.w13_dn"}),
    expert_layouts=(_EXPERTS, apart("mlp.experts", methods=("compressed-tensors",))),
    in_memory={
        "model.llm.layers.": "model.language_model.layers.",
        "model.llm.embed_norm.": "model.language_model.embed_tokens.embed_norm.",
        "model.llm.embed.": "model.language_model.embed_tokens.",
        "model.llm.norm.": "model.language_model.norm.",
        "model.llm.unembed.": "lm_head.",
        "model.audio.": "model.audio_tower.",
        "model.visual.": "model.vision_tower.",
    },
    in_memory_inside={
        "attn.wq_du": "self_attn.q_proj",
        "attn.wk_dv": "self_attn.k_proj",
        "attn.wv_dv": "self_attn.v_proj",
        "attn.wr_du": "self_attn.r_proj",
        "attn.wo_ud": "self_attn.o_proj",
        "mlp.w2_md": "mlp.down_proj",
    },
)

FAMILIES.add(
    "inkling_mm_model",
    wrapper(
        "inkling_mm_model",
        "InklingForConditionalGeneration",
        _TEXT,
        untouched=("model.visual", "model.audio"),
    ),
)

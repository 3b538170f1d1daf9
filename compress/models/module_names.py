"""Names of the canonical modules on disk, as most families spell them. The table of a family starts from
these and replaces the names that the family spells otherwise.
"""

EMBED = "embed.weight"
"""The canonical name of the embedding of tokens."""
# Canonical module -> module on disk: the spelling that Llama introduced and most decoders kept.
OUTER_MODULES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}

# Norms of the outputs of the two halves of a layer, as most families with four norms spell them.
SANDWICH_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
# All modules of a layer whose two norms follow its halves.
POST_NORM_MODULES = {
    **{name: disk for name, disk in LAYER_MODULES.items() if name not in ("attn_norm", "ffn_norm")},
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
# q, k and v, and gate and up, as one tensor each.
STACKED_QKV = dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.qkv_proj")
STACKED_GATE_UP = dict.fromkeys(("ffn.gate", "ffn.up"), "mlp.gate_up_proj")

"""Cosmos 3 Edge (NVIDIA, 2026): the text model of the reasoner is Llama with an FFN without gates, whose
activation is the squared relu. Its rope has sections for the time, height and width of a token, in turns; the
three are equal for text, so that it is the plain rope there. On disk linears of attention have names of
diffusion models. The vision tower stays as it is, and so does the generator, whose tensors are in the same
checkpoints, some of them in the layers."""

from dataclasses import replace

from compress.models.archs.llama import LLAMA
from compress.models.family import FAMILIES
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import sized, wrapper

_TEXT = sized(
    replace(
        LLAMA,
        model_type="cosmos3_edge_text",
        gated=False,
        implied=rope_of_text,
        defaults={
            **LLAMA.defaults,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000000.0,
        },
    ),
    vocab_size=131072,
    hidden_size=2048,
    intermediate_size=9216,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
)
_LINEARS = {f"attn.{each}": f"self_attn.to_{each}" for each in "qkv"} | {"attn.o": "self_attn.to_out"}
_GENERATOR = (
    *("action_modality_embed", "action_proj_in", "action_proj_out", "time_embedder"),
    *("proj_in", "proj_out", "norm_moe_gen"),
)
_GENERATOR_IN_LAYERS = (
    *("input_layernorm_moe_gen", "post_attention_layernorm_moe_gen", "mlp_moe_gen"),
    *(f"self_attn.add_{each}_proj" for each in "qkv"),
    *(f"self_attn.{each}" for each in ("to_add_out", "norm_added_q", "norm_added_k", "k_norm_und_for_gen")),
)
_IN_MEMORY = "model.language_model."

FAMILIES.add(
    "cosmos3_edge",
    wrapper(
        "cosmos3_edge",
        "Cosmos3EdgeForConditionalGeneration",
        _TEXT,
        own_head=True,
        layer_prefix="layers.",
        outer_modules={"embed": "embed_tokens", "norm": "norm", "head": "lm_head"},
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
            **_LINEARS,
        },
        in_memory={f"{part}.": f"{_IN_MEMORY}{part}." for part in ("layers", "embed_tokens", "norm")},
        in_memory_inside={
            **{disk: LAYER_MODULES[name] for name, disk in _LINEARS.items()},
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
        untouched=("model.visual", "model.projector", *_GENERATOR),
        untouched_in_layers=_GENERATOR_IN_LAYERS,
    ),
)

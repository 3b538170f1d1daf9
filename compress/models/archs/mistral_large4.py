"""Mistral Large 4 (Mistral AI, 2026) with its vision tower: latent attention whose queries grow with the
position by parameters of each head, indexers, layers that share latents or encode no positions, a rope with
trained frequencies, and experts chosen by the softmax of the router. The layer that predicts further tokens
is not read."""

from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.archs.deepseek_v32 import INDEX_PAIRS, standard_types, with_indexers
from compress.models.archs.glm4_moe import MIXTURE_FIELDS, SIGMOID_MIXTURE
from compress.models.archs.glm_moe_dsa import KIND_FIELDS, indexer_kinds
from compress.models.archs.smollm3 import rotated_layers
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import latent_of
from compress.models.layer_shape import LayerShape
from compress.models.limits import MAX_LAYERS, SCALES
from compress.models.mixture import BARE, apart, in_one, sparse_by_type_or_count, state_types
from compress.models.wrapper import wrapper
from compress.untrusted.fields import Fields

_SOURCES = "kv_source_layers"
_CAP = "final_logit_softcapping"
_GROWTH = "attention.ssmax_scaling"
_INDEXER = "attention.indexer"


def _facts(config: Fields) -> dict[str, Any]:
    return {
        "learned_growth": True,
        "latent_eps": config.number("rms_norm_eps", 0, 1),
        "logit_softcap": config.number(_CAP, 1e-3, SCALES[1]),
    }


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling, which of them rotate, and whose indexer each
    has."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {
        **standard_types(config),
        "no_rope_layers": [int(each) for each in rotated_layers(config, num_layers)],
        "indexer_types": indexer_kinds(config, num_layers),
    }


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with their indexers and the layers whose latents they read; without a rope no
    dimensions are shared by all keys."""
    kinds = indexer_kinds(config, len(layers))
    which = [kind == "full" for kind in kinds]
    layers = with_indexers(config, layers, which, of_stream=True, interleaved=True)
    sources = _sources(config, layers)
    return tuple(
        replace(
            layer,
            latent=layer.latent if layer.rope or not layer.latent else replace(layer.latent, rope_dim=0),
            kv_source=None if source == idx else source,
        )
        for idx, (layer, source) in enumerate(zip(layers, sources, strict=True))
    )


def _sources(config: Fields, layers: tuple[LayerShape, ...]) -> list[int]:
    """Return the layer whose latents each layer attends to.

    Raises:
        UnsupportedArch: one is not the last layer before it, of those with a rope or of those without, whose
            latents others read: it is what `transformers` takes.
    """
    num_layers = len(layers)
    stated = config.integers(_SOURCES, 0, MAX_LAYERS) if config.has(_SOURCES) else list(range(num_layers))
    wanted = f"{num_layers} numbers, of each layer its own or the last shared one before it of its kind"
    if len(stated) != num_layers:
        raise config.wrong(_SOURCES, list(stated), wanted)
    last: dict[bool, int] = {}
    for idx, source in enumerate(stated):
        rotates = layers[idx].rope is not None
        if source != idx and last.get(rotates) != source:
            raise config.wrong(_SOURCES, list(stated), wanted)
        if source == idx and idx in stated[idx + 1 :]:
            last[rotates] = idx
    return list(stated)


def _restated(arch: Arch) -> dict[str, Any]:
    """Return whose latents each layer of a model reads, where its config states it."""
    if not arch.config.get(_SOURCES):
        return {}
    own = enumerate(layer.kv_source for layer in arch.layers)
    return {_SOURCES: [idx if source is None else source for idx, source in own]}


_TEXT = Family(
    model_type="mistral_large4_text",
    architecture="MistralLarge4ForConditionalGeneration",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    rotated_layers=rotated_layers,
    latent=latent_of(True),
    facts=_facts,
    shapes=_shapes,
    implied=_implied,
    restated=_restated,
    mixture=replace(
        SIGMOID_MIXTURE,
        fields={ours: name for ours, name in SIGMOID_MIXTURE.fields.items() if ours != "renormalize"},
        facts={"renormalize": True},
        is_sparse=sparse_by_type_or_count,
        state_sparse=state_types,
    ),
    layer_prefix="layers.",
    layer_modules={
        "attn_norm": "attention_norm",
        "attn": "attention",
        "attn.q": "attention.wq",
        "attn.kv_down": "attention.wkv_a_with_mqa",
        "attn.kv_latent_norm": "attention.kv_a_norm",
        "attn.kv_up": "attention.wkv_b",
        "attn.o": "attention.wo",
        "attn.growth_scale": f"{_GROWTH}.s",
        "attn.growth_base": f"{_GROWTH}.b",
        "attn.indexer.q": f"{_INDEXER}.wq_b",
        "attn.indexer.q_norm": f"{_INDEXER}.q_input_norm",
        "attn.indexer.k": f"{_INDEXER}.wk",
        "attn.indexer.k_norm": f"{_INDEXER}.k_norm",
        "attn.indexer.weights": f"{_INDEXER}.weights_proj",
        "attn.indexer.growth_scale": f"{_INDEXER}.ssmax_scaling.s",
        "attn.indexer.growth_base": f"{_INDEXER}.ssmax_scaling.b",
        "ffn_norm": "ffn_norm",
        "ffn.gate": "feed_forward.w1",
        "ffn.up": "feed_forward.w3",
        "ffn.down": "feed_forward.w2",
        "moe.router": "gate",
        "moe.shared.gate": "shared_experts.w1",
        "moe.shared.up": "shared_experts.w3",
        "moe.shared.down": "shared_experts.w2",
    },
    expert_layouts=(
        apart("experts", ("w1", "w3", "w2")),
        in_one("experts.gate_up_proj", "experts.down_proj", suffixes=BARE),
    ),
    aliases={"n_routed_experts": "num_local_experts"},
    known_fields=(MIXTURE_FIELDS - {"norm_topk_prob"})
    | KIND_FIELDS
    | {
        "attention_bias",
        "index_topk",
        "index_n_heads",
        "index_head_dim",
        "layer_types",
        "mlp_layer_types",
        "no_rope_layers",
        "no_rope_layer_interval",
        _SOURCES,
        _CAP,
    },
    fixed_fields={"q_lora_rank": None, INDEX_PAIRS: True},
    defaults={
        "vocab_size": 204800,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "moe_intermediate_size": 6144,
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "no_rope_layer_interval": 4,
        _CAP: 30.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2048.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
        },
    },
)

FAMILIES.add(
    "mistral_large4",
    wrapper(
        "mistral_large4",
        "MistralLarge4ForConditionalGeneration",
        _TEXT,
        outer_modules={"embed": "tok_embeddings", "norm": "norm", "head": "output"},
        rope_exponents="lerope.alpha",
        untouched=(
            "vision_encoder",
            "patch_merger",
            "pre_mm_projector_norm",
            "vision_language_adapter.w_in",
            "vision_language_adapter.w_out",
            "lerope",
        ),
        ignored_tensors=r"^mtp_dspark\.",
        in_memory={
            "tok_embeddings": "model.language_model.embed_tokens",
            "layers.": "model.language_model.layers.",
            "norm.": "model.language_model.norm.",
            "output": "lm_head",
            "lerope.": "model.language_model.rotary_emb.",
            "vision_encoder.": "model.vision_tower.",
            "patch_merger.": "model.multi_modal_projector.patch_merger.",
            "pre_mm_projector_norm.": "model.multi_modal_projector.norm.",
            "vision_language_adapter.w_in.": "model.multi_modal_projector.linear_1.",
            "vision_language_adapter.w_out.": "model.multi_modal_projector.linear_2.",
        },
        in_memory_inside={
            "attention_norm": "input_layernorm",
            "attention.wq": "self_attn.q_proj",
            "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
            "attention.kv_a_norm": "self_attn.kv_a_layernorm",
            "attention.wkv_b": "self_attn.kv_b_proj",
            "attention.wo": "self_attn.o_proj",
            f"{_GROWTH}.s": "self_attn.softmax_scaling.scale",
            f"{_GROWTH}.b": "self_attn.softmax_scaling.bias",
            f"{_INDEXER}.ssmax_scaling.s": "self_attn.indexer.softmax_scaling.scale",
            f"{_INDEXER}.ssmax_scaling.b": "self_attn.indexer.softmax_scaling.bias",
            _INDEXER: "self_attn.indexer",
            "ffn_norm": "post_attention_layernorm",
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w2": "mlp.down_proj",
            "feed_forward.w3": "mlp.up_proj",
            "gate": "mlp.gate",
            "experts": "mlp.experts",
            "shared_experts.w1": "mlp.shared_experts.gate_proj",
            "shared_experts.w2": "mlp.shared_experts.down_proj",
            "shared_experts.w3": "mlp.shared_experts.up_proj",
        },
    ),
)

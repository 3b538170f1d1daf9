"""DeepSeek-V4 (2026): four residual streams that half-layers read as mixtures (`hyper_connection.py`),
attention to a window and to compressed entries of all positions before (`compressed.py`), with an indexer in
layers whose entries are of few positions (`chosen_keys.py`), and experts that a table chooses for a token in
the first layers. The layer that predicts a further token is not read."""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.compressed import Compressed
from compress.models.family import FAMILIES, Family
from compress.models.hyper_connection import MAX_ITERATIONS, MAX_STREAMS, HyperConnections
from compress.models.indexer import EntryIndexer
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, SLIDING, same_window
from compress.models.limits import CAPS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, THETAS
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart
from compress.models.wide_codes import EXPERT_DTYPE
from compress.untrusted.fields import Fields

_RATIOS = "compress_ratios"
_TYPES = "layer_types"
_FFN_TYPES = "mlp_layer_types"
_NUM_HASH = "num_hash_layers"
_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_CODES = {SLIDING: 0, _SPARSE: 4, _HEAVY: 128}
"""The types of layers, and the number by which older configs state each."""
_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_ROPES = {SLIDING: "main", FULL: "compress"}
_HASH = "hash_moe"
_ROUTED = "moe"
_HYPER = {"weight": "fn", "bias": "base", "gains": "scale"}


def _num_layers(config: Fields) -> int:
    return config.integer("num_hidden_layers", 1, MAX_LAYERS)


def _kinds(config: Fields) -> list[str]:
    """Return the type of each layer, by the names of `transformers`."""
    num_layers = _num_layers(config)
    stated = config.texts(_TYPES, default=())[:num_layers]
    own = stated and not set(stated) - _CODES.keys()
    if not config.has(_RATIOS):
        if stated and (not own or len(stated) < num_layers):
            raise config.wrong(_TYPES, stated, f"{num_layers} times one of {', '.join(_CODES)}")
        return stated or _default_kinds(num_layers)
    types = {code: kind for kind, code in _CODES.items()}
    ratios = config.integers(_RATIOS, 0, max(types))[:num_layers]
    if len(ratios) < num_layers or set(ratios) - types.keys():
        raise config.wrong(_RATIOS, ratios, f"{num_layers} times one of {', '.join(map(str, types))}")
    kinds = [types[each] for each in ratios]
    standard = {"full_attention", "sliding_attention"}
    if (own and stated != kinds) or (not own and set(stated) - standard):
        raise config.wrong(_TYPES, stated, f"the types that {_RATIOS} states, or absent")
    return kinds


def _default_kinds(num_layers: int) -> list[str]:
    """Return the types of layers where a config states none: two with long entries, and then both in
    turns."""
    return [_SPARSE if idx > 1 and idx % 2 else _HEAVY for idx in range(num_layers)]


def _hashed(config: Fields) -> list[bool]:
    """Return which layers have a table that chooses experts."""
    num_layers = _num_layers(config)
    first = config.integer(_NUM_HASH, 0, MAX_LAYERS, default=3)
    by_count = [idx < first for idx in range(num_layers)]
    if not config.has(_FFN_TYPES):
        return by_count
    types = config.texts(_FFN_TYPES)[:num_layers]
    if len(types) < num_layers or set(types) - {_HASH, _ROUTED}:
        raise config.wrong(_FFN_TYPES, types, f"{num_layers} times {_HASH} or {_ROUTED}")
    hashed = [each == _HASH for each in types]
    if config.has(_NUM_HASH) and hashed != by_count:
        raise config.wrong(_NUM_HASH, first, f"the number of layers of {_HASH} in {_FFN_TYPES}, all first")
    return hashed


def _rate(config: Fields, kind: str) -> int:
    """Return the positions of an entry in layers of a type."""
    rates = config.fields("compress_rates", default={})
    by_default = rates.integer(kind, 1, MAX_POSITIONS, default=_CODES[kind])
    rate = config.integer(_RATES[kind], 1, MAX_POSITIONS, default=by_default)
    if config.has(_RATIOS) and kind in _kinds(config) and rate != _CODES[kind]:
        raise rates.wrong(kind, rate, f"{_CODES[kind]}, as vLLM reads {_RATIOS}")
    return rate


def _rope_dim(config: Fields) -> int:
    """Return the dimensions of a head that rotate."""
    head_dim = config.integer("head_dim", 1, MAX_SIZE)
    factor = 64 / 512
    if config.has("qk_rope_head_dim"):
        factor = config.integer("qk_rope_head_dim", 1, MAX_SIZE) / head_dim
    if config.has("partial_rotary_factor"):
        factor = config.number("partial_rotary_factor", 0, 1)
    return int(head_dim * factor)


def _ropes(config: Fields) -> dict[str, Any]:
    """Return the ropes of layers without entries, and of those with them, in the standard spelling."""
    name = next((each for each in ("rope_parameters", "rope_scaling") if config.has(each)), None)
    whole = {} if name is None else config.mapping(name)
    stated = Fields(whole, f"the rope of {config.where}", UnsupportedArch)
    share = _rope_dim(config) / config.integer("head_dim", 1, MAX_SIZE)
    thetas = {
        SLIDING: config.number("rope_theta", *THETAS),
        FULL: config.number("compress_rope_theta", *THETAS),
    }
    if all(each in stated for each in _ROPES.values()):
        ropes = {kind: dict(stated.mapping(each)) for kind, each in _ROPES.items()}
        own = stated.fields(_ROPES[FULL])
        if own.text("rope_type", default="default") == "yarn" and not own.has("attention_factor"):
            raise own.wrong("attention_factor", "absent", "1.0, the factor of the published code")
        for kind, each in _ROPES.items():
            of_rope = stated.fields(each).number("partial_rotary_factor", 0, 1, default=1.0)
            if of_rope != share:
                raise stated.fields(each).wrong(
                    "partial_rotary_factor", of_rope, f"{share:g}, as in the config"
                )
            if (theta := stated.fields(each).number("rope_theta", *THETAS)) != thetas[kind]:
                raise stated.fields(each).wrong("rope_theta", theta, f"{thetas[kind]:g}, as in the config")
        return ropes
    scaled = {each: value for each, value in whole.items() if each not in _ROPES.values()}
    is_yarn = stated.text("rope_type", default=stated.text("type", default="default")) == "yarn"
    scaled = {**({"attention_factor": 1.0} if is_yarn else {}), **scaled}
    return {
        SLIDING: {"rope_type": "default", "rope_theta": thetas[SLIDING], "partial_rotary_factor": share},
        FULL: {**scaled, "rope_theta": thetas[FULL], "partial_rotary_factor": share},
    }


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types and ropes of layers in the standard spelling, and the one KV head, whatever a config
    states."""
    kinds = _kinds(config)
    return {
        _TYPES: [SLIDING if kind == SLIDING else FULL for kind in kinds],
        _RATIOS: [_CODES[kind] for kind in kinds],
        "compress_rates": {kind: _rate(config, kind) for kind in _RATES},
        _FFN_TYPES: [_HASH if each else _ROUTED for each in _hashed(config)],
        "rope_parameters": _ropes(config),
        "num_key_value_heads": 1,
    }


def _facts(config: Fields) -> dict[str, Any]:
    return {
        "attn_sinks": True,
        "hyper": HyperConnections(
            num_streams=config.integer("hc_mult", 2, MAX_STREAMS),
            eps=config.number("hc_eps", 0, 1),
            sinkhorn_iterations=config.integer("hc_sinkhorn_iters", 1, MAX_ITERATIONS),
        ),
    }


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    rope_dim = _rope_dim(config)
    plain = Compressed(
        q_rank=config.integer("q_lora_rank", 1, MAX_SIZE),
        rope_dim=rope_dim,
        out_groups=config.integer("o_groups", 1, MAX_SIZE),
        out_rank=config.integer("o_lora_rank", 1, MAX_SIZE),
    )
    rates = config.fields("compress_rates")
    of_kind = {0: plain}
    for kind in _RATES:
        of_kind[_CODES[kind]] = replace(plain, rate=rates.integer(kind, 1, MAX_POSITIONS))
    sparse = of_kind[_CODES[_SPARSE]]
    of_kind[_CODES[_SPARSE]] = replace(
        sparse,
        overlaps=True,
        indexer=EntryIndexer(
            num_heads=config.integer("index_n_heads", 1, MAX_SIZE),
            head_dim=config.integer("index_head_dim", 1, MAX_SIZE),
            top_entries=config.integer("index_topk", 1, MAX_POSITIONS),
            rate=sparse.rate,
        ),
    )
    cap = config.number("swiglu_limit", *CAPS)
    vocab_size = config.integer("vocab_size", 1, MAX_SIZE)
    found = []
    for layer, ratio, kind in zip(
        layers, config.integers(_RATIOS, 0, MAX_POSITIONS), config.texts(_FFN_TYPES), strict=True
    ):
        experts = layer.experts
        if kind == _HASH and experts is not None:
            experts = replace(experts, table_size=vocab_size, selection_bias=False)
        rope = None if layer.rope is None else replace(layer.rope, rotary_dim=rope_dim, leading=False)
        layer = replace(layer, compressed=of_kind[ratio], experts=experts, rope=rope)
        found.append(replace(layer, ffn_cap=cap, expert_cap=cap))
    return tuple(found)


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the types of layers, in each spelling that the config has, or that is not the default."""
    names = {(0, False): SLIDING, (1, True): _SPARSE, (1, False): _HEAVY}
    facts = [layer.compressed for layer in arch.layers]
    kinds = [names[min(each.rate, 1), each.overlaps] for each in facts if each is not None]
    hashed = [layer.experts is not None and layer.experts.table_size > 0 for layer in arch.layers]
    stated = arch.config
    fields: dict[str, Any] = {}
    if stated.get(_RATIOS):
        fields[_RATIOS] = [_CODES[kind] for kind in kinds]
    if stated.get(_TYPES) or not (fields or kinds == _default_kinds(arch.num_layers)):
        fields[_TYPES] = kinds
    if stated.get(_NUM_HASH) is not None:
        fields[_NUM_HASH] = sum(hashed)
    by_count = [idx < fields.get(_NUM_HASH, 3) for idx in range(arch.num_layers)]
    if stated.get(_FFN_TYPES) or hashed != by_count:
        fields[_FFN_TYPES] = [_HASH if each else _ROUTED for each in hashed]
    return fields


def _names(arch: Arch) -> dict[str, str]:
    """Return the names of the linears of groups of heads, which are one tensor."""
    first = arch.layers[0].compressed
    return {} if first is None else dict.fromkeys(first.out_linears, "attn.wo_a")


_ATTENTION = {
    "attn.q_down": ("attn.wq_a", "self_attn.q_a_proj"),
    "attn.q_latent_norm": ("attn.q_norm", "self_attn.q_a_norm"),
    "attn.q_up": ("attn.wq_b", "self_attn.q_b_proj"),
    "attn.kv": ("attn.wkv", "self_attn.kv_proj"),
    "attn.kv_norm": ("attn.kv_norm", "self_attn.kv_norm"),
    "attn.o": ("attn.wo_b", "self_attn.o_b_proj"),
    "attn.sinks": ("attn.attn_sink", "self_attn.sinks"),
    "attn.compressor.kv": ("attn.compressor.wkv", "self_attn.compressor.kv_proj"),
    "attn.compressor.gate": ("attn.compressor.wgate", "self_attn.compressor.gate_proj"),
    "attn.compressor.positions": ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    "attn.compressor.norm": ("attn.compressor.norm", "self_attn.compressor.kv_norm"),
    "attn.indexer.q": ("attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    "attn.indexer.kv": ("attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"),
    "attn.indexer.gate": ("attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj"),
    "attn.indexer.positions": ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    "attn.indexer.norm": ("attn.indexer.compressor.norm", "self_attn.compressor.indexer.kv_norm"),
    "attn.indexer.weights": (
        "attn.indexer.weights_proj",
        "self_attn.compressor.indexer.scorer.weights_proj",
    ),
    "attn": ("attn", "self_attn"),
}
"""Modules of attention -> what checkpoints call them, and `transformers` in memory."""
_OTHERS = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm"),
    "moe.selection_bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "moe.experts_of_tokens": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    "moe.router": ("ffn.gate", "mlp.gate"),
    "moe.shared.gate": ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    "moe.shared.up": ("ffn.shared_experts.w3", "mlp.shared_experts.up_proj"),
    "moe.shared.down": ("ffn.shared_experts.w2", "mlp.shared_experts.down_proj"),
    **{
        f"{half}_hyper.{ours}": (f"hc_{half}_{theirs}", f"{half}_hc.{theirs}")
        for half in ("attn", "ffn")
        for ours, theirs in _HYPER.items()
    },
}


def _own_width(config: Fields) -> dict[str, Any]:
    """Return the width of the shared expert, that of the others."""
    return {"shared_size": config.integer("moe_intermediate_size", 1, MAX_SIZE)}


FAMILIES.add(
    "deepseek_v4",
    Family(
        model_type="deepseek_v4",
        architecture="DeepseekV4ForCausalLM",
        windows=same_window,
        facts=_facts,
        implied=_implied,
        shapes=_shapes,
        restated=_restated,
        names_by_facts=_names,
        mixture=Mixture(
            {
                "num_experts": "n_routed_experts",
                "top_k": "num_experts_per_tok",
                "expert_size": "moe_intermediate_size",
                "scale": "routed_scaling_factor",
            },
            facts={"score": "sqrt_softplus", "renormalize": True, "selection_bias": True, "caps_first": True},
            read_more=_own_width,
        ),
        outer_modules={
            "embed": "embed",
            "norm": "norm",
            "head": "head",
            **{f"norm.hyper.{ours}": f"hc_head_{theirs}" for ours, theirs in _HYPER.items()},
        },
        layer_prefix="layers.",
        layer_modules={name: disk for name, (disk, _) in {**_ATTENTION, **_OTHERS}.items()},
        expert_layouts=(apart("ffn.experts", ("w1", "w3", "w2")), AS_IN_MEMORY),
        ignored_tensors=r"^mtp\.",
        in_memory={
            "embed.": "model.embed_tokens.",
            "norm.": "model.norm.",
            "head.": "lm_head.",
            "hc_head_": "model.hc_head.hc_",
            "layers.": "model.layers.",
        },
        in_memory_inside={
            "attn.wo_a": "self_attn.o_a_proj",
            **{disk: theirs for disk, theirs in {**_ATTENTION, **_OTHERS}.values() if disk != theirs},
        },
        other_modules={"attn.norm": "attn.kv_norm"},
        aliases={"n_routed_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        known_fields=frozenset(
            {
                _RATIOS,
                _TYPES,
                _FFN_TYPES,
                _NUM_HASH,
                *_RATES.values(),
                "compress_rates",
                "compress_rope_theta",
                *("hc_eps", "hc_mult", "hc_sinkhorn_iters"),
                *("index_head_dim", "index_n_heads", "index_topk"),
                *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
                "num_nextn_predict_layers",
                *("o_groups", "o_lora_rank"),
                EXPERT_DTYPE,
                "partial_rotary_factor",
                "q_lora_rank",
                "qk_rope_head_dim",
                "routed_scaling_factor",
                "sliding_window",
                "swiglu_limit",
            }
        ),
        fixed_fields={
            "attention_bias": False,
            "hidden_act": "silu",
            "mlp_bias": False,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
        },
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "max_position_embeddings": 1048576,
            "vocab_size": 129280,
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "q_lora_rank": 1024,
            "num_experts_per_tok": 6,
            "n_routed_experts": 256,
            "routed_scaling_factor": 1.5,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
        },
    ),
)

"""DBRX (Databricks, 2024): experts in every layer, LayerNorm without a bias, and no biases. Outputs of the
linears of queries, keys and values, one tensor on disk, may be clipped. The experts of a layer are three
tensors of two dimensions there, of which that of the downs is transposed. Routers that divide weights by
another norm of them than their sum are refused."""

from collections.abc import Collection, Mapping
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.config_facts import IDLE_FIELDS, is_same, only_own_code
from compress.models.config_values import SAME_ACTIVATIONS
from compress.models.experts import MAX_EXPERT_SIZE, MAX_EXPERTS
from compress.models.family import FAMILIES, Family
from compress.models.limits import CAPS, MAX_SIZE, THETAS
from compress.models.mixture import BARE, EXPERT, ExpertLayout, Mixture, apart
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_ATTENTION = "attn_config"
_FFN = "ffn_config"
_CODE = ("DbrxConfig", "DbrxModel", "DbrxForCausalLM")
_THETA = 10000.0
"""The base of a rope where nothing states one."""
_OF_ATTENTION = ("clip_qkv", "kv_n_heads", "rope_theta", "attn_pdrop")
_SIZES = {
    "num_experts": ("moe_num_experts", 4, MAX_EXPERTS),
    "top_k": ("moe_top_k", 1, MAX_EXPERTS),
    "expert_size": ("ffn_hidden_size", 3584, MAX_EXPERT_SIZE),
}
"""Facts of experts -> their fields, and the defaults and largest values of these."""
_EXPERTS = {"gate": "w1", "up": "v1", "down": "w2"}
_ORDER = "moe_normalize_expert_weights"
_OF_FFN = (*(name for name, _, _ in _SIZES.values()), _ORDER, "ffn_act_fn")
_OF_TRAINING = ("moe_jitter_eps", "moe_loss_weight", "hidden_size")
"""Fields of experts that only training reads, and the hidden size, which is that of the model in any case."""
_IDLE = IDLE_FIELDS | {"chunk_size_feed_forward", "is_encoder_decoder"}


def _part(config: Fields, part: str, known: Collection[str]) -> Fields:
    """Return the fields of attention or of experts.

    Raises:
        UnsupportedArch: one is unknown.
    """
    stated = config.fields(part, default={})
    for name, value in sorted(config.mapping(part, default={}).items()):
        if value is not None and name not in {*known} | _IDLE and not is_same(value, False):
            raise stated.wrong(name, value, "absent")
    return stated


def _attention(config: Fields) -> Fields:
    return _part(config, _ATTENTION, _OF_ATTENTION)


def _ffn(config: Fields) -> Fields:
    return _part(config, _FFN, (*_OF_FFN, *_OF_TRAINING))


def _facts(config: Fields) -> dict[str, Any]:
    """Return the norms, the activation and the bounds of queries, keys and values."""
    attention = _attention(config)
    activation = _ffn(config).fields("ffn_act_fn", default={"name": "silu"})
    if set(activation) - {"name"}:
        raise _ffn(config).wrong("ffn_act_fn", dict.fromkeys(activation), "a mapping with a name alone")
    name = activation.text("name", default="silu")
    clips = {"qkv_clip": attention.number("clip_qkv", *CAPS)} if attention.has("clip_qkv") else {}
    return {"norm": "layer", "norm_eps": 1e-5, "activation": SAME_ACTIVATIONS.get(name, name), **clips}


def _experts(config: Fields) -> dict[str, Any]:
    """Return the number and widths of experts, and whether their weights are divided by their sum.

    Raises:
        UnsupportedArch: weights are divided by another norm of them.
    """
    ffn = _ffn(config)
    sizes = {
        fact: ffn.integer(name, 1, most, default=default) for fact, (name, default, most) in _SIZES.items()
    }
    states_none = _ORDER in ffn and not ffn.has(_ORDER)
    order = 1.0 if states_none else ffn.number(_ORDER, 0, 1e3, default=1.0)
    if order != 1.0:
        raise ffn.wrong(_ORDER, order, "1, by which weights are divided by their sum, or null")
    return {**sizes, "renormalize": not states_none}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the heads of keys and values, whatever is stated next to them, and the rope, whose base is that
    of the mapping; refuse code of a checkpoint's own but that which `transformers` took over.

    Raises:
        UnsupportedArch: the rope next to the mapping has another base, which is not the default.
    """
    only_own_code(config, _CODE)
    attention = _attention(config)
    rope = config.mapping("rope_scaling", default={}) or config.mapping("rope_parameters", default={})
    beside = Fields(rope, f"the rope of {config.where}", UnsupportedArch).number(
        "rope_theta", *THETAS, default=config.number("rope_theta", *THETAS)
    )
    theta = attention.number("rope_theta", *THETAS, default=beside)
    if beside not in (theta, _THETA):
        raise attention.wrong("rope_theta", theta, f"{beside:g}, which {config.where} states next to it")
    return {
        "num_key_value_heads": attention.integer("kv_n_heads", 1, MAX_SIZE, default=1),
        "rope_parameters": _rope(rope, theta),
    }


def _rope(stated: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return a rope as it is stated, by `rope_type` or by the older `type`, with another base."""
    return {"rope_type": stated.get("type", "default"), **stated, "rope_theta": theta}


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the mappings with the facts of a model, and its rope where `transformers` reads it: in each
    mapping of a rope that its config has."""
    first = arch.layers[0]
    assert first.experts is not None
    assert first.rope is not None
    of_experts = {name: getattr(first.experts, fact) for fact, (name, _, _) in _SIZES.items()}
    theta = first.rope.theta
    attention = {**(arch.config.get(_ATTENTION) or {}), "kv_n_heads": first.num_kv_heads, "rope_theta": theta}
    ropes = [name for name in ("rope_scaling", "rope_parameters") if arch.config.get(name)]
    rope = _rope(arch.config[ropes[0]] if ropes else {}, theta)
    return {
        _ATTENTION: attention,
        _FFN: {**(arch.config.get(_FFN) or {}), **of_experts},
        **dict.fromkeys(ropes or ["rope_parameters"], rope),
    }


def _otherwise(arch: Arch) -> str | None:
    """Return what the class in `transformers` computes otherwise, None where it does not."""
    rope = arch.layers[0].rope
    assert rope is not None
    stated: Mapping[str, Any] = arch.config.get("rope_scaling") or arch.config.get("rope_parameters") or {}
    theirs = stated.get("rope_theta", arch.config.get("rope_theta", _THETA))
    if is_same(theirs, rope.theta):
        return None
    return (
        f"Heads rotate by attn_config.rope_theta = {rope.theta:g}, as in the model's own code; the class of "
        f"transformers takes {theirs:g} for it, and an export states the first where it reads that."
    )


FAMILIES.add(
    "dbrx",
    Family(
        model_type="dbrx",
        architecture="DbrxForCausalLM",
        computed_otherwise=_otherwise,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        facts=_facts,
        implied=_implied,
        restated=_restated,
        mixture=Mixture({}, read_more=_experts),
        spelled={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        outer_modules={"embed": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"},
        layer_prefix="transformer.blocks.",
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if not name.startswith("ffn.")},
            "attn_norm": "norm_attn_norm.norm_1",
            "attn": "norm_attn_norm.attn",
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "norm_attn_norm.attn.Wqkv"),
            "attn.o": "norm_attn_norm.attn.out_proj",
            "ffn_norm": "norm_attn_norm.norm_2",
            "moe.router": "ffn.router.layer",
        },
        expert_layouts=(
            ExpertLayout(
                {f"{EXPERT}{part}": f"ffn.experts.mlp.{name}" for part, name in _EXPERTS.items()},
                suffixes=BARE,
                flat=True,
            ),
            apart("ffn.experts.mlp", tuple(_EXPERTS.values()), methods=("compressed-tensors",)),
        ),
        known_fields=frozenset({_ATTENTION, _FFN, "auto_map", "emb_pdrop", "resid_pdrop"}),
        fixed_fields={"tie_word_embeddings": False},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_theta": _THETA,
            "max_position_embeddings": 2048,
        },
    ),
)

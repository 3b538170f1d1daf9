"""Falcon and Falcon 2 (TII, arXiv 2311.16867): attention and FFN side by side after one LayerNorm, after one
each, or one after the other. Models have one head of keys and values, a few, or as many as there are query
heads, and FFNs without gates. Positions are rotated, or scores fall with the distance of keys (ALiBi,
Falcon-RW). On disk the rows of queries, keys and values take turns by head of keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.alibi import Alibi
from compress.models.arch import Arch
from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_TASKS = ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
_CODE = ("FalconConfig", "FalconModel", *(f"FalconFor{task}" for task in _TASKS))

_NEW = "new_decoder_architecture"
_PARALLEL = "parallel_attn"
_ONE_HEAD = "multi_query"
_ALIBI = "alibi"


def _is_true(config: Fields, name: str) -> bool:
    """Return whether a flag is true. `null`, which the class allows, is false."""
    return config.flag(name, default=False)


def _facts(config: Fields) -> dict[str, Any]:
    """Return the norms and the block.

    Raises:
        UnsupportedArch: `transformers` has not the norms that its forward pass reads.
    """
    is_new = _is_true(config, _NEW)
    is_parallel = _is_true(config, _PARALLEL)
    facts: dict[str, Any] = {"norm": "layer", "norm_bias": True}
    if not is_new and not is_parallel:
        return {**facts, "block": "pre"}
    if not is_parallel:
        raise config.wrong(_PARALLEL, False, f"true with {_NEW}")
    num_norms = config.integer("num_ln_in_parallel_attn", 1, 2, default=2 if is_new else 1)
    if num_norms == 2 and not is_new:
        raise config.wrong("num_ln_in_parallel_attn", 2, f"1 without {_NEW}")
    return {**facts, "block": "parallel", "own_ffn_norm": num_norms == 2}


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    return [not _is_true(config, _ALIBI)] * num_layers


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers, with slopes of their heads where the config asks for them."""
    alibi = Alibi(as_powers=True, as_scores=True) if _is_true(config, _ALIBI) else None
    return tuple(replace(layer, alibi=alibi) for layer in layers)


def _implied(config: Fields) -> dict[str, Any]:
    """Return the heads of keys and values and the width of the FFN; refuse code of a checkpoint's own but
    that which `transformers` took over.

    Raises:
        UnsupportedArch: other heads of keys are stated than all of those of queries have.
    """
    only_own_code(config, _CODE)
    num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    stated = config.integer("num_kv_heads", 1, MAX_SIZE, default=num_heads)
    if not _is_true(config, _NEW):
        is_one = _is_true(config, _ONE_HEAD)
        if not is_one and stated != num_heads:
            raise config.wrong("num_kv_heads", stated, f"{num_heads} without {_ONE_HEAD}")
        stated = 1 if is_one else num_heads
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    return {
        "num_key_value_heads": stated,
        "ffn_hidden_size": config.integer("ffn_hidden_size", 1, MAX_SIZE, default=4 * hidden_size),
    }


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the heads of keys and values.

    Raises:
        UnsupportedArch: the config has no field for so many.
    """
    first = arch.layers[0]
    if arch.config.get(_NEW):
        return {"num_kv_heads": first.num_kv_heads}
    is_one = arch.config.get(_ONE_HEAD, True)
    if first.num_kv_heads != (1 if is_one else first.num_heads):
        raise UnsupportedArch(
            f"this Falcon has {first.num_kv_heads} heads of keys for {first.num_heads} of queries, and its "
            f"config has a field for {'one' if is_one else 'as many'} alone."
        )
    return {} if is_one else {"num_kv_heads": first.num_kv_heads}


def _otherwise(arch: Arch) -> str | None:
    """Return what the class in `transformers` computes otherwise, None where it does not."""
    if arch.layers[0].alibi is None:
        return None
    return "Terms of ALiBi are float32; the class of transformers rounds them to bfloat16."


def _names(arch: Arch) -> Mapping[str, str]:
    return {"attn_norm": "ln_attn", "ffn_norm": "ln_mlp"} if arch.own_ffn_norm else {}


FAMILIES.add(
    "falcon",
    Family(
        model_type="falcon",
        architecture="FalconForCausalLM",
        qkv_bias="bias",
        o_bias="bias",
        ffn_bias="bias",
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        derives_head_dim=True,
        rotated_layers=_rotated_layers,
        facts=_facts,
        shapes=_shapes,
        implied=_implied,
        restated=_restated,
        names_by_facts=_names,
        computed_otherwise=_otherwise,
        spelled={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation"},
        dense_size="ffn_hidden_size",
        rows_in_turns=frozenset({"self_attention.query_key_value"}),
        outer_modules={"embed": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"},
        layer_prefix="transformer.h.",
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
            "attn": "self_attention",
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attention.query_key_value"),
            "attn.o": "self_attention.dense",
            "ffn.up": "mlp.dense_h_to_4h",
            "ffn.down": "mlp.dense_4h_to_h",
        },
        known_fields=frozenset(
            {
                _ALIBI,
                "auto_map",
                "bias",
                "ffn_hidden_size",
                "layer_norm_epsilon",
                _ONE_HEAD,
                _NEW,
                "num_kv_heads",
                "num_ln_in_parallel_attn",
                _PARALLEL,
            }
        ),
        defaults={
            "activation": "gelu",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            _ONE_HEAD: True,
            _NEW: False,
            _PARALLEL: True,
        },
    ),
)

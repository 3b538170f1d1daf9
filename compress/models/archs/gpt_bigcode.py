"""StarCoder of 2023 and SantaCoder (BigCode, arXiv 2305.06161, 2301.03988): GPT-2 with one head of keys and
values for all heads of queries, or with one for each, whose rows take turns by head on disk."""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.archs.gpt2 import DROPOUT, GPT2, GPT2_SIZES, OTHER_HEADS, ffn_size, gpt2_facts
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import no_layer
from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields

_ONE_HEAD = "multi_query"


def _implied(config: Fields) -> dict[str, Any]:
    """Return the heads of keys and values, whatever is stated, and the width of the FFN."""
    num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    return {"num_key_value_heads": 1 if config.flag(_ONE_HEAD) else num_heads, "n_inner": ffn_size(config)}


def _restated(arch: Arch) -> dict[str, Any]:
    """Return whether there is one head of keys and values.

    Raises:
        UnsupportedArch: there are several for more heads of queries.
    """
    first = arch.layers[0]
    if first.num_kv_heads not in (1, first.num_heads):
        raise UnsupportedArch(
            f"this {arch.family} model has {first.num_kv_heads} heads of keys for {first.num_heads} of "
            "queries, and a config of this family states one or as many as queries: keep all heads of keys."
        )
    return {_ONE_HEAD: first.num_kv_heads == 1}


FAMILIES.add(
    "gpt_bigcode",
    Family(
        model_type="gpt_bigcode",
        architecture="GPTBigCodeForCausalLM",
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        rotated_layers=no_layer,
        facts=gpt2_facts,
        implied=_implied,
        restated=_restated,
        spelled={**GPT2_SIZES, "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"},
        dense_size="n_inner",
        rows_in_turns=frozenset({"attn.c_attn"}),
        outer_modules=GPT2.outer_modules,
        layer_prefix=GPT2.layer_prefix,
        layer_modules=GPT2.layer_modules,
        other_prefixes=GPT2.other_prefixes,
        ignored_tensors=r"\.attn\.(masked_)?bias$|^transformer\.bias$",  # of masks
        known_fields=frozenset(
            {
                "n_inner",
                "layer_norm_epsilon",
                "scale_attn_weights",
                _ONE_HEAD,
                "attention_softmax_in_fp32",  # the dtype in which scores are rounded
                "scale_attention_softmax_in_fp32",
                *OTHER_HEADS,
                *DROPOUT,
            }
        ),
        fixed_fields={"add_cross_attention": False},
        defaults={
            **GPT2.defaults,
            "activation_function": "gelu_pytorch_tanh",
            _ONE_HEAD: True,
        },
    ),
)

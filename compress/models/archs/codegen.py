"""CodeGen (Salesforce, arXiv 2203.13474, 2305.02309): GPT-J with queries, values and keys in one tensor. Its
rows are those of the first quarter of the heads of queries, of values and of keys, then those of the next
quarters. The number of heads is a multiple of four."""

from dataclasses import replace
from typing import Any

from compress.models.archs.gpt2 import DROPOUT, OTHER_HEADS
from compress.models.archs.gptj import GPTJ, gptj_facts
from compress.models.family import FAMILIES
from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields

_NUM_TURNS = 4


def _facts(config: Fields) -> dict[str, Any]:
    """Return the facts of GPT-J.

    Raises:
        UnsupportedArch: the heads have no quarters.
    """
    num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    if num_heads % _NUM_TURNS:
        raise config.wrong("num_attention_heads", num_heads, f"a multiple of {_NUM_TURNS} in this family")
    return gptj_facts(config)


_STACKED = dict.fromkeys(("attn.q", "attn.v", "attn.k"), "attn.qkv_proj")

CODEGEN = replace(
    GPTJ,
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    facts=_facts,
    layer_modules={
        **_STACKED,
        **{name: disk for name, disk in GPTJ.layer_modules.items() if name not in _STACKED},
    },
    rows_in_turns=frozenset(_STACKED.values()),
    num_turns=_NUM_TURNS,
    ignored_tensors=r"\.attn\.(causal_mask|(masked_)?bias)$",  # of masks
    known_fields=frozenset(
        {
            "n_ctx",  # its class reads it and computes the same
            "n_inner",
            "layer_norm_epsilon",
            "partial_rotary_factor",
            "rotary_dim",
            *OTHER_HEADS,
            *DROPOUT,
        }
    ),
    fixed_fields={},
)

FAMILIES.add("codegen", CODEGEN)

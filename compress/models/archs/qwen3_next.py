"""Qwen3-Next: three of four layers have gated delta nets (arXiv 2412.06464), the others attention with an
output gate, and all a mixture of many small experts with a shared one. On disk the rows of queries and output
gates, and those of the linears of a delta net, take turns by head. The layer that predicts a further token
is untouched but where it drafts (`mtp.py`)."""

from typing import Any

from compress.models.archs.qwen2_moe import MIXTURE_FIELDS, QWEN2_MIXTURE, SHARED_EXPERT_MODULES
from compress.models.delta_net_config import (
    DELTA_DEFAULTS,
    DELTA_FIELDS,
    DELTA_FIXED,
    DELTA_MODULES,
    GATE_AFTER_QUERY,
    delta_net_of,
    linear_but_every_nth,
)
from compress.models.family import FAMILIES, Family
from compress.models.mixture import AS_IN_MEMORY, apart
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import IN_MTP
from compress.untrusted.fields import Fields

_IN_TURNS = {
    **dict.fromkeys(("delta.q", "delta.k", "delta.v", "delta.gate"), "linear_attn.in_proj_qkvz"),
    **dict.fromkeys(("delta.beta", "delta.decay"), "linear_attn.in_proj_ba"),
}


def _zero_centered_norms(config: Fields) -> dict[str, Any]:
    """Return the facts of families whose checkpoints store the weights of norms less 1."""
    return {"norm_offset": 1.0}


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    qk_norm=True,
    output_gate=True,
    facts=_zero_centered_norms,
    implied=linear_but_every_nth,
    recurrence=delta_net_of,
    rows_in_turns=frozenset({*GATE_AFTER_QUERY.values(), *_IN_TURNS.values()}),
    mixture=QWEN2_MIXTURE,
    mtp=IN_MTP,
    layer_modules={
        **LAYER_MODULES,
        **GATE_AFTER_QUERY,
        **DELTA_MODULES,
        **_IN_TURNS,
        **SHARED_EXPERT_MODULES,
    },
    expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
    known_fields=DELTA_FIELDS | MIXTURE_FIELDS | {"partial_rotary_factor"},
    fixed_fields={"attention_bias": False, **DELTA_FIXED},
    defaults={
        **DELTA_DEFAULTS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5632,
        "max_position_embeddings": 32768,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    untouched=("mtp",),
)
FAMILIES.add("qwen3_next", QWEN3_NEXT)

"""A.X K1 (SK Telecom, arXiv 2601.09200): DeepSeek-V3 with a norm of the output of the experts. The published
checkpoint stores such a norm for dense layers, too, where nothing reads it, and no bias of selection. Which
layers are dense is stated in two ways (`mixture.py`). The layer that predicts a further token comes
after the last (`mtp.py`)."""

from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.archs.deepseek_v3 import DEEPSEEK_V3
from compress.models.archs.glm4_moe import SIGMOID_MIXTURE
from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES
from compress.models.mixture import (
    AS_IN_MEMORY,
    BARE,
    FIRST_DENSE,
    apart,
    check_dense_layers,
    in_one,
    sparse_by_both,
    state_first,
    state_types,
)
from compress.untrusted.fields import Fields

_METHOD = "topk_method"


def _facts(config: Fields) -> dict[str, Any]:
    """Return no facts. Refuse a config without a latent of queries, or one that contradicts itself on which
    layers are dense."""
    if not config.has("q_lora_rank"):
        raise config.wrong("q_lora_rank", None, "the width of the latents of queries, which this family has")
    check_dense_layers(config)
    return {}


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the fields that vLLM reads, where a config states them: the number of dense layers, and the
    method of selection, which is the one with a bias, because exports have one."""
    is_sparse = [layer.experts is not None for layer in arch.layers]
    counted = {} if arch.config.get(FIRST_DENSE) is None else state_first(is_sparse)
    return counted | ({_METHOD: "noaux_tc"} if _METHOD in arch.config else {})


AXK1 = replace(
    DEEPSEEK_V3,
    model_type="axk1",
    architecture="AXK1ForCausalLM",
    facts=_facts,
    implied=implies_own_code("AXK1Config", "AXK1Model", "AXK1ForCausalLM"),
    mixture=replace(
        SIGMOID_MIXTURE,
        facts={**SIGMOID_MIXTURE.facts, "post_norm": True},
        is_sparse=sparse_by_both,
        state_sparse=state_types,
    ),
    layer_modules={**DEEPSEEK_V3.layer_modules, "ffn_post_norm": "post_mlp_layernorm"},
    expert_layouts=(
        apart("mlp.experts"),
        in_one(
            AS_IN_MEMORY.modules["moe.experts.*.gate"],
            AS_IN_MEMORY.modules["moe.experts.*.down"],
            suffixes=BARE,
            modules={"ffn_post_norm": "mlp.post_mlp_layernorm"},
        ),
    ),
    restated=_restated,
    zero_if_absent=frozenset({"moe.selection_bias"}),
    aliases={"n_routed_experts": "num_local_experts"},
    known_fields=DEEPSEEK_V3.known_fields | {"mlp_layer_types"},
    fixed_fields={"moe_layer_freq": 1, "scoring_func": "sigmoid"},
    defaults={
        **{name: value for name, value in DEEPSEEK_V3.defaults.items() if name != "first_k_dense_replace"},
        "num_key_value_heads": 64,
        "max_position_embeddings": 32768,
        "n_routed_experts": 192,
    },
)

FAMILIES.add("axk1", AXK1)

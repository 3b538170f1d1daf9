"""ERNIE 4.5 mixtures of experts (Baidu): the dense ERNIE 4.5 with experts in a range of its layers, chosen by
the softmax of the router and a bias that their weights do not have. The layer that predicts a further token
has a dense FFN and ends in the norm of the model (`mtp.py`), as FastDeploy, which is Baidu's, computes it;
vLLM leaves that norm out."""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.limits import MAX_LAYERS
from compress.models.mixture import AS_IN_MEMORY, BARE, Mixture, apart, in_one, shared_of
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import MtpNames, last_attention_layer, with_dense_ffn
from compress.untrusted.fields import Fields

_BIAS = "moe_statics.e_score_correction_bias"


def _is_sparse(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts: every `moe_layer_interval`-th of a range, -1 for the last layer."""
    first = config.integer("moe_layer_start_index", 0, MAX_LAYERS)
    last = config.integer("moe_layer_end_index", -1, MAX_LAYERS)
    step = config.integer("moe_layer_interval", 1, MAX_LAYERS)
    last = num_layers - 1 if last == -1 else last
    return [first <= idx <= last and (idx + 1) % step == 0 for idx in range(num_layers)]


def _state_sparse(is_sparse: list[bool]) -> dict[str, Any]:
    """Return the range of layers with experts."""
    if True not in is_sparse:
        return {"moe_layer_start_index": len(is_sparse)}
    first = is_sparse.index(True)
    last = len(is_sparse) - 1 - is_sparse[::-1].index(True)
    if not all(is_sparse[first : last + 1]):
        raise UnsupportedArch(
            "dense layers are among layers with experts; the config of this family has a range of these."
        )
    return {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": 1}


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of the layer that predicts a further token."""
    return with_dense_ffn(target, last_attention_layer(target))


_MTP = MtpNames(
    {
        "embed_norm": "model.mtp_emb_norm.0",
        "hidden_norm": "model.mtp_hidden_norm.0",
        "fc": "model.mtp_linear_proj.0",
    },
    "model.mtp_block.",
    shape=_shape_of_mtp,
    parts=("model.mtp_block", "model.mtp_emb_norm", "model.mtp_hidden_norm", "model.mtp_linear_proj"),
    in_vllm=("model.mtp_block.0", "model.layers.{index}"),
)

ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    interleaved_rotary=True,
    mixture=Mixture(
        {"num_experts": "moe_num_experts", "top_k": "moe_k", "expert_size": "moe_intermediate_size"},
        facts={"selection_bias": True, "renormalize": True},
        is_sparse=_is_sparse,
        state_sparse=_state_sparse,
        read_more=shared_of("moe_num_shared_experts"),
    ),
    mtp=_MTP,
    layer_modules={
        **LAYER_MODULES,
        "moe.router": "mlp.gate",
        "moe.selection_bias": f"mlp.{_BIAS}",
        "moe.shared.gate": "mlp.shared_experts.gate_proj",
        "moe.shared.up": "mlp.shared_experts.up_proj",
        "moe.shared.down": "mlp.shared_experts.down_proj",
    },
    in_one_row=frozenset({"moe.selection_bias"}),
    expert_layouts=(
        apart("mlp.experts"),
        in_one(
            AS_IN_MEMORY.modules["moe.experts.*.gate"],
            AS_IN_MEMORY.modules["moe.experts.*.down"],
            suffixes=BARE,
            modules={"moe.selection_bias": f"mlp.gate.{_BIAS}"},
        ),
    ),
    known_fields=frozenset(
        {
            "moe_num_experts",
            "moe_k",
            "moe_intermediate_size",
            "moe_num_shared_experts",
            "moe_layer_start_index",
            "moe_layer_end_index",
            "moe_layer_interval",
        }
    ),
    fixed_fields={
        "moe_norm_min": 1e-12,  # far below any sum of weights that float32 tells from zero
        "use_bias": False,  # the head would have one, too
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    ignored_tensors=r"rotary_emb\.inv_freq$|^model\.mtp_",
)

FAMILIES.add("ernie4_5_moe", ERNIE4_5_MOE)

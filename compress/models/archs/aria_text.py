"""The text model of Aria (Rhymes AI, arXiv 2410.05993): Llama with routed and shared experts in every layer.
The best logits choose the routed ones, and the softmax of these logits weighs them. Checkpoints store the
experts of a layer in one tensor for each product, transposed."""

from typing import Any

from compress.models.experts import MAX_EXPERT_SIZE
from compress.models.family import FAMILIES, Family
from compress.models.mixture import AS_IN_MEMORY, BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _shared(config: Fields) -> dict[str, Any]:
    """Return the width of the shared experts, which are one FFN."""
    each = config.integer("intermediate_size", 1, MAX_EXPERT_SIZE)
    return {"shared_size": each * config.integer("moe_num_shared_experts", 1, 64)}


ARIA_TEXT = Family(
    model_type="aria_text",
    architecture="AriaTextForCausalLM",
    heads_divide_hidden=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mixture=Mixture(
        {"num_experts": "moe_num_experts", "top_k": "moe_topk", "expert_size": "intermediate_size"},
        facts={"score": "softmax_topk"},
        read_more=_shared,
    ),
    layer_modules={
        **LAYER_MODULES,
        "moe.router": "mlp.router",
        "moe.shared.gate": "mlp.shared_experts.gate_proj",
        "moe.shared.up": "mlp.shared_experts.up_proj",
        "moe.shared.down": "mlp.shared_experts.down_proj",
    },
    expert_layouts=(
        in_one("mlp.experts.fc1", "mlp.experts.fc2", transposed=True),
        in_one(
            AS_IN_MEMORY.modules["moe.experts.*.gate"],
            AS_IN_MEMORY.modules["moe.experts.*.down"],
            suffixes=BARE,
            transposed=True,
        ),
        apart("mlp.experts", methods=("compressed-tensors",)),
    ),
    known_fields=frozenset({"attention_bias", "moe_num_experts", "moe_topk", "moe_num_shared_experts"}),
    fixed_fields={
        "hidden_act": "silu",  # the routed experts have no other, whatever is stated
        "mlp_bias": False,  # the shared expert alone would have biases
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
    },
)

FAMILIES.add("aria_text", ARIA_TEXT)

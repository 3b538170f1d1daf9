"""Mistral 7B and its successors (arXiv 2310.06825): Llama without biases, with a sliding window on every
layer when one is stated."""

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import same_window

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    windows=same_window,
    known_fields=frozenset({"sliding_window"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)

FAMILIES.add("mistral", MISTRAL)

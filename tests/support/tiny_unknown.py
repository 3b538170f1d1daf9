"""Tiny random models of `transformers` that the decoder does not support, to be quantized by tensor name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FFN = {"intermediate_size": 256}


def _model(name: str, **facts: Any) -> Callable[[], Any]:
    def build() -> Any:
        kind = getattr(transformers, name)
        return kind(kind.config_class(**facts))

    return build


MODELS: dict[str, Callable[[], Any]] = {
    "gpt_neox": _model("GPTNeoXForCausalLM", **SIZES, **FFN, max_position_embeddings=128),
    "falcon": _model("FalconForCausalLM", **SIZES, new_decoder_architecture=False),
    "phi": _model("PhiForCausalLM", **SIZES, **FFN),
    "starcoder2": _model("Starcoder2ForCausalLM", **SIZES, **FFN, num_key_value_heads=2),
    "opt": _model("OPTForCausalLM", **SIZES, ffn_dim=256, word_embed_proj_dim=64),
    "mamba": _model("MambaForCausalLM", vocab_size=384, hidden_size=128, num_hidden_layers=2, state_size=16),
    "t5": _model(
        "T5ForConditionalGeneration",
        vocab_size=384,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
    ),
    "bert": _model("BertForMaskedLM", **SIZES, **FFN),
    "bert-classifier": _model("BertForSequenceClassification", **SIZES, **FFN, num_labels=48),
}
KEPT_DENSE = {
    "gpt_neox": {"lm_head"},
    "falcon": {"lm_head"},
    "phi": {"lm_head"},
    "starcoder2": {"lm_head"},
    "opt": {"lm_head"},
    "mamba": {"lm_head", "backbone.layers.0.mixer.dt_proj", "backbone.layers.1.mixer.dt_proj"},
    "t5": {"lm_head"},
    "bert": {"cls.predictions.decoder", "cls.predictions.transform.dense"},
    "bert-classifier": {"classifier"},
}
"""Linears of each model that stay dense. The head of GPT-NeoX is `embed_out` on disk."""


def build_unknown(name: str, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model, in eval mode; weights are large enough that its outputs depend on all of them."""
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model.to(dtype).eval()


def save_unknown(directory: Path, name: str, **how: Any) -> Any:
    """Save such a model as `transformers` does, and return it."""
    shard = {"max_shard_size": how.pop("max_shard_size")} if "max_shard_size" in how else {}
    model = build_unknown(name, **how)
    model.save_pretrained(directory, **shard)
    return model

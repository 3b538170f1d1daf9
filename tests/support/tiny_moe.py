"""The tiny model of whole-run tests as a mixture of experts: two of its three layers have four experts."""

import shutil
from pathlib import Path
from typing import Any

import torch

from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource
from tests.support.tiny_run import CONFIG

MOE: dict[str, Any] = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "attention_bias": False,
}
ON_LATENTS: dict[str, Any] = {
    **{name: value for name, value in CONFIG.items() if name not in ("rms_norm_eps", "rope_parameters")},
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "tie_word_embeddings": False,
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "*EM*E",
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "moe_latent_size": 128,
    "routed_scaling_factor": 2.5,
}
"""A hybrid whose experts act on latents."""
LOUDNESS = 6.0
"""Factor of all matrices: as they are initialised, distributions are so flat that nothing is lost by
pruning, and every token goes to the same experts."""


def write_tiny_moe(path: Path, tokenizer: Path, *, blind: bool = False, config: dict[str, Any] = MOE) -> Path:
    """Write the mixture, or another, with the tokenizer of another tiny model. `blind` routers send every
    token to the first two experts."""
    path.mkdir(exist_ok=True)
    decoder = fresh_decoder(family_of(config).read_config(config), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(LOUDNESS if parameter.dim() == 2 else 1.0)
        for layer in decoder.layers[1:] if blind else ():
            layer.moe.router.weight.zero_()
    write_checkpoint(path, MemorySource(decoder, dtype=torch.bfloat16))
    shutil.copyfile(tokenizer / "tokenizer.json", path / "tokenizer.json")
    return path

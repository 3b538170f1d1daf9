"""Small random decoders for unit tests: every optional part switched on unless a test says otherwise."""

from pathlib import Path
from typing import Any

import torch

from compress.models.arch import Arch
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.experts import EXPERTS_OF_TOKENS
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": [2, 3],
    "dtype": "float32",
}
LLAMA: dict[str, Any] = {
    **{key: value for key, value in QWEN3.items() if key != "attention_bias"},
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "mlp_bias": True,
}


def tiny_arch(config: dict[str, Any] | None = None, **changes: Any) -> Arch:
    config = {**(config or QWEN3), **changes}
    return family_of(config).read_config(config)


def tiny_decoder(arch: Arch, *, seed: int = 0) -> Decoder:
    """float32, with weights large enough for attention to look somewhere, and with norms and biases off their
    initial values.
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = fresh_decoder(arch, generator=generator)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(EXPERTS_OF_TOKENS):
                continue
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            elif parameter.dim() > 1:  # b and eps of xIELU are the same in every model
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return decoder.requires_grad_(False)


def tiny_source(arch: Arch, *, seed: int = 0) -> MemorySource:
    return MemorySource(tiny_decoder(arch, seed=seed), dtype=getattr(torch, arch.dtype))


def tiny_checkpoint(directory: Path, arch: Arch) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(directory, tiny_source(arch))
    return directory


def tiny_tokens(arch: Arch, num_samples: int, seq_len: int, *, seed: int = 3) -> torch.Tensor:
    return torch.randint(
        arch.vocab_size,
        (num_samples, seq_len),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.int32,
    )

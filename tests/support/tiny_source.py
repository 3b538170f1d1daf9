"""Small random decoders stated by their facts, for tests of the serving forward."""

from dataclasses import replace
from typing import Any

import torch

from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.experts import EXPERTS_OF_TOKENS, Experts
from compress.models.gated_residual import GatedResiduals
from compress.models.hyper_connection import HyperConnections
from compress.models.indexer import BlockIndexer, Indexer
from compress.models.latent import Latent
from compress.models.layer_shape import LayerShape, Rope
from compress.models.moe import table_in_turns
from compress.models.ngrams import NGrams
from compress.models.weights import MemorySource


def tiny_shape(**changes: Any) -> LayerShape:
    facts: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 88,
        "rope": Rope(10000.0),
    }
    return LayerShape(**{**facts, **changes})


LIKE_GEMMA4_E: dict[str, Any] = {
    "layers": (
        tiny_shape(window=5),
        tiny_shape(),
        tiny_shape(window=5, kv_source=0),
        tiny_shape(kv_source=1, intermediate_size=176),
        tiny_shape(window=5, kv_source=0, num_heads=2),
    ),
    "block": "sandwich",
    "layer_embed_size": 8,
    "qk_norm": True,
    "v_norm": True,
    "layer_scalar": True,
    "embed_scale": 3.25,
    "logit_softcap": 3.0,
}
"""Facts of a model whose tokens have embeddings for each layer, and whose last layers read the keys and
values of earlier ones."""

_ROTATED = {
    "num_kv_heads": 4,
    "rope": Rope(10000.0, rotary_dim=8, exponents=(0.5, -0.25, 1.0, 0.0)),
    "latent": Latent(q_rank=0, kv_rank=20, rope_dim=8, value_dim=16, interleaved=True),
}
_UNROTATED = {
    "num_kv_heads": 4,
    "rope": None,
    "latent": Latent(q_rank=0, kv_rank=20, rope_dim=0, value_dim=12, interleaved=True),
}
LIKE_LARGE4: dict[str, Any] = {
    "learned_growth": True,
    "latent_eps": 0.01,
    "qkv_bias": True,
    "layers": (
        tiny_shape(**_ROTATED),
        tiny_shape(**_ROTATED, kv_source=0),
        tiny_shape(**_UNROTATED),
        tiny_shape(**_ROTATED, kv_source=0),
        tiny_shape(**_UNROTATED, kv_source=2),
    ),
}
"""Facts of a model with latent attention whose layers share latents, some of which encode no positions."""

_INDEXED: dict[str, Any] = {
    "num_kv_heads": 4,
    "rope": Rope(10000.0, rotary_dim=6),
    "latent": Latent(28, 12, 6, 12, interleaved=True, indexer=Indexer(5, 10, top_k=20)),
}
_SHARING = {**_INDEXED, "latent": replace(_INDEXED["latent"], indexer=None)}
LIKE_GLM5: dict[str, Any] = {
    "layers": (
        tiny_shape(**_INDEXED),
        tiny_shape(**_SHARING),
        tiny_shape(**{**_SHARING, "window": 5}),
        tiny_shape(**_SHARING),
        tiny_shape(**_INDEXED),
    ),
}
"""Facts of a model with latent attention whose layers attend to 20 chosen keys, some of them to those that an
earlier layer chooses, and one to a window."""

_POOLED: dict[str, Any] = {
    "num_kv_heads": 4,
    "rope": None,
    "latent": Latent(28, 12, 0, 12, interleaved=False, indexer=Indexer(5, 10, top_k=19, pool_size=4)),
}
_SHARING_POOLS = {**_POOLED, "latent": replace(_POOLED["latent"], indexer=None)}
LIKE_GLM53: dict[str, Any] = {
    "hyper": HyperConnections(3, 1e-6, sinkhorn_iterations=4, mean_head=True),
    "latent_eps": 1e-5,
    "layers": (
        tiny_shape(**_POOLED, ffn_cap=0.05, caps_first=True),
        tiny_shape(**_SHARING_POOLS),
        tiny_shape(
            **{**_POOLED, "latent": replace(_POOLED["latent"], indexer=Indexer(9, 14, 23, pool_size=3))},
            experts=Experts(6, 2, 48, shared_size=48, caps_first=True),
            ffn_cap=0.02,
            expert_cap=0.03,
        ),
    ),
}
"""Facts of a model with latent attention whose indexers choose pools of keys, of which one layer shares the
choice of another, and with streams."""
NGRAMS = NGrams(3, 2, 14, 3, 4, base=60, index=0, seed=9, eos=5, divisor=16, num_parts=3)
"""Embeddings of triples and pairs of tokens, in three streams; token 5 ends a sequence."""
LIKE_QWEN4: dict[str, Any] = {
    "hyper": GatedResiduals(3, 16),
    "norm_offset": 1.0,
    "qk_norm": True,
    "layers": (
        tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None, ngrams=NGRAMS),
        tiny_shape(
            output_gate=True,
            rope=Rope(10000.0, rotary_dim=8),
            experts=Experts(6, 2, 48, shared_size=64, shared_gate=True, renormalize=True),
            block_indexer=BlockIndexer(3, 12, 16, 200, pooled=True),
        ),
        tiny_shape(
            recurrence=DeltaNet(4, 2, 8, 12, 4),
            rope=None,
            ngrams=replace(NGRAMS, index=1, order=4, head_dim=7),
        ),
    ),
}
"""Facts of a model with gated residuals, a pooled indexer and embeddings of n-grams of two kinds."""


def fill_table_(decoder: Decoder, name: str) -> bool:
    """Fill in a parameter that is a table of the experts of tokens; return whether it is one."""
    if not name.endswith(EXPERTS_OF_TOKENS):
        return False
    experts = decoder.arch.layers[int(name.split(".")[1])].experts
    assert experts is not None
    table_VK = decoder.get_parameter(name)
    table_VK.copy_(table_in_turns(*table_VK.shape, num_experts=experts.num_experts))
    return True


def tiny_source(**changes: Any) -> MemorySource:
    """The same for the same facts; norms and biases are off their initial values."""
    facts: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 101,
        "hidden_size": 56,
        "max_position": 512,
        "layers": (tiny_shape(), tiny_shape()),
        "norm_eps": 1e-6,
        "activation": "silu",
        "tied_head": False,
        "qkv_bias": False,
        "o_bias": False,
        "ffn_bias": False,
        "qk_norm": False,
        "dtype": "float32",
        "config": {},
    }
    decoder = Decoder(Arch(**{**facts, **changes})).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 0:  # b and eps of xIELU, which are the same in every model
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if fill_table_(decoder, name):
            continue
        parameter.copy_(
            1 + 0.2 * noise
            if ("norm" in name and "hyper" not in name and "streams" not in name)
            or name.endswith(("layer_scalar", "ffn.factor", "moe.factor"))
            else 0.3 * noise
            if parameter.dim() == 1
            else noise * parameter.shape[1] ** -0.5
        )
    return MemorySource(decoder, dtype=torch.float32)

"""What few decoders have, on a GPU: norms after halves, norms of all heads, capped scores, wide heads,
several residual streams, and whole engines over them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.attention_decode import paged as decode
from compress.kernels.attention_prefill import paged as prefill
from compress.kernels.hyper_mix.fused import hyper_mix
from compress.kernels.hyper_mix.reference import hyper_mix as reference_hyper_mix
from compress.kernels.hyper_spread.fused import hyper_spread
from compress.kernels.hyper_spread.reference import hyper_spread as reference_hyper_spread
from compress.kernels.operands.hyper import HyperWeights
from compress.kernels.operands.paged import FP8_TOKEN_HEAD, PagedKV
from compress.kernels.operands.rows import FP8, INT8, ActivationQuant, Branch, QuantizedRows, RowNorm
from compress.kernels.post_norm.fused import post_norm
from compress.kernels.post_norm.reference import post_norm as reference_post_norm
from compress.kernels.rms_norm.fused import rms_norm
from compress.kernels.rope_store import fused, reference
from compress.kernels.select import select
from compress.kernels.soft_cap.fused import soft_cap_
from compress.models.alibi import Alibi
from compress.models.arch import Arch
from compress.models.compressed import Compressed
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.experts import Experts
from compress.models.gated_residual import GatedResiduals
from compress.models.gated_sum import GatedSums
from compress.models.hyper_connection import HyperConnections
from compress.models.indexer import BlockIndexer, EntryIndexer, Indexer
from compress.models.latent import Latent
from compress.models.layer_shape import LayerShape, Rope
from compress.models.lightning import Lightning
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.ngrams import NGrams
from compress.models.normed_sum import NormedSums
from compress.models.random_source import RandomSource
from compress.models.relative_logits import RelativeLogits
from compress.models.short_conv import ShortConv
from compress.models.shortcut import Shortcuts
from compress.models.weights import MemorySource
from compress.quant.scheme import SCHEMES
from compress.runtime.deployment import Deployment
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_source import fill_table_

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_is_nan")]
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYER = LayerShape(num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=1000, rope=Rope(10000.0))
LOCAL = replace(LAYER, window=70)
HALF = replace(LAYER, only_half="mixer", gated=False)
SPARSE = replace(LAYER, intermediate_size=176, experts=Experts(16, 4, 176))
SIGMOID = Experts(
    16, 4, 176, shared_size=176, score="sigmoid", renormalize=True, scale=2.5, selection_bias=True
)
WHOLE_GROUPS = replace(SIGMOID, expert_size=128, shared_size=256)
CAPPED = replace(WHOLE_GROUPS, caps_first=True)
ON_LATENTS = replace(WHOLE_GROUPS, num_experts=64, top_k=22, latent_size=128)
OF_GRANITE = Experts(16, 4, 128, shared_size=256, score="softmax_topk")
BRANCHES = Experts(16, 4, 176, shared_size=256, renormalize=True, branch_norms=True, output_scale=True)
PLAIN_QUERIES = replace(
    LAYER,
    num_kv_heads=8,
    head_dim=192,
    rope=Rope(10000.0, rotary_dim=64),
    latent=Latent(q_rank=0, kv_rank=384, rope_dim=64, value_dim=128, interleaved=True),
)
NARROW = replace(LOCAL, head_dim=256, num_kv_heads=1)
WIDE = replace(LAYER, head_dim=512, num_kv_heads=1, rope=Rope(1e6, "proportional", rotary_dim=128))
LATENT = replace(
    PLAIN_QUERIES,
    head_dim=256,
    latent=Latent(q_rank=128, kv_rank=256, rope_dim=64, value_dim=256, interleaved=False),
)
RESCALED = replace(
    PLAIN_QUERIES,
    latent=Latent(128, 256, rope_dim=64, value_dim=128, interleaved=True, rescaled=True, rope_norm=True),
)
GATED = replace(
    LATENT,
    norm_gate_rank=16,
    latent=Latent(q_rank=128, kv_rank=256, rope_dim=64, value_dim=256, interleaved=True, gated=True),
)
OF_TABLE = Experts(
    16,
    4,
    128,
    shared_size=256,
    score="sqrt_softplus",
    renormalize=True,
    scale=1.5,
    caps_first=True,
    table_size=1013,
)
COMPRESSED = Compressed(q_rank=128, rope_dim=64, out_groups=2, out_rank=128)
ONE_KV = replace(
    LOCAL,
    num_kv_heads=1,
    head_dim=256,
    intermediate_size=128,
    rope=Rope(10000.0, rotary_dim=64),
    compressed=COMPRESSED,
    experts=OF_TABLE,
    ffn_cap=0.5,
    expert_cap=0.125,
)
TRAINED = replace(PLAIN_QUERIES, rope=Rope(10000.0, rotary_dim=64, exponents=(0.5, -0.25) * 16))
UNROTATED = replace(
    PLAIN_QUERIES,
    rope=None,
    latent=Latent(q_rank=0, kv_rank=384, rope_dim=0, value_dim=128, interleaved=True),
)
NGRAMS = NGrams(3, 8, 24, 4, 4, base=500, index=0, seed=9, eos=5, divisor=128, num_parts=3)
INDEXED = replace(
    PLAIN_QUERIES,
    latent=Latent(
        q_rank=128,
        kv_rank=384,
        rope_dim=64,
        value_dim=128,
        interleaved=True,
        indexer=Indexer(num_heads=16, head_dim=128, top_k=100, interleaved=True),
    ),
)
SHARING = replace(INDEXED, latent=replace(INDEXED.latent, indexer=None))  # type: ignore[type-var]
POOLED = replace(
    PLAIN_QUERIES,
    rope=None,
    latent=Latent(
        q_rank=128,
        kv_rank=384,
        rope_dim=0,
        value_dim=128,
        interleaved=False,
        indexer=Indexer(num_heads=16, head_dim=128, top_k=103, pool_size=4),
    ),
)
BOUNDED_DELTA = DeltaNet(4, 4, 128, 128, 4, rank=128, by_channel=True, decay_bound=5.0)
FACTS: dict[str, dict[str, Any]] = {
    "glm 5": {"layers": (INDEXED, SHARING, replace(INDEXED, experts=SIGMOID))},
    "glm 5.3": {
        "hyper": HyperConnections(4, 1e-6, sinkhorn_iterations=20, mean_head=True),
        "latent_eps": 1e-5,
        "layers": (
            replace(LAYER, recurrence=BOUNDED_DELTA, rope=None, ffn_cap=0.25, caps_first=True),
            replace(POOLED, ffn_cap=0.25, caps_first=True),
            replace(POOLED, latent=replace(POOLED.latent, indexer=None)),  # type: ignore[type-var]
            replace(
                LAYER,
                recurrence=BOUNDED_DELTA,
                rope=None,
                experts=CAPPED,
                intermediate_size=128,
                ffn_cap=0.25,
                expert_cap=0.25,
            ),
        ),
    },
    "hy 4": {
        "hyper": HyperConnections(4, 1e-6, post_eps=1e-6),
        "attn_sinks": True,
        "layers": (
            replace(LATENT, output_gate=True),
            replace(LATENT, output_gate=True, experts=CAPPED, expert_cap=0.125, intermediate_size=128),
            replace(LATENT, output_gate=True),
        ),
    },
    "qwen 4": {
        "hyper": GatedResiduals(4, 128),
        "norm_offset": 1.0,
        "qk_norm": True,
        "layers": (
            replace(LAYER, recurrence=DeltaNet(8, 4, 128, 128, 4), rope=None, ngrams=NGRAMS),
            replace(LAYER, output_gate=True, experts=SPARSE.experts, intermediate_size=176),
            replace(
                LAYER, recurrence=DeltaNet(8, 4, 128, 128, 4), rope=None, ngrams=replace(NGRAMS, index=1)
            ),
        ),
    },
    "deepseek v4": {
        "hyper": HyperConnections(4, 1e-6, sinkhorn_iterations=20),
        "attn_sinks": True,
        "layers": (
            ONE_KV,
            replace(
                ONE_KV,
                compressed=replace(COMPRESSED, rate=4, overlaps=True, indexer=EntryIndexer(2, 64, 128, 4)),
                experts=replace(OF_TABLE, table_size=0, selection_bias=True),
            ),
            replace(ONE_KV, compressed=replace(COMPRESSED, rate=128)),
        ),
    },
    "streams that are mixed": {
        "hyper": HyperConnections(4, 1e-6, sinkhorn_iterations=20),
        "qk_norm": True,
        "layers": (LOCAL, replace(LAYER, experts=CAPPED, expert_cap=0.125, intermediate_size=128)),
    },
    "the mean of streams": {
        "hyper": HyperConnections(3, 1e-6, sinkhorn_iterations=4, mean_head=True),
        "layers": (LAYER, LAYER),
    },
    "mistral large 4": {
        "learned_growth": True,
        "latent_eps": 1e-5,
        "logit_softcap": 30.0,
        "layers": (
            TRAINED,
            replace(TRAINED, kv_source=0, experts=SPARSE.experts, intermediate_size=176),
            UNROTATED,
            replace(UNROTATED, kv_source=2),
        ),
    },
    "gemma 2": {
        "norm_offset": 1.0,
        "block": "sandwich",
        "embed_scale": 19.6,
        "activation": "gelu_pytorch_tanh",
        "attn_scale": 0.09,
        "attn_softcap": 50.0,
        "logit_softcap": 30.0,
        "layers": (LOCAL, LAYER),
    },
    "hunyuan": {"qk_norm": True, "rotates_first": True},
    "trinity": {
        "block": "sandwich",
        "embed_scale": 19.6,
        "qk_norm": True,
        "layers": (
            replace(LOCAL, output_gate=True, experts=SIGMOID, intermediate_size=176),
            replace(LAYER, output_gate=True, rope=None),
        ),
    },
    "gemma 3": {
        "norm_offset": 1.0,
        "block": "sandwich",
        "embed_scale": 19.6,
        "qk_norm": True,
        "layers": (replace(LOCAL, head_dim=256, num_heads=4, num_kv_heads=2), LAYER),
    },
    "gemma 4": {
        "block": "sandwich",
        "attn_scale": 1.0,
        "qk_norm": True,
        "logit_softcap": 30.0,
        "layers": (LOCAL, replace(LAYER, head_dim=512, num_heads=4, num_kv_heads=1)),
    },
    "gemma 3n": {
        "block": "sandwich",
        "attn_scale": 0.06,
        "qk_norm": True,
        "v_norm": True,
        "layer_embed_size": 64,
        "layer_embed_vocab": 256,
        "altup_streams": 4,
        "laurel_rank": 64,
        "embed_scale": 19.6,
        "logit_softcap": 30.0,
        "activation": "gelu_pytorch_tanh",
        "layers": (
            replace(NARROW, gate_sparsity=0.9),
            LAYER,
            replace(NARROW, kv_source=0, intermediate_size=2048),
            replace(LAYER, kv_source=1),
        ),
    },
    "gemma 4 e": {
        "block": "sandwich",
        "attn_scale": 0.06,  # with 1 float32 is 0.014 off float64, on a CPU as well
        "qk_norm": True,
        "v_norm": True,
        "layer_scalar": True,
        "layer_embed_size": 64,
        "embed_scale": 19.6,
        "logit_softcap": 30.0,
        "activation": "gelu_pytorch_tanh",
        "layers": (
            NARROW,
            WIDE,
            replace(NARROW, kv_source=0, intermediate_size=2000),
            replace(WIDE, kv_source=1, intermediate_size=2000),
            replace(NARROW, kv_source=0, intermediate_size=2000),
        ),
    },
    "gemma 4 with experts": {
        "block": "sandwich",
        "attn_scale": 1.0,
        "qk_norm": True,
        "v_norm": True,
        "layer_scalar": True,
        "activation": "gelu_pytorch_tanh",
        "layers": (
            replace(LOCAL, experts=BRANCHES),
            replace(LAYER, head_dim=512, num_heads=4, num_kv_heads=1, keys_are_values=True, experts=BRANCHES),
        ),
    },
    "glm 4": {"block": "sandwich", "layers": (replace(LAYER, rope=Rope(1e4, rotary_dim=32)), LAYER)},
    "olmo 2": {"block": "post", "qk_norm": True, "whole_qk_norm": True},
    "command r": {
        "block": "parallel",
        "norm": "layer",
        "logit_scale": 0.0625,
        "layers": (LOCAL, replace(LAYER, rope=None)),
    },
    "command r+": {"block": "parallel", "norm": "layer", "qk_norm": True, "own_qk_norm": True},
    "granite": {"embed_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.125, "attn_scale": 0.0156},
    "ministral 3": {"query_growth": (0.1, 64)},
    "vaultgemma": {
        "norm_offset": 1.0,
        "embed_scale": 19.6,
        "attn_softcap": 50.0,
        "logit_softcap": 30.0,
        "layers": (LOCAL, LAYER),
    },
    "flex olmo": {
        "block": "post",
        "qk_norm": True,
        "whole_qk_norm": True,
        "layers": (SPARSE, replace(SPARSE, window=70)),
    },
    "k-exaone": {"qk_norm": True, "layers": (LOCAL, replace(SPARSE, rope=None, experts=SIGMOID))},
    "deepseek v2": {"layers": (PLAIN_QUERIES, replace(PLAIN_QUERIES, experts=SIGMOID)), "attn_scale": 0.09},
    "deepseek v2 with groups": {
        "layers": (
            replace(PLAIN_QUERIES, experts=Experts(16, 4, 176, num_groups=4, top_groups=2, group_best=1)),
            PLAIN_QUERIES,
        ),
    },
    "a.x k1": {
        "layers": (LATENT, replace(LATENT, experts=replace(WHOLE_GROUPS, post_norm=True)), LATENT),
    },
    "dots3-note": {
        "latent_eps": 1e-5,
        "layers": (
            replace(RESCALED, head_gate="sigmoid"),
            replace(
                RESCALED, head_gate="sigmoid", num_heads=4, num_kv_heads=4, window=70, experts=WHOLE_GROUPS
            ),
            replace(RESCALED, head_gate="sigmoid", window=300),
        ),
    },
    "a.x k2": {
        "layers": (
            GATED,
            replace(GATED, experts=replace(WHOLE_GROUPS, num_groups=4, top_groups=2, zeroes_groups=True)),
            GATED,
        ),
    },
    "kolibri 1": {
        "block": "sandwich",
        "qk_norm": True,
        "layers": (
            replace(LOCAL, window=71, experts=replace(WHOLE_GROUPS, renormalize=False, biased_logits=True)),
            replace(LAYER, rope=None, experts=replace(WHOLE_GROUPS, renormalize=False, biased_logits=True)),
        ),
    },
    "mistral small 4": {
        "query_growth": (0.1, 64),
        "layers": (
            LATENT,
            replace(LATENT, experts=replace(WHOLE_GROUPS, score="softmax", selection_bias=False)),
        ),
    },
    "glm 4.7 flash": {"layers": (LATENT, replace(LATENT, experts=WHOLE_GROUPS)), "qkv_bias": True},
    "qwen 3.5": {
        "norm_offset": 1.0,
        "qk_norm": True,
        "layers": (
            replace(LAYER, rope=None, recurrence=DeltaNet(8, 4, 128, 128, 4)),
            replace(
                LAYER,
                output_gate=True,
                head_dim=256,
                rope=Rope(1e7, rotary_dim=64, leading=True),
                experts=replace(WHOLE_GROUPS, shared_gate=True),
                intermediate_size=128,
            ),
            replace(LAYER, rope=None, recurrence=DeltaNet(6, 2, 64, 64, 3)),
        ),
    },
    "olmo": {"norm": "layer", "unit_norms": True},
    "xglm": {
        "position_offset": 2,
        "sinusoidal_positions": True,
        "embed_scale": 8.0,
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        "activation": "gelu",
        "layers": (replace(LAYER, rope=None, gated=False),) * 2,
    },
    "opt": {
        "position_offset": 2,
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        "activation": "relu",
        "layers": (replace(LAYER, rope=None, gated=False),) * 2,
    },
    "phi": {
        "block": "parallel",
        "norm": "layer",
        "norm_bias": True,
        "head_bias": True,
        "tied_head": False,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        "activation": "gelu_pytorch_tanh",
        "layers": (replace(LAYER, gated=False), replace(LAYER, gated=False)),
    },
    "bitnet": {
        "activation": "relu2",
        "layers": (replace(LAYER, sub_norms=True), replace(LAYER, sub_norms=True, window=70)),
    },
    "nanochat": {
        "unit_norms": True,
        "unit_qk_norm": True,
        "embed_norm": True,
        "logit_softcap": 15.0,
        "activation": "relu2",
        "layers": (replace(LAYER, gated=False), replace(LAYER, gated=False)),
    },
    "olmo hybrid": {
        "qk_norm": True,
        "whole_qk_norm": True,
        "block": "post",
        "recurrent_block": "pre",
        "recurrent_norm_eps": 1e-5,
        "layers": (
            replace(LAYER, rope=None, recurrence=DeltaNet(6, 6, 96, 192, 4, doubled_beta=True)),
            replace(LAYER, num_kv_heads=8, rope=None),
            replace(LAYER, rope=None, recurrence=DeltaNet(6, 6, 96, 192, 4, doubled_beta=True)),
        ),
    },
    "kimi linear": {
        "layers": (
            replace(LAYER, rope=None, recurrence=DeltaNet(6, 6, 128, 128, 4, rank=128, by_channel=True)),
            replace(PLAIN_QUERIES, rope=None, experts=WHOLE_GROUPS, intermediate_size=128),
            replace(LAYER, rope=None, recurrence=DeltaNet(5, 5, 64, 64, 3, rank=32, by_channel=True)),
        ),
    },
    "ling 3.0": {
        "layers": (
            replace(
                LAYER,
                rope=None,
                recurrence=DeltaNet(6, 6, 128, 128, 4, by_channel=True, decay_bound=5.0),
            ),
            replace(PLAIN_QUERIES, head_gate="sigmoid"),
            replace(LAYER, rope=None, recurrence=DeltaNet(5, 5, 64, 64, 3, by_channel=True)),
            replace(LATENT, head_gate="sigmoid", experts=WHOLE_GROUPS, intermediate_size=128),
        ),
    },
    "granite 4 h": {
        "attn_scale": 0.03,
        "residual_scale": 0.22,
        "logit_scale": 0.125,
        "layers": (
            replace(LAYER, rope=None, recurrence=Mamba2(12, 1, 128, 64, 4, conv_bias=True)),
            replace(LAYER, rope=None, experts=OF_GRANITE, intermediate_size=128),
            replace(LAYER, rope=None, recurrence=Mamba2(8, 2, 64, 32, 3, conv_bias=False)),
        ),
    },
    "persimmon": {
        "activation": "relu2",
        "norm": "layer",
        "norm_bias": True,
        "qk_norm": True,
        "qk_norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        "layers": (replace(LAYER, gated=False, num_kv_heads=8, rope=Rope(25000.0, rotary_dim=32)),) * 2,
    },
    "nemotron": {
        "activation": "relu2",
        "norm": "layer",
        "norm_bias": True,
        "layers": (replace(LAYER, gated=False),),
    },
    "starcoder 2": {
        "activation": "gelu_pytorch_tanh",
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        "layers": (replace(LOCAL, gated=False),),
    },
    "pythia": {
        "activation": "gelu",
        "norm": "layer",
        "norm_bias": True,
        "block": "parallel",
        "own_ffn_norm": True,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        "layers": (replace(LAYER, gated=False, num_kv_heads=8, rope=Rope(10000.0, rotary_dim=16)),),
    },
    "falcon h1": {
        "attn_scale": 0.04,
        "embed_scale": 5.7,
        "logit_scale": 0.1,
        "linear_factors": (
            ("attn.o", 0.9),
            ("mamba.gate", 0.44),
            ("mamba.x", 0.31),
            ("mamba.B", 0.44),
            ("mamba.C", 0.62),
            ("mamba.dt", 0.44),
            ("mamba.o", 0.24),
            ("ffn.gate", 0.88),
            ("ffn.down", 0.59),
        ),
        "layers": (
            replace(LAYER, joint=True, recurrence=Mamba2(12, 1, 256, 64, 4, conv_bias=True, normed=False)),
            replace(LAYER, joint=True, recurrence=Mamba2(8, 2, 128, 32, 4, conv_bias=True)),
        ),
    },
    "jamba": {
        "layers": (
            replace(LAYER, rope=None, recurrence=Mamba1.of(512, 16, 4, 160, conv_bias=True)),
            replace(SPARSE, rope=None),
            replace(LAYER, rope=None, recurrence=Mamba1.of(384, 24, 3, 24, conv_bias=False, normed=False)),
        ),
    },
    "falcon mamba": {
        "recurrent_norm_eps": 1e-6,
        "layers": (
            replace(
                HALF,
                gated=True,
                rope=None,
                recurrence=Mamba1.of(512, 16, 4, 32, conv_bias=True, unit_norms=True),
            ),
            replace(
                HALF,
                gated=True,
                rope=None,
                recurrence=Mamba1.of(384, 16, 4, 24, conv_bias=True, normed=False),
            ),
        ),
    },
    "mamba 2": {
        "layers": (
            replace(HALF, gated=True, rope=None, recurrence=Mamba2(8, 4, 128, 64, 4, conv_bias=True)),
            replace(HALF, gated=True, rope=None, recurrence=Mamba2(8, 1, 128, 64, 4, conv_bias=True)),
        ),
    },
    "minimax m1": {
        "hyper": NormedSums(3.56, 1.0, 3.56, 1.0, 3.56, 1.0),
        "recurrent_norm_eps": 1e-6,
        "layers": (
            replace(LAYER, rope=None, recurrence=replace(Lightning.of(8, 128), decay_rate=0.99)),
            replace(LAYER, rope=Rope(1e7, rotary_dim=64, leading=True)),
            replace(SPARSE, rope=None, recurrence=replace(Lightning.of(6, 64), decay_rate=1e-5)),
        ),
    },
    "nemotron h": {
        "activation": "relu2",
        "layers": (
            replace(HALF, rope=None, recurrence=Mamba2(8, 4, 128, 80, 4, conv_bias=True)),
            replace(HALF, only_half="ffn"),
            replace(HALF, rope=None),
            replace(HALF, only_half="ffn", experts=WHOLE_GROUPS, intermediate_size=128),
        ),
    },
    "nemotron 3 super": {
        "activation": "relu2",
        "layers": (
            replace(HALF, rope=None),
            replace(HALF, only_half="ffn", experts=ON_LATENTS, intermediate_size=128),
        ),
    },
    "apertus": {
        "activation": "xielu",
        "qk_norm": True,
        "layers": (
            replace(LAYER, gated=False),
            replace(LAYER, gated=False, rope=Rope(12e6, "llama3", factor=8.0, original_max_position=128)),
        ),
    },
    "minimax m3": {
        "activation": "swiglu_clamped",
        "qk_norm": True,
        "norm_offset": 1.0,
        "layers": (
            replace(LAYER, rope=Rope(5e6, rotary_dim=32)),
            replace(
                LAYER,
                rope=Rope(5e6, rotary_dim=32),
                block_indexer=BlockIndexer(num_heads=4, head_dim=64, block_size=128, top_blocks=16),
                experts=SIGMOID,
                intermediate_size=176,
            ),
        ),
    },
    "blocks of keys": {
        "qk_norm": True,
        "norm_offset": 1.0,
        "layers": (
            replace(LAYER, block_indexer=BlockIndexer(LAYER.num_kv_heads, 128, block_size=16, top_blocks=5)),
            replace(
                LAYER,
                rope=Rope(5e6, rotary_dim=32),
                output_gate=True,
                block_indexer=BlockIndexer(8, 64, block_size=4, top_blocks=20, pooled=True),
            ),
        ),
    },
    "lfm2": {
        "qk_norm": True,
        "layers": (
            replace(LAYER, rope=None, recurrence=ShortConv.of(384, 3)),
            replace(LAYER, experts=WHOLE_GROUPS, intermediate_size=128),
            replace(LAYER, rope=None, recurrence=ShortConv.of(384, 4)),
        ),
    },
    "lfm3": {
        "qk_norm": True,
        "block": "sandwich",
        "layers": (
            replace(LAYER, rope=None, recurrence=ShortConv.of(384, 7)),
            replace(LAYER, head_gate="sigmoid", window=50),
            replace(
                LAYER, head_gate="sigmoid", rope=Rope(1e6, "proportional", rotary_dim=LAYER.head_dim // 2)
            ),
        ),
    },
    "laguna": {
        "qk_norm": True,
        "layers": (
            replace(LAYER, head_gate="softplus"),
            replace(
                LAYER,
                head_gate="softplus",
                num_heads=2 * LAYER.num_heads,
                window=50,
                experts=replace(WHOLE_GROUPS, score="sigmoid", selection_bias=True),
                intermediate_size=128,
            ),
        ),
    },
    "step 3.7": {
        "qk_norm": True,
        "norm_offset": 1.0,
        "layers": (
            replace(LAYER, head_gate="sigmoid", rope=Rope(1e6, rotary_dim=32), ffn_cap=0.25),
            replace(
                LAYER,
                head_gate="sigmoid",
                num_heads=2 * LAYER.num_heads,
                window=50,
                experts=WHOLE_GROUPS,
                intermediate_size=128,
                ffn_cap=0.25,
                expert_cap=0.125,
            ),
            replace(
                LAYER, head_gate="sigmoid", experts=WHOLE_GROUPS, intermediate_size=128, expert_cap=0.125
            ),
            replace(
                LAYER,
                head_gate="sigmoid",
                experts=WHOLE_GROUPS,
                intermediate_size=128,
                ffn_cap=0.125,
                expert_cap=0.125,
            ),
        ),
    },
    "mimo v2 flash": {
        "attn_sinks": True,
        "windowed_sinks": True,
        "linear_factors": (("attn.o", 0.707),),
        "layers": (
            replace(LAYER, narrow_value_dim=LAYER.head_dim // 2),
            replace(
                LAYER,
                head_dim=192,
                narrow_value_dim=128,
                num_kv_heads=LAYER.num_heads,
                rope=Rope(1e4, rotary_dim=64, leading=True),
                window=50,
                experts=replace(WHOLE_GROUPS, score="sigmoid", selection_bias=True),
                intermediate_size=128,
            ),
        ),
    },
    "inkling": {
        "qk_norm": True,
        "inverse_scale": True,
        "logit_scale": 0.25,
        "embed_norm": True,
        "embed_norm_weight": True,
        "head_vocab": 1000,
        "layers": (
            replace(
                LAYER,
                rope=None,
                window=50,
                relative=RelativeLogits(16, 50),
                residual_convs=4,
                scaled_ffn=True,
            ),
            replace(
                LAYER,
                rope=None,
                num_kv_heads=2,
                relative=RelativeLogits(16, 100, (0.2, 40)),
                residual_convs=4,
                experts=replace(WHOLE_GROUPS, shared_size=0, always=2, one_output_scale=True),
                intermediate_size=128,
            ),
        ),
    },
    "bloom": {
        "norm": "layer",
        "norm_bias": True,
        "embed_norm": True,
        "embed_norm_weight": True,
        "tied_head": True,
        "layers": (
            replace(LAYER, rope=None, num_kv_heads=LAYER.num_heads, alibi=Alibi(as_powers=True)),
            replace(LAYER, rope=None, num_kv_heads=1, window=50, alibi=Alibi(as_scores=True)),
        ),
    },
    "gpt of 2018": {
        "norm": "layer",
        "activation": "gelu_pytorch_tanh",
        "norm_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "ffn_bias": True,
        "hyper": NormedSums(1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        "layers": (
            replace(LAYER, rope=None, gated=False, bare_input=True),
            replace(LAYER, rope=None, gated=False),
        ),
    },
    "gpt-neox japanese": {
        "norm": "layer",
        "activation": "gelu",
        "norm_bias": True,
        "tied_head": True,
        "layers": (replace(LAYER, gated=False), replace(LAYER, gated=False, o_bias=True)),
    },
    "mpt": {
        "norm": "layer",
        "qkv_clip": 1.5,
        "attn_scale": 0.2,
        "layers": (
            replace(LAYER, rope=None, num_kv_heads=LAYER.num_heads, alibi=Alibi(16.0)),
            replace(LAYER, rope=None, alibi=Alibi(3.0)),
        ),
    },
    "muse glimmer": {
        "norm_offset": 1.0,
        "plain_final_norm": True,
        "post_norm_eps": 1e-8,
        "block": "sandwich",
        "embed_norm": True,
        "unit_qk_norm": True,
        "unit_norm_unrotated": True,
        "attn_scale": 3.87 * LAYER.head_dim**-0.5,
        "logit_scale": 0.2,
        "logit_softcap": 20.0,
        "layers": (
            replace(LAYER, output_gate=True, window=50),
            replace(LAYER, output_gate=True, rope=None),
        ),
    },
    "longcat flash": {
        "hyper": Shortcuts(),
        "layers": (
            replace(
                PLAIN_QUERIES,
                experts=replace(
                    WHOLE_GROUPS, score="softmax", renormalize=False, zero_experts=8, delayed=True
                ),
                intermediate_size=128,
            ),
            PLAIN_QUERIES,
        ),
    },
    "muse spark": {
        "norm_offset": 1.0,
        "plain_final_norm": True,
        "post_norm_eps": 1e-8,
        "embed_norm": True,
        "unit_qk_norm": True,
        "unit_norm_unrotated": True,
        "attn_scale": 5.47 * LAYER.head_dim**-0.5,
        "logit_scale": 0.2,
        "logit_softcap": 20.0,
        "hyper": GatedSums(0.3),
        "layers": (
            replace(LAYER, output_gate=True, out_norm=True, window=50),
            replace(
                LAYER,
                output_gate=True,
                out_norm=True,
                rope=None,
                experts=replace(ON_LATENTS, shared_size=0, latent_norms=True, router_scale=0.2),
                intermediate_size=128,
            ),
        ),
    },
    "command a plus": {
        "block": "parallel",
        "layers": (
            LAYER,
            replace(
                LAYER,
                rope=None,
                experts=replace(WHOLE_GROUPS, scale=0.5, shared_scale=0.5),
                intermediate_size=128,
            ),
            replace(
                LAYER,
                window=50,
                experts=replace(SIGMOID, expert_size=128, shared_size=0),
                intermediate_size=128,
            ),
        ),
    },
    "phi 4 mini": {"layers": (replace(LAYER, head_dim=96), replace(LAYER, head_dim=80, num_heads=12))},
}
BY_REFERENCE = {"glm 5.3": ("pool",)}
"""Facts -> how the names of the ops begin that references serve, in the absence of other kernels."""
each_fact = pytest.mark.parametrize("facts", FACTS)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=CUDA, dtype=dtype)


def make_arch(facts: dict[str, Any]) -> Arch:
    stated: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 1013,
        "hidden_size": 384,
        "max_position": 512,
        "layers": (LAYER, LOCAL),
        "norm_eps": 1e-6,
        "activation": "silu",
        "tied_head": True,
        "qkv_bias": False,
        "o_bias": False,
        "ffn_bias": False,
        "qk_norm": False,
        "dtype": "bfloat16",
        "config": {},
    }
    return Arch(**{**stated, **facts})


def make_source(facts: dict[str, Any]) -> MemorySource:
    decoder = Decoder(make_arch(facts)).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 0:  # b and eps of xIELU, which are the same in every model
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if fill_table_(decoder, name):
            continue
        parameter.copy_(parameter + 0.1 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    return MemorySource(decoder, dtype=torch.bfloat16)


def make_requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(1013, (length,), generator=generator).tolist())
        for length in (40, 1, 300, 128, 127)
    ]
    return [
        Request(str(idx), prompt, SamplingParams(12, temperature=0.8 * (idx % 2), seed=idx, ignore_eos=True))
        for idx, prompt in enumerate(prompts)
    ]


def run(engine: Engine, requests: list[Request]) -> dict[tuple[int, int], Tensor]:
    """Logits by (request seed, position of the token they chose)."""
    rows: dict[tuple[int, int], Tensor] = {}

    def record(requests: Any, positions: Any, logits_RV: Tensor) -> None:
        for row, request, position in zip(logits_RV, requests, positions, strict=True):
            rows[request.params.seed, position] = row.clone()

    engine.observer = record
    engine.generate(requests)
    return rows


@each_fact
def test_a_request_has_the_same_bits_alone_and_in_any_order_and_kernels_serve(facts: str) -> None:
    engine = Engine(make_source(FACTS[facts]), device=CUDA, config=EngineConfig(kv_cache_bytes=1 << 28))
    requests = make_requests()
    together = run(engine, requests)
    reversed_ = run(engine, requests[::-1])
    alone = {key: row for request in requests[:3] for key, row in run(engine, [request]).items()}
    assert all(not row.isnan().any() for row in together.values())
    for key, row in together.items():
        assert torch.equal(row, reversed_[key]), key
        assert key not in alone or torch.equal(row, alone[key]), key
    ops = [row for row in engine.kernel_report() if row["op"] != "linear"]
    references = [row["op"] for row in ops if "reference" in row["kernel"]]
    assert [op for op in references if not op.startswith(BY_REFERENCE.get(facts, ()))] == []
    assert bool(references) == (facts in BY_REFERENCE)


@each_fact
@pytest.mark.parametrize("length", [60, 200], ids=["decode kernels", "prefill kernels"])
def test_scores_are_the_cpus_within_rounding(facts: str, length: int) -> None:
    source = make_source(FACTS[facts])
    config = EngineConfig(dtype=torch.float32, kv_cache_bytes=1 << 28)
    tokens_BS = torch.randint(1013, (2, length), generator=torch.Generator().manual_seed(2))
    on_cpu = Engine(source, device=torch.device("cpu"), config=config).runner.score(tokens_BS)
    on_gpu = Engine(source, device=CUDA, config=config).runner.score(tokens_BS).cpu()
    depth = sum(
        2 * 384 + layer.num_heads * layer.head_dim + layer.intermediate_size for layer in source.arch.layers
    )
    bound = 16 * torch.finfo(torch.float32).eps * depth**0.5 * float(on_cpu.abs().max())
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "facts",
    [
        *("gemma 3", "gemma 2", "gemma 4 e", "granite", "command r", "deepseek v2", "qwen 3.5", "laguna"),
        *("glm 5", "blocks of keys", "mimo v2 flash", "hy 4", "streams that are mixed", "gemma 3n", "qwen 4"),
    ],
)
def test_verified_tokens_and_logprobs_are_those_of_plain_decoding(facts: str) -> None:
    source = make_source(FACTS[facts])
    requests = make_requests()
    config = EngineConfig(kv_cache_bytes=1 << 28)
    plain = Engine(source, device=CUDA, config=config).generate(requests)
    speculative = replace(config, speculative=Speculative(DraftModel(source), k=3))
    verified = Engine(source, device=CUDA, config=speculative).generate(requests)
    assert [each.tokens for each in verified] == [each.tokens for each in plain]


@pytest.mark.parametrize("scheme", ["W4A16_G128", "FP8_DYNAMIC"])
@pytest.mark.parametrize(
    "facts",
    [
        "gemma 3",
        "gemma 4 e",
        "command r",
        "olmo 2",
        "granite",
        "glm 4.7 flash",
        "qwen 3.5",
        "lfm3",
        "muse glimmer",
        "hy 4",
        "the mean of streams",
    ],
)
def test_graphs_and_overlap_change_no_token(facts: str, scheme: str) -> None:
    arch = make_arch(FACTS[facts]).replace(hidden_size=512, vocab_size=1024)
    arch = arch.replace(layers=tuple(replace(layer, intermediate_size=1024) for layer in arch.layers))
    source = RandomSource(arch, device=CUDA, dtype=torch.bfloat16, scheme=SCHEMES[scheme])
    done = [
        Engine(source, device=CUDA, config=EngineConfig(kv_cache_bytes=1 << 28, sync=sync)).generate(
            make_requests()
        )
        for sync in (False, True)
    ]
    assert [each.tokens for each in done[0]] == [each.tokens for each in done[1]]


@pytest.mark.parametrize("iterations", [0, 1, 20])
@pytest.mark.parametrize(("num_streams", "size"), [(4, 2816), (4, 6144), (3, 65), (2, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_head", [False, True])
@pytest.mark.usefixtures("freed_memory_is_nan")
def test_streams_are_joined_as_the_reference_does_and_rows_keep_their_bits(
    iterations: int, num_streams: int, size: int, dtype: torch.dtype, of_head: bool
) -> None:
    facts = HyperConnections(num_streams, 1e-6, sinkhorn_iterations=iterations)
    shapes = facts.shapes(size, of_head=of_head)
    weight = randn(*shapes["weight"], seed=1) * (num_streams * size) ** -0.5
    hyper = HyperWeights(facts, 1e-5, weight, randn(*shapes["bias"], seed=2), 1 + randn(*shapes["gains"]))
    norm = RowNorm(1 + randn(size, seed=3), 1e-3)
    streams = randn(257, num_streams * size, dtype=dtype)
    eps = torch.finfo(dtype).eps
    expected, expected_factors = reference_hyper_mix(streams, hyper, norm)
    for quant in (None, ActivationQuant(), ActivationQuant(dtype=INT8)):
        rows, factors = hyper_mix(streams, hyper, norm, quant)
        step = eps if quant is None else 2**-3 if quant.dtype == FP8 else 2**-5
        torch.testing.assert_close(dense(rows), dense(expected), rtol=8 * step, atol=16 * step + 1e-4)
        assert (factors is None) == of_head
        if factors is not None and expected_factors is not None:
            torch.testing.assert_close(factors, expected_factors, rtol=1e-4, atol=1e-4)
        for some in (slice(0, 1), slice(3, 20), slice(200, 257)):
            part, part_factors = hyper_mix(streams[some], hyper, norm, quant)
            assert part_factors is None or factors is None or torch.equal(part_factors, factors[some])
            for actual, whole in zip(parts(part), parts(rows), strict=True):
                assert torch.equal(actual.view(torch.uint8), whole[some].view(torch.uint8))


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize(("num_streams", "size"), [(4, 2816), (3, 65), (2, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("freed_memory_is_nan")
def test_streams_after_a_half_layer_have_the_bits_of_the_reference(
    mixes: bool, num_streams: int, size: int, dtype: torch.dtype
) -> None:
    streams, y = randn(33, num_streams * size, dtype=dtype), randn(33, size, dtype=dtype, seed=1)
    factors = randn(33, num_streams * (1 + num_streams * mixes), seed=2)
    after = hyper_spread(y, streams, factors)
    assert torch.equal(after, reference_hyper_spread(y, streams, factors))
    assert torch.equal(hyper_spread(y[3:20], streams[3:20], factors[3:20]), after[3:20])


@pytest.mark.parametrize("size", [1, 65, 3840])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["weights like rows", "float32 weights"])
def test_a_post_norm_is_the_norm_the_sum_and_the_norm_that_follows(
    size: int, dtype: torch.dtype, centered: bool, wide: bool
) -> None:
    y, x = (randn(33, size, dtype=dtype, seed=seed) for seed in (0, 1))
    norm, following = (
        RowNorm((1 + randn(size, seed=seed)).to(torch.float32 if wide else dtype), eps, centered)
        for seed, eps in ((2, 1e-5), (3, 1e-3))
    )
    normed = rms_norm(y, norm.weight, norm.eps, centered=centered)
    assert isinstance(normed, Tensor)
    deviation = y.double() - (y.double().mean(-1, keepdim=True) if centered else 0)
    expected = deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(normed.double(), expected, rtol=4 * eps, atol=4e-6)
    for quant in (None, ActivationQuant(), ActivationQuant(dtype=INT8)):
        total, rows, _ = post_norm(y, x, norm, following, quant)
        # The norm is rounded before the sum, and may be rounded the other way in a last bit.
        torch.testing.assert_close(
            total.double(), (x.double() + expected).to(dtype).double(), rtol=4 * eps, atol=8 * eps
        )
        again = rms_norm(total, following.weight, following.eps, quant, centered=centered)
        step = eps if quant is None else 2**-3 if quant.dtype == FP8 else 2**-5
        for actual, other in zip(dense(rows), dense(again), strict=True):
            torch.testing.assert_close(actual, other, rtol=4 * step, atol=4 * step)
        for some in (slice(0, 1), slice(3, 20)):
            part, part_rows, _ = post_norm(y[some], x[some], norm, following, quant)
            assert torch.equal(part, total[some])
            for actual, other in zip(parts(part_rows), parts(rows), strict=True):
                assert torch.equal(actual.view(torch.uint8), other[some].view(torch.uint8))


@pytest.mark.parametrize("size", [1, 65, 2816])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("freed_memory_is_nan")
def test_branches_and_other_readers_of_a_post_norm_are_norms_of_their_own(
    size: int, dtype: torch.dtype
) -> None:
    a, b, x = (randn(33, size, dtype=dtype, seed=seed) for seed in range(3))
    kinds = (dtype, torch.float32, dtype, dtype, torch.float32, dtype)
    of_a, of_b, norm, following, second, third = (
        RowNorm((1 + randn(size, seed=3 + seed)).to(kind), 1e-5) for seed, kind in enumerate(kinds)
    )
    branches = (Branch(a, of_a), Branch(b, of_b))
    given = (norm, following, ActivationQuant())
    total, rows, others = post_norm(branches, x, *given, also=(second, third), scale=0.5)
    reference = reference_post_norm(branches, x, *given, also=(second, third), scale=0.5)
    # Each norm that is rounded on the way may be rounded the other way in a last bit.
    step = 16 * torch.finfo(dtype).eps
    for actual, expected in zip((total, *others), (reference[0], *reference[2]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=step, atol=step)
    torch.testing.assert_close(dense(rows), dense(reference[1]), rtol=2**-2, atol=2**-2)
    for some in (slice(0, 1), slice(3, 20)):
        parted = tuple(Branch(each.values_TD[some], each.norm) for each in branches)
        part, part_rows, part_others = post_norm(parted, x[some], *given, also=(second, third), scale=0.5)
        for actual, whole in zip((part, *part_others), (total, *others), strict=True):
            assert torch.equal(actual, whole[some])
        for actual, whole in zip(parts(part_rows), parts(rows), strict=True):
            assert torch.equal(actual.view(torch.uint8), whole[some].view(torch.uint8))


def dense(rows: Tensor | QuantizedRows | None) -> Tensor:
    assert rows is not None
    return rows.dequantize(torch.float32) if isinstance(rows, QuantizedRows) else rows.float()


def test_the_sum_of_a_post_norm_is_that_of_the_rounded_norm() -> None:
    """Bit for bit: with a weight of one and rows of equal numbers the norm is known exactly."""
    y = torch.full((5, 3840), 3.0, dtype=torch.bfloat16, device=CUDA)
    x = randn(5, 3840, dtype=torch.bfloat16)
    weight = randn(3840, dtype=torch.bfloat16, seed=1)
    for weights in (weight, weight.float()):
        total, _, _ = post_norm(y, x, RowNorm(weights, 0.0))
        assert torch.equal(total, x + weight)


def parts(rows: Tensor | QuantizedRows | None) -> list[Tensor]:
    if isinstance(rows, QuantizedRows):
        return [rows.values_TK, rows.scale_T.unsqueeze(1)]
    assert rows is not None
    return [rows]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(40, 40, 128), (9, 3, 80), (16, 8, 256), (4, 1, 512)],
)
@pytest.mark.parametrize("norms", ["heads", "whole", "rotated"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_rope_store_norms_all_heads_and_grows_queries(
    num_heads: int, num_kv_heads: int, head_dim: int, norms: str, centered: bool, weights: torch.dtype
) -> None:
    qkv = randn(33, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.bfloat16)
    cos, sin = (randn(64, head_dim, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    positions = torch.arange(33, device=CUDA)
    facts: dict[str, Any] = {
        "num_heads": num_heads,
        "eps": 1e-5,
        "qk_norm": 1 + randn(num_heads + num_kv_heads, head_dim, dtype=weights, seed=3) / 4,
        "whole": norms == "whole",
        "rotates_first": norms == "rotated",
        "centered": centered,
        "growth_P": (1 + torch.arange(64, device=CUDA) / 16).to(torch.bfloat16),
    }
    pages = torch.full((num_kv_heads, 4, 16, head_dim), 3.0, dtype=qkv.dtype, device=CUDA)
    expected, actual = (PagedKV(pages.clone(), pages.clone()) for _ in range(2))
    slots = positions + 16
    q = reference.rope_store(qkv, cos, sin, positions, slots, expected, **facts)
    got = fused.rope_store(qkv, cos, sin, positions, slots, actual, **facts)
    torch.testing.assert_close(got, q, rtol=2**-6, atol=2**-5)
    assert float((got.double() - q.double()).norm() / q.double().norm()) < 2**-9
    torch.testing.assert_close(actual.k, expected.k, rtol=2**-6, atol=2**-5)
    assert torch.equal(actual.v, expected.v)
    one = fused.rope_store(qkv[7:8], cos, sin, positions[7:8], slots[7:8], actual, **facts)
    assert torch.equal(one, got[7:8])


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "window", "softcap", "coded"),
    [
        (64, 2, torch.bfloat16, None, 3.0, False),
        (64, 2, torch.bfloat16, 100, 3.0, True),
        (96, 3, torch.float16, 100, 3.0, False),
        (256, 2, torch.bfloat16, 100, 3.0, False),
        (256, 2, torch.bfloat16, None, 3.0, True),
        (256, 1, torch.float32, None, 3.0, False),
        (512, 8, torch.bfloat16, None, None, False),
        (512, 8, torch.bfloat16, 100, 3.0, True),
        (512, 16, torch.float16, 100, None, False),
        (512, 2, torch.float32, None, 3.0, False),
    ],
)
def test_attention_of_capped_scores_and_wide_heads(
    head_dim: int, group: int, dtype: torch.dtype, window: int | None, softcap: float | None, coded: bool
) -> None:
    lens = [5, 333]
    table = torch.arange(1, 13, device=CUDA, dtype=torch.int32).view(2, 6)
    shape = 2, 13, 64, head_dim
    k, v = (randn(*shape, seed=seed) for seed in (1, 2))
    if coded:
        scales = [each.abs().amax(-1) / 448 for each in (k, v)]
        codes = [(each / scale.unsqueeze(-1)).to(FP8) for each, scale in zip((k, v), scales, strict=True)]
        kv = PagedKV(*codes, *scales)
    else:
        kv = PagedKV(k.to(dtype), v.to(dtype))
        for each in (kv.k, kv.v):
            each[:, 0] = torch.nan
    q = randn(8, 2 * group, head_dim, dtype=dtype, seed=3)
    facts: dict[str, Any] = {"window": window, "scale": 0.09, "softcap": softcap}
    decoded = decode.attention_decode(
        q, kv, table, torch.tensor(lens, device=CUDA, dtype=torch.int32), q_len=4, **facts
    )
    filled = prefill.attention_prefill(q, kv, table, (4, 4), tuple(lens), **facts)
    tolerance = torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    for idx, length in enumerate(lens):
        rows = slice(4 * idx, 4 * idx + 4)
        expected = attention_f64(q[rows], kv, table[idx], length, **facts)
        for out in (decoded, filled):
            assert float((out[rows].double() - expected).norm() / expected.norm()) < tolerance
    for query in range(4):
        ends = torch.tensor([length - 3 + query for length in lens], device=CUDA, dtype=torch.int32)
        one = decode.attention_decode(q[query::4].contiguous(), kv, table, ends, q_len=1, **facts)
        assert torch.equal(one, decoded[query::4])


def attention_f64(
    q: Tensor,
    kv: PagedKV,
    blocks: Tensor,
    length: int,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    k, v = kv.gather(blocks, length, torch.float64)
    s = torch.einsum("qkgc,klc->kgql", q.double().unflatten(1, (k.shape[0], -1)), k) * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    at = torch.arange(length - len(q), length, device=CUDA).unsqueeze(1)
    keys = torch.arange(length, device=CUDA)
    unseen = keys > at if window is None else (keys > at) | (keys <= at - window)
    return torch.einsum("kgql,klc->qkgc", s.masked_fill(unseen, -torch.inf).softmax(-1), v).flatten(1, 2)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1030), (1, 262_208)])
def test_capped_logits(shape: tuple[int, int]) -> None:
    x = randn(*shape) * 40
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(soft_cap_(x, 30.0).double(), expected, rtol=0, atol=8 * 30 * 2**-24)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("kv_format", ["BF16", FP8_TOKEN_HEAD])
def test_every_head_has_a_kernel_that_is_no_reference(head_dim: int, group: int, kv_format: str) -> None:
    device = Deployment(CUDA, torch.bfloat16, max_batch_size=64, max_step_tokens=2048).kernel_device
    for softcap in (False, True):
        decoding = device.problem("attention_decode", n=head_dim, k=group, scheme=kv_format, softcap=softcap)
        filling = device.problem(
            "attention_prefill", n=head_dim, k=group, phase="prefill", scheme=kv_format, softcap=softcap
        )
        for problem in (decoding, filling):
            assert "reference" not in select(problem).name


@pytest.mark.parametrize(
    ("size", "start", "width"), [(512, 0, 576), (768, 0, 1344), (512, 768, 1344), (72, 24, 120)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", [False, True])
def test_norms_of_columns_have_the_bits_of_a_row_alone(
    size: int, start: int, width: int, dtype: torch.dtype, rounded: bool
) -> None:
    """Latents are columns of wider rows; a single row has no distance to the next."""
    wide = torch.randn(37, width, device=CUDA).to(dtype)
    weight = torch.randn(size, device=CUDA).to(dtype)
    quant = ActivationQuant() if rounded else None

    def normed(x_TI: Tensor) -> tuple[Tensor, ...]:
        rows = rms_norm(x_TI, weight, 1e-6, quant)
        return (rows,) if isinstance(rows, Tensor) else (rows.values_TK.view(torch.uint8), rows.scale_T)

    columns = wide[:, start : start + size]
    together = normed(columns)
    for row in (0, 1, 36):
        alone = normed(columns[row : row + 1])
        assert all(torch.equal(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))
    assert all(map(torch.equal, together, normed(columns.contiguous())))

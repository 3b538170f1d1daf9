"""The serving forward computes what the canonical decoder computes, for every feature of an architecture."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.linear.bags import bags_are_fast
from compress.models.alibi import Alibi
from compress.models.attention import FullAttention
from compress.models.compressed import Compressed
from compress.models.delta_net import DeltaNet
from compress.models.experts import Experts
from compress.models.gated_residual import GatedResiduals
from compress.models.gated_sum import GatedSums
from compress.models.hyper_connection import HyperConnections
from compress.models.indexer import BlockIndexer, EntryIndexer, Indexer
from compress.models.latent import Latent
from compress.models.layer_shape import Rope
from compress.models.lightning import Lightning
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.normed_sum import NormedSums
from compress.models.relative_logits import RelativeLogits
from compress.models.short_conv import ShortConv
from compress.models.shortcut import Shortcuts
from compress.models.weights import MemorySource, build_decoder
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_source import LIKE_GLM53, LIKE_LARGE4, LIKE_QWEN4, tiny_shape, tiny_source

LATENT = {
    "num_kv_heads": 4,
    "rope": Rope(10000.0, rotary_dim=6),
    "latent": Latent(q_rank=28, kv_rank=12, rope_dim=6, value_dim=12, interleaved=True),
}
PLAIN_QUERIES = {
    "num_kv_heads": 4,
    "rope": Rope(10000.0, "yarn", factor=4.0, original_max_position=16, attention_factor=1.2, rotary_dim=8),
    "latent": Latent(q_rank=0, kv_rank=20, rope_dim=8, value_dim=16, interleaved=False),
}
RESCALED = {
    **LATENT,
    "latent": Latent(28, 12, 6, 12, interleaved=True, rescaled=True, rope_norm=True),
}
NARROW_LATENT = {
    "num_heads": 2,
    "num_kv_heads": 2,
    "rope": Rope(500.0, rotary_dim=8),
    "latent": Latent(20, 16, 8, 10, interleaved=True, rescaled=True, rope_norm=True),
}
GATED = {
    **LATENT,
    "latent": Latent(q_rank=28, kv_rank=12, rope_dim=6, value_dim=12, interleaved=True, gated=True),
}

INDEXED = {
    **LATENT,
    "latent": replace(LATENT["latent"], indexer=Indexer(num_heads=5, head_dim=10, top_k=20)),
}
INDEXED_LAST = {
    **LATENT,
    "latent": replace(
        GATED["latent"], indexer=Indexer(9, 14, 37, interleaved=True, rope_last=True, norm_eps=0.1)
    ),
}

CPU = torch.device("cpu")
WEIGHED = Experts(6, 1, 48, shared_size=40, score="sigmoid", weighs_input=True)
SCALED = Experts(6, 2, 48, renormalize=True, output_scale=True)
CAPPED = Experts(6, 2, 48, shared_size=48, caps_first=True)
OF_TABLE = Experts(
    6, 2, 48, shared_size=48, score="sqrt_softplus", renormalize=True, caps_first=True, table_size=101
)
BOUNDED_DELTA = DeltaNet(3, 3, 8, 12, 4, rank=12, by_channel=True, decay_bound=0.9)
ONE_KV = {"num_kv_heads": 1, "rope": Rope(10000.0, rotary_dim=6), "ffn_cap": 0.05, "expert_cap": 0.02}
BRANCHES = replace(SCALED, shared_size=64, branch_norms=True)
ALWAYS = Experts(
    *(8, 4, 48),
    score="sigmoid",
    selection_bias=True,
    renormalize=True,
    scale=2.5,
    always=2,
    one_output_scale=True,
)
DELAYED = Experts(6, 3, 48, shared_size=96, selection_bias=True, scale=6.0, zero_experts=3, delayed=True)
NORMED_LATENTS = Experts(
    *(6, 3, 48),
    score="sigmoid",
    selection_bias=True,
    renormalize=True,
    latent_size=40,
    latent_norms=True,
    router_scale=0.3,
)
FEATURES: dict[str, dict[str, Any]] = {
    "indexers that choose pools of keys": LIKE_GLM53,
    "glm 5.3": {
        "hyper": HyperConnections(4, 1e-6, sinkhorn_iterations=20, mean_head=True),
        "latent_eps": 1e-5,
        "layers": (
            tiny_shape(recurrence=BOUNDED_DELTA, rope=None, ffn_cap=0.03, caps_first=True),
            replace(LIKE_GLM53["layers"][0], experts=CAPPED, expert_cap=0.02, caps_first=False),
            tiny_shape(recurrence=BOUNDED_DELTA, rope=None, experts=CAPPED, ffn_cap=0.02, expert_cap=0.02),
        ),
    },
    "indexers over latents, which layers share": {
        "layers": (
            tiny_shape(**INDEXED),
            tiny_shape(**{**LATENT, "window": 5}),
            tiny_shape(**LATENT),
            tiny_shape(**INDEXED_LAST),
        )
    },
    "indexers of the stream, and latents that layers share": {
        **LIKE_LARGE4,
        "layers": tuple(
            layer
            if idx % 3 == 1 or layer.latent is None
            else replace(layer, latent=replace(layer.latent, indexer=Indexer(4, 12, 20, of_stream=True)))
            for idx, layer in enumerate(LIKE_LARGE4["layers"])
        ),
    },
    "grouped queries": {},
    "one query head a kv head": {"layers": (tiny_shape(num_kv_heads=4),)},
    "one kv head": {"layers": (tiny_shape(num_kv_heads=1),)},
    "tied head": {"tied_head": True},
    "qkv bias": {"qkv_bias": True},
    "all biases": {"qkv_bias": True, "o_bias": True, "ffn_bias": True},
    "normed heads": {"qk_norm": True},
    "gelu": {"activation": "gelu_pytorch_tanh"},
    "window shorter than a block": {"layers": (tiny_shape(window=5), tiny_shape())},
    "window longer than a chunk": {"layers": (tiny_shape(window=131), tiny_shape(window=40))},
    "latents differ by layer": {
        "layers": (
            tiny_shape(**PLAIN_QUERIES),
            tiny_shape(**LATENT),
            tiny_shape(**{**LATENT, "num_heads": 3, "num_kv_heads": 3, "head_dim": 20}),
        )
    },
    "widths differ by layer": {
        "layers": (
            tiny_shape(num_heads=6, num_kv_heads=3, intermediate_size=40),
            tiny_shape(head_dim=24, num_kv_heads=1),
        )
    },
    "rope linear": {"layers": (tiny_shape(rope=Rope(10000.0, "linear", factor=4.0)),)},
    "rope llama3": {
        "layers": (tiny_shape(rope=Rope(500000.0, "llama3", factor=8.0, original_max_position=64)),)
    },
    "rope yarn": {
        "layers": (
            tiny_shape(
                rope=Rope(10000.0, "yarn", factor=4.0, original_max_position=64, attention_factor=1.1386)
            ),
        )
    },
    "attention sinks": {"attn_sinks": True, "layers": (tiny_shape(window=5), tiny_shape())},
    "sinks in layers with a window": {
        "attn_sinks": True,
        "windowed_sinks": True,
        "layers": (tiny_shape(window=5, num_kv_heads=4), tiny_shape()),
    },
    "values narrower than keys": {
        "qkv_bias": True,
        "linear_factors": (("attn.o", 0.7),),
        "layers": (
            tiny_shape(narrow_value_dim=6, window=5),
            tiny_shape(head_dim=24, rope=Rope(10000.0, rotary_dim=6, leading=True), narrow_value_dim=20),
            tiny_shape(narrow_value_dim=8, head_gate="sigmoid", experts=Experts(6, 2, 48)),
        ),
    },
    "sinks beside capped scores": {"attn_sinks": True, "attn_softcap": 2.0},
    "gated outputs of attention": {
        "qk_norm": True,
        "layers": (tiny_shape(window=5, output_gate=True), tiny_shape(rope=None, output_gate=True)),
    },
    "delta nets": {
        "qk_norm": True,
        "norm_offset": 1.0,
        "layers": (
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),
            tiny_shape(output_gate=True),
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),
        ),
    },
    "norms before delta nets and after attention": {
        "qk_norm": True,
        "whole_qk_norm": True,
        "block": "post",
        "recurrent_block": "pre",
        "recurrent_norm_eps": 0.01,
        "layers": (
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4, doubled_beta=True), rope=None),
            tiny_shape(),
            tiny_shape(rope=None),
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4, doubled_beta=True), rope=None),
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True), rope=None),
        ),
    },
    "delta nets with decays of channels, and latents without positions": {
        "layers": (
            tiny_shape(recurrence=DeltaNet(3, 3, 12, 20, 3, rank=8, by_channel=True), rope=None),
            tiny_shape(**{**PLAIN_QUERIES, "rope": None}, experts=Experts(6, 2, 48, shared_size=40)),
            tiny_shape(
                recurrence=DeltaNet(4, 4, 8, 12, 4, rank=6, by_channel=True),
                rope=None,
                experts=Experts(6, 2, 48),
            ),
        )
    },
    "bounded decays of channels, and latents whose heads have gates": {
        "layers": (
            tiny_shape(recurrence=DeltaNet(3, 3, 12, 20, 3, by_channel=True, decay_bound=5.0), rope=None),
            tiny_shape(**PLAIN_QUERIES, head_gate="sigmoid", experts=Experts(6, 2, 48, shared_size=40)),
            tiny_shape(recurrence=DeltaNet(4, 4, 8, 12, 4, by_channel=True), rope=None),
            tiny_shape(**PLAIN_QUERIES, head_gate="softplus"),
        )
    },
    "latents of queries, and gates of heads": {"layers": (tiny_shape(**LATENT, head_gate="sigmoid"),) * 2},
    "delta nets with decays of channels that join attention": {
        "layers": (
            tiny_shape(recurrence=DeltaNet(4, 4, 8, 12, 4, rank=6, by_channel=True), joint=True),
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), joint=True),
        )
    },
    "mamba mixers": {
        "layers": (
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True), rope=None),
            tiny_shape(rope=None),
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True), rope=None),
        ),
        "residual_scale": 0.22,
    },
    "mamba mixers in groups, with experts": {
        "layers": (
            tiny_shape(recurrence=Mamba2(6, 2, 20, 8, 3, conv_bias=False), rope=None),
            tiny_shape(
                recurrence=Mamba2(3, 1, 8, 24, 2, conv_bias=True), rope=None, experts=Experts(6, 2, 48)
            ),
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),
        )
    },
    "mamba-1 mixers, with experts": {
        "layers": (
            tiny_shape(recurrence=Mamba1.of(96, 12, 4, 5, conv_bias=True), rope=None),
            tiny_shape(rope=None),
            tiny_shape(
                recurrence=Mamba1.of(56, 16, 3, 8, conv_bias=False, normed=False),
                rope=None,
                experts=Experts(6, 2, 48),
            ),
            tiny_shape(recurrence=Mamba2(3, 1, 8, 24, 2, conv_bias=True), rope=None),
        )
    },
    "mamba-1 mixers alone, and their norms without weights": {
        "recurrent_norm_eps": 1e-2,
        "layers": (
            tiny_shape(
                recurrence=Mamba1.of(96, 12, 4, 5, conv_bias=True, unit_norms=True),
                rope=None,
                only_half="mixer",
            ),
            tiny_shape(
                recurrence=Mamba1.of(56, 16, 3, 8, conv_bias=False, normed=False),
                rope=None,
                only_half="mixer",
            ),
        ),
    },
    "mamba-2 mixers alone": {
        "layers": (
            tiny_shape(recurrence=Mamba2(4, 2, 16, 12, 4, conv_bias=True), rope=None, only_half="mixer"),
            tiny_shape(recurrence=Mamba2(3, 1, 8, 24, 2, conv_bias=False), rope=None, only_half="mixer"),
        ),
    },
    "lightning attention, and sums with the normed residual": {
        "hyper": NormedSums(3.5, 1.5, 2.5, 1.25, 3.0, 0.75),
        "recurrent_norm_eps": 1e-4,
        "layers": (
            tiny_shape(recurrence=replace(Lightning.of(4, 16), decay_rate=0.9), rope=None),
            tiny_shape(experts=Experts(6, 2, 48, renormalize=True)),
            tiny_shape(
                recurrence=replace(Lightning.of(6, 12), decay_rate=1e-5), rope=None, experts=Experts(6, 2, 48)
            ),
            tiny_shape(recurrence=replace(Lightning.of(4, 16), decay_rate=0.3), rope=None),
        ),
    },
    "mamba mixers that join attention": {
        "layers": (
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True, normed=False), joint=True),
            tiny_shape(recurrence=Mamba2(6, 2, 20, 8, 3, conv_bias=False), joint=True, window=None),
            tiny_shape(),
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True, normed=False), rope=None),
        ),
        "qkv_bias": True,
        "linear_factors": (
            ("attn.o", 0.9),
            ("mamba.gate", 0.4),
            ("mamba.x", 0.6),
            ("mamba.B", 1.5),
            ("mamba.C", 0.5),
            ("mamba.dt", 0.7),
            ("mamba.o", 0.75),
        ),
    },
    "recurrences that join attention between two norms": {
        "block": "sandwich",
        "qk_norm": True,
        "layers": (
            tiny_shape(recurrence=ShortConv.of(64, 3), joint=True, experts=Experts(6, 2, 48)),
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True), joint=True, rope=None),
        ),
    },
    "factors of linears": {
        "linear_factors": (("attn.o", 0.3), ("ffn.gate", 0.4), ("ffn.down", 0.6)),
        "ffn_bias": True,
        "o_bias": True,
    },
    "a factor of gates of rows in 8 bits": {"linear_factors": (("ffn.gate", 0.3),), "activation": "gelu"},
    "an ffn without gates": {"activation": "relu2", "layers": (tiny_shape(gated=False),) * 2},
    "an ffn of gelu without gates": {
        "activation": "gelu",
        "ffn_bias": True,
        "layers": (tiny_shape(gated=False), tiny_shape(gated=False, intermediate_size=1030)),
    },
    "an ffn of gelu without gates after one with gates": {
        "activation": "gelu_pytorch_tanh",
        "layers": (tiny_shape(), tiny_shape(gated=False)),
    },
    "an ffn with xielu": {
        "activation": "xielu",
        "qk_norm": True,
        "layers": (tiny_shape(gated=False), tiny_shape(gated=False, intermediate_size=1030)),
    },
    "one half a layer": {
        "activation": "relu2",
        "layers": (
            tiny_shape(
                only_half="mixer", gated=False, recurrence=Mamba2(4, 2, 16, 12, 4, conv_bias=True), rope=None
            ),
            tiny_shape(only_half="ffn", gated=False),
            tiny_shape(only_half="mixer", gated=False, rope=None),
            tiny_shape(
                only_half="ffn",
                gated=False,
                experts=Experts(6, 2, 48, shared_size=96, score="sigmoid", selection_bias=True),
            ),
        ),
    },
    "an ffn first, and attention last": {
        "layers": (tiny_shape(only_half="ffn"), tiny_shape(), tiny_shape(only_half="mixer")),
    },
    "short convolutions": {
        "layers": (
            tiny_shape(recurrence=ShortConv.of(64, 3), rope=None),
            tiny_shape(),
            tiny_shape(recurrence=ShortConv.of(64, 3), rope=None),
        ),
        "qk_norm": True,
    },
    "short convolutions with experts": {
        "layers": (
            tiny_shape(recurrence=ShortConv.of(64, 4), rope=None, experts=Experts(6, 2, 48)),
            tiny_shape(recurrence=ShortConv.of(64, 1), rope=None),
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True), rope=None),
        )
    },
    "recurrences between two norms": {
        "block": "sandwich",
        "layers": (
            tiny_shape(recurrence=ShortConv.of(64, 7), rope=None),
            tiny_shape(head_gate="sigmoid", window=5),
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 3), rope=None),
            tiny_shape(recurrence=Mamba2(4, 1, 16, 12, 4, conv_bias=True), rope=None),
            tiny_shape(head_gate="sigmoid", rope=None),
        ),
        "qk_norm": True,
    },
    "gates of heads": {
        "layers": (
            tiny_shape(head_gate="softplus", num_heads=8),
            tiny_shape(head_gate="sigmoid"),
            tiny_shape(),
        ),
        "qkv_bias": True,
    },
    "gates of heads and experts": {
        "layers": (
            tiny_shape(head_gate="softplus"),
            tiny_shape(head_gate="softplus", experts=Experts(6, 2, 48)),
        ),
        "attn_sinks": True,
    },
    "delta nets alone": {"layers": (tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 1), rope=None),) * 2},
    "a delta net of one key head in a mixture": {
        "layers": (
            tiny_shape(),
            tiny_shape(recurrence=DeltaNet(3, 1, 16, 8, 2), rope=None, experts=Experts(6, 2, 48)),
        )
    },
    "experts": {"layers": (tiny_shape(experts=Experts(6, 2, 48, renormalize=True)), tiny_shape())},
    "experts, a shared one and a gate": {
        "layers": (tiny_shape(experts=Experts(5, 3, 32, shared_size=40, shared_gate=True)),)
    },
    "experts in groups with biases": {
        "layers": (
            tiny_shape(
                experts=Experts(
                    8,
                    2,
                    32,
                    shared_size=64,
                    score="sigmoid",
                    renormalize=True,
                    scale=1.7,
                    num_groups=4,
                    top_groups=2,
                    selection_bias=True,
                )
            ),
        )
    },
    "experts whose logits have a bias": {
        "layers": (
            tiny_shape(
                experts=Experts(
                    7, 3, 32, shared_size=40, score="sigmoid", selection_bias=True, biased_logits=True
                )
            ),
        )
    },
    "a norm of what experts add": {
        "qk_norm": True,
        "layers": (
            tiny_shape(experts=Experts(6, 2, 48, shared_size=96, post_norm=True)),
            tiny_shape(window=5),
            tiny_shape(experts=Experts(5, 3, 32, renormalize=True, post_norm=True)),
        ),
    },
    "a centered norm of what experts add, and latents": {
        "norm": "layer",
        "norm_offset": 1.0,
        "layers": (
            tiny_shape(**LATENT),
            tiny_shape(**LATENT, experts=Experts(6, 2, 48, shared_size=48, post_norm=True)),
        ),
    },
    "a norm of what experts alone add": {
        "activation": "relu2",
        "layers": (
            tiny_shape(only_half="mixer", gated=False),
            tiny_shape(
                only_half="ffn", gated=False, experts=Experts(6, 2, 48, latent_size=40, post_norm=True)
            ),
        ),
    },
    "experts with biases and a clamped gate": {
        "activation": "swiglu_clamped",
        "layers": (
            tiny_shape(experts=Experts(6, 3, 32, score="softmax_topk", router_bias=True, expert_bias=True)),
        ),
    },
    "clamped gates of FFNs, and indexers of blocks": {
        "activation": "swiglu_clamped",
        "qk_norm": True,
        "norm_offset": 1.0,
        "layers": (
            tiny_shape(rope=Rope(10000.0, rotary_dim=8)),
            tiny_shape(
                rope=Rope(10000.0, rotary_dim=8),
                block_indexer=BlockIndexer(num_heads=2, head_dim=12, block_size=128, top_blocks=4),
                experts=Experts(
                    6,
                    2,
                    40,
                    shared_size=72,
                    score="sigmoid",
                    renormalize=True,
                    scale=2.0,
                    selection_bias=True,
                ),
            ),
            tiny_shape(
                num_kv_heads=1,
                block_indexer=BlockIndexer(num_heads=1, head_dim=16, block_size=128, top_blocks=4),
                experts=Experts(6, 2, 40, shared_size=40, score="sigmoid", renormalize=True),
            ),
        ),
    },
    "indexers of blocks for each KV head": {
        "qk_norm": True,
        "norm_offset": 1.0,
        "layers": (
            tiny_shape(block_indexer=BlockIndexer(num_heads=2, head_dim=20, block_size=8, top_blocks=2)),
            tiny_shape(),
            tiny_shape(
                rope=Rope(10000.0, rotary_dim=8),
                block_indexer=BlockIndexer(2, 12, block_size=5, top_blocks=3, local_blocks=2),
            ),
        ),
    },
    "indexers of pooled blocks, with recurrences": {
        "layers": (
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),
            tiny_shape(output_gate=True, block_indexer=BlockIndexer(5, 16, 4, 3, pooled=True)),
            tiny_shape(rope=Rope(10000.0, rotary_dim=8), block_indexer=BlockIndexer(4, 8, 7, 2, pooled=True)),
        ),
    },
    "experts that act on latents": {
        "layers": (
            tiny_shape(experts=Experts(6, 2, 48, shared_size=96, latent_size=40)),
            tiny_shape(experts=Experts(5, 3, 32, latent_size=80, latent_bias=True)),
        ),
    },
    "experts without gates that act on latents": {
        "activation": "relu2",
        "block": "sandwich",
        "ffn_bias": True,
        "layers": (
            tiny_shape(
                gated=False,
                experts=Experts(
                    8,
                    4,
                    32,
                    shared_size=64,
                    score="sigmoid",
                    renormalize=True,
                    scale=5.0,
                    selection_bias=True,
                    latent_size=16,
                    latent_bias=True,
                ),
            ),
        ),
    },
    "caps that differ by layer": {
        "ffn_bias": True,
        "layers": (
            tiny_shape(ffn_cap=0.02),
            tiny_shape(experts=Experts(6, 2, 48, shared_size=96), ffn_cap=0.03, expert_cap=0.01),
            tiny_shape(experts=Experts(6, 2, 48, shared_size=48, score="sigmoid"), expert_cap=0.02),
            tiny_shape(experts=Experts(6, 2, 48, shared_size=48), ffn_cap=0.02, expert_cap=0.02),
            tiny_shape(experts=Experts(6, 2, 48)),
        ),
    },
    "rope differs by layer": {"layers": (tiny_shape(), tiny_shape(rope=Rope(1000000.0)))},
    "rope of a part of each head": {"layers": (tiny_shape(rope=Rope(10000.0, rotary_dim=8)),)},
    "rope of the leading part of each head": {
        "qk_norm": True,
        "qkv_bias": True,
        "layers": (
            tiny_shape(head_dim=24, rope=Rope(10000.0, rotary_dim=6, leading=True)),
            tiny_shape(output_gate=True, rope=Rope(10000.0, rotary_dim=12, leading=True)),
        ),
    },
    "rope of the leading part of heads normed together": {
        "qk_norm": True,
        "whole_qk_norm": True,
        "layers": (
            tiny_shape(
                rope=Rope(
                    10000.0,
                    "yarn",
                    factor=4.0,
                    original_max_position=16,
                    attention_factor=1.2,
                    rotary_dim=8,
                    leading=True,
                )
            ),
        ),
    },
    "no positions": {"layers": (tiny_shape(), tiny_shape(rope=None))},
    "rope proportional": {
        "layers": (tiny_shape(rope=Rope(1e6, "proportional", factor=2.0, rotary_dim=8)), tiny_shape())
    },
    "norms with an offset": {"norm_offset": 1.0},
    "layer norms": {"norm": "layer"},
    "layer norms without weights": {"norm": "layer", "unit_norms": True, "logit_scale": 0.5, "qk_norm": True},
    "norms without weights in a mixture": {
        "unit_norms": True,
        "residual_scale": 0.5,
        "layers": (tiny_shape(experts=Experts(6, 2, 48)), tiny_shape()),
    },
    "layer norms with a bias": {"norm": "layer", "norm_bias": True, "norm_offset": 1.0, "logit_scale": 0.5},
    "norms of heads with a bias": {
        "norm": "layer",
        "norm_bias": True,
        "qk_norm": True,
        "qk_norm_bias": True,
        "layers": (tiny_shape(), tiny_shape(window=5)),
    },
    "norms of heads with a bias after the rotation": {
        "norm": "layer",
        "qk_norm": True,
        "qk_norm_bias": True,
        "rotates_first": True,
    },
    "parallel halves after a norm of each": {"block": "parallel", "own_ffn_norm": True, "qkv_bias": True},
    "parallel halves after a norm with a bias of each": {
        "norm": "layer",
        "norm_bias": True,
        "block": "parallel",
        "own_ffn_norm": True,
        "residual_scale": 0.5,
        "activation": "gelu",
        "layers": (tiny_shape(gated=False), tiny_shape(gated=False, window=5)),
    },
    "parallel halves after a norm with a bias": {"norm": "layer", "norm_bias": True, "block": "parallel"},
    "layer norms with an offset": {"norm": "layer", "norm_offset": 1.0},
    "post norms": {"block": "post"},
    "sandwich norms": {"block": "sandwich"},
    "parallel halves": {"block": "parallel"},
    "normed q and k": {"qk_norm": True, "whole_qk_norm": True},
    "normed q and k of odd widths": {
        "qk_norm": True,
        "whole_qk_norm": True,
        "layers": (tiny_shape(num_heads=6, num_kv_heads=3), tiny_shape(head_dim=24, num_kv_heads=1)),
    },
    "heads with norms of their own": {"qk_norm": True, "own_qk_norm": True, "norm": "layer"},
    "heads with norms of their own and an offset": {
        "qk_norm": True,
        "own_qk_norm": True,
        "norm_offset": 1.0,
        "layers": (tiny_shape(num_heads=6, num_kv_heads=3), tiny_shape(head_dim=24, num_kv_heads=1)),
    },
    "heads normed after they are rotated": {"qk_norm": True, "rotates_first": True},
    "normed heads with an offset": {"qk_norm": True, "norm_offset": 1.0},
    "centered heads": {"qk_norm": True, "norm": "layer"},
    "scaled embedding": {"embed_scale": 7.5, "tied_head": True},
    "scaled halves": {"residual_scale": 0.22},
    "scaled halves with post norms": {"residual_scale": 0.22, "block": "post"},
    "scaled halves between norms": {"residual_scale": 0.22, "block": "sandwich"},
    "scaled parallel halves": {"residual_scale": 0.22, "block": "parallel"},
    "scaled logits": {"logit_scale": 0.0625},
    "a head with a bias": {"head_bias": True, "logit_scale": 0.5, "logit_softcap": 2.0},
    "phi": {
        "block": "parallel",
        "norm": "layer",
        "norm_bias": True,
        "head_bias": True,
        "activation": "gelu_pytorch_tanh",
        "layers": (tiny_shape(gated=False), tiny_shape(gated=False)),
    },
    "phi moe": {
        "norm": "layer",
        "norm_bias": True,
        "head_bias": True,
        "layers": (
            tiny_shape(experts=Experts(6, 2, 48, score="sparsemixer", jitter=0.2), window=40),
            tiny_shape(experts=Experts(5, 2, 32, score="sparsemixer", jitter=0.01)),
        ),
    },
    "capped logits": {"logit_softcap": 0.8},
    "capped scores": {"attn_softcap": 0.7},
    "capped scores in a window": {"attn_softcap": 0.7, "layers": (tiny_shape(window=5), tiny_shape())},
    "scaled scores": {"attn_scale": 0.11},
    "growing queries": {"query_growth": (0.1, 16)},
    "growing queries without positions": {
        "query_growth": (0.3, 16),
        "growth_offset": 1,
        "growth_unrotated": True,
        "layers": (tiny_shape(), tiny_shape(rope=None)),
    },
    "heads normed without a weight": {
        "unit_qk_norm": True,
        "layers": (tiny_shape(), tiny_shape(rope=None)),
    },
    "chunks of a block": {"layers": (tiny_shape(chunk=16), tiny_shape())},
    "chunks of several blocks": {"layers": (tiny_shape(chunk=48), tiny_shape(chunk=64))},
    "capped scores in chunks": {"attn_softcap": 0.7, "layers": (tiny_shape(chunk=32),)},
    "experts beside attention": {
        "block": "parallel",
        "norm": "layer",
        "layers": (
            tiny_shape(rope=None),
            tiny_shape(experts=Experts(6, 2, 48, score="sigmoid"), window=40),
            tiny_shape(
                experts=Experts(5, 2, 32, shared_size=64, scale=0.5, shared_scale=0.5, score="softmax_topk")
            ),
        ),
    },
    "experts of weighed inputs": {"layers": (tiny_shape(experts=WEIGHED), tiny_shape())},
    "gemma 2": {
        "norm_offset": 1.0,
        "block": "sandwich",
        "embed_scale": 7.5,
        "tied_head": True,
        "activation": "gelu_pytorch_tanh",
        "attn_scale": 0.2,
        "attn_softcap": 50.0,
        "logit_softcap": 30.0,
        "layers": (tiny_shape(window=40), tiny_shape()),
    },
    "gemma 3": {
        "norm_offset": 1.0,
        "block": "sandwich",
        "embed_scale": 7.5,
        "tied_head": True,
        "qk_norm": True,
        "activation": "gelu_pytorch_tanh",
        "attn_scale": 0.2,
        "layers": (
            tiny_shape(window=40),
            tiny_shape(window=40),
            tiny_shape(rope=Rope(1e6, "linear", factor=8.0)),
        ),
    },
    "latent attention": {"layers": (tiny_shape(**LATENT), tiny_shape(**LATENT))},
    "latent attention with growing queries": {
        "query_growth": (0.3, 16),
        "layers": (tiny_shape(**LATENT), tiny_shape(**LATENT)),
    },
    "latent attention without a latent of queries": {
        "layers": (tiny_shape(**PLAIN_QUERIES), tiny_shape(**PLAIN_QUERIES, experts=SCALED)),
        "qkv_bias": True,
        "o_bias": True,
        "attn_scale": 0.4,
    },
    "latents that layers share, some without positions": LIKE_LARGE4,
    "latents that a layer with experts reads, too": {
        **LIKE_LARGE4,
        "layers": (*LIKE_LARGE4["layers"][:4], replace(LIKE_LARGE4["layers"][4], experts=SCALED)),
    },
    "values that are keys": {"layers": (tiny_shape(keys_are_values=True), tiny_shape()), "qkv_bias": True},
    "values that are normed keys": {
        "v_norm": True,
        "qk_norm": True,
        "layers": (tiny_shape(), tiny_shape(keys_are_values=True)),
    },
    "normed values": {"v_norm": True},
    "scaled layers": {"layer_scalar": True},
    "scaled layers of scaled halves": {"layer_scalar": True, "residual_scale": 0.22},
    "scaled layers with post norms": {"layer_scalar": True, "block": "post"},
    "scaled layers of parallel halves": {"layer_scalar": True, "block": "parallel"},
    "scaled layers of experts": {
        "layer_scalar": True,
        "v_norm": True,
        "layers": (tiny_shape(experts=Experts(6, 2, 48, renormalize=True)),),
    },
    "gemma 4": {
        "block": "sandwich",
        "attn_scale": 1.0,
        "qk_norm": True,
        "v_norm": True,
        "layer_scalar": True,
        "embed_scale": 7.5,
        "tied_head": True,
        "activation": "gelu_pytorch_tanh",
        "logit_softcap": 30.0,
        "layers": (
            tiny_shape(window=40),
            tiny_shape(
                head_dim=32,
                num_kv_heads=1,
                keys_are_values=True,
                rope=Rope(1e6, "proportional", rotary_dim=8),
            ),
        ),
    },
    "keys and values of another layer": {
        "qkv_bias": True,
        "layers": (
            tiny_shape(),
            tiny_shape(window=5),
            tiny_shape(),
            tiny_shape(window=5, kv_source=1),
            tiny_shape(kv_source=0, num_heads=2, intermediate_size=80),
        ),
    },
    "normed heads that read the keys of another layer": {
        "qk_norm": True,
        "whole_qk_norm": True,
        "query_growth": (0.1, 16),
        "layers": (tiny_shape(), tiny_shape(kv_source=0)),
    },
    "embeddings for each layer": {
        "block": "sandwich",
        "layer_embed_size": 24,
        "layer_scalar": True,
        "layers": (tiny_shape(), tiny_shape(experts=BRANCHES), tiny_shape()),
    },
    "gemma 4 with embeddings for each layer": {
        "block": "sandwich",
        "attn_scale": 1.0,
        "qk_norm": True,
        "v_norm": True,
        "layer_scalar": True,
        "layer_embed_size": 16,
        "embed_scale": 7.5,
        "tied_head": True,
        "activation": "gelu_pytorch_tanh",
        "logit_softcap": 30.0,
        "layers": (
            tiny_shape(window=40),
            tiny_shape(head_dim=32, rope=Rope(1e6, "proportional", rotary_dim=8)),
            tiny_shape(window=40, kv_source=0, intermediate_size=192),
            tiny_shape(
                head_dim=32, rope=Rope(1e6, "proportional", rotary_dim=8), kv_source=1, intermediate_size=192
            ),
        ),
    },
    "experts with scaled outputs": {"layers": (tiny_shape(experts=SCALED), tiny_shape())},
    "gemma 4 with experts": {
        "block": "sandwich",
        "v_norm": True,
        "layer_scalar": True,
        "activation": "gelu_pytorch_tanh",
        "residual_scale": 0.5,
        "layers": (tiny_shape(experts=BRANCHES), tiny_shape(), tiny_shape(experts=BRANCHES)),
    },
    "olmo 2": {"block": "post", "qk_norm": True, "whole_qk_norm": True},
    "command r": {
        "block": "parallel",
        "norm": "layer",
        "logit_scale": 0.0625,
        "tied_head": True,
        "layers": (tiny_shape(window=40), tiny_shape(rope=None)),
    },
    "granite": {
        "embed_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 0.125,
        "attn_scale": 0.0078125,
        "tied_head": True,
    },
    "llama 4": {
        "query_growth": (0.3, 16),
        "growth_offset": 1,
        "growth_unrotated": True,
        "unit_qk_norm": True,
        "layers": (
            tiny_shape(chunk=32, experts=WEIGHED),
            tiny_shape(chunk=32),
            tiny_shape(rope=None, experts=WEIGHED),
        ),
    },
    "muse glimmer": {
        "norm_offset": 1.0,
        "plain_final_norm": True,
        "post_norm_eps": 0.05,
        "block": "sandwich",
        "embed_norm": True,
        "embed_scale": 1.5,
        "unit_qk_norm": True,
        "unit_norm_unrotated": True,
        "attn_scale": 0.9,
        "logit_scale": 0.2,
        "logit_softcap": 20.0,
        "layers": (tiny_shape(output_gate=True, window=40), tiny_shape(output_gate=True, rope=None)),
    },
    "muse spark": {
        "norm_offset": 1.0,
        "plain_final_norm": True,
        "post_norm_eps": 0.05,
        "embed_norm": True,
        "unit_qk_norm": True,
        "unit_norm_unrotated": True,
        "attn_scale": 0.9,
        "logit_scale": 0.2,
        "logit_softcap": 20.0,
        "hyper": GatedSums(0.3),
        "layers": (
            tiny_shape(output_gate=True, out_norm=True, window=40),
            tiny_shape(output_gate=True, out_norm=True, rope=None, experts=NORMED_LATENTS),
            tiny_shape(out_norm=True, experts=replace(NORMED_LATENTS, shared_size=64, router_scale=1.0)),
        ),
    },
    "shortcut-connected mixtures": {
        "hyper": Shortcuts(),
        "layers": (
            tiny_shape(experts=DELAYED),
            tiny_shape(),
            tiny_shape(),
            tiny_shape(experts=replace(DELAYED, zero_experts=0, top_k=2)),
            tiny_shape(),
        ),
    },
    "longcat flash": {
        "hyper": Shortcuts(),
        "norm_offset": 1.0,
        "logit_scale": 0.5,
        "layers": (
            tiny_shape(**RESCALED, experts=DELAYED),
            tiny_shape(**RESCALED),
            tiny_shape(**RESCALED, experts=replace(DELAYED, zero_experts=30, top_k=6)),
            tiny_shape(**RESCALED),
        ),
    },
    "experts that return their input": {
        "layers": (
            tiny_shape(experts=Experts(6, 3, 48, shared_size=48, zero_experts=4, renormalize=True)),
            tiny_shape(experts=replace(DELAYED, delayed=False, shared_size=0, score="sigmoid")),
        ),
    },
    "outputs of heads normed before their gates": {
        "layers": (
            tiny_shape(head_gate="sigmoid", out_norm=True),
            tiny_shape(out_norm=True, num_kv_heads=4, experts=replace(ALWAYS, router_scale=-0.4)),
        )
    },
    "latents with sinks and gated outputs": {
        "attn_sinks": True,
        "layers": (
            tiny_shape(**LATENT, output_gate=True),
            tiny_shape(**PLAIN_QUERIES, output_gate=True, experts=CAPPED, expert_cap=0.02),
        ),
    },
    "norms and latents with gates": {
        "layers": (
            tiny_shape(**GATED, norm_gate_rank=12),
            tiny_shape(**GATED, norm_gate_rank=12, experts=Experts(6, 2, 48, shared_size=64)),
        ),
    },
    "windows over latents that are rescaled": {
        "latent_eps": 1e-5,
        "layers": (
            tiny_shape(**RESCALED, head_gate="sigmoid"),
            tiny_shape(**{**RESCALED, **NARROW_LATENT}, head_gate="sigmoid", window=5),
            tiny_shape(**{**RESCALED, **NARROW_LATENT}, experts=Experts(6, 2, 48), window=70),
        ),
    },
    "norms with gates": {
        "residual_scale": 0.4,
        "layers": (tiny_shape(norm_gate_rank=4), tiny_shape(norm_gate_rank=4, experts=Experts(6, 2, 48))),
    },
    "compressed attention, and experts that a table chooses": {
        "attn_sinks": True,
        "hyper": HyperConnections(3, 1e-6, sinkhorn_iterations=4),
        "layers": (
            tiny_shape(**ONE_KV, window=9, compressed=Compressed(20, 6, 2, 12), experts=OF_TABLE),
            tiny_shape(
                **ONE_KV,
                window=5,
                compressed=Compressed(20, 6, 4, 12, 3, overlaps=True, indexer=EntryIndexer(2, 8, 200, 3)),
                experts=replace(OF_TABLE, table_size=0, selection_bias=True),
            ),
            tiny_shape(**ONE_KV, window=131, compressed=Compressed(20, 6, 1, 12, 128), experts=OF_TABLE),
            tiny_shape(**ONE_KV, window=1, compressed=Compressed(20, 6, 2, 12, 1), experts=OF_TABLE),
        ),
    },
    "compressed attention with chosen entries": {
        "attn_sinks": True,
        "layers": (
            tiny_shape(
                **ONE_KV,
                experts=OF_TABLE,
                window=5,
                compressed=Compressed(20, 6, 4, 12, 3, overlaps=True, indexer=EntryIndexer(6, 8, 7, 3)),
            ),
            tiny_shape(
                **ONE_KV,
                experts=OF_TABLE,
                window=1,
                compressed=Compressed(20, 6, 2, 12, 1, overlaps=True, indexer=EntryIndexer(5, 6, 33, 1)),
            ),
        ),
    },
    "streams that are not mixed": {
        "hyper": HyperConnections(4, 1e-6, post_eps=1e-6),
        "layers": (tiny_shape(window=5), tiny_shape(experts=Experts(6, 2, 48, shared_size=64))),
    },
    "streams that are mixed, and latents": {
        "hyper": HyperConnections(3, 1e-6, sinkhorn_iterations=4),
        "embed_scale": 2.5,
        "layers": (tiny_shape(**LATENT), tiny_shape(**LATENT, experts=Experts(6, 2, 48))),
    },
    "the mean of streams with recurrences": {
        "hyper": HyperConnections(2, 1e-5, sinkhorn_iterations=20, post_factor=1.5, mean_head=True),
        "logit_scale": 0.6,
        "layers": (
            tiny_shape(recurrence=DeltaNet(4, 2, 8, 12, 4), rope=None),
            tiny_shape(head_gate="sigmoid"),
            tiny_shape(only_half="ffn"),
        ),
    },
    "streams that are read through gates": {
        "hyper": GatedResiduals(4, 24),
        "norm_offset": 1.0,
        "embed_scale": 2.5,
        "layers": (tiny_shape(window=5), tiny_shape(experts=Experts(6, 2, 48, shared_size=64))),
    },
    "embeddings of n-grams": LIKE_QWEN4,
    "streams of which layers compute one": {
        "block": "sandwich",
        "altup_streams": 3,
        "laurel_rank": 16,
        "layers": (tiny_shape(window=5), tiny_shape()),
    },
    "gates that are sparse": {
        "activation": "gelu_pytorch_tanh",
        "layers": (tiny_shape(gate_sparsity=0.9), tiny_shape(), tiny_shape(gate_sparsity=0.4)),
    },
    "gemma 3n": {
        "block": "sandwich",
        "attn_scale": 1.0,
        "qk_norm": True,
        "v_norm": True,
        "layer_embed_size": 16,
        "layer_embed_vocab": 70,
        "altup_streams": 4,
        "laurel_rank": 8,
        "embed_scale": 7.5,
        "tied_head": True,
        "activation": "gelu_pytorch_tanh",
        "logit_softcap": 30.0,
        "layers": (
            tiny_shape(window=40, gate_sparsity=0.9),
            tiny_shape(rope=Rope(1e6), intermediate_size=96),
            tiny_shape(window=40, kv_source=0, intermediate_size=192),
            tiny_shape(rope=Rope(1e6), kv_source=1),
        ),
    },
    "nanochat": {
        "unit_norms": True,
        "unit_qk_norm": True,
        "embed_norm": True,
        "logit_softcap": 15.0,
        "activation": "relu2",
        "layers": (tiny_shape(gated=False), tiny_shape(gated=False)),
    },
    "norms before the last linears": {
        "activation": "relu2",
        "qkv_bias": True,
        "o_bias": True,
        "layers": (tiny_shape(sub_norms=True), tiny_shape(sub_norms=True, window=40)),
    },
    "norms before the last linears, the others without weights": {
        "norm": "layer",
        "unit_norms": True,
        "logit_scale": 0.5,
        "layers": (tiny_shape(sub_norms=True), tiny_shape(sub_norms=True, window=40)),
    },
    "norms before the last linears and after halves": {
        "block": "sandwich",
        "norm_offset": 1.0,
        "ffn_bias": True,
        "residual_scale": 0.5,
        "layers": (
            tiny_shape(sub_norms=True),
            tiny_shape(),
            tiny_shape(sub_norms=True, intermediate_size=96),
        ),
    },
    "learned positions": {
        "position_offset": 0,
        "norm": "layer",
        "norm_bias": True,
        "activation": "gelu_pytorch_tanh",
        "tied_head": True,
        "layers": (tiny_shape(rope=None, gated=False),) * 2,
    },
    "learned positions after two rows": {
        "position_offset": 2,
        "norm": "layer",
        "unit_norms": True,
        "activation": "relu",
        "max_position": 144,
        "layers": (tiny_shape(rope=None, gated=False),) * 2,
    },
    "sinusoidal positions": {
        "position_offset": 2,
        "sinusoidal_positions": True,
        "embed_scale": 8.0,
        "norm": "layer",
        "norm_bias": True,
        "activation": "gelu",
        "tied_head": True,
        "layers": (tiny_shape(rope=None, gated=False),) * 2,
    },
    "learned positions in scaled streams": {
        "position_offset": 1,
        "embed_scale": 2.5,
        "embed_norm": True,
        "residual_scale": 0.22,
        "block": "post",
    },
    "learned positions in streams that are mixed": {
        "position_offset": 2,
        "hyper": HyperConnections(4, 1e-6, sinkhorn_iterations=4),
    },
    "relative logits": {
        "qk_norm": True,
        "layers": (
            tiny_shape(relative=RelativeLogits(3, 5), window=5),
            tiny_shape(relative=RelativeLogits(4, 40), rope=None, num_kv_heads=1),
        ),
    },
    "relative logits of grown scores beyond a chunk": {
        "attn_scale": 0.1,
        "layers": (
            tiny_shape(relative=RelativeLogits(1, 150, (0.5, 16)), rope=None),
            tiny_shape(relative=RelativeLogits(3, 1, (-0.25, 3)), rope=None, num_kv_heads=4),
            tiny_shape(),
        ),
    },
    "scores that fall with the distance": {
        "qkv_clip": 1.5,
        "norm": "layer",
        "norm_bias": True,
        "embed_norm": True,
        "embed_norm_weight": True,
        "tied_head": True,
        "layers": (
            tiny_shape(alibi=Alibi(as_powers=True), rope=None),
            tiny_shape(alibi=Alibi(2.0, as_scores=True), num_kv_heads=1, window=20),
            tiny_shape(num_heads=6, num_kv_heads=3, alibi=Alibi(3.0), rope=None),
            tiny_shape(),
        ),
    },
    "norms after sums, and a first layer that reads what is not normed": {
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "position_offset": 0,
        "activation": "gelu_pytorch_tanh",
        "hyper": NormedSums(1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        "layers": (
            tiny_shape(rope=None, gated=False, bare_input=True),
            tiny_shape(rope=None, gated=False),
            tiny_shape(rope=None, num_kv_heads=1),
        ),
    },
    "a first layer that reads what is not normed": {
        "embed_norm": True,
        "layers": (tiny_shape(bare_input=True), tiny_shape(window=20)),
    },
    "a bias of attention's output in one layer": {
        "norm": "layer",
        "norm_bias": True,
        "tied_head": True,
        "layers": (tiny_shape(), tiny_shape(o_bias=True), tiny_shape(num_kv_heads=1)),
    },
    "convolutions with a residual": {
        "qk_norm": True,
        "layers": (
            tiny_shape(residual_convs=4),
            tiny_shape(residual_convs=2, num_kv_heads=4, window=20),
            tiny_shape(),
            tiny_shape(residual_convs=1, experts=Experts(6, 2, 48, shared_size=48)),
        ),
    },
    "scaled FFNs": {"layers": (tiny_shape(scaled_ffn=True), tiny_shape(), tiny_shape(scaled_ffn=True))},
    "a head with rows of padding": {"head_vocab": 90, "logit_softcap": 4.0},
    "a tied head with rows of padding": {"head_vocab": 100, "tied_head": True},
    "embedding with a norm with a weight": {
        "embed_norm": True,
        "embed_norm_weight": True,
        "tied_head": True,
        "embed_scale": 2.0,
    },
    "experts that all tokens choose": {
        "layers": (
            tiny_shape(experts=ALWAYS),
            tiny_shape(experts=replace(ALWAYS, num_experts=5, top_k=3, always=1, one_output_scale=False)),
        ),
    },
    "inkling": {
        "qk_norm": True,
        "attn_scale": 1 / 16,
        "logit_scale": 0.25,
        "embed_norm": True,
        "embed_norm_weight": True,
        "head_vocab": 98,
        "layers": (
            tiny_shape(rope=None, window=5, relative=RelativeLogits(4, 5), residual_convs=4, scaled_ffn=True),
            tiny_shape(
                rope=None,
                num_kv_heads=4,
                relative=RelativeLogits(4, 30, (0.3, 12)),
                residual_convs=4,
                experts=ALWAYS,
            ),
        ),
    },
    "tied normed embedding": {"embed_norm": True, "tied_head": True, "residual_scale": 0.22},
    "ministral 3": {
        "query_growth": (0.1, 16),
        "layers": (tiny_shape(rope=Rope(1e6, "yarn", factor=16.0, original_max_position=64)),),
    },
}


def tolerance(expected: Tensor, source: MemorySource) -> float:
    """c eps sqrt(K) absmax: K sums the depth of all products in a row's way through the model."""
    arch = source.arch
    depth = sum(
        2 * arch.hidden_size + layer.num_heads * layer.head_dim + layer.intermediate_size
        for layer in arch.layers
    )
    of_tokens = expected[expected > torch.finfo(expected.dtype).min]  # others are rows of padding
    return 8 * torch.finfo(torch.float32).eps * depth**0.5 * float(of_tokens.abs().max())


def served_logits(
    engine: Engine, prompts: list[tuple[int, ...]], num_tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Per request: the sequence that was fed, and the logits [num_tokens, V] its tokens were chosen from."""
    rows: dict[int, list[Tensor]] = {idx: [] for idx in range(len(prompts))}

    def record(requests: Any, positions: Any, logits_RV: Tensor) -> None:
        for row, request in zip(logits_RV, requests, strict=True):
            rows[request.params.seed].append(row.clone())

    engine.observer = record
    params = [SamplingParams(num_tokens, seed=idx, ignore_eos=True) for idx in range(len(prompts))]
    done = engine.generate([Request(str(idx), prompt, params[idx]) for idx, prompt in enumerate(prompts)])
    return [torch.tensor(each.prompt + each.tokens[:-1]) for each in done], [
        torch.stack(each) for each in rows.values()
    ]


def prompts(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(101, (length,), generator=generator).tolist()) for length in lengths]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("max_step_tokens", [512, 23], ids=["whole", "chunked"])
@pytest.mark.one_in(8)
def test_served_logits_are_the_decoders(feature: str, max_step_tokens: int) -> None:
    source = tiny_source(**FEATURES[feature])
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    engine = Engine(source, device=CPU, config=EngineConfig(max_step_tokens=max_step_tokens))
    sequences, served = served_logits(engine, prompts((1, 37, 130)), num_tokens=7)
    for sequence, logits in zip(sequences, served, strict=True):
        expected = decoder(sequence.unsqueeze(0))[0, -logits.shape[0] :]
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance(expected, source))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.one_in(3)
def test_scored_logits_are_the_decoders(feature: str) -> None:
    source = tiny_source(**FEATURES[feature])
    tokens_BS = torch.tensor(prompts((140, 140, 140)))
    expected = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    scored = Engine(source, device=CPU).runner.score(tokens_BS)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored, expected, rtol=0, atol=tolerance(expected, source))


class Quantized:
    """A source whose linears are quantized, `ffn.up` and `attn.k` at another width, so that fused projections
    fall into parts.
    """

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self.arch = source.arch
        self.kv_format = source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {name: self._quantize(name, weight) for name, weight in self._source.layer(layer_idx).items()}

    def _quantize(self, name: str, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        assert isinstance(weight, Tensor)
        if weight.dim() < 2:
            return weight
        scheme = (
            Scheme("W8A16", 8, True, None)
            if name in ("ffn.up.weight", "attn.k.weight")
            else Scheme("W4A16_G128_ASYM", 4, False, 8)
        )
        return round_to_nearest(
            weight, scheme, *min_max_scale(grouped(weight, scheme), scheme, torch.float32)
        )


@pytest.mark.parametrize(("max_model_len", "is_long"), [(64, False), (65, True)])
def test_factors_of_longrope_are_chosen_by_the_longest_sequence(max_model_len: int, is_long: bool) -> None:
    factors = {
        "short_factors": tuple(1 + 0.1 * idx for idx in range(8)),
        "long_factors": tuple(2 + 0.3 * idx for idx in range(8)),
    }
    rope = Rope(10000.0, "longrope", original_max_position=64, attention_factor=1.19, **factors)
    chosen = factors["long_factors" if is_long else "short_factors"]
    oracle = replace(rope, short_factors=chosen, long_factors=chosen)
    source, oracle_source = (tiny_source(layers=(tiny_shape(rope=each),)) for each in (rope, oracle))
    decoder = build_decoder(oracle_source, dtype=torch.float32, device=CPU)
    engine = Engine(source, device=CPU, config=EngineConfig(max_model_len=max_model_len))
    sequences, served = served_logits(engine, prompts((1, 37)), num_tokens=7)
    for sequence, logits in zip(sequences, served, strict=True):
        expected = decoder(sequence.unsqueeze(0))[0, -logits.shape[0] :]
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance(expected, source))


RARE = [
    *("sandwich norms", "command r", "olmo 2", "granite", "gemma 2", "gemma 3", "gemma 4", "llama 4"),
    *("ministral 3", "chunks of a block", "latent attention", "latent attention without a latent of queries"),
    *("gates of heads", "recurrences between two norms", "norms before delta nets and after attention"),
    "delta nets with decays of channels, and latents without positions",
    *("a norm of what experts add", "norms of heads with a bias"),
    *("mamba-1 mixers alone, and their norms without weights", "mamba-2 mixers alone"),
    *("mamba-1 mixers, with experts", "lightning attention, and sums with the normed residual"),
    "clamped gates of FFNs, and indexers of blocks",
    *("indexers of blocks for each KV head", "indexers of pooled blocks, with recurrences"),
    "caps that differ by layer",
    "norms after sums, and a first layer that reads what is not normed",
    "values narrower than keys",
    "latents that layers share, some without positions",
    *("indexers over latents, which layers share", "indexers of the stream, and latents that layers share"),
    "bounded decays of channels, and latents whose heads have gates",
    *("indexers that choose pools of keys", "glm 5.3"),
    "latents with sinks and gated outputs",
    *("norms and latents with gates", "norms with gates", "windows over latents that are rescaled"),
    "compressed attention, and experts that a table chooses",
    "compressed attention with chosen entries",
    *("streams that are not mixed", "streams that are mixed, and latents"),
    *("learned positions", "learned positions after two rows", "learned positions in streams that are mixed"),
    "the mean of streams with recurrences",
    *("streams of which layers compute one", "gates that are sparse", "gemma 3n"),
    *("relative logits", "relative logits of grown scores beyond a chunk", "convolutions with a residual"),
    "scores that fall with the distance",
    *("experts that all tokens choose", "a head with rows of padding", "inkling"),
    *("streams that are read through gates", "embeddings of n-grams"),
    *("norms before the last linears", "norms before the last linears and after halves"),
]


@pytest.mark.parametrize("feature", RARE)
@pytest.mark.one_in(2)
def test_rows_keep_their_bits_in_any_company(feature: str) -> None:
    source = tiny_source(**FEATURES[feature])
    together = prompts((1, 37, 20))
    _, served = served_logits(Engine(source, device=CPU), together, num_tokens=5)
    alone = Engine(source, device=CPU)
    for prompt, logits in zip(together, served, strict=True):
        _, (own,) = served_logits(alone, [prompt], num_tokens=5)
        assert torch.equal(own[1:], logits[1:])


@pytest.mark.parametrize("feature", RARE)
@pytest.mark.one_in(4)
def test_verified_tokens_are_those_of_plain_decoding(feature: str) -> None:
    source = tiny_source(**FEATURES[feature])
    requests = [
        Request(str(idx), prompt, SamplingParams(12, ignore_eos=True))
        for idx, prompt in enumerate(prompts((1, 37)))
    ]
    plain = Engine(source, device=CPU).generate(requests)
    speculative = Speculative(DraftModel(source), k=3)
    engine = Engine(source, device=CPU, config=EngineConfig(speculative=speculative))
    assert [each.tokens for each in engine.generate(requests)] == [each.tokens for each in plain]
    assert engine.acceptance is not None
    assert set(engine.acceptance.rates) == {1.0}


OF_FEATURES = [
    *("granite", "scaled halves with post norms", "gemma 3", "gemma 4"),
    *("learned positions after two rows", "learned positions in scaled streams"),
]


@pytest.mark.parametrize("feature", OF_FEATURES)
def test_features_are_the_hidden_states(feature: str) -> None:
    source = tiny_source(**FEATURES[feature])
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    engine = Engine(source, device=CPU)
    tokens = torch.arange(5)
    rows = torch.arange(5)
    depths = (0, 1, len(source.arch.layers))
    features = Features.empty(depths, 5, engine.runner.embedding)
    batch = PrefillBatch(
        tokens, rows, rows + engine.config.block_size_on(CPU), rows[1:2].view(1, 1), (5,), (5,), rows, (None,)
    )
    engine.runner.prefill(batch, short=False, features=features)
    x = decoder.embedded(tokens.unsqueeze(0), rows, FullAttention())
    states = [x]
    for layer in decoder.layers:
        states.append(x := layer(x, rows, FullAttention()))
    expected = torch.cat([states[depth][0] for depth in depths], dim=-1)
    torch.testing.assert_close(features.rows_TE, expected, rtol=0, atol=tolerance(expected, source))


def test_quantized_linears_are_served_as_their_dequantized_weights() -> None:
    plain = tiny_source(qkv_bias=True)
    source = Quantized(plain)
    tokens_BS = torch.tensor(prompts((40, 40)))
    expected = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    engine = Engine(source, device=CPU)
    torch.testing.assert_close(
        engine.runner.score(tokens_BS), expected, rtol=0, atol=tolerance(expected, plain)
    )
    rows = [row for row in engine.kernel_report() if row["layer"] == 0 and row["phase"] == "decode"]
    assert [(row["linear"], row["scheme"]) for row in rows] == [
        ("attn.q", "W4A16_G128_ASYM"),
        ("attn.k", "W8A16"),
        ("attn.v", "W4A16_G128_ASYM"),
        ("attn.o", "W4A16_G128_ASYM"),
        ("ffn.gate", "W4A16_G128_ASYM"),
        ("ffn.up", "W8A16"),
        ("ffn.down", "W4A16_G128_ASYM"),
    ]
    reference = "reference.dequantized.tile4"  # groups of 8 under a name that has 128
    byte_codes = "bags.decode" if bags_are_fast() else reference
    assert {row["scheme"]: row["kernel"] for row in rows} == {
        "W4A16_G128_ASYM": reference,
        "W8A16": byte_codes,
    }

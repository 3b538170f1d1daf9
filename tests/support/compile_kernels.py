"""Compiles the Triton kernels of attention, of rope_store, of the linear of every size, of routers and of
experts for `sm_<argument>`, on a machine without a GPU: run by a test, in a process of its own, because it
replaces triton's driver."""

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compress.kernels.act_mul import fused as act_mul
from compress.kernels.altup_add import fused as altup_add
from compress.kernels.altup_correct import fused as altup_correct
from compress.kernels.altup_first import fused as altup_first
from compress.kernels.altup_join import fused as altup_join
from compress.kernels.altup_predict import fused as altup_predict
from compress.kernels.attention_decode import paged as decode
from compress.kernels.attention_prefill import fp8_tiles, widen
from compress.kernels.attention_prefill import paged as prefill
from compress.kernels.block_choice import paged as block_choice
from compress.kernels.compressed_attention import entry_sums
from compress.kernels.compressed_attention import paged as compressed_attention
from compress.kernels.compressed_store import fused as compressed_store
from compress.kernels.delta_net import fused as delta_net
from compress.kernels.experts import fused as experts
from compress.kernels.experts import launch, packed, units
from compress.kernels.gated_mix import fused as gated_mix
from compress.kernels.gated_mix import product as gated_product
from compress.kernels.hadamard import fused as heads
from compress.kernels.head_linear import fused as head_linear
from compress.kernels.hyper_mix import fused as hyper_mix
from compress.kernels.hyper_spread import fused as hyper_spread
from compress.kernels.index_choice import largest
from compress.kernels.index_choice import paged as index_choice
from compress.kernels.index_store import fused as index_store
from compress.kernels.latent_attention import paged as latent_attention
from compress.kernels.latent_heads import fused as latent_heads
from compress.kernels.latent_store import fused as latent_store
from compress.kernels.linear import general, int8, prefill_int8, prefill_int8_passes, prefill_widened
from compress.kernels.linear.blocks import Blocks
from compress.kernels.mamba2 import fused as mamba2
from compress.kernels.operands import distance_terms, turned_rows
from compress.kernels.operands.altup import AltUpWeights
from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.gated import GatedMatrices
from compress.kernels.operands.gpu import Gpu
from compress.kernels.operands.hyper import HyperWeights
from compress.kernels.operands.paged import empty_pages
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.query_growth import QueryGrowth
from compress.kernels.operands.recurrent_states import (
    DeltaWeights,
    MambaWeights,
    RecurrentStates,
    Saving,
    Sequences,
)
from compress.kernels.operands.relative import RelativeTerm
from compress.kernels.operands.routing import ExpertWeights, router_weights
from compress.kernels.operands.rows import (
    ActivationQuant,
    Branch,
    LaurelRows,
    RowNorm,
    activation_quant,
    quantize,
)
from compress.kernels.operands.selective import ScanWeights
from compress.kernels.post_norm import fused as post_norm
from compress.kernels.problem import KernelDevice
from compress.kernels.quantize_rows import fused as quantize_rows
from compress.kernels.residual_conv import fused as residual_conv
from compress.kernels.rope_store import fused
from compress.kernels.router import fused as router
from compress.kernels.select import candidates
from compress.kernels.selective_scan import fused as selective_scan
from compress.kernels.short_conv import fused as short_conv
from compress.models.compressed import Compressed
from compress.models.delta_net import DeltaNet
from compress.models.experts import Experts
from compress.models.hyper_connection import HyperConnections
from compress.models.indexer import BlockIndexer, Indexer
from compress.models.latent import Latent
from compress.models.layer_shape import UNGATED
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.residual_conv import ResidualConvs
from compress.models.short_conv import ShortConv
from compress.quant.kv import HADAMARD_HEAD_DIMS
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


class AbsentDevice:
    """What triton asks a driver for, to compile but not to load."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_all(sm: int) -> list[Any]:
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(AbsentDevice(sm))
    prefill_int8.pdl_enabled = lambda device: sm >= 90  # type: ignore[assignment]
    prefill_int8.gpu_of = lambda device: Gpu(sm, 108, 0)  # type: ignore[assignment]
    linears = (general, prefill_int8, prefill_int8_passes, prefill_widened, head_linear)
    attentions = (decode, prefill, distance_terms, fp8_tiles, widen, fused, heads)
    latents = (latent_attention, latent_heads, latent_store)
    indexers = (largest, index_choice, index_store, block_choice)
    compressed = (entry_sums, compressed_attention, compressed_store, turned_rows)
    for module in (
        *attentions,
        *latents,
        *indexers,
        *compressed,
        hyper_mix,
        hyper_spread,
        gated_mix,
        gated_product,
        act_mul,
        *linears,
        delta_net,
        mamba2,
        selective_scan,
        short_conv,
        residual_conv,
        router,
        launch,
        quantize_rows,
    ):
        module.pdl_options = lambda device: {  # type: ignore[attr-defined]
            "PDL": sm >= 90,
            "launch_pdl": sm >= 90,
        }
    units._function = lambda num_experts, deal, device: lambda *args, **kwargs: None  # type: ignore[assignment]
    units.gpu_of = lambda device: Gpu(sm, 108, 0)  # type: ignore[assignment]
    for products in (general, launch):
        products.e4m3_factors = lambda device, native: (  # type: ignore[assignment]
            "bits" if sm < 89 else "native" if native else "converted"
        )
    for module in (quantize_rows, fp8_tiles, latent_attention, entry_sums, compressed_attention):
        module.converts_e4m3 = lambda device: sm >= 89  # type: ignore[attr-defined]
    for head_dim in (80, 128, 256, 512):
        wide = ("F32",) if head_dim > 128 else ("INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD")
        for kv_format in ("BF16", "FP8_TOKEN_HEAD", *wide):
            compile_attention(head_dim, kv_format)
    compile_attention(128, "FP8_ATTENTION")
    for kv_format in ("BF16", "F32", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD"):
        for num_heads in (16, 20, 128):
            compile_latents(num_heads, kv_format)
    for kv_format in ("BF16", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD"):
        compile_compressed(kv_format)
    compile_delta_net()
    compile_mamba2()
    compile_selective_scan()
    compile_short_conv()
    compile_residual_conv()
    compile_streams()
    compile_gated_streams()
    compile_altup()
    compile_indexers()
    compile_index_store()
    for linear in LINEARS:
        compile_linear(sm, *linear)
    for scheme in (None, "W4A16_G128", "FP8_DYNAMIC", "FP8_BLOCK", "INT8_DYNAMIC", "W8A16", "NVFP4"):
        compile_mixture(scheme)
    compile_mixture(None, activation="relu2")
    compile_mixture(None, cap=4.5)
    compile_mixture(None, activation="silu_capped", cap=10.0)
    return compiled


def compile_attention(head_dim: int, kv_format: str) -> None:
    """Compile attention and rope_store, with and without keys; the cap of scores, relative logits, ALiBi and
    norms over all heads for one head size."""
    dtype = torch.float32 if kv_format == "F32" else torch.bfloat16
    kv = empty_pages(kv_format, (2, 4, 64, head_dim))
    table = torch.zeros(2, 3, dtype=torch.int32)
    lens = torch.ones(2, dtype=torch.int32)
    q = torch.zeros(16, 8, head_dim, dtype=dtype)
    caps = (None, 50.0) if head_dim == 128 else (None,)
    for softcap in caps:
        decode.attention_decode(q, kv, table, lens, q_len=8, window=None, scale=1.0, softcap=softcap)
        prefill.attention_prefill(q, kv, table, (7, 9), (70, 9), window=50, scale=1.0, softcap=softcap)
    for growth in (None, torch.ones(16)) if head_dim == 128 else ():
        relative = RelativeTerm(torch.zeros(16, 8, 16), torch.zeros(16, 1024), growth)
        facts: dict[str, Any] = {"window": 50, "scale": 1.0, "relative": relative}
        decode.attention_decode(q, kv, table, lens, q_len=8, **facts)
        prefill.attention_prefill(q, kv, table, (7, 9), (70, 9), **facts)
    if head_dim == 128:
        facts = {"window": None, "scale": 1.0, "slopes_H": torch.ones(8)}
        decode.attention_decode(q, kv, table, lens, q_len=8, **facts)
        prefill.attention_prefill(q, kv, table, (7, 9), (70, 9), **facts)
    if kv_format == "FP8_ATTENTION":
        fp8_tiles.laid_out(kv, table, (70, 9))
    qkv = torch.zeros(16, 12 * head_dim, dtype=q.dtype)
    rope = torch.zeros(8, head_dim, dtype=q.dtype)
    rows = torch.zeros(16).long()
    if head_dim in HADAMARD_HEAD_DIMS:
        heads.hadamard(q)
    variants = ((False, False, 0), (True, False, 0), (False, True, 0))[: 3 if head_dim == 128 else 1]
    leading = ((False, False, 64),) if head_dim == 256 else ()
    for whole, turned, leading_dim in (*variants, *leading):
        weights = torch.zeros(10, head_dim, dtype=torch.float32 if whole else q.dtype)
        for num_stored, num_normed in ((12, 10), (8, 8)):
            fused.rope_store(
                qkv[:, : num_stored * head_dim],
                rope,
                rope,
                rows,
                rows,
                kv,
                num_heads=8,
                qk_norm=weights[:num_normed],
                eps=1e-5,
                whole=whole,
                rotates_first=turned,
                centered=whole,
                growth_P=rope[:, 0].contiguous() if whole else None,
                hadamard=whole,
                leading_dim=leading_dim,
                early=num_stored == 8,
            )
    if head_dim == 128:
        normed = torch.zeros(10, head_dim)
        biased = {"num_heads": 8, "qk_norm": normed, "qk_bias": normed, "eps": 1e-5, "centered": True}
        fused.rope_store(qkv, rope, rope, rows, rows, kv, **biased)
    if head_dim == 256:
        narrow = {"num_heads": 8, "qk_norm": None, "eps": 1e-5, "leading_dim": 64, "value_dim": 128}
        fused.rope_store(qkv[:, : 10 * head_dim + 2 * 128], rope, rope, rows, rows, kv, **narrow)


def compile_latents(num_heads: int, kv_format: str) -> None:
    """Compile the kernels of latent attention with the widths of DeepSeek-V3, and those of a layer that
    encodes no positions or reads the latents of another."""
    dtype = torch.float32 if kv_format == "F32" else torch.bfloat16
    facts = Latent(1536, 512, 64, 128, True)
    pages = PagedLatents.empty(kv_format, 4, 64, facts.cached_width, torch.device("cpu"))
    first = torch.zeros(16, num_heads * 192 + facts.cached_width, dtype=dtype)
    rope = torch.zeros(8, 64, dtype=dtype)
    rows = torch.zeros(16).long()
    for quant in (ActivationQuant(group_size=128), ActivationQuant(dtype=torch.int8), None):
        q = latent_store.latent_store(
            first[:, : -facts.cached_width],
            first[:, -facts.cached_width :],
            RowNorm(torch.ones(512, dtype=dtype), 1e-6),
            rope,
            rope,
            rows,
            rows,
            pages,
            latent=facts,
            head_dim=192,
            quant=quant,
        )
    absorbed = head_linear.head_linear(q[..., :128], torch.zeros(num_heads, 512, 128, dtype=dtype))
    table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for sinks in (None, torch.zeros(num_heads)):
        latent_attention.latent_attention(absorbed, q, pages, table, lens, q_len=8, scale=1.0, sinks_H=sinks)
    kv = torch.zeros(16, num_heads * 256, dtype=dtype)
    k, v = torch.zeros(2, num_heads, 32, 192, dtype=dtype)[:, :, 16:]
    latent_heads.latent_heads(kv, first[:, -64:], k, v, latent=facts, head_dim=192)
    unrotated = Latent(0, 512, 0, 128, True)
    pages = PagedLatents.empty(kv_format, 4, 64, 512, torch.device("cpu"))
    norm = RowNorm(torch.ones(512, dtype=dtype), 1e-6)
    for latents, of_layer in ((first[:, -512:], unrotated), (None, unrotated), (None, facts)):
        tables = rope[:, : of_layer.rope_dim], rope[:, : of_layer.rope_dim], rows, rows, pages
        own_norm = None if latents is None else norm
        q_TF = first[:, : num_heads * 192]
        latent_store.latent_store(q_TF, latents, own_norm, *tables, latent=of_layer, head_dim=192)
    latent_attention.latent_attention(absorbed, q, pages, table, lens, q_len=8, scale=1.0)
    kv = torch.zeros(16, num_heads * 320, dtype=dtype)
    latent_heads.latent_heads(kv, rope[:, :0].repeat(2, 1), k, v, latent=unrotated, head_dim=192)


def compile_compressed(kv_format: str) -> None:
    """Compile the kernels of compressed attention with the widths of DeepSeek-V4-Flash: of layers without
    entries, with chosen ones of 4 positions, and with those of 128."""
    head_dim, num_heads, index_dim = 512, 64, 128
    norm = RowNorm(torch.ones(head_dim).bfloat16(), 1e-6)
    tables = torch.zeros(8, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
    rows = torch.zeros(3).long()
    few = Compressed(1024, 64, 8, 1024, rate=4, overlaps=True)
    for facts in (Compressed(1024, 64, 8, 1024), few, Compressed(1024, 64, 8, 1024, rate=128)):
        raw_width, chosen = facts.raw_width(head_dim), facts is few
        width = raw_width + (facts.raw_width(index_dim) if chosen else 0)
        pages = PagedLatents.empty(kv_format, 40, 64, head_dim + width, torch.device("cpu"))
        first = torch.zeros(3, 1024 + head_dim).bfloat16()
        q = torch.zeros(3, num_heads * head_dim).bfloat16()
        if pages.scale is None:
            raw = first.new_zeros(3, width) if width else None
            compressed_store.compressed_store(q, first[:, 1024:], raw, norm, *tables, rows, rows, pages)

        def weights(of: RowNorm, facts: Compressed = facts) -> EntryWeights:
            return EntryWeights(facts, torch.zeros(facts.rate, facts.raw_width(len(of.weight)) // 2), of)

        choice = None
        if chosen:
            scored = weights(RowNorm(torch.ones(index_dim).bfloat16(), 1e-6))
            choice = EntryChoice(scored, 512, first.new_zeros(3, 64, index_dim), torch.zeros(3, 64))
        compressed_attention.compressed_attention(
            q.view(3, num_heads, head_dim),
            pages,
            weights(norm) if facts.rate else None,
            *tables,
            torch.zeros(2, 39, dtype=torch.int32),
            torch.tensor([0, 0, 1]),
            rows,
            window=128,
            scale=0.3,
            sinks_H=torch.zeros(num_heads),
            choice=choice,
        )


def compile_delta_net() -> None:
    """Compile the kernels of a delta net with the widths of Qwen3.5, Kimi Linear and Ling 3.0, for a step and
    for a prompt."""
    _compile_delta_net(DeltaNet(4, 2, 128, 128, 4))
    _compile_delta_net(DeltaNet(4, 4, 128, 128, 4, rank=128, by_channel=True))
    _compile_delta_net(DeltaNet(4, 4, 128, 128, 4, by_channel=True, decay_bound=5.0))


def _compile_delta_net(facts: DeltaNet) -> None:
    states = RecurrentStates.empty(facts, 2, 3, torch.device("cpu"))
    saved = RecurrentStates.empty(facts, 2, 1, torch.device("cpu"))
    saving = Saving(saved.inputs, saved.heads, torch.zeros(2, 2, dtype=torch.int32))
    conv, norm = torch.zeros(facts.num_channels, 4).bfloat16(), torch.zeros(128).bfloat16()
    weights = DeltaWeights(conv, torch.zeros(4), torch.zeros(facts.num_decays), norm, 1e-6)
    num_gates = facts.num_heads + facts.num_decays
    x = torch.zeros(6, facts.num_channels + facts.value_size).bfloat16()
    sequences = Sequences.of_decode(torch.zeros(2, 1).long()[:, 0], torch.ones(2, dtype=torch.int32), 3)
    delta_net.delta_net(x, torch.zeros(6, 1024)[:, :num_gates], weights, states, sequences)
    rows = delta_net.SHORT_ROWS + 1
    for dtype in (torch.bfloat16, torch.float32):
        x_TF = x.new_zeros(rows, x.shape[1]).to(dtype)
        in_dtype = replace(weights, conv_FW=conv.to(dtype), norm_V=norm.to(dtype))
        prompt = Sequences.of_prefill(torch.zeros(1).long(), (rows,), (rows,))
        for each in (states, replace(states, saving=saving)):
            delta_net.delta_net(x_TF, torch.zeros(rows, num_gates), in_dtype, each, prompt)


def compile_mamba2() -> None:
    """Compile the kernels of Mamba-2 mixers with the widths of Granite 4, Nemotron Nano 2 and Falcon-H1 34B,
    and of lightning attention in MiniMax-Text-01, for a step and for prompts, with a norm of all heads and of
    groups, and without one."""
    wide = Mamba2(128, 1, 128, 64, 4, conv_bias=True), Mamba2(128, 8, 128, 80, 4, conv_bias=True)
    for facts in (
        *wide,
        Mamba2(24, 1, 24, 16, 4, conv_bias=True),
        Mamba2(32, 2, 256, 128, 4, conv_bias=True),
        Mamba2(64, 64, 128, 128, 1, conv_bias=False),
    ):
        compile_mamba2_of(facts)


def compile_mamba2_of(facts: Mamba2) -> None:
    """Compile those of one width."""
    states = RecurrentStates.empty(facts, 2, 3, torch.device("cpu"))
    saved = RecurrentStates.empty(facts, 2, 1, torch.device("cpu"))
    saving = Saving(saved.inputs, saved.heads, torch.zeros(2, 2, dtype=torch.int32))
    step = Sequences.of_decode(torch.zeros(2, 1).long()[:, 0], torch.ones(2, dtype=torch.int32), 3)
    width = facts.num_channels + facts.value_size + facts.num_heads
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        conv, bias = (
            torch.zeros(facts.num_channels, *rest, dtype=dtype) for rest in ((facts.kernel_size,), ())
        )
        norm = torch.zeros(facts.value_size, dtype=dtype)
        zeros = torch.zeros(facts.num_heads)
        weights = MambaWeights(conv, bias, zeros, zeros, zeros, norm, 1, 1e-5)
        mamba2.mamba2(torch.zeros(6, width, dtype=dtype), weights, states, step)
        in_groups = replace(weights, conv_bias_F=None, norm_groups=8)
        for num_rows in (40, 1000):
            prompt = Sequences.of_prefill(torch.zeros(1).long(), (num_rows,), (num_rows,))
            rows_TF = torch.zeros(num_rows, width, dtype=dtype)
            mamba2.mamba2(rows_TF, weights, states, prompt)
            mamba2.mamba2(rows_TF, in_groups, replace(states, saving=saving), prompt)
            mamba2.mamba2(rows_TF, replace(weights, norm_Z=None), states, prompt)


def compile_selective_scan() -> None:
    """Compile the recurrence of Mamba-1 mixers with the widths of Jamba 1.5 Mini, for a step and for prompts,
    and of wider states."""
    of_all = torch.bfloat16, torch.float16, torch.float32
    for state_size, dtypes in ((16, of_all), (64, of_all[2:]), (128, of_all[2:])):
        compile_selective_scan_of(Mamba1.of(8192, state_size, 4, 256, conv_bias=True), dtypes)


def compile_selective_scan_of(facts: Mamba1, dtypes: tuple[torch.dtype, ...]) -> None:
    """Compile the recurrence of Mamba-1 mixers with the widths of `facts`, for a step and for prompts."""
    states = RecurrentStates.empty(facts, 2, 3, torch.device("cpu"))
    saved = RecurrentStates.empty(facts, 2, 1, torch.device("cpu"))
    saving = Saving(saved.inputs, saved.heads, torch.zeros(2, 2, dtype=torch.int32))
    step = Sequences.of_decode(torch.zeros(2, 1).long()[:, 0], torch.ones(2, dtype=torch.int32), 3)
    prompts = [Sequences.of_prefill(torch.zeros(1).long(), (each,), (each,)) for each in (6, 40)]
    zeros = torch.zeros(facts.value_size)
    weights = ScanWeights(torch.zeros(facts.value_size, facts.key_dim), zeros, zeros)
    for dtype in dtypes:
        for sequences in (step, *prompts):
            num_rows = sum(sequences.query_lens)
            x_TV = torch.zeros(num_rows, facts.value_size, dtype=dtype)
            bc_TK = torch.zeros(num_rows, 2 * facts.key_dim, dtype=dtype)
            operands = (x_TV, x_TV, x_TV, bc_TK, weights)
            selective_scan.selective_scan(*operands, states, sequences)
            if sequences is not step:
                selective_scan.selective_scan(*operands, replace(states, saving=saving), sequences)


def compile_short_conv() -> None:
    """Compile the kernels of a short convolution with the widths of LFM2, for a step and for a prompt."""
    facts = ShortConv.of(2048, 3)
    states = RecurrentStates.empty(facts, 2, 3, torch.device("cpu"))
    saved = RecurrentStates.empty(facts, 2, 1, torch.device("cpu"))
    saving = Saving(saved.inputs, saved.heads, torch.zeros(2, 2, dtype=torch.int32))
    step = Sequences.of_decode(torch.zeros(2, 1).long()[:, 0], torch.ones(2, dtype=torch.int32), 3)
    prompt = Sequences.of_prefill(torch.zeros(1).long(), (6,), (6,))
    for dtype in (torch.bfloat16, torch.float32):
        rows_TF = torch.zeros(6, 3 * facts.num_channels, dtype=dtype)
        conv_FW = torch.zeros(facts.num_channels, facts.kernel_size, dtype=dtype)
        short_conv.short_conv(rows_TF, conv_FW, states, step)
        for each in (states, replace(states, saving=saving)):
            short_conv.short_conv(rows_TF, conv_FW, each, prompt)


def compile_residual_conv() -> None:
    """Compile the kernels of convolutions with a residual with the widths of Inkling-Small, for a step and
    for a prompt."""
    facts = ResidualConvs.of(1024, 4096, 4)
    states = RecurrentStates.empty(facts, 2, 3, torch.device("cpu"))
    saved = RecurrentStates.empty(facts, 2, 1, torch.device("cpu"))
    saving = Saving(saved.inputs, saved.heads, torch.zeros(2, 2, dtype=torch.int32))
    step = Sequences.of_decode(torch.zeros(2, 1).long()[:, 0], torch.ones(2, dtype=torch.int32), 3)
    prompt = Sequences.of_prefill(torch.zeros(1).long(), (6,), (6,))
    for first, size in ((0, 2048), (2048, 4096)):
        for dtype in (torch.bfloat16, torch.float32):
            rows_TF = torch.zeros(6, size, dtype=dtype)
            conv_FW = torch.zeros(size, facts.kernel_size)
            for each, sequences in (
                (states, step),
                (states, prompt),
                (replace(states, saving=saving), prompt),
            ):
                residual_conv.residual_conv(rows_TF, conv_FW, each, sequences, first_channel=first)


def compile_indexers() -> None:
    """Compile the kernels of indexers of the widths that models have, over contexts of one tile of scores and
    of several."""
    for dtype, num_blocks in ((torch.bfloat16, 600), (torch.float32, 40)):
        pages = PagedLatents(torch.zeros(1, 8, 64, 128, dtype=dtype))
        table = torch.zeros(6, num_blocks, dtype=torch.int64)
        ends = torch.ones(6, dtype=torch.int64)
        for num_heads in (16, 64):
            q = torch.zeros(6, num_heads, 128, dtype=dtype)
            index_choice.index_choice(q, torch.zeros(6, num_heads), pages, table, ends, top_k=2048)
        cos_sin = [torch.zeros(100, 64, dtype=dtype)] * 2
        for facts in (
            BlockIndexer(4, 128, block_size=128, top_blocks=16),
            BlockIndexer(8, 128, block_size=16, top_blocks=128, pooled=True),
        ):
            keys = BlockKeys(facts, RowNorm(torch.ones(128, dtype=dtype), 1e-6), 64, *cos_sin)
            q = torch.zeros(6, facts.num_heads, 128, dtype=dtype)
            block_choice.block_choice(q, keys, pages, table, ends)


def compile_index_store() -> None:
    """Compile the kernel that stores the keys of an indexer and turns its queries, with the widths of
    DeepSeek-V3.2, GLM-5, Hy4, Mistral Large 4 and GLM-5.3."""
    rows = torch.zeros(6).long()
    norm = RowNorm(torch.ones(128), 1e-6, centered=True, bias=torch.zeros(128))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for facts, rope_dim in (
            (Indexer(64, 128, 2048), 64),
            (Indexer(32, 128, 2048, interleaved=True), 64),
            (Indexer(32, 128, 2048, interleaved=True, rope_last=True), 64),
            (Indexer(64, 128, 2048, of_stream=True, interleaved=True), 64),
            (Indexer(32, 128, 2047, pool_size=4), 0),
        ):
            k = torch.zeros(6, 128, dtype=dtype)
            table = torch.zeros(8, 64, dtype=dtype)[:, :rope_dim]
            grows = QueryGrowth(torch.zeros(8, dtype=dtype), torch.zeros(2, facts.num_heads, dtype=dtype))
            index_store.index_store(
                torch.zeros(6, facts.num_heads * 128, dtype=dtype),
                k,
                torch.zeros(6, facts.num_heads),
                norm,
                table,
                table,
                rows,
                rows,
                PagedLatents(torch.zeros(1, 4, 64, facts.cached_numbers, dtype=dtype)),
                facts=facts,
                gate_TI=k if facts.pool_size else None,
                growth=grows if facts.of_stream else None,
            )


def compile_streams() -> None:
    """Compile the kernels of hyper-connections with the widths of Hy4, for a half-layer and for the head,
    with streams as they are and mixed."""
    for iterations in (0, 20):
        facts = HyperConnections(4, 1e-6, sinkhorn_iterations=iterations)
        for dtype in (torch.bfloat16, torch.float32):
            streams = torch.zeros(6, 4 * 2816, dtype=dtype)
            norm = RowNorm(torch.ones(2816, dtype=dtype), 1e-5)
            for of_head in (False, True):
                shapes = facts.shapes(2816, of_head=of_head)
                weight, bias, gains = (torch.zeros(shapes[leaf]) for leaf in ("weight", "bias", "gains"))
                weights = HyperWeights(facts, 1e-5, weight, bias, gains)
                for quant in (None, ActivationQuant()):
                    _, factors = hyper_mix.hyper_mix(streams, weights, norm, quant)
                if factors is not None:
                    hyper_spread.hyper_spread(streams[:, :2816], streams, factors)


def compile_gated_streams() -> None:
    """Compile the kernels of gated residuals with the widths of Qwen4, and with the largest rank."""
    for dtype in (torch.bfloat16, torch.float32):
        for rank in (320, gated_mix.MAX_RANK):
            streams = torch.zeros(6, 4 * 2048, dtype=dtype)
            down, up = torch.zeros(rank + 4, 4 * 2048, dtype=dtype), torch.zeros(4 * 2048, rank, dtype=dtype)
            norm = RowNorm(torch.ones(4, 2048), 1e-6)
            for of_head in (False, True):
                matrices = GatedMatrices(down[:rank] if of_head else down, up)
                gated_mix.gated_mix(streams, matrices, norm)
                gated_product.gated_mix(streams, matrices, norm)


def compile_altup() -> None:
    """Compile the kernels of AltUp, of LAuReL's sum and of sparse gates with the widths of Gemma 3n, and of
    odd ones."""
    for dtype, n, size, ffn in (
        (torch.bfloat16, 4, 2048, 16384),
        (torch.float32, 4, 2048, 8192),
        (torch.bfloat16, 3, 65, 99),
    ):
        streams, x = torch.zeros(6, n * size, dtype=dtype), torch.zeros(6, size, dtype=dtype)
        products = [torch.zeros(6, size)] * (n - 1)
        norm = RowNorm(torch.ones(size, dtype=dtype), 1e-6)
        small = torch.zeros(n * n, n), torch.zeros(n, n)
        weights = AltUpWeights(norm, torch.zeros(n, size, dtype=dtype), *small, norm.weight)
        altup_first.altup_first(x, products)
        for quant in (None, ActivationQuant()):
            altup_predict.altup_predict(streams, weights, norm, quant)
            act_mul.act_mul(torch.zeros(6, 2 * ffn, dtype=dtype), "gelu_pytorch_tanh", quant, sparsity=0.95)
        altup_correct.altup_correct(x, streams, weights)
        altup_add.altup_add_(x, streams, norm)
        altup_join.altup_join(streams, products)
        laurel = LaurelRows(x, Branch(x, norm))
        post_norm.post_norm(x, streams[:, :size], norm, norm, scale=0.5, laurel=laurel)


LINEARS = (
    (None, 80),
    ("W4A16_G64", 192),
    ("W4A16_CHANNEL_ASYM", 80),
    ("FP8_DYNAMIC", 80),
    ("FP8_BLOCK", 256),
    ("INT8_DYNAMIC", 144),
    ("INT8_STATIC_ASYM", 144),
    ("W8A16", 80),
    ("MXFP4", 160),
    ("NVFP4", 80),
)
"""Schemes and inputs of linears."""


def compile_linear(sm: int, name: str | None, k: int) -> None:
    """Compile a linear of the rows of a prompt."""
    weight = torch.ones(64, k, dtype=torch.bfloat16)
    scheme = SCHEMES[name] if name is not None else None
    device = KernelDevice("cuda", sm, torch.bfloat16)
    problem = device.problem("linear", n=64, k=k, phase="prefill", scheme=name)
    served = [each for each in candidates("linear") if each.refusal(problem) is None]
    kernel = next(each for each in served if each.name.startswith("triton."))
    assert kernel.repack is not None
    quantized = weight if scheme is None else nearest_weight(weight, scheme, torch.bfloat16)
    ready = kernel.repack([quantized], dtype=torch.bfloat16, device=torch.device("cpu"), gated=False)
    x_TI: Any = torch.ones(512, k, dtype=torch.bfloat16)
    if scheme is not None and scheme.activation is not None:
        static = (torch.tensor(0.5), torch.tensor(-3)) if scheme.activation == "tensor" else ()
        x_TI = quantize(x_TI, activation_quant(scheme, *static))
    kernel.fn(x_TI, ready, None)
    if isinstance(ready, Blocks) and ready.matrices.format in prefill_widened.WIDENED:
        prefill_widened.dequantize(ready, 0, 64)
    if name in int8.SCHEMES:
        compile_int8(sm, x_TI, ready)


def compile_int8(sm: int, rows: Any, ready: Any) -> None:
    """Compile every tile of the linear of int8 with its whole end, and the end of the linear of two
    passes."""
    bias = torch.zeros(64, dtype=torch.bfloat16)
    residual = torch.zeros(512, 64, dtype=torch.bfloat16)
    for tile, _ in prefill_int8.TILES[sm]:
        prefill_int8.linear(rows, ready, bias, residual_TO=residual, tile=tile)
    prefill_int8.linear(rows, ready, bias, out_dtype=torch.float32)
    prefill_int8_passes.linear(rows, ready, bias, residual_TO=residual)


def compile_mixture(name: str | None, *, activation: str = "silu", cap: float | None = None) -> None:
    """Compile the router of a prompt, and the experts of a prompt and of one decode row, of 16 and of 64."""
    scheme = SCHEMES[name] if name is not None else None

    def weight(out_features: int, in_features: int) -> Any:
        ones = torch.ones(out_features, in_features, dtype=torch.bfloat16)
        return ones if scheme is None else nearest_weight(ones, scheme, torch.bfloat16)

    gate = None if activation in UNGATED else weight(256, 384)
    one = ExpertWeights(gate, weight(256, 384), weight(384, 256))
    cpu = torch.device("cpu")
    ready = packed.repack([one] * 8, dtype=torch.bfloat16, device=cpu)
    weights = router_weights(torch.ones(8, 384), None, None, dtype=torch.bfloat16, device=cpu)
    facts = Experts(8, 2, 256, renormalize=True)
    x_TD = torch.ones(64, 384, dtype=torch.bfloat16)
    ids, shares = router.route_many(x_TD, weights, facts)
    how = {"activation": activation, "cap": cap}
    experts.prefill(x_TD, ready, ids, shares, **how, residual_TD=x_TD)
    for num_rows in (1, 16, 64) if ready.format not in packed.DECODED_IN_SLICES else ():
        few = [each[:num_rows].contiguous() for each in (x_TD, ids, shares)]
        experts.decode(few[0], ready, *few[1:], **how, residual_TD=few[0])


if __name__ == "__main__":
    device_sm = int(sys.argv[1])
    for kernel in compile_all(device_sm):
        assert kernel.metadata.shared <= SHARED_BYTES[device_sm], (
            f"{kernel.metadata.name} needs {kernel.metadata.shared} bytes"
        )

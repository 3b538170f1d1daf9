"""What doctor says about kernels is what a loader would get: the same choice, every op, and a reason for
whatever stays unused.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.kernels import select as select_module
from compress.kernels.coverage import LINEARS, coverage, linear_shape, linear_shapes, unused
from compress.kernels.problem import EXPERT_OPS, OPS, KernelDevice, Problem
from compress.kernels.select import KERNELS, Kernel, anything, refusals, select
from compress.models.arch import Arch
from compress.models.compressed import Compressed
from compress.models.experts import Experts
from compress.models.indexer import EntryIndexer
from compress.models.layer_shape import Rope
from compress.models.mamba2 import Mamba2
from compress.plugins import PluginSet
from compress.quant.scheme import SCHEMES
from tests.support.tiny_decoder import LLAMA, tiny_arch
from tests.support.tiny_source import LIKE_LARGE4, tiny_shape, tiny_source

CPU = KernelDevice("cpu", 0, torch.float32)
ARCH = tiny_arch(LLAMA, hidden_size=128, intermediate_size=256, head_dim=32)
EXPERTS = Experts(8, 2, 96, shared_size=64, num_groups=2, top_groups=1, score="sigmoid")
DENSE_FIRST = (ARCH.layers[0], replace(ARCH.layers[1], intermediate_size=96, experts=EXPERTS))
MIXTURE = ARCH.replace(layers=DENSE_FIRST, attn_sinks=True)


def only(problem: Problem) -> str | None:
    return None if problem.activation else "wants an activation"


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A set of linear kernels for the test alone, on top of a reference that applies no activation."""

    def replaced(*kernels: Kernel) -> None:
        plugins: PluginSet[Kernel] = PluginSet("linear kernel", "compress.kernels.rope_store")
        plugins._loaded = True
        for kernel in (
            kernel_named(
                "reference",
                priority=0,
                supports=lambda problem: "no activation" if problem.activation else None,
            ),
            *kernels,
        ):
            plugins.add(kernel.name, kernel)
        monkeypatch.setitem(select_module.KERNELS, "linear", plugins)

    return replaced


def kernel_named(name: str, *, priority: int = 10, min_sm: int = 0, supports: Any = anything) -> Kernel:
    return Kernel("linear", name, min_sm=min_sm, priority=priority, supports=supports, fn=lambda: None)


@pytest.mark.parametrize("arch", [ARCH, MIXTURE])
def test_every_op_of_a_model_is_answered_by_the_kernel_that_would_be_selected(arch: Arch) -> None:
    rows = coverage(arch, CPU)
    assert {row.problem.op for row in rows} == set(OPS) - set(() if arch.has_experts else EXPERT_OPS)
    assert all(row.kernel == select(row.problem).name for row in rows)


def test_every_scheme_and_linear_is_listed() -> None:
    rows = coverage(ARCH, CPU)
    asked = {(row.problem.scheme, row.name, row.phase) for row in rows if row.problem.op == "linear"}
    assert asked == {
        (scheme, name, phase)
        for scheme in ("F32", *SCHEMES)
        for name in LINEARS
        for phase in ("decode", "prefill")
    }


def test_fused_linears_stack_the_rows_of_their_parts() -> None:
    layer = ARCH.layers[0]
    arch = ARCH
    parts = {
        "qkv": ("attn.q", "attn.k", "attn.v"),
        "o": ("attn.o",),
        "gate_up": ("ffn.gate", "ffn.up"),
        "down": ("ffn.down",),
    }
    for name, linears in parts.items():
        shapes = [layer.linear_shape(linear, arch.hidden_size) for linear in linears]
        assert linear_shape(arch, name) == (sum(rows for rows, _ in shapes), shapes[0][1])
    assert linear_shape(arch, "head") == (arch.vocab_size, arch.hidden_size)


def test_a_dense_first_layer_and_the_experts_of_the_others_are_listed() -> None:
    shapes = dict(linear_shapes(MIXTURE))
    assert shapes["gate_up"] == (512, 128)
    assert shapes["shared.gate_up"] == (128, 128)
    assert shapes["shared.down"] == (128, 64)
    rows = coverage(MIXTURE, CPU)
    (router, _) = (row.problem for row in rows if row.problem.op == "router")
    assert (router.experts, router.top_k, router.expert_groups) == (8, 2, 2)
    experts = [row.problem for row in rows if row.problem.op == "experts"]
    assert {(each.n, each.k) for each in experts} == {(128, 96)}
    assert "W4A16_G64" not in {each.scheme for each in experts}  # 96 columns are no whole groups of 64
    assert {each.scheme for each in experts} >= {"F32", "W4A16_G32", "FP8_DYNAMIC"}
    assert all(row.problem.sinks for row in rows if row.problem.op.startswith("attention"))


def test_latents_of_layers_with_positions_and_without_have_kernels_of_their_own() -> None:
    arch = tiny_source(**LIKE_LARGE4).arch
    rows = coverage(arch, CPU)
    latents = [(layer.head_dim, layer.latent) for layer in arch.layers if layer.latent is not None]
    stored = {(row.problem.n, row.problem.k) for row in rows if row.name == "latent_store"}
    assert stored == {(latent.kv_rank, latent.rope_dim) for _, latent in latents}
    assert len(stored) == 2
    absorbed = {(row.problem.n, row.problem.k) for row in rows if row.name == "head_linear"}
    assert absorbed >= {(latent.kv_rank, dim - latent.rope_dim) for dim, latent in latents}


def test_experts_that_act_on_latents_are_as_wide_as_these_and_their_router_as_the_model() -> None:
    latent = replace(EXPERTS, latent_size=32)
    rows = coverage(MIXTURE.replace(layers=(MIXTURE.layers[0], replace(ARCH.layers[1], experts=latent))), CPU)
    assert {row.problem.k for row in rows if row.name == "router"} == {128}
    assert {(row.problem.n, row.problem.k) for row in rows if row.name == "experts"} == {(32, 96)}
    schemes = {row.problem.scheme for row in rows if row.name == "experts"}
    assert "W4A16_G32" in schemes
    assert "W4A16_G64" not in schemes


def test_a_router_has_rows_for_experts_without_weights_and_normed_outputs_are_computed_one_by_one() -> None:
    hopper = KernelDevice("cuda", 90, torch.bfloat16)
    plain = replace(EXPERTS, num_groups=1, top_groups=1)
    zero = replace(plain, zero_experts=5)
    normed = replace(plain, latent_size=32, latent_norms=True, router_scale=0.2)
    for facts, sizes, choices in (
        (zero, {EXPERTS.num_experts + 5}, {EXPERTS.top_k}),
        (normed, {EXPERTS.num_experts}, {1}),
    ):
        layers = (MIXTURE.layers[0], replace(ARCH.layers[1], experts=facts))
        rows = coverage(MIXTURE.replace(layers=layers), hopper)
        routers = [row for row in rows if row.name == "router"]
        assert {row.problem.n for row in routers} == sizes
        assert {select(row.problem).name for row in routers} == {"cuda.warps", "triton.product"}
        assert {row.problem.top_k for row in rows if row.name == "experts"} == choices


def test_experts_in_groups_that_are_no_power_of_two_fall_back_in_prompts() -> None:
    hopper = KernelDevice("cuda", 90, torch.bfloat16)
    for count, groups, refused in ((96, 6, True), (96, 8, False), (64, 8, False)):
        facts = {"n": count, "k": 128, "experts": count, "top_k": 4, "expert_groups": groups}
        reason = refusals(hopper.problem("router", phase="prefill", **facts)).get("triton.product", "")
        assert ("power of two" in reason) == refused
        assert select(hopper.problem("router", **facts)).name == "cuda.warps"


@pytest.mark.parametrize(
    ("num_heads", "width", "dtype", "is_held"),
    [
        (64, 128, torch.bfloat16, True),
        (64, 128, torch.float32, True),
        (64, 129, torch.float32, False),
        (64, 512, torch.bfloat16, False),
        (257, 128, torch.bfloat16, False),
    ],
    ids=str,
)
def test_an_indexer_wider_than_shared_memory_leaves_compressed_attention_to_the_reference(
    num_heads: int, width: int, dtype: torch.dtype, is_held: bool
) -> None:
    indexer = EntryIndexer(num_heads, width, 9, 4)
    facts = Compressed(24, 8, 2, 16, 4, overlaps=True, indexer=indexer)
    shape = {"num_kv_heads": 1, "head_dim": 32, "rope": Rope(1e4, rotary_dim=8), "window": 9}
    plain = replace(facts, rate=0, indexer=None, overlaps=False)
    layers = (tiny_shape(**shape, compressed=facts), tiny_shape(**shape, compressed=plain))
    arch = tiny_source(layers=layers, attn_sinks=True).arch
    rows = [
        row
        for row in coverage(arch, KernelDevice("cuda", 90, dtype))
        if row.problem.op == "compressed_attention"
    ]
    of_layers = {row.problem.indexer: row for row in rows}
    assert of_layers.keys() == {(num_heads, width), (0, 0)}
    assert of_layers[0, 0].kernel == "triton.paged"
    own = of_layers[num_heads, width]
    assert own.kernel == ("triton.paged" if is_held else "reference")
    assert is_held or f"{num_heads} heads of {width} numbers take" in own.refused["triton.paged"]


def test_every_shape_of_layers_that_differ_is_listed() -> None:
    mamba = Mamba2(3, 1, 16, 32, 4, conv_bias=True)
    wide = tiny_shape(head_dim=64, num_heads=2, num_kv_heads=2)
    arch = tiny_source(layers=(tiny_shape(recurrence=mamba, rope=None), tiny_shape(), wide)).arch
    in_layer = [arch.layers[idx].group_shape(arch.layers[idx].groups[0], arch.hidden_size) for idx in (1, 2)]
    shapes = [shape for name, shape in linear_shapes(arch) if name == "qkv"]
    assert shapes == [(256, arch.hidden_size), *in_layer]  # 227 rows of the mixer, padded as they are served
    heads = {(each.problem.n, each.problem.k) for each in coverage(arch, CPU) if each.name == "rope_store"}
    assert heads == {(layer.head_dim, layer.num_heads // layer.num_kv_heads) for layer in arch.layers[1:]}


def gate_up(arch: Arch, scheme: str) -> list[str | None]:
    """Kernel of decode, then of prefill."""
    return [
        row.kernel for row in coverage(arch, CPU) if row.name == "gate_up" and row.problem.scheme == scheme
    ]


def test_a_gated_kernel_serves_the_gate_of_decode(linears: Any) -> None:
    linears(kernel_named("gated", supports=only))
    assert gate_up(ARCH, "W4A16_G128") == ["gated", "reference"]
    assert gate_up(ARCH, "FP8_DYNAMIC") == ["gated", "reference"]


def test_what_stays_unused_says_why(linears: Any) -> None:
    linears(kernel_named("hopper", min_sm=90), kernel_named("fast", priority=20), kernel_named("slow"))
    rows = coverage(ARCH, CPU)
    reasons = {row["kernel"]: row["reason"] for row in unused(rows) if row["op"] == "linear"}
    assert reasons == {
        "hopper": "needs sm_90 or newer and this device is cpu",
        "slow": "a faster one serves all it could",
    }
    assert all(row.refused == {} for row in rows if row.problem.op == "linear")


def test_a_faster_kernel_that_refuses_is_named_beside_the_one_that_serves(linears: Any) -> None:
    linears(kernel_named("hopper", min_sm=90))
    row = next(row for row in coverage(ARCH, CPU) if row.problem.op == "linear")
    assert (row.kernel, row.refused) == (
        "reference",
        {"hopper": "needs sm_90 or newer and this device is cpu"},
    )


@pytest.mark.parametrize(
    "scheme", [name for name in SCHEMES if name.startswith("W4A16") and "G128" not in name]
)
def test_a_vocabulary_that_fills_no_tile_is_served_by_the_reference_which_says_why(scheme: str) -> None:
    """On Hopper too."""
    wide = tiny_arch(LLAMA, hidden_size=1024, intermediate_size=2048)
    rows = [
        row
        for row in coverage(wide, KernelDevice("cuda", 90, torch.bfloat16))
        if row.problem.scheme == scheme and row.name == "head"
    ]
    assert {row.phase: row.kernel for row in rows} == {
        "decode": "reference.dequantized.tile4",
        "prefill": "reference.dequantized.tile256",
    }
    for row in rows:
        assert row.refused["stream.w4a16"] == "for W4A16_G128, W4A16_G128_ASYM"
        assert row.refused["w4a16.dequantize"] == "N = 61 is no multiple of 16"


def test_nobody_serving_is_said_rather_than_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    empty: PluginSet[Kernel] = PluginSet("rms_norm kernel", "compress.kernels.rms_norm")
    empty._loaded = True
    monkeypatch.setitem(KERNELS, "rms_norm", empty)
    row = next(row for row in coverage(ARCH, CPU) if row.problem.op == "rms_norm")
    assert row.kernel is None
    assert row.as_json()["kernel"] is None

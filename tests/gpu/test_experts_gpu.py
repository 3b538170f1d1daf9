"""Routers and experts on a GPU: odd shapes against the reference, a row's bits in any company, captured
launches, and whole engines over mixtures."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.experts import fused, packed, reference
from compress.kernels.operands.routing import router_weights
from compress.kernels.problem import KernelDevice
from compress.kernels.router import fused as router_fused
from compress.kernels.router import reference as router_reference
from compress.kernels.router import warps
from compress.kernels.select import select
from compress.models.experts import Experts
from compress.models.layer_shape import UNGATED
from compress.models.random_source import RandomSource
from compress.quant.scheme import SCHEMES
from compress.runtime import expert_loader
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative
from tests.gpu.test_rare_facts_gpu import LAYER, LOCAL, make_arch, make_requests, make_source, run
from tests.support.random_experts import randn, random_experts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_is_nan")]
CUDA = torch.device("cuda")
ROWS = 512
COMPANIES = ((0, 1), (7, 8), (0, 4), (3, 12), (40, 56), (0, 17), (39, 103), (0, 128), (100, 357), (511, 512))
"""Ranges of rows that one call computes."""
CASES = [
    (None, torch.bfloat16, "silu", False, (304, 208, 12, 3)),
    (None, torch.bfloat16, "swiglu_clamped", True, (2880, 2880, 4, 2)),
    (None, torch.float16, "swiglu_clamped", True, (96, 80, 5, 2)),
    ("W4A16_G128", torch.bfloat16, "silu", False, (384, 256, 12, 3)),
    ("W4A16_G128", torch.float16, "gelu_pytorch_tanh", False, (256, 1408, 12, 3)),
    ("W4A16_G64", torch.bfloat16, "silu", False, (320, 704, 7, 4)),
    ("W4A16_G32", torch.bfloat16, "swiglu_clamped", True, (2880, 2880, 4, 2)),
    ("W4A16_G32_ASYM", torch.float16, "silu", True, (256, 416, 7, 4)),
    ("W4A16_CHANNEL", torch.bfloat16, "silu", False, (272, 144, 12, 3)),
    ("W4A16_CHANNEL_ASYM", torch.bfloat16, "gelu", False, (256, 128, 12, 3)),
    ("W8A16", torch.bfloat16, "silu", False, (256, 128, 12, 3)),
    ("MXFP4", torch.bfloat16, "swiglu_clamped", True, (2880, 2880, 4, 2)),
    ("NVFP4", torch.bfloat16, "silu", False, (256, 416, 7, 4)),
    ("FP8_DYNAMIC", torch.bfloat16, "silu", False, (416, 160, 12, 3)),
    ("FP8_DYNAMIC", torch.bfloat16, "swiglu_clamped", True, (2880, 720, 4, 2)),
    ("FP8_BLOCK", torch.bfloat16, "silu", False, (384, 256, 12, 3)),
    (None, torch.bfloat16, "silu", False, (384, 160, 14, 9)),
    (None, torch.float16, "swiglu_clamped", True, (1040, 704, 18, 16)),
    ("W4A16_G128", torch.bfloat16, "silu", False, (384, 256, 14, 9)),
    ("FP8_DYNAMIC", torch.bfloat16, "silu", False, (416, 160, 14, 10)),
    ("FP8_BLOCK", torch.bfloat16, "gelu_pytorch_tanh", False, (2048, 768, 14, 9)),
    ("FP8_BLOCK", torch.float16, "silu", False, (256, 384, 18, 16)),
    (None, torch.bfloat16, "relu2", False, (2688, 1856, 12, 6)),
    ("W4A16_G64", torch.bfloat16, "relu2", False, (2688, 1856, 14, 8)),
    ("W4A16_G32", torch.float16, "relu2", True, (288, 416, 7, 4)),
    ("FP8_DYNAMIC", torch.bfloat16, "relu2", False, (2688, 1856, 12, 6)),
    ("FP8_BLOCK", torch.bfloat16, "relu2", False, (384, 256, 12, 3)),
    ("INT8_DYNAMIC", torch.bfloat16, "relu2", False, (416, 160, 12, 3)),
    ("FP8_STATIC", torch.bfloat16, "silu", False, (416, 160, 14, 9)),
    ("INT8_STATIC", torch.bfloat16, "silu", False, (384, 256, 12, 3)),
    ("INT8_STATIC_ASYM", torch.float16, "gelu_pytorch_tanh", False, (256, 416, 7, 4)),
    ("INT8_DYNAMIC_ASYM", torch.bfloat16, "silu", True, (384, 256, 12, 3)),
    ("W4A8_FP8", torch.bfloat16, "silu", False, (384, 256, 12, 3)),
    ("NVFP4_W4A4", torch.bfloat16, "silu", False, (256, 416, 7, 4)),
    ("MXFP4_W4A4", torch.bfloat16, "swiglu_clamped", True, (2880, 2880, 4, 2)),
    ("MXFP8", torch.bfloat16, "silu", False, (384, 160, 12, 3)),
]
ROUTERS = [
    (Experts(128, 8, 16, renormalize=True), 2048, False),
    (Experts(60, 4, 16), 320, True),
    (Experts(32, 4, 16, score="softmax_topk"), 2880, True),
    (Experts(16, 2, 16, renormalize=True), 320, False),
    (Experts(40, 8, 16, renormalize=True), 512, True),
    (Experts(160, 6, 16), 512, False),
    (Experts(128, 8, 16, renormalize=True, output_scale=True), 2816, False),
    (Experts(64, 6, 16, scale=16.0, num_groups=8, top_groups=3, group_best=1), 512, False),
    (Experts(160, 6, 16, scale=16.0, num_groups=8, top_groups=3, group_best=1), 5120, False),
    (Experts(24, 4, 16, score="sigmoid", num_groups=4, top_groups=2, selection_bias=True), 512, True),
    (Experts(384, 6, 16, score="sigmoid", selection_bias=True, biased_logits=True), 2560, False),
    (
        Experts(
            32,
            8,
            16,
            score="sigmoid",
            num_groups=8,
            top_groups=4,
            selection_bias=True,
            zeroes_groups=True,
        ),
        512,
        False,
    ),
    (Experts(16, 2, 16, score="sparsemixer", jitter=0.01), 4096, False),
    (Experts(40, 2, 16, score="sparsemixer", jitter=0.2), 512, False),
    (
        Experts(256, 6, 16, score="sqrt_softplus", renormalize=True, scale=1.5, selection_bias=True),
        4096,
        False,
    ),
    (Experts(256, 6, 16, score="sqrt_softplus", renormalize=True, scale=1.5, table_size=301), 4096, False),
    (Experts(20, 3, 16, score="sigmoid", table_size=301), 512, True),
    (Experts(300, 4, 16, score="sigmoid", selection_bias=True, router_scale=0.2), 512, True),
    (
        Experts(
            64,
            6,
            16,
            score="sigmoid",
            renormalize=True,
            scale=2.5,
            num_groups=8,
            top_groups=3,
            selection_bias=True,
        ),
        512,
        False,
    ),
]
GROUPED = Experts(
    16,
    4,
    128,
    shared_size=256,
    score="sigmoid",
    renormalize=True,
    scale=1.7,
    num_groups=4,
    top_groups=2,
    selection_bias=True,
)
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen 3": {
        "qk_norm": True,
        "layers": (replace(LAYER, experts=Experts(32, 4, 128, renormalize=True)),) * 2,
    },
    "qwen 2": {
        "qkv_bias": True,
        "layers": (replace(LAYER, experts=Experts(12, 3, 128, shared_size=256, shared_gate=True)), LAYER),
    },
    "gpt-oss": {
        "activation": "swiglu_clamped",
        "qkv_bias": True,
        "o_bias": True,
        "attn_sinks": True,
        "layers": tuple(
            replace(
                layer,
                experts=Experts(8, 2, 128, score="softmax_topk", router_bias=True, expert_bias=True),
            )
            for layer in (LOCAL, LAYER)
        ),
    },
    "glm 4": {"layers": (LAYER, replace(LAYER, experts=GROUPED))},
    "hunyuan 3": {
        "qk_norm": True,
        "layers": (replace(LAYER, experts=Experts(32, 8, 128, shared_size=128, renormalize=True)),) * 2,
    },
}
each_mixture = pytest.mark.parametrize("name", MIXTURES)


def make_inputs(
    hidden: int, count: int, top_k: int, dtype: torch.dtype, *, seed: int = 3
) -> dict[str, Tensor]:
    """The first rows all choose the same experts, and none chooses the last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(ROWS, count - 1, generator=generator).argsort(1)[:, :top_k].to(torch.int32)
    ids[:40] = torch.arange(top_k, dtype=torch.int32)
    inputs = {
        "x_TD": randn(ROWS, hidden, seed=seed).to(dtype),
        "ids_TK": ids,
        "weights_TK": torch.rand(ROWS, top_k, generator=generator),
        "residual_TD": randn(ROWS, hidden, seed=2).to(dtype),
    }
    return {name: each.to(CUDA) for name, each in inputs.items()}


def rows_of(inputs: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: each[start:stop].contiguous() for name, each in inputs.items()}


def captured(launch: Callable[[], Any]) -> Callable[[], None]:
    """Record a launch once it is compiled, and return what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


@pytest.mark.parametrize(("scheme", "dtype", "activation", "bias", "sizes"), CASES)
def test_experts_give_the_sum_of_the_reference_and_a_row_has_its_bits_in_any_company(
    scheme: str | None, dtype: torch.dtype, activation: str, bias: bool, sizes: tuple[int, int, int, int]
) -> None:
    hidden, ffn, count, top_k = sizes
    gated = activation not in UNGATED
    experts = random_experts(scheme, dtype, hidden=hidden, ffn=ffn, count=count, bias=bias, gated=gated)
    ready = packed.repack(experts, dtype=dtype, device=CUDA)
    definition = reference.repack(experts, dtype=dtype, device=CUDA)
    inputs = make_inputs(hidden, count, top_k, dtype)
    expected = reference.experts(**inputs, packed=definition, activation=activation, rows=4).double()
    served = decode_of(ready, scheme, activation, top_k)
    # What serves on other GPUs, and larger batches.
    elsewhere = partial(fused.decode, packed=ready, activation=activation)
    others = [elsewhere] if ready.format in packed.RESIDENT else []
    many = fused.prefill(**inputs, packed=ready, activation=activation)
    # A row of e4m3 whose numbers are rounded to a neighbour differs by up to 1/16 of them; weights of four
    # bits are rounded by the reference alone.
    coded = scheme is not None and SCHEMES[scheme].activation is not None
    bound = 1 / 32 if coded else 4 * torch.finfo(dtype).eps
    for decode in (served, *others):
        few = decode(**inputs)
        for out in (few, many):
            assert out.dtype == dtype
            assert float((out.double() - expected).norm() / expected.norm()) < bound
        for start, stop in COMPANIES:
            assert torch.equal(decode(**rows_of(inputs, start, stop)), few[start:stop]), (start, stop)
        assert int(ready.arrivals.abs().sum()) == 0


@pytest.mark.parametrize("scheme", [None, "W4A16_G32", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4"])
@pytest.mark.parametrize("activation", ["silu", "silu_capped"])
def test_experts_with_a_cap_give_the_sum_of_the_reference(scheme: str | None, activation: str) -> None:
    dtype = torch.bfloat16
    experts = random_experts(scheme, dtype, hidden=384, ffn=256, count=12, bias=False)
    ready = packed.repack(experts, dtype=dtype, device=CUDA)
    definition = reference.repack(experts, dtype=dtype, device=CUDA)
    inputs: dict[str, Any] = {**make_inputs(384, 12, 3, dtype), "cap": 0.25}
    expected = reference.experts(**inputs, packed=definition, activation=activation, rows=4).double()
    uncapped = reference.experts(**{**inputs, "cap": None}, packed=definition, activation="silu", rows=4)
    assert float((uncapped.double() - expected).norm() / expected.norm()) > 0.1
    coded = scheme is not None and SCHEMES[scheme].activation is not None
    bound = 1 / 32 if coded else 4 * torch.finfo(dtype).eps
    kernels = (
        decode_of(ready, scheme, activation, 3),
        partial(fused.prefill, packed=ready, activation=activation),
    )
    for kernel in kernels:
        out = kernel(**inputs)
        assert float((out.double() - expected).norm() / expected.norm()) < bound


def decode_of(
    ready: packed.PackedExperts, scheme: str | None, activation: str, top_k: int
) -> Callable[..., Tensor]:
    """Return the kernel that serves decode rows of an engine of usual size."""
    problem = KernelDevice.from_torch(CUDA, ready.dtype).problem(
        "experts",
        n=ready.down.out_features,
        k=ready.down.in_features,
        scheme=scheme,
        activation=activation,
        experts=ready.num_experts,
        top_k=top_k,
    )
    return partial(select(problem).fn, packed=ready)


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
@pytest.mark.parametrize("scheme", [None, "W4A16_G32", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_captured_experts_follow_their_inputs(scheme: str | None, rows: int) -> None:
    dtype = torch.bfloat16
    experts = random_experts(scheme, dtype, hidden=384, ffn=256, count=12, bias=False)
    ready = packed.repack(experts, dtype=dtype, device=CUDA)
    router = router_weights(randn(12, 384, seed=4), None, None, dtype=dtype, device=CUDA)
    facts = Experts(12, 3, 256, renormalize=True)
    x = randn(rows, 384, seed=5).to(device=CUDA, dtype=dtype)
    out = torch.empty_like(x)

    decode = decode_of(ready, scheme, "silu", 3)

    def mixture() -> Tensor:
        ids, weights = warps.route(x, router, facts)
        return decode(x, ids_TK=ids, weights_TK=weights)

    replay = captured(lambda: out.copy_(mixture()))
    for seed in (6, 7):
        x.copy_(randn(rows, 384, seed=seed))
        replay()
        assert torch.equal(out, mixture())
        assert not out.isnan().any()
    assert int(ready.arrivals.abs().sum()) == int(router.arrivals.abs().sum()) == 0


@pytest.mark.parametrize(
    ("scheme", "dtype"), [(None, torch.float32), ("FP8_STATIC", torch.float32), ("MXFP4", torch.float16)]
)
def test_the_reference_has_the_same_bits_in_a_graph(scheme: str | None, dtype: torch.dtype) -> None:
    experts = random_experts(scheme, dtype, hidden=96, ffn=64, count=12, bias=True)
    definition = reference.repack(experts, dtype=dtype, device=CUDA)
    inputs = rows_of(make_inputs(96, 12, 3, dtype), 0, 50)
    out = torch.empty_like(inputs["x_TD"])

    def compute() -> Tensor:
        return reference.experts(**inputs, packed=definition, activation="silu", rows=4)

    replay = captured(lambda: out.copy_(compute()))
    for seed in (6, 7):
        for name, each in make_inputs(96, 12, 3, dtype, seed=seed).items():
            inputs[name].copy_(each[:50])
        replay()
        assert torch.equal(out, compute())
        assert not out.isnan().any()


@pytest.mark.parametrize(("facts", "hidden", "bias"), ROUTERS, ids=lambda each: getattr(each, "score", None))
def test_routers_choose_as_the_reference_and_a_row_has_its_bits_in_any_company(
    facts: Experts, hidden: int, bias: bool
) -> None:
    x = randn(ROWS, hidden, seed=1).to(device=CUDA, dtype=torch.bfloat16)
    count = facts.num_experts
    router = router_weights(
        randn(count, hidden, seed=2) * hidden**-0.5,
        randn(count, seed=3) if bias else None,
        randn(count, seed=4).abs() * 0.2 - 0.9 * facts.zeroes_groups if facts.selection_bias else None,
        randn(count, seed=5).abs() + 0.5 if facts.output_scale else None,
        randn(facts.table_size, count, seed=6).argsort(dim=1)[:, : facts.top_k] if facts.table_size else None,
        dtype=torch.bfloat16,
        device=CUDA,
    )
    tokens = torch.arange(ROWS, device=CUDA) * 7 % max(facts.table_size, 1)
    expected_ids, expected_weights = router_reference.route(x, router, facts, tokens_T=tokens)
    few_ids, few_weights = warps.route(x, router, facts, tokens_T=tokens)
    many_ids, many_weights = router_fused.route_many(x, router, facts, tokens_T=tokens)
    for ids, weights in ((few_ids, few_weights), (many_ids, many_weights)):
        same = (ids == expected_ids).all(1)
        # Logits that are added in another order tie otherwise in a row of some hundred.
        assert float(same.float().mean()) > 0.98
        torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-4, atol=1e-5)
    for start, stop in COMPANIES:
        ids, weights = warps.route(x[start:stop], router, facts, tokens_T=tokens[start:stop])
        assert torch.equal(ids, few_ids[start:stop])
        assert torch.equal(weights, few_weights[start:stop])
    for routed, route in (
        ((few_ids, few_weights), warps.route),
        ((many_ids, many_weights), router_fused.route_many),
    ):
        ids, weights = route(x, router, facts, shared=2, tokens_T=tokens)
        assert torch.equal(ids[:, :-2], routed[0])
        assert torch.equal(weights[:, :-2], routed[1])
        assert torch.equal(ids[:, -2:], ids.new_tensor([count, count + 1]).expand(ROWS, 2))
        assert bool((weights[:, -2:] == 1).all())
    assert int(router.arrivals.abs().sum()) == 0


@each_mixture
def test_a_request_has_the_same_bits_alone_and_in_any_order_and_no_reference_serves(name: str) -> None:
    engine = Engine(make_source(MIXTURES[name]), device=CUDA, config=EngineConfig(kv_cache_bytes=1 << 28))
    requests = make_requests()
    together = run(engine, requests)
    reversed_ = run(engine, requests[::-1])
    alone = {key: row for request in requests[:3] for key, row in run(engine, [request]).items()}
    assert all(not row.isnan().any() for row in together.values())
    for key, row in together.items():
        assert torch.equal(row, reversed_[key]), key
        assert key not in alone or torch.equal(row, alone[key]), key
    ops = [row for row in engine.kernel_report() if row["op"] != "linear"]
    assert {"router", "experts"} <= {row["op"] for row in ops}
    assert [row for row in ops if "reference" in row["kernel"]] == []


@each_mixture
def test_scores_are_the_cpus_within_rounding(name: str) -> None:
    source = make_source(MIXTURES[name])
    config = EngineConfig(dtype=torch.float32, kv_cache_bytes=1 << 28)
    tokens_BS = torch.randint(1013, (2, 200), generator=torch.Generator().manual_seed(2))
    on_cpu = Engine(source, device=torch.device("cpu"), config=config).runner.score(tokens_BS)
    on_gpu = Engine(source, device=CUDA, config=config).runner.score(tokens_BS).cpu()
    depth = sum(
        2 * 384 + layer.num_heads * layer.head_dim + layer.intermediate_size for layer in source.arch.layers
    )
    bound = 16 * torch.finfo(torch.float32).eps * depth**0.5 * float(on_cpu.abs().max())
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["glm 4", "hunyuan 3"])
def test_a_shared_expert_among_the_others_gives_what_its_own_linears_give(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(MIXTURES[name])
    config = EngineConfig(kv_cache_bytes=1 << 28)
    joined = Engine(source, device=CUDA, config=config)
    monkeypatch.setattr(expert_loader, "parts", lambda *_: [])
    apart = Engine(source, device=CUDA, config=config)
    served = ["moe.shared.gate+moe.shared.up" in linears_of_decode(engine) for engine in (joined, apart)]
    assert served == [False, True]
    greedy = [
        replace(each, params=replace(each.params, max_tokens=2, temperature=0.0)) for each in make_requests()
    ]
    here, there = run(joined, greedy), run(apart, greedy)
    # Rounding chooses another first token where two are as likely, and the second rows are then others.
    follow = [
        key for key in here if (first := (key[0], key[1] - 1)) not in here or same_choice(here, there, first)
    ]
    assert len(follow) > len(greedy) + 1
    for key in follow:
        assert float((here[key] - there[key]).norm() / there[key].norm()) < 0.05, key


def same_choice(here: dict[Any, Tensor], there: dict[Any, Tensor], key: Any) -> bool:
    """Whether both choose the same token."""
    return int(here[key].argmax()) == int(there[key].argmax())


def linears_of_decode(engine: Engine) -> set[str]:
    return {row["linear"] for row in engine.kernel_report() if row["phase"] == "decode"}


@pytest.mark.parametrize("name", ["qwen 3", "gpt-oss"])
def test_verified_tokens_are_those_of_plain_decoding(name: str) -> None:
    source = make_source(MIXTURES[name])
    requests = make_requests()
    config = EngineConfig(kv_cache_bytes=1 << 28)
    plain = Engine(source, device=CUDA, config=config).generate(requests)
    speculative = replace(config, speculative=Speculative(DraftModel(source), k=3))
    verified = Engine(source, device=CUDA, config=speculative).generate(requests)
    assert [each.tokens for each in verified] == [each.tokens for each in plain]


@pytest.mark.parametrize("scheme", ["W4A16_G128", "FP8_DYNAMIC"])
@each_mixture
def test_graphs_and_overlap_change_no_token(name: str, scheme: str) -> None:
    arch = make_arch(MIXTURES[name]).replace(hidden_size=512, vocab_size=1024)
    arch = arch.replace(
        layers=tuple(
            layer if layer.experts is not None else replace(layer, intermediate_size=1024)
            for layer in arch.layers
        )
    )
    source = RandomSource(arch, device=CUDA, dtype=torch.bfloat16, scheme=SCHEMES[scheme])
    done = [
        Engine(source, device=CUDA, config=EngineConfig(kv_cache_bytes=1 << 28, sync=sync)).generate(
            make_requests()
        )
        for sync in (False, True)
    ]
    assert [each.tokens for each in done[0]] == [each.tokens for each in done[1]]

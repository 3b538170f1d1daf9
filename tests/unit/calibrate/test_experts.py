"""Mixtures of experts through the runner: what experts are shown, what becomes of starved ones, and that
every preset quantizes them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.calibrate.experts import ExpertPolicy, Tokens
from compress.calibrate.guide import GuideFiles, make_guide
from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import Row
from compress.calibrate.observe import gather_everywhere, observe, observe_on_one_rank, observed_kinds
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.stats import AbsMax, CrossMoment, SecondMoment
from compress.context import Context, OneRank
from compress.errors import Interrupted
from compress.models.attention import FullAttention
from compress.models.canonical import layer_name, load_weights
from compress.models.experts import ALL_TOKENS
from compress.models.moe import Routing
from compress.models.weights import MemorySource, build_decoder
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.slow import slow
from tests.support.stop_after import StopAfter
from tests.support.tiny_decoder import tiny_arch, tiny_source, tiny_tokens

MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [0],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
}
LATENT_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "dtype",
)
NUM_SAMPLES = 11
SEQ_LEN = 13
SCHEME = SCHEMES["W4A16_G32"]
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"round": {"kind": "rtn"}, "measure_error": True},
    "gptq": {"round": {"kind": "gptq"}},
    "gptq-in-turn": {"round": {"kind": "gptq"}, "true_sequential": True},
    "awq": {"smooth": {"kind": "awq", "num_ratios": 3}, "round": {"kind": "rtn"}},
    "balanced": {"preset": "balanced"},
    "at-once": {"preset": "balanced", "true_sequential": False},
}


@pytest.fixture(scope="module")
def source() -> MemorySource:
    return tiny_source(tiny_arch(MOE))


def run(
    out: Path, source: MemorySource, method: str, *, starved: str = "shrink", stop_after: int = 99
) -> list[Row]:
    out.mkdir(exist_ok=True)
    spec = Quantize.model_validate({"scheme": SCHEME.name, **METHODS[method]})
    ctx = Context("cpu", 0, out, stop_signal=StopAfter(stop_after))
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    if spec.guide is not None:
        make_guide(spec.guide, source, tokens_NS, ctx, compute_dtype=torch.float32)
    compression = Compression(
        quantization_passes(spec, SCHEME, torch.bfloat16),
        scheme=SCHEME,
        true_sequential=spec.true_sequential,
        experts=ExpertPolicy(40, starved),  # type: ignore[arg-type]
        guide=None if spec.guide is None else GuideFiles(ctx),
    )
    return run_sequential(source, tokens_NS, compression, out, ctx, compute_dtype=torch.float32)


@pytest.mark.parametrize(
    ("method", "starved"),
    [
        *((method, "shrink") for method in METHODS),
        ("gptq", "all_tokens"),
        ("gptq", "keep"),
        *(
            slow(method, starved)
            for method in METHODS
            if method != "gptq"
            for starved in ("all_tokens", "keep")
        ),
    ],
)
@pytest.mark.one_in(4)
def test_every_linear_of_every_expert_is_quantized(
    method: str, starved: str, source: MemorySource, tmp_path: Path
) -> None:
    rows = run(tmp_path, source, method, starved=starved)
    linears = [(idx, linear) for idx, layer in enumerate(source.arch.layers) for linear in layer.linears]
    assert [(row["layer"], row["linear"]) for row in rows] == linears
    for idx in range(source.arch.num_layers):
        stored = load_weights(tmp_path / layer_name(idx), SCHEME)
        ours = source.layer(idx)
        assert stored.keys() == ours.keys()
        quantized = {name for name, value in stored.items() if isinstance(value, QuantizedWeight)}
        assert quantized == {f"{linear}.weight" for linear in source.arch.layers[idx].linears}
        if idx and method != "awq":
            assert torch.equal(stored["moe.router.weight"], ours["moe.router.weight"])
    ups = [row for row in rows if row["layer"] == 1 and row["linear"].endswith(".up") and "tokens" in row]
    assert len(ups) == 8
    assert sum(row["tokens"] for row in ups) == 2 * NUM_SAMPLES * SEQ_LEN


@pytest.mark.parametrize("method", ["gptq", "balanced"])
@pytest.mark.one_in(4)
def test_a_run_stopped_at_a_layer_boundary_ends_in_the_same_bytes(
    method: str, source: MemorySource, tmp_path: Path
) -> None:
    run(tmp_path / "whole", source, method)
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", source, method, stop_after=1)
    run(tmp_path / "parts", source, method)
    for idx in range(source.arch.num_layers):
        name = layer_name(idx)
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def inputs(source: MemorySource) -> torch.Tensor:
    return torch.randn(NUM_SAMPLES, SEQ_LEN, 32, generator=torch.Generator().manual_seed(1))


def test_an_expert_is_shown_its_own_tokens(source: MemorySource) -> None:
    layer = build_decoder(source, dtype=torch.float32, device=torch.device("cpu")).layers[1]
    seen: dict[str, torch.Tensor] = {}
    layer(inputs(source), torch.arange(SEQ_LEN), FullAttention(), seen.__setitem__)
    x_TD = seen[ALL_TOKENS].flatten(0, 1)
    routing: Routing = layer.moe.route(x_TD)
    for expert in range(8):
        chosen = (routing.experts_TR == expert).any(1)
        assert torch.equal(seen[f"moe_in.{expert}"], x_TD[chosen])
        mid = layer.moe.experts[expert].mid(x_TD[chosen])
        assert torch.allclose(seen[f"moe_mid.{expert}"], mid, atol=1e-6)


def test_a_starved_expert_gets_the_layers_moment_in_proportion(source: MemorySource) -> None:
    layer = build_decoder(source, dtype=torch.float32, device=torch.device("cpu")).layers[1]
    kinds = (SecondMoment, AbsMax, CrossMoment)
    x_NSD = inputs(source)
    trees = observe(layer, LayerRun.on_one_rank(x_NSD), kinds)
    own = gather_everywhere(trees, observed_kinds(layer, kinds), OneRank())
    many = 1000
    completed = observe_on_one_rank(layer, x_NSD, kinds, ExpertPolicy(many))
    whole = own[ALL_TOKENS][SecondMoment].mean()
    for expert in range(8):
        stats = own[f"moe_in.{expert}"]
        n = stats[Tokens].num_tokens
        expected = (n * stats[SecondMoment].mean() + (many - n) * whole) / many
        assert torch.allclose(completed[f"moe_in.{expert}"][SecondMoment].mean(), expected, atol=1e-5)
        mid = completed[f"moe_mid.{expert}"][SecondMoment].mean()
        assert torch.linalg.matrix_rank(mid) == len(mid)


def test_an_expert_without_a_token_has_the_layers_moment_under_every_policy(source: MemorySource) -> None:
    layer = build_decoder(source, dtype=torch.float32, device=torch.device("cpu")).layers[1]
    with torch.no_grad():
        layer.moe.router.weight.zero_()  # all tokens go to the first two experts
    for starved in ("shrink", "keep"):
        stats = observe_on_one_rank(
            layer,
            inputs(source),
            (SecondMoment,),
            ExpertPolicy(1, starved),  # type: ignore[arg-type]
        )
        assert stats["moe_in.5"][Tokens].num_tokens == 0
        assert stats["moe_in.0"][Tokens].num_tokens == NUM_SAMPLES * SEQ_LEN
        assert torch.allclose(
            stats["moe_in.5"][SecondMoment].mean(), stats[ALL_TOKENS][SecondMoment].mean(), rtol=1e-5
        )
        assert bool(torch.isfinite(stats["moe_mid.5"][SecondMoment].mean()).all())


@pytest.fixture(scope="module")
def weighed_source() -> MemorySource:
    """A model whose router multiplies the inputs of experts."""
    sizes = {key: MOE[key] for key in MOE if not key.startswith(("num_experts", "moe_", "shared_", "mlp_"))}
    config = {
        **sizes,
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": 8,
        "num_local_experts": 8,
        "intermediate_size_mlp": 64,
        "moe_layers": [1, 2],
    }
    return tiny_source(tiny_arch(config))


@pytest.mark.parametrize("sees_all", [False, True])
def test_an_expert_is_shown_its_inputs_as_the_router_weighs_them(
    sees_all: bool, weighed_source: MemorySource
) -> None:
    layer = build_decoder(weighed_source, dtype=torch.float32, device=torch.device("cpu")).layers[1]
    layer.moe.taps_see_all = sees_all
    seen: dict[str, torch.Tensor] = {}
    layer(inputs(weighed_source), torch.arange(SEQ_LEN), FullAttention(), seen.__setitem__)
    x_TD = seen[ALL_TOKENS].flatten(0, 1)
    scores_TE = torch.sigmoid(x_TD @ layer.moe.router.weight.T)
    for expert in range(8):
        shown = torch.ones(len(x_TD), dtype=torch.bool) if sees_all else scores_TE.argmax(1) == expert
        expected = (scores_TE[:, expert : expert + 1] * x_TD)[shown]
        assert torch.allclose(seen[f"moe_in.{expert}"], expected, atol=1e-5)
        mid = layer.moe.experts[expert].mid(expected)
        assert torch.allclose(seen[f"moe_mid.{expert}"], mid, atol=1e-5)


def test_an_expert_without_a_token_has_the_moment_of_weighed_inputs(weighed_source: MemorySource) -> None:
    layer = build_decoder(weighed_source, dtype=torch.float32, device=torch.device("cpu")).layers[1]
    with torch.no_grad():
        layer.moe.router.weight.zero_()  # all tokens go to the first expert, and every score is a half
    stats = observe_on_one_rank(layer, inputs(weighed_source), (SecondMoment,), ExpertPolicy(1, "shrink"))
    assert stats["moe_in.5"][Tokens].num_tokens == 0
    half = stats["moe_in.0"][SecondMoment].mean()
    assert torch.allclose(half, stats[ALL_TOKENS][SecondMoment].mean() / 4, rtol=1e-5)
    assert torch.allclose(stats["moe_in.5"][SecondMoment].mean(), half, rtol=0.2, atol=0.05)
    assert bool(torch.isfinite(stats["moe_mid.5"][SecondMoment].mean()).all())


@pytest.fixture(scope="module")
def latent_source() -> MemorySource:
    """A model whose experts act on latents."""
    sizes = {name: value for name, value in MOE.items() if name in LATENT_SIZES}
    config = {
        **sizes,
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "*EE",
        "head_dim": 8,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 64,
    }
    return tiny_source(tiny_arch(config))


@pytest.mark.parametrize("sees_all", [False, True])
def test_an_expert_is_shown_the_latents_of_its_tokens(sees_all: bool, latent_source: MemorySource) -> None:
    layer = build_decoder(latent_source, dtype=torch.float32, device=torch.device("cpu")).layers[1]
    layer.moe.taps_see_all = sees_all
    seen: dict[str, torch.Tensor] = {}
    layer(inputs(latent_source), torch.arange(SEQ_LEN), FullAttention(), seen.__setitem__)
    x_TD = seen[ALL_TOKENS].flatten(0, 1)
    chosen_TR = layer.moe.route(x_TD).experts_TR
    for expert in range(8):
        shown = torch.ones(len(x_TD), dtype=torch.bool) if sees_all else (chosen_TR == expert).any(1)
        expected = (x_TD @ layer.moe.latent_in.weight.T)[shown]
        assert torch.allclose(seen[f"moe_in.{expert}"], expected, atol=1e-5)
        mid = layer.moe.experts[expert].mid(expected)
        assert torch.allclose(seen[f"moe_mid.{expert}"], mid, atol=1e-5)


def test_an_expert_without_a_token_has_the_moment_of_latents(latent_source: MemorySource) -> None:
    layer = build_decoder(latent_source, dtype=torch.float32, device=torch.device("cpu")).layers[1]
    with torch.no_grad():
        layer.moe.router.weight.zero_()  # all tokens go to the first two experts
        layer.moe.selection_bias.zero_()
    stats = observe_on_one_rank(layer, inputs(latent_source), (SecondMoment,), ExpertPolicy(1, "shrink"))
    assert stats["moe_in.5"][Tokens].num_tokens == 0
    all_II = stats["moe_in.0"][SecondMoment].mean()
    weight_LD = layer.moe.latent_in.weight.double()
    meant = weight_LD @ stats[ALL_TOKENS][SecondMoment].mean().double() @ weight_LD.T
    assert torch.allclose(all_II.double(), meant, rtol=1e-4, atol=1e-5)
    assert torch.allclose(stats["moe_in.5"][SecondMoment].mean(), all_II, rtol=0.2, atol=0.05)
    assert bool(torch.isfinite(stats["moe_mid.5"][SecondMoment].mean()).all())


@pytest.mark.parametrize("method", ["gptq", "gptq-in-turn", "awq", "balanced"])
@pytest.mark.parametrize("starved", ["shrink", "all_tokens"])
@pytest.mark.one_in(4)
def test_experts_that_act_on_latents_are_quantized_and_the_linears_around_them_are_not(
    method: str, starved: str, latent_source: MemorySource, tmp_path: Path
) -> None:
    rows = run(tmp_path, latent_source, method, starved=starved)
    assert {row["linear"] for row in rows} >= {"moe.experts.7.up", "moe.experts.0.down", "moe.shared.up"}
    weights = load_weights(tmp_path / layer_name(1), SCHEME)
    before = latent_source.layer(1)
    for name in ("moe.latent_in.weight", "moe.latent_out.weight"):
        assert torch.equal(torch.as_tensor(weights[name]), torch.as_tensor(before[name]))
    up = weights["moe.experts.3.up.weight"]
    assert isinstance(up, QuantizedWeight)
    assert up.shape == (32, 64)


@pytest.mark.parametrize("method", ["gptq", "balanced"])
def test_experts_of_weighed_inputs_are_quantized(
    method: str, weighed_source: MemorySource, tmp_path: Path
) -> None:
    rows = run(tmp_path, weighed_source, method)
    assert {row["linear"] for row in rows} >= {"moe.experts.7.up", "moe.experts.0.down", "moe.shared.gate"}

"""Layers that have one half only are served: their FFNs keep nothing of a sequence, no way to serve a request
changes what they compute, and what is made of such models (heads, smaller models, predictions) fits them.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.artifact.writer import ArtifactWriter
from compress.calibrate.gradients import visit_gradients
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.errors import UsageError
from compress.export import FORMATS
from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.kernels.operands.routing import ExpertWeights
from compress.methods.prune import Compensation, Scorer
from compress.methods.prune.compensations import BiasCompensation, LeastSquares, NoCompensation
from compress.methods.prune.scores import Wanda
from compress.methods.prune.taylor import Taylor
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.eagle3 import Eagle3Facts, eagle3_facts
from compress.models.experts import Experts
from compress.models.fresh_eagle3 import fresh_eagle3, random_eagle3
from compress.models.mamba2 import Mamba2
from compress.models.pruning import LayerSubset, StoredLayers, Widths, keep_channels_, with_layers
from compress.models.weights import MemorySource, WeightSource, build_decoder, dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.registry.model_source import ModelSource
from compress.runtime.engine import Engine
from compress.runtime.expert_loader import parts
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.speculation import Speculative
from compress.stages import STAGES, Input, Inputs, Port
from compress.stages.budget.sensitivity import Sensitivities
from compress.stages.prune.round import PruningMethod, prune_round
from tests.support.halved_source import HalfKept, HalfSilenced, Halved
from tests.support.slow import slow
from tests.support.tiny_decoder import tiny_checkpoint, tiny_decoder, tiny_tokens
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.models.test_half_layers import ARCEE, read, stated
from tests.unit.runtime.test_speculative_eagle3 import checked_steps, greedy
from tests.unit.runtime.ways_to_serve import (
    CPU,
    PROMPTS,
    REQUESTS,
    SIZE,
    alone,
    check_cached_prefix,
    check_preemption,
    check_scores,
    check_speculation,
    decoded,
    engine_of,
    ids,
    tokens_of,
)

MIXTURE = Experts(6, 2, 48, shared_size=96, score="sigmoid", selection_bias=True)
ATTENTION = tiny_shape(only_half="mixer", gated=False, rope=None)
MAMBA = tiny_shape(
    only_half="mixer", gated=False, rope=None, recurrence=Mamba2(4, 2, 16, 12, 4, conv_bias=True)
)
FFN = tiny_shape(only_half="ffn", gated=False)
SPARSE = replace(FFN, experts=MIXTURE)
ON_LATENTS = replace(FFN, experts=replace(MIXTURE, latent_size=32))
LAYERS = {
    "attention and ffns": (FFN, ATTENTION, FFN, ATTENTION, FFN),
    "like nemotron 3": (MAMBA, SPARSE, ATTENTION, SPARSE),
    "like nemotron 3 super": (MAMBA, ON_LATENTS, ATTENTION, ON_LATENTS),
    "like nemotron 2": (MAMBA, FFN, MAMBA, ATTENTION, FFN),
}
each_model = pytest.mark.parametrize("layers", LAYERS)


def source_of(layers: str = "attention and ffns") -> MemorySource:
    return tiny_source(layers=LAYERS[layers], activation="relu2", max_position=2048)


@each_model
def test_the_engine_generates_what_the_decoder_ranks_first(layers: str) -> None:
    source = source_of(layers)
    for prompt, found in zip(PROMPTS[2:], alone(source)[2:], strict=True):
        whole = torch.tensor([prompt + found])
        logits_SV = decoded(source, whole)[0, len(prompt) - 1 : -1]
        chosen_S = logits_SV.gather(1, whole[0, len(prompt) :, None]).squeeze(1)
        assert (logits_SV.amax(1) - chosen_S).max() < 1e-3


@each_model
def test_a_prefix_that_is_cached_changes_no_token(layers: str) -> None:
    check_cached_prefix(source_of(layers))


@pytest.mark.parametrize(
    ("layers", "swap_bytes"),
    [
        ("attention and ffns", 0),
        ("like nemotron 3", 1 << 24),
        slow("attention and ffns", 1 << 24),
        slow("like nemotron 3", 0),
        *(slow(*each) for each in product(("like nemotron 3 super", "like nemotron 2"), (0, 1 << 24))),
    ],
)
def test_requests_that_lose_their_blocks_go_on(layers: str, swap_bytes: int) -> None:
    check_preemption(source_of(layers), swap_bytes=swap_bytes)


@each_model
@pytest.mark.parametrize("kind", ["ngram", "draft model", "eagle3"])
@pytest.mark.one_in(4)
def test_speculation_changes_no_token(layers: str, kind: str) -> None:
    check_speculation(source_of(layers), kind, draft=source_of())


def test_a_head_reads_the_hidden_states_after_ffns_and_mixers_alike() -> None:
    source = source_of()
    head = random_eagle3(
        source.arch, device=CPU, dtype=torch.float32, draft_vocab_size=90, layer_ids=(1, 2, 5), seed=3
    )
    engine = engine_of(source, speculative=Speculative(Eagle3(head), k=3))
    assert checked_steps(engine, source, head, greedy(REQUESTS[2:3] + REQUESTS[4:]), 3) > 10


@each_model
@pytest.mark.parametrize(
    ("kv_format", "of_head"), [("F32", 16 * 4), ("FP8_TOKEN_HEAD", 16 + 4), ("INT4_TOKEN_HEAD", 8 + 4)]
)
def test_a_cache_has_bytes_of_layers_with_attention_alone(layers: str, kv_format: str, of_head: int) -> None:
    """Two heads of keys and two of values."""
    arch = source_of(layers).arch
    attending = [idx for idx, layer in enumerate(LAYERS[layers]) if layer is ATTENTION]
    cache = KVCache(arch, num_blocks=3, block_size=SIZE, kv_format=kv_format, device=CPU)
    assert kv_bytes_per_token(arch, kv_format) == len(attending) * 4 * of_head
    assert cache.block_bytes == SIZE * kv_bytes_per_token(arch, kv_format)
    for idx, layer in enumerate(LAYERS[layers]):
        kept = cache.layer(idx)
        assert (kept is None) == (layer in (FFN, SPARSE, ON_LATENTS))
        assert isinstance(kept, RecurrentStates) == (layer is MAMBA)


def test_blocks_are_copied_around_layers_that_keep_nothing() -> None:
    cache = KVCache(source_of().arch, num_blocks=4, block_size=SIZE, kv_format="FP8_TOKEN_HEAD", device=CPU)
    tensors = [each for idx in (1, 3) for each in cache.layer(idx).tensors]  # type: ignore[union-attr]
    for seed, each in enumerate(tensors):
        noise = torch.randint(0, 100, each[:, 1].view(torch.uint8).shape, dtype=torch.uint8)
        each[:, 1].view(torch.uint8).copy_(noise + seed)
    cache.copy_blocks([(1, 2)])
    cache.write_blocks(torch.tensor([3]), cache.read_blocks(torch.tensor([1])))
    for each in tensors:
        assert each[:, 1].view(torch.uint8).any()
        for copy in (2, 3):
            assert torch.equal(each[:, copy].view(torch.uint8), each[:, 1].view(torch.uint8))
        assert not each[:, 0].view(torch.uint8).any()


@each_model
def test_scores_are_those_of_the_decoder_and_of_layers_read_one_by_one(layers: str) -> None:
    check_scores(source_of(layers))


@pytest.mark.parametrize(
    ("kv_format", "limit"), [("FP8_TOKEN_HEAD", 0.02), ("INT8_TOKEN_HEAD", 1e-3), ("INT4_TOKEN_HEAD", 0.5)]
)
@each_model
def test_caches_of_fewer_bits_round_the_keys_and_values_alone(
    layers: str, kv_format: str, limit: float
) -> None:
    source = source_of(layers)
    tokens_BS = torch.tensor([ids(75, 8)])
    expected = decoded(source, tokens_BS).log_softmax(-1)
    with torch.inference_mode():
        found = engine_of(source, kv_format=kv_format).runner.score(tokens_BS).log_softmax(-1)
    assert 1e-9 < float((expected.exp() * (expected - found)).sum(-1).mean()) < limit


WHOLE: dict[str, dict[str, Any]] = {
    "gated": {"layers": (tiny_shape(window=40), tiny_shape()), "qk_norm": True},
    "without gates": {"layers": (tiny_shape(gated=False),) * 2, "activation": "relu2", "ffn_bias": True},
    "with xielu": {"layers": (tiny_shape(gated=False),) * 2, "activation": "xielu"},
    "scaled": {"layers": (tiny_shape(),) * 2, "residual_scale": 0.4, "layer_scalar": True},
    "keys of another": {"layers": (tiny_shape(), tiny_shape(), tiny_shape(kv_source=0))},
    "experts": {"layers": (tiny_shape(), tiny_shape(experts=MIXTURE))},
}


@pytest.mark.parametrize("changes", WHOLE.values(), ids=WHOLE)
def test_two_layers_of_a_half_each_are_served_as_the_whole_layer(changes: dict[str, Any]) -> None:
    whole = tiny_source(max_position=2048, **changes)
    halved = Halved(whole)
    assert kv_bytes_per_token(halved.arch, "BF16") == kv_bytes_per_token(whole.arch, "BF16")
    found, expected = engine_of(halved), engine_of(whole)
    assert tokens_of(found) == tokens_of(expected)
    assert found.expected_weight_bytes(3) == expected.expected_weight_bytes(3)
    tokens_BS = torch.tensor([ids(40, 8)])
    with torch.inference_mode():
        assert torch.equal(found.runner.score(tokens_BS), expected.runner.score(tokens_BS))


@pytest.mark.parametrize("name", ["gated", "without gates", "with xielu", "experts"])
def test_ffns_alone_are_served_as_layers_whose_mixers_add_nothing(name: str) -> None:
    source = tiny_source(residual_scale=0.4, layer_scalar=True, max_position=2048, **WHOLE[name])
    engines = [engine_of(kind(source, "ffn")) for kind in (HalfKept, HalfSilenced)]
    assert tokens_of(engines[0]) == tokens_of(engines[1])
    tokens_BS = torch.tensor([ids(40, 8)])
    with torch.inference_mode():
        found, expected = (engine.runner.score(tokens_BS) for engine in engines)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", ["ffn", "mixer"])
def test_the_output_of_a_half_is_scaled(first: Any) -> None:
    layers = (tiny_shape(only_half=first), tiny_shape())
    source = tiny_source(layers=layers, layer_scalar=True, residual_scale=0.4)
    assert float(dense(source.layer(0)["layer_scalar"])) != 1
    tokens_BS = torch.tensor([ids(40, 8)])
    with torch.inference_mode():
        found = engine_of(source).runner.score(tokens_BS)
    assert torch.allclose(found, decoded(source, tokens_BS), rtol=1e-4, atol=1e-4)


def head_facts(arch: Arch) -> Eagle3Facts:
    return eagle3_facts(arch, draft_vocab_size=20)


@pytest.mark.parametrize(
    ("pattern", "size"), [("M*-", 48), ("-*M", 48), ("-M*E", 24 + 40), ("E*-", 48), ("*E*", 24 + 40)]
)
def test_a_head_has_both_halves_a_gate_and_the_width_of_the_last_ffn(pattern: str, size: int) -> None:
    facts = head_facts(read(stated(pattern)))
    (layer,) = facts.arch.layers
    assert (layer.only_half, layer.gated, layer.recurrence, layer.experts) == (None, True, None, None)
    assert (facts.arch.activation, facts.arch.family) == ("silu", "llama")
    assert layer.intermediate_size == size
    assert layer.widths[:3] == (4, 2, 8)
    assert layer.rope is not None
    of_ffn = ["ffn.gate", "ffn.up", "ffn.down"]
    assert [*layer.linears] == ["attn.q", "attn.k", "attn.v", "attn.o", *of_ffn]
    assert Eagle3Facts.from_json(facts.to_json()) == facts


def test_a_head_of_a_model_without_gates_has_gates() -> None:
    (layer,) = head_facts(read(ARCEE)).arch.layers
    assert layer.gated
    assert layer.intermediate_size == 48


def test_a_model_without_attention_has_no_head() -> None:
    with pytest.raises(UsageError, match="eagle3: no layer has attention"):
        head_facts(read(stated("M-E")))


@pytest.mark.parametrize(("pattern", "idx"), [("M*-", 1), ("*M*E", 2), ("-*M", 1)])
def test_a_fresh_head_begins_as_the_last_attention_and_an_ffn_of_noise(pattern: str, idx: int) -> None:
    source = tiny_source(**facts_of(read(stated(pattern))))
    facts = head_facts(source.arch)
    generator = torch.Generator().manual_seed(0)
    head = fresh_eagle3(facts, source, torch.arange(20), generator=generator)
    weights = {name: dense(each) for name, each in source.layer(idx).items()}
    own = dict(head.layers[0].named_parameters())
    for name in ("attn.q", "attn.k", "attn.v"):
        assert torch.equal(own[f"{name}.weight"][:, 32:], weights[f"{name}.weight"])
    assert torch.equal(own["attn.o.weight"], weights["attn.o.weight"])
    assert torch.equal(own["hidden_norm.weight"], weights["attn_norm.weight"])
    for name in ("gate", "up", "down"):
        assert float(own[f"ffn.{name}.weight"].detach().std()) == pytest.approx(0.02, rel=0.1)


def facts_of(arch: Arch) -> dict[str, Any]:
    names = ("layers", "activation", "hidden_size", "vocab_size", "family", "config")
    return {name: getattr(arch, name) for name in names}


def run_round(
    source: WeightSource, widths: Widths, scorer: Scorer, compensation: Compensation, directory: Path
) -> WeightSource:
    method = PruningMethod(scorer, compensation, "kv_group")
    ctx = Context("cpu", 0, directory)
    return prune_round(method, source, widths, tiny_tokens(source.arch, 6, 24), directory / "out", ctx)[0]


@pytest.mark.parametrize(
    ("scorer", "compensation"),
    [(Wanda(), LeastSquares()), (Taylor(num_samples=4), NoCompensation()), (Wanda(), BiasCompensation())],
    ids=["least squares", "gradients", "biases"],
)
@pytest.mark.parametrize("axis", ["ffn", "heads"])
def test_halves_are_pruned_as_those_of_whole_layers(
    axis: str, scorer: Scorer, compensation: Compensation, tmp_path: Path
) -> None:
    biased = compensation.needs_bias
    whole = tiny_source(ffn_bias=biased, qkv_bias=biased, o_bias=biased)
    halved = Halved(whole)
    found = []
    for name, source in (("whole", whole), ("halved", halved)):
        widths = replace(Widths.of(source.arch), **{"ffn": {"intermediate_size": 56}}.get(axis, {}))
        if axis == "heads":
            widths = replace(widths, num_heads=2, num_kv_heads=1)
        (tmp_path / name).mkdir()
        found.append(run_round(source, widths, scorer, compensation, tmp_path / name))
    expected = Halved(found[0])
    assert found[1].arch == expected.arch
    assert found[1].arch.num_params < halved.arch.num_params
    for idx in range(4):
        ours, theirs = found[1].layer(idx), expected.layer(idx)
        assert ours.keys() == theirs.keys()
        for name, each in ours.items():
            assert torch.allclose(dense(each), dense(theirs[name]), rtol=1e-4, atol=1e-5), (idx, name)


def test_the_stage_prunes_the_channels_of_ffns_and_leaves_mixers_as_they_are(tmp_path: Path) -> None:
    arch = read(stated("M-*-M"))
    tiny_checkpoint(tmp_path / "model", arch)
    stage(tmp_path, arch, {"ffn": {"keep": 0.5}, "multiple": 8, "score": "wanda", "compensate": "none"})
    source = Checkpoint(tmp_path / "model")
    widths = replace(Widths.of(arch), intermediate_size=24)
    small = StoredLayers(
        tmp_path / "out",
        arch.replace(layers=tuple(replace(each, intermediate_size=24) for each in arch.layers)),
    )
    assert Widths.of(small.arch) == widths
    for idx, layer in enumerate(arch.layers):
        before = {name: dense(each) for name, each in source.layer(idx).items()}
        after = {name: dense(each) for name, each in small.layer(idx).items()}
        if layer.only_half == "ffn":
            rows = before["ffn.up.weight"]
            kept_U = (rows[:, None] == after["ffn.up.weight"][None]).all(-1).any(1)
            assert int(kept_U.sum()) == 24
            keep_channels_(before, kept_U)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], each) for name, each in after.items())
    tokens_BS = torch.tensor([[idx % 61 for idx in ids(40, 8)]])
    with torch.inference_mode():
        found = engine_of(small, max_model_len=64).runner.score(tokens_BS)
    assert torch.allclose(found, decoded(small, tokens_BS), rtol=1e-4, atol=1e-4)


def stage(tmp_path: Path, arch: Arch, spec: dict[str, Any]) -> None:
    for name in ("tokens", "scratch", "out"):
        (tmp_path / name).mkdir()
    save_token_set(TokenSet(tiny_tokens(arch, 6, 24), 0, 0, {}), tmp_path / "tokens" / TOKENS_NAME)
    prune = STAGES.get("prune")
    inputs = Inputs(
        ModelSource(tmp_path / "model", "tiny", None, ""),
        {Port.DENSE: Input(tmp_path / "model", ""), Port.CALIB: Input(tmp_path / "tokens", "")},
    )
    out = ArtifactWriter(tmp_path / "out")
    prune.run(prune.spec.model_validate(spec), inputs, out, Context("cpu", 0, tmp_path / "scratch"))


def test_the_stage_removes_the_halves_that_do_nothing(tmp_path: Path) -> None:
    arch = read(stated("M-*-M-"))
    decoder = tiny_decoder(arch)
    for linear in (decoder.layers[1].ffn.down, decoder.layers[2].attn.o, decoder.layers[4].mamba.o):  # type: ignore[union-attr]
        linear.weight.zero_()  # type: ignore[operator, union-attr]
    source = MemorySource(decoder, dtype=torch.float32)
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", source)
    stage(tmp_path, arch, {"depth": {"keep": 3}})
    small = StoredLayers(tmp_path / "out", with_layers(arch, [0, 3, 5]))
    tokens_BS = tiny_tokens(arch, 2, 20).long()
    assert torch.equal(decoded(small, tokens_BS), decoded(source, tokens_BS))


@pytest.mark.parametrize("name", ["gated", "without gates", "experts"])
def test_predictions_for_halves_are_those_for_whole_layers(name: str, tmp_path: Path) -> None:
    whole = tiny_source(**WHOLE[name])
    schemes = [SCHEMES["W8A16"], SCHEMES["FP8_DYNAMIC"]]
    expected, found = (losses_of(source, schemes, tmp_path) for source in (whole, Halved(whole)))
    assert {(2 * idx + (not tap.startswith("attn")), tap) for idx, tap in expected} == found.keys()
    for (idx, tap), of_scheme in expected.items():
        assert found[2 * idx + (not tap.startswith("attn")), tap] == pytest.approx(of_scheme, rel=1e-3)


def losses_of(
    source: WeightSource, schemes: list[Scheme], scratch: Path
) -> dict[tuple[int, str], dict[str, float]]:
    tokens_NS = tiny_tokens(source.arch, 4, 16)
    visitor = Sensitivities(schemes, torch.float32)
    draws_NS = torch.rand(tokens_NS.shape, generator=torch.Generator().manual_seed(1))
    ctx = Context("cpu", 0, scratch)
    visit_gradients(source, tokens_NS, visitor, ctx, compute_dtype=torch.float32, draws_NS=draws_NS)
    return visitor.loss


@pytest.mark.parametrize("half", ["ffn", "mixer"])
def test_a_half_that_adds_nothing_changes_no_prediction_of_others(half: Any, tmp_path: Path) -> None:
    """Predictions are for one token, however many layers count them."""
    source = tiny_source(layers=(tiny_shape(), tiny_shape(only_half=half)))
    idle = HalfSilenced(source, "mixer" if half == "ffn" else "ffn")
    schemes = [SCHEMES["W8A16"]]
    found, expected = (
        losses_of(LayerSubset(idle, kept), schemes, tmp_path / str(len(kept))) for kept in ([0, 1], [0])
    )
    assert len(expected) == 4
    for key, of_scheme in expected.items():
        assert found[key] == pytest.approx(of_scheme, rel=1e-3)


WIDE = {
    "hidden_size": 64,
    "mamba_num_heads": 16,
    "mamba_head_dim": 4,
    "ssm_state_size": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_routed_experts": 4,
}


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq"])
def test_vllm_on_a_cpu_has_no_experts_without_gates(form: str) -> None:
    scheme = ModelScheme(SCHEMES["W4A16_G32" if form != "awq" else "W4A16_G32_ASYM"])

    def note(config: dict[str, Any]) -> str | None:
        stated_of = FORMATS.get(form).consumers(read(config), scheme)
        (cpu,) = [each for each in stated_of if each.name == "vLLM on a CPU"]
        return None if cpu.loads else cpu.note

    without = "it has no experts without gates"
    assert str(note(stated("ME*", **WIDE))).startswith(without)
    assert note(stated("M-*", **WIDE)) is None
    gated = {
        **{name: value for name, value in stated().items() if name in ARCEE},
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 64,
    }
    assert without not in str(note(gated))


def expert(name: str | None, size: int, seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor | QuantizedWeight:
        w_OI = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        if name is None:
            return w_OI
        scheme = SCHEMES[name]
        return round_to_nearest(w_OI, scheme, *min_max_scale(grouped(w_OI, scheme), scheme, torch.float32))

    return ExpertWeights(None, weight(size, 128), weight(128, size))


@pytest.mark.parametrize("name", [None, "W4A16_G128", "FP8_BLOCK"])
def test_parts_of_a_shared_expert_without_a_gate_add_up_to_it(name: str | None) -> None:
    shared = expert(name, 3 * 128, seed=100)
    x_TD = torch.randn(7, 128, generator=torch.Generator().manual_seed(3)).double()

    def output(of: ExpertWeights) -> Tensor:
        up, down = (
            each.double() if isinstance(each, Tensor) else each.dequantize(torch.float32).double()
            for each in (of.up, of.down)
        )
        return (x_TD @ up.t()).clamp_min(0) ** 2 @ down.t()

    cut = parts(shared, expert(name, 128, seed=1), 3)
    assert [each.gate for each in cut] == [None] * 3
    assert torch.allclose(sum(map(output, cut)), output(shared), rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
    gated = replace(expert(name, 128, seed=1), gate=expert(name, 128, seed=2).up)
    assert parts(shared, gated, 3) == []


def test_a_model_without_an_ffn_is_served_and_gets_no_eagle3_head() -> None:
    shape = tiny_shape(only_half="mixer", rope=None)
    source = tiny_source(layers=(replace(shape, recurrence=Mamba2(4, 2, 16, 12, 4, conv_bias=True)), shape))
    tokens_BS = torch.randint(101, (2, 37), generator=torch.Generator().manual_seed(4))
    expected = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    scored = Engine(source, device=CPU).runner.score(tokens_BS)
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    with pytest.raises(UsageError, match="no layer has an FFN"):
        eagle3_facts(source.arch, draft_vocab_size=32)

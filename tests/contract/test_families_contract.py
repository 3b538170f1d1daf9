"""What everything above the decoder does with every family: smoothing keeps its function, quantization comes
out of calibration, pruning and smaller students fit together. A new family is held to it by its golden
case."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_state import LayerPass, LayerState
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.stats import CrossMoment, SecondMoment, Stat
from compress.context import Context
from compress.distill.draft_head import DraftHeadObjective, Target
from compress.distill.losses import Divergence
from compress.distill.objective import Objective, Teacher, measure
from compress.distill.student import Shape, sliced_decoder, student_arch
from compress.errors import UnsupportedArch, UsageError
from compress.methods.quantize import SMOOTHERS
from compress.methods.quantize.gptaq import Gptaq
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass, SmoothPass
from compress.methods.quantize.rtn import Rtn
from compress.models.arch import Arch
from compress.models.canonical import layer_name, load_weights
from compress.models.decoder import Decoder
from compress.models.eagle3 import eagle3_facts
from compress.models.family import FAMILIES, family_of
from compress.models.fresh_eagle3 import fresh_eagle3
from compress.models.pruning import (
    Widths,
    keep_channels_,
    keep_heads_,
    resized,
    why_heads_stay,
    why_layers_stay,
    with_layers,
)
from compress.models.surgery import fold_
from compress.models.weights import MemorySource, Weights, build_decoder, build_layer
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.stages.prune.widths import legal_heads
from tests.support.slow import slow
from tests.support.tiny_cases import CASES
from tests.support.tiny_decoder import tiny_decoder
from tests.support.tiny_families import SMALL, TEXT_FAMILIES
from tests.support.tiny_hf import build_config, inner_widths, tokens

CPU = torch.device("cpu")
FIRST: dict[str, str] = {family: case for case, (family, _) in reversed(CASES.items())}
# What makes the widths of all layers equal in families in which those of full attention have others.
UNIFORM: dict[str, dict[str, Any]] = {
    **{
        name: {"num_global_key_value_heads": 2}
        for name in ("gemma4_text", "gemma4_unified_text", "gemma4-experts")
    },
    "laguna": {"num_attention_heads_per_layer": None},
    "dots3_note_text": {"layer_types": ["full_attention"] * 3},
    **{
        name: {"swa_num_key_value_heads": 2, "swa_head_dim": 16}
        for name in ("inkling_text", "inkling_text-dense")
    },
    "longcat_flash": {"expert_ffn_hidden_size": 128},
    "mimo_v2_flash": {"layer_types": ["sliding_attention"] * 3, "num_key_value_heads": 1},
}
OFTEN = ("llama", "gemma4_text", "qwen3_moe", "deepseek_v2")
"""Families whose cases of some tests are not slow: plain, with widths of two kinds, a mixture, and one with
latent attention."""
OF_CONTRACT = (
    *TEXT_FAMILIES,
    "gemma4-experts",
    "deepseek_v3-dense",
    "nemotron_h-experts",
    "nemotron_h-latents",
    "mistral_large4",
    "mistral_large4-shared-latents",
    "inkling_text-dense",
    "qwen4_exp_text-without-ngrams",
    "glm5_next",
)
"""The families, by their first cases, and cases that have what the first of their family has not."""
LAYERS_STAY = (
    *("mistral_large4-shared-latents", "hy_v4", "gemma3n_text", "qwen4_exp_text", "longcat_flash"),
    *("minimax", "gpt_neox_japanese", "openai-gpt"),
)
"""Cases of which no layer is removed, because others read it, or the choice of its indexer, or tokens have
embeddings for it, or tables of n-grams differ by their number, or experts are added after the next, or
decays, a bias or a norm follow from its place."""
each_family = pytest.mark.parametrize("family", OF_CONTRACT)


def arch_of(family: str, **changes: Any) -> Arch:
    """Return the facts of a family's first golden case, or of a case, in other widths."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    family, of_case = CASES[FIRST.get(family, family)]
    of_experts = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
    of_experts += ("expert_ffn_hidden_size",)
    widths |= {name: 64 for name in of_experts if name in of_case}
    widths |= {"head_dim": 16} | inner_widths(of_case, 32)
    config = build_config(family, {**of_case, **widths, **changes}).to_dict()
    return family_of(config).read_config(config | {"dtype": "float32"})


class Changed(MemorySource):
    """A decoder with other weights in its layers, and perhaps other widths."""

    def __init__(self, decoder: Decoder, layers: list[Weights], arch: Arch | None = None) -> None:
        super().__init__(decoder, dtype=torch.float32)
        self._layers = layers
        self._arch = decoder.arch if arch is None else arch

    @property
    def arch(self) -> Arch:
        return self._arch

    def layer(self, layer_idx: int) -> Weights:
        return self._layers[layer_idx]


def close(one: Tensor, other: Tensor) -> bool:
    """Two orders of the same roundings: 16 a layer over at most 128 features."""
    roundings = 16 * SMALL["num_hidden_layers"]
    atol = roundings * torch.finfo(torch.float32).eps * 128**0.5 * float(other.abs().max())
    return float((one - other).abs().max()) <= atol


@each_family
def test_facts_come_back_from_a_manifest(family: str) -> None:
    arch = arch_of(family)
    assert Arch.from_json(*arch.to_json()) == arch
    table = FAMILIES.get(arch.family)
    assert table.read_config(table.write_config(arch)).replace(config={}) == arch.replace(config={})


@each_family
def test_layers_that_keep_matrices_of_16_bits_compute_what_wide_ones_compute(family: str) -> None:
    """Layers are observed and replayed so where a device computes in float32. Matrices of other parts than
    the linears, as those of indexers, are widened, too; there are more tokens than an indexer chooses."""
    source = MemorySource(tiny_decoder(arch_of(family)), dtype=torch.bfloat16)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, 24)
    wide = decoder(tokens_BS)
    for idx in range(source.arch.num_layers):
        decoder.layers[idx] = build_layer(
            source.arch, idx, source.layer(idx), dtype=torch.float32, device=CPU, narrow=True
        )
    dtypes = {parameter.dtype for parameter in decoder.layers.parameters()}
    assert torch.bfloat16 in dtypes
    assert torch.equal(decoder(tokens_BS), wide)


@each_family
def test_smoothing_keeps_the_function(family: str) -> None:
    decoder = tiny_decoder(arch_of(family))
    source = MemorySource(decoder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    layers = []
    for idx, layer in enumerate(decoder.layers):
        weights = dict(source.layer(idx))
        pairs = layer.smoothing_pairs()
        has_none = layer.shape.only_half == "ffn" and layer.shape.experts is not None
        # decays read the norm of a delta net, and what capped experts compute is clamped
        has_none = has_none or (layer.shape.recurrence is not None and layer.shape.expert_cap is not None)
        assert pairs or has_none or layer.shape.has_entries  # which read all norms, too
        for pair in pairs:
            columns = weights[f"{pair.linears[0]}.weight"].shape[1]
            if pair.repeat > 1:
                own = torch.rand(columns // pair.repeat, generator=generator) + 0.5
                scale_I = own.view(-1, 1, pair.head_dim).expand(-1, pair.repeat, -1).reshape(-1)
            else:
                scale_I = torch.rand(columns, generator=generator) + 0.5
            fold_(weights, pair, scale_I, stored_dtype=torch.float32)
        layers.append(weights)
    smoothed = build_decoder(Changed(decoder, layers), dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, 24)
    assert close(smoothed(tokens_BS), decoder(tokens_BS))


def kl(decoder: Decoder, source: Any, tokens_BS: Tensor) -> float:
    other = build_decoder(source, dtype=torch.float32, device=CPU)
    log_p, log_q = (each(tokens_BS).log_softmax(-1) for each in (decoder, other))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("family", "scheme_name"),
    [
        *((family, "W4A16_G32") for family in OFTEN),
        *((family, "FP8_DYNAMIC") for family in OFTEN),
        *(slow(family, "W4A16_G32") for family in OF_CONTRACT if family not in OFTEN),
        *(slow(family, "FP8_DYNAMIC") for family in OF_CONTRACT if family not in OFTEN),
    ],
)
@pytest.mark.one_in(6)
def test_gptq_of_every_family_is_nearer_than_nearest_rounding(
    family: str, scheme_name: str, tmp_path: Path
) -> None:
    """Measured on the calibration's own tokens; and a true-sequential run, which compares with the source's
    activations, ends as well."""
    decoder = tiny_decoder(arch_of(family))
    source = MemorySource(decoder, dtype=torch.float32)
    scheme = ModelScheme(SCHEMES[scheme_name])
    calibration = tokens(24, 32)
    found = {}
    for name, rounder, target in (("rtn", Rtn(), None), ("gptq", Gptq(), None), ("true", Gptq(), Gptaq())):
        ctx = Context("cpu", 0, tmp_path / name)
        ctx.scratch.mkdir()
        passes: list[LayerPass] = [RoundPass(rounder, scheme, torch.float32, target=target)]
        compression = Compression(passes, scheme=scheme, true_sequential=target is not None)
        run_sequential(source, calibration, compression, ctx.scratch, ctx, compute_dtype=torch.float32)
        layers = [
            load_weights(ctx.scratch / layer_name(idx), scheme, prefix=f"layers.{idx}.")
            for idx in range(decoder.arch.num_layers)
        ]
        found[name] = kl(decoder, Changed(decoder, layers), calibration)
    assert 0 < found["gptq"] < found["rtn"]
    assert 0 < found["true"] < found["rtn"]


class CrossMoments:
    """A pass that keeps which taps of each layer see samples, and by how much the source's inputs of each tap
    of the first layer differ; it changes nothing."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, str]] = set()
        self.shares: dict[str, float] = {}

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, CrossMoment

    def apply(self, state: LayerState) -> None:
        for tap, stats in state.stats.items():
            cross = stats.get(CrossMoment)
            self.seen |= {(state.layer_idx, tap)} if cross is not None else set()
            if cross is not None and state.layer_idx == 0:
                share = cross.mean().norm() / stats[SecondMoment].mean().norm()
                self.shares[tap] = float(share)


@pytest.mark.parametrize(
    "family",
    [family if family in (*OFTEN, "flex_olmo") else slow(family) for family in OF_CONTRACT],
)
@pytest.mark.one_in(3)
def test_linears_in_turn_are_shown_what_the_source_has_at_every_tap(family: str, tmp_path: Path) -> None:
    """Eight bits lose little, so that inputs of any tap are nearly those of the source; in later layers some
    models amplify what was lost."""
    seen = CrossMoments()
    scheme = ModelScheme(SCHEMES["W8A16"])
    passes: list[LayerPass] = [seen, RoundPass(Rtn(), scheme, torch.float32)]
    ctx = Context("cpu", 0, tmp_path)
    compression = Compression(passes, scheme=scheme, true_sequential=True)
    source = MemorySource(tiny_decoder(arch_of(family)), dtype=torch.float32)
    run_sequential(source, tokens(8, 16), compression, tmp_path, ctx, compute_dtype=torch.float32)
    assert seen.seen >= {
        (idx, group.tap)
        for idx, layer in enumerate(source.arch.layers)
        for group in layer.groups
        if not group.name.startswith("expert.")
    }
    assert max(seen.shares.values()) < 0.1, seen.shares


@each_family
@pytest.mark.parametrize("smoother", SMOOTHERS.names())
@pytest.mark.one_in(12)
def test_every_smoother_runs_on_every_family(family: str, smoother: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(arch_of(family))
    scheme = ModelScheme(SCHEMES["W4A16_G32" if smoother == "awq" else "INT8_DYNAMIC"])
    passes: list[LayerPass] = [SmoothPass(SMOOTHERS.get(smoother)(), scheme, torch.float32)]
    source = MemorySource(decoder, dtype=torch.float32)
    ctx = Context("cpu", 0, tmp_path)
    run_sequential(
        source,
        tokens(4, 16),
        Compression(passes, scheme=scheme),
        ctx.scratch,
        ctx,
        compute_dtype=torch.float32,
    )
    layers = [load_weights(tmp_path / layer_name(idx), scheme) for idx in range(decoder.arch.num_layers)]
    smoothed = build_decoder(Changed(decoder, layers), dtype=torch.float32, device=CPU)
    assert close(smoothed(tokens(2, 24)), decoder(tokens(2, 24)))


@each_family
@pytest.mark.one_in(2)
def test_removing_what_is_zero_keeps_the_function(family: str) -> None:
    arch = arch_of(family, **UNIFORM.get(family, {}))
    decoder = tiny_decoder(arch)
    shape = arch.layers[0]
    heads_stay = why_heads_stay(arch) is not None
    channels = torch.arange(shape.intermediate_size) % 4 != 3
    if arch.has_experts or shape.sub_norms or FAMILIES.get(arch.family).ffn_spans_hidden:
        channels[:] = (
            True  # those of experts are not pruned, nor those that a norm spans, or that no field counts
        )
    num_groups = shape.num_kv_heads
    num_kept = num_groups if heads_stay else num_groups // 2
    groups = torch.arange(num_groups) < num_kept
    repeat = shape.num_heads // num_groups
    widths = Widths(num_kept * repeat, num_kept, int(channels.sum()), arch.num_layers)
    q_columns = groups.repeat_interleave(repeat * shape.value_dim)
    layers = []
    source = MemorySource(decoder, dtype=torch.float32)
    for idx, layer in enumerate(decoder.layers):
        prunes_channels = "ffn.down" in layer.shape.linears
        if prunes_channels:
            layer.ffn.down.weight[:, ~channels] = 0
        if not heads_stay:
            layer.attn.o.weight[:, ~q_columns] = 0
        weights = dict(source.layer(idx))
        if prunes_channels:
            keep_channels_(weights, channels)
        if not heads_stay:
            keep_heads_(weights, layer.shape, "kv_group", groups)
        layers.append(weights)
    smaller = build_decoder(Changed(decoder, layers, resized(arch, widths)), dtype=torch.float32, device=CPU)
    assert close(smaller(tokens(2, 24)), decoder(tokens(2, 24)))


@each_family
@pytest.mark.one_in(2)
def test_a_student_with_all_parts_computes_what_its_teacher_computes_and_a_smaller_one_learns(
    family: str,
) -> None:
    teacher = tiny_decoder(arch_of(family, **UNIFORM.get(family, {})))
    if teacher.arch.has_experts:
        with pytest.raises(UsageError, match="mixture of experts"):
            student_arch(teacher.arch, Shape())
        return
    if teacher.arch.has_latents:
        with pytest.raises(UsageError, match="latent attention"):
            student_arch(teacher.arch, Shape())
        return
    if teacher.arch.num_streams > 1:
        with pytest.raises(UsageError, match="several streams"):
            student_arch(teacher.arch, Shape())
        return
    if teacher.arch.has_recurrences:
        with pytest.raises(UsageError, match="recurrences"):
            student_arch(teacher.arch, Shape())
        return
    if teacher.arch.hyper is not None:
        with pytest.raises(UsageError, match="or its sums are normed"):
            student_arch(teacher.arch, Shape())
        return
    if why_layers_stay(teacher.arch) is not None:
        with pytest.raises(UsageError, match="No student is cut"):
            student_arch(teacher.arch, Shape())
        return
    source = MemorySource(teacher, dtype=torch.float32)
    whole = sliced_decoder(source, student_arch(teacher.arch, Shape())).requires_grad_(False)
    assert close(whole(tokens(2, 24)), teacher(tokens(2, 24)))
    first = teacher.arch.layers[0]
    heads = 4 if family == "codegen" else 2  # its tensors hold quarters of them
    kv_heads = 1 if first.num_kv_heads < first.num_heads else heads
    ffn = 64 * heads if FAMILIES.get(teacher.arch.family).ffn_spans_hidden else 64
    shape = Shape(layers=2, hidden=16 * heads, ffn=ffn, heads=heads, kv_heads=kv_heads)
    arch = student_arch(teacher.arch, shape)
    again = FAMILIES.get(arch.family).read_config(FAMILIES.get(arch.family).write_config(arch))
    assert again.replace(config={}) == arch.replace(config={})
    student = sliced_decoder(source, arch)
    tokens_BS = tokens(2, 17)
    loss = Objective(Divergence(), Teacher(teacher, device=CPU))(student, tokens_BS)
    loss.backward()
    with torch.no_grad():
        log_p, log_q = (each(tokens_BS[:, :-1]).log_softmax(-1) for each in (teacher, student))
        expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        held_out = measure(student, Teacher(teacher, device=CPU), tokens_BS, CPU, compute_dtype=torch.float32)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert held_out.kl_mean == pytest.approx(float(expected), rel=1e-4)
    norm = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]).norm()
    assert 0 < float(norm) < float("inf")


@each_family
@pytest.mark.one_in(2)
def test_an_eagle3_head_of_every_family_is_trained(family: str) -> None:
    target = tiny_decoder(arch_of(family))
    if target.arch.num_streams > 1:
        with pytest.raises(UsageError, match="streams, and a head reads hidden states of one"):
            eagle3_facts(target.arch, draft_vocab_size=40)
        return
    if not any(layer.attends for layer in target.arch.layers):
        with pytest.raises(UsageError, match="no layer has attention"):
            eagle3_facts(target.arch, draft_vocab_size=40)
        return
    facts = eagle3_facts(target.arch, draft_vocab_size=40)
    source = MemorySource(target, dtype=torch.float32)
    vocabulary_W = torch.arange(40)
    head = fresh_eagle3(facts, source, vocabulary_W, generator=torch.Generator().manual_seed(0))
    objective = DraftHeadObjective(Divergence(), Target(target, facts.layer_ids, vocabulary_W, device=CPU), 2)
    loss = objective(head, tokens(2, 17))
    loss.backward()
    assert 0 < float(loss) < float("inf")


@pytest.mark.parametrize("family", [each for each in OF_CONTRACT if each not in LAYERS_STAY])
def test_removed_layers_take_their_types_with_them(family: str) -> None:
    arch = arch_of(family)
    shorter = with_layers(arch, [0, 2])
    again = FAMILIES.get(arch.family).read_config(FAMILIES.get(arch.family).write_config(shorter))
    assert again.layers == shorter.layers == (arch.layers[0], arch.layers[2])


def test_without_its_dense_layer_a_model_counts_none() -> None:
    arch = arch_of("hy_v3", first_k_dense_replace=1)
    written = FAMILIES.get(arch.family).write_config(with_layers(arch, [1, 2]))
    assert written["first_k_dense_replace"] == 0
    assert written["mlp_layer_types"] == ["sparse", "sparse"]
    read = FAMILIES.get(arch.family).read_config
    assert [each.experts is None for each in read(written).layers] == [False, False]
    for changes in ({"first_k_dense_replace": 1}, {"mlp_layer_types": ["dense", "sparse"]}):
        with pytest.raises(UnsupportedArch, match="first_k_dense_replace"):
            read({**written, **changes})


def test_removed_layers_take_their_base_frequencies_with_them() -> None:
    arch = arch_of("granite_swa", layer_rope_theta=[0, 1e4, 1e4], rope_theta=1e4)
    shorter = with_layers(arch, [0, 2])
    written = FAMILIES.get(arch.family).write_config(shorter)
    assert written["layer_rope_theta"] == [0, 1e4]
    again = FAMILIES.get(arch.family).read_config(written)
    assert [each.rope is None for each in again.layers] == [True, False]
    own = FAMILIES.get(arch.family).read_config({**written, "layer_rope_theta": [0, 7e5]})
    assert own.layers[1].rope is not None
    assert own.layers[1].rope.theta == 7e5
    with pytest.raises(UnsupportedArch, match="layer_rope_theta"):
        FAMILIES.get(arch.family).read_config({**written, "layer_rope_theta": [7e5, 1e4]})


def test_the_gradient_through_capped_logits_is_that_of_autograd() -> None:
    teacher = tiny_decoder(arch_of("gemma2", final_logit_softcapping=2.0))
    student = tiny_decoder(replace(teacher.arch), seed=1).requires_grad_(True)
    tokens_BS = tokens(2, 17)
    Objective(Divergence(), Teacher(teacher, device=CPU))(student, tokens_BS).backward()
    ours = {name: p.grad for name, p in student.named_parameters()}
    student.zero_grad()
    log_p, log_q = (each(tokens_BS[:, :-1]).log_softmax(-1) for each in (teacher, student))
    (log_p.exp() * (log_p - log_q)).sum(-1).mean().backward()
    for name, parameter in student.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-3, atol=1e-6), name


def read(family: str, **fields: Any) -> Arch:
    """Return the facts of the config of a family's first golden case with other fields."""
    return FAMILIES.get(family).read_config(dict(arch_of(family).config) | fields)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("glm4_moe_lite", "partial_rotary_factor", 0.5),
        ("glm4_moe_lite", "first_k_dense_replace", 2),
        ("deepseek_v2", "head_dim", 16),
        ("deepseek_v3", "qk_head_dim", 16),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "v_head_dim", 32),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "n_group", 2),
    ],
)
def test_configs_of_latents_that_programs_read_in_several_ways_are_refused(
    family: str, field: str, value: Any
) -> None:
    of_refusal = {"num_key_value_heads": "KV heads", "v_head_dim": "values of 32"}.get(field, field)
    with pytest.raises(UnsupportedArch, match=of_refusal):
        read(family, **{field: value})


def test_removed_dense_layers_are_stated_to_each_program_that_counts_them() -> None:
    arch = read("glm4_moe_lite", first_k_dense_replace=1)
    written = FAMILIES.get(arch.family).write_config(with_layers(arch, [1, 2]))
    assert (written["mlp_layer_types"], written["first_k_dense_replace"]) == (["sparse"] * 2, 0)


def test_heads_of_latents_are_pruned_to_numbers_that_transformers_takes() -> None:
    assert legal_heads(arch_of("deepseek_v2"), "kv_group", 1) == [1, 2, 4]
    assert legal_heads(arch_of("deepseek_v3"), "kv_group", 1) == [1, 2, 3, 4]


def test_a_manifest_of_latents_in_some_layers_or_of_another_rope_is_refused() -> None:
    arch = arch_of("deepseek_v3-dense")
    facts, layers = arch.to_json()
    without = {name: fact for name, fact in layers[1].items() if name != "latent"}
    whole = {**layers[1], "rope": {**layers[1]["rope"], "rotary_dim": 0}}
    for other in (without, whole):
        with pytest.raises(UnsupportedArch, match="layer 1"):
            Arch.from_json(facts, [layers[0], other, layers[2]])

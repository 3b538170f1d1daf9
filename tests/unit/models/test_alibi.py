"""ALiBi as a fact of a layer, and the families that have it: BLOOM, MPT and Falcon-RW."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from compress.distill.student import Shape, sliced_decoder, student_arch
from compress.errors import StorageError, UnsupportedArch, UsageError
from compress.export import FORMATS
from compress.models.alibi import Alibi, by_distance
from compress.models.arch import Arch
from compress.models.config_notes import unread_note
from compress.models.decoder import Decoder
from compress.models.experts import Experts
from compress.models.family import family_of, family_of_arch
from compress.models.pruning import Widths, resized, why_channels_stay, why_heads_stay
from compress.models.smoothing_pairs import smoothing_pairs_of
from compress.models.weights import MemorySource, build_layer
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.tiny_source import tiny_shape, tiny_source

VOCAB = {"vocab_size": 97}
BLOOM: dict[str, Any] = {**VOCAB, "model_type": "bloom", "n_layer": 2, "n_head": 6, "hidden_size": 48}
MPT: dict[str, Any] = {**VOCAB, "model_type": "mpt", "n_layers": 2, "n_heads": 6, "d_model": 48}
FALCON: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "hidden_size": 48,
    "alibi": True,
}
each_config = pytest.mark.parametrize("config", [BLOOM, MPT, FALCON], ids=["bloom", "mpt", "falcon"])


def arch_of(config: dict[str, Any], **changes: Any) -> Arch:
    config = {**config, **changes}
    return family_of(config).read_config(config)


def slopes_of(arch: Arch) -> torch.Tensor:
    layer = arch.layers[0]
    assert layer.alibi is not None
    return layer.alibi.slopes(layer.num_heads, arch.score_scale(layer))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 24])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    """Terms of position 1 are the slopes; those of MPT are of positions before the last. Powers in float32
    have an error of a unit in the last place."""
    facts = {"rtol": 2 * torch.finfo(torch.float32).eps, "atol": 0}
    sizes = {"n_head": num_heads, "hidden_size": 16 * num_heads}
    bloom = modeling_bloom._get_alibi_slopes(num_heads, torch.device("cpu"))
    torch.testing.assert_close(slopes_of(arch_of(BLOOM, **sizes)), bloom, **facts)
    for largest in (8, 16, 3):
        sizes = {"n_heads": num_heads, "d_model": 16 * num_heads}
        mpt = modeling_mpt.build_mpt_alibi_tensor(num_heads, 2, largest)
        found = slopes_of(arch_of(MPT, **sizes, attn_config={"alibi_bias_max": largest}))
        torch.testing.assert_close(found, -mpt[:, 0, 0], **facts)
    sizes = {"num_attention_heads": num_heads, "hidden_size": 16 * num_heads}
    falcon = modeling_falcon.build_alibi_tensor(torch.ones(1, 2).long(), num_heads, torch.float32)
    assert torch.equal(slopes_of(arch_of(FALCON, **sizes)), falcon[:, 0, 1] * 16**-0.5)


def test_terms_fall_with_the_distance() -> None:
    terms = by_distance(torch.tensor([0.5, 0.25]), 2, 4)
    assert torch.equal(terms[0], torch.tensor([[-1.0, -0.5, 0.0, 0.5], [-1.5, -1.0, -0.5, 0.0]]))
    assert torch.equal(terms[1], terms[0] / 2)


@each_config
def test_the_manifest_states_it(config: dict[str, Any]) -> None:
    arch = arch_of(config)
    facts, layers = arch.to_json()
    assert Arch.from_json(facts, layers) == arch
    assert "alibi" in layers[0]
    for wrong in ({}, {"exponent": 0}, {"exponent": -1.0}, {"exponent": 8.0, "as_powers": 1}):
        with pytest.raises(StorageError):
            Arch.from_json(facts, [{**layers[0], "alibi": wrong}, layers[1]])
    plain = tiny_source().arch
    assert all("alibi" not in layer for layer in plain.to_json()[1])


def test_sizes_are_read_and_written_by_the_names_that_a_config_states() -> None:
    older = {"model_type": "bloom", "vocab_size": 97, "n_embed": 48, "n_layer": 2, "num_attention_heads": 6}
    arch = arch_of(older, seq_length=512)
    assert arch.replace(config={}, max_position=2048) == arch_of(BLOOM).replace(config={})
    assert arch.max_position == 512
    smaller = student_arch(arch, Shape(layers=1, hidden=24, ffn=96, heads=3, kv_heads=3))
    written = family_of_arch(smaller).write_config(smaller)
    sizes = {"n_embed": 24, "num_attention_heads": 3, "n_head": 3, "n_layer": 1}
    assert {name: written[name] for name in sizes} == sizes
    assert family_of(written).read_config(written).replace(config={}) == smaller.replace(config={})
    clipped = arch_of(MPT, attn_config={"clip_qkv": 6, "softmax_scale": 1})
    assert (clipped.qkv_clip, clipped.attn_scale) == (6.0, 1.0)
    written = family_of_arch(clipped).write_config(clipped)
    # the class of `transformers` takes floats alone
    assert [repr(each) for each in written["attn_config"].values()] == ["6.0", "1.0"]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (BLOOM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    (BLOOM, {"slow_but_exact": True}, "slow_but_exact"),
    (MPT, {"expansion_ratio": 2}, "expansion_ratio"),
    (MPT, {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
    (MPT, {"no_bias": False}, "no_bias"),
    (MPT, {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type = 'mptglu'; it must be mptmlp"),
    (MPT, {"ffn_config": {"ffn_act_fn": {"name": "silu"}}}, "ffn_act_fn"),
    (MPT, {"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}}, "ffn_act_fn"),
    (MPT, {"norm_type": "rmsnorm"}, "norm_type"),
    (MPT, {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}, "auto_map"),
    *(
        (MPT, {"attn_config": {name: value}}, name)
        for name, value in {
            "alibi": False,
            "qk_ln": True,
            "prefix_lm": True,
            "attn_uses_sequence_id": True,
            "attn_type": "multiquery_attention",
            "kv_n_heads": 2,
            "rope": True,
            "fused_qkv": False,
            "sliding_window_size": 512,
            "alibi_bias_max": 0,
            "clip_qkv": -1.0,
            "softmax_scale": "x",
        }.items()
    ),
]


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED)
def test_what_the_decoder_does_not_compute_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(config, **changes)


def test_an_mpt_may_state_the_defaults_of_the_program_that_trained_it() -> None:
    """LLM Foundry writes them all, and those of a rope where there is none."""
    defaults = {
        "attn_type": "multihead_attention",
        "fused_qkv": True,
        "qk_gn": False,
        "sliding_window_size": -1,
        "attn_logit_softcapping": None,
        "rope": False,
        "rope_theta": 10000,
        "rope_impl": "dail",
        "rope_dail_config": {"type": "original", "pos_idx_in_fp32": True, "xpos_scale_base": 512},
        "rope_hf_config": {"type": "no_scaling", "factor": 1.0},
    }
    ffn = {"ffn_type": "mptmlp", "ffn_act_fn": {"name": "gelu", "approximate": "none"}}
    arch = arch_of(MPT, attn_config=defaults, ffn_config=ffn)
    assert arch.replace(config={}) == arch_of(MPT).replace(config={})
    assert unread_note(arch) is None


def test_what_transformers_computes_otherwise_is_noted() -> None:
    assert "bfloat16" in (unread_note(arch_of(FALCON)) or "")
    assert unread_note(arch_of(FALCON, alibi=False)) is None
    slopes = arch_of(MPT, attn_config={"alibi_bias_max": 16})
    assert "alibi_bias_max = 16" in (unread_note(slopes) or "")
    assert unread_note(arch_of(MPT)) is None
    scheme = ModelScheme(SCHEMES["W8A16"])
    for arch, loads in ((slopes, False), (arch_of(MPT), True)):
        consumers = FORMATS.get("compressed-tensors").consumers(arch, scheme)
        assert {each.name: each.loads for each in consumers}["transformers"] == loads


@each_config
def test_no_head_is_removed_because_slopes_follow_from_their_number(config: dict[str, Any]) -> None:
    assert "slopes of ALiBi" in (why_heads_stay(arch_of(config)) or "")


@pytest.mark.parametrize("config", [BLOOM, MPT], ids=["bloom", "mpt"])
def test_ffns_of_another_width_are_stated_by_no_config(config: dict[str, Any]) -> None:
    arch = arch_of(config)
    assert "a multiple of hidden_size" in (why_channels_stay(arch) or "")
    narrow = resized(arch, replace(Widths.of(arch), intermediate_size=160))
    with pytest.raises(UnsupportedArch, match=r"160 channels.*192: keep all channels"):
        family_of_arch(narrow).write_config(narrow)
    with pytest.raises((UnsupportedArch, UsageError), match="keep all channels"):
        student_arch(arch, Shape(ffn=96))


@each_config
def test_a_student_has_the_slopes_of_its_own_number_of_heads(config: dict[str, Any]) -> None:
    own = {"multi_query": False, "parallel_attn": False} if config is FALCON else {}
    teacher = arch_of(config, **own)
    student = student_arch(teacher, Shape(hidden=24, ffn=96, heads=3, kv_heads=3))
    written = family_of_arch(student).write_config(student)
    assert torch.equal(slopes_of(student), slopes_of(family_of(written).read_config(written)))
    assert len(slopes_of(student)) == 3
    decoder = sliced_decoder(MemorySource(Decoder(teacher), dtype=torch.float32), student)
    assert decoder(torch.tensor([[1, 2, 3]])).shape == (1, 3, 97)


def test_values_that_are_clipped_are_not_scaled() -> None:
    for clip, producers in ((None, ["attn_norm", "attn.v"]), (1.0, ["attn_norm"])):
        source = tiny_source(qkv_clip=clip)
        layer = build_layer(source.arch, 0, source.layer(0), dtype=torch.float32, device=torch.device("cpu"))
        pairs = [each.producer for each in smoothing_pairs_of(layer)]
        assert [each for each in pairs if each.startswith("attn")] == producers


@pytest.mark.parametrize(
    ("layer", "facts", "message"),
    [
        ({"alibi": Alibi(), "chunk": 8}, {}, "terms of the distance"),
        ({"alibi": Alibi(), "keys_are_values": True}, {}, "terms of the distance"),
        ({"alibi": Alibi(), "only_half": "ffn"}, {}, "facts of what is in place of attention"),
        ({"alibi": Alibi()}, {"attn_softcap": 3.0}, "a cap or sinks"),
        ({"alibi": Alibi()}, {"attn_sinks": True}, "a cap or sinks"),
        ({"output_gate": True}, {"qkv_clip": 1.0}, "clipped"),
        ({"only_half": "ffn", "experts": Experts(4, 2, 32)}, {"qkv_clip": 1.0}, "clipped"),
    ],
)
def test_facts_that_no_kernel_computes_with_it_are_refused(
    layer: dict[str, Any], facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        tiny_source(layers=(tiny_shape(**layer),), **facts)

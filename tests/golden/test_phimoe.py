"""Phi-3.5-MoE: weights of SparseMixer, and a rope whose factors depend on the longest sequence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from compress.errors import StorageError, UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.layer_shape import Rope
from compress.models.moe import route
from compress.models.rope import inverse_frequencies
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.untrusted.fields import Fields
from tests.golden.test_families import tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_cases.mixtures import LONGROPE_OF_MIXTURE
from tests.support.tiny_hf import saved, tokens

CONFIG: dict[str, Any] = {
    "model_type": "phimoe",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "dtype": "float32",
}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.2])
@pytest.mark.parametrize(("size", "mean"), [(0.1, 0.0), (1.0, 0.0), (5.0, 0.0), (1.0, 5.0), (1.0, -5.0)])
def test_experts_are_chosen_and_weighed_as_by_transformers(jitter: float, size: float, mean: float) -> None:
    logits_TE = mean + size * torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    expected_TR, experts_TR = sparsemixer(logits_TE, jitter, training=False)
    routing = route(Experts(16, 2, 8, score="sparsemixer", jitter=jitter), logits_TE)
    assert torch.equal(routing.experts_TR, experts_TR)
    assert torch.equal(routing.weights_TR, expected_TR)
    shares = (routing.weights_TR < 1).float().mean()
    assert float(shares) == 0 if jitter == 0 else float(shares) > 0


def test_of_equal_logits_each_has_its_share() -> None:
    routing = route(Experts(4, 2, 8, score="sparsemixer"), torch.zeros(1, 4))
    assert routing.experts_TR.tolist() == [[0, 1]]
    torch.testing.assert_close(routing.weights_TR, torch.tensor([[1 / 4, 1 / 3]]))


def test_weights_have_a_gradient() -> None:
    logits_TE = torch.tensor([[1.0, 0.99, -3.0, 0.98]], requires_grad=True)
    route(Experts(4, 2, 8, score="sparsemixer", jitter=0.01), logits_TE).weights_TR.sum().backward()
    assert logits_TE.grad is not None
    assert logits_TE.grad[0, 2] == 0
    assert bool((logits_TE.grad[0, [0, 1, 3]] != 0).all())


def test_facts_of_a_config() -> None:
    arch = arch_of(attention_bias=True, lm_head_bias=True, router_jitter_noise=0.05)
    assert all((arch.qkv_bias, arch.o_bias, arch.head_bias, arch.norm_bias))
    experts = arch.layers[0].experts
    assert experts == Experts(16, 2, 48, score="sparsemixer", jitter=0.05)
    assert experts.gap == 0.1
    assert Arch.from_json(*arch.to_json()) == arch
    assert not arch_of().head_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 3}, "top_k"),
        ({"renormalize": True}, "score"),
        ({"num_groups": 4}, "score"),
        ({"score": "softmax"}, "jitter"),
    ],
)
def test_other_routings_have_no_such_score(changes: dict[str, Any], message: str) -> None:
    stored = {"num_experts": 16, "top_k": 2, "expert_size": 8, "score": "sparsemixer", "jitter": 0.01}
    assert Experts.from_json(Fields(stored, "experts", StorageError)).gap == 0.02
    with pytest.raises(StorageError, match=message):
        Experts.from_json(Fields(stored | changes, "experts", StorageError))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 1}, "top_k = 1"),
        ({"rope_parameters": {**LONGROPE_OF_MIXTURE, "long_mscale": 1.5}}, "long_mscale"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}, "auto_map"),
        ({"lm_head_bias": True, "tie_word_embeddings": True}, "the head has a bias and is the embedding"),
    ],
)
def test_what_is_computed_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)


def test_the_factor_of_cos_and_sin_is_the_stated_one() -> None:
    older = {**LONGROPE_OF_MIXTURE, "type": "longrope"}
    for name, rope in (("rope_parameters", LONGROPE_OF_MIXTURE), ("rope_scaling", older)):
        read = (
            arch_of(**{name: {key: each for key, each in rope.items() if key != "rope_theta"}}).layers[0].rope
        )
        assert isinstance(read, Rope)
        assert (read.kind, read.attention_factor, read.theta) == ("longrope", 1.25, 1e6)


def test_transformers_takes_the_short_factors_for_every_length(tmp_path: Path) -> None:
    """What the note of the family says: sequences beyond the first positions differ, by these factors."""
    family, changes = CASES["phimoe-longrope"]
    rope = {**LONGROPE_OF_MIXTURE, "original_max_position_embeddings": 16}
    model = saved(tmp_path, family, {**changes, "rope_parameters": rope})
    tokens_BS = tokens(2, 24)
    source = Checkpoint(tmp_path)
    layer_rope = source.arch.layers[0].rope
    assert layer_rope is not None
    long = inverse_frequencies(layer_rope, 8, is_long=True)
    short = inverse_frequencies(layer_rope, 8)
    stretched = torch.tensor(rope["long_factor"]) / torch.tensor(rope["short_factor"])
    torch.testing.assert_close(short / long, stretched)
    decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], "long_factor": rope["short_factor"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with_short = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        expected = model(tokens_BS).logits
        assert (with_short(tokens_BS) - expected).abs().max() <= tolerance(expected)
        assert (decoder(tokens_BS) - expected).abs().max() > 1000 * tolerance(expected)
        torch.testing.assert_close(decoder(tokens_BS[:, :16]), with_short(tokens_BS[:, :16]))


def test_vllm_knows_the_class_of_the_published_config_and_one_jitter() -> None:
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])

    def note(**changes: Any) -> str | None:
        arch = arch_of(**{"architectures": ["PhiMoEForCausalLM"], **changes})
        consumers = FORMATS.get("compressed-tensors").consumers(arch, scheme)
        (vllm,) = [each for each in consumers if each.name == "vLLM"]
        return None if vllm.loads else vllm.note

    assert note() is None
    assert "0.01" in str(note(router_jitter_noise=0.02))
    assert "the bias of the head" in str(note(lm_head_bias=True))
    assert "PhiMoEForCausalLM" in str(note(architectures=["PhimoeForCausalLM"]))


def test_experts_of_four_bits_have_another_routing_in_vllm_on_a_cpu() -> None:
    arch = arch_of(architectures=["PhiMoEForCausalLM"], intermediate_size=64)
    for scheme, loads in (("W4A16_G32", False), ("FP8_DYNAMIC", True)):
        linears = {f"layers.{idx}.{name}" for idx, layer in enumerate(arch.layers) for name in layer.linears}
        dense = [(each, None) for each in sorted(linears) if ".experts." in each and loads]
        made = ModelScheme(SCHEMES[scheme], exceptions=tuple(dense))
        consumers = {each.name: each for each in FORMATS.get("compressed-tensors").consumers(arch, made)}
        assert consumers["vLLM"].loads
        assert consumers["vLLM on a CPU"].loads == loads

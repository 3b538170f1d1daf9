"""Mistral Large 4: layers that share latents or have none that rotate, trained frequencies of a rope, and
queries that grow by parameters of each head."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import EnvironmentUnfit, UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.indexer import Indexer
from compress.models.layer_shape import Rope
from compress.models.pruning import keep_heads_, why_heads_stay, why_layers_stay, with_layers
from compress.models.query_growth import learned_growth
from compress.models.rope import inverse_frequencies
from compress.models.weights import MemorySource
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.engine import Engine
from tests.support.tiny_cases import CASES
from tests.support.tiny_decoder import tiny_decoder
from tests.support.tiny_hf import saved
from tests.support.tiny_source import LIKE_LARGE4, tiny_shape, tiny_source

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {
    "model_type": "mistral_large4_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "index_topk": 24,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "no_rope_layers": [1, 1, 0, 1, 0],
    "indexer_types": ["full", "shared", "full", "full", "shared"],
}
SHARED = {"kv_source_layers": [0, 0, 2, 0, 2]}


def config_of(**changes: Any) -> dict[str, Any]:
    return {"model_type": "mistral_large4", "dtype": "float32", "text_config": {**TEXT, **changes}}


def arch_of(**changes: Any) -> Arch:
    return family_of(config_of()).read_config(config_of(**changes))


def sources(arch: Arch) -> list[int | None]:
    return [layer.kv_source for layer in arch.layers]


@pytest.mark.parametrize("changes", [{}, SHARED], ids=["own", "shared"])
def test_what_a_manifest_and_a_config_state_is_read_back_and_every_parameter_counts(
    changes: dict[str, Any],
) -> None:
    arch = arch_of(**changes)
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    written = family_of(config_of()).write_config(arch)
    assert family_of(written).read_config(written).replace(config={}) == arch.replace(config={})
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())
    assert arch.max_position == 64
    assert arch.latent_eps == 1e-5


def test_layers_without_positions_share_nothing_that_rotates() -> None:
    arch = arch_of(**SHARED)
    latents = [layer.latent for layer in arch.layers]
    assert [each.rope_dim for each in latents if each] == [6, 6, 0, 6, 0]
    assert [layer.rope is None for layer in arch.layers] == [False, False, True, False, True]
    assert [layer.cached_numbers for layer in arch.layers] == [18, 0, 12, 0, 0]
    assert [layer.linear_shape("attn.kv_up", 32)[0] for layer in arch.layers] == [96, 96, 120, 96, 120]
    assert ["attn.kv_down" in layer.linears for layer in arch.layers] == [True, False, True, False, False]
    indexer = Indexer(num_heads=3, head_dim=8, top_k=24, of_stream=True, interleaved=True)
    assert [each.indexer for each in latents if each] == [indexer, None, indexer, indexer, None]
    assert arch.layers[0].dense_shapes(32)["attn.indexer.q.weight"] == (24, 32)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, [None] * 5),
        ([0, 1, 2, 3, 4], [None] * 5),
        ([0, 0, 2, 0, 2], [None, 0, None, 0, 2]),
        ([0, 1, 2, 1, 2], [None, None, None, 1, 2]),
    ],
)
def test_a_layer_reads_its_own_latents_or_those_stated(
    stated: list[int] | None, expected: list[int | None]
) -> None:
    assert sources(arch_of(kv_source_layers=stated)) == expected


@pytest.mark.parametrize(
    "stated",
    [
        [0, 0, 2, 0],  # not one for each layer
        [0, 0, 0, 0, 2],  # a layer without positions reads one with
        [0, 0, 2, 2, 2],
        [0, 2, 2, 3, 4],  # a later layer
        [0, 0, 2, 1, 4],  # a layer that has none of its own
        [0, 0, 2, 3, 4, 5],
    ],
)
def test_latents_that_transformers_would_not_take_are_refused(stated: list[int]) -> None:
    with pytest.raises(UnsupportedArch, match="kv_source_layers"):
        arch_of(kv_source_layers=stated)


def test_of_two_shared_layers_the_last_one_is_read() -> None:
    plain = {"no_rope_layers": [1] * 5, "indexer_types": None}
    assert sources(arch_of(kv_source_layers=[0, 0, 2, 2, 4], **plain)) == [None, 0, None, 2, None]
    with pytest.raises(UnsupportedArch, match="kv_source_layers"):
        arch_of(kv_source_layers=[0, 0, 2, 2, 0], **plain)


def test_a_latent_of_queries_is_refused() -> None:
    with pytest.raises(UnsupportedArch, match="q_lora_rank"):
        arch_of(q_lora_rank=8)


def test_layers_that_others_read_stay_and_heads_do_not() -> None:
    shared = arch_of(**SHARED, indexer_types=None)
    assert "read keys and values, or latents, of earlier ones" in str(why_layers_stay(shared))
    assert why_heads_stay(shared) is None
    plain = arch_of(kv_source_layers=[0, 1, 2, 3, 4], indexer_types=None)
    shorter = with_layers(plain, [0, 2, 3])
    written = family_of(config_of()).write_config(shorter)
    assert written["text_config"]["kv_source_layers"] == [0, 1, 2]
    assert written["text_config"]["no_rope_layers"] == [1, 0, 1]
    assert family_of(written).read_config(written).layers == shorter.layers


def test_a_removed_head_takes_its_growth_along() -> None:
    arch = arch_of(**SHARED)
    source = MemorySource(tiny_decoder(arch), dtype=torch.float32)
    weights = dict(source.layer(1))
    before = dict(weights)
    keep_heads_(weights, arch.layers[1], "kv_group", torch.tensor([True, False, True, True]))
    for name in ("attn.growth_scale", "attn.growth_base"):
        assert torch.equal(weights[name], before[name][[0, 2, 3]])
    assert weights["attn.kv_up.weight"].shape == (72, 12)
    assert weights["attn.q.weight"].shape == (48, 32)
    assert weights["attn.o.weight"].shape == (32, 42)


def test_norms_of_latents_that_several_layers_read_are_in_no_pair() -> None:
    source = tiny_source(**LIKE_LARGE4)
    assert source.arch.kv_sources == {0, 2}
    layers = Decoder(source.arch).layers
    taps = [[pair.tap for pair in layer.smoothing_pairs()] for layer in layers]
    assert not any("kv_latent" in each for each in taps)
    own = tuple(replace(layer, kv_source=None) for layer in source.arch.layers)
    apart = Decoder(source.arch.replace(layers=own)).layers
    assert all("kv_latent" in [pair.tap for pair in layer.smoothing_pairs()] for layer in apart)


def test_growth_of_a_head_is_a_line_in_the_logarithm_of_the_position() -> None:
    scale_H, base_H = torch.tensor([0.5, -0.25]), torch.tensor([1.0, 2.0])
    found_SH = learned_growth(scale_H, base_H, torch.tensor([0, 1, 99]), torch.float32)
    for row, position in zip(found_SH, (0, 1, 99), strict=True):
        log = math.log(position + 1)
        assert row.tolist() == pytest.approx([0.5 * log + 1.0, -0.25 * log + 2.0])


def test_growth_without_latents_or_with_another_is_refused() -> None:
    for changes in ({"layers": (tiny_shape(),)}, {"query_growth": (0.1, 16)}):
        with pytest.raises(UnsupportedArch, match="queries grow by parameters"):
            tiny_source(**{**LIKE_LARGE4, **changes})


def test_readers_of_latents_of_another_width_or_order_are_refused() -> None:
    first, second, *others = LIKE_LARGE4["layers"]
    turned = not second.latent.interleaved
    for changes in ({"kv_rank": 24}, {"interleaved": turned}):
        other = replace(second, latent=replace(second.latent, **changes))
        with pytest.raises(UnsupportedArch, match="layer 1: it reads the latents of layer 0"):
            tiny_source(**{**LIKE_LARGE4, "layers": (first, other, *others)})
    with pytest.raises(UnsupportedArch, match=r"layer 1: a layer reads .* a latent of queries"):
        tiny_source(
            **{**LIKE_LARGE4, "layers": (first, replace(second, latent=replace(second.latent, q_rank=8)))}
        )


def test_each_frequency_has_its_own_factor() -> None:
    rope = Rope(100.0, rotary_dim=8)
    trained = replace(rope, exponents=(0.5, -1.0, 0.0, 2.0))
    plain, found = inverse_frequencies(rope, 12), inverse_frequencies(trained, 12)
    expected = plain[:4] * torch.tensor([0.5, -1.0, 0.0, 2.0]).exp()
    assert torch.equal(found, torch.cat((expected, torch.zeros(2))))


def test_as_many_exponents_as_frequencies_are_stated() -> None:
    with pytest.raises(UnsupportedArch, match="3 exponents of frequencies, and 8 frequencies"):
        tiny_source(layers=(tiny_shape(rope=Rope(100.0, exponents=(0.1, 0.2, 0.3))),))


def store_exponents(directory: Path, value: torch.Tensor | None) -> None:
    """Store other exponents in a checkpoint, or none."""
    file = directory / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if name != "lerope.alpha"}
    own = {} if value is None else {"lerope.alpha": value}
    save_file({**tensors, **own}, file, metadata={"format": "pt"})


def exponents_of(directory: Path) -> list[tuple[float, ...] | None]:
    ropes = [layer.rope for layer in Checkpoint(directory).arch.layers]
    return [None if rope is None else rope.exponents for rope in ropes]


def test_exponents_are_read_with_the_config_or_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["mistral_large4"])
    stored = tuple(load_file(tmp_path / "model.safetensors")["lerope.alpha"].tolist())
    assert any(stored)
    assert exponents_of(tmp_path) == [stored, None, stored]
    store_exponents(tmp_path, torch.zeros(3))
    assert exponents_of(tmp_path) == [(), None, ()]
    refused = [
        (None, "lacks the tensor 'lerope.alpha'"),
        (torch.zeros(4), r"'lerope.alpha' is \[4\].*have 3 frequencies"),
        (torch.tensor([0.0, math.nan, 1.0]), "between -14 and 14"),
        (torch.tensor([0.0, 99.0, 1.0]), "between -14 and 14"),
    ]
    for value, message in refused:
        store_exponents(tmp_path, value)
        with pytest.raises(UnsupportedArch, match=message):
            Checkpoint(tmp_path)


class RoundedUp:
    """A source whose linears of keys and values have a scheme in some layers."""

    kv_format: str | None = None

    def __init__(self, source: MemorySource, schemes: dict[int, str]) -> None:
        self._source = source
        self._schemes = schemes
        self.arch = source.arch

    def outer(self) -> dict[str, torch.Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, torch.Tensor | QuantizedWeight]:
        weights = self._source.layer(layer_idx)
        if layer_idx in self._schemes:
            scheme = SCHEMES[self._schemes[layer_idx]]
            dense = weights["attn.kv_up.weight"]
            assert isinstance(dense, torch.Tensor)
            weights["attn.kv_up.weight"] = nearest_weight(dense, scheme, torch.float32)
        return weights


def test_layers_of_one_cache_round_latents_in_one_way() -> None:
    source = tiny_source(**LIKE_LARGE4)
    Engine(RoundedUp(source, dict.fromkeys((0, 1, 3), "FP8_DYNAMIC")), device=CPU)
    Engine(RoundedUp(source, {1: "W8A16"}), device=CPU)
    with pytest.raises(EnvironmentUnfit, match="layers 0 and 3 share a cache of latents"):
        Engine(RoundedUp(source, {0: "FP8_DYNAMIC", 1: "FP8_DYNAMIC"}), device=CPU)

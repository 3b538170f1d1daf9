"""Inkling: relative logits, convolutions with a residual, experts that every token chooses, and rows of the
head that are padding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import StorageError, UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.expert_pruning import ExpertSubset
from compress.models.experts import Experts
from compress.models.family import family_of
from compress.models.latent import Latent
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_shape import LayerShape
from compress.models.moe import for_choice, route
from compress.models.pruning import LayerSubset, Widths, keep_heads_, resized
from compress.models.relative_logits import RelativeLogits, by_keys
from compress.models.short_conv import ShortConv
from compress.models.weights import build_decoder, dense
from compress.runtime.engine import Engine
from tests.support.tiny_cases import CASES
from tests.support.tiny_cases.facts import INKLING
from tests.support.tiny_hf import build, saved, tokens
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
ROWS = Path(__file__).parents[2] / "golden/configs/wrappers.json"


def published(name: str) -> dict[str, Any]:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    config: dict[str, Any] = next(row["config"] for row in rows if row["name"] == name)
    return config


def arch_of(config: dict[str, Any]) -> Arch:
    return family_of(config).read_config(config)


def test_published_facts() -> None:
    arch = arch_of(published("thinkingmachines/Inkling"))
    full = [layer for layer in arch.layers if layer.window is None]
    windowed = [layer for layer in arch.layers if layer.window is not None]
    assert [idx for idx, layer in enumerate(arch.layers) if layer.window is None] == list(range(5, 66, 6))
    assert {layer.relative for layer in full} == {RelativeLogits(16, 1024, (0.1, 128000))}
    assert {layer.relative for layer in windowed} == {RelativeLogits(16, 512)}
    assert {layer.num_kv_heads for layer in full} == {8}
    assert {layer.num_kv_heads for layer in windowed} == {16}
    assert {layer.residual_convs for layer in arch.layers} == {4}
    assert [layer.scaled_ffn for layer in arch.layers] == [True] * 2 + [False] * 64
    (experts,) = {layer.experts for layer in arch.layers if layer.experts is not None}
    assert (experts.num_experts, experts.num_chosen, experts.top_k, experts.always) == (258, 256, 8, 2)
    assert (experts.expert_size, arch.layers[0].intermediate_size) == (3072, 24576)
    assert {layer.rope for layer in arch.layers} == {None}
    assert (arch.head_vocab, arch.logit_scale, arch.max_position) == (200058, 1 / 24, 1048576)
    assert arch.score_scale(arch.layers[0]) == 1 / 128
    assert 900e9 < arch.num_params < 1000e9
    assert 35e9 < arch.num_active_params < 50e9


def test_removed_layers_and_experts_are_stated_in_published_fields() -> None:
    config = published("thinkingmachines/Inkling-Small")
    family = family_of(config)
    arch = arch_of(config)

    class Source:
        kv_format = None

        def __init__(self, arch: Arch) -> None:
            self.arch = arch

        def outer(self) -> dict[str, Any]:
            return {}

        def layer(self, layer_idx: int) -> dict[str, Any]:
            return {}

    fewer = LayerSubset(Source(arch), [0, 2, 5, 6, 11]).arch
    fewer = ExpertSubset(Source(fewer), [(), *[tuple(range(130))] * 4]).arch
    text = family.write_config(fewer)["text_config"]
    assert text["local_layer_ids"] == [0, 1, 3]
    assert (text["dense_mlp_idx"], text["n_routed_experts"], text["num_experts_per_tok"]) == (1, 128, 6)
    assert (text["intermediate_size"], text["dense_intermediate_size"]) == (2048, 16384)
    assert "moe_intermediate_size" not in text
    again = arch_of(family.write_config(fewer))
    assert again.replace(config={}) == fewer.replace(config={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["hybrid", "full_attention", "hybrid"]}, "layer_types"),
        ({"unpadded_vocab_size": 0}, "unpadded_vocab_size"),
        ({"logits_mup_width_multiplier": 0.0}, "logits_mup_width_multiplier"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"shared_expert_sink": False}, "shared_expert_sink"),
        ({"use_sconv": False}, "use_sconv"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"conv_kernel_size": 33}, "conv_kernel_size"),
        ({"num_experts_per_tok": 7}, "top_k"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    shape = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 80}
    config = {"model_type": "inkling_text", **shape, "num_attention_heads": 6, "num_key_value_heads": 2}
    arch_of({**config, **INKLING})
    with pytest.raises(UnsupportedArch, match=message):
        arch_of({**config, **INKLING, **changes})


@pytest.mark.parametrize("case", ["inkling_text", "inkling_mm_model"])
def test_logits_of_padding_are_the_least_and_the_others_those_of_transformers(
    case: str, tmp_path: Path
) -> None:
    family, changes = CASES[case]
    model = saved(tmp_path, family, {**changes, "unpadded_vocab_size": 90})
    source = Checkpoint(tmp_path)
    with torch.no_grad():
        expected = model(tokens(2, 20)).logits
        found = build_decoder(source, dtype=torch.float32, device=CPU)(tokens(2, 20))
    assert expected.shape[-1] == 90
    bound = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert float((found[..., :90] - expected).abs().max()) <= bound
    assert (found[..., 90:] == torch.finfo(torch.float32).min).all()
    scored = Engine(source, device=CPU).runner.score(tokens(2, 20))
    assert (scored[..., 90:] == torch.finfo(torch.float32).min).all()
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    assert Checkpoint(tmp_path / "written").arch.head_vocab == 90


def test_terms_of_keys_are_those_of_their_distance() -> None:
    by_distance_HSE = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    found_HSP = by_keys(by_distance_HSE, 9)
    for head in range(2):
        for query in range(3):
            for key in range(9):
                distance = 6 + query - key
                inside = 0 <= distance < 4
                expected = by_distance_HSE[head, query, distance] if inside else torch.zeros(())
                assert torch.equal(found_HSP[head, query, key], expected)


def test_scores_grow_from_the_position_that_is_stated() -> None:
    growth_P = RelativeLogits(1, 1, (0.5, 4)).growth_at(torch.arange(9))
    assert growth_P is not None
    expected = [1 + 0.5 * max(torch.log(torch.tensor((each + 1) / 4)).item(), 0) for each in range(9)]
    torch.testing.assert_close(growth_P, torch.tensor(expected))
    assert (growth_P[:4] == 1).all()
    assert RelativeLogits(1, 1).growth_at(torch.arange(9)) is None


ALWAYS = Experts(
    *(7, 4, 48),
    score="sigmoid",
    selection_bias=True,
    renormalize=True,
    scale=2.0,
    always=2,
)


def test_every_token_goes_to_the_last_experts_and_to_the_best_of_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_TE = 3 * torch.randn(50, 7, generator=generator)
    bias_E = torch.randn(5, generator=generator)
    routing = route(ALWAYS, logits_TE, for_choice(ALWAYS, bias_E))
    scores_TE = logits_TE.sigmoid()
    for token in range(50):
        chosen = routing.experts_TR[token].tolist()
        best = (scores_TE[token, :5] + bias_E).topk(2).indices.tolist()
        assert sorted(chosen) == sorted([*best, 5, 6])
        own = scores_TE[token, chosen]
        torch.testing.assert_close(routing.weights_TR[token], 2 * own / own.sum())


def test_removed_experts_are_never_those_that_every_token_chooses() -> None:
    source = tiny_source(layers=(tiny_shape(experts=ALWAYS),))
    fewer = ExpertSubset(source, [(0, 2, 3, 5, 6)])
    (shape,) = fewer.arch.layers
    assert shape.experts is not None
    assert (shape.experts.num_chosen, shape.experts.always) == (3, 2)
    decoder = build_decoder(fewer, dtype=torch.float32, device=CPU)
    whole = build_decoder(source, dtype=torch.float32, device=CPU)
    whole.layers[0].moe.selection_bias[[1, 4]] = -100.0  # no token chooses them
    torch.testing.assert_close(decoder(tokens(1, 30)), whole(tokens(1, 30)))


@pytest.mark.parametrize("unit", ["kv_group", "query_head"])
def test_removed_heads_take_their_relative_logits_and_convolutions_with_them(unit: Any) -> None:
    shape = tiny_shape(relative=RelativeLogits(3, 6), residual_convs=3, rope=None)
    source = tiny_source(layers=(shape,), qk_norm=True)
    weights = {name: dense(value) for name, value in source.layer(0).items()}
    kept_U = torch.tensor([False, True] if unit == "kv_group" else [True, False, False, True])
    kept_H = kept_U.repeat_interleave(2) if unit == "kv_group" else kept_U
    without = dict(weights)
    without["attn.o.weight"] = weights["attn.o.weight"] * kept_H.repeat_interleave(16)
    keep_heads_(weights, shape, unit, kept_U)
    sizes = (2, 1) if unit == "kv_group" else (2, 2)
    arch = source.arch.replace(layers=(replace(shape, num_heads=sizes[0], num_kv_heads=sizes[1]),))
    decoders = []
    for facts, of_layer in ((arch, weights), (source.arch, without)):
        decoder = Decoder(facts).requires_grad_(False)
        outer = {name: dense(value) for name, value in source.outer().items()}
        decoder.load_state_dict(outer | {f"layers.0.{name}": each for name, each in of_layer.items()})
        decoders.append(decoder)
    torch.testing.assert_close(decoders[0](tokens(1, 30)), decoders[1](tokens(1, 30)), rtol=1e-5, atol=1e-5)


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"relative": RelativeLogits(2, 3), "chunk": 8}, "terms of the distance"),
    ({"relative": RelativeLogits(2, 3), "keys_are_values": True}, "terms of the distance"),
    ({"relative": RelativeLogits(2, 3), "output_gate": True}, "terms of the distance"),
    ({"relative": RelativeLogits(2, 3), "narrow_value_dim": 8}, "terms of the distance"),
    ({"residual_convs": 4, "kv_source": 0}, "convolutions"),
    ({"residual_convs": 4, "only_half": "mixer"}, "convolutions"),
    ({"residual_convs": 4, "recurrence": ShortConv.of(32, 3)}, "convolutions"),
    (
        {"residual_convs": 4, "latent": Latent(8, 8, 4, 8, interleaved=True), "num_kv_heads": 4},
        "convolutions",
    ),
    ({"scaled_ffn": True, "experts": ALWAYS}, "have a factor"),
    ({"scaled_ffn": True, "only_half": "mixer"}, "have a factor"),
    ({"relative": RelativeLogits(2, 3), "only_half": "ffn"}, "facts of what is in place of attention"),
]


@pytest.mark.parametrize(("changes", "message"), UNFIT)
def test_facts_of_a_layer_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    found = why_layer_unfit(tiny_shape(**changes))
    assert found is not None
    assert message in found


@pytest.mark.parametrize(
    ("layer", "facts", "message"),
    [
        ({"relative": RelativeLogits(2, 3)}, {"attn_softcap": 3.0}, "a cap or sinks"),
        ({"relative": RelativeLogits(2, 3)}, {"attn_sinks": True}, "a cap or sinks"),
        ({"residual_convs": 4}, {"block": "parallel"}, "convolutions"),
        ({"residual_convs": 4}, {"residual_scale": 0.5}, "convolutions"),
        ({"residual_convs": 4}, {"qkv_bias": True}, "convolutions"),
        ({"scaled_ffn": True}, {"block": "sandwich"}, "has a factor"),
        ({}, {"head_vocab": 101}, "tokens have logits"),
        ({}, {"embed_norm_weight": True}, "norm of the embedding"),
    ],
)
def test_facts_of_a_model_that_do_not_fit_are_refused(
    layer: dict[str, Any], facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        tiny_source(layers=(tiny_shape(**layer),), **facts)


def test_a_manifest_states_the_facts_and_refuses_others() -> None:
    layers: tuple[LayerShape, ...] = (
        tiny_shape(relative=RelativeLogits(4, 9, (0.5, 6)), residual_convs=4, scaled_ffn=True),
        tiny_shape(relative=RelativeLogits(4, 5), experts=replace(ALWAYS, one_output_scale=True)),
    )
    arch = tiny_source(layers=layers, head_vocab=90, inverse_scale=True).arch
    facts, stated = json.loads(json.dumps(arch.to_json()))
    assert Arch.from_json(facts, stated) == arch
    for wrong in ({"rank": 0, "extent": 3}, {"rank": 2, "extent": 3, "growth": [1.0]}, {"rank": 2}):
        with pytest.raises(StorageError):
            Arch.from_json(facts, [{**stated[0], "relative": wrong}])
    for wrong_experts in ({"always": 4}, {"score": "softmax"}, {"selection_bias": False}):
        with pytest.raises(StorageError):
            Arch.from_json(facts, [{**stated[1], "experts": {**stated[1]["experts"], **wrong_experts}}])


def test_a_smaller_model_has_the_widths_of_its_heads() -> None:
    arch = tiny_source(layers=(tiny_shape(relative=RelativeLogits(3, 6), residual_convs=3),)).arch
    fewer = resized(arch, replace_widths(arch, num_kv_heads=1, num_heads=2))
    assert fewer.layers[0].dense_shapes(56)["attn.relative.weight"] == (6, 56)
    assert fewer.layers[0].dense_shapes(56)["attn.k_conv.weight"] == (16, 1, 3)


def replace_widths(arch: Arch, **changes: int) -> Widths:
    return replace(Widths.of(arch), **changes)


def test_tensors_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    family, changes = CASES["inkling_mm_model"]
    model = build(family, changes)
    state = model.state_dict()
    assert not any("mtp" in name for name in state)
    saved(tmp_path, family, changes)
    (file,) = tmp_path.glob("*.safetensors")
    more = {"model.mtp.layers.0.hidden_norm.weight": torch.ones(48)}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Checkpoint(tmp_path))
    (written,) = (tmp_path / "written").glob("*.safetensors")
    assert load_file(written).keys() == load_file(file).keys() - more.keys()

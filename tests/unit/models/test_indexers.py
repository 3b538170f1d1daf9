"""Latent attention with indexers, which choose the keys that queries attend to: DeepSeek-V3.2 and GLM-5."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.data.model_tokens import check_seq_len
from compress.errors import CompressError, UnsupportedArch
from compress.export.format_writer import write_format
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.indexer import Indexer, train_all_but_indexers_
from compress.models.latent import Latent
from compress.models.max_position import why_no_longer
from compress.models.pruning import why_layers_stay, with_layers
from compress.models.random_source import RandomSource
from compress.models.weights import MemorySource
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.support.tiny_decoder import tiny_decoder, tiny_tokens

CPU = torch.device("cpu")
V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 24,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "dtype": "float32",
}
GLM = {**V32, "model_type": "glm_moe_dsa"}
SHARED = {**GLM, "indexer_types": ["full", "shared", "full"]}
MODELS = {"deepseek_v32": V32, "glm_moe_dsa": GLM, "shared": SHARED}
each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def arch_of(config: dict[str, Any], **changes: Any) -> Arch:
    stated = {**config, **changes}
    return family_of(stated).read_config(stated)


def indexers(arch: Arch) -> list[Indexer | None]:
    return [layer.latent.indexer for layer in arch.layers if layer.latent is not None]


def kinds(**changes: Any) -> str:
    return "".join("S" if each is None else "F" for each in indexers(arch_of(GLM, **changes)))


@each_model
def test_what_a_manifest_and_a_config_state_is_read_back_and_every_parameter_counts(
    config: dict[str, Any],
) -> None:
    arch = arch_of(config)
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    written = family_of(config).write_config(arch)
    assert arch_of(written).replace(config={}) == arch.replace(config={})
    assert written["max_position_embeddings"] == 64
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


def test_contexts_are_those_of_the_config() -> None:
    assert arch_of(V32).max_position == 64
    assert indexers(arch_of(V32)) == [Indexer(num_heads=3, head_dim=8, top_k=24)] * 3
    assert indexers(arch_of(GLM)) == [Indexer(num_heads=3, head_dim=8, top_k=24, interleaved=True)] * 3
    check_seq_len(64, "seq_len", arch_of(V32))
    with pytest.raises(CompressError, match="64 positions"):
        check_seq_len(65, "seq_len", arch_of(V32))


def test_an_artifact_of_fewer_positions_than_its_config_states_has_a_reason() -> None:
    """Artifacts had as many positions as an indexer chooses before longer contexts were computed."""
    arch = arch_of(V32).replace(max_position=24)
    with pytest.raises(CompressError, match=r"24 positions \(it was made when"):
        check_seq_len(25, "seq_len", arch)
    with pytest.raises(CompressError, match=r"1\.\.24 \(it was made when"):
        Engine(
            MemorySource(tiny_decoder(arch), dtype=torch.float32),
            device=CPU,
            config=EngineConfig(max_model_len=25),
        )
    short = arch_of(V32, max_position_embeddings=24)
    assert why_no_longer(short) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"latent": {"rope_dim": 10}, "head_dim": 20},
            "turns 10 dimensions of a head, and heads of its indexer have 8",
        ),
        ({"latent": {"q_rank": 0}}, "reads the latent of queries"),
        ({"window": 5}, "has a window"),
    ],
    ids=repr,
)
def test_an_indexer_that_cannot_be_computed_is_refused(changes: dict[str, Any], reason: str) -> None:
    arch = arch_of(V32)
    first, *others = arch.layers
    assert first.latent is not None
    changes = {**changes, "latent": replace(first.latent, **changes.get("latent", {}))}
    with pytest.raises(UnsupportedArch, match=reason):
        arch.replace(layers=(replace(first, **changes), *others))


def test_a_manifest_states_of_latents_what_they_have() -> None:
    """So that digests stay as they are where a fact of few models is new."""
    latent = Latent(q_rank=0, kv_rank=12, rope_dim=8, value_dim=12, interleaved=False)
    names = {"q_rank", "kv_rank", "rope_dim", "value_dim", "interleaved"}
    assert latent.to_json().keys() == names
    assert replace(latent, rope_norm=True).to_json().keys() == names | {"rope_norm"}


def test_a_manifest_states_of_an_indexer_what_it_has() -> None:
    """So that digests stay as they are where a fact of few indexers is new."""
    plain = Indexer(num_heads=3, head_dim=8, top_k=24)
    names = {"num_heads", "head_dim", "top_k", "of_stream"}
    assert plain.to_json().keys() == names
    assert replace(plain, rope_last=True, norm_eps=1e-5).to_json().keys() == names | {"rope_last", "norm_eps"}


def test_logits_are_those_without_indexers() -> None:
    arch = arch_of(V32)
    decoder = tiny_decoder(arch)
    plain = arch.replace(
        layers=tuple(
            replace(layer, latent=None if layer.latent is None else replace(layer.latent, indexer=None))
            for layer in arch.layers
        )
    )
    without = Decoder(plain)
    state = {name: value for name, value in decoder.state_dict().items() if ".indexer." not in name}
    assert len(state) < len(decoder.state_dict())
    without.load_state_dict(state)
    tokens_BS = tiny_tokens(arch, 2, 24).long()
    assert torch.equal(decoder(tokens_BS), without(tokens_BS))


def test_parameters_of_indexers_are_not_trained() -> None:
    decoder = train_all_but_indexers_(Decoder(arch_of(V32)))
    still = {name for name, value in decoder.named_parameters() if not value.requires_grad}
    named = {name for name, _ in decoder.named_parameters() if ".indexer." in name}
    assert len(named) == 15
    assert named == still


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({}, "FFF"),
        ({"indexer_types": ["full", "shared", "shared"]}, "FSS"),
        ({"index_topk_pattern": "FSF"}, "FSF"),
        ({"index_topk_pattern": ["full", "full", "shared"]}, "FFS"),
        ({"index_topk_freq": 2, "num_hidden_layers": 6}, "FFSFSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1, "num_hidden_layers": 6}, "FSFSFS"),
    ],
    ids=repr,
)
def test_layers_of_glm_share_the_indexers_that_its_config_states(stated: dict[str, Any], found: str) -> None:
    assert kinds(**stated) == found


@pytest.mark.parametrize(
    "stated",
    [
        {"indexer_types": ["full", "shared"]},
        {"indexer_types": ["shared", "full", "full"]},
        {"indexer_types": ["full", "none", "full"]},
        {"index_topk_pattern": "FXF"},
    ],
    ids=repr,
)
def test_kinds_of_indexers_that_make_no_model_are_refused(stated: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch, match=next(iter(stated))):
        arch_of(GLM, **stated)


def test_dense_layers_that_programs_read_differently_are_refused() -> None:
    types = ["dense", "dense", "sparse"]
    with pytest.raises(UnsupportedArch, match="first_k_dense_replace"):
        arch_of(V32, mlp_layer_types=types)
    arch = arch_of(V32, mlp_layer_types=types, first_k_dense_replace=2)
    assert [layer.experts is None for layer in arch.layers] == [True, True, False]


def test_layers_go_where_each_has_an_indexer_of_its_own() -> None:
    arch = with_layers(arch_of(GLM), [0, 2])
    written = family_of(GLM).write_config(arch)
    assert arch_of(written).replace(config={}) == arch.replace(config={})
    assert why_layers_stay(arch_of(V32)) is None
    reason = why_layers_stay(arch_of(SHARED))
    assert reason is not None
    assert "indexers" in reason


def test_norms_that_an_indexer_reads_are_in_no_pair() -> None:
    decoder = Decoder(arch_of(SHARED))
    producers = [
        [pair.producer for pair in layer.smoothing_pairs() if pair.producer.startswith("attn")]
        for layer in decoder.layers
    ]
    assert producers[0] == ["attn.kv_latent_norm"]
    assert producers[1] == ["attn_norm", "attn.q_latent_norm", "attn.kv_latent_norm"]


def test_a_checkpoint_names_the_matrices_of_indexers_as_dense(tmp_path: Path) -> None:
    arch = arch_of(V32, hidden_size=128, q_lora_rank=64, kv_lora_rank=64)
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])
    random = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=scheme.layers)
    write_format("compressed-tensors", tmp_path, random, scheme)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    prefix = "model.layers.1.self_attn.indexer"
    assert {f"{prefix}.wq_b", f"{prefix}.wk", f"{prefix}.weights_proj"} <= set(ignored)

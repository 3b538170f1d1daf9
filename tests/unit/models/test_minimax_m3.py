"""MiniMax-M3: indexers of blocks, clamped gates, and the fields of published configs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.data.model_tokens import check_seq_len
from compress.distill.student import Shape, evenly, sliced_decoder, student_arch
from compress.errors import CompressError, UnsupportedArch
from compress.export import FORMATS
from compress.export.format_writer import write_format
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.indexer import BlockIndexer, train_all_but_indexers_
from compress.models.latent import Latent
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_shape import Rope
from compress.models.pruning import Widths, keep_heads_, resized, why_layers_stay, with_layers
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.golden.test_families import tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens
from tests.support.tiny_source import tiny_shape

CPU = torch.device("cpu")
INDEXERS: dict[str, Any] = {
    "use_sparse_attention": True,
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 12,
    "sparse_topk_blocks": 3,
    "sparse_block_size": 8,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0, 1, 1, 0],
    "sparse_disable_index_value": [0, 1, 1, 0],
}
TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 16,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_layer_freq": [0, 1, 0, 1],
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "num_mtp_modules": 0,
    "sparse_attention_config": INDEXERS,
    "dtype": "float32",
}
"""The fields that published configs have, with the sizes of a tiny model."""
TYPES = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"]
OF_TYPES: dict[str, Any] = {
    "sparse_attention_config": None,
    "moe_layer_freq": None,
    "layer_types": TYPES,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_block_size": 8,
    "index_topk_blocks": 3,
}
"""The fields by which `transformers` states the same indexers and experts."""
INDEXER = BlockIndexer(num_heads=2, head_dim=12, block_size=8, top_blocks=3)


def arch_of(indexers: dict[str, Any] | None = None, **changes: Any) -> Arch:
    stated = {"model_type": "minimax_m3_vl_text", **TEXT, **changes}
    if indexers is not None:
        stated["sparse_attention_config"] = {**INDEXERS, **indexers}
    return family_of(stated).read_config(stated)


def written(arch: Arch) -> dict[str, Any]:
    """Return the config of an arch, read again with the same facts."""
    config = family_of(arch.config).write_config(arch)
    assert family_of(config).read_config(config).replace(config={}) == arch.replace(config={})
    return config


@pytest.mark.parametrize("stated", [{}, OF_TYPES], ids=["published", "transformers"])
def test_what_a_manifest_and_a_config_state_is_read_back_and_every_parameter_counts(
    stated: dict[str, Any],
) -> None:
    arch = arch_of(**stated)
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    config = written(arch)
    assert config["max_position_embeddings"] == 64
    for name, value in stated.items():
        assert config[name] == value
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


def test_both_spellings_of_layers_mean_the_same() -> None:
    arch = arch_of()
    assert arch.replace(config={}) == arch_of(**OF_TYPES).replace(config={})
    assert [layer.block_indexer for layer in arch.layers] == [None, INDEXER, INDEXER, None]
    assert [layer.experts is None for layer in arch.layers] == [True, False, True, False]
    both = arch_of(layer_types=TYPES, mlp_layer_types=OF_TYPES["mlp_layer_types"], index_n_heads=7)
    assert both.replace(config={}) == arch.replace(config={})
    assert arch.activation == "swiglu_clamped"
    assert arch.layers[0].rope == Rope(5000000.0, rotary_dim=8)


def test_a_model_has_the_positions_of_its_config() -> None:
    for indexers in ({}, {"sparse_topk_blocks": 9}, {"sparse_attention_freq": [0] * 4}):
        assert arch_of(indexers).max_position == 64
    check_seq_len(64, "seq_len", arch_of())
    with pytest.raises(CompressError, match=r"64 positions\. Give"):
        check_seq_len(65, "seq_len", arch_of())
    with pytest.raises(CompressError, match=r"1\.\.64\."):
        Engine(
            RandomSource(arch_of(), device=CPU, dtype=torch.float32),
            device=CPU,
            config=EngineConfig(max_model_len=65),
        )


def test_a_model_that_was_made_with_fewer_positions_is_refused_with_the_reason() -> None:
    with pytest.raises(CompressError, match="made when longer contexts of indexers were not computed"):
        check_seq_len(25, "seq_len", arch_of().replace(max_position=24))


def test_blocks_that_are_always_chosen_are_read_and_written() -> None:
    arch = arch_of({"sparse_local_block": 2})
    assert [layer.block_indexer and layer.block_indexer.local_blocks for layer in arch.layers] == [
        None,
        2,
        2,
        None,
    ]
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    assert "local_blocks" not in INDEXER.to_json()
    written(arch)


def test_only_blocks_that_are_chosen_change_logits_and_only_beyond_as_many_positions(tmp_path: Path) -> None:
    family, changes = CASES["minimax_m3_vl_text"]
    saved(tmp_path, family, changes)
    source = Checkpoint(tmp_path)
    every = source.arch.replace(
        layers=tuple(replace(each, block_indexer=None) for each in source.arch.layers)
    )
    num_positions = changes["index_block_size"] * changes["index_topk_blocks"]
    tokens_BS = tokens(2, num_positions + 9)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    plain = Decoder(every)
    plain.load_state_dict(decoder.state_dict(), strict=False)
    with torch.no_grad():
        found = decoder(tokens_BS)
        expected = plain.eval()(tokens_BS)
        assert torch.equal(decoder(tokens_BS[:, :num_positions]), plain(tokens_BS[:, :num_positions]))
    differ_S = (found - expected).abs().amax((0, 2)) > tolerance(expected)
    assert not bool(differ_S[:num_positions].any())
    assert bool(differ_S[num_positions:].all())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"] * 4}, "sparse_attention_freq"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"mlp_layer_types": ["sparse"] * 4}, "moe_layer_freq"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        ({"rotary_dim": 16}, "rotary_dim"),
        ({"partial_rotary_factor": None}, "rotary_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"swiglu_limit": 8.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type"),
        ({"num_key_value_heads": 4}, "KV heads"),
        ({"head_dim": None}, "head_dim = None"),
    ],
    ids=repr,
)
def test_configs_that_programs_read_differently_or_the_decoder_does_not_compute_are_refused(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedArch, match=named):
        arch_of(**changes)


@pytest.mark.parametrize(
    "indexers",
    [
        {"sparse_attention_freq": [0, 1]},
        {"sparse_attention_freq": [0, 2, 1, 0]},
        {"sparse_disable_index_value": [0, 1, 0, 0]},
        {"use_sparse_attention": False},
        {"sparse_topk_blocks": 0},
        {"sparse_num_index_heads": 3},
        {"sparse_init_block": 1},
        {"sparse_score_type": "mean"},
        {"sparse_local_block": 0},
        {"sparse_local_block": 4},
        {"sparse_index_dim": 6},
        {"sparse_sinks": 1},
    ],
    ids=repr,
)
def test_other_indexers_are_refused(indexers: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch):
        arch_of(indexers)


@pytest.mark.parametrize(
    "facts",
    [
        {"window": 5},
        {"kv_source": 0},
        {"only_half": "ffn"},
        {"num_kv_heads": 4},
        {"rope": Rope(1e4, kind="proportional")},
        {
            "num_kv_heads": 4,
            "rope": Rope(1e4, rotary_dim=6),
            "latent": Latent(q_rank=0, kv_rank=12, rope_dim=6, value_dim=12, interleaved=True),
        },
    ],
    ids=repr,
)
def test_indexers_of_blocks_beside_other_facts_are_refused(facts: dict[str, Any]) -> None:
    indexer = replace(INDEXER, head_dim=16)
    assert why_layer_unfit(tiny_shape(block_indexer=indexer)) is None
    assert why_layer_unfit(tiny_shape(**{"block_indexer": indexer, **facts})) is not None
    assert why_layer_unfit(tiny_shape(block_indexer=INDEXER)) == (
        "its rope turns 16 dimensions of a head, and heads of its indexer have 12; they have to be as many "
        "or more."
    )


def test_a_model_of_fewer_layers_states_which_are_left() -> None:
    arch = with_layers(with_layers(arch_of(), [0, 1, 3]), [1, 2])
    config = written(arch)
    assert config["sparse_attention_config"]["sparse_attention_freq"] == [1, 0]
    assert config["sparse_attention_config"]["sparse_disable_index_value"] == [1, 0]
    assert config["moe_layer_freq"] == [1, 1]
    assert "layer_types" not in config
    both = written(with_layers(arch_of(layer_types=TYPES), [0, 2]))
    assert both["layer_types"] == ["full_attention", "minimax_m3_sparse"]
    assert both["sparse_attention_config"]["sparse_attention_freq"] == [0, 1]
    assert written(with_layers(arch_of(**OF_TYPES), [3, 1]))["layer_types"] == TYPES[:2]
    assert why_layers_stay(arch_of()) is None


def test_kv_heads_go_with_their_heads_of_indexers() -> None:
    arch = arch_of(**{**OF_TYPES, "mlp_layer_types": ["dense"] * 4})
    source = RandomSource(arch, device=CPU, dtype=torch.float32)
    weights = {name: torch.as_tensor(each) for name, each in source.layer(1).items()}
    before = weights["attn.indexer.q.weight"]
    key = weights["attn.indexer.k.weight"]
    keep_heads_(weights, arch.layers[1], "kv_group", torch.tensor([False, True]))
    assert torch.equal(weights["attn.indexer.q.weight"], before[12:])
    assert torch.equal(weights["attn.indexer.k.weight"], key)
    small = resized(arch, Widths(2, 1, 48, 4))
    assert written(small)["index_n_heads"] == 1
    published = resized(arch_of(moe_layer_freq=[0] * 4), Widths(2, 1, 48, 4))
    config = written(published)
    assert config["sparse_attention_config"]["sparse_num_index_heads"] == 1
    assert "index_n_heads" not in config


def test_a_student_keeps_the_heads_of_indexers_of_the_kv_heads_that_it_keeps() -> None:
    teacher = arch_of(**{**OF_TYPES, "mlp_layer_types": ["dense"] * 4})
    source = RandomSource(teacher, device=CPU, dtype=torch.float32)
    arch = student_arch(teacher, Shape(layers=2, hidden=16, heads=2, kv_heads=1))
    assert [layer.block_indexer and layer.block_indexer.num_heads for layer in arch.layers] == [None, None]
    arch = student_arch(teacher, Shape(layers=3, hidden=16, heads=2, kv_heads=1))
    assert [layer.block_indexer and layer.block_indexer.num_heads for layer in arch.layers] == [None, 1, None]
    ours = sliced_decoder(source, arch).layers[1].attn.indexer.state_dict()
    theirs = {name: torch.as_tensor(each) for name, each in source.layer(evenly(3, 4)[1]).items()}
    hidden = evenly(16, 32)
    assert torch.equal(ours["q.weight"], theirs["attn.indexer.q.weight"][:12, hidden])
    assert torch.equal(ours["k.weight"], theirs["attn.indexer.k.weight"][:, hidden])
    assert torch.equal(ours["q_norm.weight"], theirs["attn.indexer.q_norm.weight"])


def test_what_an_indexer_reads_and_what_is_clamped_is_in_no_pair_and_is_not_trained() -> None:
    decoder = train_all_but_indexers_(Decoder(arch_of()))
    producers = [[pair.producer for pair in layer.smoothing_pairs()] for layer in decoder.layers]
    assert producers[0] == ["attn_norm", "attn.v", "ffn_norm"]
    assert producers[1:] == [["attn.v"], ["attn.v", "ffn_norm"], ["attn_norm", "attn.v"]]
    still = {name for name, value in decoder.named_parameters() if not value.requires_grad}
    named = {name for name, _ in decoder.named_parameters() if ".indexer." in name}
    assert len(named) == 8
    assert named == still


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["minimax_m3_vl"])
    file = tmp_path / "model.safetensors"
    extra = {"language_model.model.mtp.layers.0.eh_proj.weight": torch.zeros(4, 8)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    source = Checkpoint(tmp_path)
    assert source.layer(1)["attn.indexer.q.weight"].shape == (48, 48)


def test_a_checkpoint_names_the_matrices_of_indexers_as_dense(tmp_path: Path) -> None:
    text = {**TEXT, "hidden_size": 128, "model_type": "minimax_m3_vl_text"}
    config = {"model_type": "minimax_m3_vl", "dtype": "float32", "text_config": text}
    arch = family_of(config).read_config(config)
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])
    random = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=scheme.layers)
    write_format("compressed-tensors", tmp_path, random, scheme)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    prefix = "model.language_model.layers.1.self_attn.indexer"
    assert {f"{prefix}.q_proj", f"{prefix}.k_proj"} <= set(ignored)


def test_vllm_is_stated_to_be_untested() -> None:
    consumers = FORMATS.get("compressed-tensors").consumers(arch_of(), ModelScheme(SCHEMES["FP8_DYNAMIC"]))
    assert [each.loads for each in consumers if each.name.startswith("vLLM")] == [False, False]

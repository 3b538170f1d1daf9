"""GLM-5.3: what configs state, what is refused, and the pools of keys that its indexers choose."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.hyper_connection import HyperConnections
from compress.models.indexer import Indexer
from compress.models.key_pools import chosen_in_pools, pool_keys
from compress.models.layer_types import LINEAR
from compress.models.pruning import why_layers_stay, with_layers
from compress.models.random_source import RandomSource

CONFIGS = Path(__file__).parents[2] / "golden" / "configs" / "wrappers.json"
PUBLISHED: dict[str, Any] = next(
    row["config"] for row in json.loads(CONFIGS.read_text()) if row["name"] == "zai-org/GLM-5.3-Flash-BF16"
)
SPARSE = "deepseek_sparse_attention"
FEW: dict[str, Any] = {
    **PUBLISHED["text_config"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_head_dim": 10,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "index_topk": 16,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "layer_types": [LINEAR, SPARSE, SPARSE, LINEAR],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "linear_attn_config": {
        **PUBLISHED["text_config"]["linear_attn_config"],
        "kda_layers": [0, 3],
        "full_attn_layers": [1, 2],
        "num_heads": 3,
        "head_dim": 8,
    },
    "dtype": "float32",
}


def arch_of(**changes: Any) -> Arch:
    stated = {**PUBLISHED, "dtype": "float32", "text_config": {**FEW, **changes}}
    return family_of(stated).read_config(stated)


def test_the_published_model_has_the_parameters_of_its_card_and_what_its_config_states() -> None:
    """320 billions with the layer that predicts a further token, which has 7.4, and the vision tower."""
    arch = family_of(PUBLISHED).read_config(PUBLISHED)
    assert arch.num_params / 1e9 == pytest.approx(313.3, abs=0.1)
    assert arch.hyper == HyperConnections(4, 1e-6, sinkhorn_iterations=20, mean_head=True)
    attending = [idx for idx, layer in enumerate(arch.layers) if layer.attends]
    assert attending == [*range(3, 45, 4)]
    assert {arch.layers[idx].indexer for idx in attending} == {Indexer(32, 128, 2051, pool_size=4)}
    assert {layer.recurrence.decay_bound for layer in arch.layers if layer.recurrence} == {5.0}
    assert [layer.experts is None for layer in arch.layers[:5]] == [True, True, True, False, False]
    assert {layer.ffn_cap for layer in arch.layers} == {10.0}


def test_what_a_manifest_and_a_config_state_is_read_back_and_every_parameter_counts() -> None:
    arch = arch_of(indexer_types=["full", "full", "shared", "full"])
    assert [layer.indexer is None for layer in arch.layers] == [True, False, True, True]
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    written = family_of(PUBLISHED).write_config(arch)
    assert family_of(written).read_config(written).replace(config={}) == arch.replace(config={})
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


def test_lists_of_layers_are_written_anew_where_layers_are_removed() -> None:
    arch = arch_of()
    assert why_layers_stay(arch) is None
    written = family_of(PUBLISHED).write_config(with_layers(arch, [1, 3]))["text_config"]
    assert written["layer_types"] == [SPARSE, LINEAR]
    assert written["linear_attn_config"]["kda_layers"] == [1]
    assert written["linear_attn_config"]["full_attn_layers"] == [0]
    assert written["mlp_layer_types"] == ["sparse", "sparse"]
    assert written["first_k_dense_replace"] == 0
    assert "choose" in str(why_layers_stay(arch_of(indexer_types=["full", "full", "shared", "full"])))


def test_widths_of_the_mapping_count_and_those_of_the_class_where_there_is_none() -> None:
    assert {each.num_heads for layer in arch_of().layers if (each := layer.recurrence)} == {3}
    without = arch_of(linear_attn_config=None, linear_num_heads=2, linear_lower_bound=-0.5)
    assert {(each.num_heads, each.decay_bound) for layer in without.layers if (each := layer.recurrence)} == {
        (2, 0.5)
    }
    stated = {**FEW["linear_attn_config"], "gate_lower_bound": None}
    assert {
        each.decay_bound for layer in arch_of(linear_attn_config=stated).layers if (each := layer.recurrence)
    } == {5.0}


def test_a_rope_that_turns_no_dimension_changes_no_scores() -> None:
    """The class of `transformers` multiplies scores by qk_head_dim ** -0.5 whatever the rope states."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0, "mscale": 1.0}
    stated = arch_of(rope_parameters={**yarn, "original_max_position_embeddings": 16})
    assert (stated.attn_scale, stated.layers) == (None, arch_of().layers)


def test_a_layer_of_any_index_is_read_and_one_that_predicts_is_passed_over(tmp_path: Path) -> None:
    """The published model has 45 layers, and the layer that predicts a further token is number 45."""
    num_layers = 47
    arch = arch_of(
        num_hidden_layers=num_layers,
        layer_types=[LINEAR] * num_layers,
        mlp_layer_types=["dense"] * num_layers,
        indexer_types=["full"] * num_layers,
        first_k_dense_replace=num_layers,
        linear_attn_config={**FEW["linear_attn_config"], "kda_layers": None, "full_attn_layers": None},
    )
    write_checkpoint(tmp_path, RandomSource(arch, device=torch.device("cpu"), dtype=torch.float32))
    whole = load_file(tmp_path / "model.safetensors")
    prefix = "model.language_model.layers."
    predictor = {f"{prefix}{num_layers}.{name}.weight": torch.ones(2, 2) for name in ("eh_proj", "mlp.x")}
    save_file({**whole, **predictor}, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).arch.num_layers == num_layers
    save_file({**whole, f"{prefix}45.mlp.x.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedArch, match=r"layers\.45\.mlp\.x"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_attn_config": None, "linear_lower_bound": None}, "linear_lower_bound"),
        (
            {
                "linear_attn_config": {
                    **FEW["linear_attn_config"],
                    "gate_lower_bound": None,
                    "safe_gate": False,
                }
            },
            "decays without a bound",
        ),
        ({"linear_attn_config": {**FEW["linear_attn_config"], "kda_layers": [0, 1]}}, "kda_layers"),
        ({"linear_attn_config": {**FEW["linear_attn_config"], "use_rope": True}}, "use_rope"),
        ({"linear_attn_config": {**FEW["linear_attn_config"], "gate": "softmax"}}, "gate"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"indexer_types": ["full", "shared", "full", "full"]}, "shared in layer 1"),
        (
            {
                "indexer_types": ["full", "full", "shared", "full"],
                "layer_types": [SPARSE, LINEAR, SPARSE, LINEAR],
                "linear_attn_config": None,
            },
            "shared in layer 2",
        ),
        ({"index_topk": 18}, "a multiple of index_kpool"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"qk_rope_head_dim": 2}, "qk_rope_head_dim"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        arch_of(**changes)


@pytest.mark.parametrize(("size", "top_pools", "length"), [(4, 2, 19), (3, 5, 40), (1, 7, 20), (5, 1, 4)])
def test_a_query_attends_to_the_best_pools_and_to_what_follows_them(
    size: int, top_pools: int, length: int
) -> None:
    """Compare with one query after the other, whose pools are averaged by a softmax of torch."""
    generator = torch.Generator().manual_seed(size)
    keys, gates = (torch.randn(length, 6, generator=generator) for _ in "kg")
    positions = torch.randn(size, 6, generator=generator)
    query = torch.randn(length, 6, generator=generator)
    facts = Indexer(1, 6, top_pools * size + size - 1, pool_size=size)
    pools = pool_keys(keys, gates, positions)
    ends = torch.arange(1, length + 1)
    found = chosen_in_pools(facts, query @ pools.mT, ends, length)
    assert torch.equal(found.sum(-1), facts.num_chosen(ends))
    for idx in range(length):
        whole = (idx + 1) // size
        of_pools = []
        for pool in range(whole):
            own = slice(pool * size, (pool + 1) * size)
            average = ((gates[own] + positions).softmax(0) * keys[own]).sum(0)
            torch.testing.assert_close(pools[pool], average)
            of_pools.append((float(query[idx] @ average), -pool))
        best = [-pool for _, pool in sorted(of_pools, reverse=True)[:top_pools]]
        expected = {position for pool in best for position in range(pool * size, (pool + 1) * size)}
        expected |= set(range(whole * size, idx + 1))
        assert set(found[idx].nonzero().flatten().tolist()) == expected


def test_widths_of_pools_that_do_not_fit_have_a_reason() -> None:
    assert Indexer(2, 8, 19, pool_size=4).why_unfit() is None
    assert "pools of 4" in str(Indexer(2, 8, 20, pool_size=4).why_unfit())
    assert "no pool of 4" in str(Indexer(2, 8, 3, pool_size=4).why_unfit())

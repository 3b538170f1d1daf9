"""Qwen4: what its configs state, what is refused, and what its checkpoints store beside the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch, UsageError
from compress.export import FORMATS
from compress.export.format_writer import write_format
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.delta_net import DeltaNet
from compress.models.family import family_of
from compress.models.gated_residual import GatedResiduals
from compress.models.indexer import BlockIndexer
from compress.models.layer_checks import why_layer_unfit
from compress.models.ngrams import NGrams
from compress.models.pruning import Widths, keep_heads_, resized, with_layers
from compress.models.random_source import RandomSource
from compress.models.weights import UNTOUCHED
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.golden.test_families import assert_same_tensors
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved
from tests.support.tiny_source import tiny_shape

CPU = torch.device("cpu")
INDEXER: dict[str, Any] = {
    "indexer_n_heads": 3,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 24,
    "indexer_compress_ratio": 8,
}
CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "dtype": "float32",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hc_lowrank": 12,
    "eos_token_id": 3,
    **INDEXER,
}
NGRAMS: dict[str, Any] = {
    "ple_layer_ids": [3, 1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 4,
}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


def test_the_facts_are_those_of_the_config() -> None:
    arch = arch_of(**NGRAMS)
    assert arch.hyper == GatedResiduals(4, 12)
    assert arch.norm_offset == 1
    assert [type(layer.recurrence) for layer in arch.layers] == [DeltaNet] * 3 + [type(None)]
    assert [layer.output_gate for layer in arch.layers] == [False, False, False, True]
    indexer = BlockIndexer(3, 16, 8, 3, pooled=True)
    assert arch.layers[3].block_indexer == indexer
    assert arch.max_position == 512
    assert indexer.top_k == 24 + 7
    tables = [layer.ngrams for layer in arch.layers]
    assert tables[1] is tables[3] is None
    assert tables[0] == NGrams(3, 2, 8, 4, 4, base=50, index=0, seed=1234, eos=3, divisor=128, num_parts=4)
    assert tables[2] is not None
    assert tables[2].index == 1
    assert tables[0].head_sizes == (53, 59, 61, 67)
    assert tables[2].head_sizes == (71, 73, 79, 83)
    assert [layer.experts is not None for layer in arch.layers] == [True] * 4


def test_a_model_of_delta_nets_alone_has_the_positions_of_its_config() -> None:
    arch = arch_of(layer_types=["linear_attention"] * 4)
    assert arch.max_position == 512
    assert all(layer.block_indexer is None for layer in arch.layers)


@pytest.mark.parametrize("name", ["indexed_attention", "full_attention"])
def test_both_names_of_layers_with_attention_are_read_and_written_as_they_were(name: str) -> None:
    arch = arch_of(layer_types=["linear_attention", name, "linear_attention", name])
    assert [layer.attends for layer in arch.layers] == [False, True, False, True]
    shorter = with_layers(arch, [0, 1, 3])
    written = json.loads(json.dumps(family_of(CONFIG).write_config(shorter)))
    assert written["layer_types"] == ["linear_attention", name, name]
    assert family_of(written).read_config(written).layers == shorter.layers


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "sigmoid"}, "hidden_act"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"indexer_n_heads": None}, "indexer_n_heads"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_head_dim": 6, "partial_rotary_factor": 1.0}, "turns 8 dimensions .* indexer have 6"),
        ({"indexer_budget": 25}, "indexer_budget.* a multiple of indexer_compress_ratio, 8"),
        ({"hc_count": 1}, "hc_count"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types"),
        ({**NGRAMS, "ple_layer_ids": [4]}, "no recurrence in place of attention"),
        ({**NGRAMS, "ple_layer_ids": [5]}, "ple_layer_ids"),
        ({**NGRAMS, "ple_embed_dim": 30}, "ple_embed_dim.*a multiple of 4"),
        ({**NGRAMS, "eos_token_id": None}, "eos_token_id"),
        ({**NGRAMS, "ngram_size": 1}, "ngram_size"),
        ({**NGRAMS, "split_ngram_parts": 1 << 24}, "split_ngram_parts"),
        ({**NGRAMS, "heads_per_ngram": 1 << 13}, "heads_per_ngram"),
        ({**NGRAMS, "ple_conv_kernel_size": 12}, "over 34 positions; the runtime has at most 32"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        arch_of(**changes)


def test_a_config_without_indexers_is_refused_with_the_names_of_all_their_fields() -> None:
    with pytest.raises(UnsupportedArch) as refused:
        arch_of(**dict.fromkeys(INDEXER))
    message = str(refused.value)
    assert "indexer_n_heads, indexer_kv_heads, indexer_head_dim, indexer_budget, indexer_compress" in message
    assert "a whole number each, or layer_types all linear_attention" in message


def test_a_model_that_was_made_with_fewer_positions_is_refused_with_the_reason() -> None:
    arch = arch_of().replace(max_position=31)
    source = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=None)
    with pytest.raises(UsageError, match=r"positions 1..31 \(it was made when longer contexts"):
        Engine(source, device=CPU, config=EngineConfig(max_model_len=32))


def test_heads_of_a_pooled_indexer_are_not_those_of_keys() -> None:
    indexer = BlockIndexer(3, 16, 8, 3, pooled=True)
    layer = tiny_shape(block_indexer=indexer)
    assert why_layer_unfit(layer) is None
    assert "each has one of its own" in str(
        why_layer_unfit(tiny_shape(block_indexer=BlockIndexer(3, 16, 8, 3)))
    )
    arch = arch_of(layer_types=["full_attention"] * 4)
    widths = Widths.of(arch)
    fewer = resized(arch, Widths(2, 1, widths.intermediate_size, 4))
    assert {each.block_indexer for each in fewer.layers} == {arch.layers[0].block_indexer}
    source = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=None)
    weights: dict[str, Any] = dict(source.layer(0))
    before = weights["attn.indexer.q.weight"]
    keep_heads_(weights, arch.layers[0], "kv_group", torch.tensor([1]))
    assert weights["attn.indexer.q.weight"] is before
    assert weights["attn.k.weight"].shape == (8, 32)


def changed(directory: Path, changes: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), **changes}, file, metadata={"format": "pt"})


BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


@pytest.mark.parametrize("name", BUFFERS)
def test_a_checkpoint_whose_hashes_are_others_is_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path, *CASES["qwen4_exp_text"])
    whole = f"model.layers.2.ple.ple_embedding.{name}"
    stored = load_file(tmp_path / "model.safetensors")[whole]
    Checkpoint(tmp_path)
    changed(tmp_path, {whole: stored + 2})
    with pytest.raises(UnsupportedArch, match=f"tensor '{whole}' does not hold .* hashed to other rows"):
        Checkpoint(tmp_path)


def test_hashes_and_layers_that_predict_tokens_are_written_as_they_were(tmp_path: Path) -> None:
    saved(tmp_path / "source", *CASES["qwen4_exp_text"])
    changed(tmp_path / "source", {"mtp.layers.0.fc.weight": torch.ones(2, 3)})
    source = Checkpoint(tmp_path / "source")
    parts = {name.removeprefix(UNTOUCHED) for name in source.outer() if name.startswith(UNTOUCHED)}
    own = {f"model.layers.{idx}.ple.ple_embedding.{name}" for idx in (0, 2) for name in BUFFERS}
    assert parts == {"mtp.layers.0.fc.weight", *own}
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    assert_same_tensors(tmp_path / "written", tmp_path / "source")


def test_a_checkpoint_names_the_linears_that_no_scheme_reaches(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    arch = arch_of(**NGRAMS, **sizes, architectures=["Qwen4ExpForCausalLM"])
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])
    random = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=scheme.layers)
    write_format("compressed-tensors", tmp_path, random, scheme)
    ignored = set(json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"])
    prefix = "model.layers.0"
    assert {
        f"{prefix}.ple.key_proj",
        f"{prefix}.ple.value_proj",
        f"{prefix}.attn_hyper_connection.input_mix_weight_down",
        f"{prefix}.mlp_hyper_connection.block_inject_weight",
        "model.layers.3.self_attn.indexer.index_qk_proj",
        "model.hyper_connection_mixer.input_mix_weight_up",
    } <= ignored
    assert not [name for name in ignored if "shard_" in name]


def test_vllm_is_stated_to_be_untested() -> None:
    consumers = FORMATS.get("compressed-tensors").consumers(arch_of(), ModelScheme(SCHEMES["FP8_DYNAMIC"]))
    assert [each.loads for each in consumers if each.name.startswith("vLLM")] == [False, False]

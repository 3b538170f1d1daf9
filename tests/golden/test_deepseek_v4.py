"""DeepSeek-V4: the spellings of its configs, what is refused of them, and whole prompts of several lengths of
entries in steps of any size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.attention import CachedAttention
from compress.models.checkpoint import Checkpoint
from compress.models.expert_pruning import with_experts
from compress.models.family import FAMILIES, family_of
from compress.models.indexer import EntryIndexer, train_all_but_indexers_
from compress.models.max_position import why_no_longer
from compress.models.pruning import why_heads_stay, with_layers
from compress.models.weights import build_decoder
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import SAVED_OTHERWISE, build, saved, tokens

CPU = torch.device("cpu")
OLDER: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 128, 4, 128, 0],
    "compress_rope_theta": 160000,
    "num_hash_layers": 2,
    "num_hidden_layers": 4,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}
"""A config in the spelling of the published code, with the type of the layer that predicts a token."""


def read(config: dict[str, Any]) -> Arch:
    return family_of(config).read_config(config)


def test_an_older_config_means_what_it_means_to_transformers(tmp_path: Path) -> None:
    arch = read(OLDER)
    (tmp_path / "config.json").write_text(json.dumps(OLDER))
    stated = type(build("deepseek_v4", {}).config).from_pretrained(tmp_path)
    kinds = {(0, False): "sliding_attention", (4, True): "compressed_sparse_attention"}
    kinds[128, False] = "heavily_compressed_attention"
    facts = [layer.compressed for layer in arch.layers]
    assert [kinds[each.rate, each.overlaps] for each in facts if each] == stated.layer_types
    hashed = [bool(layer.experts and layer.experts.table_size) for layer in arch.layers]
    assert ["hash_moe" if each else "moe" for each in hashed] == stated.mlp_layer_types
    for layer in arch.layers:
        assert layer.rope is not None
        assert layer.compressed is not None
        ours = (layer.rope.theta, layer.rope.kind, layer.rope.attention_factor, layer.rope.rotary_dim)
        if layer.compressed.rate:
            theirs = stated.rope_parameters["compress"]
            assert ours == (theirs["rope_theta"], "yarn", theirs["attention_factor"], 64)
            assert layer.rope.factor == theirs["factor"]
        else:
            assert ours == (stated.rope_parameters["main"]["rope_theta"], "default", 1.0, 64)
    assert arch.max_position == 1 << 20
    assert why_no_longer(arch) == ""
    written = FAMILIES.get("deepseek_v4").write_config(arch)
    assert written["compress_ratios"] == OLDER["compress_ratios"][:4]
    assert "layer_types" not in written
    assert read(written).layers == arch.layers


def test_defaults_are_the_layers_of_transformers() -> None:
    theirs = build("deepseek_v4", {"num_hidden_layers": 3}).config
    arch = read({"model_type": "deepseek_v4", "num_hidden_layers": 3})
    assert theirs.layer_types == ["heavily_compressed_attention"] * 3
    assert [layer.compressed.rate for layer in arch.layers if layer.compressed] == [128] * 3
    deeper = read({"model_type": "deepseek_v4", "num_hidden_layers": 6})
    rates = [layer.compressed.rate for layer in deeper.layers if layer.compressed]
    assert rates == [128, 128, 128, 4, 128, 4]
    assert [bool(layer.experts and layer.experts.table_size) for layer in deeper.layers] == [True] * 3 + [
        False
    ] * 3


def test_removed_layers_take_their_types_and_tables_with_them() -> None:
    arch = with_layers(read(OLDER), [0, 2, 3])
    again = read(FAMILIES.get("deepseek_v4").write_config(arch))
    assert again.layers == arch.layers
    assert [layer.compressed.rate for layer in again.layers if layer.compressed] == [0, 4, 128]
    assert [bool(layer.experts and layer.experts.table_size) for layer in again.layers] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compress_ratios": [0, 16, 4, 128]}, "compress_ratios"),
        ({"compress_ratios": [0, 128]}, "compress_ratios"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"] * 4, "compress_ratios": None}, "layer_types"),
        ({"compress_rate_csa": 8}, "compressed_sparse_attention"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "num_hash_layers"),
        ({"mlp_layer_types": ["dense"] * 4, "num_hash_layers": None}, "mlp_layer_types"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"o_groups": 7}, "7 groups"),
        ({"qk_rope_head_dim": 63}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 9e4}}},
            "partial_rotary_factor",
        ),
        (
            {"rope_scaling": {"main": {"rope_theta": 1e4}, "compress": {"rope_type": "yarn"}}},
            "attention_factor",
        ),
    ],
    ids=str,
)
def test_a_config_that_programs_read_in_two_ways_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedArch, match=named):
        read({**OLDER, **changes})


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    """It saves other names than published checkpoints have."""
    model = build(*CASES["deepseek_v4"])
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert all(any(part in name for name in names) for part in SAVED_OTHERWISE["deepseek_v4"])
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        assert (decoder(tokens(1, 20)) - model(tokens(1, 20)).logits).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["deepseek_v4", "deepseek_v4-yarn-tables"])
def test_entries_are_those_of_transformers_in_steps_of_any_size(case: str, tmp_path: Path) -> None:
    model = saved(tmp_path, *CASES[case])
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, 61)
    steps = [
        (0, 1),
        (1, 4),
        (4, 15),
        (15, 16),
        (16, 17),
        (17, 40),
        *((idx, idx + 1) for idx in range(40, 61)),
    ]
    with torch.no_grad():
        past = None
        theirs, ours = [], []
        cache = CachedAttention()
        for begin, end in steps:
            out = model(tokens_BS[:, begin:end], past_key_values=past, use_cache=True)
            past = out.past_key_values
            theirs.append(out.logits)
            ours.append(decoder(tokens_BS[:, begin:end], torch.arange(begin, end), cache))
    expected = torch.cat(theirs, dim=1)
    assert (torch.cat(ours, dim=1) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_table_with_other_numbers_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["deepseek_v4"])
    stored = load_file(tmp_path / "model.safetensors")
    stored["layers.0.ffn.gate.tid2eid"][5, 1] = 6
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedArch, match=r"tid2eid' .* from 0 to 6; it must have the indices of 6"):
        Checkpoint(tmp_path)


def test_formats_of_keys_and_values_and_cuts_are_refused_in_a_sentence(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["deepseek_v4"])
    arch = Checkpoint(tmp_path).arch
    with pytest.raises(UsageError, match="compressed attention, whose cache holds"):
        kv_bytes_per_token(arch, "FP8_TOKEN_HEAD")
    short = kv_bytes_per_token(arch, "F32", num_positions=64)
    assert short == 4 * arch.cached_numbers == 4 * 16 * (1 + 5 + 3)
    assert "in groups" in str(why_heads_stay(arch))
    with pytest.raises(UsageError, match="tables choose"):
        with_experts(arch, 4)


FEW = {"index_topk": 3, "index_n_heads": 8, "max_position_embeddings": 128}
"""An indexer that chooses three entries. Of eight heads few pairs of a query and an entry have no positive
product, whose equal scores of zero `transformers` breaks in an order of its own."""


@pytest.fixture(scope="module", params=["deepseek_v4", "deepseek_v4-yarn-tables"])
def few(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model that chooses few entries, and the one of `transformers`."""
    family, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("few")
    return path, saved(path, family, {**changes, **FEW})


def test_chosen_entries_are_those_of_transformers(few: tuple[Path, Any]) -> None:
    path, model = few
    decoder = build_decoder(Checkpoint(path), dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, 97)
    steps = [(0, 1), (1, 5), (5, 16), (16, 50), *((idx, idx + 1) for idx in range(50, 97))]
    past = None
    theirs, ours = [], []
    cache = CachedAttention()
    with torch.no_grad():
        whole = model(tokens_BS).logits
        assert (decoder(tokens_BS) - whole).abs().max() < 1e-4 * whole.abs().max()
        for begin, end in steps:
            out = model(tokens_BS[:, begin:end], past_key_values=past, use_cache=True)
            past = out.past_key_values
            theirs.append(out.logits)
            ours.append(decoder(tokens_BS[:, begin:end], torch.arange(begin, end), cache))
    expected = torch.cat(theirs, dim=1)
    assert (torch.cat(ours, dim=1) - expected).abs().max() < 1e-4 * expected.abs().max()


def generated(source: Checkpoint, prompts: list[tuple[int, ...]], **config: Any) -> list[list[int]]:
    engine = Engine(source, device=CPU, config=EngineConfig(max_model_len=128, **config))
    requests = [
        Request(str(idx), prompt, SamplingParams(12, ignore_eos=True)) for idx, prompt in enumerate(prompts)
    ]
    first = [list(each.tokens) for each in engine.generate(requests)]
    if config.get("prefix_cache"):
        assert [list(each.tokens) for each in engine.generate(requests)] == first
        assert engine.counts.prefix_hits > 0
    return first


def test_tokens_served_after_long_prompts_are_those_of_transformers(few: tuple[Path, Any]) -> None:
    path, model = few
    prompts = [tuple(tokens(1, length)[0].tolist()) for length in (5, 33, 90)]
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            sequence = list(prompt)
            for _ in range(12):
                sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
            expected.append(sequence[len(prompt) :])
    source = Checkpoint(path)
    assert generated(source, prompts) == expected
    assert generated(source, prompts, max_step_tokens=9, block_size=16, prefix_cache=True) == expected
    drafted = Speculative(DraftModel(source), k=3)
    assert generated(source, prompts, speculative=drafted) == expected


def test_short_contexts_have_no_indexer_and_rows_of_the_cache_no_numbers_for_one(tmp_path: Path) -> None:
    family, changes = CASES["deepseek_v4"]
    saved(tmp_path, family, {**changes, "index_topk": 5})
    source = Checkpoint(tmp_path)
    (sparse,) = (idx for idx, layer in enumerate(source.arch.layers) if layer.indexer is not None)
    indexer = source.arch.layers[sparse].indexer
    assert isinstance(indexer, EntryIndexer)
    assert (indexer.top_k, indexer.cached_numbers) == (20, 4 * indexer.head_dim)
    tokens_BS = tokens(2, 20)
    scored = []
    for max_model_len in (20, 21):
        engine = Engine(source, device=CPU, config=EngineConfig(max_model_len=max_model_len))
        more = indexer.cached_numbers * (max_model_len > 20)
        assert engine.kv_bytes_per_token == 4 * (source.arch.cached_numbers + more)
        rows = {row["linear"] for row in engine.kernel_report() if row["layer"] == sparse}
        assert any("indexer" in each for each in rows) == (max_model_len > 20)
        scored.append(engine.runner.score(tokens_BS))
    assert torch.equal(*scored)


def test_training_leaves_indexers_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["deepseek_v4"])
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    trained = {
        name for name, each in train_all_but_indexers_(decoder).named_parameters() if each.requires_grad
    }
    others = {name for name, _ in decoder.named_parameters()} - trained
    assert others == {name for name, _ in decoder.named_parameters() if ".indexer." in name}
    assert len(others) == 6

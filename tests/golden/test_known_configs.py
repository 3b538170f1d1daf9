"""Which well-known checkpoints are read, by their `config.json` alone, and why others are not.

Each row of `configs/*.json` is the config of a checkpoint as it is published, written down from public
sources, without fields such as paths that differ between mirrors. `unread` lists the fields that change
nothing and that a note names; `noted` is a part of what else a note says; `refused` is a part of the sentence
that refuses the config. Of the architectures that are not read at all, a row has a few fields only. A row
that is `assumed` was put together from the defaults of `transformers`, for want of the published config.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from compress.cli.app import main
from compress.errors import CompressError, UnsupportedArch, UnsupportedFormat
from compress.export import codecs
from compress.models.checkpoint import arch_of
from compress.models.config_notes import unread_note
from compress.models.config_values import SAME_ACTIVATIONS
from compress.models.family import family_of
from compress.models.wide_codes import without_layout
from tests.support.tiny_families import ATTENTION_FREE, BY_ANOTHER_NAME, TEXT_FAMILIES
from tests.support.tiny_hf import (
    FIXED_ACTIVATIONS,
    OWN_EPS,
    TWICE_IN_WINDOWS,
    kv_heads_of,
    ropes_of,
    types_of,
    window_of,
)

ROWS: dict[str, dict[str, Any]] = {
    row["name"]: row
    for file in sorted((Path(__file__).parent / "configs").glob("*.json"))
    for row in json.loads(file.read_text(encoding="utf-8"))
}
READ = [name for name, row in ROWS.items() if "refused" not in row]
CODECS = codecs()
IN_ONE_TENSOR = {"gpt_oss", "granitemoe", "granitemoeshared", "llama4", "aria", "aria_text", "step3p7"}
each_row = pytest.mark.parametrize("name", ROWS)
each_read = pytest.mark.parametrize("name", READ)


def test_the_list_is_long_enough_to_mean_something() -> None:
    assert len(ROWS) >= 200
    assert len(READ) >= 190
    families = {ROWS[name]["config"]["model_type"] for name in READ}
    assert families >= {*TEXT_FAMILIES} - {
        "dots3_note_text",
        "inkling_text",
        "ministral",
        "ministral3",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "granitemoeshared",
        "granite_swa",
        "granitemoe_swa",
        "llama4_text",
        "minimax_m3_vl_text",
    }


@each_row
def test_a_known_config_is_read_or_refused_for_its_reason(name: str) -> None:
    row = ROWS[name]
    before = json.dumps(row["config"])
    if "refused" in row:
        with pytest.raises((UnsupportedArch, UnsupportedFormat)) as caught:
            arch_of(row["config"], CODECS)
        assert row["refused"] in str(caught.value)
        return
    arch = arch_of(row["config"], CODECS)
    assert family_of(row["config"]).unread_fields(arch.config) == row["unread"]
    note = unread_note(arch)
    assert (note is None) == (row["unread"] == [] and "noted" not in row)
    assert row.get("noted", "") in (note or "")
    assert json.dumps(row["config"]) == before
    assert arch.config == without_layout(row["config"])
    written = family_of(row["config"]).write_config(arch)
    wholes = [each.get("thinker_config", each) for each in (written, row["config"])]
    ours, theirs = (each.get("text_config", each.get("llm_config", each)) for each in wholes)
    assert {key: ours[key] for key in row["unread"]} == {key: theirs[key] for key in row["unread"]}
    assert family_of(written).read_config(written).replace(config={}) == arch.replace(config={})


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("state-spaces/mamba-130m-hf", 129),
        ("state-spaces/mamba-2.8b-hf", 2768),
        ("tiiuae/falcon-mamba-7b", 7273),
        ("mistralai/Mamba-Codestral-7B-v0.1", 7285),
    ],
)
def test_models_without_attention_have_the_parameters_of_their_checkpoints(name: str, millions: int) -> None:
    arch = arch_of(ROWS[name]["config"], CODECS)
    assert arch.num_params / 1e6 == pytest.approx(millions, abs=1)
    assert arch.cached_numbers == 0
    assert arch.max_position == 1 << 18


@pytest.mark.parametrize(
    ("name", "billions"),
    [("microsoft/Phi-tiny-MoE-instruct", 3.8), ("microsoft/Phi-mini-MoE-instruct", 7.6)],
)
def test_models_with_code_of_their_own_have_the_parameters_of_their_cards(name: str, billions: float) -> None:
    """Heads of hidden_size / number of heads would give the first 4.4 billions (arXiv 2506.18349)."""
    assert arch_of(ROWS[name]["config"], CODECS).num_params / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "without_tables", "total", "active"),
    [
        ("meituan-longcat/LongCat-Flash-Chat", False, 560, 27),
        ("meta-models/Muse-Spark-Open-816B-A42B", True, 816, 42),
    ],
)
def test_models_of_rare_mixtures_have_the_whole_billions_that_are_published(
    name: str, without_tables: bool, total: int, active: int
) -> None:
    """LongCat-Flash has 560 billions, of which a token takes 27 on average (arXiv 2509.01322). The name of
    Muse Spark counts neither the embedding nor the head."""
    arch = arch_of(ROWS[name]["config"], CODECS)
    tables = 2 * arch.vocab_size * arch.hidden_size if without_tables else 0
    counts = (arch.num_params - tables, arch.num_active_params - tables)
    assert tuple(each // 10**9 for each in counts) == (total, active)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("bigscience/bloom-560m", 559214592),
        ("bigscience/bloomz-7b1", 7069016064),
        ("bigscience/bloom", 176247271424),
        ("mosaicml/mpt-7b", 6649286656),
        ("tiiuae/falcon-rw-1b", 1311625216),
    ],
)
def test_models_with_alibi_have_the_parameters_of_their_checkpoints(name: str, params: int) -> None:
    arch = arch_of(ROWS[name]["config"], CODECS)
    assert arch.num_params == params
    assert all(layer.alibi is not None and layer.rope is None for layer in arch.layers)


@each_read
def test_a_config_that_is_read_means_what_it_means_to_transformers(name: str) -> None:
    config = {key: value for key, value in ROWS[name]["config"].items() if key != "quantization_config"}
    arch = family_of(config).read_config(config)
    model_type = BY_ANOTHER_NAME.get(config["model_type"], config["model_type"])
    whole = CONFIG_MAPPING[model_type](**json.loads(json.dumps(config)))
    theirs = whole.get_text_config()
    stated = getattr(whole, "thinker_config", whole), theirs
    ties = [each.tie_word_embeddings for each in stated if hasattr(each, "tie_word_embeddings")]
    tied = ties[0] if ties else False
    spelled = family_of(config).spelled
    of_images = getattr(theirs, "cross_attention_layers", None) or []
    of_text = [idx for idx in range(theirs.num_hidden_layers) if idx not in of_images]
    assert arch.num_layers == len(of_text)
    if arch.family not in ATTENTION_FREE:
        longest = config.get("seq_length", 2048) if arch.family == "bloom" else None
        longest = theirs.max_seq_len if arch.family == "mpt" else longest
        assert arch.max_position == (longest or theirs.max_position_embeddings)
    eps = getattr(theirs, spelled.get("rms_norm_eps", "rms_norm_eps"), OWN_EPS.get(arch.family))
    assert arch.norm_eps == (theirs.layer_norm_eps if eps is None else eps)
    if arch.family in FIXED_ACTIVATIONS:
        assert arch.activation == FIXED_ACTIVATIONS[arch.family]
    else:
        stated_act = getattr(theirs, spelled.get("hidden_act", "hidden_act"), "silu")
        assert arch.activation == SAME_ACTIVATIONS.get(stated_act, stated_act)
    unstated = "tie_word_embeddings" not in config and config["model_type"] == "mistral3"  # see `wrapper.py`
    # transformers takes a flat config for one that ties, and leaves a head of other numbers as it is.
    flat = "text_config" not in config and config["model_type"] == "paddleocr_vl"
    assert unstated or flat or arch.tied_head == tied
    if arch.family in ATTENTION_FREE:
        facts = arch.layers[0].recurrence
        assert facts is not None
        channels = getattr(theirs, "intermediate_size", theirs.expand * theirs.hidden_size)
        assert (facts.value_size, facts.key_dim) == (channels, theirs.state_size)
        return
    types = types_of(theirs) or [""] * arch.num_layers
    owns = [theirs.per_layer_config[idx] for idx in of_text]
    rescaled = getattr(theirs, "rope_scaling_layers", None)
    for idx, (layer, kind, own) in enumerate(zip(arch.layers, types, owns, strict=True)):
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        kv_heads = kv_heads_of(own, in_window=layer.window is not None)
        is_twice = arch.family in TWICE_IN_WINDOWS and layer.window is not None
        assert layer.num_kv_heads == kv_heads * (2 if is_twice else 1)
        of_latents = getattr(own, "qk_head_dim", None)
        if arch.family == "dots3_note":
            of_latents = own.qk_nope_head_dim + own.qk_rope_head_dim
        assert layer.head_dim == (of_latents or head_dim)
        if layer.rope is None:
            continue
        if arch.family == "deepseek_v4":
            kind = "main" if kind == "sliding_attention" else "compress"
        ropes = ropes_of(theirs)
        rope = ropes.get(kind, ropes)
        if rescaled is not None and idx not in rescaled:
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
        assert layer.rope.theta == rope["rope_theta"] * stretch
        assert layer.rope.kind == ("default" if rope["rope_type"] == "dynamic" else rope["rope_type"])
        assert layer.rope.factor == rope.get("factor", 1.0)  # that of a plain rope is not used
        # The class of Ling 3.0 reads no share of a plain rope.
        share = 1 if arch.family == "bailing_hybrid" else rope.get("partial_rotary_factor", 1)
        if arch.family in ("minimax_text_01", "minimax_m1"):  # that of MiniMax rotates whole heads
            share = config["rotary_dim"] / head_dim
        assert (layer.rope.rotary_dim or head_dim) == int(head_dim * share)
        if layer.rope.kind in ("llama3", "yarn", "longrope"):
            assert layer.rope.original_max_position == rope["original_max_position_embeddings"]
    assert [each.window for each in arch.layers] == _windows_in_transformers(theirs, arch.num_layers)


def _windows_in_transformers(config: Any, num_layers: int) -> list[int | None]:
    window = window_of(config)
    types = types_of(config) or ["sliding_attention"] * num_layers
    if config.model_type == "deepseek_v4":  # next to entries, too
        return [window] * len(types)
    return [window if kind in ("sliding_attention", "hybrid_sliding") else None for kind in types]


@each_row
@pytest.mark.one_in(64)
def test_plan_and_run_agree_with_the_reader(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a directory with just the config, `plan --offline` ends well or with the reader's sentence; `run`
    ends with the same sentence, or for want of tensors."""
    monkeypatch.chdir(tmp_path)
    row = ROWS[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(row["config"]))
    stages = _stages(row["config"])
    recipe = {"version": 1, "model": "./model", "stages": stages}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    planned = _document(capsys, "plan", "recipe.yaml", "--offline", "--device", "cpu")
    run = _document(capsys, "run", "recipe.yaml", "--offline", "--device", "cpu")
    if "refused" in row:
        sentence = _refusal(row["config"])
        assert sentence in planned["error"]["message"]
        assert sentence in run["error"]["message"]
        return
    assert "error" not in planned
    assert [key for note in planned["model"]["notes"] for key in row["unread"] if key in note] == row[
        "unread"
    ]
    assert "safetensors" in run["error"]["message"]


def _stages(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return stages that a model of this config can pass: codes are not quantized again, and experts in one
    tensor stay dense."""
    if "quantization_config" in config:
        return [{"kind": "calibrate"}]
    quantize: dict[str, Any] = {"kind": "quantize", "scheme": "FP8_DYNAMIC"}
    if config["model_type"] in IN_ONE_TENSOR:
        quantize["overrides"] = {"*.moe.experts.*": "dense"}
    return [quantize, {"kind": "export"}]


def _refusal(config: Mapping[str, Any]) -> str:
    try:
        arch_of(config, CODECS)
    except CompressError as error:
        return error.message
    raise AssertionError("the config is read")


def _document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)

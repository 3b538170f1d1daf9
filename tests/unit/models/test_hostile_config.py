"""Configs and tensors of checkpoints that are damaged or made to harm: each is refused in one sentence that
names the field, before anything of the size that it states is made.
"""

import contextlib
import json
import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import StorageError, UnsupportedArch, UnsupportedFormat
from compress.export import codecs
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.config_facts import facts_of
from compress.models.config_file import read_config
from compress.models.config_notes import unread_note
from compress.models.eagle3 import Eagle3Facts
from compress.models.family import FAMILIES, family_of
from compress.quant.model_scheme import ModelScheme
from tests.support.hostile import NO_NUMBERS, make_fifo, refusal
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_checkpoint
from tests.support.tiny_families import BY_ANOTHER_NAME
from tests.support.tiny_hf import build_config

CODECS = codecs()  # loaded here, so that no test measures an import
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
NO_FLOATS = ("0.1", True, [], {}, -1, 10**30)


def _rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPE | changes}


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for name in SIZES for value in (*NO_NUMBERS, 0)),
    *(("rms_norm_eps", {"rms_norm_eps": value}) for value in NO_FLOATS),
    *(("hidden_act", {"hidden_act": value}) for value in (3, ["silu"], None)),
    *(("tie_word_embeddings", {"tie_word_embeddings": value}) for value in ("no", "false", 0, 1, [], {})),
    *(("attention_bias", {"attention_bias": value}) for value in ("no", 1)),
    *(("eos_token_id", {"eos_token_id": value}) for value in ("2", 2.0, True, -5, [1, "2"], [True], {})),
    *(("dtype", {"dtype": value}) for value in ("int8", "float8", "__class__", 16, ["float16"])),
    *(("rope_theta", {"rope_theta": value}) for value in (*NO_FLOATS, 0, 1)),
    *(("rope_theta", _rope(rope_theta=value)) for value in (*NO_FLOATS, 0)),
    *(("factor", _rope(factor=value)) for value in (*NO_FLOATS, 0)),
    *(("beta_fast", _rope(beta_fast=value)) for value in (*NO_FLOATS, 0)),
    *(("beta_slow", _rope(beta_slow=value)) for value in (*NO_FLOATS, 0)),
    *(("attention_factor", _rope(attention_factor=value)) for value in (*NO_FLOATS, 0)),
    *(("mscale", _rope(mscale=value)) for value in NO_FLOATS),
    *(
        ("original_max_position_embeddings", _rope(original_max_position_embeddings=value))
        for value in (*NO_NUMBERS, 0)
    ),
    ("truncate", _rope(truncate="no")),
    ("rope_type", _rope(rope_type=["yarn"])),
    ("attn_factor", _rope(attn_factor=-1.0)),
    ("attn_factor", _rope(attn_factor=0.9, attention_factor=1.1)),
    ("attn_factor", _rope(rope_type="linear", attn_factor=0.9)),
    ("high_freq_factor", _rope(rope_type="llama3", low_freq_factor=4.0, high_freq_factor=3.0)),
    ("rope_parameters", {"rope_parameters": "yarn"}),
    ("rope_parameters", {"rope_parameters": [ROPE]}),
    ("full_attention", {"rope_parameters": {"sliding_attention": ROPE}}),
    ("num_attention_heads", {"hidden_size": 33, "head_dim": None}),
    ("even", {"head_dim": 7}),
]
SLIDING: list[tuple[str, dict[str, Any]]] = [
    *(
        ("sliding_window", {"use_sliding_window": True, "sliding_window": value})
        for value in (*NO_NUMBERS, 0)
    ),
    *(("use_sliding_window", {"use_sliding_window": value}) for value in ("no", 1, [])),
    *(("max_window_layers", {"max_window_layers": value}) for value in NO_NUMBERS),
    *(
        ("layer_types", {"layer_types": value})
        for value in ("full_attention", [1, 2], {}, ["full_attention"])
    ),
]


@pytest.mark.parametrize(("field", "changes"), CONFIGS, ids=str)
def test_a_field_of_wrong_type_or_range_is_named(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = LLAMA | changes
    if "rope_parameters" in changes:
        config.pop("rope_theta", None)
    elif "rope_theta" in changes:
        config.pop("rope_parameters", None)
    assert field in _refused(tmp_path, config)


@pytest.mark.parametrize(("field", "changes"), SLIDING, ids=str)
def test_a_wrong_window_is_named(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert field in _refused(tmp_path, QWEN3 | changes)


@pytest.mark.parametrize("family", sorted({*FAMILIES.names()} - BY_ANOTHER_NAME.keys()))
@pytest.mark.parametrize("value", [None, "x", True, -1, 0.5, [], {}, [1], {"a": 1}, 10**30, 0], ids=repr)
@pytest.mark.one_in(8)
def test_no_value_of_any_field_is_an_internal_error(family: str, value: Any) -> None:
    base = build_config(family, {}).to_dict()
    assert isinstance(family_of(base).read_config(base), Arch)
    fields = {*base, *FAMILIES.get(family).known_fields, "rope_scaling", "architectures"}
    facts = facts_of(family)
    fields |= {*facts.defaults, *(facts.reads or ()), "rope_interleaved", "unheard", "a\n", "text_config"}
    for field in sorted(fields):
        config = base | {field: value}
        with contextlib.suppress(UnsupportedArch, UnsupportedFormat):
            unread_note(family_of(config).read_config(config))


def test_a_class_that_is_no_text_is_refused(tmp_path: Path) -> None:
    assert "architectures" in _refused(tmp_path, {"model_type": "rwkv", "architectures": [1]})


def test_layers_are_counted_before_anything_is_made_for_them(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_arch())
    for num_layers, field in ((4000, "every tensor of layer 3"), (10**6, "num_hidden_layers")):
        _change(checkpoint, num_hidden_layers=num_layers, layer_types=None)
        tracemalloc.start()
        message = refusal(lambda: Checkpoint(checkpoint))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert field in message
        assert peak < 8 << 20


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"[" * 200_000,
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_config_that_is_no_json_object_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert "config.json" in refusal(lambda: read_config(tmp_path), exit_codes=(2,))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_fifo_or_a_directory_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_arch())
    make_fifo(checkpoint / name)
    assert f"{name} is a FIFO" in refusal(lambda: Checkpoint(checkpoint))
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    assert name in refusal(lambda: Checkpoint(checkpoint))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_a_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", tiny_arch())
    (checkpoint / name).rename(tmp_path / name)
    (checkpoint / name).symlink_to(tmp_path / name)
    with pytest.raises(StorageError, match="leads out of"):
        Checkpoint(checkpoint)


def test_the_blobs_of_a_hub_cache_are_read(tmp_path: Path) -> None:
    snapshot = tiny_checkpoint(tmp_path / "snapshots" / "abc", tiny_arch())
    (tmp_path / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).rename(tmp_path / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert Checkpoint(snapshot).arch.num_layers == tiny_arch().num_layers


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 2**65]},
        {"dtype": "F32", "shape": [10**40, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "I32", "shape": [64, 32], "data_offsets": [0, 8192]},
        "F32",
        None,
    ],
    ids=repr,
)
def test_a_tensor_that_no_weight_can_be_is_refused(entry: Any, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_arch())
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8192))
    refusal(lambda: Checkpoint(checkpoint))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_codes_are_no_dense_weight(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_arch())
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, checkpoint / "model.safetensors")
    assert "'model.norm.weight' is" in refusal(lambda: Checkpoint(checkpoint), exit_codes=(2,))


@pytest.mark.parametrize(
    "weight_map",
    [None, [], "x", {"a": 1}, {"a": "../model.safetensors"}, {"a": "b.bin"}, {}],
    ids=repr,
)
def test_an_index_of_shards_with_wrong_types_is_refused(weight_map: Any, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_arch())
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refusal(lambda: Checkpoint(checkpoint))


def _groups(**weights: Any) -> dict[str, Any]:
    stated = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
    } | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": stated}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SLOW = r"(\w+\.?)+X"
QUANTIZATIONS: list[dict[str, Any]] = [
    *(_groups(group_size=value) for value in (*NO_NUMBERS, 0)),
    *(_groups(num_bits=value) for value in ("4", True, [4], 4.0, 10**30)),
    *(_groups(symmetric=value) for value in ("yes", 1, [])),
    *(_groups(type=value) for value in (["int"], 4, {})),
    *(_groups(strategy=value) for value in (["group"], 4, {})),
    *(
        _groups() | {"config_groups": value}
        for value in ([], ["x"], "x", 3, {"a": []}, {"a": 3}, {"a": None})
    ),
    *(
        _groups() | {"config_groups": {"a": {"targets": ["Linear"], part: value}}}
        for part in ("weights", "input_activations", "output_activations")
        for value in ([1], "x", 3)
    ),
    *(
        _groups() | {"config_groups": {"a": {"targets": value, "weights": {}}}}
        for value in ("Linear", 3, [3], [["Linear"]])
    ),
    *(
        _groups() | {"ignore": value}
        for value in ("lm_head", [3], 3, ["re:("], [f"re:{SLOW}"], ["re:" + "a?" * 40])
    ),
    *(_groups() | {"kv_cache_scheme": value} for value in ("fp8", [1], 3)),
    _groups(type="float") | {"format": "float-quantized"},
    {
        **_groups(),
        "format": "float-quantized",
        "config_groups": {
            "a": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "symmetric": True},
                "input_activations": {"num_bits": [8], "type": {}},
            }
        },
    },
    *(GPTQ | {"bits": value} for value in NO_NUMBERS),
    *(GPTQ | {"group_size": value} for value in ("32", True, 1.5, 0, -2, 10**30, [], None)),
    *(GPTQ | {name: value} for name in ("sym", "lm_head") for value in ("yes", 1, [1])),
    *(GPTQ | {"dynamic": value} for value in ("x", [1], {"-:(": {}}, {f"-:{SLOW}": {}})),
    *(AWQ | {"bits": value} for value in NO_NUMBERS),
    *(AWQ | {"group_size": value} for value in ("32", True, 1.5, 0, -2, 10**30, [], None)),
    *(AWQ | {name: value} for name in ("sym", "lm_head", "zero_point") for value in ("yes", 1, [1])),
    *(AWQ | {"modules_to_not_convert": value} for value in ("x", [1], 3, {"a": 1})),
    *(FP8 | {"weight_block_size": value} for value in (128, "x", [128], [[128, 128]], {"a": 1}, True)),
    *(FP8 | {"activation_scheme": value} for value in (3, [], None)),
    *(
        FP8 | {name: value}
        for name in ("modules_to_not_convert", "ignored_layers")
        for value in ("x", [1], 3, ["("], [SLOW])
    ),
    {"quant_method": ["gptq"]},
    {"quant_method": 3},
    {"bits": 4},
    *(cast(Any, value) for value in ("awq", [1], 3, True)),
]


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=repr)
def test_a_quantization_config_of_wrong_types_is_refused(
    quantization: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_arch())
    _change(checkpoint, quantization_config=quantization)
    with pytest.raises((UnsupportedFormat, UnsupportedArch)) as caught:
        Checkpoint(checkpoint, codecs=CODECS)
    assert "lacks the tensor" not in str(caught.value), "it was read as a right config"
    refusal(lambda: Checkpoint(checkpoint, codecs=CODECS), exit_codes=(2,))


LINEAR = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("leaf", "tensor"),
    [
        ("weight_packed", torch.zeros(32, 4)),
        ("weight_packed", torch.zeros(32, 3, dtype=torch.int32)),
        ("weight_packed", torch.zeros(0, dtype=torch.int32)),
        ("weight_shape", torch.tensor([32, 32, 1])),
        ("weight_shape", torch.tensor([-1, 32])),
        ("weight_shape", torch.tensor([2**62, 32])),
        ("weight_shape", torch.tensor([16, 32])),
        ("weight_shape", torch.tensor([1.0, 2.0])),
        ("weight_scale", torch.zeros(32, 1, dtype=torch.int32)),
        ("weight_scale", torch.zeros(32)),
        ("weight_scale", torch.zeros(32, 7)),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_leaves_of_a_quantized_linear_that_do_not_fit_are_refused(
    leaf: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_arch())
    arch = tiny_arch()
    rows, columns = arch.layers[0].linear_shape("attn.q", arch.hidden_size)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors[f"{LINEAR}.weight"]
    right = {
        "weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
        "weight_scale": torch.ones(rows, columns // 32),
        "weight_shape": torch.tensor([rows, columns]),
    }
    config = _groups()
    config["config_groups"]["group_0"]["targets"] = [LINEAR]
    _change(checkpoint, quantization_config=config)
    for name, value in ((None, None), (leaf, tensor)):
        stored = right | ({} if name is None else {name: value})
        save_file(
            tensors | {f"{LINEAR}.{each}": part for each, part in stored.items()},
            checkpoint / "model.safetensors",
        )
        source = Checkpoint(checkpoint, codecs=CODECS)
        if name is None:
            source.layer(0)
    assert LINEAR in refusal(lambda: source.layer(0), exit_codes=(2,))


def _facts() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    facts, layers = tiny_arch().to_json()
    return json.loads(json.dumps(facts)), json.loads(json.dumps(layers))


@pytest.mark.parametrize("value", [None, "x", True, -1, 0.5, [], {}, [1], {"a": 1}, 10**30], ids=repr)
def test_a_manifest_with_a_wrong_arch_is_refused(value: Any) -> None:
    facts, layers = _facts()
    assert Arch.from_json(facts, layers) == tiny_arch()
    allowed = {("family", str), ("activation", str), ("config", dict), ("dtype", str), ("window", type(None))}
    allowed |= {("rope", type(None))}  # a layer that encodes no positions
    floats = {
        "norm_eps",
        "beta_fast",
        "beta_slow",
        "factor",
        "attention_factor",
        *("low_freq_factor", "high_freq_factor"),
    }
    for name in facts:
        if (
            (name, type(value)) in allowed
            or (name in floats and value == 0.5)
            or value is True is facts[name]
        ):
            continue
        if isinstance(facts[name], bool) and value is True:
            continue
        refusal(lambda name=name: _arch(facts | {name: value}, layers))
    for name in layers[0]:
        if (name, type(value)) not in allowed:
            refusal(lambda name=name: _arch(facts, [layers[0] | {name: value}, *layers[1:]]))
    for name in layers[0]["rope"]:
        if (name in floats and value == 0.5) or (name == "truncate" and value is True):
            continue
        rope = layers[0]["rope"] | {name: value}
        refusal(lambda rope=rope: _arch(facts, [layers[0] | {"rope": rope}, *layers[1:]]))
    refusal(lambda: _arch(facts | {"more": value}, layers))
    refusal(lambda: _arch(facts, [value]))
    refusal(lambda: _arch({key: each for key, each in facts.items() if key != "hidden_size"}, layers))


def _arch(facts: Mapping[str, Any], layers: list[Any]) -> Arch:
    arch = Arch.from_json(facts, layers)
    family_of({"model_type": arch.family})
    return arch


SCHEME = {"name": "W4A16_G128", "num_bits": 4, "symmetric": True, "group_size": 128}


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_bits": value} for value in (*NO_NUMBERS, 0, None)),
        *({"group_size": value} for value in (*NO_NUMBERS, 0)),
        *({"symmetric": value} for value in ("yes", 1, None)),
        *({"type": value} for value in ("bool", 3, [])),
        *({"activation": value} for value in ("bool", 3, [])),
        {"more": 1},
        {"name": 3},
        {"head": 3},
        {"head": {"name": "x"}},
        {"exceptions": 3},
        {"exceptions": [3]},
        {"exceptions": [{"scheme": 3, "linears": []}]},
        {"exceptions": [{"scheme": None, "linears": "x"}]},
        {"exceptions": [{"scheme": None, "linears": [3]}]},
    ],
    ids=repr,
)
def test_a_manifest_with_a_wrong_scheme_is_refused(changes: dict[str, Any]) -> None:
    assert ModelScheme.from_json(SCHEME).layers.num_bits == 4
    refusal(lambda: ModelScheme.from_json(SCHEME | changes), exit_codes=(5,))


@pytest.mark.parametrize(
    "changes",
    [{"arch": 3}, {"layers": 3}, {"layers": [3]}, {"layer_ids": "x"}, {"layer_ids": [-1]}]
    + [{"draft_vocab_size": value} for value in NO_NUMBERS]
    + [{"norm_before_residual": "no"}],
    ids=repr,
)
def test_a_manifest_with_a_wrong_draft_head_is_refused(changes: dict[str, Any]) -> None:
    facts, layers = _facts()
    right = {
        "arch": facts,
        "layers": layers,
        "layer_ids": [1],
        "draft_vocab_size": 8,
        "norm_before_residual": True,
    }
    assert Eagle3Facts.from_json(right).layer_ids == (1,)
    refusal(lambda: Eagle3Facts.from_json(right | changes), exit_codes=(5,))


def _refused(path: Path, config: Mapping[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return refusal(lambda: Checkpoint(path, codecs=CODECS), exit_codes=(2,))


def _change(checkpoint: Path, **changes: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    (checkpoint / "config.json").write_text(json.dumps(config))

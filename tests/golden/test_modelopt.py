"""modelopt checkpoints: tensors against values computed here from the description of the format, configs of
other tools, and the way in and out again without a changed byte.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import StorageError, UnsupportedArch, UnsupportedFormat
from compress.export import FORMATS, open_checkpoint
from compress.export.conversion import stated_scheme
from compress.export.format_writer import write_format
from compress.export.refusals import check_rules
from compress.models.family import family_of
from compress.models.random_source import RandomSource
from compress.models.weights import dense
from compress.quant.kv import FP8_STATIC
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
ARCH = family_of(CONFIG).read_config(CONFIG)
WRITTEN = ["FP8_STATIC", "FP8_DYNAMIC", "W8A16", "W4A16_G128", "W4A16_G64", "NVFP4", "NVFP4_W4A4"]
LINEARS = ["model.layers.1.mlp.up_proj", "model.layers.10.self_attn.q_proj", "lm_head"]
E2M1_16 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class OneScale(RandomSource):
    """Random weights whose linears have one scale each, and a KV cache with scales."""

    kv_format: str | None = None

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = super().layer(layer_idx)
        for value in weights.values():
            if isinstance(value, QuantizedWeight) and value.scheme.activation == "tensor":
                value.scale_OG[:] = value.scale_OG.amax()
        if self.kv_format is not None:
            weights |= {"attn.k_scale": torch.tensor(0.25), "attn.v_scale": torch.tensor(0.75)}
        return weights


def source(scheme: str, *, kv_format: str | None = None, dtype: torch.dtype = torch.bfloat16) -> OneScale:
    arch = ARCH.replace(dtype=str(dtype).removeprefix("torch."))
    found = OneScale(arch, device=torch.device("cpu"), dtype=dtype, scheme=SCHEMES[scheme])
    found.kv_format = kv_format
    return found


def written(path: Path, scheme: str, form: str = "modelopt", *, kv_format: str | None = None) -> Path:
    path.mkdir()
    write_format(form, path, source(scheme, kv_format=kv_format), ModelScheme(SCHEMES[scheme]))
    return path


def values(tensors: dict[str, Tensor], module: str, algorithm: str) -> Tensor:
    """The weights of a module, by the description of the format."""
    stored = tensors[f"{module}.weight"]
    scale = tensors[f"{module}.weight_scale"].double()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A16"):
        return stored.double() * scale.reshape(-1, 1)
    low, high = stored.int() % 16, stored.int() // 16
    if algorithm == "W4A16_AWQ":
        codes = torch.empty(2 * len(stored), stored.shape[1], dtype=torch.float64)
        codes[0::2], codes[1::2] = ((each - 16 * (each > 7)).double() for each in (low, high))
    else:
        numbers = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)
        codes = torch.empty(len(stored), 2 * stored.shape[1], dtype=torch.float64)
        codes[:, 0::2], codes[:, 1::2] = numbers[low], numbers[high]
        scale = scale * tensors[f"{module}.weight_scale_2"].double()
    return codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)


@pytest.mark.parametrize("scheme", WRITTEN)
def test_the_tensors_mean_the_weights_and_both_configs_state_them(scheme: str, tmp_path: Path) -> None:
    path = written(tmp_path / "out", scheme)
    tensors = load_file(path / "model.safetensors")
    stated = json.loads((path / "config.json").read_text())["quantization_config"]
    beside = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    assert stated["quant_method"] == "modelopt"
    assert stated["quant_algo"] == beside["quant_algo"]
    assert stated["ignore"] == beside["exclude_modules"] == ["lm_head"]
    assert beside["kv_cache_quant_algo"] is None
    assert beside.get("group_size") == SCHEMES[scheme].group_size
    given = source(scheme).layer(1)
    for canonical, disk in (("attn.q", "self_attn.q_proj"), ("ffn.down", "mlp.down_proj")):
        weight = given[f"{canonical}.weight"]
        assert isinstance(weight, QuantizedWeight)
        module = f"model.layers.1.{disk}"
        found = values(tensors, module, stated["quant_algo"])
        assert torch.equal(found.to(torch.float32), weight.dequantize(torch.float32))
        floats = {f"{module}.{leaf}" for leaf in ("weight_scale", "weight_scale_2", "input_scale")} & set(
            tensors
        )
        if scheme.startswith("NVFP4"):
            assert tensors[f"{module}.weight_scale"].dtype == torch.float8_e4m3fn
            floats.remove(f"{module}.weight_scale")
        assert all(tensors[each].dtype == torch.float32 for each in floats)
    if scheme == "FP8_STATIC":
        assert tensors["model.layers.1.self_attn.q_proj.weight_scale"].shape == ()
        assert tensors["model.layers.1.self_attn.q_proj.input_scale"].shape == ()
    if scheme == "NVFP4_W4A4":
        given_scale = given["attn.q.weight"].input_global_scale
        stored_scale = tensors["model.layers.1.self_attn.q_proj.input_scale"]
        assert stored_scale.shape == ()
        assert float(stored_scale) * float(given_scale) == 1


@pytest.mark.parametrize("scheme", WRITTEN)
def test_what_is_read_is_written_again_without_a_changed_byte(scheme: str, tmp_path: Path) -> None:
    path = written(tmp_path / "out", scheme, kv_format=FP8_STATIC)
    opened = open_checkpoint(path)
    assert set(opened.schemes.values()) == {SCHEMES[scheme]}
    assert opened.kv_format == FP8_STATIC
    (tmp_path / "again").mkdir()
    write_format("modelopt", tmp_path / "again", opened, stated_scheme(opened))
    for name in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()


def test_second_scales_of_modelopt_itself_come_back_bit_for_bit() -> None:
    """modelopt's second scale is the largest weight / 2688, which has no exact reciprocal."""
    codec = FORMATS.get("modelopt").codec
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        leaves = {
            "weight": torch.randint(0, 256, (16, 32), generator=generator, dtype=torch.uint8),
            "weight_scale": (torch.rand(16, 4, generator=generator) * 447 + 1).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.rand((), generator=generator) / 2688,
        }
        again = codec.encode(codec.decode(leaves, SCHEMES["NVFP4"]))
        assert set(again) == set(leaves)
        assert torch.equal(again["weight_scale_2"], leaves["weight_scale_2"])
        assert torch.equal(again["weight_scale"].view(torch.uint8), leaves["weight_scale"].view(torch.uint8))
        assert torch.equal(again["weight"], leaves["weight"])


def test_input_scales_of_modelopt_itself_come_back_with_the_reciprocal_that_programs_take() -> None:
    """modelopt's input scale is the largest input / 2688; vLLM, TensorRT-LLM and SGLang multiply inputs by
    the float32 reciprocal of it. Past the root of two, two neighbours may have the same one.
    """
    codec = FORMATS.get("modelopt").codec
    leaves = codec.encode(nearest_weight(torch.ones(1, 16), SCHEMES["NVFP4"], torch.float32))
    largest = torch.rand(2000, generator=torch.Generator().manual_seed(2)) * 100
    changed = 0
    for given in largest / 2688:
        weight = codec.decode({**leaves, "input_scale": given}, SCHEMES["NVFP4_W4A4"])
        assert torch.equal(weight.input_global_scale, 1 / given)
        again = codec.encode(weight)["input_scale"]
        assert torch.equal(1 / again, 1 / given)
        assert abs(int(again.view(torch.int32)) - int(given.view(torch.int32))) <= 1
        changed += not torch.equal(again, given)
    assert 0 < changed < 1000


def test_scales_of_keys_and_values_lie_beside_their_linears(tmp_path: Path) -> None:
    path = written(tmp_path / "out", "FP8_DYNAMIC", kv_format=FP8_STATIC)
    tensors = load_file(path / "model.safetensors")
    assert tensors["model.layers.1.self_attn.k_proj.k_scale"].tolist() == [0.25]
    assert tensors["model.layers.1.self_attn.v_proj.v_scale"].tolist() == [0.75]
    beside = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    assert beside["kv_cache_quant_algo"] == "FP8"
    opened = open_checkpoint(path)
    assert float(dense(opened.layer(1)["attn.v_scale"])) == 0.75
    (tmp_path / "ours").mkdir()
    write_format("compressed-tensors", tmp_path / "ours", opened, stated_scheme(opened))
    assert "model.layers.1.self_attn.v_scale" in load_file(tmp_path / "ours" / "model.safetensors")
    assert float(dense(open_checkpoint(tmp_path / "ours").layer(1)["attn.v_scale"])) == 0.75


@pytest.mark.parametrize("scheme", WRITTEN)
def test_the_runtime_computes_what_it_computes_of_compressed_tensors(scheme: str, tmp_path: Path) -> None:
    """In float32: modelopt stores scales in it, and weights of 16-bit scales are rounded to 16 bits."""
    tokens = torch.arange(24).view(2, 12)

    def logits(form: str) -> Tensor:
        (tmp_path / form).mkdir()
        model = source(scheme, dtype=torch.float32)
        write_format(form, tmp_path / form, model, ModelScheme(SCHEMES[scheme]))
        opened = open_checkpoint(tmp_path / form)
        config = EngineConfig(dtype=torch.float32, max_batch_size=2, max_model_len=32)
        with torch.inference_mode():
            return Engine(opened, device=torch.device("cpu"), config=config).runner.score(tokens)

    assert torch.equal(logits("modelopt"), logits("compressed-tensors"))


def test_a_config_that_has_only_the_file_beside_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "out", "NVFP4", kv_format=FP8_STATIC)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(path)
    assert set(opened.schemes.values()) == {SCHEMES["NVFP4"]}
    assert opened.kv_format == FP8_STATIC
    (path / "hf_quant_config.json").unlink()
    (path / "hf_quant_config.json").symlink_to("/etc/hostname")
    with pytest.raises(StorageError, match="hf_quant_config"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("stated", "scheme"),
    [
        ({"quant_algo": "FP8"}, SCHEMES["FP8_STATIC"]),
        ({"quant_algo": "fp8_per_channel_per_token", "ignore": ["lm_head"]}, SCHEMES["FP8_DYNAMIC"]),
        ({"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64}}, SCHEMES["W4A16_G64"]),
        ({"quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}, SCHEMES["NVFP4"]),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, SCHEMES["NVFP4_W4A4"]),
        (
            {
                "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"weights": E2M1_16, "input_activations": E2M1_16}},
            },
            SCHEMES["NVFP4_W4A4"],
        ),
        (
            {
                "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"weights": E2M1_16, "input_activations": None}},
            },
            SCHEMES["NVFP4"],
        ),
    ],
)
def test_configs_of_other_tools_give_the_scheme(stated: dict[str, Any], scheme: Scheme) -> None:
    codec = FORMATS.get("modelopt").codec
    found = codec.schemes({"quant_method": "modelopt", **stated}, LINEARS)
    assert found == dict.fromkeys(LINEARS[:2] if "ignore" in stated else LINEARS, scheme)


@pytest.mark.parametrize(
    ("pattern", "dense_linears"),
    [
        ("lm_head", LINEARS[2:]),
        ("lm_head*", LINEARS[2:]),
        ("model.layers.1.*", LINEARS[:1]),
        ("model.layers.1", LINEARS[:1]),
        ("model.layers.1*", LINEARS[:2]),
        ("*.mlp.*", LINEARS[:1]),
        ("layers", []),
    ],
)
def test_dense_modules_are_shell_patterns(pattern: str, dense_linears: list[str]) -> None:
    codec = FORMATS.get("modelopt").codec
    found = codec.schemes({"quantization": {"quant_algo": "FP8", "exclude_modules": [pattern]}}, LINEARS)
    assert set(LINEARS) - set(found) == set(dense_linears)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "quant_algo null"),
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo NVFP4_AWQ"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "groups of 32"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "each alone"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 32}, "groups of 32"),
        ({"quant_algo": "W4A16_NVFP4", "group_size": 32}, "groups of 32"),
        ({"quant_algo": "W4A16_AWQ", "has_zero_point": True}, "zero points"),
        ({"quant_algo": ["FP8"]}, "a text"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "a list of texts"),
        ({"quant_algo": "FP8", "config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
        ({"quantization": []}, "a JSON object"),
    ],
)
def test_what_is_not_read_is_refused_in_a_sentence(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        FORMATS.get("modelopt").codec.schemes({"quant_method": "modelopt", **stated}, LINEARS)


@pytest.mark.parametrize(
    "kv", [{"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, {"kv_cache_scheme": 8}]
)
def test_other_kv_caches_are_refused(kv: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormat, match="KV cache"):
        FORMATS.get("modelopt").codec.kv_format({"quant_algo": "FP8", **kv})


SPOILED: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("FP8_STATIC", "weight", lambda weight: weight.to(torch.float16)),
    ("FP8_STATIC", "input_scale", lambda scale: scale.repeat(3)),
    ("FP8_DYNAMIC", "weight_scale", lambda scale: scale[:-1]),
    ("W8A16", "weight_scale", lambda scale: scale.to(torch.int32)),
    ("W4A16_G128", "weight", lambda weight: weight[:-1]),
    ("W4A16_G128", "weight", lambda weight: weight.to(torch.int32)),
    ("W4A16_G128", "weight_scale", lambda scale: scale.repeat(1, 2)),
    ("NVFP4", "weight_scale", lambda scale: scale[:, :-1].contiguous()),
    ("NVFP4", "weight_scale", lambda scale: (-scale.float()).to(torch.float8_e4m3fn)),
    ("NVFP4", "weight_scale_2", lambda scale: scale * float("nan")),
    ("NVFP4", "weight_scale_2", lambda scale: scale * 0),
    ("NVFP4", "weight_scale_2", lambda scale: scale.repeat(2)),
    ("NVFP4_W4A4", "input_scale", lambda scale: scale.repeat(2)),
    ("NVFP4_W4A4", "input_scale", lambda scale: scale.to(torch.bfloat16)),
    ("NVFP4_W4A4", "input_scale", lambda scale: -scale),
    ("NVFP4_W4A4", "input_scale", lambda scale: scale * float("inf")),
    ("NVFP4_W4A4", "input_scale", lambda scale: scale * 0 + 1e-44),
]


@pytest.mark.parametrize(("scheme", "leaf", "spoil"), SPOILED)
def test_tensors_that_contradict_the_config_are_refused(
    scheme: str, leaf: str, spoil: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    path = written(tmp_path / "out", scheme)
    name = f"model.layers.1.mlp.up_proj.{leaf}"
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, name: spoil(tensors[name]).contiguous()}, path / "model.safetensors")
    with pytest.raises(UnsupportedFormat, match=r"model\.layers\.1\.mlp\.up_proj"):
        open_checkpoint(path).layer(1)


def test_inputs_that_are_scaled_before_they_are_quantized_are_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "out", "W4A16_G128")
    name = "model.layers.0.self_attn.o_proj.pre_quant_scale"
    save_file({**load_file(path / "model.safetensors"), name: torch.ones(128)}, path / "model.safetensors")
    with pytest.raises(UnsupportedArch, match="pre_quant_scale"):
        open_checkpoint(path)


def test_rows_with_scales_of_their_own_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    rows = RandomSource(ARCH, device=torch.device("cpu"), dtype=torch.bfloat16, scheme=SCHEMES["FP8_STATIC"])
    with pytest.raises(UnsupportedFormat, match=r"\[one-scale\].*scale: matrix"):
        write_format("modelopt", tmp_path, rows, ModelScheme(SCHEMES["FP8_STATIC"]))
    assert not list(tmp_path.iterdir())


def test_four_bit_floats_that_were_divided_are_not_written_as_products(tmp_path: Path) -> None:
    """compressed-tensors divides by its global scale; 1 / 3 is no number by which modelopt could multiply."""
    path = written(tmp_path / "theirs", "NVFP4", "compressed-tensors")
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_global_scale"):
            tensors[name] = torch.full_like(tensors[name], 3.0)
    save_file(tensors, path / "model.safetensors")
    opened = open_checkpoint(path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedFormat, match="exact-scales"):
        write_format("modelopt", tmp_path / "out", opened, stated_scheme(opened))
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("scheme", ["NVFP4", "NVFP4_W4A4"])
def test_four_bit_floats_of_ours_become_compressed_tensors_and_modelopt_again(
    scheme: str, tmp_path: Path
) -> None:
    """Their global scales are powers of two, of which dividing and multiplying make the same."""
    for first, second in (("modelopt", "compressed-tensors"), ("compressed-tensors", "modelopt")):
        path = written(tmp_path / first, scheme, first)
        for form in (second, first):
            opened = open_checkpoint(path)
            path = tmp_path / f"{first} as {form}"
            path.mkdir()
            write_format(form, path, opened, stated_scheme(opened))
        again = (path / "model.safetensors").read_bytes()
        assert again == (tmp_path / first / "model.safetensors").read_bytes()


def test_global_scales_of_inputs_that_are_no_reciprocal_are_not_written(tmp_path: Path) -> None:
    """2 - 2^-23 is the reciprocal of no float32 number: that of 1/2 is 2, that of the next one 2 - 2^-22."""
    path = written(tmp_path / "theirs", "NVFP4_W4A4", "compressed-tensors")
    tensors = load_file(path / "model.safetensors")
    odd = torch.tensor(2.0).nextafter(torch.tensor(0.0))
    for name in tensors:
        if name.endswith("input_global_scale"):
            tensors[name] = odd.repeat(1)
    save_file(tensors, path / "model.safetensors")
    opened = open_checkpoint(path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedFormat, match=r"exact-scales.*inputs"):
        write_format("modelopt", tmp_path / "out", opened, stated_scheme(opened))


def test_four_bit_floats_that_were_multiplied_are_not_written_as_quotients(tmp_path: Path) -> None:
    """No float32 number divides every e4m3 number to what 1 / 2688 times 0.1 makes of it."""
    path = written(tmp_path / "theirs", "NVFP4")
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_scale_2"):
            tensors[name] = torch.full_like(tensors[name], 0.1 / 2688)
    save_file(tensors, path / "model.safetensors")
    opened = open_checkpoint(path)
    with pytest.raises(UnsupportedFormat, match="as modelopt stores them"):
        write_format("compressed-tensors", tmp_path, opened, stated_scheme(opened))


@pytest.mark.parametrize(
    ("scheme", "rule"),
    [
        (ModelScheme(SCHEMES["FP8_BLOCK"]), "blocks"),
        (ModelScheme(SCHEMES["INT8_DYNAMIC"]), "quant-algo"),
        (ModelScheme(SCHEMES["W4A16_G128_ASYM"]), "quant-algo"),
        (ModelScheme(SCHEMES["W4A16_G32"]), "group-size"),
        (ModelScheme(SCHEMES["W3A16_G128"]), "bits"),
        (ModelScheme(SCHEMES["FP8_DYNAMIC"], SCHEMES["W8A16"]), "one-scheme"),
        (ModelScheme(SCHEMES["FP8_DYNAMIC"], None, (("layers.0.attn.q", None),)), "whole-linear-groups"),
    ],
)
def test_what_no_program_loads_is_a_rule(scheme: ModelScheme, rule: str) -> None:
    with pytest.raises(UnsupportedFormat, match=rf"\[{rule}\]"):
        check_rules("modelopt", ARCH, scheme)
    with pytest.raises(UnsupportedFormat, match="dense-weights"):
        check_rules("modelopt", ARCH, None, FP8_STATIC)

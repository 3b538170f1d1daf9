"""Layers that attend to images between those of a text model (Llama 3.2 Vision): they keep their places on
disk, are read by nobody and are written back as they came."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from compress.errors import UnsupportedArch, UnsupportedFormat, UsageError
from compress.export import FORMATS, open_checkpoint
from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of, family_of_arch
from compress.models.pruning import why_channels_stay, why_heads_stay, why_layers_stay
from compress.models.weights import UNTOUCHED
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.golden.test_mixtures import Rounded
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved

GOLDEN = Path(__file__).parents[2] / "golden/configs/wrappers.json"
PUBLISHED = {row["name"]: row["config"] for row in json.loads(GOLDEN.read_text())}
SMALL_TEXT = "meta-llama/Llama-3.2-11B-Vision"
LARGE_TEXT = "meta-llama/Llama-3.2-90B-Vision-Instruct"


def config_of(**text: Any) -> dict[str, Any]:
    config: dict[str, Any] = build_config(*CASES["mllama"]).to_dict()
    config["text_config"] |= text
    return config


@pytest.mark.parametrize(
    ("name", "num_params", "num_layers"),
    [(SMALL_TEXT, 8_030_261_248, 32), (LARGE_TEXT, 70_553_706_496, 80)],
)
def test_the_layers_of_text_are_those_of_llama(name: str, num_params: int, num_layers: int) -> None:
    """Llama 3.1 8B and 70B have these parameters (arXiv 2407.21783)."""
    arch = family_of(PUBLISHED[name]).read_config(PUBLISHED[name])
    assert (arch.num_params, arch.num_layers) == (num_params, num_layers)


def test_each_layer_has_its_place_on_disk() -> None:
    arch = family_of(PUBLISHED[SMALL_TEXT]).read_config(PUBLISHED[SMALL_TEXT])
    family = family_of_arch(arch)
    of_images = [3, 8, 13, 18, 23, 28, 33, 38]
    stored = [family.to_disk(f"layers.{idx}.attn.q") for idx in range(arch.num_layers)]
    places = [int(name.split(".")[3]) for name in stored]
    assert places == [idx for idx in range(40) if idx not in of_images]
    assert all(family.is_untouched(f"language_model.model.layers.{idx}.mlp.x.weight") for idx in of_images)
    assert not any(family.is_untouched(f"{name}.weight") for name in stored)


@pytest.mark.parametrize("form", ["awq", "fp8", "modelopt", "compressed-tensors", "gptq"])
def test_a_format_that_names_the_layers_of_images_names_no_other(form: str) -> None:
    """Layer 3 is of images, and 30 of text: a name, a pattern and a part of a name must tell them apart."""
    scheme = {"fp8": "FP8_BLOCK", "modelopt": "FP8_STATIC", "awq": "W4A16_G128_ASYM"}.get(form, "W4A16_G128")
    arch = family_of(PUBLISHED[SMALL_TEXT]).read_config(PUBLISHED[SMALL_TEXT])
    family = family_of_arch(arch)
    linears = [family.to_disk(f"layers.{idx}.{name}") for idx in range(32) for name in arch.layers[0].linears]
    stated = FORMATS.get(form).quantization_config(
        ModelScheme(SCHEMES[scheme]), head="lm_head", linears=linears, untouched=family.untouched_modules
    )
    patterns = stated.get("modules_to_not_convert") or stated.get("ignore") or list(stated["dynamic"])
    is_dense = {
        "awq": lambda name: any(each in name for each in patterns),  # as in vLLM
        "fp8": lambda name: not should_convert_module(name, patterns),
        "modelopt": lambda name: any(re.match(each.replace("*", ".*"), name) for each in patterns),
        "compressed-tensors": lambda name: any(
            re.match(each.removeprefix("re:"), name) for each in patterns if each.startswith("re:")
        ),
        "gptq": lambda name: any(re.match(each.removeprefix("-:"), name) for each in patterns),
    }[form]
    assert not any(is_dense(name) for name in linears)
    assert all(
        is_dense(f"language_model.model.layers.{idx}.{name}")
        for idx in (3, 38)
        for name in ("cross_attn.q_proj", "mlp.down_proj")
    )


@pytest.mark.parametrize("listed", [[1, 1], [4], [-1], [0, 1, 2, 3]])
def test_layers_of_images_that_are_none_or_all_of_the_model_are_refused(listed: list[int]) -> None:
    config = config_of(cross_attention_layers=listed)
    with pytest.raises(UnsupportedArch, match="cross_attention_layers"):
        family_of(config).read_config(config)


def test_a_tied_head_is_refused() -> None:
    """The embedding has more rows than the head."""
    config = {**config_of(), "tie_word_embeddings": True}
    with pytest.raises(UnsupportedArch, match="tie_word_embeddings"):
        family_of(config).read_config(config)


def test_nothing_is_removed_between_layers_of_images() -> None:
    config = config_of()
    arch = family_of(config).read_config(config)
    assert "lie between" in str(why_layers_stay(arch))
    assert "as wide" in str(why_channels_stay(arch))
    assert "as wide" in str(why_heads_stay(arch))
    without = config_of(cross_attention_layers=[])
    assert why_layers_stay(family_of(without).read_config(without)) is None


def test_rows_after_those_of_tokens_go_with_the_embedding(tmp_path: Path) -> None:
    saved(tmp_path / "model", *CASES["mllama"])
    source = Checkpoint(tmp_path / "model")
    embed = source.family.tensor("embed.weight")
    outer = source.outer()
    stored = source.files.get(embed)
    assert torch.equal(torch.cat((outer["embed.weight"], outer[UNTOUCHED + embed])), stored)
    assert len(outer[UNTOUCHED + embed]) == 8

    class Trained:
        arch = source.arch
        kv_format = None
        rows = True

        def outer(self) -> dict[str, Any]:
            others = {name: each for name, each in outer.items() if self.rows or name != UNTOUCHED + embed}
            return {**others, "embed.weight": outer["embed.weight"] + 1}

        def layer(self, layer_idx: int) -> Any:
            return source.layer(layer_idx)

    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Trained())
    written = load_file(tmp_path / "written/model.safetensors")[embed]
    assert torch.equal(written[:-8], stored[:-8] + 1)
    assert torch.equal(written[-8:], stored[-8:])
    without = Trained()
    without.rows = False
    (tmp_path / "refused").mkdir()
    with pytest.raises(UnsupportedFormat, match="lacks parts of the tensors language_model"):
        write_checkpoint(tmp_path / "refused", without)


def test_layers_of_images_in_codes_are_written_in_no_format_that_lists_them_as_dense(tmp_path: Path) -> None:
    """Recipes of llm-compressor put the linears of cross-attention in codes, too."""
    for name in ("codes", "again", "refused"):
        (tmp_path / name).mkdir()
    saved(tmp_path / "model", *CASES["mllama"])
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])
    write_format(
        "compressed-tensors", tmp_path / "codes", Rounded(Checkpoint(tmp_path / "model"), scheme), scheme
    )
    write_format("compressed-tensors", tmp_path / "again", open_checkpoint(tmp_path / "codes"), scheme)
    file = tmp_path / "codes/model.safetensors"
    tensors = load_file(file)
    name = "language_model.model.layers.1.cross_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)
    save_file(tensors, file)
    coded = open_checkpoint(tmp_path / "codes")
    with pytest.raises(UnsupportedFormat, match=r"layers\.1\.cross_attn\.q_proj"):
        write_format("compressed-tensors", tmp_path / "refused", coded, scheme)
    assert not list((tmp_path / "refused").iterdir())


def test_a_checkpoint_without_a_layer_of_images_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["mllama"])
    file = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if ".layers.1." not in name}
    save_file(tensors, file)
    with pytest.raises((UnsupportedArch, UsageError), match="lacks every tensor of layer 1"):
        Checkpoint(tmp_path)

"""Experts that stay dense are stated by the names that vLLM asks for: it makes one module of all experts of a
layer, whatever the checkpoint calls their tensors, and looks that one up, or linears of its first expert.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.models.config_file import read_config
from compress.models.family import family_of
from compress.models.overrides import decide
from compress.models.random_source import RandomSource
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES, QuantizedWeight
from scripts.interop_families import FAMILIES, SMALL

MODULES = {
    "qwen3_moe": "model.layers.{}.mlp.experts",
    "mixtral": "model.layers.{}.block_sparse_moe.experts",
    "granitemoe": "model.layers.{}.block_sparse_moe.experts",
    "gpt_oss": "model.layers.{}.mlp.experts",
}
PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}
FORMS = {
    "compressed-tensors": "FP8_DYNAMIC",
    "gptq": "W4A16_G128",
    "awq": "W4A16_G128_ASYM",
    "fp8": "FP8_BLOCK",
}


class DenseExperts(RandomSource):
    def layer(self, layer_idx: int) -> dict[str, Any]:
        weights = super().layer(layer_idx)
        return {
            name: dense(value).to(torch.bfloat16) if ".experts." in name else value
            for name, value in weights.items()
        }


def export(directory: Path, family: str, form: str) -> dict[str, Any]:
    scheme = SCHEMES[FORMS[form]]
    config = {**SMALL, "model_type": family, **FAMILIES[family], "attention_bias": False}
    arch = family_of(config).read_config(config)
    exceptions = tuple(decide({"*.moe.experts.*": None}, arch).items())
    source = DenseExperts(arch, device=torch.device("cpu"), dtype=torch.bfloat16, scheme=scheme)
    write_format(form, directory, source, ModelScheme(scheme, exceptions=exceptions))
    return read_config(directory)["quantization_config"]


def is_dense_in_vllm(form: str, said: dict[str, Any], module: str, projections: tuple[str, ...]) -> bool:
    if form == "gptq":
        return any(re.match(pattern.removeprefix("-:"), module) for pattern in said["dynamic"])
    if form == "awq":
        return any(part in module for part in said["modules_to_not_convert"])
    if form == "fp8":
        return any(module in name for name in said["modules_to_not_convert"] if "experts" in name)
    return all(
        any(
            re.match(name.removeprefix("re:"), linear) if name.startswith("re:") else name == linear
            for name in said["ignore"]
        )
        for linear in (f"{module}.0.{projection}" for projection in projections)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", MODULES)
def test_dense_experts_are_dense_where_vllm_looks_them_up(family: str, form: str, tmp_path: Path) -> None:
    said = export(tmp_path, family, form)
    projections = PROJECTIONS.get(family, ("gate_proj", "up_proj", "down_proj"))
    for idx in range(SMALL["num_hidden_layers"]):
        assert is_dense_in_vllm(form, said, MODULES[family].format(idx), projections)
    again = open_checkpoint(tmp_path).layer(1)
    assert {"attn.q", "attn.k", "attn.v", "attn.o"} == {
        name.removesuffix(".weight") for name, value in again.items() if isinstance(value, QuantizedWeight)
    }


@pytest.mark.parametrize("form", FORMS)
def test_experts_with_codes_are_not_stated_dense(form: str, tmp_path: Path) -> None:
    scheme = SCHEMES[FORMS[form]]
    config = {**SMALL, "model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]}
    arch = family_of(config).read_config(config)
    source = RandomSource(arch, device=torch.device("cpu"), dtype=torch.bfloat16, scheme=scheme)
    write_format(form, tmp_path, source, ModelScheme(scheme))
    assert ".experts" not in str(read_config(tmp_path)["quantization_config"])

"""A checkpoint that was quantized by tensor name, as `transformers` sees it: its linears are those of the
class, no key is stray, and it computes what the class computes of the dequantized weights."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, Scheme
from compress.registry.model_source import resolve_model
from compress.stages import Input, Inputs, Port
from compress.stages.quantize_by_name import quantize_by_name
from compress.stages.quantize_by_name.selection import select
from compress.stages.quantize_by_name.spec import QuantizeByName
from tests.support.tiny_unknown import IN_MEMORY, KEPT_DENSE, MODELS, save_unknown

CASES = [
    *((name, "FP8_DYNAMIC", "compressed-tensors") for name in MODELS),
    *((name, "W4A16_G128", "compressed-tensors") for name in ("bloom", "opt", "mamba", "bert-classifier")),
    ("phi", "INT8_DYNAMIC", "compressed-tensors"),
    ("t5", "W8A16", "compressed-tensors"),
    ("starcoder2", "W4A16_G64_ASYM", "compressed-tensors"),
    ("gpt_neox", "FP8_BLOCK", "compressed-tensors"),
    ("gpt_neox", "FP8_BLOCK", "fp8"),
    ("bloom", "FP8_BLOCK", "fp8"),
    ("t5", "FP8_BLOCK", "fp8"),
    ("deepseek_v3", "W4A16_G128", "compressed-tensors"),
    ("qwen3_5_moe", "W4A16_G128", "compressed-tensors"),
    ("qwen3_5_moe-stacked", "W4A16_G128", "compressed-tensors"),
    ("qwen3_5_moe-stacked", "FP8_BLOCK", "fp8"),
    ("nemotron_h", "W8A16", "compressed-tensors"),
    ("deepseek_v3", "FP8_BLOCK", "fp8"),
    ("qwen3_next", "FP8_BLOCK", "fp8"),
    ("nemotron_h", "FP8_BLOCK", "fp8"),
    ("qwen3_5", "FP8_BLOCK", "fp8"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    found = {}
    for name in MODELS:
        path = tmp_path_factory.mktemp(name)
        found[name] = (path, save_unknown(path, name))
    return found


def quantized(path: Path, spec: QuantizeByName, directory: Path) -> Path:
    """Return a directory with the result of the stage."""
    out = directory / "out"
    scratch = directory / "scratch"
    out.mkdir()
    scratch.mkdir()
    source = resolve_model("path", str(path), None)
    inputs = Inputs(source, {Port.SOURCE: Input(path, source.digest)})
    quantize_by_name(spec, inputs, ArtifactWriter(out), Context("cpu", 0, scratch))
    return out


def inputs_of(name: str) -> dict[str, Tensor]:
    ids = torch.randint(0, 384, (2, 12), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else {"input_ids": ids}


def without_rounded_inputs(model: Any, **inputs: Tensor) -> Tensor:
    """Return the logits with the model's codes and unrounded inputs of its linears."""
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False
    return model(**inputs).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_linears_of_the_class_are_chosen(name: str, sources: dict[str, tuple[Path, Any]]) -> None:
    """All of them but those that stay dense, and the experts, which the class has in stacks."""
    path, model = sources[name]
    linears = {each for each, module in model.named_modules() if isinstance(module, nn.Linear)}
    dense = tuple(f".{each}" for each in KEPT_DENSE.get(name, {"lm_head"}))
    on_disk, in_memory = IN_MEMORY.get(name, ("", ""))
    chosen = {each.module.replace(on_disk, in_memory, 1) for each in select(QuantizeByName(), path).quantized}
    experts = {each for each in chosen if ".experts." in each}
    assert chosen - experts == {each for each in linears if not f".{each}".endswith(dense)}
    stacks = {each for each, _ in model.named_parameters() if ".experts." in each}
    assert bool(experts) == bool(stacks)


@pytest.mark.parametrize(("name", "scheme_name", "form"), CASES)
@pytest.mark.one_in(4)
def test_it_loads_and_computes_what_the_dequantized_weights_give(
    name: str, scheme_name: str, form: str, sources: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    path, source = sources[name]
    scheme = SCHEMES[scheme_name]
    spec = QuantizeByName(scheme=scheme_name, format=form)
    out = quantized(path, spec, tmp_path)
    loaded, info = type(source).from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for parameter_name, parameter in loaded.named_parameters():
        if ".experts." in parameter_name:  # which stay in 16 bits, whatever is asked for
            parameter.data = parameter.data.float()
    tensors = load_file(path / "model.safetensors")
    for each in select(spec, path).quantized:
        if each.stacked is None:
            tensors[each.tensor] = numbers_of(tensors[each.tensor], scheme)
        else:
            matrix = each.stacked.place.matrix_of(tensors[each.tensor])
            tensors[each.tensor] = tensors[each.tensor].float()
            each.stacked.place.write_(tensors[each.tensor], numbers_of(matrix, scheme))
    rounded = tmp_path / "dequantized"
    rounded.mkdir()
    shutil.copy(path / "config.json", rounded)
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    wanted = type(source).from_pretrained(rounded, dtype=torch.float32)
    with torch.inference_mode():
        served = (loaded.float() if form == "fp8" else loaded).eval()(**inputs_of(name)).logits
        found = without_rounded_inputs(loaded, **inputs_of(name))
        expected = wanted.eval()(**inputs_of(name)).logits
    assert_close(found, expected, 64 * torch.finfo(torch.float32).eps)
    assert_close(served, expected, 0.5)  # with inputs of eight bits, where the scheme has them
    rounds_inputs = scheme.activation is not None and form != "fp8"  # which a CPU decompresses wholly
    assert torch.equal(served, found) != rounds_inputs


@pytest.mark.parametrize("ignored", ["backbone.layers.1.*", "*.experts.0.*"])
def test_some_dense_layers_and_experts_are_found_under_another_prefix(
    ignored: str, sources: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    path, source = sources["nemotron_h"]
    spec = QuantizeByName(scheme="FP8_DYNAMIC", ignore=(ignored,))
    out = quantized(path, spec, tmp_path)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    memory = {each.module.replace("backbone.", "model.", 1): each for each in select(spec, path).choices}
    of_layers = {name: each for name, each in memory.items() if ".layers." in name and len(each.shape) == 2}
    for name, each in of_layers.items():
        for listed, quantizes in ((group["targets"], True), (config["ignore"], False)):
            found = any(re.match(one.removeprefix("re:"), name) for one in listed)
            assert found == ((each.reason is None) == quantizes), name
    if "experts" not in ignored:  # which transformers has in one tensor, of one scheme
        _, info = type(source).from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def numbers_of(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return the float32 numbers that the codes of a weight mean."""
    codes = nearest_weight(weight.to(torch.bfloat16), scheme, torch.bfloat16)
    if scheme.activation is not None:  # then the product of code and scale is not rounded to 16 bits
        codes = replace(codes, scale_OG=codes.scale_OG.to(torch.float32))
    return codes.dequantize().to(torch.float32)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare by the norm of all logits."""
    assert float((found - expected).norm() / expected.norm()) < tolerance

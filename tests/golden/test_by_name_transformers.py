"""A checkpoint that was quantized by tensor name, as `transformers` sees it: its linears are those of the
class, no key is stray, and it computes what the class computes of the dequantized weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.artifact.workspace import ArtifactWriter
from compress.context import Context
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES
from compress.registry.model_source import resolve_model
from compress.stages import Input, Inputs, Port
from compress.stages.quantize_by_name import quantize_by_name
from compress.stages.quantize_by_name.selection import select
from compress.stages.quantize_by_name.spec import QuantizeByName
from tests.support.tiny_unknown import KEPT_DENSE, MODELS, save_unknown

CASES = [
    *((name, "FP8_DYNAMIC", "compressed-tensors") for name in MODELS),
    *((name, "W4A16_G128", "compressed-tensors") for name in ("falcon", "opt", "mamba", "bert-classifier")),
    ("phi", "INT8_DYNAMIC", "compressed-tensors"),
    ("t5", "W8A16", "compressed-tensors"),
    ("starcoder2", "W4A16_G64_ASYM", "compressed-tensors"),
    ("gpt_neox", "FP8_BLOCK", "compressed-tensors"),
    ("gpt_neox", "FP8_BLOCK", "fp8"),
    ("falcon", "FP8_BLOCK", "fp8"),
    ("t5", "FP8_BLOCK", "fp8"),
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
    path, model = sources[name]
    linears = {each for each, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {each.module for each in select(QuantizeByName(), path).quantized}
    assert chosen == linears - KEPT_DENSE[name]


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
    wanted = type(source).from_pretrained(path, dtype=torch.float32).eval()
    modules = dict(wanted.named_modules())
    for each in select(spec, path).quantized:
        linear = modules[each.module]
        weight = nearest_weight(linear.weight.detach().to(torch.bfloat16), scheme, torch.bfloat16)
        if scheme.activation is not None:  # then the product of code and scale is not rounded to 16 bits
            weight = replace(weight, scale_OG=weight.scale_OG.to(torch.float32))
        with torch.no_grad():
            linear.weight.copy_(weight.dequantize().to(torch.float32))
    with torch.inference_mode():
        served = (loaded.float() if form == "fp8" else loaded).eval()(**inputs_of(name)).logits
        found = without_rounded_inputs(loaded, **inputs_of(name))
        expected = wanted.eval()(**inputs_of(name)).logits
    assert_close(found, expected, 64 * torch.finfo(torch.float32).eps)
    assert_close(served, expected, 0.5)  # with inputs of eight bits, where the scheme has them
    rounds_inputs = scheme.activation is not None and form != "fp8"  # which a CPU decompresses wholly
    assert torch.equal(served, found) != rounds_inputs


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare by the norm of all logits."""
    assert float((found - expected).norm() / expected.norm()) < tolerance

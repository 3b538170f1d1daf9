"""The published codes of DeepSeek-V4: linears in FP8 blocks and experts in four-bit floats, with scales that
are named `scale`, read as the weights that `transformers` decodes them to."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from compress.errors import UnsupportedArch, UnsupportedFormat
from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CPU = torch.device("cpu")
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
WIDTHS = {
    **CASES["deepseek_v4"][1],
    "hidden_size": 256,
    "q_lora_rank": 128,
    "num_attention_heads": 8,
    "head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
}
LINEAR = re.compile(r"layers\.\d+\..*\.(?:wq_[ab]|wkv|wo_[ab]|w[123])\.weight")
EXPERT = re.compile(r".*\.experts\.\d+\..*")


def codes_of(shape: tuple[int, int], generator: torch.Generator, four_bits: bool) -> tuple[Tensor, Tensor]:
    """Return random codes of a weight of this shape and their scales, powers of two."""
    rows, columns = shape
    if four_bits:
        codes = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
        grid = rows, columns // 32
    else:
        codes = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
        grid = -(-rows // 128), -(-columns // 128)
    exponents = torch.randint(-9, -5, grid, generator=generator)
    return codes, torch.exp2((exponents - (0 if four_bits else 6)).float())


def stored(
    tmp_path: Path,
    *,
    expert_dtype: str | None = "fp4",
    scale_dtype: torch.dtype = torch.float8_e8m0fnu,
    quantization: dict[str, Any] = BLOCKS,
    dense: str = "wo_a",
) -> tuple[Path, Path]:
    """Write a checkpoint in the published codes but for linears named `dense`, and the dense one that they
    mean, as `transformers` decodes them; return the places of both."""
    saved(tmp_path / "meant", "deepseek_v4", WIDTHS, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "meant" / "model.safetensors")
    meant = dict(tensors)
    generator = torch.Generator().manual_seed(4)
    decode = Fp8Dequantize(None)._dequantize_one
    for name in [each for each in tensors if LINEAR.fullmatch(each) and f".{dense}." not in each]:
        four_bits = expert_dtype == "fp4" and EXPERT.fullmatch(name) is not None
        codes, scale = codes_of(tuple(tensors[name].shape), generator, four_bits)
        scale = scale.to(scale_dtype)
        tensors |= {name: codes, f"{name.removesuffix('.weight')}.scale": scale}
        meant[name] = decode(codes, scale, torch.bfloat16)
    save_file(meant, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "codes").mkdir()
    save_file(tensors, tmp_path / "codes" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "meant" / "config.json").read_text())
    named = {} if expert_dtype is None else {"expert_dtype": expert_dtype}
    changed = {**config, "quantization_config": quantization, **named}
    (tmp_path / "codes" / "config.json").write_text(json.dumps(changed))
    return tmp_path / "codes", tmp_path / "meant"


@pytest.mark.parametrize(
    ("expert_dtype", "scale_dtype"),
    [("fp4", torch.float8_e8m0fnu), ("fp8", torch.float32), (None, torch.float8_e8m0fnu)],
    ids=str,
)
def test_published_codes_are_the_weights_that_transformers_decodes(
    expert_dtype: str | None, scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    paths = stored(tmp_path, expert_dtype=expert_dtype, scale_dtype=scale_dtype)
    ours, dense = map(open_checkpoint, paths)
    assert not ours.schemes
    assert ours.arch.dtype == "bfloat16"
    assert not {"quantization_config", "expert_dtype"} & ours.arch.config.keys()
    assert ours.arch.layers == dense.arch.layers
    for idx in range(ours.arch.num_layers):
        own, expected = ours.layer(idx), dense.layer(idx)
        assert own.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(own[each]), torch.as_tensor(expected[each])) for each in own)
    decoders = [build_decoder(each, dtype=torch.float32, device=CPU) for each in (ours, dense)]
    with torch.no_grad():
        first, second = (decoder(tokens(1, 40)) for decoder in decoders)
    assert torch.equal(first, second)


def test_codes_with_scales_that_are_any_floats_stay_codes(tmp_path: Path) -> None:
    plain = {name: value for name, value in BLOCKS.items() if name != "scale_fmt"}
    paths = stored(
        tmp_path, expert_dtype="fp8", scale_dtype=torch.float32, quantization=plain, dense="no such linear"
    )
    ours, dense = map(open_checkpoint, paths)
    for idx in range(ours.arch.num_layers):
        own, expected = ours.layer(idx), dense.layer(idx)
        for name in ("attn.q_up", "attn.o_down.1", "attn.o", "moe.experts.2.down", "moe.shared.gate"):
            weight = own[f"{name}.weight"]
            assert isinstance(weight, QuantizedWeight)
            assert weight.scheme.name == "FP8_BLOCK"
            meant = torch.as_tensor(expected[f"{name}.weight"])
            assert torch.equal(weight.dequantize().to(torch.bfloat16), meant)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"expert_dtype": "fp6"}, "expert_dtype 'fp6'; fp8, as its other linears, and fp4 are read"),
        (
            {"quantization": {name: each for name, each in BLOCKS.items() if name != "scale_fmt"}},
            "experts in four-bit floats",
        ),
        ({"scale_dtype": torch.int8}, "which are no floats"),
    ],
    ids=str,
)
def test_other_codes_are_refused_in_a_sentence(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path, _ = stored(tmp_path, **changes)
    with pytest.raises(UnsupportedFormat, match=named):
        open_checkpoint(path).layer(0)


@pytest.mark.parametrize("leaf", ["weight", "scale"])
def test_bytes_of_experts_have_the_shapes_of_their_config(leaf: str, tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = f"layers.1.ffn.experts.2.w2.{leaf}"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        (UnsupportedFormat, UnsupportedArch), match=r"layers\.1\.ffn\.experts\.2\.w2 is not read"
    ):
        open_checkpoint(path).layer(1)


def test_a_model_without_codes_is_written_without_the_dtype_of_codes(tmp_path: Path) -> None:
    saved(tmp_path, "deepseek_v4", WIDTHS, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "expert_dtype": "fp4"}))
    source = Checkpoint(tmp_path)
    assert "expert_dtype" not in source.arch.config
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])
    source_of_codes = RandomSource(source.arch, device=CPU, dtype=torch.bfloat16, scheme=scheme.layers)
    written = tmp_path / "written"
    written.mkdir()
    write_format("compressed-tensors", written, source_of_codes, scheme)
    stated = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps({**stated, "expert_dtype": "fp4"}))
    again = open_checkpoint(written)
    assert "expert_dtype" not in again.arch.config
    assert again.layer(0)["attn.q_up.weight"].scheme == SCHEMES["FP8_DYNAMIC"]

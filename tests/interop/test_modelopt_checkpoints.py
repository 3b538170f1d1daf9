"""Checkpoints that nvidia-modelopt calibrated and wrote, by the extra `modelopt` or in the environment of
other tools: they are read as what the format's description says, and written again without a changed byte,
input scales of NVFP4 aside, which keep their reciprocal; and the scales of static FP8, of its KV cache and of
the inputs of NVFP4 are ours.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.export import open_checkpoint
from compress.export.conversion import stated_scheme
from compress.export.format_writer import write_format
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.canonical import layer_name, load_weights
from compress.models.checkpoint import Checkpoint
from compress.models.weights import dense
from compress.pipeline import resolve_source
from compress.quant.kv import FP8_STATIC, KV_SCALES
from compress.quant.scheme import SCHEMES, QuantizedWeight

ROOT = Path(__file__).parents[2]
PEERS = ".venv-peers"
SCHEME_OF = {
    "FP8": "FP8_STATIC",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_DYNAMIC",
    "W8A16": "W8A16",
    "W4A16_AWQ": "W4A16_G128",
    "W4A16_NVFP4": "NVFP4",
    "NVFP4": "NVFP4_W4A4",
}
"""quant_algo -> the scheme that it is read as."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

pytestmark = pytest.mark.interop(PEERS, "modelopt")
EACH = pytest.mark.parametrize("algorithm", SCHEME_OF)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_source("builtin://reference").path


@pytest.fixture(scope="module")
def calibration() -> Tensor:
    return torch.randint(8192, (4, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def theirs(model: Path, calibration: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of modelopt's checkpoints, one of each algorithm."""
    directory = tmp_path_factory.mktemp("modelopt")
    save_file({"tokens": calibration}, directory / "tokens.safetensors")
    command = [
        sys.executable if importlib.util.find_spec("modelopt") else ROOT / PEERS / "bin" / "python",
        ROOT / "scripts" / "modelopt_checkpoints.py",
        model,
        directory / "tokens.safetensors",
        directory,
        *SCHEME_OF,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return directory


def stored(path: Path) -> dict[str, Tensor]:
    return {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}


def quantized(source: Checkpoint) -> dict[str, QuantizedWeight]:
    """Disk name of a linear -> its weight as it is read."""
    return {
        source.family.to_disk(f"layers.{idx}.{name.removesuffix('.weight')}"): value
        for idx in range(source.arch.num_layers)
        for name, value in source.layer(idx).items()
        if isinstance(value, QuantizedWeight)
    }


def values(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The weights of a module as the format is described: codes times scales."""
    codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].float()
    second = tensors.get(f"{module}.weight_scale_2")
    if second is not None:  # two columns a byte, a sign and seven magnitudes
        halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
        signs = 1 - 2 * (halves >> 3)
        return signs * E2M1[halves & 7] * (scale * second).repeat_interleave(16, dim=1)
    if codes.dtype == torch.uint8:  # two rows a byte, signed
        halves = torch.stack([codes & 15, codes >> 4], dim=1).flatten(0, 1).to(torch.int8)
        signed = torch.where(halves > 7, halves - 16, halves)
        return signed.float() * scale.repeat_interleave(128, dim=1)
    return codes.float() * (scale if scale.dim() == 0 else scale[:, None])


@EACH
def test_what_modelopt_writes_is_read_as_the_weights_that_it_means(algorithm: str, theirs: Path) -> None:
    source = open_checkpoint(theirs / algorithm)
    tensors = stored(theirs / algorithm)
    weights = quantized(source)
    linears = [name for name in tensors if name.endswith("_proj.weight")]
    assert {f"{name}.weight" for name in weights} == set(linears)
    assert {each.scheme for each in weights.values()} == {SCHEMES[SCHEME_OF[algorithm]]}
    assert source.kv_format == (FP8_STATIC if algorithm == "FP8" else None)
    for name, weight in weights.items():
        assert torch.equal(weight.dequantize(torch.float32), values(tensors, name)), name
        if algorithm == "NVFP4":  # programs divide by it and multiply, each in float32
            assert torch.equal(weight.input_global_scale, 1 / tensors[f"{name}.input_scale"]), name


@EACH
def test_what_modelopt_wrote_is_written_again_without_a_changed_byte(
    algorithm: str, theirs: Path, tmp_path: Path
) -> None:
    source = open_checkpoint(theirs / algorithm)
    write_format("modelopt", tmp_path, source, stated_scheme(source))
    before, after = stored(theirs / algorithm), stored(tmp_path)
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        if algorithm == "NVFP4" and name.endswith(".input_scale"):
            assert torch.equal(1 / after[name], 1 / tensor), name
            assert torch.allclose(after[name], tensor, rtol=2**-23, atol=0), name
            continue
        flat = [each.reshape(-1).contiguous().view(torch.uint8) for each in (after[name], tensor)]
        assert torch.equal(*flat), name  # a scale of keys is [1] here and [] there, the same byte for byte
    for file, part in (("hf_quant_config.json", "quantization"), ("config.json", "quantization_config")):
        ours, others = (
            json.loads((path / file).read_text())[part] for path in (tmp_path, theirs / algorithm)
        )
        for key in ("quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "group_size", "quant_method"):
            assert ours.get(key) == others.get(key), key
        if "NVFP4" in algorithm:
            assert ours.get("config_groups") == others.get("config_groups")


def test_static_scales_of_weights_inputs_keys_and_values_are_modelopts(
    model: Path, calibration: Tensor, theirs: Path, tmp_path: Path
) -> None:
    """Ours are rounded to the model's dtype, and a linear group has the largest of its weight scales. Inputs,
    keys and values are here those behind linears that are compressed already, and modelopt looks at a dense
    model: the largest moves by no more than one rounding to e4m3 does.
    """
    scheme = SCHEMES["FP8_STATIC"]
    source = Checkpoint(model)
    passes = [RoundPass(Rtn(scale="matrix"), scheme, torch.bfloat16)]
    asked = Compression(passes, scheme=scheme, kv_scales=True)
    ctx = Context("cpu", 0, tmp_path)
    run_sequential(source, calibration, asked, tmp_path, ctx, compute_dtype=torch.float32)
    read = open_checkpoint(theirs / "FP8")
    for idx, shape in enumerate(source.arch.layers):
        ours, others = load_weights(tmp_path / layer_name(idx), scheme), read.layer(idx)
        for group in shape.groups:
            weights = [(ours[f"{each}.weight"], others[f"{each}.weight"]) for each in group.linears]
            for weight, _ in weights:
                largest = torch.stack([other.scale_OG.amax() for _, other in weights]).amax()
                assert torch.equal(weight.scale_OG.unique(), largest.to(torch.bfloat16)[None]), group
            for weight, other in weights:
                assert torch.allclose(weight.input_scale, other.input_scale, rtol=2**-4, atol=0), group
        for name in KV_SCALES.values():
            assert torch.allclose(dense(ours[name]), dense(others[name]), rtol=2**-4, atol=0), (idx, name)


def test_global_scales_of_four_bit_inputs_are_the_powers_of_two_for_modelopts_largest_inputs(
    model: Path, calibration: Tensor, theirs: Path, tmp_path: Path
) -> None:
    """modelopt's largest block scale of the calibration set is 448, ours from 128 to 256. Inputs behind
    compressed linears may be larger or smaller here, by no more than a step of e2m1, a third.
    """
    scheme = SCHEMES["NVFP4_W4A4"]
    source = Checkpoint(model)
    passes = [RoundPass(Rtn(scale="min_max"), scheme, torch.bfloat16)]
    ctx = Context("cpu", 0, tmp_path)
    run_sequential(
        source, calibration, Compression(passes, scheme=scheme), tmp_path, ctx, compute_dtype=torch.float32
    )
    read = open_checkpoint(theirs / "NVFP4")
    for idx, shape in enumerate(source.arch.layers):
        ours, others = load_weights(tmp_path / layer_name(idx), scheme), read.layer(idx)
        for group in shape.groups:
            pairs = [(ours[f"{each}.weight"], others[f"{each}.weight"]) for each in group.linears]
            for scales in zip(*((a.input_global_scale, b.input_global_scale) for a, b in pairs), strict=True):
                assert len({float(each) for each in scales}) == 1, (idx, group)  # one for the whole group
            (weight, other), *_ = pairs
            largest_block_scale = float(weight.input_global_scale / other.input_global_scale) * 448
            assert 128 * 2 / 3 <= largest_block_scale < 256 * 4 / 3, (idx, group)
            if idx == 0 and group.linears[0] == "attn.q":
                assert 128 <= largest_block_scale < 256

"""FP8, INT8 and NVFP4 scales of the bundled model against nvidia-modelopt, which finds them by its own
calibration: in this environment with the extra `modelopt`, else in that of other tools.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.canonical import layer_name, load_weights
from compress.models.checkpoint import Checkpoint
from compress.pipeline import resolve_source
from compress.quant.scheme import SCHEMES, QuantizedWeight

ROOT = Path(__file__).parents[2]
PEERS = ".venv-peers"

pytestmark = pytest.mark.interop(PEERS, "modelopt")


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_source("builtin://reference").path


@pytest.fixture(scope="module")
def calibration() -> Tensor:
    return torch.randint(8192, (4, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def theirs(model: Path, calibration: Tensor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    directory = tmp_path_factory.mktemp("modelopt")
    save_file({"tokens": calibration}, directory / "tokens.safetensors")
    command = [
        sys.executable if importlib.util.find_spec("modelopt") else ROOT / PEERS / "bin" / "python",
        ROOT / "scripts" / "modelopt_scales.py",
        model,
        directory / "tokens.safetensors",
        directory / "scales.safetensors",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(directory / "scales.safetensors")


def ours(model: Path, tokens_NS: Tensor, scheme_name: str, directory: Path) -> dict[str, QuantizedWeight]:
    """Disk name of a linear -> its weight, quantized layer by layer behind layers already quantized."""
    scheme = SCHEMES[scheme_name]
    source = Checkpoint(model)
    ctx = Context("cpu", 0, directory)
    passes = [RoundPass(Rtn(scale="min_max"), scheme, torch.bfloat16)]
    run_sequential(
        source, tokens_NS, Compression(passes, scheme=scheme), directory, ctx, compute_dtype=torch.float32
    )
    return {
        source.family.to_disk(f"layers.{idx}.{name.removesuffix('.weight')}"): value
        for idx in range(source.arch.num_layers)
        for name, value in load_weights(directory / layer_name(idx), scheme).items()
        if isinstance(value, QuantizedWeight)
    }


@pytest.mark.parametrize("scheme_name", ["FP8_DYNAMIC", "FP8_STATIC"])
def test_weight_scales_are_modelopts_rounded_to_the_models_dtype(
    scheme_name: str, model: Path, calibration: Tensor, theirs: dict[str, Tensor], tmp_path: Path
) -> None:
    weights = ours(model, calibration, scheme_name, tmp_path)
    assert {f"{name}.weight" for name in weights} == {name for name in theirs if name.endswith(".weight")}
    for name, weight in weights.items():
        assert torch.equal(weight.scale_OG[:, 0], theirs[f"{name}.weight"].to(torch.bfloat16)), name


def test_static_input_scales_are_modelopts(
    model: Path, calibration: Tensor, theirs: dict[str, Tensor], tmp_path: Path
) -> None:
    """The first linears see the same inputs as modelopt's. Those behind them see what the compressed ones
    give, where modelopt looks at a dense model: the largest input moves by no more than one rounding to e4m3
    does.
    """
    for name, weight in ours(model, calibration, "FP8_STATIC", tmp_path).items():
        scale = weight.input_scale
        expected = theirs[f"{name}.input"]
        assert scale is not None
        if name.startswith("model.layers.0.self_attn") and not name.endswith("o_proj"):
            assert scale == expected.to(torch.bfloat16).to(torch.float32), name
        assert torch.allclose(scale, expected, rtol=2**-4, atol=0), name


def test_int8_weight_scales_are_of_the_same_largest_magnitudes(
    model: Path, calibration: Tensor, theirs: dict[str, Tensor], tmp_path: Path
) -> None:
    """Ours end half a step beyond the largest magnitude, at 127.5; modelopt's at 127. The scales of rows next
    to zero are multiples of 2^-24, as float16 has them.
    """
    weights = ours(model, calibration, "INT8_DYNAMIC", tmp_path)
    assert {f"{name}.int8" for name in weights} == {name for name in theirs if name.endswith(".int8")}
    for name, weight in weights.items():
        largest_O = theirs[f"{name}.int8"] * 127
        expected = largest_O / 127.5
        assert torch.allclose(weight.scale_OG[:, 0].float(), expected, rtol=2**-8, atol=2**-24), name


def test_nvfp4_scales_are_of_the_same_largest_magnitudes(
    model: Path, calibration: Tensor, theirs: dict[str, Tensor], tmp_path: Path
) -> None:
    """Both are the nearest of numbers with four significant bits, ours by powers of two and theirs by a
    float32 number: each within half a step, 2^-4 of the scale.
    """
    weights = ours(model, calibration, "NVFP4", tmp_path)
    assert {f"{name}.nvfp4" for name in weights} == {name for name in theirs if name.endswith(".nvfp4")}
    for name, weight in weights.items():
        assert torch.allclose(weight.scale_OG.float(), theirs[f"{name}.nvfp4"], rtol=2**-3, atol=1e-6), name
        ratio = weight.scale_OG.float().mean() / theirs[f"{name}.nvfp4"].mean()
        assert abs(float(ratio) - 1) < 2**-6, name

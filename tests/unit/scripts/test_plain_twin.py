"""The plain arithmetic that programs are held to: that of others differs from this runtime's."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

from compress.export.config_groups import group_of
from compress.quant.scheme import SCHEMES, QuantizedWeight
from scripts import interop_cases, plain_twin


def test_another_divisor_gives_other_numbers_within_a_step() -> None:
    x_TK = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(1, 256, dtype=torch.int8)
    own_inputs = plain_twin.own_inputs(QuantizedWeight(SCHEMES["INT8_DYNAMIC"], weight, torch.ones(1, 1)))
    assert own_inputs is not None
    ours, theirs = own_inputs(x_TK), plain_twin.INPUTS["transformers", "INT8_DYNAMIC"](x_TK)
    step = x_TK.abs().amax(dim=1, keepdim=True) / 127
    assert ((ours - theirs).abs() > step / 4).float().mean() > 0.2
    assert bool(((ours - theirs).abs() <= 1.01 * step).all())


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC"])
@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("glm4_moe", "moe.shared.up.weight", (1, 33, 256)),
        ("qwen2_moe", "attn.q.weight", (1, 33, 256)),
        ("qwen2_moe", "moe.shared.up.weight", (33, 256)),
    ],
)
def test_inputs_of_transformers_are_those_of_its_library(
    scheme: str, family: str, name: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(0)).view(shape)
    args = QuantizationArgs(**group_of(SCHEMES[scheme], ["Linear"])["input_activations"])
    theirs = fake_quantize(x, *compute_dynamic_scales_and_zp(x, args, torch.nn.Identity()), args)
    inputs = plain_twin.inputs_of("transformers", family, name, SCHEMES[scheme])
    assert inputs is not None
    assert torch.equal(inputs(x), theirs)


@pytest.mark.parametrize(
    ("scheme", "dense_experts", "dtype"),
    [
        ("FP8_DYNAMIC", False, torch.float32),
        ("FP8_DYNAMIC", True, torch.bfloat16),
        ("W4A16_G128", False, torch.bfloat16),
    ],
)
def test_merged_experts_compute_in_the_dtype_that_transformers_gives_them(
    tmp_path: Path, scheme: str, dense_experts: bool, dtype: torch.dtype
) -> None:
    form = "compressed-tensors"
    case = interop_cases.Case("qwen2_moe", form, scheme, tmp_path / "model", dense_experts=dense_experts)
    interop_cases.write(case)
    layers = plain_twin.twin(case.path, "transformers").layers
    expert = layers[0].get_submodule("moe.experts.0")
    out = expert.get_submodule("up")(torch.randn(3, 256, generator=torch.Generator().manual_seed(0)))
    assert out.dtype == expert.get_submodule("up").weight.dtype == dtype
    plain = plain_twin.twin(case.path, "vllm").layers[0].get_submodule("moe.experts.0.up")
    assert torch.equal(plain.weight.to(dtype), expert.get_submodule("up").weight)

"""The plain arithmetic that programs are held to: that of others differs from this runtime's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

from compress.export.config_groups import group_of
from compress.quant.scheme import SCHEMES, QuantizedWeight
from scripts import interop_cases
from scripts.plain_twin import rounding, twin
from scripts.program_inputs import INPUTS

ROUNDED_WHILE_SERVING = [
    scheme
    for program, scheme in INPUTS
    if program == "transformers" and SCHEMES[scheme].activation != "tensor"
]


def weight_of(scheme: str) -> QuantizedWeight:
    """Return a weight of ones with a scale for each row and what inputs need beside."""
    made = QuantizedWeight(SCHEMES[scheme], torch.ones(1, 256, dtype=torch.int8), torch.ones(1, 1))
    if SCHEMES[scheme].has_input_global_scale:
        return replace(made, input_global_scale=torch.tensor(300.0))
    return made


def test_another_divisor_gives_other_numbers_within_a_step() -> None:
    x_TK = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    found = []
    for program in ("compress", "transformers"):
        inputs = rounding(program, "llama", "attn.q.weight", weight_of("INT8_DYNAMIC"))
        assert inputs is not None
        found.append(inputs(x_TK))
    ours, theirs = found
    step = x_TK.abs().amax(dim=1, keepdim=True) / 127
    assert ((ours - theirs).abs() > step / 4).float().mean() > 0.2
    assert bool(((ours - theirs).abs() <= 1.01 * step).all())


@pytest.mark.parametrize("scheme", ROUNDED_WHILE_SERVING)
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
    if len(shape) == 2 and scheme == "INT8_DYNAMIC_ASYM":
        pytest.skip("transformers does not load experts with zero points of inputs")
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(0)).view(shape)
    x[..., 5] = 1.75  # where the exponent of a largest number is rounded up
    x[..., 32:64] = x[..., 32:64].clamp(-1.75, 1.75)
    weight = weight_of(scheme)
    args = QuantizationArgs(**group_of(SCHEMES[scheme], ["Linear"])["input_activations"])
    scale = weight.input_global_scale
    found = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale=scale)
    theirs = fake_quantize(x, *found, args, global_scale=scale)
    inputs = rounding("transformers", family, name, weight)
    assert inputs is not None
    assert torch.equal(inputs(x), theirs)


@pytest.mark.parametrize(
    ("scheme", "dense_experts"), [("FP8_DYNAMIC", False), ("FP8_DYNAMIC", True), ("W4A16_G128", False)]
)
def test_merged_experts_round_no_inputs_and_integer_codes_to_the_dtype_of_their_scales(
    tmp_path: Path, scheme: str, dense_experts: bool
) -> None:
    form = "compressed-tensors"
    case = interop_cases.Case("qwen2_moe", form, scheme, tmp_path / "model", dense_experts=dense_experts)
    interop_cases.write(case)
    merged, apart = (
        twin(case.path, program).layers[0].get_submodule("moe.experts.0.up")
        for program in ("transformers", "vllm")
    )
    x_TK = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(merged(x_TK), x_TK @ merged.weight.t())
    is_integer = SCHEMES[scheme].type == "int"
    rounded = apart.weight.to(torch.bfloat16).float() if is_integer else apart.weight
    assert torch.equal(merged.weight, rounded)
    assert torch.equal(merged.weight, apart.weight) != is_integer

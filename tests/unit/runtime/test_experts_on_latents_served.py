"""Experts that act on latents in serving: what a step reads, that experts in codes compute what their
dequantized weights do, and what exports say of the linears around them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.export import FORMATS, open_checkpoint
from compress.export.format_writer import write_format
from compress.models.config_file import read_config
from compress.models.experts import Experts
from compress.models.layer_shape import LayerShape
from compress.models.random_source import RandomSource
from compress.models.weights import Dense, build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.support.tiny_decoder import tiny_arch
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.models.test_half_layers import stated

CPU = torch.device("cpu")
AROUND = ("moe.latent_in", "moe.latent_out")
MIXTURE = Experts(8, 3, 48, shared_size=96, score="sigmoid", selection_bias=True, latent_size=96)
WIDE = {
    "hidden_size": 256,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "mamba_head_dim": 32,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "n_routed_experts": 4,
    "moe_latent_size": 128,
}


DENSE_OF = {"compressed-tensors": "ignore", "gptq": "dynamic", "fp8": "modules_to_not_convert"}
"""Each format -> the field of its config that names dense modules."""


INPUT_ERROR = {(False, "int"): 1e-5, (False, "float"): 1e-5, (True, "int"): 0.03, (True, "float"): 0.1}
"""Whether a scheme rounds inputs, and its type -> the most by which logits differ for it: e4m3 has three bits
behind the first, so that each of a layer's products is off by some hundredths."""


def engine_of(source: Any) -> Engine:
    return Engine(source, device=CPU, config=EngineConfig(max_model_len=64))


def layers_of(*experts: Experts) -> tuple[LayerShape, ...]:
    sparse = (tiny_shape(only_half="ffn", gated=False, experts=each) for each in experts)
    return (tiny_shape(only_half="mixer", gated=False), *sparse)


def test_a_step_reads_the_linears_around_the_experts_and_the_report_names_them() -> None:
    plain = replace(MIXTURE, latent_size=0)
    engine = engine_of(tiny_source(layers=layers_of(MIXTURE, plain), activation="relu2"))
    of_report = [(row["layer"], row["linear"], row["phase"]) for row in engine.kernel_report()]
    for linear in AROUND:
        for phase in ("decode", "prefill"):
            assert of_report.count((1, linear, phase)) == 1
            assert (2, linear, phase) not in of_report
    sizes = {(row["n"], row["k"]) for row in engine.kernel_report() if row["linear"] == "router"}
    assert sizes == {(8, 56)}
    assert {row["n"] for row in engine.kernel_report() if row["linear"] == "experts"} == {96, 56}
    _, on_latents, other = engine.runner._weights.layers
    assert on_latents.latent_in is not None
    assert on_latents.latent_out is not None
    around = on_latents.latent_in.weight_bytes + on_latents.latent_out.weight_bytes
    assert around >= 4 * 2 * 96 * 56
    assert on_latents.bytes_read(0) - other.bytes_read(0) == around


@pytest.mark.parametrize("name", ["W4A16_G32", "W8A16", "FP8_BLOCK", "NVFP4", "FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_experts_in_codes_compute_what_their_dequantized_weights_do(name: str) -> None:
    """All experts are chosen, so that rounded inputs choose no others."""
    arch = tiny_arch(stated("*EE", **WIDE, num_experts_per_tok=4))
    source = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=SCHEMES[name])
    tokens_BS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = engine_of(source).runner.score(tokens_BS)
        expected = build_decoder(Dense(source), dtype=torch.float32, device=CPU)(tokens_BS)
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert error <= INPUT_ERROR[SCHEMES[name].activation is not None, SCHEMES[name].type]


@pytest.mark.parametrize("form", DENSE_OF)
def test_exports_state_that_the_linears_around_the_experts_are_dense(form: str, tmp_path: Path) -> None:
    scheme = ModelScheme(SCHEMES["FP8_BLOCK" if form == "fp8" else "W4A16_G128"])
    arch = tiny_arch(stated("*E", **WIDE))
    assert not FORMATS.get(form).broken_rules(arch, scheme)
    dtype = torch.float16 if form == "gptq" else torch.float32  # as it stores scales
    source = RandomSource(arch.replace(dtype="float16"), device=CPU, dtype=dtype, scheme=scheme.layers)
    write_format(form, tmp_path, source, scheme)
    config = read_config(tmp_path)["quantization_config"]
    dense = list(config[DENSE_OF[form]])
    for name in ("fc1_latent_proj", "fc2_latent_proj"):
        assert any(name in each for each in dense)
    again = open_checkpoint(tmp_path)
    for name in AROUND:
        ours, theirs = again.layer(1)[f"{name}.weight"], source.layer(1)[f"{name}.weight"]
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))

"""The peak memory that `compress plan` states is within 25 % of what a stage takes, measured in a process of
its own. The model is large enough for its matrices to outweigh what Python and the libraries allocate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.models.arch import Arch
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.random_source import RandomSource
from compress.stages import STAGES, PlanFacts
from compress.stages.calibrate import Calibrate
from tests.support.stage_peak import peak_bytes_of_stage
from tests.support.tiny_decoder import LLAMA, tiny_arch

NUM_SAMPLES = 16
SEQ_LEN = 64
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "dtype": "bfloat16",
}
GPTQ = {"kind": "gptq", "scale": "min_max"}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "smoothed": ("quantize", {"smooth": {"kind": "awq", "num_ratios": 2}, "round": {"kind": "rtn"}}),
    "factorised": ("quantize", {"round": GPTQ}),
    "data-free, packed": ("quantize", {"round": {"kind": "rtn"}}),
    "data-free": ("quantize", {"scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}}),
    "guided": (
        "quantize",
        {
            "guide": {"kind": "gradients"},
            "target": {"kind": "gptaq"},
            "round": GPTQ,
            "true_sequential": True,
        },
    ),
    "pruned": ("prune", {"ffn": {"keep": 0.75}, "multiple": 64}),
}


@pytest.fixture(scope="module")
def arch() -> Arch:
    return tiny_arch(LLAMA, **SHAPE)


@pytest.fixture(scope="module")
def inputs(arch: Arch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of random weights and a token set."""
    root = tmp_path_factory.mktemp("peak")
    model = root / "model"
    tokens = root / "tokens"
    model.mkdir()
    tokens.mkdir()
    write_checkpoint(model, RandomSource(arch, device=torch.device("cpu"), dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    tokens_NS = torch.randint(arch.vocab_size, (NUM_SAMPLES, SEQ_LEN), generator=generator, dtype=torch.int32)
    save_token_set(TokenSet(tokens_NS, 0, 0, {}), tokens / TOKENS_NAME)
    return model, tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_the_planned_peak_is_within_a_quarter_of_the_measured_one(
    name: str, arch: Arch, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    kind, raw = SPECS[name]
    stage = STAGES.get(kind)
    calib = Calibrate(num_samples=NUM_SAMPLES, seq_len=SEQ_LEN)
    planned = stage.estimate(
        stage.spec.model_validate(raw), PlanFacts(arch, "cpu", {"calibrate": calib})
    ).peak_bytes
    measured = peak_bytes_of_stage(kind, raw, *inputs, tmp_path)
    assert planned == pytest.approx(measured, rel=0.25)

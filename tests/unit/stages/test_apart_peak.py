"""The memory that `compress plan` states for a source that is scored alone is within a quarter of what it
takes, measured in a process of its own; streamed it is a fraction of the loaded model's."""

from pathlib import Path

import pytest
import torch

from compress.models.arch import Arch
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.random_source import RandomSource
from compress.stages import PlanFacts
from compress.stages.validate.apart_estimate import apart_needs
from compress.stages.validate.spec import Validate
from tests.support.streamed_peak import peak_bytes_of_scoring
from tests.support.tiny_decoder import LLAMA, tiny_arch

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arch]:
    place = tmp_path_factory.mktemp("streamed")
    arch = tiny_arch(LLAMA, **SHAPE)
    write_checkpoint(place, RandomSource(arch, device=torch.device("cpu"), dtype=torch.bfloat16))
    return place, arch


@pytest.mark.parametrize("way", ["loaded", "streamed"])
@pytest.mark.slow
def test_the_planned_peak_of_scoring_is_within_a_quarter_of_the_measured_one(
    way: str, model: tuple[Path, Arch], tmp_path: Path
) -> None:
    place, arch = model
    spec = Validate(
        num_samples=12,
        seq_len=128,
        latency=None,
        speculative=None,
        apart={"streamed": way == "streamed", "top_k": 16},
    )
    need = apart_needs(spec, arch, arch, PlanFacts(arch, "cpu", {}), num_kept=1)
    measured = peak_bytes_of_scoring(place, spec.model_dump_json(), way, tmp_path)
    assert need.source_bytes == pytest.approx(measured, rel=0.25)
    if way == "streamed":
        assert measured < 0.7 * 4 * arch.num_params

"""The CPU build of vLLM computes of a modelopt checkpoint what it computes of the same codes in
compressed-tensors.
"""

from pathlib import Path

import pytest
import torch

from compress.export.format_writer import write_format
from compress.models.family import family_of
from compress.models.random_source import RandomSource
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from scripts.check_interop import Question, ask_all
from scripts.interop_families import FAMILIES, SMALL

ROOT = Path(__file__).parents[2]
INTEROP = ".venv-interop"
SCHEME = SCHEMES["FP8_DYNAMIC"]

pytestmark = pytest.mark.interop(INTEROP)


def test_vllm_gives_the_bits_that_it_gives_for_compressed_tensors(tmp_path: Path) -> None:
    config = {**SMALL, "model_type": "llama", **FAMILIES["llama"]}
    arch = family_of(config).read_config(config)
    drawn = torch.randint(2, SMALL["vocab_size"], (4, 48), generator=torch.Generator().manual_seed(0))
    prompts = [tuple(each) for each in drawn.tolist()]
    questions = []
    for form in ("modelopt", "compressed-tensors"):
        source = RandomSource(arch, device=torch.device("cpu"), dtype=torch.bfloat16, scheme=SCHEME)
        (tmp_path / form).mkdir()
        write_format(form, tmp_path / form, source, ModelScheme(SCHEME))
        questions.append(Question(str(tmp_path / form), "bfloat16", 8, prompts))
    replies = ask_all("vllm", ROOT / INTEROP / "bin" / "python", questions)
    assert [reply.error for reply in replies] == [None, None]
    assert replies[0].prompts == replies[1].prompts
    assert len({token for answer in replies[0].prompts for token in answer.tokens}) > 2

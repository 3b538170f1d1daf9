"""The CPU build of vLLM loads vision models with their towers, and computes of text what their files say."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import DENSE, SCHEMES
from scripts.check_interop import Question, Reply, ask_all
from scripts.interop_cases import Case
from scripts.interop_matrix import Machine, dtype_of, from_twin
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import rename
from tests.support.wrappers import WRAPPERS, Rounded, wide

ROOT = Path(__file__).parents[2]
INTEROP = ".venv-interop"
FORM = "compressed-tensors"
SCHEME = "W4A16_G128"
DRAWN = torch.randint(2, 90, (3, 40), generator=torch.Generator().manual_seed(0))  # below tokens of pictures
PROMPTS = [tuple(each) for each in DRAWN.tolist()]
NOT_ASKED = "not asked"
Outcome = str | None
FIRST = {CASES[case][0]: case for case in reversed(WRAPPERS)}
"""Family -> the first of its cases."""

SEEN = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3", "gemma4", "gemma4_unified"),
    *("mistral3", "llava", "llava_next", "llava_next_video", "llava_onevision", "internvl", "idefics3"),
    *("smolvlm", "glm_ocr", "exaone4_5", "minicpmv4_6"),
)
"""Families that vLLM 0.32 computes as stated, and that are not left out where it fails without codes, too."""

pytestmark = pytest.mark.interop(INTEROP)


@dataclass(frozen=True)
class Written(Case):
    """A vision model as one format writes it."""

    @property
    def arch(self) -> Arch:
        return open_checkpoint(self.path).arch


STATED: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
    "glm4v_moe": {"text_config": {"use_qk_norm": False}},
    "qwen3_5": {"vision_config": {"deepstack_visual_indexes": []}},
    "qwen3_5_moe": {"vision_config": {"deepstack_visual_indexes": []}},
    "muse_glimmer": {"vision_config": {"output_dim": 128}},
}
"""Fields that checkpoints state, vLLM reads, and `transformers` does not save."""
DELTA_NET = {
    "hidden_size": 256,
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_value_head_dim": 128,
}
"""Sizes of delta nets that vLLM has on a CPU."""
TOWERS_BEFORE = {"vision_tower.": "vision_tower.vision_model."}
NAMED_AS_BEFORE = ("gemma3", "llava", "llava_next", "llava_next_video", "llava_onevision")
"""Families whose checkpoints name the tensors of their towers as `transformers` did when they were made."""
NOT_IN_FLOAT16 = ("gemma3",)
"""Families that vLLM refuses to compute in float16."""
READ_AS_STATED = 0.1
"""The mean difference below which codes are read as they are stated, where vLLM cannot be held to more: its
kernel of four bits in bfloat16 rounds three times as much as bfloat16 does (docs/LOG.md, 2026-11-20), and a
router of few experts decides otherwise by the last bit. Texts that have nothing in common differ by 1.2."""


def written(family: str, directory: Path) -> Written:
    """Write a family's tiny model, and next to it the same in four bits."""
    source = directory / "source"
    of_delta_net = DELTA_NET if "linear_conv_kernel_dim" in CASES[FIRST[family]][1] else {}
    wide(FIRST[family], source, **of_delta_net)
    if family in NAMED_AS_BEFORE:
        rename(source, TOWERS_BEFORE)
    config = json.loads((source / "config.json").read_text())
    for part, fields in STATED.get(family, {}).items():
        config[part].update(fields)
    (source / "config.json").write_text(json.dumps(config))
    scheme = ModelScheme(SCHEMES[SCHEME])
    (directory / "out").mkdir()
    write_format(FORM, directory / "out", Rounded(Checkpoint(source), scheme), scheme)
    return Written(family, FORM, SCHEME, directory / "out")


def dtype_in_vllm(case: Written) -> str:
    """Return the dtype in which vLLM computes a case."""
    dtype = dtype_of("vllm", case)
    return "bfloat16" if dtype == "float16" and case.family in NOT_IN_FLOAT16 else dtype


def ask(cases: Sequence[Written]) -> list[Outcome]:
    """Return what vLLM makes of checkpoints."""
    questions = [Question(str(case.path), dtype_in_vllm(case), 8, PROMPTS) for case in cases]
    replies = ask_all("vllm", ROOT / INTEROP / "bin" / "python", questions)
    return [outcome(case, reply) for case, reply in zip(cases, replies, strict=True)]


def outcome(case: Written, reply: Reply) -> Outcome:
    """Return what went wrong with a case, None where vLLM computes what the file says."""
    if reply.error is not None:
        return reply.error
    numbers = from_twin(case, "vllm", PROMPTS, reply.prompts)
    if case.scheme == SCHEME and (dtype_in_vllm(case) == "bfloat16" or case.arch.has_experts):
        agrees = numbers.mean <= READ_AS_STATED
    else:
        agrees = numbers.agree
    return None if agrees else f"log probabilities differ by {numbers.mean:.3f}"


def why_not(case: Written) -> str | None:
    """Return why vLLM is not asked of a case, None where it is."""
    claim = case.claim("vllm")
    return Machine.here().refusal("vllm", case) if claim.loads else claim.note


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcome of each family; one that cannot be asked, and one whose model vLLM does not compute
    without codes either, begins with NOT_ASKED."""
    cases = [written(family, tmp_path_factory.mktemp(family)) for family in FIRST]
    reasons = {case.family: why_not(case) for case in cases}
    asked = [case for case in cases if reasons[case.family] is None]
    found = dict(zip(asked, ask(asked), strict=True))
    failed = [case for case, said in found.items() if said is not None]
    dense = [replace(case, path=case.path.with_name("source"), scheme=DENSE) for case in failed]
    reasons |= {
        case.family: f"its model without codes: {said}; with codes: {found[case]}"
        for case, said in zip(failed, ask(dense) if dense else [], strict=True)
        if said is not None and case.family not in SEEN
    }
    of_codes = {case.family: said for case, said in found.items()}
    return {
        family: of_codes[family] if reason is None else f"{NOT_ASKED}: {reason}"
        for family, reason in reasons.items()
    }


@pytest.mark.parametrize("family", FIRST)
def test_vllm_computes_of_codes_what_it_computes_without(family: str, outcomes: dict[str, Outcome]) -> None:
    said = outcomes[family]
    if said is not None and said.startswith(NOT_ASKED):
        pytest.skip(said)
    assert said is None

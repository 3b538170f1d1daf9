"""Heads that no config of a family can state are refused: readers would build a model with other heads."""

from dataclasses import replace

import pytest

from compress.distill.student import Shape, student_arch
from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import family_of, family_of_arch
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config


def arch_of(case: str) -> Arch:
    config = build_config(*CASES[case]).to_dict()
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    "case",
    [
        "gpt2",
        "codegen",
        "gpt_neo",
        "gpt_neox",
        "gpt_neox_japanese",
        "openai-gpt",
        "biogpt",
        "xglm",
        "opt",
        "opt-no-biases-gelu",
    ],
)
def test_fewer_kv_heads_than_a_config_implies_are_refused(case: str) -> None:
    arch = arch_of(case)
    fewer = arch.replace(layers=tuple(replace(each, num_kv_heads=2) for each in arch.layers))
    family = family_of_arch(arch)
    message = r"no config.json of .* \d query heads have 2 KV heads"
    with pytest.raises(UnsupportedArch, match=message):
        family.write_config(fewer)
    assert family.why_unstated(arch) is None


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("falcon", Shape(heads=3, kv_heads=1)),
        ("falcon", Shape(hidden=24)),
        ("gpt2", Shape(heads=3, kv_heads=3)),
        ("gpt2", Shape(hidden=24)),
        ("glm4v", Shape(heads=3, kv_heads=1)),
    ],
)
def test_a_student_whose_heads_would_have_another_size_is_refused(case: str, shape: Shape) -> None:
    """That of a Falcon was written, and read with heads of twice the size."""
    with pytest.raises(UnsupportedArch, match="hidden_size / number of heads"):
        student_arch(arch_of(case), shape)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt_bigcode", "falcon", "aya_vision", "qwen3_5", "gemma4"])
def test_heads_as_they_were_read_are_written(case: str) -> None:
    arch = arch_of(case)
    family = family_of_arch(arch)
    again = family.read_config(family.write_config(arch))
    assert [each.widths for each in again.layers] == [each.widths for each in arch.layers]

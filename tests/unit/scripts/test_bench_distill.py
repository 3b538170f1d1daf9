"""The benchmarks of distillation: what they count as useful work is what is computed, and their rows say what
was measured.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compress.distill.losses import Divergence
from compress.distill.objective import Objective, Teacher
from scripts.bench_distill import flops_of
from tests.support.scripts import run_script
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_decoder

CONFIG = {**LLAMA, "mlp_bias": False}


def test_the_products_of_a_step_are_those_that_mfu_counts() -> None:
    """No matrix product is computed twice, and none is left out; attention is counted apart, by formula."""
    teacher_arch = tiny_arch(CONFIG)
    student_arch = tiny_arch(CONFIG, num_hidden_layers=2, intermediate_size=24)
    teacher = Teacher(tiny_decoder(teacher_arch), device=torch.device("cpu"))
    student = tiny_decoder(student_arch).requires_grad_(True)
    tokens_BS = torch.randint(61, (3, 33), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        Objective(Divergence(), teacher)(student, tokens_BS).backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    attention = sum(
        times * 2.0 * arch.num_layers * 4 * 8 * 32 for arch, times in ((student_arch, 3), (teacher_arch, 1))
    )
    assert 96 * flops_of(student_arch, teacher_arch, 32) == products + 96 * attention


def test_a_step_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, changes in (("student", {"num_hidden_layers": 1}), ("teacher", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    shapes = [
        "--student",
        tmp_path / "student" / "config.json",
        "--teacher",
        tmp_path / "teacher" / "config.json",
    ]
    size = [
        "--batch-size",
        "4",
        "--micro-batch-sizes",
        "2",
        "4",
        "--seq-len",
        "16",
        "--steps",
        "2",
        "--warmups",
        "1",
        "--compile",
        "off",
    ]
    files = ["--out", tmp_path / "out.json", "--peak-tflops", "1"]
    run_script(monkeypatch, capsys, "bench_distill", *shapes, *size, *files)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["micro_batch_size"] for row in rows] == [2, 4]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(64 / row["step_s"])
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / 1e12)
        assert (row["student"], row["teacher"]) == ("student", "teacher")

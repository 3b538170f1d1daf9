"""The benchmark of recovery: its settings are those of the stage, windows are repeated where text is short,
and the curve is measured on windows that are held out.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_recovery_quantized as bench


def arguments(monkeypatch: pytest.MonkeyPatch, *given: str) -> bench.argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    return bench.arguments()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work directory with an encoded text of 100 windows of 8 + 1 tokens, no two of them alike."""
    np.save(tmp_path / "recovery-quantized-builtin___python.npy", np.arange(905, dtype=np.uint16))
    return tmp_path


@pytest.mark.parametrize(("tokens", "passes", "steps"), [(160, 1, 5), (1344, 2, 42), (6720, 10, 210)])
def test_windows_are_repeated_where_text_is_short(
    monkeypatch: pytest.MonkeyPatch, work: Path, tokens: int, passes: int, steps: int
) -> None:
    args = arguments(
        monkeypatch,
        *("--work", str(work), "--tokens", str(tokens), "--seq-len", "8", "--batch-size", "4"),
        *("--lr", "0.03", "--device", "cpu"),
    )
    found = bench.Bench(args, None, None)  # type: ignore[arg-type]
    text = found.text
    windows = {tuple(row) for row in text.training.tokens_NS.tolist()}
    held_out = {tuple(row) for row in text.held_out_NS.tolist()}
    assert len(held_out) == bench.HELD_OUT
    assert not windows & held_out
    assert len(windows) == min(84, tokens // 8)
    spec = found.spec(lora=False)
    assert (spec.passes, spec.num_steps) == (passes, steps)
    assert spec.num_windows <= len(windows)
    assert spec.lr == 0.03
    assert found.spec(lora=True).lora is not None


def test_the_table_marks_the_control() -> None:
    row = {"kl_mean": 0.1, "ppl_ratio": 1.1, "top1": 0.9, "tokens": 2_000_000}
    rows = [
        {**bench.identity("W2A16_G64", name, control=control), **row, "seconds": {"quantize": 1.0}}
        for name, control in (("balanced + codes", False), ("finetune + balanced", True))
    ]
    lines = bench.table(rows).splitlines()
    assert "control" not in lines[2]
    assert "| finetune + balanced (control) | 2.00 | 0.10000 |" in lines[3]

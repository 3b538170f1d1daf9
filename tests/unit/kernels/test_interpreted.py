"""The tests of GPU kernels that triton's interpreter runs, in processes of their own: the interpreter is
chosen when triton is first imported."""

from pathlib import Path

import pytest

from tests.support.triton_interpreter import INTERPRETED, assert_passes_interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="is the child process")

# In turns of about a minute each, which run at the same time; all are slow.
TURNS = (
    ("attention_kernels", "attention_fp8", "columns", "decode_step"),
    ("experts", "general_linear", "index_store", "key_choice", "latents"),
    ("chosen_entries", "compressed", "relative_logits", "alibi"),
    ("gated_streams", "altup", "mamba2", "selective_scan", "short_conv", "residual_conv"),
    ("delta_net", "rope_store", "row_kernels", "verify_step", "w8a16"),
)
each_turn = pytest.mark.parametrize("turn", TURNS, ids="+".join)


def files(turn: tuple[str, ...]) -> list[Path]:
    return [Path(__file__).with_name(f"test_{name}.py") for name in turn]


def has_slow_cases(turn: tuple[str, ...]) -> bool:
    return any("slow(" in path.read_text() for path in files(turn))


@pytest.mark.slow
@each_turn
def test_kernels_pass_in_the_interpreter(turn: tuple[str, ...]) -> None:
    assert_passes_interpreted(*files(turn), slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("turn", list(filter(has_slow_cases, TURNS)), ids="+".join)
def test_more_shapes_pass_in_the_interpreter(turn: tuple[str, ...]) -> None:
    assert_passes_interpreted(*files(turn), slow=True)


def test_every_file_that_asks_for_the_interpreter_is_listed() -> None:
    asking = {
        each
        for each in Path(__file__).parent.glob("test_*.py")
        if any(
            word in each.read_text()
            for word in ("INTERPRETED", "usable_kernels", "recurrences.each_kernel", "recurrences import")
        )
    }
    assert asking - {Path(__file__)} == {path for turn in TURNS for path in files(turn)}

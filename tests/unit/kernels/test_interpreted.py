"""The tests of GPU kernels that triton's interpreter runs, of all files in one process: the interpreter is
chosen when triton is first imported."""

from pathlib import Path

import pytest

from tests.support.triton_interpreter import INTERPRETED, assert_passes_interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="is the child process")

FILES = [
    Path(__file__).with_name(f"test_{name}.py")
    for name in (
        "attention_kernels",
        "columns",
        "decode_step",
        "experts",
        "rope_store",
        "row_kernels",
        "verify_step",
    )
]


def test_kernels_pass_in_the_interpreter() -> None:
    assert_passes_interpreted(*FILES, slow=False)


@pytest.mark.slow
def test_more_shapes_pass_in_the_interpreter() -> None:
    assert_passes_interpreted(*FILES, slow=True)


def test_every_file_that_asks_for_the_interpreter_is_listed() -> None:
    asking = {each for each in Path(__file__).parent.glob("test_*.py") if "INTERPRETED" in each.read_text()}
    assert asking - {Path(__file__)} == set(FILES)

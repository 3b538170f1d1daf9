"""The law of rows under the instruction sets of other x86-64 CPUs, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.emulation import EMULATED, EMULATIONS
from tests.support.slow import slow

pytestmark = [
    pytest.mark.row_law,
    pytest.mark.skipif(EMULATED is not None, reason="is the child process"),
]
LAW = Path(__file__).with_name("test_row_law.py")


COMMON = {"amd_zen3", "avx2"}


@pytest.mark.parametrize("name", [each if each in COMMON else slow(each) for each in EMULATIONS])
@pytest.mark.slow
def test_the_law_holds(name: str, tmp_path: Path) -> None:
    emulation = EMULATIONS[name]
    if (refusal := emulation.refusal) is not None:
        pytest.skip(refusal)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "row_law", str(LAW)]
    variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **emulation.environment(name, tmp_path)}
    child = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout

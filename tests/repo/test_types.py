"""The package is fully typed."""

import subprocess
import sys
from pathlib import Path


def test_mypy_strict_has_nothing_to_say() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr

"""Runs a file of tests in triton's interpreter: it is chosen when triton is first imported, so that takes a process of its own."""

import os
import subprocess
import sys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is that process."""


def assert_passes_interpreted(path: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", path]
    child = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout

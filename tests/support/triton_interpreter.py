"""Runs a file of tests in triton's interpreter: it is chosen when triton is first imported, so that takes a
process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slow import PART_VARIABLE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is that process."""


def assert_passes_interpreted(*paths: Path, slow: bool) -> None:
    """Run those tests of some files that are marked slow, or those that are not."""
    marked = "slow" if slow else "not slow"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, *map(str, paths)]
    # All slow cases of the files, whatever part of the slow tests this test is in.
    environment = {name: each for name, each in os.environ.items() if name != PART_VARIABLE}
    environment["TRITON_INTERPRET"] = "1"
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout


def use_row_independent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's `tl.dot` add the terms of an element in the order of K, and round each, and its
    `tl.fma` round once.

    Its own `tl.dot` is numpy's product, where a row's bits depend on the height of the tile and the place in
    it, and its `tl.fma` rounds the product, too. Those of a GPU do not.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
    ) -> TensorHandle:
        total = d.data.copy()
        for k in range(a.data.shape[-1]):
            column, row = a.data[..., :, k, None], b.data[..., None, k, :]
            total += column.astype(total.dtype) * row.astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    def create_fma(self: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        wide = x.data.astype("float64") * y.data + z.data
        return TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)

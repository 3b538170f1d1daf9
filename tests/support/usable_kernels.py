"""The kernels that tests can run here, on the CPU and on a GPU if there is one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.kernels.problem import KernelDevice, Problem
from compress.kernels.select import candidates
from tests.support.triton_interpreter import INTERPRETED

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def usable(op: Any, *, n: int, k: int) -> Any:
    """Return the kernels of an op that serve a problem in float32 here, by device."""
    return pytest.mark.parametrize(
        ("kernel", "device"),
        [
            pytest.param(kernel, device, id=f"{kernel.name}-{device}")
            for kernel in candidates(op)
            for device in DEVICES
            if kernel.refusal(_problem(op, device, n, k)) is None
        ],
    )


def _problem(op: Any, device: str, n: int, k: int) -> Problem:
    of_device = KernelDevice.from_torch(torch.device(device), torch.float32)
    return replace(of_device, sm=90 if INTERPRETED else of_device.sm).problem(op, n=n, k=k)

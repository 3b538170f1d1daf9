"""What a fused linear takes on a device that need not be here: measured times that ship with the package, and what bytes say beyond them.

A table is one JSON file in `latency_tables/`, which `scripts/latency_table.py` makes of a result of `scripts/bench_kernels.py`. For a shape
or a scheme that it does not hold, the time is launch + bytes / rate, both fitted to the table's own rows of one token; the bytes are those
of the kernel that would serve there, so that a scheme without a fast kernel, which runs dequantized, is as slow as a dense weight.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from compress.errors import UsageError, did_you_mean
from compress.kernels.problem import DENSE_SCHEMES, KernelDevice
from compress.kernels.select import select
from compress.quant.scheme import SCHEMES, Scheme

TABLES = Path(__file__).parent / "latency_tables"
DEQUANTIZED = "dequantized"
Origin = Literal["measured", "table", "bytes"]
"""Where a time is from: this device, a shipped table, or bytes."""


@dataclass(frozen=True)
class LatencyTable:
    """`us` is (linear, n, k, scheme, rows) -> microseconds; `linear` is qkv, o, gate_up or down."""

    device: str
    sm: int
    launch_us: float
    bytes_per_us: float
    us: Mapping[tuple[str, int, int, str, int], float]

    def linear_us(
        self, linear: str, n: int, k: int, scheme: Scheme | None, *, rows: int, dtype: torch.dtype
    ) -> tuple[float, Origin]:
        """Microseconds for `rows` tokens (the next number up that the table has), and where they are from."""
        name = DENSE_SCHEMES[dtype] if scheme is None else scheme.name
        measured = sorted(
            (m, us) for (*what, m), us in self.us.items() if tuple(what) == (linear, n, k, name) and m >= rows
        )
        if measured:
            return measured[0][1], "table"
        num_bytes = (
            2 * n * k
            if scheme is None or self._dequantized(n, k, scheme, dtype)
            else scheme.weight_bytes(n, k)
        )
        return self.launch_us + num_bytes / self.bytes_per_us, "bytes"

    def _dequantized(self, n: int, k: int, scheme: Scheme, dtype: torch.dtype) -> bool:
        return (
            DEQUANTIZED
            in select(
                KernelDevice("cuda", self.sm, dtype).problem("linear", n=n, k=k, scheme=scheme.name)
            ).name
        )


def known_devices() -> list[str]:
    return sorted(json.loads(path.read_text(encoding="utf-8"))["device"] for path in TABLES.glob("*.json"))


def latency_table(device: str) -> LatencyTable:
    """The table of a device by the name that its driver gives, `NVIDIA H200`.

    Raises:
        UsageError: none ships for it.
    """
    for path in TABLES.glob("*.json"):
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["device"] == device:
            us = {
                (row["linear"], row["n"], row["k"], row["scheme"], row["m"]): row["us"]
                for row in said["rows"]
            }
            return LatencyTable(device, said["sm"], said["launch_us"], said["bytes_per_us"], us)
    raise UsageError(
        f"no table of kernel times ships for the device '{device}'.{did_you_mean(device, known_devices())}"
    )


def stored_bytes(n: int, k: int, scheme: str) -> int:
    """Bytes of a weight that a result names by its scheme, or by its dtype of 16 bits."""
    return SCHEMES[scheme].weight_bytes(n, k) if scheme in SCHEMES else 2 * n * k

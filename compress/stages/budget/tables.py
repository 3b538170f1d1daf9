"""Times of linear groups on a device that need not be here, from measurements that ship with the package.

A table is one JSON file in `latency_tables/`, which `scripts/latency_table.py` makes from a result of
`scripts/bench_kernels.py`. For a shape or a scheme that the table lacks, the time is launch + bytes / rate,
both fitted to the table's own rows of one token. The bytes are those of the kernel that would serve there, so
that a scheme without a fast kernel, which runs dequantized, is as slow as a dense weight.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
"""Origin of a time: measured on this device, a row of a table, or estimated from bytes."""


@dataclass(frozen=True)
class LatencyTable:
    """Measured times of one device: `us` is (group, n, k, scheme, rows) -> microseconds, with `group` the
    name of a linear group.

    `sm` is the compute capability times ten; `launch_us` and `bytes_per_us` are the fit for what was not
    measured.
    """

    device: str
    sm: int
    launch_us: float
    bytes_per_us: float
    us: Mapping[tuple[str, int, int, str, int], float]

    def linear_us(
        self, group: str, n: int, k: int, scheme: Scheme | None, *, rows: int, dtype: torch.dtype
    ) -> tuple[float, Origin]:
        """Return the microseconds for `rows` tokens (the next larger number that the table has), and where
        they come from."""
        name = DENSE_SCHEMES[dtype] if scheme is None else scheme.name
        measured = sorted(
            (m, us) for (*product, m), us in self.us.items() if product == [group, n, k, name] and m >= rows
        )
        if measured:
            return measured[0][1], "table"
        num_bytes = (
            2 * n * k
            if scheme is None or self._dequantized(n, k, scheme, dtype)
            else _in_kernels(scheme).weight_bytes(n, k)
        )
        return self.launch_us + num_bytes / self.bytes_per_us, "bytes"

    def _dequantized(self, n: int, k: int, scheme: Scheme, dtype: torch.dtype) -> bool:
        problem = KernelDevice("cuda", self.sm, dtype).problem("linear", n=n, k=k, scheme=scheme.name)
        return DEQUANTIZED in select(problem).name


def _in_kernels(scheme: Scheme) -> Scheme:
    """Return the scheme as kernels hold it: codes of two and three bits take four."""
    return replace(scheme, num_bits=4) if scheme.type == "int" and scheme.num_bits < 4 else scheme


def known_devices() -> list[str]:
    """Return the names of the devices that a table ships for."""
    return sorted(json.loads(path.read_text(encoding="utf-8"))["device"] for path in TABLES.glob("*.json"))


def latency_table(device: str) -> LatencyTable:
    """Return the table of a device by the name that its driver gives, such as `NVIDIA H200`.

    Raises:
        UsageError: none ships for it.
    """
    for path in TABLES.glob("*.json"):
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["device"] == device:
            us = {
                (row["linear"], row["n"], row["k"], row["scheme"], row["m"]): row["us"]
                for row in table["rows"]
            }
            return LatencyTable(device, table["sm"], table["launch_us"], table["bytes_per_us"], us)
    raise UsageError(
        f"no table of kernel times ships for the device '{device}'.{did_you_mean(device, known_devices())}"
    )


def stored_bytes(n: int, k: int, scheme: str) -> int:
    """Return the bytes of a weight that a result file names by its scheme, or by its dtype of 16 bits."""
    return SCHEMES[scheme].weight_bytes(n, k) if scheme in SCHEMES else 2 * n * k

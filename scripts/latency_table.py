r"""The table of kernel times that ships with the package, from a result of `bench_kernels.py`.

    python -m scripts.latency_table benchmarks/h200/kernels.json \
        compress/stages/budget/latency_tables/nvidia-h200.json

Keeps this project's decode linears of layers; launch and rate for what the table does not hold are fitted to
its rows of one token, by the least relative error.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from compress.quant.scheme import SCHEMES
from compress.stages.budget.tables import stored_bytes

SM = {"NVIDIA H200": 90}


def table(result: dict[str, object]) -> dict[str, object]:
    """The content of a table."""
    device = str(result["device"])
    measured = result["rows"]
    assert isinstance(measured, list)
    rows = [
        {
            "linear": row["name"],
            "n": row["shape"][0],
            "k": row["shape"][1],
            "scheme": row["scheme"],
            "m": row["m"],
            "us": round(row["us"], 3),
        }
        for row in measured
        if (row["tool"], row["op"], row["phase"]) == ("compress", "linear", "decode")
        and row["name"] != "head"
    ]
    single = [
        row
        for row in rows
        if row["m"] == 1 and (row["scheme"] in SCHEMES or row["scheme"] in ("BF16", "F16"))
    ]
    us = np.array([row["us"] for row in single])
    columns = (
        np.array([[1.0, stored_bytes(row["n"], row["k"], row["scheme"])] for row in single]) / us[:, None]
    )
    launch_us, us_per_byte = np.linalg.lstsq(columns, np.ones(len(us)), rcond=None)[0]
    return {
        "device": device,
        "sm": SM[device],
        "commit": result["commit"],
        "launch_us": round(float(launch_us), 3),
        "bytes_per_us": round(1 / float(us_per_byte)),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    made = table(json.loads(args.result.read_text(encoding="utf-8")))
    rows = made.pop("rows")
    assert isinstance(rows, list)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps(made, indent=1)
    args.out.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()

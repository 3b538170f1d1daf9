"""What the speed benchmarks share: options, the shape a name stands for, and the file that results are kept
in.

A result file says what its numbers depend on: device, driver, clocks, host, versions, commit, date, command,
and the rates measured in the same run. Rows are flat.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.errors import UsageError
from compress.machine import environment_facts
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.known import known_config, known_models
from compress.quant.scheme import Scheme, scheme_named

SCHEMA = 1
H200_LAUNCH_S = 2.8e-6
H200_LAUNCH_BYTES_PER_S = 4.16e12
"""What a single launch reaches on an H200: t = 2.8 us + bytes / 4.16 TB/s, fitted to plain reads of 8 to 512
MB a launch."""


DENSE_NAMES = ("dense", "BF16")
"""The dtype of the model in place of a scheme."""


def argument_parser(description: str) -> argparse.ArgumentParser:
    """With the options that both benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-3.1-8b", help="a model that ships with the package, or a config.json"
    )
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    parser.add_argument(
        "--show", type=Path, default=None, help="print the tables of a result file and measure nothing"
    )
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser,
    tables: Callable[[dict[str, Any]], str],
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parse the command line; with `--show` print the tables of that result file and exit instead."""
    args = parser.parse_args(argv)
    if args.show is not None:
        print(tables(json.loads(args.show.read_text(encoding="utf-8"))))
        parser.exit()
    return args


def schemes_of(text: str) -> tuple[Scheme | None, Scheme | None]:
    """Return the schemes of linears and of the head, of a text such as `W4A16_G128+FP8_DYNAMIC`; None is the
    dtype of the model.
    """
    linears, _, head = text.partition("+")
    return None if linears in DENSE_NAMES else scheme_named(linears), scheme_named(head) if head else None


def scheme_text(text: str) -> str:
    """Return the text if `schemes_of` reads it, so that a wrong one ends a benchmark before it begins."""
    try:
        schemes_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def read_arch(name: str) -> tuple[str, Arch]:
    """A short name and the shape, of a model that ships or of a `config.json`."""
    path = Path(name)
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else known_config(name)
    if config is None:
        raise UsageError(
            f"no shape named '{name}'; known are {', '.join(known_models())}, or give the path of a "
            "config.json."
        )
    return (path.parent.name if path.is_file() else name), family_of(config).read_config(config)


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_h200(device: torch.device) -> bool:
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)


def model_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def write_results(
    path: Path | None,
    rows: Sequence[dict[str, Any]],
    *,
    device: torch.device,
    commit: str | None,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Return the document of a result file, written where there is a path. `facts` are measured rates and
    conditions that hold for all rows."""
    environment = environment_facts(device)
    head = ["git", "rev-parse", "--verify", "HEAD"]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
    }
    document = {
        "schema": SCHEMA,
        "device": environment["device"],
        "memory_bytes": environment.get("memory_bytes"),
        "driver": environment.get("driver"),
        "host": {"cpu": environment_facts(torch.device("cpu"))["device"], "cores": os.cpu_count()},
        "clocks": {name: value for name, value in environment.items() if name.startswith("clock_")},
        "versions": versions,
        "commit": commit or subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m", f"scripts.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        **facts,
        "rows": list(rows),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return document


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

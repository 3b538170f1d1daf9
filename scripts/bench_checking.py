"""Time to compare an artifact in a workspace with its manifest, as a run does once before it builds upon it.

    python -m scripts.bench_checking --gigabytes 16 --files 16 --out benchmarks/checking.json

The artifact is made of random tensors in a temporary directory, so that its files come from the page cache; a
second look in the same run reads nothing again and is timed too.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from compress.artifact.tensors import save_tensors
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from scripts.bench_setup import markdown, write_results

KEY = Workspace.key("bench", 1, {}, {}, 0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="10^9 bytes of the whole artifact")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where the artifact is made")
    parser.add_argument("--commit", default=None, help="of the code that is measured")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    num_bytes = int(args.gigabytes * 1e9) // args.files

    def build(out: ArtifactWriter) -> None:
        part = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        for idx in range(args.files):
            save_tensors(out.path / f"{idx:05d}.safetensors", {"tensor": part})
        out.describe(role="bench")

    first = list[float]()
    second = list[float]()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        Workspace(Path(directory)).commit(KEY, "bench", {}, build)
        for _ in range(args.repeats):
            workspace = Workspace(Path(directory))
            for times in (first, second):
                began = time.perf_counter()
                assert workspace.get(KEY) is not None
                times.append(time.perf_counter() - began)
    rows = [
        {
            "look": look,
            "gigabytes": args.gigabytes,
            "files": args.files,
            "seconds_p50": statistics.median(times),
            "seconds_min": min(times),
            "seconds_max": max(times),
            "gigabytes_per_s": args.gigabytes / statistics.median(times),
        }
        for look, times in (("first", first), ("again in the same run", second))
    ]
    print(
        markdown(
            ["look", "GB", "files", "s", "min", "max", "GB/s"],
            [
                [str(row["look"]), f"{args.gigabytes:g}", str(args.files)]
                + [f"{row[name]:.3f}" for name in ("seconds_p50", "seconds_min", "seconds_max")]
                + [f"{row['gigabytes_per_s']:.2f}"]
                for row in rows
            ],
        )
    )
    if args.out is not None:
        write_results(args.out, rows, device=torch.device("cpu"), commit=args.commit, facts={})


if __name__ == "__main__":
    main()

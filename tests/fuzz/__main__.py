"""Runs a fuzz campaign over the readers of untrusted input.

    python -m tests.fuzz --seconds 60 --jobs 2 [--target NAME ...] [--seed N] [--out FILE]

Failing inputs are made small and written to `tests/fuzz/crashes/<target>/`; exit code 1 when there are any.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from compress.machine import environment_facts
from tests.fuzz.campaign import CRASHES, Tally, run_jobs, store
from tests.fuzz.law import MAX_MORE_BYTES, MAX_SECONDS
from tests.fuzz.targets import TARGETS


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign, print and write what it found, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="repeat for several; all by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--crashes", type=Path, default=CRASHES, help="where failing inputs are written")
    args = parser.parse_args(arguments)

    targets = [target for name, target in TARGETS.items() if not args.target or name in args.target]
    began = time.monotonic()
    tallies = run_jobs(targets, seconds=args.seconds, jobs=args.jobs, seed=args.seed)
    print(as_text(tallies))
    failures = [failure for tally in tallies.values() for failure in tally.failures.values()]
    for failure in failures:
        path = store(failure, args.crashes)
        print(f"\n{path}\n{failure.reason}\n{failure.trace}")
    document = {
        "schema": 1,
        "environment": environment_facts(torch.device("cpu")),
        "seconds": round(time.monotonic() - began, 1),
        "jobs": args.jobs,
        "seed": args.seed,
        "limits": {"seconds": MAX_SECONDS, "more_bytes": MAX_MORE_BYTES},
        "inputs": sum(tally.inputs for tally in tallies.values()),
        "failures": len(failures),
        "targets": {name: tally.facts() for name, tally in tallies.items()},
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\n{document['inputs']:,} inputs, {len(failures)} failures")
    return 1 if failures else 0


def as_text(tallies: dict[str, Tally]) -> str:
    """Return the table of a campaign, one line a target."""
    head = ("target", "inputs", "inputs/s", "outcomes", "failures", "slowest", "memory")
    lines: list[tuple[Any, ...]] = [head]
    for name, tally in tallies.items():
        rate = tally.inputs / tally.seconds if tally.seconds else 0.0
        lines.append(
            (
                name,
                f"{tally.inputs:,}",
                f"{rate:.0f}",
                len(tally.outcomes),
                len(tally.failures),
                f"{tally.slowest_s:.2f} s of {tally.slowest_bytes:,} bytes",
                f"+{tally.most_more_bytes / 2**20:.0f} MiB",
            )
        )
    return "\n".join("  ".join(f"{cell!s:>10}" for cell in line) for line in lines)


if __name__ == "__main__":
    sys.exit(main())

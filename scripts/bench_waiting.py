r"""Decode steps on a CPU, by how long a thread that waits for the others spins before it sleeps.

    taskset -c 0,1 python -m scripts.bench_waiting --out benchmarks/waiting_threads.json

Every run is a process of its own that generates with the bundled reference model, alone and beside one busy
process for every core it may use. Runs of all settings alternate, so that a drift of the machine falls on all
of them. The setting is the environment variable GOMP_SPINCOUNT of GNU's OpenMP, which torch uses on Linux;
`default` is OpenMP's own choice.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from scripts.bench_setup import markdown, write_results

SETTINGS = ("default", "3000", "0")
CHILD = """
import json, sys
import torch
import compress

steps = int(sys.argv[1])
llm = compress.load("builtin://reference", device="cpu")
params = compress.SamplingParams(max_tokens=steps, ignore_eos=True)
times = [llm.generate("import ", params)[0].timing.tpot_ms for _ in range(4)]
print(json.dumps({"threads": torch.get_num_threads(), "tpot_ms": times[1:]}))
"""


def measure(setting: str, num_tokens: int) -> tuple[int, list[float]]:
    """Return the number of threads and the mean time of a decode step, in ms, of each generation of one
    process; the first generation does not count."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT"))}
    variables = kept if setting == "default" else {**kept, "GOMP_SPINCOUNT": setting}
    command = [sys.executable, "-c", CHILD, str(num_tokens)]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    return found["threads"], found["tpot_ms"]


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Keep `num_processes` processes computing while the block runs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="of a generation")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each setting and company")
    parser.add_argument("--commit", default=None, help="of the code that is measured")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    num_cores = len(os.sched_getaffinity(0))
    companies = {"none": 0, "busy": num_cores}
    times: dict[tuple[str, str], list[float]] = {
        place: [] for place in itertools.product(companies, SETTINGS)
    }
    num_threads = 0
    for _ in range(args.rounds):
        for company, setting in times:
            with busy(companies[company]):
                num_threads, found = measure(setting, args.tokens)
            times[company, setting] += found
    rows = [
        {
            "company": company,
            "spin_count": setting,
            "threads": num_threads,
            "tokens": args.tokens,
            "tpot_ms_p50": statistics.median(found),
            "tpot_ms_min": min(found),
            "tpot_ms_max": max(found),
        }
        for (company, setting), found in times.items()
    ]
    print(
        markdown(
            ["company", "spin count", "TPOT ms", "min", "max"],
            [
                [row["company"], row["spin_count"]]
                + [f"{row[name]:.2f}" for name in ("tpot_ms_p50", "tpot_ms_min", "tpot_ms_max")]
                for row in rows
            ],
        )
    )
    if args.out is not None:
        facts = {"model": "builtin://reference", "usable_cores": num_cores}
        write_results(args.out, rows, device=torch.device("cpu"), commit=args.commit, facts=facts)


if __name__ == "__main__":
    main()

"""How fast a few layers of every known shape run, and which of their ops references serve.

    python -m scripts.bench_shapes tests/golden/configs/*.json --out benchmarks/h200/shapes.json

The other benchmarks measure a whole model that somebody chose. This one looks for shapes that nobody looked
at: of all configs in the files it takes one of each kind (facts but no sizes, and the widths of heads), the
one whose size is nearest to 10 billion parameters, cuts it to its first layers, at least one of every kind
that it has where they fit, and its vocabulary to 8,192 tokens, and times steady decode steps and a prompt of
2,048 tokens. Weights are random. Shapes are prepared side by side, in processes of their own, because kernels
are compiled for each; they are timed one at a time, while the others wait. In the rows:

    step_ms_p50  a steady decode step of all requests, with _p10 and _p90, by graphs where the engine has them
    floor_ms     the bytes of that step, with the experts that are hit, at the read bandwidth of this run. A
                 step also has some 30 us that do not depend on layers
    ttft_ms_p50  the time to the first token of one prompt of `ttft_tokens`, fewer where a model has fewer
                 positions
    references   the ops of decode and of prefill that no other kernel serves
    refused      the sentence by which this build refuses the shape in this scheme
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from compress.errors import CompressError, UnsupportedArch
from compress.machine import measure_bandwidth
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.layer_shape import LayerShape
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from scripts.bench_moe import SpreadSource, experts_hit, step_bytes
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    schemes_of,
    write_results,
)
from scripts.step_profile import drain, queue, time_rounds

TYPICAL_PARAMS = 1e10
VOCAB = 8192
CONTEXT = 128
OUTPUT_TOKENS = 48
ROUNDS = 3
GROUPS = (128, 64, 32)
PREPARED_S = 240.0
MEASURED_S = 60.0
NO_TIME = "no time was left"


def kind(value: object) -> object:
    """Return `value` without its sizes: numbers are as good as one another, names and flags are not."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value).__name__, *(kind(getattr(value, field.name)) for field in fields)
    if isinstance(value, tuple):
        return tuple(sorted({repr(kind(each)) for each in value}))
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)


def kind_of_arch(arch: Arch) -> object:
    """Return what two shapes have in common that run through the same code."""
    plain = dataclasses.replace(arch, family="", config={}, dtype="")
    return kind(plain), tuple(sorted({layer.head_dim for layer in arch.layers}))


def chosen(archs: dict[str, Arch]) -> dict[str, Arch]:
    """Return one shape of each kind."""

    def distance(name: str) -> float:
        return abs(math.log(archs[name].num_params / TYPICAL_PARAMS))

    best: dict[object, str] = {}
    for name in sorted(archs, key=distance):
        best.setdefault(kind_of_arch(archs[name]), name)
    return {name: archs[name] for name in sorted(best.values())}


def kind_of_layer(layer: LayerShape) -> LayerShape:
    """Return the layer without the index of the layer whose keys it reads."""
    return layer if layer.kv_source is None else dataclasses.replace(layer, kv_source=0)


def cut(arch: Arch, *, layers: int, params: float) -> Arch:
    """Return `arch` with few layers: the first ones, at least `layers` and one of each kind; where these have
    more than `params` parameters, one of each kind alone; where that is too much or no model, the first ones
    that fit, and the smallest model if none does.
    """
    kinds = [kind_of_layer(layer) for layer in arch.layers]
    firsts = sorted(kinds.index(each) for each in set(kinds))
    prefixes = [range(count) for count in range(min(max(firsts[-1] + 1, layers), arch.num_layers), 0, -1)]
    choices = [each for each in prefixes if len(each) > firsts[-1]] + [firsts] + prefixes
    models = [few for few in (_with_layers(arch, choice) for choice in choices) if few is not None]
    smallest = min(models, key=lambda few: few.num_linear_params)
    return next((few for few in models if few.num_linear_params <= params), smallest)


def _with_layers(arch: Arch, indices: Sequence[int]) -> Arch | None:
    """Return `arch` with these layers, or None if they are not a model without the others."""
    try:
        few = dataclasses.replace(arch, layers=tuple(arch.layers[idx] for idx in indices))
    except UnsupportedArch:
        return None
    try:
        return dataclasses.replace(few, vocab_size=min(arch.vocab_size, VOCAB), head_vocab=0)
    except UnsupportedArch:  # it has tables of all tokens in its layers
        return few


def scheme_for(arch: Arch, scheme: str) -> str:
    """Return `scheme`, of `W4A16` the one with the largest group that divides the inputs of all linears."""
    if scheme != "W4A16":
        return scheme
    widths = {
        layer.linear_shape(name, arch.hidden_size)[1] for layer in arch.layers for name in layer.linears
    }
    group = next((size for size in GROUPS if all(width % size == 0 for width in widths)), GROUPS[-1])
    return f"{scheme}_G{group}"


class Shape:
    """An engine of the first layers of a shape."""

    def __init__(self, arch: Arch, scheme: str, args: argparse.Namespace) -> None:
        self.args = args
        self.ttft_tokens = min(args.ttft_tokens, arch.max_position - OUTPUT_TOKENS)
        self.device = pick_device()
        dtype = model_dtype(self.device)
        source = SpreadSource(arch, device=self.device, dtype=dtype, scheme=schemes_of(scheme)[0])
        config = EngineConfig(
            dtype=dtype,
            max_batch_size=max(args.batch_sizes),
            max_model_len=max(self.ttft_tokens, CONTEXT) + OUTPUT_TOKENS,
            max_step_tokens=max(self.ttft_tokens, CONTEXT * max(args.batch_sizes)),
        )
        self.engine = Engine(source, device=self.device, config=config)
        self.hits = (
            experts_hit(self.engine, args.batch_sizes, CONTEXT)
            if arch.has_experts
            else dict.fromkeys(args.batch_sizes, 0.0)
        )
        self.measure(rounds=1)

    def measure(self, *, rounds: int = ROUNDS) -> list[dict[str, Any]]:
        """Return a row for each batch size, the first with the time to the first token."""
        rows = []
        for batch_size in self.args.batch_sizes:
            times = time_rounds(self.engine, batch_size, CONTEXT, OUTPUT_TOKENS, rounds=rounds)
            num_bytes = step_bytes(
                self.engine, self.hits[batch_size], batch_size, CONTEXT + OUTPUT_TOKENS // 2
            )
            rows.append(
                {"batch_size": batch_size}
                | {name: value for name, value in times.items() if name.startswith("step")}
                | {"step_bytes": num_bytes, "experts_hit": self.hits[batch_size]}
            )
        rows[0]["ttft_tokens"] = self.ttft_tokens
        rows[0]["ttft_ms_p50"] = statistics.median(self._ttft() for _ in range(2 * rounds - 1)) * 1e3
        return rows

    def _ttft(self) -> float:
        queue(self.engine, 1, self.ttft_tokens, 1)
        begin_s = time.perf_counter()
        drain(self.engine)
        return time.perf_counter() - begin_s

    def facts(self) -> dict[str, Any]:
        report = self.engine.kernel_report()
        slow = {(row["phase"], row["op"]) for row in report if "reference" in row["kernel"]}
        return {"references": sorted(f"{op} ({phase})" for phase, op in slow)}


def serve(link: Connection, arch: Arch, scheme: str, args: argparse.Namespace) -> None:
    """Prepare a shape, say so, and measure it when told to."""
    try:
        shape = Shape(arch, scheme, args)
        link.send({})
        link.recv()
        facts = shape.facts()
        link.send([row | facts for row in shape.measure()])
    except CompressError as error:
        link.send({"refused": str(error)})
    except Exception as error:  # noqa: BLE001 - what stops one shape is its result, others still run
        link.send({"refused": f"{type(error).__name__}: {str(error)[:400]}"})


class Wave:
    """Shapes that are prepared side by side and then measured one at a time."""

    def __init__(self, shapes: Sequence[tuple[str, Arch, str]], args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.links: dict[Connection, dict[str, Any]] = {}
        self.processes: dict[Connection, Any] = {}
        for name, arch, scheme in shapes:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, arch, scheme, args), daemon=True)
            process.start()
            theirs.close()
            self.processes[ours] = process
            self.links[ours] = {
                "shape": name,
                "family": arch.family,
                "scheme": scheme,
                "num_layers": arch.num_layers,
            }

    def measured(self) -> list[dict[str, Any]]:
        rows = []
        ready = []
        waiting = list(self.links)
        until_s = time.monotonic() + PREPARED_S
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            for link in wait(waiting, left_s):
                assert isinstance(link, Connection)
                waiting.remove(link)
                answer = _received(link)
                if answer:
                    rows.append(self.links[link] | answer)
                else:
                    ready.append(link)
        rows += [self.links[link] | {"refused": "not ready in time"} for link in waiting]
        for link in waiting:
            self._end(link)
        for link in ready:
            answer = self._answer(link)
            rows += [self.links[link] | row for row in (answer if isinstance(answer, list) else [answer])]
            self._end(link)
        return rows

    def _answer(self, link: Connection) -> Any:
        """Let a shape be measured, and return its rows or why there are none."""
        try:
            link.send("now")
        except OSError:
            return {"refused": "the process ended"}
        return _received(link) if link.poll(MEASURED_S) else {"refused": "not measured in time"}

    def _end(self, link: Connection) -> None:
        """End the process of a shape, so that it takes no time from the next one."""
        process = self.processes[link]
        process.join(timeout=1)
        process.kill()
        process.join()


def _received(link: Connection) -> Any:
    try:
        return link.recv()
    except (EOFError, OSError):
        return {"refused": "the process ended"}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the rows, the furthest from the bytes of their layers first, and below it a line for
    each shape that was refused."""
    done = sorted(
        (row for row in rows if "refused" not in row), key=lambda row: row["floor_ms"] / row["step_ms_p50"]
    )
    header = [
        "shape",
        "scheme",
        "layers",
        "batch",
        "step ms",
        "x floor",
        "us a layer",
        "TTFT ms",
        "references",
    ]
    body = [
        [
            row["shape"][:48],
            row["scheme"],
            str(row["num_layers"]),
            str(row["batch_size"]),
            f"{row['step_ms_p50']:.3f}",
            f"{row['step_ms_p50'] / row['floor_ms']:.2f}",
            f"{row['step_ms_p50'] / row['num_layers'] * 1e3:.0f}",
            f"{row['ttft_ms_p50']:.2f}" if "ttft_ms_p50" in row else "",
            ", ".join(row["references"]),
        ]
        for row in done
    ]
    refused = [f"{row['shape']} ({row['scheme']}): {row['refused']}" for row in rows if "refused" in row]
    return "\n\n".join([markdown(header, body), *refused])


def read_archs(paths: Sequence[Path]) -> dict[str, Arch]:
    """Return the shapes of all configs that are read, by name, of files with lists of rows."""
    archs = {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8")):
            if "refused" not in row:
                archs[row["name"]] = family_of(row["config"]).read_config(row["config"])
    return archs


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("configs", nargs="*", type=Path, help="files with lists of {name, config}")
    parser.add_argument(
        "--schemes", nargs="+", default=["W4A16"], help="W4A16: with the largest group that fits"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--ttft-tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--params", type=float, default=14e9, help="of the layers of a shape, at most")
    parser.add_argument("--jobs", type=int, default=12, help="shapes that are prepared side by side")
    parser.add_argument("--only", nargs="+", default=None, help="shapes whose names hold one of these")
    parser.add_argument(
        "--keep",
        type=Path,
        default=None,
        help="keep the rows of other shapes and schemes of this result file",
    )
    parser.add_argument("--seconds", type=float, default=None, help="begin no further shapes after so long")
    args = parse_arguments(parser, lambda document: tables(document["rows"]))
    started_s = time.monotonic()
    device = pick_device()
    bandwidth = measure_bandwidth(device, size_bytes=1 << 26 if device.type == "cpu" else None)
    archs = chosen(read_archs(args.configs))
    if args.only:
        archs = {name: arch for name, arch in archs.items() if any(part in name for part in args.only)}
    shapes = []
    for name, arch in archs.items():
        few = cut(arch, layers=args.layers, params=args.params)
        shapes += [(name, few, scheme_for(few, scheme)) for scheme in args.schemes]
    rows: list[dict[str, Any]] = []
    try:
        for begin in range(0, len(shapes), args.jobs):
            if args.seconds and time.monotonic() - started_s > args.seconds:
                rows += [
                    {"shape": name, "family": arch.family, "scheme": scheme, "refused": NO_TIME}
                    for name, arch, scheme in shapes[begin:]
                ]
                break
            for row in Wave(shapes[begin : begin + args.jobs], args).measured():
                floor = {} if "refused" in row else {"floor_ms": row["step_bytes"] / bandwidth * 1e3}
                rows.append(row | floor)
            print(f"{len(rows)} rows, {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    finally:  # what was measured before a failure is kept
        document = write_results(
            None, rows, device=device, commit=args.commit, facts={"bandwidth_bytes_per_s": bandwidth}
        )
        if args.out is not None:
            write_together(args.out, document, args.keep)
    print(tables(rows))


def write_together(out: Path, document: dict[str, Any], kept: Path | None) -> None:
    """Write the document with the rows of other shapes and schemes of the file `kept`, each with the commit,
    the command and the date of its run."""
    older = [] if kept is None else _with_run(json.loads(kept.read_text(encoding="utf-8")))
    newer = _with_run(document)
    measured = {(row["shape"], row["scheme"]) for row in newer if row.get("refused") != NO_TIME}
    rows = [row for row in older if (row["shape"], row["scheme"]) not in measured]
    had = {(row["shape"], row["scheme"]) for row in rows}
    rows += [row for row in newer if (row["shape"], row["scheme"]) not in had]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document | {"rows": rows}, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _with_run(document: dict[str, Any]) -> list[dict[str, Any]]:
    run = {name: document[name] for name in ("commit", "command", "date")}
    return [run | row for row in document["rows"]]


if __name__ == "__main__":
    main()

"""`compress bench`: artifacts and servers under load, all on the same requests."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.load_profile import check_directory, profile_targets, profile_text
from compress.cli.load_targets import check_lengths, engine_target, shapes_of, target_names, url_target
from compress.cli.output import JsonFlag, emit, note, progress, table
from compress.cli.run import DeviceOption, OfflineOption
from compress.errors import CompressError, StorageError, UsageError

if TYPE_CHECKING:
    from compress.validate.load.arrivals import Traffic
    from compress.validate.load.compare import LoadRow
    from compress.validate.load.sweep import Sweep
    from compress.validate.load.target import LoadTarget

_OBJECTIVE = re.compile(r"(ttft|tpot|e2el):[\d.]+")
_SMALL_VOCAB = 1000
"""Token ids below this number are in the vocabulary of every model, as far as a server's is not known."""
_MAX_COUNT = 1 << 20


def bench(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Artifacts or models (a directory, a registry reference, hf://, builtin://reference), and "
            "URLs of servers such as http://localhost:8000/v1.",
            show_default=False,
        ),
    ],
    request_rate: Annotated[
        list[str] | None,
        typer.Option(
            "--request-rate",
            help="Requests a second that arrive; several, such as 1,2,4, are a sweep; else all at once.",
            show_default=False,
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="Of arrivals: 1 is Poisson, less is burstier.")
    ] = 1.0,
    max_concurrency: Annotated[
        list[str] | None,
        typer.Option(
            "--max-concurrency",
            help="Unfinished requests at most; without a rate so many clients, of which several, such as "
            "1,8,64, are a sweep.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts", min=1, max=_MAX_COUNT, help="Requests; 64, or all of a file.", show_default=False
        ),
    ] = None,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Median tokens of prompts.")] = 256,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Median tokens of outputs.")] = 64,
    length_spread: Annotated[
        float, typer.Option("--length-spread", min=0, help="Deviation of the logarithm of lengths; 0: fixed.")
    ] = 0.0,
    max_len: Annotated[
        int | None,
        typer.Option(
            "--max-len", min=2, help="Longest prompt and longest output drawn; 8 medians.", show_default=False
        ),
    ] = None,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=0, help="First tokens that all prompts share.")
    ] = 0,
    workload: Annotated[
        Path | None,
        typer.Option("--workload", help="Serve the requests of a workload file.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Serve the arrivals and lengths of a trace.", show_default=False),
    ] = None,
    rate_scale: Annotated[
        list[str] | None,
        typer.Option("--rate-scale", help="Of a trace: times as fast as recorded.", show_default=False),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            help="Limits of a good request in ms: ttft:200 tpot:50 e2el:5000.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Of batching: continuous, static, dynamic; several are compared.",
            show_default=False,
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", min=1, help="Requests that an engine here runs at once.")
    ] = 64,
    max_step_tokens: Annotated[
        int, typer.Option("--max-step-tokens", min=1, help="Tokens of a step of an engine here.")
    ] = 2048,
    itl_target: Annotated[
        float | None,
        typer.Option(
            "--itl-target",
            help="Gap in ms that prompts must not stretch, for engines here.",
            show_default=False,
        ),
    ] = None,
    kv_format: Annotated[
        str | None,
        typer.Option("--kv-format", help="KV cache of engines here: DENSE, ...", show_default=False),
    ] = None,
    kv_cache_bytes: Annotated[
        int | None, typer.Option("--kv-cache-bytes", min=1, help="Size of that cache.", show_default=False)
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option("--prefix-cache", help="Engines here share the keys and values of common prefixes."),
    ] = False,
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative",
            help="Of engines here: ngram, draft, mtp, or a draft or assistant.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Model that servers are asked for; else their first.", show_default=False
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=21,
            help="Draw token ids below this; by default the engines', or 1,000 for servers alone.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Of servers.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=1000, help="Runs of each load.")] = 1,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", min=0, help="Requests before them that are not counted.")
    ] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides requests and arrivals.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="New HTML page with table and pictures.", show_default=False),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="New directory of traces; shows which ops engines here spend their time on, and why.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    offline: OfflineOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve requests under load and measure times, throughput, goodput and the use of the cache."""
    import torch

    from compress.artifact.atomic import write_atomic
    from compress.machine import environment_facts
    from compress.pipeline import pick_device
    from compress.validate.load.document import load_document
    from compress.validate.load.lengths import LengthLaw
    from compress.validate.load.objectives import parse_objectives
    from compress.validate.load.sweep import file_sweep, random_sweep, trace_sweep

    named = [each for each in targets if not _OBJECTIVE.fullmatch(each)]
    objectives = parse_objectives([*(goodput or ()), *(each for each in targets if each not in named)])
    places = target_names(named, policy or [])
    if trace is not None and (workload is not None or request_rate):
        raise UsageError("--trace brings lengths and arrivals; leave --workload and --request-rate out.")
    if rate_scale and trace is None:
        raise UsageError("--rate-scale scales the rate of a --trace; without one, give --request-rate.")
    if out is not None and out.exists():
        raise UsageError(f"{out} exists; name a new page with --out.")
    if profile is not None:
        check_directory(profile, has_urls=any(each.is_url for each in places))
    traffics = _traffics(_numbers(request_rate, "--request-rate"), max_concurrency, burstiness)
    shapes = shapes_of(places, offline=offline)
    known_vocab = vocab_size or min((each.vocab_size for each in shapes.values()), default=_SMALL_VOCAB)
    if workload is not None:
        sweep = file_sweep(workload, traffics, num_requests=num_prompts, seed=seed)
    elif trace is not None:
        if len(traffics) > 1:
            raise UsageError("--trace takes one --max-concurrency; several --rate-scale are a sweep.")
        sweep = trace_sweep(
            trace,
            _numbers(rate_scale, "--rate-scale") or [1.0],
            vocab_size=known_vocab,
            seed=seed,
            num_requests=num_prompts,
            max_concurrency=traffics[0].max_concurrency,
        )
    else:
        sweep = random_sweep(
            traffics,
            num_requests=num_prompts or 64,
            prompt=LengthLaw(input_len, length_spread, 1, max_len or 8 * input_len),
            output=LengthLaw(output_len, length_spread, 1, max_len or 8 * output_len),
            vocab_size=known_vocab,
            seed=seed,
            prefix_tokens=prefix_tokens,
        )
    check_lengths(shapes, sweep.longest)
    options = {
        "max_batch_size": max_batch_size,
        "max_step_tokens": max_step_tokens,
        "max_model_len": sweep.longest,
        "kv_format": _kv_format(kv_format),
        "kv_cache_bytes": kv_cache_bytes,
        "prefix_cache": prefix_cache,
        "itl_target_ms": itl_target,
    }
    loaded = {
        each.name: url_target(each, model, api_key)
        if each.is_url
        else engine_target(each, options, device=device, speculative=speculative, offline=offline)
        for each in places
    }
    rows = _measure(loaded, sweep, objectives, repeats=repeats, num_warmups=num_warmups)
    document = load_document(
        rows, seed=seed, environment=environment_facts(torch.device(pick_device(device)))
    )
    if out is not None:
        from compress.validate.load.page import render_load_page

        write_atomic(out, render_load_page(document).encode())
        document["page"] = str(out)
        note(f"page {out}")
    shown = _table(document["rows"])
    if profile is not None:
        document["profiles"] = profile_targets(loaded, sweep.loads[0](0), profile)
        shown = f"{shown}\n\n{profile_text(document['profiles'])}"
    failure = _failure(rows)
    for warning in document["warnings"]:
        note(f"warning: {warning}")
    emit(document, shown, as_json=as_json, failure=failure)
    if failure is not None:
        raise typer.Exit(failure.exit_code)


def _measure(
    targets: "dict[str, LoadTarget]", sweep: "Sweep", objectives: Any, *, repeats: int, num_warmups: int
) -> "list[LoadRow]":
    """Return one row a load and target, loads in order."""
    from compress.validate.load.compare import compare_load

    rows: list[LoadRow] = []
    total = len(sweep.loads) * repeats * len(targets)
    with progress("bench") as shown:
        for idx, load in enumerate(sweep.loads):
            done = idx * repeats * len(targets)

            def begun(name: str, repeat: int, done: int = done, idx: int = idx) -> None:
                where = f"load {idx + 1} of {len(sweep.loads)}, repeat {repeat + 1}, {name}"
                shown.update(done + repeat * len(targets), total, where)

            rows += compare_load(
                targets,
                load,
                repeats=repeats,
                objectives=objectives,
                warmup=sweep.warmup(num_warmups) if idx == 0 else None,
                progress=begun,
            )
        shown.update(total, total, "done")
    return rows


def _traffics(
    rates: Sequence[float], concurrency: Sequence[str] | None, burstiness: float
) -> "list[Traffic]":
    """Return one arrival process a rate, or one a number of clients."""
    from compress.validate.load.arrivals import Traffic

    limits = [round(each) for each in _numbers(concurrency, "--max-concurrency", whole=True)]
    if rates and len(limits) > 1:
        raise UsageError(
            "--request-rate takes one --max-concurrency; several of them are a sweep without a rate."
        )
    if rates:
        return [Traffic(each, burstiness, limits[0] if limits else None) for each in rates]
    return [Traffic(max_concurrency=each) for each in limits] or [Traffic()]


def _numbers(words: Sequence[str] | None, option: str, *, whole: bool = False) -> list[float]:
    """Return the numbers of an option that may be repeated or hold several, apart by commas."""
    try:
        found = [float(each) for word in words or () for each in word.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"{option} {' '.join(words or ())}: write numbers, such as 1,2,4.") from None
    if any(not each > 0 for each in found):
        raise UsageError(f"{option} {' '.join(words or ())}: numbers must be above zero.")
    if whole and any(not each.is_integer() for each in found):
        raise UsageError(f"{option} {' '.join(words or ())}: numbers must be whole.")
    return found


def _kv_format(name: str | None) -> str | None:
    from compress.stages.validate.spec import kv_format_named

    return kv_format_named(name)


def _failure(rows: "list[LoadRow]") -> CompressError | None:
    """Return an error where a target answered nothing at all."""
    silent = [each for each in rows if not any(repeat["completed"] for repeat in each.repeats)]
    if not silent:
        return None
    reason = silent[0].median("errors")[0]
    return StorageError(f"no request to {silent[0].target} completed: {reason}", where=silent[0].target)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    from compress.validate.display import number, percent
    from compress.validate.load.page import load_text

    head = [
        "target",
        "load",
        "req/s",
        "good/s",
        "tokens/s",
        "TTFT p50",
        "p99 ms",
        "ITL p50",
        "p99 ms",
        "E2EL p50",
    ]
    body = [
        [
            row["target"],
            load_text(row),
            number(row["request_throughput"]),
            number(row["request_goodput"]),
            number(row["output_throughput"]),
            *(number(row[key]) for key in ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")),
            number(row["median_e2el_ms"]),
            "–" if row.get("kv_utilization") is None else percent(row["kv_utilization"], 0),
            str(row["failed"]),
        ]
        for row in rows
    ]
    return table([[*head, "KV use", "failed"], *body], right=range(2, len(head) + 2))

"""Tables of speculative decoding: its cost under forced acceptance, what trained proposers keep, and equality
of tokens.
"""

from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import Row, Run, result_file

PROPOSERS = {
    "draft": "draft, some layers of the model",
    "eagle3": "EAGLE-3 head",
    "draft_undistilled": "the draft's layers, untrained",
    "ngram": "n-grams",
    "draft_model": "draft model",
    "mtp": "MTP head",
    "assistant": "assistant",
}


def cost_run() -> Run:
    """Return the run with forced acceptance."""
    return result_file("h200/speculative_cost").run


def mtp_run(shape: str) -> Run:
    """Return the run of an MTP head over a model of a shape, with forced acceptance."""
    return result_file(f"h200/speculative_cost_{shape}").run


def cost() -> str:
    """Return the table of times a token under forced acceptance."""
    run = cost_run()
    rates = sorted({row["forced_rate"] for row in run.rows})
    header = [
        "proposer",
        "made of",
        "drafts of a step",
        "verification",
        *(f"{100 * rate:.0f} % kept" for rate in rates),
        "off the prediction",
    ]
    rows = []
    for proposer in dict.fromkeys(row["proposer"] for row in run.rows):
        found = [run.one(proposer=proposer, forced_rate=rate) for rate in rates]
        rows.append(
            [
                PROPOSERS[proposer],
                found[0]["made_of"],
                f"{fixed(found[0]['k_draft_ms'], 2)} ms",
                f"{fixed(found[0]['verify_ms'], 2)} ms",
                *(f"{fixed(row['tpot_ms_p50'], 2)} ms ({fixed(row['speedup'], 2)} x)" for row in found),
                f"at most {100 * max(map(_off, found)):.1f} %",
            ]
        )
    return table(header, rows, align="llrr" + "r" * (len(rates) + 1))


def draft_runs() -> list[Run]:
    """Return the runs that train proposers and serve with them, the file's own first."""
    return [run for run in result_file("speculation").runs if not run.where(experiment="bitwise")]


def temperatures(run: Run) -> list[float]:
    """Return the temperatures of a run, drawn tokens first."""
    return sorted({row["temperature"] for row in run.rows}, reverse=True)


def kept(run: Run, temperature: float) -> str:
    """Return the table of tokens a step by proposer and category."""
    rows = run.where(temperature=temperature)
    categories = list(dict.fromkeys(row["category"] for row in rows))
    best = {
        each: max(row["acceptance_length"] for row in rows if row["category"] == each) for each in categories
    }
    header = ["proposer", "trained on", *(f"{each}: tokens a step" for each in categories)]
    header += [f"{each}: proposals kept" for each in categories]
    body = []
    for name in [name for name in PROPOSERS if any(row["proposer"] == name for row in rows)]:
        found = [run.one(proposer=name, category=each, temperature=temperature) for each in categories]
        trained = found[0].get("tokens")
        body.append(
            [
                PROPOSERS[name],
                f"{trained / 1e6:.0f} M tokens" if trained else "",
                *(
                    bold(
                        fixed(row["acceptance_length"], 2), row["acceptance_length"] == best[row["category"]]
                    )
                    for row in found
                ),
                *(f"{100 * row['acceptance_rate']:.0f} %" for row in found),
            ]
        )
    return table(header, body, align="ll" + "r" * (2 * len(categories)))


def slowest_and_fastest() -> tuple[float, float]:
    """Return the least and the most time a token with a proposer, as multiples of plain decoding."""
    slower = [1 / row["speedup"] for run in draft_runs() for row in run.rows]
    return min(slower), max(slower)


def bitwise_runs() -> list[Run]:
    """Return the runs that compare greedy tokens with those of plain decoding."""
    return [run for run in result_file("speculation").runs if run.where(experiment="bitwise")]


def num_compared() -> int:
    """Return how many continuations were compared with plain decoding."""
    return sum(row["num_requests"] for run in bitwise_runs() for row in run.rows)


def num_equal() -> int:
    """Return how many of them were equal."""
    return sum(row["num_equal"] for run in bitwise_runs() for row in run.rows)


def bitwise(run: Run) -> str:
    """Return the table of continuations that are equal, by weights and cache."""
    header = ["weights", "KV cache", "batch", "proposers", "continuations", "equal"]
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in run.where(experiment="bitwise"):
        groups.setdefault((row["scheme"], row["kv"], row["batch_size"]), []).append(row)
    rows = [
        [
            f"`{'BF16' if scheme == 'dense' else scheme}`",
            f"`{kv}`",
            batch,
            ", ".join(dict.fromkeys(row["proposer"] for row in found)),
            fixed(sum(row["num_requests"] for row in found)),
            fixed(sum(row["num_equal"] for row in found)),
        ]
        for (scheme, kv, batch), found in groups.items()
    ]
    return table(header, rows, align="llrlrr")


def _off(row: Row) -> float:
    return float(abs(row["tpot_ms_p50"] / row["predicted_ms"] - 1))

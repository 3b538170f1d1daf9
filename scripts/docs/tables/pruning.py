"""Tables of pruning: what each score keeps, what training brings back, what smaller models gain in time."""

from statistics import mean

from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import Row, Run, result_file


def scores_run() -> Run:
    """Return the run that compares scores and compensations."""
    return result_file("pruning").run


def methods() -> dict[str, list[Row]]:
    """Return the rows of each method, one row a seed, the least accurate method first."""
    found: dict[str, list[Row]] = {}
    for row in scores_run().rows:
        found.setdefault(row["method"], []).append(row)
    return dict(sorted(found.items(), key=lambda item: -mean(row["kl_mean"] for row in item[1])))


def kl_of(method: str) -> float:
    """Return the mean KL of a method over its seeds."""
    return mean(row["kl_mean"] for row in methods()[method])


def scores() -> str:
    """Return the table of scores and compensations."""
    header = ["`score`", "`compensate`", "mean KL", "least .. most of seeds", "bits per byte", "top-1"]
    rows = []
    found = methods()
    for name, seeds in found.items():
        score, _, compensate = name.partition("+")
        kls = [row["kl_mean"] for row in seeds]
        rows.append(
            [
                f"`{score}`",
                f"`{compensate or 'none'}`",
                bold(fixed(mean(kls), 3), name == list(found)[-1]),
                f"{fixed(min(kls), 3)} .. {fixed(max(kls), 3)}",
                fixed(mean(row["bpb_pruned"] for row in seeds), 3),
                fixed(mean(row["top1"] for row in seeds), 3),
            ]
        )
    return table(header, rows, align="llrrrr")


def recovery_runs() -> list[Run]:
    """Return the runs that train pruned models, one table each."""
    return result_file("h200/recovery").runs


def recovery(run: Run) -> str:
    """Return the table of pruned models before and after training."""
    header = [
        "heads / KV heads / FFN before",
        "after",
        "parameters kept",
        "source",
        "pruned",
        "recovered",
        "recovered / source",
        "from scratch",
    ]
    rows = [
        [
            _shape(row["before"]),
            _shape(row["after"]),
            fixed(row["after"]["params"] / row["before"]["params"], 2),
            fixed(row["bpb_source"], 4),
            fixed(row["bpb_pruned"], 4),
            bold(fixed(row["bpb_recovered"], 4)),
            fixed(row["bpb_recovered"] / row["bpb_source"], 4),
            fixed(row["bpb_scratch"], 4),
        ]
        for row in run.rows
    ]
    return table(header, rows, align="llrrrrrr")


def speed_run() -> Run:
    """Return the run that times pruned shapes."""
    return result_file("h200/pruned_speed").run


def speed() -> str:
    """Return the table of decode times of pruned shapes."""
    header = ["weights", "variant", "heads / FFN", "ms a token", "speed-up by bytes", "measured"]
    names = {"source": "as it is", "pruned": "pruned", "pruned, as mistral": "pruned, `as_mistral: true`"}
    rows = [
        [
            f"`{'BF16' if row['scheme'] == 'dense' else row['scheme']}`",
            names.get(row["variant"], row["variant"]),
            f"{row['heads']} / {row['ffn']:,}",
            fixed(row["tpot_ms"], 2),
            "" if row["variant"] == "source" else fixed(row["bytes_speedup"], 2),
            "" if row["variant"] == "source" else bold(fixed(row["speedup"], 2)),
        ]
        for row in speed_run().rows
    ]
    return table(header, rows, align="lllrrr")


def training_run() -> Run:
    """Return the run that times distillation."""
    return result_file("h200/distill").run


def training() -> str:
    """Return the table of training throughput."""
    header = [
        "student",
        "teacher",
        "windows a step",
        "at once",
        "`compile`",
        "tokens a second",
        "share of peak arithmetic",
        "peak memory",
    ]
    rows = [
        [
            row["student"],
            row["teacher"],
            f"{row['batch_size']} x {row['seq_len']:,}",
            row["micro_batch_size"],
            "on" if row["compile"] else "off",
            bold(fixed(row["tokens_per_s"]), row["tokens_per_s"] == best_throughput()),
            f"{100 * row['mfu']:.0f} %",
            f"{row['peak_device_bytes'] / 1e9:.0f} GB",
        ]
        for row in training_run().rows
    ]
    return table(header, rows, align="lllrlrrr")


def best_throughput() -> float:
    """Return the most tokens a second of any row."""
    return max(row["tokens_per_s"] for row in training_run().rows)


def _shape(facts: Row) -> str:
    return f"{facts['heads']} / {facts['kv_heads']} / {facts['ffn']:,}"

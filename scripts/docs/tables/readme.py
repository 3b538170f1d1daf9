"""The two rows of README: the best accuracy in four bits, and the fastest token."""

from scripts.docs.markdown import signed_percent, table
from scripts.docs.tables import performance, quality


def best() -> str:
    """Return the table of the most accurate method and of the fastest scheme, with links to the tables."""
    accurate = min(
        ("rtn", "gptq+search", "balanced", "best"), key=lambda name: quality.average(name)["kl_mean"]
    )
    row = quality.average(accurate)
    plain = quality.average("rtn")
    run = performance.runtime_run()
    batch = min(each["batch_size"] for each in run.rows)
    names = dict.fromkeys(each["scheme"] for each in run.rows)
    fastest = min(names, key=lambda name: performance.tpot(name, batch))
    rows = [
        [
            f"[accuracy](docs/results/quality.md): the bundled model, `{quality.FOUR_BIT}`, "
            f"`{quality.recipe_text(quality.METHODS[accurate])}`",
            f"perplexity {signed_percent(row['ppl_ratio'])}, mean KL {row['kl_mean']:.4f}",
            f"plain rounding {signed_percent(plain['ppl_ratio'])}, {plain['kl_mean']:.4f}",
        ],
        [
            f"[speed](docs/results/performance.md): {run.rows[0]['shape']}, one request, "
            f"{run.facts['device']}, {performance.scheme_text(fastest)}",
            f"{performance.tpot(fastest, batch):.2f} ms a token",
            f"16 bits {performance.tpot('BF16', batch):.2f} ms: {performance.speedup(fastest, batch):.2f} x",
        ],
    ]
    return table(["", "measured", "for comparison"], rows)

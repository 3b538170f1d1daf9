"""Whether speculation pays: the measured speed, the speed that its parts predict, and the advice that
follows.

t = (k t_draft + t_verify) / acceptance length          time of a token (arXiv 2211.17192)
cost of a step = (k t_draft + t_verify) / t_plain       it pays where that is less than the acceptance length
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compress.validate.stats import Estimate


@dataclass(frozen=True)
class SpeedRow:
    """One proposer, temperature and batch size; times in ms, of a token, of one draft pass, and of
    verification.

    `num_equal` of `num_requests` had the tokens of plain decoding; None where the rule promises their
    distribution only. Where `predicted_speedup` is None nothing is predicted: a lookup does not always
    propose. `unstable`: other work took so much processor time that the speed-up proves nothing;
    `instability` has the words.
    """

    proposer: str
    temperature: float
    batch_size: int
    num_requests: int
    num_equal: int | None
    tpot_ms_plain: float
    tpot_ms: float
    speedup: Estimate
    acceptance_length: float
    draft_ms: float
    verify_ms: float
    draft_frac: float
    predicted_speedup: float | None = None
    best_k: int | None = None
    best_k_speedup: float | None = None
    advice: str | None = None
    cpu_lost_frac: float | None = None
    unstable: bool = False
    instability: str = ""


def predicted(row: SpeedRow, rates: Sequence[float]) -> SpeedRow:
    """Return the row with the speed-up over plain decoding that its times predict, for this k and for the
    best k up to it, and with advice.

    `rates` are the acceptance rates by position; their number is k. The time of verifying fewer tokens is
    interpolated between a plain step and that of k.
    """
    k = len(rates)
    plain_ms = row.tpot_ms_plain
    costs_ms = {j: j * row.draft_ms + plain_ms + (row.verify_ms - plain_ms) * j / k for j in range(1, k + 1)}
    speedups = {j: plain_ms * (1 + sum(rates[:j])) / cost_ms for j, cost_ms in costs_ms.items()}
    best_k = max(speedups, key=lambda j: speedups[j])
    promised = plain_ms * row.acceptance_length / costs_ms[k]
    row = replace(row, predicted_speedup=promised, best_k=best_k, best_k_speedup=speedups[best_k])
    return replace(row, advice=advise(row, k))


def advise(row: SpeedRow, k: int) -> str:
    """Return one or two sentences that follow from a predicted row."""
    assert row.predicted_speedup is not None
    assert row.best_k_speedup is not None
    better = f" k = {row.best_k} is predicted to give {row.best_k_speedup:.2f}." if row.best_k != k else ""
    if row.speedup.value >= 1:
        more = better if row.best_k_speedup > 1.03 * row.predicted_speedup else ""
        return f"Speculation pays at batch {row.batch_size}: {row.speedup.value:.2f} times as fast.{more}"
    verify = row.verify_ms / row.tpot_ms_plain
    draft = k * row.draft_ms / row.tpot_ms_plain
    length = row.acceptance_length
    cost = verify + draft
    if cost >= k + 1:
        larger = "verification" if verify >= draft else "the draft"
        why = f"A step costs {cost:.1f} plain ones, most of it {larger}, and gives {k + 1} tokens at best."
        why += " Speculate at smaller batches." if row.batch_size > 1 and verify >= draft else ""
    elif verify >= length:
        why = (
            f"Verification alone costs {verify:.2f} plain steps and {length:.2f} tokens come out, so that "
            "no faster draft helps: it "
            f"takes an acceptance length above {cost:.2f}."
        )
    elif cost >= length:
        limit_ms = (length - verify) * row.tpot_ms_plain / k
        why = (
            f"A step costs {cost:.2f} plain ones and {length:.2f} tokens come out: it takes an acceptance "
            f"length above {cost:.2f}, or a "
            f"draft pass under {limit_ms:.2g} ms instead of {row.draft_ms:.2g}."
        )
    else:
        why = (
            f"Its times predict {row.predicted_speedup:.2f}: the machine was disturbed, or the host is the "
            "limit. "
            "Measure again."
        )
    more = better if row.best_k_speedup > 1 else ""
    slower = f"Speculation does not pay at batch {row.batch_size}: {row.speedup.value:.2f} times as fast."
    return f"{slower} {why}{more}"

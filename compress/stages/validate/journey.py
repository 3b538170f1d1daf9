"""Size, accuracy and latency after each stage: one row for each model on the way from the source to the
candidate.

A pruned model that was then trained no longer exists when validation runs. Its row has its size, and the KL
that training measured when it began, on text of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.validate.accuracy import Accuracy
from compress.validate.latency import LatencyRow
from compress.validate.speculation import SpeculationEvidence

Json = dict[str, Any]
PRUNED = "KL at the start of training, on held-out windows of its own data"


@dataclass(frozen=True)
class Journey:
    """Measurements of the models on the way, and the rows that they make.

    `sizes` in bytes and `latency` are by model (`source`, `dense`, `candidate`), `accuracy` by pair of
    models; missing entries were not measured. `dense` are the weights that pruning and training left, where
    they did anything and quantization came after; `dense_facts` has their `pruning` and `distillation`.
    """

    dense_facts: Mapping[str, Any]
    quantized: bool
    sizes: Mapping[str, int]
    draft_bytes: int | None
    accuracy: Mapping[tuple[str, str], Accuracy]
    latency: Mapping[str, list[LatencyRow]]
    speculation: SpeculationEvidence | None

    def rows(self) -> list[Json]:
        """Return the rows; none where the candidate is the only model after the source."""
        whole = self.accuracy["source", "candidate"]
        rows = [self._row("source", "source", ppl=whole.ppl_source.value)]
        if "pruning" in self.dense_facts and "distillation" in self.dense_facts:
            rows.append({"stage": "pruned", "size_bytes": self.dense_facts["pruning"]["after"]["size_bytes"]})
            rows[-1] |= {"kl_source": self.dense_facts["distillation"]["before"]["kl"], "note": PRUNED}
        if self.quantized and "dense" in self.sizes:
            rows.append(self._row(self._dense_name, "dense", compared=True))
        rows.append(
            self._row("quantized" if self.quantized else self._dense_name, "candidate", compared=True)
        )
        if self.draft_bytes is not None:
            rows.append(self._with_draft(rows[-1]))
        return rows if len(rows) > 2 else []

    @property
    def _dense_name(self) -> str:
        if "distillation" in self.dense_facts:
            return "recovered" if "pruning" in self.dense_facts else "trained"
        return "pruned" if "pruning" in self.dense_facts else "dense"

    def _row(self, name: str, model: str, *, ppl: float | None = None, compared: bool = False) -> Json:
        row: Json = {"stage": name, "size_bytes": self.sizes[model]}
        if compared:
            accuracy = self.accuracy["source", model]
            ppl = accuracy.ppl_candidate.value
            row |= {"kl_source": accuracy.kl_mean.value, "top1": accuracy.top1.value}
        row["ppl"] = ppl
        if ("dense", model) in self.accuracy:
            row["kl_before"] = self.accuracy["dense", model].kl_mean.value
        if rows := self.latency.get(model):
            row |= {"batch_size": rows[0].batch_size, "tpot_ms": rows[0].tpot_ms_p50.value}
            row |= {"unstable": True} if rows[0].tpot_instability else {}
        return row

    def _with_draft(self, served: Json) -> Json:
        """Return the row of the candidate with its draft: the same model, so the same accuracy."""
        assert self.draft_bytes is not None
        row = {
            **served,
            "stage": "with draft",
            "size_bytes": served["size_bytes"] + self.draft_bytes,
            "kl_before": 0.0,
        }
        row |= {"tpot_ms": None, "note": "", "unstable": False}
        if self.speculation is not None:
            speed = self.speculation.speed[0]
            where = f"{speed.proposer}, on text, temperature {speed.temperature:g}"
            row |= {
                "batch_size": speed.batch_size,
                "tpot_ms": speed.tpot_ms,
                "note": f"{where}; {speed.tpot_ms_plain:.3g} ms without the draft",
                "unstable": speed.unstable,
            }
        return row

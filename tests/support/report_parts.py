"""A part of every kind for a report, with numbers that are easily told apart."""

from typing import Any

import numpy as np
import torch

from compress.validate.acceptance import AcceptanceRow
from compress.validate.accuracy import measure_accuracy
from compress.validate.gates import evaluate, parse_gates
from compress.validate.generation.needle import NeedleRow
from compress.validate.generation.positions import PositionRow
from compress.validate.generation.texts import Example, GenerationRow
from compress.validate.latency import LatencyRow
from compress.validate.load.objectives import Objectives
from compress.validate.parts import Part
from compress.validate.parts.accuracy import AccuracyPart
from compress.validate.parts.artifact import ArtifactPart
from compress.validate.parts.by_name import ByNamePart
from compress.validate.parts.experts import ExpertsPart
from compress.validate.parts.gates import GatesPart
from compress.validate.parts.generation import GenerationPart
from compress.validate.parts.journey import JourneyPart
from compress.validate.parts.kernels import KernelsPart
from compress.validate.parts.kv_cache import KVCachePart
from compress.validate.parts.latency import LatencyPart
from compress.validate.parts.layers import LayersPart
from compress.validate.parts.load import LoadPart
from compress.validate.parts.long_context import LongContextPart
from compress.validate.parts.mixed import MixedPart
from compress.validate.parts.provenance import ProvenancePart
from compress.validate.parts.pruning import PruningPart
from compress.validate.parts.recovery import RecoveryPart
from compress.validate.parts.roofline import RooflinePart
from compress.validate.parts.scoring import ScoringPart
from compress.validate.parts.speculation import SpeculationPart
from compress.validate.parts.tasks import TasksPart
from compress.validate.payoff import SpeedRow, predicted
from compress.validate.roofline import Work, roofline
from compress.validate.speculation import SpeculationEvidence
from compress.validate.stats import Estimate
from compress.validate.tasks.compare import task_rows
from compress.validate.tasks.task import TaskScores
from tests.support.scripted_load import ScriptedTarget, load_rows

KERNEL = {
    "linear": "attn.q+attn.k+attn.v",
    "op": "linear",
    "scheme": "W4A16_G128",
    "n": 1024,
    "k": 384,
    "m_range": [1, 4],
    "phase": "decode",
    "kernel": "reference.dequantized",
    "refused": {"w4.skinny": "needs CUDA"},
}


def latency_row(batch_size: int, tpot_ms: float, *, instability: str = "") -> LatencyRow:
    """Return a row with an interval of 10 % around each time."""
    estimate = Estimate(tpot_ms, tpot_ms * 0.9, tpot_ms * 1.1)
    numbers = dict.fromkeys(
        ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "tpot_ms_p99"), estimate
    )
    gaps = dict.fromkeys(("itl_ms_p50", "itl_ms_p90", "itl_ms_p95", "itl_ms_p99"), tpot_ms)
    conditions = {
        "batch_size": batch_size,
        "prompt_tokens": 64,
        "output_tokens": 32,
        "repeats": 3,
        "warmups": 1,
        "prefix_cache": "cold",
    }
    return LatencyRow(
        **conditions,
        **numbers,
        **gaps,
        output_tokens_per_s=9.0,
        step_bytes=1000,
        floor_ms=tpot_ms / 4,
        floor_frac=0.25,
        interleaved=True,
        tpot_spread_frac=0.5 if instability else 0.02,
        tpot_drift_frac=0.01,
        ttft_spread_frac=0.03,
        ttft_drift_frac=0.0,
        cpu_lost_frac=None,
        unstable=bool(instability),
        tpot_instability=instability,
        ttft_instability="",
    )


def report_parts(*, kl_limit: float = 10.0) -> dict[str, Part]:
    """Return a part of every kind, by its registered name."""
    generator = torch.Generator().manual_seed(0)
    source_VV = torch.randn(40, 40, generator=generator)
    noise_VV = torch.randn(40, 40, generator=generator)
    tokens_NS = torch.randint(40, (5, 30), generator=generator)
    accuracy = measure_accuracy(
        lambda t: source_VV[t], lambda t: (source_VV + 0.1 * noise_VV)[t], tokens_NS, num_bytes=700
    )
    gates = parse_gates({"kl_mean": kl_limit, "top1": 0.01, "tpot_ms_p50": {"cuda-sm90": 2.0}})
    rates = {"ttft_ms": 5.0, "tpot_ms": 2.0, "bandwidth_bytes_per_s": 1e9, "flops_per_s": 1e9}
    layer_rows = [
        {
            "layer": layer,
            "linear": linear,
            "error_before": 0.2 + layer,
            "error_after": 0.1 + layer,
            "damping": 0.01,
        }
        for layer in range(3)
        for linear in ("attn.q", "moe.experts.0.gate", "moe.experts.1.gate")
    ]
    cache_rows = [
        {
            "layer": layer,
            "cache": name,
            "amax": 7.0,
            "scale": 7 / 448,
            "saturated_frac": 0.0,
            "flushed_frac": 0.25,
            "worst_head": 1,
            "error": 0.03 * (1 + layer),
            "error_token_head": 0.026,
        }
        for layer in range(6)
        for name in "kv"
    ]
    sizes = [
        {"kind": "linears", "source_bytes": 8_000_000, "candidate_bytes": 2_000_000},
        {"kind": "head", "source_bytes": 1_000_000, "candidate_bytes": 1_000_000},
    ]
    kernels = [{**KERNEL, "layer": layer} for layer in (0, 1, 2, 5)]
    work = Work(1000, 10, 2000, 100, 4, 4)
    return {
        "gates": GatesPart(evaluate(gates, accuracy.metrics(), device="cpu")),
        "accuracy": AccuracyPart(accuracy),
        "tasks": tasks(),
        "generation": generation(),
        "long_context": LongContextPart(long_context()),
        "load": LoadPart(
            load_rows(
                ScriptedTarget("source", 0.03),
                ScriptedTarget("candidate", 0.02, factors=(1.0, 1.01, 1.02)),
                objectives=Objectives(ttft=200.0),
            )
        ),
        "latency": LatencyPart(
            [latency_row(1, 4.0), latency_row(4, 5.0)], [latency_row(1, 2.0), latency_row(4, 3.0)]
        ),
        "roofline": RooflinePart(roofline(work, batch_size=1, prompt_tokens=64, output_tokens=32, **rates)),
        "journey": JourneyPart(STAGES),
        "kernels": KernelsPart([*kernels, {**KERNEL, "layer": None, "linear": "head"}]),
        "layers": LayersPart(layer_rows),
        "by_name": ByNamePart(
            {
                "quantized": 24,
                "dense": {"embedding": 1, "<odd> reason": 2},
                "linear_bytes": 4_000_000,
                "code_bytes": 2_000_000,
                "source_bytes": 5_000_000,
                "written_bytes": 3_000_000,
            },
            "transformers 5.0",
        ),
        "scoring": ScoringPart(
            {
                "streamed": True,
                "top_k": 64,
                "kept_bytes": 1_000_000,
                "kl_mean_lower": 0.01,
                "kl_mean": 0.012,
            }
        ),
        "experts": ExpertsPart(experts()),
        "kv_cache": KVCachePart(
            {"format": "FP8_STATIC", "warning": "range spent on <outliers>", "layers": cache_rows}
        ),
        "speculation": SpeculationPart(speculation()),
        "mixed": MixedPart(MIXED),
        "pruning": PruningPart(pruning()),
        "recovery": RecoveryPart(RECOVERY, RECOVERY | {"trained": "Codes, scales and norms", "kept": False}),
        "artifact": ArtifactPart(
            {
                "digest": "sha256:bb",
                "scheme": "W4A16_G128",
                "source": "<script>alert(1)</script>",
                "sizes": sizes,
            }
        ),
        "provenance": ProvenancePart(
            recipe={"digest": "sha256:aa", "text": "version: 1"},
            calibration={"data": "mixed", "overlap": "0 of 145 n-grams are shared"},
            environment={"device": "a processor", "device_key": "cpu", "memory_bytes": 4_000_000_000},
        ),
    }


STAGES = (
    {"stage": "source", "size_bytes": 100, "ppl": 9.0, "batch_size": 1, "tpot_ms": 4.0},
    {"stage": "pruned", "size_bytes": 75, "kl_source": 0.5, "note": "elsewhere"},
    {
        "stage": "quantized",
        "size_bytes": 25,
        "ppl": 9.5,
        "kl_source": 0.25,
        "kl_before": 0.125,
        "batch_size": 1,
        "tpot_ms": 2.0,
    },
)
MIXED = {
    "uniform": {"W8A16": {"cost": 0.5, "kl": 0.001}, "W4A16_G128": {"cost": 0.26, "kl": 0.05}},
    "frontier": [{"cost": 0.3, "kl": 0.03}, {"cost": 0.4, "kl": 0.01}],
    "chosen": {"cost": 0.35, "kl": 0.02},
    "limit": 0.36,
    "budget": "36 % of the bytes",
    "cost": "bytes",
    "cost_of_dense": 1_000_000,
    "num_samples": 8,
    "units": [
        {
            "layer": 0,
            "projection": "qkv",
            "scheme": "W8A16",
            "kl": {"W8A16": 0.0005, "W4A16_G128": 0.02},
        }
    ],
}
RECOVERY = {
    "trained": "all",
    "student": {"params": 1000},
    "teacher": {"name": "the source", "bits_per_byte": 0.9},
    "loss": {"kind": "forward_kl", "top_k": 64},
    "tokens": 4096,
    "data": {"title": "some text"},
    "sampled": False,
    "stopped_early": True,
    "held_out_windows": 4,
    "before": {"kl": 0.5, "bits_per_byte": 1.2},
    "after": {"kl": 0.1, "bits_per_byte": 1.0},
    "curve": [
        {"tokens": 0, "kl": 0.5, "bits_per_byte": 1.2},
        {"tokens": 2048, "loss": 1.0},
        {"tokens": 4096, "kl": 0.1, "bits_per_byte": 1.0},
    ],
}


def pruning() -> dict[str, Any]:
    """Return two rounds: one head of each layer and half of the channels go, then the first layer."""
    whole = {"heads": 4, "kv_heads": 2, "ffn": 64, "layers": 3, "params": 3_000_000, "size_bytes": 6_000_000}
    left = {"heads": 2, "kv_heads": 1, "ffn": 32, "layers": 2, "params": 1_500_000, "size_bytes": 3_000_000}
    heads = {"linear": "attn.o", "unit": "kv_group", "scores": [1.0, 3.0], "kept": [1], "num_units": 2}
    channels = {"linear": "ffn.down", "unit": "channel", "shares": [0.0, 0.1, 0.4, 1.0], "num_units": 64}
    lost = {"score_lost": 0.25, "error": 0.1}
    rows = [
        row
        for layer in range(3)
        for row in (
            {**heads, **lost, "layer": layer, "num_kept": 1},
            {**channels, **lost, "layer": layer, "num_kept": 32},
        )
    ]
    return {
        "score": {"kind": "activation"},
        "compensate": {"kind": "bias"},
        "before": whole,
        "after": left,
        "rounds": [
            {"layers_kept": [0, 1, 2], "influence": [], "layers": rows},
            {"layers_kept": [1, 2], "influence": [0.1, 0.4, 0.3], "layers": []},
        ],
        "target": {
            "text": "at most 60 % of the parameters",
            "chosen": {"heads": 2, "ffn": 32, "layers": 2, "cost": 0.5, "kl": 0.3},
            "frontier": [{"cost": 0.5, "kl": 0.3}, {"cost": 0.8, "kl": 0.1}],
            "measured": [
                {"axis": "heads", "cost": 0.9, "kl": 0.05},
                {"axis": "depth", "cost": 0.7, "kl": 0.4},
            ],
            "limit": 0.6,
            "cost": "params",
        },
    }


def tasks() -> TasksPart:
    """Return a task that is worse, one without a difference, and one that stopped early with too few
    items."""
    source = np.arange(2000) % 2
    worse = np.where(np.arange(2000) % 20 == 1, 0, source)
    lost = ({"question": "<what> is it?", "right": "this", "candidate": "that"},)
    facts = {"kind": "jsonl", "data": "mine.jsonl", "digest": "sha256:0123456789abcdef"}
    found = {
        "mine": TaskScores("exact_match", source, worse, 2000, facts=facts, lost=lost),
        "theirs": TaskScores("acc", source, source, 2000),
        "short": TaskScores("accuracy", source[:64], source[:64], 900, sequential=True),
    }
    return TasksPart(task_rows(found, dict.fromkeys(found, 0.01), seed=0))


def generation() -> GenerationPart:
    """Return greedy texts with an example that parts and one that does not."""
    shift = Estimate(-1.5, -3.0, 0.25)
    examples = (Example("<prompt>", "the same ", "end", "<end>", 2), Example("other", "all", "", "", None))
    row = GenerationRow(
        mode="greedy", num_prompts=2, num_same=1, common_p10=2.0, common_p50=4.0, common_p90=7.0,
        same_tokens=(1, 4, 8), same_frac=(1.0, 0.5, 0.5), length_source=9.0, length_candidate=7.5,
        length_shift=shift, repeated_source=0.125, repeated_candidate=0.25, repeated_shift=shift,
        ended_source=0.5, ended_candidate=1.0, examples=examples,
    )  # fmt: skip
    return GenerationPart([row], {"max_tokens": 8, "temperature": 0.8})


def long_context() -> dict[str, Any]:
    """Return two buckets of positions, and a fact that the candidate does not find at the beginning."""
    ratio = Estimate(1.02, 1.01, 1.03)
    rows = [PositionRow(start, start + 8, 9.0, 9.2, ratio, ratio).as_json() for start in (1, 9)]
    needle = [
        NeedleRow(model, 16, depth, 4, found, -0.5, None if model == "source" else ratio).as_json()
        for depth in (0.0, 1.0)
        for model, found in (("source", 1.0), ("candidate", depth))
    ]
    conditions = {"data": "some text", "seq_len": 16, "num_windows": 4, "source_kv_format": "BF16"}
    positions = [{"model": "candidate", "kv_format": "INT4_TOKEN_HEAD", "rows": rows}]
    return {**conditions, "positions": positions, "needle": needle}


def experts() -> dict[str, Any]:
    """Return two layers of experts, with an expert without a token."""
    return {
        "min_tokens": 9,
        "policy": "shrink",
        "layers": [
            {
                "layer": 1,
                "num_experts": 8,
                "fewest": 0,
                "median": 700.5,
                "starved": 3,
                "without_tokens": [2, 5],
            },
            {
                "layer": 2,
                "num_experts": 8,
                "fewest": 600,
                "median": 900.0,
                "starved": 0,
                "without_tokens": [],
            },
        ],
    }


def speculation() -> dict[str, Any]:
    """Return two proposers, greedy and not, two categories and batch sizes."""
    acceptance = []
    speed = []
    for name in ("draft", "ngram"):
        for temperature in (1.0, 0.0):
            own = {"proposer": name, "temperature": temperature}
            for category in ("all", "code", "<prose>"):
                length = Estimate(2.5, 2.25, 2.75)
                acceptance.append(AcceptanceRow(
                    **own, category=category, num_prompts=4, num_steps=90, acceptance_length=length,
                    acceptance_rates=(0.8, 0.7), repeated_4grams=0.125,
                ))  # fmt: skip
            for batch_size in (1, 4):
                row = SpeedRow(
                    **own, batch_size=batch_size, num_requests=4, num_equal=4 if temperature == 0 else None,
                    tpot_ms_plain=10.0, tpot_ms=5.0, speedup=Estimate(2.0, 1.5, 2.5), acceptance_length=2.5,
                    draft_ms=1.0, verify_ms=11.0, draft_frac=2 / 13,
                )  # fmt: skip
                speed.append(predicted(row, (0.8, 0.7)) if name == "draft" else row)
    facts = {
        "k": 2,
        "rule": "rejection",
        "num_prompts": 2,
        "prompt_tokens": 8,
        "output_tokens": 16,
        "data": {"code": "c", "<prose>": "p"},
    }
    curve = [
        {"step": 1, "tokens": 100, "loss": 3.0},
        *({"step": n, "tokens": 100 * n, "kl": 1 / n, "acceptance_length": n} for n in (1, 2)),
    ]
    draft = {
        "kind": "model",
        "params": 5,
        "curve": curve,
        "before": {"kl": 1.5, "top1": 0.25},
        "after": {"kl": 0.5, "top1": 0.5},
    }
    return {**facts, **SpeculationEvidence(tuple(acceptance), tuple(speed)).as_json(), "draft": draft}

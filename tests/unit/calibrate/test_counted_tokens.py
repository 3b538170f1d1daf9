"""Calibration that counts some tokens only: sums are those of the rows that count, ranges those of all, and
samples in which nothing counts change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.experts import Tokens
from compress.calibrate.gradients import GradientVisitor, visit_gradients
from compress.calibrate.layer_run import LayerRun, sample_range, shards_of_rank
from compress.calibrate.memory_guard import MemoryGuard
from compress.calibrate.observe import gather_everywhere, observe, observed_kinds
from compress.calibrate.samples import Samples
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.stats import AbsMax, AbsMean, CrossMoment, MergeTree, SecondMoment
from compress.context import Context, OneRank
from compress.models.attention import FullAttention
from compress.models.canonical import layer_name
from compress.models.experts import ALL_TOKENS
from compress.models.moe import TOKENS
from compress.models.weights import build_decoder
from compress.quant.scheme import SCHEMES
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_source, tiny_tokens
from tests.unit.calibrate.test_experts import MOE

CPU = torch.device("cpu")
SHAPE = (11, 13)
KINDS = (SecondMoment, AbsMean, AbsMax, CrossMoment)
COUNTED_NS = torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)) < 0.3


@pytest.mark.parametrize("config", [QWEN3, MOE], ids=["dense", "experts"])
def test_sums_are_of_the_rows_that_count_and_ranges_of_all(config: dict[str, Any]) -> None:
    layer = build_decoder(tiny_source(tiny_arch(config)), dtype=torch.float32, device=CPU).layers[1]
    x_NSD = torch.randn(*SHAPE, layer.arch.hidden_size, generator=torch.Generator().manual_seed(1))
    run = replace(LayerRun.on_one_rank(x_NSD, x_NSD + 0.1), counted_NS=COUNTED_NS)
    kinds = observed_kinds(layer, KINDS)
    stats = gather_everywhere(
        observe(layer, run, KINDS, source_layer=layer, source_experts=layer), kinds, OneRank()
    )
    taps: dict[str, Tensor] = {}
    layer(x_NSD, torch.arange(SHAPE[1]), FullAttention(), taps.__setitem__)
    chosen = {name: taps.pop(name) for name in list(taps) if name.startswith(TOKENS)}
    for tap, x in taps.items():
        rows = x.flatten(0, -2)
        counted = COUNTED_NS.flatten()
        expert = tap.partition(".")[2] if tap.startswith(("moe_in.", "moe_mid.")) else None
        if expert is not None:
            counted = counted[chosen[f"{TOKENS}.{expert}"].squeeze(1)]
            assert stats[tap][Tokens].num_tokens == int(counted.sum())
        some = rows[counted]
        if not len(some):
            continue
        expected = some.t().double() @ some.double() / len(some)
        torch.testing.assert_close(stats[tap][SecondMoment].mean().double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stats[tap][AbsMean].mean(), some.abs().mean(0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stats[tap][AbsMax].per_feature(), rows.abs().amax(0), rtol=1e-4, atol=1e-6)
        assert stats[tap][CrossMoment].num_tokens == len(some)


def run(out: Path, tokens_NS: Tensor, counted_NS: Tensor | None, spec: Quantize) -> list[bytes]:
    out.mkdir()
    source = tiny_source(tiny_arch(QWEN3, dtype="bfloat16"))
    scheme = SCHEMES["W8A16"]
    passes = quantization_passes(spec, scheme, torch.bfloat16)
    compression = Compression(
        passes, scheme=scheme, true_sequential=spec.true_sequential, counted_NS=counted_NS
    )
    run_sequential(source, tokens_NS, compression, out, Context("cpu", 0, out), compute_dtype=torch.float32)
    return [(out / layer_name(idx)).read_bytes() for idx in range(source.arch.num_layers)]


@pytest.mark.parametrize("true_sequential", [False, True])
def test_samples_in_which_nothing_counts_change_no_bit(true_sequential: bool, tmp_path: Path) -> None:
    spec = Quantize.model_validate(
        {
            "scheme": "W8A16",
            "smooth": None if true_sequential else {"kind": "awq", "num_ratios": 3},
            "round": {"kind": "gptq"},
            "true_sequential": true_sequential,
        }
    )
    tokens_NS = tiny_tokens(tiny_arch(QWEN3), 6, 12)
    first = torch.zeros(6, 12, dtype=torch.bool)
    first[:3] = True
    alone = run(tmp_path / "alone", tokens_NS[:3], None, spec)
    assert run(tmp_path / "first", tokens_NS, first, spec) == alone
    assert run(tmp_path / "counted", tokens_NS[:3], torch.ones(3, 12, dtype=torch.bool), spec) == alone
    assert run(tmp_path / "all", tokens_NS, None, spec) != alone


def test_gradients_come_from_predictions_of_the_tokens_that_count(tmp_path: Path) -> None:
    class Sizes(GradientVisitor):
        def __init__(self) -> None:
            self.found: dict[tuple[int, str], list[Tensor]] = {}

        def add_sample(self, layer: Any, group: Any, x_TI: Tensor, gradients: Any) -> None:
            sizes = torch.cat(list(gradients.values()), dim=1).norm(dim=1)
            self.found.setdefault((layer.layer_idx, group.tap), []).append(sizes)

    source = tiny_source(tiny_arch(QWEN3))
    tokens_NS = tiny_tokens(source.arch, 2, 9)
    counted_NS = torch.zeros(2, 9, dtype=torch.bool)
    counted_NS[0, 5] = True
    counted_NS[1, 0] = True  # nothing predicts the first token
    visitor = Sizes()
    visit_gradients(
        source,
        tokens_NS,
        visitor,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
        draws_NS=torch.full(tokens_NS.shape, 0.5),
        counted_NS=counted_NS,
    )
    for of_first, of_second in visitor.found.values():
        assert float(of_first[4]) > 0
        assert float(of_first[5:].abs().max()) == 0
        assert float(of_second.abs().max()) == 0


def test_the_experts_input_counts_as_other_taps_do() -> None:
    layer = build_decoder(tiny_source(tiny_arch(MOE)), dtype=torch.float32, device=CPU).layers[1]
    x_NSD = torch.randn(*SHAPE, 32, generator=torch.Generator().manual_seed(1))
    run = replace(LayerRun.on_one_rank(x_NSD), counted_NS=COUNTED_NS)
    stats = gather_everywhere(
        observe(layer, run, (SecondMoment,)), observed_kinds(layer, (SecondMoment,)), OneRank()
    )
    assert stats[ALL_TOKENS][SecondMoment].num_tokens == int(COUNTED_NS.sum())


def test_two_ranks_make_the_sums_of_one() -> None:
    layer = build_decoder(tiny_source(tiny_arch(QWEN3)), dtype=torch.float32, device=CPU).layers[1]
    x_NSD = torch.randn(*SHAPE, layer.arch.hidden_size, generator=torch.Generator().manual_seed(1))
    sums = []
    for num_ranks in (1, 2):
        merged: MergeTree[Any] = MergeTree()
        for rank in range(num_ranks):
            shards = shards_of_rank(len(x_NSD), rank=rank, num_ranks=num_ranks)
            own = sample_range(shards)
            samples = Samples.from_tensor(x_NSD[own])
            run = LayerRun(samples, None, shards, OneRank(), MemoryGuard(None, samples), torch.float32)
            trees = observe(layer, replace(run, counted_NS=COUNTED_NS[own]), (SecondMoment,))
            for node in trees["ffn_in", SecondMoment].nodes():
                merged.join(node)
        sums.append(merged.root().mean())
    assert torch.equal(*sums)

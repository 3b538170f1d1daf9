"""The guide against gradients of the whole graph, and what the calibration makes of it against sums and
minima written out.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.calibrate import guide as guides
from compress.calibrate.arithmetic import add_gram
from compress.calibrate.guide import Guide, GuideFiles, OutputMoment, make_guide
from compress.calibrate.layer_run import LayerRun
from compress.calibrate.observe import gather_everywhere, observe
from compress.calibrate.stats import AbsMax, CrossMoment, InputStats, SecondMoment
from compress.context import Context, OneRank
from compress.errors import RecipeError
from compress.methods.quantize.descent import NUM_ROW_SETS, Descent, coupled_loss, newton_factors, newton_step
from compress.methods.quantize.rtn import Rtn
from compress.models.weights import build_decoder, build_layer
from compress.quant.scheme import Scheme
from compress.recipe import parse_spec, read_yaml
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_source, tiny_tokens

NUM_SAMPLES = 5
SEQ_LEN = 12
SCHEMES = {
    "sym": Scheme("sym", 4, symmetric=True, group_size=16),
    "asym": Scheme("asym", 4, symmetric=False, group_size=16),
    "e4m3": Scheme("e4m3", 8, symmetric=True, group_size=None, type="float", activation="token"),
}
EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize(("windows", "walked"), [(1.0, [0, 1, 2, 3, 4]), (0.5, [0, 2]), (0.01, [0])])
def test_a_guide_says_what_gradients_of_the_whole_graph_say(
    config: dict[str, Any], windows: float, walked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guides, "SEGMENT_ROWS", 24)
    monkeypatch.setattr(guides, "WALK_TOKENS", 3 * SEQ_LEN)  # two walks; moments are of the first
    source = tiny_source(tiny_arch(config))
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    ctx = Context("cpu", 3, tmp_path)
    make_guide(Guide(share=0.6, windows=windows), source, tokens_NS, ctx, compute_dtype=torch.float32)
    gradients = _of_the_whole_graph(
        source, tokens_NS, torch.rand(tokens_NS.shape, generator=ctx.rng("guide", "labels"))
    )
    for layer_idx in range(source.arch.num_layers):
        layer = build_decoder(source, dtype=torch.float32, device=torch.device("cpu")).layers[layer_idx]
        guide = GuideFiles(ctx).layer(layer_idx)
        for group in layer.groups():  # type: ignore[operator]
            g_NSO = torch.cat([gradients[layer_idx, name] for name in group.linears], dim=-1)
            expected_NS = torch.ones(tokens_NS.shape)
            squares_NS = g_NSO[walked].square().sum(-1)
            expected_NS[walked] = 0.4 + 0.6 * squares_NS / squares_NS.mean()
            assert torch.allclose(guide.token_weights[group.tap], expected_NS, rtol=1e-3, atol=1e-4)
            u_NSO = F.normalize(g_NSO[walked], dim=-1)
            first = 0
            for segment_RR in guide.output_moments[group.tap].segments:
                u_TR = u_NSO[:3, :, first : first + len(segment_RR)].flatten(0, 1)
                expected_RR = u_TR.t() @ u_TR
                expected_RR /= expected_RR.diagonal().mean()
                expected_RR[~torch.eye(len(expected_RR), dtype=torch.bool)] *= len(u_TR) / (
                    len(u_TR) + len(expected_RR)
                )
                assert torch.allclose(
                    segment_RR.float(), expected_RR, rtol=0.01, atol=0.01 * float(expected_RR.abs().max())
                )
                first += len(segment_RR)
            assert first == g_NSO.shape[-1]


def _of_the_whole_graph(source: Any, tokens_NS: Tensor, draws_NS: Tensor) -> dict[tuple[int, str], Tensor]:
    """Gradients [N, S, O] at the outputs of all linears, by one backward pass a sample."""
    decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    linears = {
        (idx, name): layer.linear(name)
        for idx, layer in enumerate(decoder.layers)
        for name in layer.shape.linears
    }  # type: ignore[operator,union-attr]
    found: dict[tuple[int, str], list[Tensor]] = {key: [] for key in linears}
    for tokens_S, draws_S in zip(tokens_NS.to(torch.int64), draws_NS, strict=True):
        outputs: dict[tuple[int, str], Tensor] = {}
        hooks = [
            linear.register_forward_hook(
                lambda module, args, out, key=key, outputs=outputs: outputs.__setitem__(key, out)
            )
            for key, linear in linears.items()
        ]
        decoder.embed.weight.requires_grad_(True)
        logits_SV = decoder(tokens_S.unsqueeze(0))[0]
        for hook in hooks:
            hook.remove()
        below_SV = logits_SV.detach().softmax(-1).cumsum(-1)
        labels_S = (below_SV < draws_S.unsqueeze(1) * below_SV[:, -1:]).sum(-1)
        loss = F.cross_entropy(logits_SV, labels_S, reduction="sum")
        for key, gradient in zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True):
            found[key].append(gradient[0])
    return {key: torch.stack(each) for key, each in found.items()}


def test_a_guide_is_made_once(tmp_path: Path) -> None:
    source = tiny_source(tiny_arch(LLAMA))
    tokens_NS = tiny_tokens(source.arch, 2, SEQ_LEN)
    ctx = Context("cpu", 3, tmp_path)
    make_guide(Guide(), source, tokens_NS, ctx, compute_dtype=torch.float32)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    make_guide(Guide(), source, tokens_NS, ctx, compute_dtype=torch.float32)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_weights_count_in_sums_of_squares_and_not_in_ranges() -> None:
    source = tiny_source(tiny_arch(LLAMA))
    layer = build_layer(source.arch, 0, source.layer(0), dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    x_NSD, source_NSD = (
        torch.randn(NUM_SAMPLES, SEQ_LEN, source.arch.hidden_size, generator=generator) for _ in range(2)
    )
    weights_NS = torch.rand(NUM_SAMPLES, SEQ_LEN, generator=generator) + 0.1
    weights = {group.tap: weights_NS for group in layer.groups()}
    factories = [SecondMoment, CrossMoment, AbsMax]
    run = LayerRun.on_one_rank(x_NSD, source_NSD)
    trees = observe(layer, run, factories, source_layer=layer, token_weights=weights)
    stats = gather_everywhere(trees, factories, OneRank())["attn_in"]
    normed, of_source = (layer.attn_norm(each).flatten(0, 1).double() for each in (x_NSD, source_NSD))
    weighed = normed * weights_NS.flatten().double().unsqueeze(1)
    tokens = NUM_SAMPLES * SEQ_LEN
    assert torch.allclose(stats[SecondMoment].mean().double(), weighed.t() @ normed / tokens, atol=1e-5)
    assert torch.allclose(
        stats[CrossMoment].mean().double(), (of_source - normed).t() @ weighed / tokens, atol=1e-5
    )
    assert float(stats[AbsMax].max()) == pytest.approx(float(normed.abs().max()))


def test_a_gram_of_bfloat16_numbers_is_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(4)
    a_TD, b_TD = (torch.randn(700, 96, generator=generator).to(torch.bfloat16) for _ in range(2))
    a_MK = torch.randn(300, 96, generator=generator)
    b_KN = torch.randn(96, 40, generator=generator)
    before_MN = a_MK @ b_KN
    assert torch.allclose(
        add_gram(None, a_TD, b_TD).double(), a_TD.double().t() @ b_TD.double(), rtol=1e-5, atol=1e-3
    )
    assert torch.equal(add_gram(None, a_TD, a_TD), add_gram(None, a_TD, a_TD).t())
    assert torch.equal(a_MK @ b_KN, before_MN)  # other products are as exact as they were


def test_rows_of_an_output_moment_are_its_rows() -> None:
    generator = torch.Generator().manual_seed(4)
    sizes = (7, 5, 9)
    moment = OutputMoment(tuple(torch.randn(size, size, generator=generator) for size in sizes))
    whole = torch.block_diag(*moment.segments)
    for begin, end in ((0, 21), (3, 10), (7, 12), (9, 20), (20, 21)):
        assert torch.equal(torch.block_diag(*moment.rows(begin, end).segments), whole[begin:end, begin:end])
    scale_O = torch.rand(21, generator=generator) + 0.5
    assert torch.allclose(
        torch.block_diag(*moment.rescaled(scale_O).segments), scale_O.outer(scale_O) * whole, atol=1e-6
    )


def _coupled_problem(rows: int = 40, columns: int = 32) -> tuple[Tensor, SecondMoment, OutputMoment]:
    """Weights, inputs of correlated features, and outputs whose errors the rest of a model adds up along a
    few directions.
    """
    generator = torch.Generator().manual_seed(6)
    stat = SecondMoment()
    stat.update(
        torch.randn(200, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    )
    few = torch.randn(4, rows, generator=generator)
    moment_OO = few.t() @ few + 0.2 * torch.eye(rows)
    segments = tuple(
        moment_OO[part, part] / moment_OO.diagonal().mean()
        for part in (slice(0, rows * 3 // 5), slice(rows * 3 // 5, rows))
    )
    return 0.05 * torch.randn(rows, columns, generator=generator), stat, OutputMoment(segments)


def test_a_step_leads_to_where_nothing_is_left_to_gain() -> None:
    w_OI, stat, outputs = _coupled_problem()
    segments = list(outputs.segments)
    error_IO = 0.1 * w_OI.t()
    for row_set in range(NUM_ROW_SETS):
        rows = slice(row_set, None, NUM_ROW_SETS)
        moved = error_IO.clone()
        moved[:, rows] -= newton_step(error_IO, newton_factors(segments)[row_set])
        pulled_OI = torch.block_diag(*segments) @ moved.t()
        assert float(pulled_OI[rows].abs().max()) < 1e-5 * float(error_IO.abs().max())
        assert coupled_loss(moved, stat.mean(), segments) < coupled_loss(error_IO, stat.mean(), segments)


@EACH_SCHEME
@pytest.mark.parametrize("rows", [40, 9], ids=["rows", "fewer rows than row sets"])
def test_coupled_rounds_lower_the_coupled_loss(scheme: Scheme, rows: int) -> None:
    w_OI, stat, outputs = _coupled_problem(rows)
    stats = InputStats(stat)
    exact = [each.double() for each in outputs.segments]
    rounded = Rtn(scale="min_max").round(w_OI, stats, scheme, scale_dtype=torch.float32).weight
    losses = []
    for rounds in (0, 1, 4):
        refined = Descent(coupled_rounds=rounds).refine(w_OI, rounded, stats, outputs)
        error_OI = refined.weight.dequantize(torch.float32).double() - w_OI.double()
        losses.append(float(((torch.block_diag(*exact) @ error_OI @ stat.mean().double()) * error_OI).sum()))
        assert refined.weight.codes_OI.to(torch.float32).abs().max() <= scheme.max_code + 1
    assert all(
        torch.equal(each.double(), before) for each, before in zip(outputs.segments, exact, strict=True)
    )  # nothing is used up
    assert losses[1] < 0.9 * losses[0]
    assert losses[2] <= losses[1]
    assert torch.equal(
        Descent(coupled_rounds=3).refine(w_OI, rounded, stats, None).weight.codes_OI,
        Descent().refine(w_OI, rounded, stats).weight.codes_OI,
    )


def test_coupled_rounds_without_a_guide_are_refused() -> None:
    raw, where = read_yaml("refine: {kind: descent, coupled_rounds: 2}", file="r.yaml")
    with pytest.raises(RecipeError, match="guide"):
        parse_spec(Quantize, raw, where)

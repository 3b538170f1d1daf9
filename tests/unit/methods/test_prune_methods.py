"""Scores and compensations against what they claim, computed another way: brute force, least squares on raw
inputs, the model itself.
"""

import itertools

import pytest
import torch
from torch import Tensor

from compress.calibrate.gradients import visit_gradients
from compress.calibrate.residual import kl_between, walk
from compress.calibrate.stats import InputStats, Mean, SecondMoment
from compress.context import Context
from compress.errors import UsageError
from compress.methods.prune import Candidates, Compensated
from compress.methods.prune.block_influence import BlockInfluence
from compress.methods.prune.compensations import BiasCompensation, LeastSquares
from compress.methods.prune.obs import Obs, eliminate_columns_, eliminate_units, inverse
from compress.methods.prune.prune_pass import relative_error
from compress.methods.prune.taylor import UnitLosses
from compress.models.pruning import Units
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_decoder, tiny_source, tiny_tokens

OUT = 5
IN = 12
TOKENS = 200


def inputs(seed: int = 0, size: int = IN) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64) * size**-0.5
    scale = torch.exp(torch.randn(size, generator=generator, dtype=torch.float64))
    return torch.randn(TOKENS, size, generator=generator, dtype=torch.float64) @ mixing * scale + 0.3


def weights(size: int = IN) -> Tensor:
    return torch.randn(OUT, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def stats_of(x_TI: Tensor) -> InputStats:
    stats = InputStats(SecondMoment(), Mean())
    for each in x_TI.to(torch.float32).chunk(2):
        for stat in stats:
            stat.update(each)
    return stats


def damped(x_TI: Tensor, damping: float) -> Tensor:
    h_II = x_TI.t() @ x_TI / len(x_TI)
    return h_II + damping * h_II.diagonal().mean() * torch.eye(len(h_II), dtype=torch.float64)


def best_loss(w_OI: Tensor, h_II: Tensor, kept: list[int]) -> float:
    """tr((W - W') H (W - W')^T) at its least over W' that live on `kept`: by normal equations, one output at
    a time.
    """
    solved_KO = torch.linalg.solve(h_II[kept][:, kept], h_II[kept] @ w_OI.t())
    delta_OI = w_OI.clone()
    delta_OI[:, kept] -= solved_KO.t()
    return float((delta_OI @ h_II * delta_OI).sum())


def greedy(
    w_OI: Tensor, h_II: Tensor, units: list[list[int]], num_removed: int
) -> tuple[list[int], list[float]]:
    """By trying every unit that is left each time: the order, and how much the loss grows each time."""
    left = list(range(len(units)))
    order = list[int]()
    grown = list[float]()
    before = 0.0
    for _ in range(num_removed):
        losses = {
            each: best_loss(w_OI, h_II, [c for unit in left if unit != each for c in units[unit]])
            for each in left
        }
        chosen = min(losses, key=lambda each: losses[each])
        left.remove(chosen)
        order.append(chosen)
        grown.append(losses[chosen] - before)
        before = losses[chosen]
    return order, grown


@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("num_removed", [1, 4, 9])
def test_columns_go_in_the_order_that_brute_force_finds(block_size: int, num_removed: int) -> None:
    h_II = damped(inputs(), 0.01)
    order, grown = greedy(weights(), h_II, [[idx] for idx in range(IN)], num_removed)
    choice = eliminate_columns_(
        weights(), inverse(damped(inputs(), 0.0), damping=0.01), num_removed, block_size=block_size
    )
    assert sorted(order) == (~choice.kept_U).nonzero().squeeze(1).tolist()
    assert torch.allclose(
        choice.score_U[torch.tensor(order)].double(), torch.tensor(grown, dtype=torch.float64), rtol=1e-4
    )


@pytest.mark.parametrize("num_removed", [1, 2, 3])
def test_units_of_several_columns_go_in_the_order_that_brute_force_finds(num_removed: int) -> None:
    units = Units(4, width=3)
    columns = [list(range(3 * unit, 3 * unit + 3)) for unit in range(4)]
    order, grown = greedy(weights(), damped(inputs(), 0.01), columns, num_removed)
    choice = eliminate_units(weights(), inverse(damped(inputs(), 0.0), damping=0.01), units, 4 - num_removed)
    assert sorted(order) == (~choice.kept_U).nonzero().squeeze(1).tolist()
    assert torch.allclose(
        choice.score_U[torch.tensor(order)].double(), torch.tensor(grown, dtype=torch.float64), rtol=1e-4
    )


def test_units_of_one_column_are_columns() -> None:
    p_II = inverse(damped(inputs(), 0.0), damping=0.01)
    by_unit = eliminate_units(weights(), p_II, Units(IN), 5)
    by_column = eliminate_columns_(weights(), p_II.clone(), IN - 5, block_size=4)
    assert torch.equal(by_unit.kept_U, by_column.kept_U)
    assert torch.allclose(by_unit.score_U, by_column.score_U, rtol=1e-4)


def test_every_part_loses_the_same_number() -> None:
    choice = eliminate_units(
        weights(), inverse(damped(inputs(), 0.0), damping=0.01), Units(6, width=2, num_parts=2), 4
    )
    assert choice.kept_U.view(2, 3).sum(dim=1).tolist() == [2, 2]


def test_greedy_is_seldom_far_from_the_best_choice_there_is() -> None:
    h_II = damped(inputs(), 0.01)
    choice = eliminate_columns_(weights(), inverse(damped(inputs(), 0.0), damping=0.01), 4, block_size=64)
    best = min(best_loss(weights(), h_II, list(kept)) for kept in itertools.combinations(range(IN), IN - 4))
    assert best <= best_loss(weights(), h_II, choice.kept_U.nonzero().squeeze(1).tolist()) < 1.3 * best


def test_losses_of_what_went_add_up_to_the_loss_that_is_left() -> None:
    h_II = damped(inputs(), 0.01)
    choice = eliminate_columns_(weights(), inverse(damped(inputs(), 0.0), damping=0.01), 7, block_size=3)
    expected = best_loss(weights(), h_II, choice.kept_U.nonzero().squeeze(1).tolist())
    assert float(choice.score_U[~choice.kept_U].sum()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("damping", [1e-9, 0.01, 0.3])
def test_least_squares_is_least_squares_on_the_raw_inputs(damping: float) -> None:
    """Damping as rows: sqrt(d T) of the identity on the columns that stay, with the weights that they had as
    what is aimed at.
    """
    x_TI = inputs().to(torch.float32).double()
    w_OI = weights().to(torch.float32).double()
    kept_I = torch.tensor([idx % 3 != 1 for idx in range(IN)])
    found = LeastSquares(damping=damping).compensate(w_OI.float(), kept_I, stats_of(x_TI))
    root = (damping * (x_TI.t() @ x_TI / TOKENS).diagonal().mean() * TOKENS).sqrt()
    rows_TK = torch.cat([x_TI[:, kept_I], root * torch.eye(int(kept_I.sum()), dtype=torch.float64)])
    aims_TO = torch.cat([x_TI @ w_OI.t(), root * w_OI[:, kept_I].t()])
    expected_KO = torch.linalg.lstsq(rows_TK, aims_TO).solution
    assert torch.allclose(found.w_OK.double(), expected_KO.t(), rtol=1e-4, atol=1e-5)
    assert found.bias_O is None


def test_least_squares_leaves_weights_alone_when_nothing_goes_that_ever_fired() -> None:
    x_TI = inputs()
    x_TI[:, 3] = 0
    kept_I = torch.arange(IN) != 3
    assert torch.equal(
        LeastSquares().compensate(weights().float(), kept_I, stats_of(x_TI)).w_OK,
        weights().float()[:, kept_I],
    )


def test_a_bias_takes_the_mean_of_what_went_and_the_error_is_that_on_the_inputs() -> None:
    x_TI = inputs()
    w_OI = weights()
    kept_I = torch.arange(IN) < 8
    stats = stats_of(x_TI)
    outputs_TO = x_TI @ w_OI.t()

    def measured(result: Compensated) -> float:
        bias_O = 0 if result.bias_O is None else result.bias_O.double()
        left_TO = outputs_TO - x_TI[:, kept_I] @ result.w_OK.double().t() - bias_O
        return float(left_TO.square().sum() / outputs_TO.square().sum())

    errors = []
    for compensation in (BiasCompensation(), LeastSquares(damping=1e-6)):
        result = compensation.compensate(w_OI.float(), kept_I, stats)
        moment = stats[SecondMoment]
        mean = stats[Mean]
        error = relative_error(w_OI.float(), kept_I, result, moment.mean(), mean.mean())
        assert error == pytest.approx(measured(result), rel=1e-3, abs=1e-6)
        errors.append(error)
    nothing = measured(Compensated(w_OI.float()[:, kept_I]))
    assert max(errors) < nothing
    moved_O = (outputs_TO - x_TI[:, kept_I] @ w_OI[:, kept_I].t()).mean(dim=0)
    found = BiasCompensation().compensate(w_OI.float(), kept_I, stats).bias_O
    assert found is not None
    assert torch.allclose(found.double(), moved_O, rtol=1e-4, atol=1e-5)


def test_inputs_that_are_not_numbers_are_refused() -> None:
    x_TI = inputs()
    x_TI[7, 2] = torch.inf
    with pytest.raises(UsageError, match="NaN or infinity"):
        Obs().choose(Candidates(weights().float(), Units(IN), stats_of(x_TI), torch.Generator()), 5)
    with pytest.raises(UsageError, match="NaN or infinity"):
        LeastSquares().compensate(weights().float(), torch.arange(IN) < 5, stats_of(x_TI))


def test_predicted_losses_rank_units_as_removing_them_does() -> None:
    """In a random model every FFN channel and KV group of a layer is silenced in turn; KL is the model's."""
    arch = tiny_arch(LLAMA, intermediate_size=16, mlp_bias=False)
    source = tiny_source(arch)
    tokens_NS = tiny_tokens(arch, 24, 24)
    visitor = UnitLosses({"ffn_mid": Units(16), "attn_out": Units(2, width=16)})
    ctx = Context("cpu", 0, None)  # type: ignore[arg-type]
    draws_NS = torch.rand(tokens_NS.shape, generator=torch.Generator().manual_seed(0))
    visit_gradients(source, tokens_NS, visitor, ctx, compute_dtype=torch.float32, draws_NS=draws_NS)
    before = tiny_decoder(arch)
    positions = tokens_NS.long()
    expected = before(positions).log_softmax(-1)

    def kl_without(name: str, columns: slice) -> float:
        decoder = tiny_decoder(arch)
        decoder.get_parameter(name)[:, columns] = 0
        return float((expected.exp() * (expected - decoder(positions).log_softmax(-1))).sum(-1).mean())

    measured = torch.tensor(
        [kl_without("layers.2.ffn.down.weight", slice(idx, idx + 1)) for idx in range(16)]
    )
    predicted = visitor.loss[2, "ffn_mid"]
    ranks = [each.argsort().argsort().double() for each in (measured, predicted)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) > 0.9
    assert 0.5 < float(predicted.sum() / measured.sum()) < 2
    groups = torch.tensor(
        [kl_without("layers.2.attn.o.weight", slice(16 * idx, 16 * idx + 16)) for idx in range(2)]
    )
    assert torch.equal(groups.argsort(), visitor.loss[2, "attn_out"].argsort())


def test_the_residual_stream_is_that_of_the_decoder() -> None:
    arch = tiny_arch()
    source = tiny_source(arch)
    tokens_NS = tiny_tokens(arch, 3, 9)
    decoder, ctx = tiny_decoder(arch), Context("cpu", 0, None)  # type: ignore[arg-type]
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    x_NSD = walk(
        source,
        tokens_NS,
        ctx,
        compute_dtype=torch.float32,
        task="",
        visit=lambda idx, a, b: seen.setdefault(idx, []).append((a, b)),
    )
    assert torch.allclose(decoder.norm(x_NSD), decoder.hidden(tokens_NS.long()), atol=1e-5)
    before, after = seen[1][2]
    angle = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=1)
    assert float(BlockInfluence().influence(before, after)) == pytest.approx(
        float((1 - angle).sum()), rel=1e-5
    )
    assert kl_between(source, x_NSD, x_NSD, torch.device("cpu")) == 0
    other = walk(tiny_source(arch, seed=1), tokens_NS, ctx, compute_dtype=torch.float32, task="")
    p, q = (decoder.head(decoder.norm(each)).log_softmax(-1) for each in (x_NSD, other))
    assert kl_between(source, x_NSD, other, torch.device("cpu")) == pytest.approx(
        float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4
    )

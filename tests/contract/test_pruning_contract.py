"""What every score and compensation must keep: a new file under `methods/` is held to it without edits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.stats import InputStats
from compress.methods.prune import COMPENSATIONS, LAYER_SCORERS, SCORERS, Candidates, Choice
from compress.models.pruning import Units
from compress.recipe import Spec

OUT = 24
IN = 96
TOKENS = 400
UNITS = {
    "channels": Units(IN),
    "heads": Units(8, width=12),
    "heads of groups": Units(8, width=12, num_parts=4),
}
EACH_SCORER = pytest.mark.parametrize("scorer", SCORERS.names())
EACH_COMPENSATION = pytest.mark.parametrize("compensation", COMPENSATIONS.names())
EACH_UNITS = pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)


def inputs(silent: Tensor | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.eye(IN) + 0.5 * torch.randn(IN, IN, generator=generator) * IN**-0.5
    x_TI = (torch.randn(TOKENS, IN, generator=generator) @ mixing + 0.2) * torch.exp(
        torch.randn(IN, generator=generator)
    )
    return x_TI if silent is None else torch.where(silent, 0.0, x_TI)


def weights() -> Tensor:
    return 0.1 * torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1))


def statistics(method: Any, x_TI: Tensor) -> InputStats:
    stats = InputStats(*(kind() for kind in method.needs()))
    for part in x_TI.chunk(2):
        for stat in stats:
            stat.update(part)
    return stats


def choose(
    scorer: str, units: Units, num_kept: int, *, w_OI: Tensor | None = None, x_TI: Tensor | None = None
) -> Choice:
    """Gradients at the outputs are random here: what a unit's predicted loss is made of."""
    w_OI = weights() if w_OI is None else w_OI
    x_TI = inputs() if x_TI is None else x_TI
    g_TO = torch.randn(TOKENS, OUT, generator=torch.Generator().manual_seed(2))
    loss_U = (x_TI * (g_TO @ w_OI)).view(TOKENS, units.num_units, -1).sum(-1).square().mean(0)
    method = SCORERS.get(scorer)()
    given = loss_U if method.gradient_samples else None
    return method.choose(
        Candidates(w_OI, units, statistics(method, x_TI), torch.Generator().manual_seed(3), given), num_kept
    )


@pytest.mark.parametrize(
    ("name", "method"), [*SCORERS.items(), *COMPENSATIONS.items(), *LAYER_SCORERS.items()]
)
def test_a_method_is_a_spec_that_documents_itself(name: str, method: Any) -> None:
    assert issubclass(method, Spec)
    assert method.model_fields["kind"].default == name
    assert method() == method.model_validate({"kind": name})  # every option has a default
    with pytest.raises(ValueError, match="no_such_option"):
        method.model_validate({"kind": name, "no_such_option": 1})
    fields = {
        key: schema for key, schema in method.model_json_schema()["properties"].items() if key != "kind"
    }
    silent = [key for key, schema in fields.items() if not schema.get("description")]
    assert not silent, f"say what these options are: {silent}"


@EACH_SCORER
@EACH_UNITS
def test_a_score_keeps_as_many_as_asked_of_every_part_and_touches_nothing(scorer: str, units: Units) -> None:
    x_TI = inputs()
    w_OI = weights()
    for num_kept in (units.num_parts, units.num_units // 2, units.num_units - units.num_parts):
        choice = choose(scorer, units, num_kept, w_OI=w_OI, x_TI=x_TI)
        assert (choice.kept_U.dtype, choice.kept_U.shape) == (torch.bool, (units.num_units,))
        assert (
            choice.kept_U.view(units.num_parts, -1).sum(dim=1).tolist()
            == [num_kept // units.num_parts] * units.num_parts
        )
        assert (choice.score_U.dtype, choice.score_U.shape) == (torch.float32, (units.num_units,))
        assert bool(torch.isfinite(choice.score_U).all())
        assert bool((choice.score_U >= 0).all())
        again = choose(scorer, units, num_kept, w_OI=w_OI, x_TI=x_TI)
        assert torch.equal(again.kept_U, choice.kept_U)
        assert torch.equal(again.score_U, choice.score_U)
    assert torch.equal(w_OI, weights())
    assert torch.equal(x_TI, inputs())


@EACH_SCORER
@EACH_UNITS
@pytest.mark.parametrize("silence", ["weights", "inputs"])
def test_what_does_nothing_goes_first(scorer: str, units: Units, silence: str) -> None:
    silent_U = torch.arange(units.num_units) % units.of_part == 1  # one of every part
    if units.num_parts == 1:
        silent_U = torch.arange(units.num_units) % 4 == 1
    silent_I = units.columns(silent_U)
    w_OI = torch.where(silent_I, 0.0, weights()) if silence == "weights" else weights()
    x_TI = inputs(silent_I) if silence == "inputs" else inputs()
    choice = choose(scorer, units, units.num_units - int(silent_U.sum()), w_OI=w_OI, x_TI=x_TI)
    assert torch.equal(choice.kept_U, ~silent_U)


@pytest.mark.parametrize("scorer", [name for name in SCORERS.names() if name != "random"])
def test_what_a_score_keeps_does_more_than_what_it_leaves_out(scorer: str) -> None:
    """Of channels that differ much the half that stays has most of the output."""
    scale_I = torch.where(torch.arange(IN) % 2 == 0, 5.0, 0.2)
    x_TI = inputs() * scale_I
    kept_I = choose(scorer, UNITS["channels"], IN // 2, x_TI=x_TI).kept_U
    share = float((x_TI[:, kept_I] @ weights()[:, kept_I].t()).norm() / (x_TI @ weights().t()).norm())
    assert share > 0.9


@EACH_COMPENSATION
def test_a_compensation_gives_weights_of_what_stays_and_touches_nothing(compensation: str) -> None:
    method = COMPENSATIONS.get(compensation)()
    w_OI = weights()
    kept_I = torch.arange(IN) % 3 != 0
    stats = statistics(method, inputs())
    result = method.compensate(w_OI, kept_I, stats)
    assert (result.w_OK.dtype, result.w_OK.shape) == (torch.float32, (OUT, int(kept_I.sum())))
    assert (result.bias_O is not None) == method.needs_bias
    again = method.compensate(w_OI, kept_I, stats)
    assert torch.equal(again.w_OK, result.w_OK)
    assert torch.equal(w_OI, weights())
    rows = torch.cat([method.compensate(part, kept_I, stats).w_OK for part in w_OI.split(7)])
    assert torch.allclose(rows, result.w_OK, rtol=0, atol=1e-6)


@EACH_COMPENSATION
def test_a_compensation_never_does_worse_than_nothing_on_what_it_has_seen(compensation: str) -> None:
    method = COMPENSATIONS.get(compensation)()
    kept_I = torch.arange(IN) % 3 != 0
    x_TI = inputs()
    result = method.compensate(weights(), kept_I, statistics(method, x_TI))
    bias_O = 0.0 if result.bias_O is None else result.bias_O
    wanted_TO = x_TI @ weights().t()
    left = float((wanted_TO - x_TI[:, kept_I] @ result.w_OK.t() - bias_O).norm())
    nothing = float((wanted_TO - x_TI[:, kept_I] @ weights()[:, kept_I].t()).norm())
    assert left <= nothing * (1 + 1e-6)


@EACH_COMPENSATION
@pytest.mark.parametrize("silence", ["weights", "inputs"])
def test_nothing_is_made_up_for_where_nothing_was_lost(compensation: str, silence: str) -> None:
    method = COMPENSATIONS.get(compensation)()
    kept_I = torch.arange(IN) % 3 != 0
    w_OI = torch.where(kept_I, weights(), 0.0) if silence == "weights" else weights()
    x_TI = inputs(~kept_I) if silence == "inputs" else inputs()
    result = method.compensate(w_OI, kept_I, statistics(method, x_TI))
    assert torch.equal(result.w_OK, w_OI[:, kept_I])
    assert result.bias_O is None or not result.bias_O.any()


@pytest.mark.parametrize("scorer", LAYER_SCORERS.names())
def test_a_layer_that_changes_nothing_has_no_influence(scorer: str) -> None:
    method = LAYER_SCORERS.get(scorer)()
    x_TD = inputs()
    other_TD = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(4))
    assert float(method.influence(x_TD, x_TD)) == pytest.approx(0.0, abs=1e-3)
    assert float(method.influence(x_TD, x_TD + other_TD)) > 1.0

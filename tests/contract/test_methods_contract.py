"""What every rounder, refiner and smoother must keep, over all schemes: a new file under `methods/` is held
to it without an edit here.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.stats import InputStats, SourceStat
from compress.methods.quantize import REFINERS, ROUNDERS, SMOOTHERS, TARGETS
from compress.quant.numerics import nearest_weight, output_error, round_to_nearest, whole_blocks
from compress.quant.scheme import SCHEMES, Scheme
from compress.recipe import Spec

IN = 256
ROWS = (6, 3, 5)
EACH_ROUNDER = pytest.mark.parametrize("rounder", ROUNDERS.names())
EACH_REFINER = pytest.mark.parametrize("refiner", REFINERS.names())
EACH_TARGET = pytest.mark.parametrize("target", TARGETS.names())
EACH_SMOOTHER = pytest.mark.parametrize("smoother", SMOOTHERS.names())
EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(IN, IN, generator=generator) * IN**-0.5
    return (
        torch.randn(700, IN, generator=generator) @ mixing * torch.exp(torch.randn(IN, generator=generator))
    )


def weights() -> Tensor:
    return 0.05 * torch.randn(sum(ROWS), IN, generator=torch.Generator().manual_seed(1))


def stack(scheme: Scheme) -> tuple[Tensor, list[int], list[int]]:
    """Three linears as one matrix; where they begin and end in it, and where their scales do."""
    parts = [whole_blocks(part, scheme) for part in weights().split(ROWS)]
    return torch.cat(parts), [len(part) for part in parts], [len(part) // scheme.block_rows for part in parts]


def statistics(method: Any) -> InputStats:
    """Of the same inputs every time, seen in two samples."""
    stats = InputStats(*(kind() for kind in method.needs()))
    for x_TI in inputs().chunk(2):
        for stat in stats:
            stat.update(x_TI)
    return stats


@pytest.mark.parametrize(
    ("name", "method"), [*ROUNDERS.items(), *REFINERS.items(), *SMOOTHERS.items(), *TARGETS.items()]
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


@EACH_ROUNDER
@EACH_SCHEME
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_a_rounder_gives_codes_scales_and_zero_points_of_the_scheme(
    rounder: str, scheme: Scheme, scale_dtype: torch.dtype
) -> None:
    method = ROUNDERS.get(rounder)()
    w_OI = weights()
    rounded = method.round(w_OI, statistics(method), scheme, scale_dtype=scale_dtype)
    weight = rounded.weight
    assert weight.scheme == scheme
    assert (weight.codes_OI.dtype, weight.codes_OI.shape) == (scheme.code_dtype, w_OI.shape)
    assert (weight.scale_OG.dtype, weight.scale_OG.shape) == (
        scale_dtype,
        (scheme.num_scale_rows(sum(ROWS)), scheme.num_groups(IN)),
    )
    assert bool((weight.scale_OG > 0).all())
    codes = weight.codes_OI.to(torch.float32)
    assert scheme.min_code <= int(codes.min())
    assert int(codes.max()) <= scheme.max_code
    if scheme.symmetric:
        assert weight.zero_point_OG is None
    else:
        assert weight.zero_point_OG is not None
        assert (weight.zero_point_OG.dtype, weight.zero_point_OG.shape) == (torch.int8, weight.scale_OG.shape)
        assert scheme.min_code <= int(weight.zero_point_OG.min())
        assert int(weight.zero_point_OG.max()) <= scheme.max_code
    error = (weight.dequantize(torch.float32) - w_OI).square().mean() / w_OI.square().mean()
    # An integer's steps are shared by a Gaussian's whole range, which costs about 3 bits; e4m3 has 3 bits of
    # mantissa at any size, and e2m1 one.
    # Two bits leave no level but the mean of a group.
    bits = scheme.num_bits - 3 if scheme.type == "int" else {8: 3, 4: 1.5}[scheme.num_bits]
    assert float(error) < 4.0**-bits


@EACH_ROUNDER
@EACH_SCHEME
@pytest.mark.one_in(6)
def test_stacking_linears_does_not_change_their_codes(rounder: str, scheme: Scheme) -> None:
    method = ROUNDERS.get(rounder)()
    w_OI, sizes, scale_sizes = stack(scheme)
    stacked = method.round(w_OI, statistics(method), scheme, scale_dtype=torch.bfloat16).weight
    parts = stacked.codes_OI.split(sizes), stacked.scale_OG.split(scale_sizes)
    for rows, codes_OI, scale_OG in zip(w_OI.split(sizes), *parts, strict=True):
        alone = method.round(rows, statistics(method), scheme, scale_dtype=torch.bfloat16).weight
        assert torch.equal(alone.scale_OG, scale_OG)
        differ = alone.codes_OI.view(torch.int8) != codes_OI.view(torch.int8)
        assert (
            differ.any(dim=1).float().mean() <= 0.4
        )  # matrix products of another height may round a tie the other way
        assert differ.float().mean() < 0.01


@EACH_ROUNDER
@EACH_SCHEME
def test_a_rounder_repeats_itself_and_touches_neither_weights_nor_statistics(
    rounder: str, scheme: Scheme
) -> None:
    method = ROUNDERS.get(rounder)()
    w_OI = weights()
    stats = statistics(method)
    first = method.round(w_OI, stats, scheme, scale_dtype=torch.bfloat16)
    second = method.round(w_OI, stats, scheme, scale_dtype=torch.bfloat16)
    assert torch.equal(first.weight.codes_OI.view(torch.int8), second.weight.codes_OI.view(torch.int8))
    assert torch.equal(first.weight.scale_OG, second.weight.scale_OG)
    assert first.facts == second.facts
    assert torch.equal(w_OI, weights())


@EACH_ROUNDER
@EACH_SCHEME
def test_rounding_twice_is_rounding_once(rounder: str, scheme: Scheme) -> None:
    """A weight already on the grid loses next to nothing: what is left is the choice of another range."""
    method = ROUNDERS.get(rounder)()
    on_grid_OI = method.round(
        weights(), statistics(method), scheme, scale_dtype=torch.bfloat16
    ).weight.dequantize(torch.float32)
    again_OI = method.round(
        on_grid_OI, statistics(method), scheme, scale_dtype=torch.bfloat16
    ).weight.dequantize(torch.float32)
    x_TI = inputs()
    h_II = x_TI.t() @ x_TI / len(x_TI)
    first = output_error(weights(), on_grid_OI, h_II)
    assert output_error(on_grid_OI, again_OI, h_II) < 1.2 * first


@EACH_ROUNDER
@EACH_SCHEME
def test_the_codes_of_a_rounder_are_no_worse_than_nearest_codes_at_its_own_scales(
    rounder: str, scheme: Scheme
) -> None:
    method = ROUNDERS.get(rounder)()
    w_OI = weights()
    x_TI = inputs()
    weight = method.round(w_OI, statistics(method), scheme, scale_dtype=torch.bfloat16).weight
    nearest = round_to_nearest(w_OI, scheme, weight.scale_OG, weight.zero_point_OG)
    h_II = x_TI.t() @ x_TI / len(x_TI)
    assert output_error(w_OI, weight.dequantize(torch.float32), h_II) <= output_error(
        w_OI, nearest.dequantize(torch.float32), h_II
    )


@EACH_ROUNDER
@EACH_REFINER
@EACH_SCHEME
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.one_in(4)
def test_a_refiner_keeps_the_form_of_what_a_rounder_gave_and_never_makes_it_worse(
    rounder: str, refiner: str, scheme: Scheme, scale_dtype: torch.dtype
) -> None:
    first = ROUNDERS.get(rounder)()
    second = REFINERS.get(refiner)()
    w_OI = weights()
    x_TI = inputs()
    given = replace(
        first.round(w_OI, statistics(first), scheme, scale_dtype=scale_dtype).weight,
        input_scale=torch.tensor(0.5),
    )
    before = given.dequantize(torch.float32)
    stats = statistics(second)
    refined = second.refine(w_OI, given, stats).weight
    assert (refined.scheme, refined.input_scale) == (scheme, given.input_scale)
    assert (refined.codes_OI.dtype, refined.codes_OI.shape) == (given.codes_OI.dtype, given.codes_OI.shape)
    assert (refined.scale_OG.dtype, refined.scale_OG.shape) == (given.scale_OG.dtype, given.scale_OG.shape)
    assert bool((refined.scale_OG > 0).all())
    codes = refined.codes_OI.to(torch.float32)
    assert scheme.min_code <= int(codes.min())
    assert int(codes.max()) <= scheme.max_code
    assert (refined.zero_point_OG is None) == (given.zero_point_OG is None)
    h_II = x_TI.t() @ x_TI / len(x_TI)
    assert output_error(w_OI, refined.dequantize(torch.float32), h_II) <= output_error(w_OI, before, h_II)
    again = second.refine(w_OI, given, stats).weight
    assert torch.equal(again.codes_OI.view(torch.int8), refined.codes_OI.view(torch.int8))
    assert torch.equal(again.scale_OG, refined.scale_OG)
    assert torch.equal(given.dequantize(torch.float32), before)
    assert torch.equal(w_OI, weights())


@EACH_REFINER
@EACH_SCHEME
@pytest.mark.one_in(4)
def test_refining_a_stack_refines_its_linears(refiner: str, scheme: Scheme) -> None:
    method = REFINERS.get(refiner)()
    (w_OI, sizes, scale_sizes) = stack(scheme)
    given = nearest_weight(w_OI, scheme, torch.bfloat16)
    stacked = method.refine(w_OI, given, statistics(method)).weight
    parts = stacked.codes_OI.split(sizes), stacked.scale_OG.split(scale_sizes)
    for rows, codes_OI, scale_OG in zip(w_OI.split(sizes), *parts, strict=True):
        alone = method.refine(rows, nearest_weight(rows, scheme, torch.bfloat16), statistics(method)).weight
        differ = (alone.codes_OI.view(torch.int8) != codes_OI.view(torch.int8)).any(dim=1)
        differ |= scheme.by_row((alone.scale_OG != scale_OG).any(dim=1, keepdim=True), len(rows)).squeeze(1)
        assert differ.float().mean() <= 0.4  # as above: a tie now and then


def beside(method: Any, source_TI: Tensor) -> InputStats:
    """Statistics of the inputs where the source model has others."""
    stats = InputStats(*(kind() for kind in method.needs()))
    for x_TI, of_source_TI in zip(inputs().chunk(2), source_TI.chunk(2), strict=True):
        for stat in stats:
            if isinstance(stat, SourceStat):
                stat.update_with_source(x_TI, of_source_TI)
            else:
                stat.update(x_TI)
    return stats


@EACH_TARGET
def test_a_target_is_the_weights_themselves_where_the_inputs_are_those_of_the_source(target: str) -> None:
    method = TARGETS.get(target)()
    w_OI = weights()
    for stats in (statistics(method), beside(method, inputs())):
        assert torch.equal(method.target(w_OI, stats), weights())


@EACH_TARGET
def test_a_target_repeats_itself_row_by_row_and_touches_neither_weights_nor_statistics(target: str) -> None:
    method = TARGETS.get(target)()
    w_OI = weights()
    stats = beside(method, inputs() + 0.1 * inputs().roll(1, dims=1))
    first = method.target(w_OI, stats)
    assert (first.dtype, first.shape) == (torch.float32, w_OI.shape)
    assert 0 < float((first - w_OI).norm()) < float(w_OI.norm())
    assert torch.equal(method.target(w_OI, stats), first)
    assert torch.equal(w_OI, weights())
    rows = torch.cat([method.target(part, stats) for part in w_OI.split(ROWS)])
    assert torch.allclose(rows, first, rtol=0, atol=1e-6 * float(first.abs().max()))


@EACH_SMOOTHER
@EACH_SCHEME
@pytest.mark.parametrize("head_repeat", [(1, 0), (2, 32), (4, 64)])
def test_a_smoother_gives_one_positive_scale_per_input_and_ties_what_reads_one_channel(
    smoother: str, scheme: Scheme, head_repeat: tuple[int, int]
) -> None:
    method = SMOOTHERS.get(smoother)()
    w_OI = weights()
    scale_I = method.scale(
        w_OI, statistics(method), scheme, scale_dtype=torch.bfloat16, head_repeat=head_repeat
    )
    assert (scale_I.dtype, scale_I.shape) == (torch.float32, (IN,))
    assert bool(torch.isfinite(scale_I).all())
    assert bool((scale_I > 0).all())
    repeat, head_dim = head_repeat
    if repeat > 1:
        scale_KRC = scale_I.view(-1, repeat, head_dim)
        assert torch.equal(scale_KRC, scale_KRC[:, :1].expand_as(scale_KRC))
    assert torch.equal(w_OI, weights())
    again = method.scale(
        w_OI, statistics(method), scheme, scale_dtype=torch.bfloat16, head_repeat=head_repeat
    )
    assert torch.equal(again, scale_I)

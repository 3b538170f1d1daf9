"""Static and asymmetric INT8 inputs through the whole of quantization and serving: where scales and zero
points come from, what they cost, and that an engine serves what they say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.calibrate.input_range import range_stats, static_input
from compress.calibrate.stats import AbsMax, InputStats, Range
from compress.errors import UsageError
from compress.kernels.operands.rows import input_quant, quantize
from compress.models.canonical import layer_name, load_weights
from compress.models.weights import build_decoder
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.engine import Engine
from compress.stages.quantize.spec import HEAD_SCHEMES
from tests.support.tiny_decoder import tiny_source, tiny_tokens
from tests.unit.quant.test_fp8 import ARCH, CPU, TOKENS, Upto, quantized

NAMES = ("INT8_DYNAMIC", "INT8_DYNAMIC_ASYM", "INT8_STATIC", "INT8_STATIC_ASYM")


def rounding(value: QuantizedWeight) -> Callable[[object, tuple[Tensor, ...]], tuple[Tensor]]:
    """Return a hook that rounds the inputs of a linear as its weight says."""
    quant = input_quant([value], CPU)
    assert quant is not None

    def rounded(_: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        rows = quantize(inputs[0].flatten(0, -2), quant)
        return (rows.dequantize(torch.float32).view_as(inputs[0]),)

    return rounded


@pytest.fixture(scope="module", params=NAMES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Upto:
    """The tiny model in one of the schemes, by plain rounding."""
    directory = tmp_path_factory.mktemp(request.param) / "store"
    source = tiny_source(ARCH)
    spec = {"scheme": request.param, "round": {"kind": "rtn"}}
    return Upto(source, *quantized(directory, spec, source), end=ARCH.num_layers)


@torch.no_grad()
def test_the_engine_serves_what_the_decoder_computes_of_rounded_inputs(store: Upto) -> None:
    """To float32's precision in most logits: sums in another order move an input over a tie now and then."""
    decoder, unrounded = (build_decoder(store, dtype=torch.float32, device=CPU) for _ in range(2))
    layers = [store.layer(idx) for idx in range(ARCH.num_layers)]
    for idx, weights in enumerate(layers):
        for name, value in weights.items():
            if isinstance(value, QuantizedWeight):
                linear = decoder.get_submodule(f"layers.{idx}.{name.removesuffix('.weight')}")
                linear.register_forward_pre_hook(rounding(value))
    tokens = tiny_tokens(ARCH, 3, 40, seed=5)
    engine = Engine(store, device=CPU)
    served, expected = engine.runner.score(tokens), decoder(tokens)
    of_rounding = (unrounded(tokens) - expected).abs()
    difference = (served - expected).abs()
    assert difference.median() < 1e-3 * of_rounding.median()
    assert difference.max() < of_rounding.max()
    kernels = {
        row["kernel"] for row in engine.kernel_report() if row["op"] == "linear" and row["scheme"] in NAMES
    }
    assert kernels <= {"reference.int8", "bags.int8"}
    assert kernels


@torch.no_grad()
def test_a_static_range_is_that_of_the_inputs_behind_the_layers_already_quantized(tmp_path: Path) -> None:
    """Against inputs caught in a decoder whose earlier layers are the quantized ones; linears over one input
    share the scale and the zero point, which reach both ends of it."""
    source = tiny_source(ARCH.replace(dtype="float32"))
    directory, scheme = quantized(tmp_path / "store", {"scheme": "INT8_STATIC_ASYM"}, source)
    for idx in range(ARCH.num_layers):
        coded = {
            name.removesuffix(".weight"): value
            for name, value in load_weights(directory / layer_name(idx), scheme).items()
            if isinstance(value, QuantizedWeight)
        }
        decoder = build_decoder(Upto(source, directory, scheme, end=idx), dtype=torch.float32, device=CPU)
        ends: dict[str, tuple[float, float]] = {}
        for linear in coded:
            decoder.get_submodule(f"layers.{idx}.{linear}").register_forward_pre_hook(
                lambda _, inputs, linear=linear, ends=ends: ends.update(
                    {linear: (float(inputs[0].min()), float(inputs[0].max()))}
                )
            )
        decoder(TOKENS)
        for linear, value in coded.items():
            assert value.input_scale is not None
            assert value.input_zero_point is not None
            least, most = ends[linear]
            scale, zero = float(value.input_scale), int(value.input_zero_point)
            assert scale == pytest.approx((most - least) / 255, rel=1e-4)
            assert (-128 - zero) * scale == pytest.approx(least, abs=0.51 * scale)
            assert (127 - zero) * scale == pytest.approx(most, abs=0.51 * scale)
        for shared in (("attn.q", "attn.k", "attn.v"), ("ffn.gate", "ffn.up")):
            assert len({float(coded[each].input_scale or 0) for each in shared}) == 1
            assert len({int(coded[each].input_zero_point or 0) for each in shared}) == 1


@pytest.mark.parametrize("name", ["INT8_STATIC", "INT8_STATIC_ASYM"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_inputs_without_a_range_have_no_scale(name: str, broken: float) -> None:
    scheme = SCHEMES[name]
    stats = InputStats(*(kind() for kind in range_stats([scheme])))
    x_TI = torch.ones(4, 8)
    x_TI[1, 3] = broken
    for stat in stats:
        stat.update(x_TI)
    with pytest.raises(UsageError, match="NaN or infinity"):
        static_input(stats, scheme, torch.float32)


def test_only_the_ranges_that_schemes_read_are_observed() -> None:
    schemes = [SCHEMES[name] for name in NAMES]
    assert range_stats(schemes) == (AbsMax, Range)
    assert [range_stats([each]) for each in schemes] == [(), (), (AbsMax,), (Range,)]
    assert range_stats([SCHEMES["FP8_STATIC"]]) == (AbsMax,)


def test_a_head_takes_schemes_whose_rows_have_their_own_scales() -> None:
    assert {name for name in NAMES if name in HEAD_SCHEMES} == {"INT8_DYNAMIC", "INT8_DYNAMIC_ASYM"}

"""The layer-by-layer runner: each layer is calibrated on what the compressed layers before it give, and a cut
run ends in the same bytes.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_state import LayerPass, LayerState, Row
from compress.calibrate.observe import observe_on_one_rank
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.stats import AbsMean, InputStats, SecondMoment, Stat
from compress.context import Context
from compress.errors import Interrupted
from compress.methods.quantize import Smoother
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass, SmoothPass
from compress.methods.quantize.rtn import Rtn
from compress.models.attention import FullAttention
from compress.models.canonical import OUTER_NAME, layer_name, load_weights
from compress.models.decoder import DecoderLayer
from compress.models.weights import WeightSource, dense, fill_
from compress.quant.numerics import grouped, min_max_scale, output_error, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.stop_after import StopAfter
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_decoder, tiny_source, tiny_tokens

NUM_SAMPLES = 11
SEQ_LEN = 13
W8 = SCHEMES["W8A16"]
AWQ_GPTQ = Quantize.model_validate(
    {"scheme": "W8A16", "smooth": {"kind": "awq", "num_ratios": 3}, "round": {"kind": "gptq"}}
)
RTN = Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "rtn"}})


def run(out: Path, spec: Quantize, source: WeightSource, *, stop_after: int | None = None) -> list[Row]:
    out.mkdir(exist_ok=True)
    ctx = (
        Context("cpu", 0, out)
        if stop_after is None
        else Context("cpu", 0, out, stop_signal=StopAfter(stop_after))
    )
    dtype = getattr(torch, source.arch.dtype)
    return run_sequential(
        source,
        tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN),
        Compression(quantization_passes(spec, SCHEMES[spec.scheme], dtype), scheme=SCHEMES[spec.scheme]),
        out,
        ctx,
        compute_dtype=torch.float32,
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return tiny_source(tiny_arch(QWEN3, dtype="bfloat16"))


@pytest.fixture(scope="module")
def undisturbed(
    source: WeightSource, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], list[Row]]:
    out = tmp_path_factory.mktemp("undisturbed")
    rows = run(out, AWQ_GPTQ, source)
    return contents(out), rows


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_run_stopped_at_a_layer_boundary_ends_in_the_same_bytes(
    stop_after: int, source: WeightSource, undisturbed: tuple[dict[str, bytes], list[Row]], tmp_path: Path
) -> None:
    with pytest.raises(Interrupted) as stopped:
        run(tmp_path, AWQ_GPTQ, source, stop_after=stop_after)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert [(tmp_path / layer_name(idx)).exists() for idx in range(3)] == [
        idx < stop_after for idx in range(3)
    ]
    assert run(tmp_path, AWQ_GPTQ, source) == undisturbed[1]
    assert contents(tmp_path) == undisturbed[0]


@pytest.mark.parametrize("lost", [[2], [1, 2], [0, 1, 2]])
def test_a_lost_tail_of_layers_is_made_again_in_the_same_bytes(
    lost: list[int], source: WeightSource, undisturbed: tuple[dict[str, bytes], list[Row]], tmp_path: Path
) -> None:
    for name, data in undisturbed[0].items():
        (tmp_path / name).write_bytes(data)
    kept = {
        layer_name(idx): (tmp_path / layer_name(idx)).stat().st_mtime_ns
        for idx in range(3)
        if idx not in lost
    }
    for idx in lost:
        (tmp_path / layer_name(idx)).unlink()
    run(tmp_path, AWQ_GPTQ, source)
    assert contents(tmp_path) == undisturbed[0]
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in kept.items())


def test_every_linear_has_a_row_and_the_rows_follow_the_layers(
    undisturbed: tuple[dict[str, bytes], list[Row]],
) -> None:
    rows = undisturbed[1]
    linears = list(tiny_arch().layers[0].linears)
    assert [row["layer"] for row in rows] == [idx for idx in range(3) for _ in linears]
    assert {(row["layer"], row["linear"]) for row in rows} == {
        (idx, linear) for idx in range(3) for linear in linears
    }
    for row in rows:
        assert 0 < row["error_after"] < 2 * row["error_before"]
        assert row["damping"] == 0.01


@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_plain_rounding_does_not_depend_on_calibration(config: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_source(tiny_arch(config, dtype="float16"))
    run(tmp_path, RTN, source)
    assert all(
        torch.equal(dense(load_weights(tmp_path / OUTER_NAME, None)[name]), dense(value))
        for name, value in source.outer().items()
    )
    for idx in range(3):
        stored = load_weights(tmp_path / layer_name(idx), W8)
        original = source.layer(idx)
        assert stored.keys() == original.keys()
        for name, value in original.items():
            assert isinstance(value, Tensor)
            found = stored[name]
            if name.removesuffix(".weight") not in source.arch.layers[idx].linears:
                assert isinstance(found, Tensor)
                assert torch.equal(found, value), name
                continue
            assert isinstance(found, QuantizedWeight)
            nearest = round_to_nearest(
                value.float(), W8, *min_max_scale(grouped(value.float(), W8), W8, torch.float16)
            )
            assert torch.equal(found.codes_OI, nearest.codes_OI)
            assert torch.equal(found.scale_OG, nearest.scale_OG)


def inputs_of_layer(source: WeightSource, directory: Path, idx: int) -> Tensor:
    """What the stored layers before `idx` make of the calibration tokens: one batch through plain modules, no
    runner involved.
    """
    x_NSD = dense(source.outer()["embed.weight"]).float()[
        tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN).long()
    ]
    for before in range(idx):
        layer = DecoderLayer(source.arch, before)
        fill_(
            layer,
            load_weights(directory / layer_name(before), W8),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        with torch.no_grad():
            x_NSD = layer(x_NSD, torch.arange(SEQ_LEN), FullAttention())
    return x_NSD


class Remember:
    """A pass that changes nothing and keeps the moments it was shown."""

    def __init__(self) -> None:
        self.moments: list[dict[str, Tensor]] = []

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def apply(self, state: LayerState) -> None:
        seen = {}
        for tap, stats in state.stats.items():
            moment = stats[SecondMoment]
            assert moment.num_tokens == NUM_SAMPLES * SEQ_LEN
            seen[tap] = moment.mean()
        self.moments.append(seen)


def test_a_layer_is_calibrated_on_the_output_of_the_compressed_layers(
    source: WeightSource, tmp_path: Path
) -> None:
    remember = Remember()
    coarse = Scheme(
        "W2", 2, symmetric=True, group_size=None
    )  # so coarse that the dense layers would give other moments
    passes: list[LayerPass] = [remember, RoundPass(Rtn(), coarse, torch.bfloat16)]
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    run_sequential(
        source,
        tokens_NS,
        Compression(passes, scheme=coarse),
        tmp_path,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
    )
    decoder = tiny_decoder(source.arch)
    x_NSD = dense(source.outer()["embed.weight"]).float()[tokens_NS.long()]
    dense_x_NSD = x_NSD
    for idx, seen in enumerate(remember.moments):
        layer = decoder.layers[idx]
        assert isinstance(layer, DecoderLayer)
        fill_(layer, source.layer(idx), dtype=torch.float32, device=torch.device("cpu"))
        taps: dict[str, Tensor] = {}
        layer(x_NSD, torch.arange(SEQ_LEN), FullAttention(), taps.__setitem__)
        assert seen.keys() == taps.keys() == {"attn_in", "attn_out", "ffn_in", "ffn_mid"}
        for tap, x in taps.items():
            x_TI = x.flatten(0, 1).double()
            expected = x_TI.t() @ x_TI / len(x_TI)
            assert torch.allclose(
                seen[tap].double(), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())
            ), (idx, tap)
        taps_of_dense: dict[str, Tensor] = {}
        dense_x_NSD = layer(dense_x_NSD, torch.arange(SEQ_LEN), FullAttention(), taps_of_dense.__setitem__)
        if idx > 0:
            assert not torch.allclose(taps_of_dense["attn_in"], taps["attn_in"], rtol=0.05, atol=0.05)
        fill_(
            layer,
            load_weights(tmp_path / layer_name(idx), coarse),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        x_NSD = layer(x_NSD, torch.arange(SEQ_LEN), FullAttention())


def test_taps_see_what_their_linears_read(source: WeightSource) -> None:
    """Forward hooks on the linears are the independent witness."""
    layer = tiny_decoder(source.arch).layers[1]
    assert isinstance(layer, DecoderLayer)
    x_NSD = torch.randn(
        NUM_SAMPLES, SEQ_LEN, source.arch.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    stats = observe_on_one_rank(layer, x_NSD, [AbsMean])
    read: dict[str, Tensor] = {}
    for name in layer.shape.linears:
        layer.linear(name).register_forward_hook(
            lambda module, args, out, name=name: read.__setitem__(name, args[0])
        )
    layer(x_NSD, torch.arange(SEQ_LEN), FullAttention())
    for group in layer.groups():
        seen = stats[group.tap][AbsMean]
        for linear in group.linears:
            assert layer.shape.linears[linear] == group.tap
            assert torch.allclose(seen.mean(), read[linear].flatten(0, 1).abs().mean(0), rtol=1e-5)
    assert [linear for group in layer.groups() for linear in group.linears] == list(layer.shape.linears)


def test_the_reported_error_is_that_of_the_stored_codes(source: WeightSource, tmp_path: Path) -> None:
    spec = Quantize.model_validate({"scheme": "W8A16", "round": {"kind": "gptq"}})
    rows = run(tmp_path, spec, source)
    for idx in range(3):
        layer = DecoderLayer(source.arch, idx)
        fill_(layer, source.layer(idx), dtype=torch.float32, device=torch.device("cpu"))
        taps: dict[str, Tensor] = {}
        with torch.no_grad():
            layer(
                inputs_of_layer(source, tmp_path, idx),
                torch.arange(SEQ_LEN),
                FullAttention(),
                taps.__setitem__,
            )
        stored = load_weights(tmp_path / layer_name(idx), W8)
        for linear, tap in layer.shape.linears.items():
            weight = dense(source.layer(idx)[f"{linear}.weight"]).float()
            x_TI = taps[tap].flatten(0, 1)
            row = next(row for row in rows if (row["layer"], row["linear"]) == (idx, linear))
            h_II = x_TI.t() @ x_TI / len(x_TI)
            assert row["error_after"] == pytest.approx(
                output_error(weight, dense(stored[f"{linear}.weight"]), h_II), rel=1e-2
            )
            nearest = round_to_nearest(weight, W8, *min_max_scale(grouped(weight, W8), W8, torch.bfloat16))
            assert row["error_before"] == pytest.approx(
                output_error(weight, nearest.dequantize(), h_II), rel=1e-2
            )


class Arbitrary(Smoother):
    """A smoother that proposes scales far from one, whatever the weights."""

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def no_effect_on(self, scheme: Scheme) -> str | None:
        return None

    def scale(
        self,
        w_OI: Tensor,
        stats: InputStats,
        scheme: Scheme,
        *,
        scale_dtype: torch.dtype,
        head_repeat: tuple[int, int],
    ) -> Tensor:
        repeat, head_dim = head_repeat
        size = w_OI.shape[1] // repeat
        scale_I = torch.exp(0.5 * torch.randn(size, generator=torch.Generator().manual_seed(size)))
        return scale_I if repeat == 1 else scale_I.view(-1, 1, head_dim).expand(-1, repeat, -1).reshape(-1)


def test_smoothing_is_stored_with_the_weights_it_was_folded_into(
    source: WeightSource, tmp_path: Path
) -> None:
    """The stored layer, dequantized, still computes the dense layer, and the rounder saw the statistics of
    the smoothed inputs.
    """
    remember = Remember()
    passes: list[LayerPass] = [
        SmoothPass(Arbitrary(), W8, torch.bfloat16),
        remember,
        RoundPass(Rtn(), W8, torch.bfloat16),
    ]
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    run_sequential(
        source,
        tokens_NS,
        Compression(passes, scheme=W8),
        tmp_path,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
    )
    stored = load_weights(tmp_path / layer_name(0), W8)
    x_NSD = inputs_of_layer(source, tmp_path, 0)
    outputs = []
    taps = []
    for weights in (source.layer(0), stored):
        layer = DecoderLayer(source.arch, 0)
        fill_(layer, weights, dtype=torch.float32, device=torch.device("cpu"))
        taps.append(dict[str, Tensor]())
        with torch.no_grad():
            outputs.append(layer(x_NSD, torch.arange(SEQ_LEN), FullAttention(), taps[-1].__setitem__) - x_NSD)
    assert (
        float((outputs[1] - outputs[0]).norm() / outputs[0].norm()) < 0.03
    )  # 8 bits and bf16: about 2^-7 each, several in a row
    for tap, x in taps[1].items():
        x_TI = x.flatten(0, 1)
        expected = x_TI.t() @ x_TI / len(x_TI)
        assert (remember.moments[0][tap] - expected).norm() / expected.norm() < 0.06, tap
        assert (taps[0][tap] - x).norm() / x.norm() > 0.2  # the scale did move


def test_passes_are_baseline_then_smoother_then_rounder() -> None:
    names = [type(each).__name__ for each in quantization_passes(AWQ_GPTQ, W8, torch.bfloat16)]
    assert names == ["BaselinePass", "SmoothPass", "RoundPass"]
    assert isinstance(AWQ_GPTQ.round, Gptq)
    assert [type(each).__name__ for each in quantization_passes(RTN, W8, torch.bfloat16)] == [
        "BaselinePass",
        "RoundPass",
    ]

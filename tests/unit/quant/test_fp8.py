"""FP8 through the whole of quantization: its loss, where static input scales come from, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import LayerState
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.stats import AbsMax, InputStats, SecondMoment
from compress.context import Context
from compress.errors import UsageError
from compress.kernels.operands.rows import FP8, INT8, ActivationQuant, quantize
from compress.kernels.problem import Problem
from compress.kernels.select import select
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.arch import Arch
from compress.models.canonical import layer_name, load_weights
from compress.models.decoder import Decoder
from compress.models.linear_groups import LinearGroup
from compress.models.weights import WeightSource, build_decoder
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme, scheme_named
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_source, tiny_tokens

CPU = torch.device("cpu")
ARCH = tiny_arch(
    LLAMA, hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32, num_hidden_layers=2
)
TOKENS = tiny_tokens(ARCH, 6, 24)


class Upto:
    """The stored layers before `end`, the source's from there on."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, directory: Path, scheme: Scheme, end: int) -> None:
        self._source = source
        self._directory = directory
        self._scheme = scheme
        self._end = end

    @property
    def arch(self) -> Arch:
        return self._source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return (
            load_weights(self._directory / layer_name(layer_idx), self._scheme)
            if layer_idx < self._end
            else self._source.layer(layer_idx)
        )


def quantized(directory: Path, spec: dict[str, Any], source: WeightSource) -> tuple[Path, Scheme]:
    directory.mkdir(parents=True)
    parsed = Quantize.model_validate(spec)
    dtype = getattr(torch, source.arch.dtype)
    scheme = scheme_named(parsed.scheme)
    ctx = Context("cpu", 0, directory)
    passes = quantization_passes(parsed, scheme, dtype)
    run_sequential(
        source, TOKENS, Compression(passes, scheme=scheme), directory, ctx, compute_dtype=torch.float32
    )
    return directory, scheme


def hook_inputs(decoder: Decoder, source: WeightSource) -> None:
    """Round the inputs of every linear as its scheme says."""

    def rounded(x: Tensor, input_scale: Tensor | None) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448 if input_scale is None else input_scale
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale

    for idx in range(source.arch.num_layers):
        for name, value in source.layer(idx).items():
            if isinstance(value, QuantizedWeight) and value.scheme.activation is not None:
                linear = decoder.get_submodule(f"layers.{idx}.{name.removesuffix('.weight')}")
                linear.register_forward_pre_hook(
                    lambda _, inputs, scale=value.input_scale: (rounded(inputs[0], scale),)
                )


@torch.no_grad()
def divergence(directory: Path, spec: dict[str, Any]) -> float:
    """Mean KL divergence of a quantized model from its source, on tokens that calibration did not see."""
    source = tiny_source(ARCH)
    store = Upto(source, *quantized(directory, spec, source), end=ARCH.num_layers)
    decoder = build_decoder(store, dtype=torch.float32, device=CPU)
    hook_inputs(decoder, store)
    tokens = tiny_tokens(ARCH, 16, 24, seed=11)
    before, after = (
        torch.log_softmax(each(tokens), -1)
        for each in (build_decoder(source, dtype=torch.float32, device=CPU), decoder)
    )
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_fp8_lies_between_four_and_eight_integer_bits(tmp_path: Path) -> None:
    rtn = {"round": {"kind": "rtn"}}
    kl = {
        name: divergence(tmp_path / name, {"scheme": name, **rtn})
        for name in ("W4A16_G128", "W8A16", "FP8_DYNAMIC", "FP8_STATIC")
    }
    assert 0 < kl["W8A16"] < kl["FP8_DYNAMIC"] < kl["W4A16_G128"] / 3
    assert kl["W8A16"] < kl["FP8_STATIC"] < kl["W4A16_G128"] / 3


@torch.no_grad()
def largest_inputs(decoder: Decoder, layer_idx: int, linears: list[str]) -> dict[str, float]:
    """Largest |x| that each linear of a layer reads over the calibration tokens."""
    largest: dict[str, float] = {}
    for linear in linears:
        module = decoder.get_submodule(f"layers.{layer_idx}.{linear}")
        module.register_forward_pre_hook(
            lambda _, inputs, linear=linear: largest.update({linear: float(inputs[0].abs().max())})
        )
    decoder(TOKENS)
    return largest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_static_scale_is_the_range_of_the_inputs_behind_the_layers_already_quantized(
    dtype: str, tmp_path: Path
) -> None:
    """Against inputs caught in a decoder whose earlier layers are the quantized ones; linears over one input
    share its scale.
    """
    source = tiny_source(ARCH.replace(dtype=dtype))
    directory, scheme = quantized(tmp_path / "store", {"scheme": "FP8_STATIC"}, source)
    for idx in range(ARCH.num_layers):
        weights = load_weights(directory / layer_name(idx), scheme)
        coded = {
            name.removesuffix(".weight"): value
            for name, value in weights.items()
            if isinstance(value, QuantizedWeight)
        }
        decoder = build_decoder(Upto(source, directory, scheme, end=idx), dtype=torch.float32, device=CPU)
        largest = largest_inputs(decoder, idx, list(coded))
        assert len(coded) == 7
        for linear, value in coded.items():
            assert value.input_scale is not None
            assert (value.input_scale.dtype, value.input_scale.shape) == (torch.float32, ())
            assert float(value.input_scale) == pytest.approx(
                largest[linear] / 448, rel=1e-4 if dtype == "float32" else 2**-8
            )
        assert coded["attn.q"].input_scale == coded["attn.k"].input_scale == coded["attn.v"].input_scale
        assert coded["ffn.gate"].input_scale == coded["ffn.up"].input_scale


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_inputs_without_a_range_have_no_static_scale(broken: float) -> None:
    """Without this the scale of NaN would be 1, and look like any other."""
    scheme = scheme_named("FP8_STATIC")
    x_TI = torch.ones(4, 8)
    x_TI[1, 3] = broken
    stats = InputStats(SecondMoment(), AbsMax())
    for stat in stats:
        stat.update(x_TI)
    state = LayerState(
        0,
        [LinearGroup("qkv", "attn_in", ("attn.q",))],
        [],
        {"attn.q.weight": torch.ones(2, 8)},
        {"attn_in": stats},
        LayerRun.on_one_rank(torch.zeros(1, 1, 1)),
    )
    with pytest.raises(UsageError, match=r"layer 0, attn\.q: .*NaN or infinity"):
        RoundPass(Rtn(), scheme, torch.bfloat16).apply(state)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_STATIC"])
def test_awq_is_refused_where_steps_are_relative_already(scheme: str) -> None:
    with pytest.raises(ValueError, match=f"awq does nothing for {scheme}"):
        Quantize.model_validate({"scheme": scheme, "smooth": {"kind": "awq"}})
    assert Quantize.model_validate({"scheme": scheme, "round": {"kind": "gptq"}}).smooth is None


@pytest.mark.parametrize("head", ["W4A16_G128", "FP8_STATIC"])
def test_a_head_that_would_need_calibration_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match="without calibration"):
        Quantize.model_validate({"head": head})
    with pytest.raises(ValueError, match="FP8_DYNAMIC"):
        Quantize.model_validate({"head": "FP8_DYNAMC"})


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_sums_of_codes_do_not_overflow_float16(scheme: str) -> None:
    """Two rows that agree in every sign have the largest sum there is: a number of float16 once scaled."""
    num_features = 512
    weight = nearest_weight(torch.full((8, num_features), 2.0**-9), SCHEMES[scheme], torch.float16)
    problem = Problem("linear", 8, num_features, 1, 4, True, scheme, torch.float16, "cpu", 0)
    kernel = select(problem)
    dtype = INT8 if scheme.startswith("INT8") else FP8
    rows = quantize(torch.ones(2, num_features, dtype=torch.float16), ActivationQuant(dtype=dtype))
    packed = kernel.repack([weight], dtype=torch.float16, device=torch.device("cpu"), gated=False)
    y_TO = kernel.fn(rows, packed, torch.zeros(8, dtype=torch.float16))
    assert y_TO.dtype == torch.float16
    assert torch.allclose(y_TO, torch.ones(()).half(), rtol=0.01)

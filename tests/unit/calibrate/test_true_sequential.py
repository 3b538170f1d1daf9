"""Linears compressed in turn: what each is shown, that the samples end behind the compressed layer, and what
is refused.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_state import LayerPass, LayerState, Row
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.stats import CrossMoment, SecondMoment, Stat
from compress.context import Context
from compress.errors import Interrupted, RecipeError
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.canonical import layer_name, load_weights
from compress.models.weights import Weights, WeightSource, build_decoder
from compress.quant.scheme import SCHEMES, Scheme
from compress.recipe import parse_spec, read_yaml
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.schemes import model_scheme
from compress.stages.quantize.spec import Quantize
from tests.support.stop_after import StopAfter
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_source, tiny_tokens

NUM_SAMPLES = 11
SEQ_LEN = 13
COARSE = Scheme(
    "W2", 2, symmetric=True, group_size=None
)  # so coarse that linears as they were would give other moments
W8 = SCHEMES["W8A16"]
TAPS = ("attn_in", "attn_out", "ffn_in", "ffn_mid")


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return tiny_source(tiny_arch(QWEN3, dtype="bfloat16"))


def run(
    out: Path, passes: list[LayerPass], source: WeightSource, *, scheme: Scheme = W8, stop_after: int = 99
) -> list[Row]:
    out.mkdir(exist_ok=True)
    ctx = Context("cpu", 0, out, stop_signal=StopAfter(stop_after))
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    return run_sequential(
        source,
        tokens_NS,
        Compression(passes, scheme=scheme, kv_scales=True, true_sequential=True),
        out,
        ctx,
        compute_dtype=torch.float32,
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Look:
    """A pass that keeps the moments and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, Tensor, Tensor]] = []

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, CrossMoment

    def apply(self, state: LayerState) -> None:
        ((tap, stats),) = state.stats.items()
        assert [group.tap for group in state.groups] == [tap]
        moment = stats[SecondMoment]
        cross = stats[CrossMoment]
        self.seen.append((state.layer_idx, tap, moment.mean(), cross.mean()))


class Mixed:
    """Stored linears up to a tap of a layer, the source's from there on."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, directory: Path, layer_idx: int, tap: str) -> None:
        self._source = source
        self._directory = directory
        self._end = (layer_idx, TAPS.index(tap))
        self.arch = source.arch

    def outer(self) -> Weights:
        return self._source.outer()

    def layer(self, layer_idx: int) -> Weights:
        weights = self._source.layer(layer_idx)
        stored = load_weights(self._directory / layer_name(layer_idx), COARSE)
        taps = self.arch.layers[layer_idx].linears
        done = [linear for linear, tap in taps.items() if (layer_idx, TAPS.index(tap)) < self._end]
        return weights | {f"{linear}.weight": stored[f"{linear}.weight"] for linear in done}


@torch.no_grad()
def inputs_at(weights: WeightSource, layer_idx: int, tap: str) -> Tensor:
    """[T, I]: a hook on a whole decoder, no runner involved."""
    decoder = build_decoder(weights, dtype=torch.float32, device=torch.device("cpu"))
    read = list[Tensor]()
    linear = next(linear for linear, its in weights.arch.layers[layer_idx].linears.items() if its == tap)
    decoder.get_submodule(f"layers.{layer_idx}.{linear}").register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].flatten(0, 1))
    )
    decoder(tiny_tokens(weights.arch, NUM_SAMPLES, SEQ_LEN))
    return read[0].double()


def test_each_group_is_shown_what_those_before_it_have_become(source: WeightSource, tmp_path: Path) -> None:
    look = Look()
    run(tmp_path, [look, RoundPass(Rtn(), COARSE, torch.bfloat16)], source, scheme=COARSE)
    assert [seen[:2] for seen in look.seen] == [
        (idx, tap) for idx in range(source.arch.num_layers) for tap in TAPS
    ]
    for idx, tap, moment, cross in look.seen:
        x_TI, source_TI = (
            inputs_at(Mixed(source, tmp_path, idx, tap), idx, tap),  # type: ignore[arg-type]
            inputs_at(source, idx, tap),
        )
        for found, expected in ((moment, x_TI.t() @ x_TI), (cross, (source_TI - x_TI).t() @ x_TI)):
            expected /= len(x_TI)
            assert torch.allclose(
                found.double(), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())
            ), (idx, tap)
        if (idx, tap) != (0, "attn_in"):
            assert float((source_TI - x_TI).norm() / source_TI.norm()) > 0.05


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_run_stopped_at_a_layer_boundary_ends_in_the_same_bytes(
    stop_after: int, source: WeightSource, tmp_path: Path
) -> None:
    """The samples behind a layer that was compressed in turn are those behind the stored layer."""
    spec = Quantize.model_validate(
        {"scheme": "W8A16", "target": {"kind": "gptaq"}, "round": {"kind": "gptq"}, "true_sequential": True}
    )
    passes = quantization_passes(spec, W8, torch.bfloat16)
    undisturbed = run(tmp_path / "undisturbed", passes, source)
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", passes, source, stop_after=stop_after)
    assert run(tmp_path / "cut", passes, source) == undisturbed
    assert contents(tmp_path / "cut") == contents(tmp_path / "undisturbed")


def test_a_layer_ends_nearer_to_that_of_the_source(source: WeightSource, tmp_path: Path) -> None:
    """In turn, what o and down aim at is the source's output, behind linears that lost something already."""
    errors = {}
    tokens_NS = tiny_tokens(source.arch, 64, SEQ_LEN)
    spec = Quantize.model_validate({"target": {"kind": "gptaq", "strength": 1.0}, "round": {"kind": "gptq"}})
    for true_sequential in (False, True):
        out = tmp_path / str(true_sequential)
        out.mkdir()
        passes = quantization_passes(spec, COARSE, torch.bfloat16)
        ctx = Context("cpu", 0, out)
        run_sequential(
            source,
            tokens_NS,
            Compression(passes, scheme=COARSE, true_sequential=true_sequential),
            out,
            ctx,
            compute_dtype=torch.float32,
        )
        mixed = Mixed(source, out, source.arch.num_layers, TAPS[0])
        decoders = [
            build_decoder(each, dtype=torch.float32, device=torch.device("cpu")) for each in (source, mixed)
        ]  # type: ignore[list-item]
        with torch.no_grad():
            expected, found = (decoder.hidden(tokens_NS.to(torch.int64)) for decoder in decoders)
        errors[true_sequential] = float((found - expected).norm() / expected.norm())
    assert errors[True] < 0.95 * errors[False], errors


def test_smoothing_excludes_it() -> None:
    def parsed(text: str) -> Quantize:
        return parse_spec(Quantize, *read_yaml(text, file="r.yaml"))

    assert parsed("preset: balanced").true_sequential
    assert not parsed("{preset: balanced, smooth: {kind: awq}}").true_sequential
    assert not parsed("{preset: balanced, true_sequential: false}").true_sequential
    with pytest.raises(RecipeError, match="a smoother folds scales into linears that are codes by then"):
        parsed("{smooth: {kind: awq}, true_sequential: true}")


def test_linears_without_a_scheme_stay_as_they_are(source: WeightSource, tmp_path: Path) -> None:
    """They are passed by, and what comes behind them sees them dense."""
    spec = Quantize.model_validate(
        {"scheme": "W8A16", "overrides": {"*.ffn.gate": "dense", "*.ffn.up": "dense"}}
    )
    scheme = model_scheme(spec, source.arch)
    assert scheme is not None
    ctx = Context("cpu", 0, tmp_path)
    passes: list[LayerPass] = [RoundPass(Gptq(), scheme, torch.bfloat16)]
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    rows = run_sequential(
        source,
        tokens_NS,
        Compression(passes, scheme=scheme, true_sequential=True),
        tmp_path,
        ctx,
        compute_dtype=torch.float32,
    )
    assert {row["linear"] for row in rows} == {"attn.q", "attn.k", "attn.v", "attn.o", "ffn.down"}
    for idx in range(source.arch.num_layers):
        stored = load_weights(tmp_path / layer_name(idx), scheme, prefix=f"layers.{idx}.")
        for linear in ("ffn.gate", "ffn.up"):
            assert torch.equal(
                stored[f"{linear}.weight"],  # type: ignore[arg-type]
                source.layer(idx)[f"{linear}.weight"],  # type: ignore[arg-type]
            )

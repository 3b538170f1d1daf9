"""GPTAQ against least squares in float64, against the law it follows, and in the runner: a second stream of
activations that changes no other number and comes back after an interruption.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import LayerPass, LayerState
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.stats import CrossMoment, InputStats, MergeTree, SecondMoment, Stat
from compress.context import Context
from compress.errors import Interrupted, UsageError
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptaq import Gptaq
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models.canonical import layer_name, load_weights
from compress.models.linear_groups import LinearGroup
from compress.models.weights import WeightSource, build_decoder
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.stop_after import StopAfter
from tests.support.tiny_decoder import QWEN3, tiny_arch, tiny_source, tiny_tokens

SIZE = 64
TOKENS = 3000
FOUR_BITS = Scheme("sym", 4, symmetric=True, group_size=32)
W8 = SCHEMES["W8A16"]
COARSE = Scheme("W2", 2, symmetric=True, group_size=None)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """Inputs of a linear, those of the source model in their place, and weights."""

    x_TI: Tensor
    source_TI: Tensor
    w_OI: Tensor

    @staticmethod
    def make(*, missing: float = 0.2) -> "Case":
        mixing = randn(SIZE, SIZE, seed=1) * SIZE**-0.5 + 0.3 * torch.eye(SIZE)
        source_TI = randn(TOKENS, SIZE, seed=0) @ mixing * torch.exp(0.7 * randn(SIZE, seed=2))
        lost = torch.eye(SIZE) - missing * (randn(SIZE, SIZE, seed=3) * SIZE**-0.5 + 0.5 * torch.eye(SIZE))
        return Case(source_TI @ lost + 0.02 * randn(TOKENS, SIZE, seed=4), source_TI, randn(9, SIZE, seed=5))

    def stats(self) -> InputStats:
        moment = SecondMoment()
        cross = CrossMoment()
        moment.update(self.x_TI)
        cross.update_with_source(self.x_TI, self.source_TI)
        return InputStats(moment, cross)

    def error(self, q_OI: Tensor) -> float:
        """Mean |q x - w x_source|^2: what the method is there to lower."""
        return float(
            (self.x_TI.double() @ q_OI.double().t() - self.source_TI.double() @ self.w_OI.double().t())
            .square()
            .mean()
        )


def test_the_whole_way_is_the_least_squares_weight() -> None:
    case = Case.make()
    found = Gptaq(strength=1, damping=1e-9).target(case.w_OI, case.stats())
    wanted_TO = case.source_TI.double() @ case.w_OI.double().t()
    solution_IO = torch.linalg.lstsq(case.x_TI.double(), wanted_TO).solution
    assert torch.allclose(found.double(), solution_IO.t(), rtol=0, atol=2e-4 * float(solution_IO.abs().max()))
    half = Gptaq(strength=0.5, damping=1e-9).target(case.w_OI, case.stats())
    assert torch.allclose(half, (found + case.w_OI) / 2, atol=1e-5)


@pytest.mark.parametrize(
    ("rounder", "refiner"),
    [(Rtn(), None), (Gptq(), None), (Gptq(), Descent())],
    ids=["rtn", "gptq", "gptq+descent"],
)
def test_the_error_against_the_source_falls_with_every_step_of_the_way(rounder: Any, refiner: Any) -> None:
    case = Case.make()

    def error(target: Gptaq | None) -> float:
        state = LayerState(
            1,
            [LinearGroup("l", "tap", ("l",))],
            [],
            {"l.weight": case.w_OI.clone()},
            {"tap": case.stats()},
            LayerRun.on_one_rank(torch.zeros(1, 1, 1)),
        )
        RoundPass(rounder, FOUR_BITS, torch.bfloat16, refiner, target).apply(state)
        return case.error(state.quantized["l"].dequantize(torch.float32))

    errors = [error(None), *(error(Gptaq(strength=strength)) for strength in (0.25, 0.5, 1.0))]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_damping_draws_the_target_back_to_the_weights() -> None:
    case = Case.make()
    moved = [
        float((Gptaq(strength=1, damping=damping).target(case.w_OI, case.stats()) - case.w_OI).norm())
        for damping in (1e-3, 0.1, 1)
    ]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] > 0


def test_inputs_that_never_fire_keep_their_weights() -> None:
    case = Case.make()
    case.x_TI[:, 7] = 0  # though they do in the source
    found = Gptaq(strength=1).target(case.w_OI, case.stats())
    assert torch.equal(found[:, 7], case.w_OI[:, 7])
    assert not torch.equal(found[:, 6], case.w_OI[:, 6])
    case.x_TI[:] = 0
    assert torch.equal(Gptaq().target(case.w_OI, case.stats()), case.w_OI)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused(broken: float) -> None:
    case = Case.make()
    case.source_TI[5, 3] = broken
    with pytest.raises(UsageError, match="NaN or infinity"):
        Gptaq().target(case.w_OI, case.stats())


def test_a_scale_folded_into_the_producer_moves_the_target_along() -> None:
    case = Case.make()
    scale_I = torch.exp(0.5 * randn(SIZE, seed=8))
    plain = Gptaq(strength=1, damping=1e-9).target(case.w_OI, case.stats())
    stats = case.stats()
    for stat in stats:
        stat.rescale_(scale_I)
    folded = Gptaq(strength=1, damping=1e-9).target(case.w_OI * scale_I, stats)
    assert torch.allclose(folded / scale_I, plain, atol=1e-3 * float(plain.abs().max()))


def test_the_cross_moment_adds_up_over_samples_and_shards() -> None:
    case = Case.make()
    tree: MergeTree[CrossMoment] = MergeTree()
    chunks = zip(case.x_TI.chunk(5), case.source_TI.chunk(5), strict=True)
    for shard_idx, (x_TI, source_TI) in enumerate(chunks):
        shard = CrossMoment()
        for half_x, half_source in zip(x_TI.chunk(2), source_TI.chunk(2), strict=True):
            shard.update_with_source(half_x, half_source)
        tree.push(shard_idx, shard)
    total = tree.root()
    expected = (case.source_TI - case.x_TI).double().t() @ case.x_TI.double() / TOKENS
    assert total.num_tokens == TOKENS
    assert torch.allclose(total.mean().double(), expected, atol=1e-5 * float(expected.abs().max()))
    same = CrossMoment()
    same.update(case.x_TI)
    assert not same.mean().any()


# ---------------------------------------------------------------------------------------------- in the runner

NUM_SAMPLES = 11
SEQ_LEN = 13
SPEC = {"scheme": "W8A16", "smooth": {"kind": "awq", "num_ratios": 3}, "round": {"kind": "gptq"}}
WITH_TARGET = Quantize.model_validate({**SPEC, "target": {"kind": "gptaq"}})


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return tiny_source(tiny_arch(QWEN3, dtype="bfloat16"))


def run(
    out: Path, passes: list[LayerPass], source: WeightSource, *, scheme: Scheme = W8, stop_after: int = 99
) -> dict[str, bytes]:
    out.mkdir(exist_ok=True)
    ctx = Context("cpu", 0, out, stop_signal=StopAfter(stop_after))
    tokens_NS = tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)
    run_sequential(
        source, tokens_NS, Compression(passes, scheme=scheme), out, ctx, compute_dtype=torch.float32
    )
    return {path.name: path.read_bytes() for path in out.iterdir()}


class Look:
    """A pass that asks for the source's activations, keeps the moments, and changes nothing."""

    def __init__(self) -> None:
        self.moments: list[dict[str, Tensor]] = []

    def needs(self) -> tuple[type[Stat], ...]:
        return (CrossMoment,)

    def apply(self, state: LayerState) -> None:
        seen = {}
        for tap, stats in state.stats.items():
            cross = stats[CrossMoment]
            seen[tap] = cross.mean()
        self.moments.append(seen)


class Upto:
    """The stored layers before `end`, the source's from there on."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, directory: Path, scheme: Scheme, end: int) -> None:
        self._source = source
        self._directory = directory
        self._scheme = scheme
        self._end = end
        self.arch = source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return (
            load_weights(self._directory / layer_name(layer_idx), self._scheme)
            if layer_idx < self._end
            else self._source.layer(layer_idx)
        )


@torch.no_grad()
def inputs_of(weights: WeightSource, layer_idx: int, linears: dict[str, str]) -> dict[str, Tensor]:
    """Tap -> inputs [T, I] of a layer's linears over the calibration tokens: hooks on a whole decoder, no
    runner involved.
    """
    decoder = build_decoder(weights, dtype=torch.float32, device=torch.device("cpu"))
    read = dict[str, Tensor]()
    for linear, tap in linears.items():
        module = decoder.get_submodule(f"layers.{layer_idx}.{linear}")
        module.register_forward_pre_hook(
            lambda _, inputs, tap=tap: read.__setitem__(tap, inputs[0].flatten(0, 1))
        )
    decoder(tiny_tokens(weights.arch, NUM_SAMPLES, SEQ_LEN))
    return read


def test_the_runner_compares_the_inputs_with_those_of_the_source_model(
    source: WeightSource, tmp_path: Path
) -> None:
    look = Look()
    run(tmp_path, [look, RoundPass(Rtn(), COARSE, torch.bfloat16)], source, scheme=COARSE)
    assert not any(
        moment.any() for moment in look.moments[0].values()
    )  # nothing is compressed before the first layer
    for idx in range(1, source.arch.num_layers):
        linears = dict(source.arch.layers[idx].linears)
        of_source = inputs_of(source, idx, linears)
        of_ours = inputs_of(Upto(source, tmp_path, COARSE, idx), idx, linears)
        for tap, x_TI in of_ours.items():
            expected = (of_source[tap] - x_TI).double().t() @ x_TI.double() / len(x_TI)
            assert torch.allclose(
                look.moments[idx][tap].double(), expected, rtol=0, atol=1e-4 * float(expected.abs().max())
            ), (idx, tap)
            assert float(expected.norm() / (x_TI.double().t() @ x_TI.double() / len(x_TI)).norm()) > 0.05


def test_looking_at_the_source_moves_no_other_number(source: WeightSource, tmp_path: Path) -> None:
    without = quantization_passes(Quantize.model_validate(SPEC), W8, torch.bfloat16)
    plain = run(tmp_path / "plain", without, source)
    watched = run(tmp_path / "watched", [Look(), *without], source)
    assert plain == watched
    with_target = run(tmp_path / "target", quantization_passes(WITH_TARGET, W8, torch.bfloat16), source)
    assert [name for name in plain if plain[name] != with_target[name]] != []
    assert plain[layer_name(0)] == with_target[layer_name(0)]  # its inputs are the source's own


@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_run_stopped_at_a_layer_boundary_ends_in_the_same_bytes(
    stop_after: int, source: WeightSource, tmp_path: Path
) -> None:
    passes = quantization_passes(WITH_TARGET, W8, torch.bfloat16)
    whole = run(tmp_path / "whole", passes, source)
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", passes, source, stop_after=stop_after)
    assert [(tmp_path / "cut" / layer_name(idx)).exists() for idx in range(3)] == [
        idx < stop_after for idx in range(3)
    ]
    assert run(tmp_path / "cut", passes, source) == whole

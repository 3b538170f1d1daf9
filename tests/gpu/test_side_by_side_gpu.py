"""A layer's matrices solved side by side on streams get the codes that each gets alone, bit for bit."""

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_run import LayerRun
from compress.calibrate.layer_state import LayerState
from compress.calibrate.stats import InputStats, SecondMoment
from compress.methods.quantize import passes
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass
from compress.models.linear_groups import LinearGroup
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES

pytestmark = pytest.mark.gpu

NUM_MATRICES = 24
CUDA = torch.device("cuda", 0)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def solved(descends: bool) -> dict[str, Tensor]:
    """Return codes and scales of matrices with inputs of their own."""
    names = [f"moe.experts.{idx}.down" for idx in range(NUM_MATRICES)]
    stats = {}
    for idx, name in enumerate(names):
        moment = SecondMoment()
        moment.update(randn(700, 512, seed=idx))
        stats[name] = InputStats(moment)
    groups = [LinearGroup(name, name, (name,)) for name in names]
    weights = {f"{name}.weight": randn(300, 512, seed=100 + idx) for idx, name in enumerate(names)}
    run = LayerRun.on_one_rank(torch.zeros(1, 1, 512, device=CUDA))
    state = LayerState(0, groups, [], weights, stats, run)
    refiner = Descent() if descends else None
    schemes = ModelScheme(SCHEMES["W4A16_G128"])
    RoundPass(Gptq(), schemes, torch.bfloat16, refiner).apply(state)
    return {
        f"{name}.{leaf}": tensor
        for name in names
        for leaf, tensor in (
            ("codes", state.quantized[name].codes_OI),
            ("scale", state.quantized[name].scale_OG),
        )
    }


@pytest.mark.parametrize("descends", [False, True])
def test_codes_are_those_of_one_at_a_time(descends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        together = solved(descends)
        with monkeypatch.context() as patched:
            patched.setattr(passes, "num_at_once", lambda rows, columns: 1)
            alone = solved(descends)
        assert together.keys() == alone.keys()
        assert all(torch.equal(together[name], alone[name]) for name in alone)

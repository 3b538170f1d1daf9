"""Models with xIELU are served as the decoder computes them: the numbers of the activation are float32 in any
model, and neither codes of linears nor speculation change what it is.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.coverage import coverage, linear_problems
from compress.kernels.problem import KernelDevice
from compress.models.arch import Arch
from compress.models.eagle3 import eagle3_facts
from compress.models.family import family_of
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.random_source import RandomSource
from compress.models.weights import Dense, MemorySource, WeightSource, build_decoder, dense
from compress.models.xielu import PARAMETERS, initial_parameters
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.deployment import Deployment
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.loader import load_layer
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from tests.support.tiny_source import tiny_shape, tiny_source

CPU = torch.device("cpu")
SHAPE = tiny_shape(gated=False, intermediate_size=96)
FACTS: dict[str, Any] = {"activation": "xielu", "qk_norm": True, "hidden_size": 64, "max_position": 2048}
APERTUS_8B: dict[str, Any] = {
    "model_type": "apertus",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}


def source_of(num_layers: int = 5) -> MemorySource:
    return tiny_source(**FACTS, layers=(SHAPE,) * num_layers)


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(101, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


REQUESTS = [
    Request(str(idx), ids(count, idx), SamplingParams(9, ignore_eos=True, seed=idx))
    for idx, count in enumerate((41, 3, 70))
]


class Codes:
    """A source whose linears have a scheme."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, scheme: str) -> None:
        self._source = source
        self._scheme = SCHEMES[scheme]
        self.arch = source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {
            name: nearest_weight(dense(each), self._scheme, torch.float32) if dense(each).dim() == 2 else each
            for name, each in self._source.layer(layer_idx).items()
        }


def engine_of(source: WeightSource, **changes: Any) -> Engine:
    return Engine(source, device=CPU, config=EngineConfig(max_model_len=512, **changes))


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [each.tokens for each in engine.generate(REQUESTS)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_numbers_of_a_layer_are_float32_in_a_model_of_any_dtype(dtype: torch.dtype) -> None:
    stored = {name: dense(each).to(dtype) for name, each in source_of(2).layer(1).items()}

    class Rounded(MemorySource):
        def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
            return dict(stored)

    source = source_of(2)
    rounded = Rounded(source._decoder, dtype=dtype)
    layer = load_layer(rounded, 1, Deployment(CPU, dtype, 4, 64))
    assert layer.xielu_4 is not None
    assert layer.xielu_4.dtype == torch.float32
    alpha_p, alpha_n, beta, eps = (float(stored[f"ffn.{name}"]) for name in PARAMETERS)
    softplus = torch.nn.Softplus()
    expected = torch.tensor(
        [
            softplus(torch.tensor(alpha_p, dtype=torch.float64)),
            beta + softplus(torch.tensor(alpha_n, dtype=torch.float64)),
            beta,
            eps,
        ]
    )
    torch.testing.assert_close(layer.xielu_4, expected.float(), rtol=4 * 2**-24, atol=0)
    relu2 = tiny_source(**{**FACTS, "activation": "relu2"}, layers=(SHAPE,))
    assert load_layer(relu2, 0, Deployment(CPU, torch.float32, 4, 64)).xielu_4 is None


@pytest.mark.parametrize(
    ("scheme", "limit"),
    [("W4A16_G32", 1e-9), ("W8A16", 1e-9), ("INT8_DYNAMIC", 1e-3), ("FP8_DYNAMIC", 0.005)],
)
def test_codes_of_linears_leave_the_activation_as_it_is(scheme: str, limit: float) -> None:
    """Schemes that round inputs differ from the decoder of the same weights by that rounding."""
    codes = Codes(source_of(2), scheme)
    tokens_BS = torch.tensor([ids(75, 8)])
    decoder = build_decoder(Dense(codes), dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        expected = decoder(tokens_BS).log_softmax(-1)
        found = engine_of(codes).runner.score(tokens_BS).log_softmax(-1)
        for layer in decoder.layers:
            layer.ffn.alpha_p.add_(1)  # type: ignore[union-attr, operator]
        other = decoder(tokens_BS).log_softmax(-1)
    kl_found, kl_other = (
        abs(float((expected.exp() * (expected - each)).sum(-1).mean())) for each in (found, other)
    )
    assert kl_found < limit
    assert kl_other > 2 * limit


@pytest.mark.parametrize("kind", ["ngram", "draft model", "eagle3"])
def test_speculation_changes_no_token(kind: str) -> None:
    source = source_of()
    head = random_eagle3(
        source.arch, device=CPU, dtype=torch.float32, draft_vocab_size=90, layer_ids=(1, 2, 4), seed=3
    )
    draft = DraftModel(source_of(1))
    options: dict[str, ProposerOptions] = {"ngram": NGram(), "draft model": draft, "eagle3": Eagle3(head)}
    found = tokens_of(engine_of(source, speculative=Speculative(options[kind], k=3)))
    assert found == tokens_of(engine_of(source))


def test_a_head_of_such_a_model_has_gates_and_no_parameters_of_its_activation() -> None:
    facts = eagle3_facts(source_of().arch, draft_vocab_size=20)
    (layer,) = facts.arch.layers
    assert layer.gated
    assert facts.arch.activation == "silu"


def read(**changes: Any) -> Arch:
    config = {**APERTUS_8B, **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize("changes", [{}, {"hidden_size": 8192, "intermediate_size": 43008}])
def test_decode_has_the_activation_in_a_launch_of_its_own(changes: dict[str, Any]) -> None:
    """No linear applies it, and the kernel of rows serves the widths of Apertus 8B and 70B."""
    arch = read(**changes)
    hopper = KernelDevice("cuda", 90, torch.bfloat16)
    size = arch.layers[0].intermediate_size
    shape = (size, arch.hidden_size)
    for phase in ("decode", "prefill"):
        problems = linear_problems(arch, hopper, "gate_up", shape, scheme="FP8_DYNAMIC", phase=phase)  # type: ignore[arg-type]
        assert [each.activation for each in problems] == [None]
    (row,) = [each for each in coverage(arch, hopper) if each.problem.op == "act_mul"]
    assert (row.kernel, row.problem.n) == ("triton.row", size)


def test_random_weights_have_the_parameters_of_a_model_that_is_not_trained() -> None:
    source = RandomSource(source_of(2).arch, device=CPU, dtype=torch.float32)
    for name, value in initial_parameters().items():
        assert torch.equal(dense(source.layer(1)[f"ffn.{name}"]), value.bfloat16().float())
    tokens_BS = torch.tensor([ids(40, 8)])
    with torch.inference_mode():
        assert torch.isfinite(engine_of(source).runner.score(tokens_BS)).all()


def test_layers_read_no_more_than_those_of_the_same_widths() -> None:
    """Four numbers of a layer are not counted among its bytes."""
    arch = read()
    plain = replace(arch, activation="relu2")
    assert arch.num_linear_params == plain.num_linear_params
    assert arch.num_params == plain.num_params + 32 * len(PARAMETERS)

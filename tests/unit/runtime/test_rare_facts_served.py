"""Models whose facts the tests of a GPU serve are served on a CPU, too: facts that no model can have, and
layers that the runtime does not bring together, are found where there is no GPU."""

import pytest
import torch

from compress.runtime.engine import Engine
from compress.runtime.request import Request, SamplingParams
from tests.gpu.test_rare_facts_gpu import FACTS, make_arch, make_source


def test_facts_of_tests_on_a_gpu_are_those_of_models() -> None:
    for facts in FACTS.values():
        make_arch(facts)


@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.one_in(8)
def test_a_model_with_facts_of_tests_on_a_gpu_is_served(facts: str) -> None:
    engine = Engine(make_source(FACTS[facts]), device=torch.device("cpu"))
    (done,) = engine.generate([Request("0", (1, 2, 3), SamplingParams(3, ignore_eos=True))])
    assert len(done.tokens) == 3

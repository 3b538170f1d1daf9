"""What is expected of a draft from distributions on text is what the engine measures when it serves it."""

import math
from pathlib import Path

import pytest
import torch

from compress.data.model_tokens import read_tokens
from compress.distill.acceptance import K
from compress.distill.objective import Teacher, measure
from compress.export import open_weights
from compress.models.pruning import LayerSubset
from compress.models.weights import build_decoder
from compress.registry.model_source import resolve_model
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.speculation import Speculative

CPU = torch.device("cpu")
NUM_PROMPTS = 12
PROMPT = 24
LENGTH = 120


@pytest.mark.slow
def test_the_expected_acceptance_length_is_what_the_engine_finds_on_the_models_own_text() -> None:
    """The reference model without one of its layers proposes to it, at temperature 1 by rejection. The
    model's own continuations, on which the expectation is exact but for chance, come from the same prompts.
    """
    source = resolve_model("builtin", "reference", None)
    target = open_weights(Path(source.path))
    draft = LayerSubset(target, [0, 1, 2, 3, 5, 6, 7])
    tokens, _ = read_tokens(
        source, "builtin://python-eval", num_samples=NUM_PROMPTS, seq_len=PROMPT, seed=0, offline=True
    )
    requests = [
        Request(
            str(idx),
            tuple(prompt),
            SamplingParams(LENGTH - PROMPT, temperature=1.0, seed=idx, ignore_eos=True),
        )
        for idx, prompt in enumerate(tokens.tokens_NS.tolist())
    ]
    config = EngineConfig(max_batch_size=NUM_PROMPTS, max_model_len=LENGTH)
    written = [
        [*each.prompt, *each.tokens] for each in Engine(target, device=CPU, config=config).generate(requests)
    ]
    windows_NS = torch.tensor(written)
    student, teacher = (build_decoder(each, dtype=torch.float32, device=CPU) for each in (draft, target))
    expected = measure(student, Teacher(teacher, device=CPU), windows_NS, CPU, compute_dtype=torch.float32)
    speculative = Speculative(DraftModel(draft), k=K, rule="rejection")
    engine = Engine(
        target,
        device=CPU,
        config=EngineConfig(max_batch_size=NUM_PROMPTS, max_model_len=LENGTH, speculative=speculative),
    )
    engine.generate(requests)
    found = engine.acceptance
    assert found is not None
    error = 2.0 / math.sqrt(found.num_rows)  # a step gives 1 to 5 tokens, so its deviation is 2 at most
    print(
        expected.acceptance, expected.acceptance_length, found.acceptance_length, found.num_rows, found.rates
    )
    assert 1.5 < expected.acceptance_length < 4.5
    assert found.acceptance_length == pytest.approx(expected.acceptance_length, abs=4 * error)

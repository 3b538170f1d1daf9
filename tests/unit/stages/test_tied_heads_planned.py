"""A tied head is a second copy of the embedding in serving, and a plan counts it."""

from dataclasses import replace

import torch

from compress.runtime.deployment import Deployment
from compress.runtime.loader import load_model
from compress.stages import PlanFacts
from compress.stages.validate.apart_estimate import apart_needs
from compress.stages.validate.estimate import estimate
from compress.stages.validate.spec import Validate
from tests.support.tiny_source import tiny_source

VOCAB = 3000
SPEC = Validate(num_samples=2, seq_len=32, latency=None, speculative=None)
APART = SPEC.model_validate({**SPEC.model_dump(), "apart": {"top_k": 16}})


def test_a_tied_head_takes_as_much_memory_as_another_and_so_says_the_plan() -> None:
    deployment = Deployment(torch.device("cpu"), torch.float32, max_batch_size=1, max_step_tokens=16)
    bytes_of, peaks, apart = set(), set(), set()
    for tied_head in (False, True):
        source = tiny_source(tied_head=tied_head, vocab_size=VOCAB)
        weights = load_model(source, deployment)
        assert weights.head.weight_bytes >= 4 * VOCAB * source.arch.hidden_size
        bytes_of.add(weights.weight_bytes)
        facts = PlanFacts(replace(source.arch, max_position=256), "cpu", {})
        peaks.add(estimate(SPEC, facts).peak_bytes)
        needs = apart_needs(APART, facts.arch, facts.arch, facts, num_kept=1)
        apart.add((needs.source_bytes, needs.candidate_bytes))
    assert [len(each) for each in (bytes_of, peaks, apart)] == [1, 1, 1]

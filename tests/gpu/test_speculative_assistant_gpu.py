"""An assistant on a GPU, its steps in graphs over the target's pages: the bits of plain decoding, and logits
that are those of a CPU in float32.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.models.assistant import Assistant, OrderedEmbeddings, clusters
from compress.models.random_assistant import random_assistant
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.ordered_logits import ordered_logits
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative import assistant as serving
from compress.runtime.speculative.assistant import AssistantModel, AssistantProposer
from compress.runtime.speculative.speculation import Speculative
from scripts.bench_setup import read_arch
from tests.gpu.test_speculative_gpu import (
    CUDA,
    TARGETS,
    VOCAB,
    assert_ahead_changes_nothing,
    make_requests,
    make_source,
)
from tests.support.rehearsed_graphs import RehearsedGraphs

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
ORDERED = OrderedEmbeddings(num_centroids=64, top_k=8)


def make_assistant(source: RandomSource, ordered: OrderedEmbeddings | None = None) -> Assistant:
    return random_assistant(
        source.arch,
        device=CUDA,
        dtype=torch.bfloat16,
        hidden_size=256,
        layers_of_each_type=2,
        ordered=ordered,
    )


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(max_model_len=512, kv_cache_bytes=1 << 28, **changes)


def proposer_of(engine: Engine) -> AssistantProposer:
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    assert isinstance(proposer, AssistantProposer)
    return proposer


@pytest.mark.parametrize(
    ("batch_size", "kv_format"),
    [(1, None), (4, "FP8_TOKEN_HEAD"), (16, "INT8_TOKEN_HEAD"), (48, "INT4_TOKEN_HEAD_HADAMARD")],
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ordered", [None, ORDERED], ids=["all", "ordered"])
def test_an_assistant_in_graphs_changes_no_bit(
    target: str, batch_size: int, kv_format: str | None, ordered: OrderedEmbeddings | None
) -> None:
    source = make_source(target)
    requests = make_requests(4 if batch_size == 1 else batch_size + batch_size // 4)
    sizes = config(max_batch_size=batch_size, kv_format=kv_format)
    plain = Engine(source, device=CUDA, config=sizes).generate(requests)
    speculative = Speculative(AssistantModel(make_assistant(source, ordered)), k=3)
    engine = Engine(source, device=CUDA, config=replace(sizes, speculative=speculative))
    for _ in range(2):  # with graphs captured on the way, and with all of them there
        found = engine.generate(requests)
        assert [each.tokens for each in found] == [each.tokens for each in plain]
        assert [each.logprobs for each in found] == [each.logprobs for each in plain]
    assert engine.acceptance is not None
    assert sum(engine.acceptance.proposed) > 0


def test_an_assistant_over_the_layers_of_gemma4_changes_no_bit() -> None:
    """Heads of 256 and 512 dimensions, windows, values that are keys, and experts."""
    _, arch = read_arch("gemma-4-26b-a4b")
    arch = arch.replace(layers=arch.layers[:6], vocab_size=VOCAB)
    source = RandomSource(arch, device=CUDA, dtype=torch.bfloat16)
    sizes = config(max_batch_size=4)
    requests = make_requests(6)
    plain = Engine(source, device=CUDA, config=sizes).generate(requests)
    speculative = Speculative(AssistantModel(make_assistant(source, ORDERED)), k=4)
    engine = Engine(source, device=CUDA, config=replace(sizes, speculative=speculative))
    for _ in range(2):
        found = engine.generate(requests)
        assert [each.tokens for each in found] == [each.tokens for each in plain]
        assert [each.logprobs for each in found] == [each.logprobs for each in plain]


@pytest.mark.parametrize("ordered", [None, ORDERED], ids=["all", "ordered"])
def test_graphs_propose_what_passes_without_graphs_propose(
    ordered: OrderedEmbeddings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source("BF16")
    requests = make_requests(6)
    assistant = make_assistant(source, ordered)
    proposed = list[dict[tuple[str, int], list[int]]]()
    for graphs in (serving.Graphs, RehearsedGraphs):
        monkeypatch.setattr(serving, "Graphs", graphs)
        speculative = Speculative(AssistantModel(assistant), k=4)
        engine = Engine(
            source, device=CUDA, config=config(max_batch_size=6, sync=True, speculative=speculative)
        )
        proposer = proposer_of(engine)
        propose = proposer.propose
        found: dict[tuple[str, int], list[int]] = {}

        def noted(rows: Any, state: Any, propose: Any = propose, found: Any = found) -> Any:
            drafts = propose(rows, state)
            for row, tokens in zip(rows, drafts.tokens_RK.tolist(), strict=True):
                found[row.request.id, len(row.tokens)] = tokens
            return drafts

        proposer.propose = noted  # type: ignore[method-assign]
        engine.generate(requests)
        proposed.append(found)
    assert proposed[0] == proposed[1]
    assert len(proposed[0]) > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordered_logits_of_a_row_have_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(70, 256, generator=generator).to(CUDA, dtype)
    scores_RC = torch.randn(70, 128, generator=generator).to(CUDA)
    head_VD = torch.randn(128 * 24, 256, generator=generator).to(CUDA, dtype)
    order = torch.randperm(128 * 24, generator=generator)
    tokens_CN = clusters(order, OrderedEmbeddings(num_centroids=128, top_k=5))
    operands = head_VD, tokens_CN.to(CUDA), 5
    together_RV = ordered_logits(hidden_RD, scores_RC, *operands)
    expected_RV = ordered_logits(*(each.cpu() for each in (hidden_RD, scores_RC, head_VD)), tokens_CN, 5)
    assert torch.equal(together_RV.isfinite().cpu(), expected_RV.isfinite())
    finite = expected_RV.isfinite()
    # products in float32 over 256 features, whose order differs between the two sides
    difference = (together_RV.cpu()[finite] - expected_RV[finite]).abs().max()
    tolerance = 8 * torch.finfo(torch.float32).eps * 256**0.5 * float(expected_RV[finite].abs().max())
    assert float(difference) <= tolerance
    for first, last in ((0, 1), (3, 4), (9, 12), (40, 70)):
        rows = slice(first, last)
        assert torch.equal(ordered_logits(hidden_RD[rows], scores_RC[rows], *operands), together_RV[rows])


def test_logits_are_those_of_a_cpu_in_float32() -> None:
    """Roundings of bfloat16 in 4 layers of the target and 4 of the assistant, 8 in each, are independent."""
    source = make_source("BF16")
    stored = make_assistant(source)
    prompt = tuple((torch.arange(300) * 7 % VOCAB).tolist())
    request = Request("one", prompt, SamplingParams(2, temperature=0.0, ignore_eos=True))
    logits = list[Tensor]()
    for device in (CUDA, CPU):
        dtype = torch.bfloat16 if device == CUDA else torch.float32
        speculative = Speculative(AssistantModel(stored), k=1)
        engine = Engine(source, device=device, config=config(dtype=dtype, speculative=speculative))
        proposer = proposer_of(engine)
        part = proposer._part

        def noted(*operands: Tensor, part: Any = part) -> tuple[Tensor, Tensor]:
            # The last token is the same on both sides, whichever the target has chosen.
            logits_RV, hidden_RD = part(torch.full_like(operands[0], 5), *operands[1:])
            logits.append(logits_RV[0])
            return logits_RV, hidden_RD

        proposer._part = noted  # type: ignore[method-assign]
        count = len(logits)
        engine.generate([request])
        torch.accelerator.synchronize()
        del logits[count + 1 :]
        logits[-1] = logits[-1].float().cpu()
    found_V, expected_V = logits
    tolerance = torch.finfo(torch.bfloat16).eps * (8 * 8) ** 0.5 * float(expected_V.abs().max())
    assert float((found_V - expected_V).abs().max()) <= tolerance


def test_steps_of_an_assistant_launched_ahead_give_what_plain_steps_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assistant = make_assistant(make_source("W4A16_G128"))
    assert_ahead_changes_nothing(AssistantModel(assistant), monkeypatch)

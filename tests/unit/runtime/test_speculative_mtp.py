"""An MTP head in the engine: it changes no bit, and proposes what its module says without cache, rings,
chunks and batches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.api import load_engine
from compress.errors import UsageError
from compress.export import codecs, open_checkpoint
from compress.export.draft import open_mtp
from compress.kernels.attention_decode.paged import MAX_Q_LEN
from compress.models.attention import FullAttention
from compress.models.mtp import MtpHead
from compress.models.mtp_reader import read_mtp
from compress.models.weights import WeightSource, build_decoder
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative import decoding, head_proposer
from compress.runtime.speculative.mtp import Mtp
from compress.runtime.speculative.speculation import Speculative
from tests.support.rehearsed_graphs import RehearsedGraphs
from tests.support.scripted_proposer import acceptance_of, checked_proposals
from tests.support.slow import slow
from tests.support.tiny_mtp import saved_with_mtp
from tests.unit.runtime.test_speculative_eagle3 import greedy
from tests.unit.runtime.test_speculative_engine import assert_same_bits, make_requests, record

CPU = torch.device("cpu")
SERVED = [
    "glm4-moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "qwen3_next",
    slow("qwen3_5_text"),
    slow("glm4_moe_lite"),
    "mimo_v2_flash",
    slow("exaone_moe"),
    "ernie4_5_moe",
    "step3p7",
    "nemotron_h-experts",
    slow("hy_v3"),
    slow("bailing_hybrid"),
    slow("exaone4_5"),
    slow("glm_ocr"),
    slow("mellum-types-yarn"),
    slow("nemotron_h-latents-biases"),
    slow("nemotron_h_omni"),
]


SEVERAL = ["mimo_v2_flash", "step3p7", "glm4-moe"]
"""Cases with several heads, which read the target's hidden states, or the stream or the normed output of the
head before."""


def model(path: Path, case: str, *, max_position: int = 256) -> tuple[WeightSource, MtpHead]:
    saved_with_mtp(path, case, max_position_embeddings=max_position)
    checkpoint = open_checkpoint(path)
    return checkpoint, read_mtp(checkpoint, codecs())


def model_of_several(path: Path, case: str) -> tuple[WeightSource, Mtp]:
    saved_with_mtp(path, case, num_heads=3, max_position_embeddings=256)
    return open_checkpoint(path), open_mtp(path)


def engine_of(source: WeightSource, **options: Any) -> Engine:
    return Engine(source, device=CPU, config=EngineConfig(max_batch_size=4, max_model_len=192, **options))


class Oracle:
    """The likeliest tokens of one head or several, each from the whole sequence anew: the target's decoder
    layer by layer, then the modules of the heads."""

    def __init__(self, source: WeightSource, *heads: MtpHead) -> None:
        self._target = build_decoder(source, dtype=torch.float32, device=CPU)
        self._modules = [head.decoder(dtype=torch.float32, device=CPU) for head in heads]

    def continuation(self, tokens: Sequence[int], k: int) -> list[int]:
        tokens = list(tokens)
        attention = FullAttention()
        positions = torch.arange(len(tokens))
        x_1SD = self._target.embedded(torch.tensor([tokens]), positions, attention)
        for layer in self._target.layers:
            x_1SD = layer(x_1SD, positions, attention)
        fused_1SD = self._modules[0].fuse(x_1SD)[:, :-1]
        hidden_1SD = out_1SD = fused_1SD
        chosen = list[int]()
        for step in range(k):
            head_idx = min(step, len(self._modules) - 1)
            module = self._modules[head_idx]
            if step > head_idx:
                hidden_1SD = torch.cat((hidden_1SD, out_1SD[:, -1:]), dim=1)
            elif step:
                hidden_1SD = fused_1SD if module.facts.feeds == "target" else out_1SD
            embedded_1SD = self._target.embed(torch.tensor([tokens[1 + head_idx :]]))
            out_1SD = module(embedded_1SD, hidden_1SD, torch.arange(hidden_1SD.shape[1]), FullAttention())
            own_VD = module.own_head()
            normed_11D = module.normed(out_1SD[:, -1:])
            logits_11V = self._target.head(normed_11D) if own_VD is None else normed_11D @ own_VD.T
            chosen.append(int(logits_11V.argmax()))
            tokens.append(chosen[-1])
        return chosen


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize(("k", "chunk"), [(2, 2048), slow(4, 21)])
@pytest.mark.one_in(3)
def test_the_head_proposes_what_its_module_says(case: str, k: int, chunk: int, tmp_path: Path) -> None:
    source, head = model(tmp_path, case)
    requests = greedy(make_requests(4))
    engine = engine_of(source, max_step_tokens=chunk, speculative=Speculative(Mtp(head), k=k))
    assert checked_proposals(engine, Oracle(source, head).continuation, requests, k) > 20


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize(("k", "chunk"), [(4, 21), (2, 2048), slow(3, 16)])
@pytest.mark.one_in(3)
def test_each_of_several_heads_proposes_a_token(case: str, k: int, chunk: int, tmp_path: Path) -> None:
    source, several = model_of_several(tmp_path, case)
    requests = greedy(make_requests(4))
    engine = engine_of(source, max_step_tokens=chunk, speculative=Speculative(several, k=k))
    oracle = Oracle(source, several.head, *several.further)
    assert len(several.further) == 2
    assert checked_proposals(engine, oracle.continuation, requests, k) > 20


@pytest.mark.parametrize(("k", "num_heads"), [(1, 1), (2, 2), (6, 2), (7, 1)])
def test_a_step_feeds_no_more_rows_than_decode_attention_serves(
    k: int, num_heads: int, tmp_path: Path
) -> None:
    source, several = model_of_several(tmp_path, SEVERAL[0])
    engine = engine_of(source, speculative=Speculative(several, k=k))
    assert engine._speculation is not None
    assert k + num_heads <= MAX_Q_LEN
    assert engine._speculation._proposer.num_rewritten_rows == k + num_heads
    heads = (several.head, *several.further)[:num_heads]
    assert checked_proposals(engine, Oracle(source, *heads).continuation, greedy(make_requests(2)), k) > 5


@pytest.mark.parametrize("case", SEVERAL)
def test_rows_that_read_rejected_proposals_are_made_anew(case: str, tmp_path: Path) -> None:
    source, several = model_of_several(tmp_path, case)
    requests = greedy(make_requests(4, max_tokens=12))
    engine = engine_of(source, speculative=Speculative(several, k=3, forced_rate=0.7))
    oracle = Oracle(source, several.head, *several.further)
    assert checked_proposals(engine, oracle.continuation, requests, 3) > 15
    assert acceptance_of(engine).acceptance_length > 1.5


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize("rule", ["coupled", slow("rejection")])
@pytest.mark.one_in(3)
def test_several_heads_change_no_bit_and_padding_rows_nothing(
    case: str, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, several = model_of_several(tmp_path, case)
    requests = make_requests(6)
    speculative = Speculative(several, k=3, rule=rule)
    as_written = record(engine_of(source, speculative=speculative), requests)
    if rule == "coupled":
        plain = record(engine_of(source), requests)
        assert as_written.results == plain.results
        assert_same_bits(as_written.rows, plain.rows)
    monkeypatch.setattr(decoding, "Graphs", RehearsedGraphs)
    monkeypatch.setattr(head_proposer, "Graphs", RehearsedGraphs)
    assert record(engine_of(source, speculative=speculative), requests).results == as_written.results


@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("rule", ["coupled", slow("rejection")])
def test_padding_rows_and_warm_up_steps_change_nothing(
    case: str, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, head = model(tmp_path, case)
    requests = make_requests(6)
    speculative = Speculative(Mtp(head), k=3, rule=rule)
    as_written = record(engine_of(source, speculative=speculative), requests).results
    monkeypatch.setattr(decoding, "Graphs", RehearsedGraphs)
    monkeypatch.setattr(head_proposer, "Graphs", RehearsedGraphs)
    assert record(engine_of(source, speculative=speculative), requests).results == as_written


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4-moe", "mimo_v2_flash"])
def test_a_head_changes_no_bit(case: str, tmp_path: Path) -> None:
    source, head = model(tmp_path, case)
    requests = make_requests(8)
    plain = record(engine_of(source), requests)
    engine = engine_of(source, speculative=Speculative(Mtp(head), k=3))
    speculated = record(engine, requests)
    assert speculated.results == plain.results
    assert_same_bits(speculated.rows, plain.rows)
    assert sum(acceptance_of(engine).proposed) > 0


def test_a_head_of_a_model_with_states_changes_no_token(tmp_path: Path) -> None:
    """More rows of prompts go one by one where states are kept for verifications."""
    source, head = model(tmp_path, "qwen3_next")
    requests = make_requests(8)
    plain = record(engine_of(source), requests)
    engine = engine_of(source, speculative=Speculative(Mtp(head), k=3))
    speculated = record(engine, requests)
    assert [each.tokens for each in speculated.finished] == [each.tokens for each in plain.finished]
    assert sum(acceptance_of(engine).proposed) > 0


def test_rows_of_kept_proposals_are_made_anew_of_the_models_hidden_states(tmp_path: Path) -> None:
    """Keys and values that the head wrote from its own hidden states are replaced."""
    source, head = model(tmp_path, "deepseek_v3")
    requests = greedy(make_requests(4, max_tokens=12))
    engine = engine_of(source, speculative=Speculative(Mtp(head), k=3, forced_rate=0.7))
    assert checked_proposals(engine, Oracle(source, head).continuation, requests, 3) > 15
    assert acceptance_of(engine).acceptance_length > 1.5


def test_a_loaded_model_speculates_beside_the_prefix_cache(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "glm4-moe", max_position_embeddings=256)
    engine = load_engine(tmp_path, EngineConfig(prefix_cache=True), device="cpu", speculative="mtp")
    request = Request("0", tuple(range(40)), SamplingParams(6, ignore_eos=True))
    first, second = (engine.generate([request])[0] for _ in range(2))
    assert first.tokens == second.tokens
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    _, head = model(tmp_path / "one", "glm4-moe")
    other, _ = model(tmp_path / "other", "qwen3_next")
    arch = head.arch.replace(vocab_size=other.arch.vocab_size + 1)
    wrong = replace(head, facts=replace(head.facts, arch=arch))
    with pytest.raises(UsageError, match="the MTP head was made for a model of"):
        engine_of(other, speculative=Speculative(Mtp(wrong)))


@pytest.mark.parametrize(
    ("case", "num_prompts"),
    [("glm4-moe", 6), ("deepseek_v3", 6), ("mimo_v2_flash", 6), slow("exaone_moe", 6), slow("qwen3_next", 2)],
)
def test_a_head_beside_the_prefix_cache_proposes_what_its_module_says(
    case: str, num_prompts: int, tmp_path: Path
) -> None:
    """The prefixes of a model with states have more tokens."""
    longer = 300 if case == "qwen3_next" else 40
    source, head = model(tmp_path, case, max_position=512)
    prompts = [
        tuple((torch.arange(longer + 9 * idx) % (7 + idx // 2)).tolist()) for idx in range(num_prompts)
    ]
    requests = [
        Request(str(idx), prompt, SamplingParams(4, seed=idx, ignore_eos=True))
        for idx, prompt in enumerate(prompts)
    ]
    config = EngineConfig(speculative=Speculative(Mtp(head), k=2), prefix_cache=True)
    engine = Engine(source, device=CPU, config=config)
    for _ in range(2):
        assert checked_proposals(engine, Oracle(source, head).continuation, requests, 2) > num_prompts
    assert engine.counts.prefix_hits >= num_prompts * longer // 16 * 16 // 2


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.one_in(3)
def test_several_heads_share_prefixes(case: str, tmp_path: Path) -> None:
    """Texts go on after a request of which the last step kept all proposals, near the ends of blocks and
    within one."""
    source, several = model_of_several(tmp_path, case)
    speculative = Speculative(several, k=3, forced_rate=1.0)
    engine = engine_of(source, speculative=speculative, prefix_cache=True)
    continuation = Oracle(source, several.head, *several.further).continuation
    num_checked = 0
    for count in (20, *range(25, 30)):
        text = tuple((7 * idx * idx + count) % 90 for idx in range(20))
        params = SamplingParams(count, ignore_eos=True)
        first = engine.generate([Request("first", text, params)])[0]
        followed = Request("second", (*text, *first.tokens, *text[:9]), SamplingParams(5, ignore_eos=True))
        num_checked += checked_proposals(engine, continuation, [followed], 3)
    assert num_checked == 6
    assert engine.counts.prefix_hits > 6 * 16

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
    "qwen3_next",
    slow("qwen3_5_text"),
    slow("glm4_moe_lite"),
    "mimo_v2_flash",
    slow("exaone_moe"),
    "ernie4_5_moe",
    "nemotron_h-experts",
    slow("hy_v3"),
    slow("bailing_hybrid"),
    slow("exaone4_5"),
    slow("glm_ocr"),
    slow("mellum-types-yarn"),
    slow("nemotron_h-latents-biases"),
    slow("nemotron_h_omni"),
]


def model(path: Path, case: str, *, max_position: int = 256) -> tuple[WeightSource, MtpHead]:
    saved_with_mtp(path, case, max_position_embeddings=max_position)
    checkpoint = open_checkpoint(path)
    return checkpoint, read_mtp(checkpoint, codecs())


def engine_of(source: WeightSource, **options: Any) -> Engine:
    return Engine(source, device=CPU, config=EngineConfig(max_batch_size=4, max_model_len=192, **options))


class Oracle:
    """The head's likeliest tokens, each from the whole sequence anew: the target's decoder layer by layer,
    then the head's module."""

    def __init__(self, source: WeightSource, head: MtpHead) -> None:
        self._target = build_decoder(source, dtype=torch.float32, device=CPU)
        self._module = head.decoder(dtype=torch.float32, device=CPU)

    def continuation(self, tokens: Sequence[int], k: int) -> list[int]:
        tokens = list(tokens)
        attention = FullAttention()
        positions = torch.arange(len(tokens))
        x_1SD = self._target.embedded(torch.tensor([tokens]), positions, attention)
        for layer in self._target.layers:
            x_1SD = layer(x_1SD, positions, attention)
        hidden_1SD = self._module.fuse(x_1SD)[:, :-1]
        chosen = []
        for _ in range(k):
            embedded_1SD = self._target.embed(torch.tensor([tokens[1:]]))
            out_11D = self._module(embedded_1SD, hidden_1SD, torch.arange(len(tokens) - 1), FullAttention())[
                :, -1:
            ]
            chosen.append(int(self._target.head(out_11D).argmax()))
            tokens.append(chosen[-1])
            hidden_1SD = torch.cat((hidden_1SD, out_11D), dim=1)
        return chosen


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize(("k", "chunk"), [(2, 2048), slow(4, 21)])
def test_the_head_proposes_what_its_module_says(case: str, k: int, chunk: int, tmp_path: Path) -> None:
    source, head = model(tmp_path, case)
    requests = greedy(make_requests(4))
    engine = engine_of(source, max_step_tokens=chunk, speculative=Speculative(Mtp(head), k=k))
    assert checked_proposals(engine, Oracle(source, head).continuation, requests, k) > 20


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
    wrong = replace(head, arch=head.arch.replace(vocab_size=other.arch.vocab_size + 1))
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

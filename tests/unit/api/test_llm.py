"""Text in, text out: generation, streaming, scores against the engine's tokens and the decoder's logits."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import compress
from compress import LLM, SamplingParams
from compress.errors import UsageError
from compress.export import open_weights
from compress.models.weights import build_decoder
from compress.runtime.request import Request
from compress.runtime.request import SamplingParams as EngineParams

WORDS = SamplingParams(max_tokens=16)
TALK = [{"role": "user", "content": "Hello"}]


def tokens_of_engine(llm: LLM, text: str, **params: Any) -> tuple[int, ...]:
    """What the engine itself generates for the tokens of a text."""
    prompt = tuple(llm.tokenizer.encode(text, add_special_tokens=False).ids)
    return llm.engine.generate([Request("direct", prompt, EngineParams(**params))])[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_is_that_of_the_engines_tokens(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, top_p=0.9, top_k=50, seed=3)
    expected = tokens_of_engine(
        llm, "def f", max_tokens=12, temperature=temperature, top_p=0.9, top_k=50, seed=3
    )
    (output,) = llm.generate("def f", params)
    assert output.token_ids == expected
    assert output.text == llm.tokenizer.decode(expected)
    assert output.finish_reason == "length"
    assert output.num_prompt_tokens == len(llm.encode("def f"))
    assert 0 < output.timing.ttft_ms < output.timing.total_ms
    assert output.timing.tpot_ms is not None
    assert math.isclose(output.timing.ttft_ms + 11 * output.timing.tpot_ms, output.timing.total_ms)
    assert not llm.engine.has_work


def test_many_prompts_come_back_in_order_and_as_if_alone(llm: LLM) -> None:
    prompts = ["import ", "class A", "x = ", "# ", "def f(a):"]
    params = [SamplingParams(max_tokens=4 + idx) for idx in range(5)]
    outputs = llm.generate(prompts, params)
    assert [each.prompt for each in outputs] == prompts
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert llm.generate(prompt, each)[0].token_ids == output.token_ids
        assert len(output.token_ids) == each.max_tokens


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize("stop", [(), ("e",), ("zz", "qq")])
def test_a_stream_gives_the_same_text_in_pieces_of_whole_characters(llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, stop=stop)
    (whole,) = llm.generate("héllo", params)
    stream = llm.stream("héllo", params)
    with pytest.raises(UsageError, match="has not ended"):
        stream.output  # noqa: B018
    pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert all(pieces)
    assert stream.output.token_ids == whole.token_ids
    assert stream.output.finish_reason == whole.finish_reason


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(llm: LLM) -> None:
    free = llm.generate("def f", SamplingParams(max_tokens=30))[0]
    stop = free.text[5:8]
    place = free.text.find(stop)
    stopped = llm.generate(["def f", "class"], SamplingParams(max_tokens=30, stop=stop, logprobs=True))[0]
    assert stopped.text == free.text[:place]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stop in llm.tokenizer.decode(stopped.token_ids)
    assert stop not in llm.tokenizer.decode(stopped.token_ids[:-1])
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == len(stopped.token_ids)
    assert not llm.engine.has_work


def test_streams_may_run_side_by_side(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9)
    expected = [llm.generate(prompt, params)[0].text for prompt in ("import ", "class A")]
    streams = [llm.stream(prompt, params) for prompt in ("import ", "class A")]
    texts = ["", ""]
    for _ in range(9):
        for idx, stream in enumerate(streams):
            texts[idx] += next(stream, "")
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == expected


def test_a_stream_that_is_left_ends_its_generation(llm: LLM) -> None:
    for prompt in ("import ", "class A"):
        stream = llm.stream(prompt, WORDS)
        next(stream)
        assert llm.engine.has_work
        stream.close()
        assert list(stream) == []
        assert not llm.engine.has_work
    llm.stream("never read", WORDS)
    assert not llm.engine.has_work


def test_a_refused_prompt_leaves_nothing_in_the_engine(llm: LLM) -> None:
    with pytest.raises(UsageError, match="this model has 128 positions"):
        llm.generate(["short", "long " * 200], WORDS)
    with pytest.raises(UsageError, match="empty prompt"):
        llm.generate(["short", ""], WORDS)
    assert not llm.engine.has_work


def test_a_conversation_is_rendered_by_the_chat_template(chat_llm: LLM, llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    text = "user: Hello\nassistant:"
    answered = chat_llm.generate(TALK, params)
    assert [each.token_ids for each in answered] == [chat_llm.generate(text, params)[0].token_ids]
    assert answered[0].prompt == TALK
    both = chat_llm.generate([TALK, text], params)
    assert both[0].token_ids == both[1].token_ids == answered[0].token_ids
    with pytest.raises(UsageError, match="no chat template"):
        llm.generate(TALK, WORDS)


@pytest.mark.parametrize("prompts", [[1], [["a"]], [{"role": "user"}], [[]], 5, None, b"a", TALK[0]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(UsageError, match="a prompt is a text or a list of messages"):
        llm.generate(prompts)


def test_parameters_are_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(UsageError, match="1 sampling parameters were given for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    for wrong in ({"max_tokens": 2}, [{"max_tokens": 2}], 2):
        with pytest.raises(UsageError, match="sampling parameters are SamplingParams, or a list of them"):
            llm.generate("a", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"stop": each} for each in ("", ("a", ""), (1,), 5, None, b"a")),
        *({"max_tokens": each} for each in (0, 2.5, "5", True, None)),
        *({"temperature": each} for each in (-1.0, "hot", None, float("nan"), 1j)),
        *({name: 1.5} for name in ("seed", "top_k", "top_logprobs", "top_p")),
    ],
    ids=str,
)
def test_sampling_parameters_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="sampling parameter"):
        SamplingParams(**wrong)


def test_one_stop_string_needs_no_tuple() -> None:
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)  # type: ignore[arg-type]


def test_an_end_of_sequence_token_of_the_generation_config_ends_a_text(
    chat_model_dir: Path, llm: LLM, tmp_path: Path
) -> None:
    free = llm.generate("def f", SamplingParams(max_tokens=20))[0]
    end = free.token_ids[6]
    shutil.copytree(chat_model_dir, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    other = compress.load(tmp_path / "model", device="cpu")
    output = other.generate("def f", SamplingParams(max_tokens=20))[0]
    place = free.token_ids.index(end)
    assert output.token_ids == free.token_ids[: place + 1]
    assert output.text == llm.tokenizer.decode(free.token_ids[:place])
    assert output.finish_reason == "stop"
    ignoring = other.generate("def f", SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert ignoring.token_ids == free.token_ids


def test_scores_are_the_log_probabilities_of_the_decoder(llm: LLM, model_dir: Path) -> None:
    text = "def f(a):\n    return a"
    (score,) = llm.score(text)
    ids = torch.tensor([llm.encode(text)])
    decoder = build_decoder(open_weights(model_dir), dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        expected = decoder(ids)[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=1e-4, atol=1e-4)
    assert score.token_ids == tuple(ids[0].tolist())
    assert math.isclose(score.mean_nll, -float(expected.mean()), rel_tol=1e-4)
    assert math.isclose(score.perplexity, math.exp(score.mean_nll))
    assert [each.text for each in llm.score(["one text", "another one"])] == ["one text", "another one"]


def test_a_text_of_one_token_cannot_be_scored(llm: LLM) -> None:
    with pytest.raises(UsageError, match="cannot be scored"):
        llm.score("a")


def test_a_model_whose_tokenizer_begins_text_with_bos_gets_it(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir, path)
    plain = compress.load(path, device="cpu")
    tokenizer = plain.tokenizer
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    llm = compress.load(path, device="cpu")
    assert llm.encode("a b") == [0, *plain.encode("a b")]
    assert llm.generate("a b", SamplingParams(max_tokens=2))[0].num_prompt_tokens == 1 + len(
        plain.encode("a b")
    )
    assert len(llm.score("a")[0].logprobs) == 1


def test_prompt_lookup_changes_no_text(llm: LLM, model_dir: Path) -> None:
    speculative = compress.load(model_dir, device="cpu", speculative="ngram", num_draft_tokens=2)
    params = SamplingParams(max_tokens=24, stop="\n")
    for prompt in ("ab ab ab ab", "import "):
        assert speculative.generate(prompt, params)[0].token_ids == llm.generate(prompt, params)[0].token_ids
    assert llm.acceptance is None
    assert speculative.acceptance is not None
    assert speculative.acceptance.num_rows > 0

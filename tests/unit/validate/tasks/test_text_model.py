"""Texts are scored and continued as the model's other doors do it."""

from pathlib import Path

import pytest
import torch

from compress.errors import UsageError
from compress.llm import LLM
from compress.llm import SamplingParams as TextParams
from compress.runtime.prompt_logprobs import score_prompt
from compress.runtime.request import SamplingParams
from compress.validate.tasks.text_model import TextModel


def test_a_continuation_begins_where_its_context_ends_and_takes_its_spaces(
    models: dict[str, TextModel],
) -> None:
    model = models["source"]
    context, continuation = model.encode_pair("def f(x): ", "return x")
    assert model.decode(context) == "def f(x):"
    assert model.decode(continuation) == " return x"
    assert [*context, *continuation] == model.encode("def f(x): return x")


def test_a_continuation_in_one_token_with_the_end_of_its_context_is_that_token(
    models: dict[str, TextModel],
) -> None:
    model = models["source"]
    merged = next(
        word
        for word in ("self", "return", "import", "def", "in", "or")
        if len(model.encode("x " + word)) == len(model.encode("x " + word[:-1]))
    )
    context, continuation = model.encode_pair("x " + merged[:-1], merged[-1])
    assert [*context, *continuation] == model.encode("x " + merged)
    assert len(continuation) == 1


def test_a_text_without_a_context_comes_after_the_first_token(models: dict[str, TextModel]) -> None:
    model = models["source"]
    assert model.encode_pair("", "import os") == ([0], model.encode("import os"))
    with pytest.raises(UsageError, match="adds no token"):
        model.encode_pair("import", "")


def test_scores_are_the_log_probabilities_of_the_whole_text(models: dict[str, TextModel]) -> None:
    model = models["source"]
    pairs = [("import", " os"), ("def f(x):", " return x + 1"), ("a", "b")]
    for (context, continuation), score in zip(pairs, model.score(pairs), strict=True):
        start, rest = model.encode_pair(context, continuation)
        whole = score_prompt(model.engine, [*start, *rest]).logprobs
        assert score.logprob == pytest.approx(sum(whole[-len(rest) :]), rel=1e-5)


def test_texts_are_those_of_the_library(models: dict[str, TextModel], model_dir: Path) -> None:
    llm = LLM(models["source"].engine, model_dir)
    prompts = ["def f(", "import os\n", "x = "]
    theirs = llm.generate(prompts, TextParams(max_tokens=12, temperature=0.9, seed=4, stop=("e",)))
    ours = models["source"].generate(
        prompts, SamplingParams(max_tokens=12, temperature=0.9, seed=4), stop=("e",)
    )
    assert [(each.text, each.tokens, each.reason) for each in ours] == [
        (each.text, each.token_ids, each.finish_reason) for each in theirs
    ]


def test_a_prompt_that_is_too_long_loses_its_beginning_and_too_many_tokens_are_refused(
    models: dict[str, TextModel],
) -> None:
    model = models["source"]
    long = "x = 1\n" * 100
    kept = model.encode(long)[-124:]
    (text,) = model.generate([long], SamplingParams(max_tokens=4, ignore_eos=True))
    logits_SV = model.engine.runner.score(torch.tensor([[*kept, *text.tokens]]))[0]
    assert logits_SV[123:127].argmax(dim=-1).tolist() == list(text.tokens)
    with pytest.raises(UsageError, match="leaves no token for a prompt"):
        model.generate(["a"], SamplingParams(max_tokens=128))


def test_a_model_without_a_chat_template_is_not_asked_by_one(models: dict[str, TextModel]) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        models["source"].render([{"role": "user", "content": "Hello"}])

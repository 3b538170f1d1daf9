"""Which programs read which of our formats, and compute what the files say: tiny models of every family in
every format.

    python -m scripts.interop_matrix --python .venv-interop/bin/python

Models are random, of two layers, with every width a multiple of 128 (vLLM's CPU kernels want 32, groups of
the formats 128). Each program, this project's runtime among them, scores the same prompts and continues them
greedily, and all its log probabilities are compared with those of its own arithmetic done plainly over the
codes as they are decoded here (`plain_twin.py`): what is left is the reading of the file and the rounding of
a dtype. The limits are those of 16 bits, whatever the scheme: 0.02 on average, 0.15 at one token. Texts that
have nothing in common differ by 1.2. Each family is also there as pruning leaves it: half the KV groups,
three quarters of the FFN, in 4 bits; a Qwen2 keeps its heads, because vLLM takes their dimension from the
hidden size. Each mixture is also there with experts in 16 bits (`dense experts`).

A program computes in float32 where it can: in 16 bits the last bit of every input of an 8-bit linear is
uncertain, it decides the code, and two exact programs end up 0.05 apart. Beside it stands how far a program
is from this runtime (`from us`), which rounds inputs in a way of its own; it is held to nothing. vLLM reads
everything that its kernels for this CPU can compute, `transformers` the compressed-tensors and fp8 files (the
others need another package), ONNX Runtime and ONNX Runtime GenAI the ONNX files. Exit code 1: a program does
not load a file, or computes something else.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.export import write_format
from compress.models.family import family_of
from compress.models.overrides import linear_names
from compress.models.pruning import Widths, resized
from compress.models.random_source import RandomSource
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES, QuantizedWeight
from scripts.check_interop import CPU, LIMITS, Answer, Question, Reply, ask_all, ask_runtime
from scripts.interop_families import ALL_FORMATS, FAMILIES, MIXTURES, SMALL, STACKED
from scripts.plain_twin import scores, twin

WRITTEN = (
    ("compressed-tensors", "W4A16_G128"),
    ("compressed-tensors", "W4A16_G128_ASYM"),
    ("compressed-tensors", "FP8_DYNAMIC"),
    ("compressed-tensors", "INT8_DYNAMIC"),
    ("fp8", "FP8_BLOCK"),
    ("awq", "W4A16_G128_ASYM"),
    ("gptq", "W4A16_G128"),
    ("onnx", "W4A16_G128"),
    ("onnx", "W4A16_G64_ASYM"),
    ("onnx", "W4A16_G32"),
    ("onnx", "W8A16"),
    ("onnx", "INT8_DYNAMIC"),
    ("onnx-float16", "W4A16_G128_ASYM"),
    ("onnx-float16", "W8A16"),
)
DENSE_EXPERTS = ("compressed-tensors", "FP8_DYNAMIC")
"""How every mixture is written once more, with experts in 16 bits."""
ROUTED_FRAC = 0.97
"""Share of the tokens of a mixture that the limit of a single token holds for: the last bit of a token's
hidden state decides between two experts that its router likes equally, and another one computes it then."""
FEW = (WRITTEN[0], WRITTEN[2], WRITTEN[6])
GRAPHS = (WRITTEN[8], WRITTEN[10], WRITTEN[12])
"""How the families beside those of all formats are written as ONNX, where they are no mixtures."""
GRAPH_READERS = ("onnxruntime", "onnxruntime_genai")
OWN_FIELDS = {"hidden_act": "hidden_activation", "rms_norm_eps": "layer_norm_eps"}
"""Fields of `SMALL` that some families spell otherwise."""
DTYPES = {
    "compress": {},
    "vllm": {"W4A16_G128": "float16", "W4A16_G128_ASYM": "float16", "FP8_BLOCK": "bfloat16"},
    "transformers": {"FP8_BLOCK": "bfloat16"},
    "onnxruntime": {},
    "onnxruntime_genai": {},
}
"""float32 elsewhere. vLLM's four-bit kernels take 16 bits only (float16 rounds less), and its kernel for
blocks bfloat16; to that `transformers` decompresses blocks, whatever is asked for."""
WITHOUT_AMX = ("INT8_DYNAMIC",)
"""vLLM's INT8 kernel for AMX takes no float32; the one for other CPUs does."""
NOT_ASKED = {
    ("vllm", "qwen2", "FP8_BLOCK"): "its CPU kernel takes no 16-bit bias",
    **{
        ("onnxruntime_genai", "gemma4_text", scheme): "it has caches of one width, and this family two"
        for _, scheme in GRAPHS
    },
    **{
        ("vllm", family, "FP8_DYNAMIC"): "its CPU backend has no FP8 experts ('Unsupported FP8 MoE backend')"
        for family in MIXTURES
    },
    **{
        ("vllm", family, scheme): why
        for family, why in (
            ("ernie4_5_moe", "its CPU router leaves out the bias of a softmax"),
            ("minimax_m2", "its CPU router takes no sigmoid without groups"),
        )
        for scheme in ("W4A16_G128", "FP8_DYNAMIC, dense experts")
    },
}
"""What no CPU can be asked."""


def not_asked() -> dict[tuple[str, str, str], str]:
    """Return what programs cannot be asked on this CPU, as (program, family, scheme), and why."""
    refused = dict(NOT_ASKED)
    if not torch.cpu._is_amx_tile_supported():
        refused |= {
            ("vllm", family, "FP8_BLOCK"): "its CPU kernel for FP8 blocks needs AMX" for family in FAMILIES
        }
    if not torch.cpu._is_vnni_supported():
        # Measured with its kernel alone (oneDNN, AVX2): exact for codes up to 63, wrong for codes up to 127.
        overflows = "its INT8 kernel adds pairs of products in 16 bits without VNNI, and they overflow"
        refused |= {("vllm", family, "INT8_DYNAMIC"): overflows for family in ALL_FORMATS}
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        refused |= {
            ("vllm", family, scheme): "its build for this CPU has no kernel of four bits (cpu_gemm_wna16)"
            for family in FAMILIES
            for scheme in ("W4A16_G128", "W4A16_G128_ASYM")
        }
    return refused


NUM_PROMPTS = 4
PROMPT_TOKENS = 48
MAX_TOKENS = 16
MAX_MEAN, MAX_SINGLE = LIMITS["float16"]


@dataclass(frozen=True)
class Case:
    family: str
    form: str
    scheme: str
    path: Path
    pruned: bool = False
    dense_experts: bool = False

    @property
    def scheme_shown(self) -> str:
        return f"{self.scheme}, dense experts" if self.dense_experts else self.scheme

    def dtype(self, program: str) -> str:
        if self.form == "onnx-float16" and program in GRAPH_READERS:
            return "float16"
        return DTYPES[program].get(self.scheme, "float32")

    def question(self, program: str, prompts: list[tuple[int, ...]]) -> Question:
        without_amx = self.scheme in WITHOUT_AMX
        return Question(
            str(self.path),
            self.dtype(program),
            MAX_TOKENS,
            prompts,
            without_amx=without_amx,
        )


class DenseExperts(RandomSource):
    """Random weights of which the routed experts have no codes."""

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return {
            name: dense(value).to(torch.bfloat16) if is_expert(name) else value
            for name, value in super().layer(layer_idx).items()
        }


def is_expert(name: str) -> bool:
    return "moe.experts." in name


def cases_of(family: str, directory: Path) -> Iterator[Case]:
    if family not in STACKED:
        for form, scheme in WRITTEN if family in ALL_FORMATS else FEW:
            yield Case(family, form, scheme, directory / f"{family}-{form}-{scheme}")
    if family not in ALL_FORMATS and family not in MIXTURES:
        for form, scheme in GRAPHS:
            yield Case(family, form, scheme, directory / f"{family}-{form}-{scheme}")
    if family in MIXTURES:
        yield Case(family, *DENSE_EXPERTS, directory / f"{family}-dense-experts", dense_experts=True)
    if family in ALL_FORMATS:
        yield Case(family, *WRITTEN[0], directory / f"{family}-pruned", pruned=True)


def write(case: Case) -> None:
    own = FAMILIES[case.family]
    common = {name: value for name, value in SMALL.items() if OWN_FIELDS.get(name) not in own}
    config = {**common, "model_type": case.family, **own}
    arch = family_of(config).read_config(config)
    if case.pruned:
        heads = (4, 2) if case.family == "qwen2" else (2, 1)
        arch = resized(arch, Widths(*heads, 384, 2))
    scheme = SCHEMES[case.scheme]
    drawn = DenseExperts if case.dense_experts else RandomSource
    source = drawn(arch, device=CPU, dtype=torch.bfloat16, scheme=scheme)
    linears = linear_names(arch) if case.dense_experts else ()
    exceptions = tuple((name, None) for name in linears if is_expert(name))
    case.path.mkdir()
    write_format(case.form, case.path, source, ModelScheme(scheme, exceptions=exceptions))


def read_by(program: str, case: Case) -> bool:
    if case.form.startswith("onnx"):
        return program == "compress" or program in GRAPH_READERS
    if program in GRAPH_READERS:
        return False
    return program != "transformers" or case.form in ("compressed-tensors", "fp8")


def differences(ours: Iterable[float], theirs: Iterable[float], *, frac: float = 1.0) -> tuple[float, float]:
    """Mean, and the largest of the smallest `frac`; one that is no number counts as infinite."""
    all_of_them = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    finite = sorted(each if each == each else float("inf") for each in all_of_them)
    return sum(finite) / len(finite), finite[math.ceil(frac * len(finite)) - 1]


def from_twin(
    case: Case, program: str, prompts: Sequence[tuple[int, ...]], answers: Sequence[Answer]
) -> tuple[float, float]:
    """How far a program is from its own arithmetic, over prompts and what it wrote behind them."""
    plain = twin(case.path, program)
    expected = [
        each
        for prompt, answer in zip(prompts, answers, strict=True)
        for each in scores(plain, (*prompt, *answer.tokens))
    ]
    answered = [each for answer in answers for each in (*answer.prompt_logprobs, *answer.logprobs)]
    return differences(expected, answered, frac=ROUTED_FRAC if case.family in MIXTURES else 1.0)


def from_us(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Mean over the prompts, which both have seen."""
    flat = [[each for answer in answers for each in answer.prompt_logprobs] for answers in (ours, theirs)]
    return differences(*flat)[0]


def row(
    case: Case, program: str, prompts: list[tuple[int, ...]], reply: Reply, ours: Sequence[Answer]
) -> tuple[str, bool]:
    """A line of the table, and whether all is well."""
    family = f"{case.family}, pruned" if case.pruned else case.family
    by = f"{program} {reply.version or ''}"
    name = f"| {family} | {case.form} | {case.scheme_shown} | {by} | {case.dtype(program)} "
    if reply.error is not None:
        return f"{name}| | | | {reply.error} |", False
    mean, worst = from_twin(case, program, prompts, reply.prompts)
    agrees = mean <= MAX_MEAN and worst <= MAX_SINGLE
    beside = "" if program == "compress" else f"{from_us(ours, reply.prompts):.4f}"
    return (
        f"{name}| {mean:.6f} | {worst:.4f} | {beside} | {'agrees' if agrees else 'computes something else'} "
        "|",
        agrees,
    )


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
    parser.add_argument("--programs", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    args = parser.parse_args()
    started_s = time.perf_counter()
    drawn = torch.randint(
        2, SMALL["vocab_size"], (NUM_PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    prompts = [tuple(each) for each in drawn.tolist()]
    lines = [
        "| family | format | scheme | read by | in | mean \\|dlogp\\| | worst | from us | |",
        "|" + "---|" * 9,
    ]
    well = True
    refused = not_asked()
    with tempfile.TemporaryDirectory() as directory:
        cases = [case for family in args.families for case in cases_of(family, Path(directory))]
        for case in cases:
            write(case)
        ours = {case: ask_runtime(case.path, prompts, MAX_TOKENS) for case in cases}
        for program in args.programs:
            asked = [
                case
                for case in cases
                if read_by(program, case) and (program, case.family, case.scheme_shown) not in refused
            ]
            if program == "compress":
                replies = [Reply(ours[case]) for case in asked]
            else:
                python = args.python if program == "vllm" else args.transformers
                replies = ask_all(program, python, [case.question(program, prompts) for case in asked])
            for case, reply in zip(asked, replies, strict=True):
                line, agrees = row(case, program, prompts, reply, ours[case])
                lines.append(line)
                well = well and agrees
    left_out = [f"not asked: {' '.join(what)}, {why}" for what, why in refused.items()]
    print(
        *lines,
        *left_out,
        f"{time.perf_counter() - started_s:.0f} s; limits: mean {MAX_MEAN}, single {MAX_SINGLE}",
        sep="\n",
    )
    sys.exit(not well)


if __name__ == "__main__":
    main()

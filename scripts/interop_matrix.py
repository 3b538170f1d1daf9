"""Which programs read which of our formats as this project's runtime does: tiny models of every family in every format.

    python scripts/interop_matrix.py --python .venv-interop/bin/python

Models are random, of two layers, with every width a multiple of 128 (vLLM's CPU kernels want 32, groups of the formats 128). Each program
scores the same prompts and continues them greedily; agreement is `check_interop.py`'s for 16 bits. vLLM reads everything, `transformers`
the compressed-tensors files (the others need a package beside it), with zero points only when it decompresses at load. It computes in
float32 here, but with weights that it rounds to the model's bfloat16 when it decompresses them later.

Each family is also there as pruning leaves it: half the KV groups, three quarters of the FFN, in 4 bits. Qwen2 keeps its heads, because
vLLM takes their dimension from the hidden size.

Where a scheme rounds inputs, a difference in the last bit of an input moves it to the next number of the grid, and two programs end up as
far apart as each is from inputs that are not rounded. So the limits grow by sqrt(2) times what rounding the inputs moves here, the column
`of inputs`. That is still far from what wrong weights do: texts that have nothing in common differ by 1.2 on average.
Exit code 1: a program does not load a file, or disagrees.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from check_interop import CPU, LIMITS, NEAR_TIE, Answer, Question, Row, ask_all, ask_runtime, compare, write_dense_twin

from compress.export import write_format
from compress.models.family import family_of
from compress.models.pruning import Widths, resized
from compress.models.random_source import RandomSource
from compress.quant.scheme import SCHEMES, ModelScheme

SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}
WRITTEN = (
    ("compressed-tensors", "W4A16_G128"),
    ("compressed-tensors", "W4A16_G128_ASYM"),
    ("compressed-tensors", "FP8_DYNAMIC"),
    ("compressed-tensors", "INT8_DYNAMIC"),
    ("fp8", "FP8_BLOCK"),
    ("awq", "W4A16_G128_ASYM"),
    ("gptq", "W4A16_G128"),
)
VLLM_DTYPE = {"INT8_DYNAMIC": "bfloat16", "FP8_BLOCK": "bfloat16"}
"""float16 elsewhere, which rounds less; vLLM's INT8 and FP8 block kernels for CPUs take no float16."""
TRANSFORMERS_DTYPE = {"FP8_BLOCK": "bfloat16"}
"""float32 elsewhere; this format is decompressed to bfloat16 weights, whatever dtype is asked for."""
NUM_PROMPTS, PROMPT_TOKENS, MAX_TOKENS = 4, 48, 16


@dataclass(frozen=True)
class Case:
    family: str
    form: str
    scheme: str
    path: Path
    pruned: bool = False

    def question(self, program: str, prompts: list[tuple[int, ...]]) -> Question:
        dtype = TRANSFORMERS_DTYPE.get(self.scheme, "float32") if program == "transformers" else VLLM_DTYPE.get(self.scheme, "float16")
        return Question(str(self.path), dtype, MAX_TOKENS, prompts, decompress=not SCHEMES[self.scheme].symmetric)


def write_all(directory: Path, families: Iterable[str]) -> Iterator[Case]:
    for family in families:
        config = {**SMALL, "model_type": family, **FAMILIES[family]}
        arch = family_of(config).read_config(config)
        for form, name in WRITTEN:
            case = Case(family, form, name, directory / f"{family}-{form}-{name}")
            case.path.mkdir()
            source = RandomSource(arch, device=CPU, dtype=torch.bfloat16, scheme=SCHEMES[name])
            write_format(form, case.path, source, ModelScheme(SCHEMES[name]))
            yield case
        form, name = WRITTEN[0]
        case = Case(family, form, name, directory / f"{family}-pruned", pruned=True)
        case.path.mkdir()
        heads = (4, 2) if family == "qwen2" else (2, 1)
        source = RandomSource(resized(arch, Widths(*heads, 384, 2)), device=CPU, dtype=torch.bfloat16, scheme=SCHEMES[name])
        write_format(form, case.path, source, ModelScheme(SCHEMES[name]))
        yield case


def extremes(rows: list[Row]) -> tuple[float, float]:
    """Largest mean of a prompt, largest single difference."""
    return max(row.mean for row in rows), max(row.worst for row in rows)


def moved_by_inputs(case: Case, prompts: list[tuple[int, ...]], ours: list[Answer]) -> tuple[float, float]:
    """How far the same weights with inputs that are not rounded are from ours."""
    if SCHEMES[case.scheme].activation is None:
        return 0.0, 0.0
    with tempfile.TemporaryDirectory() as directory:
        unrounded = ask_runtime(write_dense_twin(case.path, Path(directory), dtype=torch.float32), prompts, MAX_TOKENS)
    return extremes([compare(mine, other, near_tie=math.inf) for mine, other in zip(ours, unrounded, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, default=Path(".venv-interop/bin/python"), help="the Python of vLLM's environment")
    parser.add_argument(
        "--transformers", type=Path, default=Path(sys.executable), help="a Python that has transformers; this one by default"
    )
    parser.add_argument("--programs", nargs="+", default=["vllm", "transformers"], choices=["vllm", "transformers"])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    args = parser.parse_args()
    started_s = time.perf_counter()
    drawn = torch.randint(2, SMALL["vocab_size"], (NUM_PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    prompts = [tuple(row) for row in drawn.tolist()]
    lines, agree = ["| family | format | scheme | read by | in | mean \\|dlogp\\| | worst | of inputs | |", "|" + "---|" * 9], True
    with tempfile.TemporaryDirectory() as directory:
        cases = list(write_all(Path(directory), args.families))
        ours = {case: ask_runtime(case.path, prompts, MAX_TOKENS) for case in cases}
        of_inputs = {case: moved_by_inputs(case, prompts, ours[case]) for case in cases}
        for program in args.programs:
            asked = [case for case in cases if program == "vllm" or case.form in ("compressed-tensors", "fp8")]
            questions = [case.question(program, prompts) for case in asked]
            answers = ask_all(program, args.python if program == "vllm" else args.transformers, questions)
            for case, question, answer in zip(asked, questions, answers, strict=True):
                family = f"{case.family}, pruned" if case.pruned else case.family
                name = f"| {family} | {case.form} | {case.scheme} | {program} {answer.version or ''} | {question.dtype} "
                if answer.error is not None:
                    lines.append(f"{name}| | | | {answer.error} |")
                    agree = False
                    continue
                limits = [limit + 2**0.5 * moved for limit, moved in zip(LIMITS["float16"], of_inputs[case], strict=True)]
                pairs = zip(ours[case], answer.prompts, strict=True)
                rows = [compare(mine, other, near_tie=max(NEAR_TIE, 2 * of_inputs[case][1])) for mine, other in pairs]
                problems = {problem for row in rows if (problem := row.verdict(*limits))}
                mean, worst = extremes(rows)
                lines.append(f"{name}| {mean:.6f} | {worst:.4f} | {of_inputs[case][0]:.4f} | {', '.join(problems) or 'agrees'} |")
                agree = agree and not problems
    print(*lines, f"{time.perf_counter() - started_s:.0f} s; limits without inputs (mean, single): {LIMITS['float16']}", sep="\n")
    sys.exit(not agree)


if __name__ == "__main__":
    main()

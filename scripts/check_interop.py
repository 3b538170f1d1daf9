"""Does vLLM read an artifact as this project's runtime does?

    python scripts/check_interop.py [ARTIFACT] --python .venv-interop/bin/python

Both programs score the same prompts and continue them greedily on the CPU; vLLM runs in its own environment (`make interop` builds it).
The runtime computes in float32, the reference. vLLM computes in float32 too when the checkpoint is dense, and otherwise in float16: its
quantized CPU kernels take no float32. They agree when the log probabilities of all compared tokens differ by at most 0.02 on average and
0.15 at worst (dense: 0.0001 and 0.001), and the tokens are equal up to the first position where vLLM's two best tokens are closer than
0.05: behind a near tie either choice is right and the texts part.

Not bfloat16, because its rounding alone is as large as the limits. Measured on the bundled model in W4A16_G128, 12 x 96 tokens of held-out
text, mean and largest difference from this runtime in float32: this runtime in bfloat16 0.0154 and 0.17; vLLM on the same values as dense
weights in bfloat16 0.0142 and 0.13, in float16 0.0017 and 0.026, in float32 2e-6 and 2e-5; vLLM's 4-bit kernel in float16 0.0041 and
0.071, in bfloat16 0.044 and 0.62 (its bfloat16 kernel rounds more than the dtype does; the codes are read rightly, as float16 shows).

Without ARTIFACT a small random Llama is written through the exporter, once in W4A16_G128 and once as a dense checkpoint of the same
dequantized weights. The second takes vLLM's rounding out: what differs there is reading or arithmetic.
Exit code 1: they disagree.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.export import FORMATS, open_checkpoint
from compress.models.checkpoint import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.weights import MemorySource, build_decoder
from compress.quant.numerics import choose_scale, round_to_nearest
from compress.quant.scheme import QuantizedWeight, scheme_named
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Request, SamplingParams

CPU = torch.device("cpu")
LIMITS = {"float16": (0.02, 0.15), "float32": (1e-4, 1e-3)}
"""What vLLM computes in -> largest mean and largest single difference of log probabilities."""
NEAR_TIE = 0.05
CACHE_GIB = "1"
# Log probabilities spread by 2.3 and the best token leads by 0.4 (median), as in trained models. Twice the deviation of the linears and of
# the head makes a chaotic model, where vLLM's bfloat16 moves dense weights by 0.03 on average and its 4-bit kernel by 0.1 (measured, with
# float32 on the same values agreeing to 0.00001): nothing about reading could be told there.
INIT_STD = {"embed.weight": 1.0, "head.weight": 0.2}
LINEAR_STD = 0.05
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
RANDOM_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Answer:
    """One program's view of one prompt; `margins` is vLLM's only."""

    prompt_logprobs: list[float]
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


@dataclass(frozen=True)
class Row:
    """The comparison of one prompt: how many tokens were compared, and whether they part where they must not."""

    num_scored: int
    num_generated: int
    mean: float
    worst: float
    parts_early: bool

    def verdict(self, dtype: str) -> str | None:
        """What is wrong, or None."""
        max_mean, max_single = LIMITS[dtype]
        if self.parts_early:
            return "tokens part without a tie"
        return None if self.mean <= max_mean and self.worst <= max_single else "log probabilities differ"


class RoundedLinears:
    """Weights of a random decoder with its linears rounded to W4A16_G128."""

    def __init__(self, config: dict[str, Any]) -> None:
        decoder = Decoder(family_of(config).read_config(config))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, INIT_STD.get(name, LINEAR_STD), generator=generator)
        self._source = MemorySource(decoder, dtype=torch.bfloat16)
        self.arch = decoder.arch
        self.scheme = scheme_named("W4A16_G128")

    def outer(self) -> dict[str, torch.Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, torch.Tensor | QuantizedWeight]:
        weights = self._source.layer(layer_idx)
        for linear in self.arch.layers[layer_idx].linears:
            weight = weights[f"{linear}.weight"]
            assert isinstance(weight, torch.Tensor)
            chosen = choose_scale(weight.to(torch.float32), self.scheme, torch.bfloat16, choice="min_max", h_II=None)
            weights[f"{linear}.weight"] = round_to_nearest(weight.to(torch.float32), self.scheme, *chosen)
        return weights


def write_random_models(directory: Path) -> list[Path]:
    """The quantized model, and a dense one of the same values."""
    quantized, plain = directory / "w4a16-g128", directory / "dense"
    quantized.mkdir()
    plain.mkdir()
    source, form = RoundedLinears(RANDOM_LLAMA), FORMATS.get("compressed-tensors")
    config = form.quantization_config(source.scheme, ignore=["lm_head"])
    write_checkpoint(quantized, source, codec=form.codec, quantization_config=config)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    write_checkpoint(plain, MemorySource(decoder, dtype=torch.bfloat16))
    return [quantized, plain]


def encode(path: Path, vocab_size: int) -> list[tuple[int, ...]]:
    """The texts as tokens; without a tokenizer, random tokens of like lengths."""
    if (path / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        return [tuple(tokenizer.encode(text).ids) for text in TEXTS]
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(3, vocab_size, (8 + 5 * idx,), generator=generator).tolist()) for idx in range(len(TEXTS))]


def ask_runtime(path: Path, prompts: list[tuple[int, ...]], max_tokens: int) -> list[Answer]:
    length = max(map(len, prompts)) + max_tokens
    config = EngineConfig(dtype=torch.float32, max_batch_size=len(prompts), max_model_len=length, kv_cache_bytes=int(CACHE_GIB) << 30)
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


def ask_vllm(python: Path, path: Path, prompts: list[tuple[int, ...]], max_tokens: int, dtype: str) -> list[Answer]:
    with tempfile.TemporaryDirectory() as directory:
        question, answer = Path(directory, "question.json"), Path(directory, "answer.json")
        question.write_text(json.dumps({"model": str(path.resolve()), "dtype": dtype, "max_tokens": max_tokens, "prompts": prompts}))
        command = [str(python), str(Path(__file__).with_name("vllm_logprobs.py")), str(question), str(answer)]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"vLLM failed on {path} (exit code {done.returncode}); the end of what it said:\n{done.stderr[-4000:]}")
        return [Answer(**each) for each in json.loads(answer.read_text())]


def compare(ours: Answer, theirs: Answer) -> Row:
    """Prompt tokens always, generated ones as long as both programs have seen the same text."""
    parting = next((idx for idx, pair in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if pair[0] != pair[1]), None)
    end = len(theirs.tokens) if parting is None else parting
    pairs = [*zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True), *zip(ours.logprobs[:end], theirs.logprobs[:end], strict=True)]
    differences = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in pairs]
    parts_early = parting is not None and theirs.margins[parting] >= NEAR_TIE
    return Row(len(ours.prompt_logprobs), end, sum(differences) / len(differences), max(differences), parts_early)


def report(rows: list[Row], dtype: str) -> bool:
    print("prompt  scored  generated  mean |dlogp|  max |dlogp|  verdict")
    for idx, row in enumerate(rows):
        print(
            f"{idx:6d}  {row.num_scored:6d}  {row.num_generated:9d}  {row.mean:12.6f}  {row.worst:11.6f}  {row.verdict(dtype) or 'agrees'}"
        )
    return all(row.verdict(dtype) is None for row in rows)


def check(path: Path, python: Path, max_tokens: int) -> bool:
    checkpoint = open_checkpoint(path)
    dtype = "float16" if checkpoint.schemes else "float32"
    schemes = ", ".join(sorted({scheme.name for scheme in checkpoint.schemes.values()})) or "dense"
    print(f"{path.name}: {checkpoint.arch.family}, {schemes}; vLLM in {dtype}", flush=True)
    prompts = encode(path, checkpoint.arch.vocab_size)
    ours, theirs = ask_runtime(path, prompts, max_tokens), ask_vllm(python, path, prompts, max_tokens, dtype)
    return report([compare(mine, other) for mine, other in zip(ours, theirs, strict=True)], dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact", type=Path, nargs="?", help="a directory with config.json; default: two small random models")
    parser.add_argument("--python", type=Path, default=Path(".venv-interop/bin/python"), help="the Python of vLLM's environment")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        paths = [arguments.artifact] if arguments.artifact else write_random_models(Path(directory))
        verdicts = [check(path, arguments.python, arguments.max_tokens) for path in paths]
    agree = all(verdicts)
    print("vLLM and this runtime agree." if agree else "vLLM and this runtime DISAGREE.")
    sys.exit(not agree)


if __name__ == "__main__":
    main()

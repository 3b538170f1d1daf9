"""The other tools' half of `bench_quality.py --peers`: runs in their environment and imports nothing of this
project.

    peer_quantize.py QUESTION.json ANSWER.json

Question: {tool, model, tokens, out}: a method of `TOOLS`, a Hugging Face directory, a safetensors file with
the calibration tokens [N, S] under `tokens`, and a new directory for the checkpoint. Every tool gets the same
rows of tokens and is left at its defaults where they are not the scheme itself, the model's own dtype
included. Answer: {seconds, cpu_seconds, threads, versions}: the tool's quantizing call alone; loading the
model and saving the result do not count.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Steps = tuple[Callable[[], Any], Callable[[str], Any]]
"""What quantizes, and what writes the result to a directory."""


def llmcompressor(*methods: str) -> Callable[[str, Tensor], Steps]:
    def prepare(model_path: str, tokens_NS: Tensor) -> Steps:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
        return oneshot_of(model, tokens_NS, methods), lambda out: model.save_pretrained(
            out, save_compressed=True
        )

    return prepare


def oneshot_of(model: Any, tokens_NS: Tensor, methods: tuple[str, ...], **options: Any) -> Callable[[], Any]:
    """llm-compressor's one call, with steps by name: `awq`, `gptq`, `rtn`."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if model.device.type == "cpu":
        IntermediatesCache.pin_memory = lambda *args, **kwargs: (
            None
        )  # pinning needs a GPU, and this release does not ask for one
    modifiers = {"awq": lambda **_: AWQModifier(), "gptq": GPTQModifier, "rtn": QuantizationModifier}
    recipe = [modifiers[each](scheme="W4A16", targets="Linear", ignore=["lm_head"]) for each in methods]
    rows = {"input_ids": tokens_NS.tolist(), "attention_mask": torch.ones_like(tokens_NS).tolist()}
    sizes = {"num_calibration_samples": tokens_NS.shape[0], "max_seq_length": tokens_NS.shape[1]}
    dataset = Dataset.from_dict(rows)
    return lambda: oneshot(
        model=model, dataset=dataset, recipe=recipe, shuffle_calibration_samples=False, **sizes, **options
    )


def auto_round(model_path: str, tokens_NS: Tensor) -> Steps:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in tokens_NS]
    sizes = {"nsamples": tokens_NS.shape[0], "seqlen": tokens_NS.shape[1]}
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(model_path),
        scheme="W4A16",
        dataset=rows,
        device_map="cpu",
        **sizes,
    )
    return rounding.quantize, lambda out: rounding.save_quantized(out, format="auto_gptq")


def autoawq(model_path: str, tokens_NS: Tensor) -> Steps:
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    model = AutoAWQForCausalLM.from_pretrained(model_path, device_map="cpu")
    config = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    sizes = {"max_calib_samples": tokens_NS.shape[0], "max_calib_seq_len": tokens_NS.shape[1]}
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = tokens_NS.tolist()
    return lambda: model.quantize(
        tokenizer, quant_config=config, calib_data=rows, **sizes
    ), model.save_quantized


def gptqmodel(model_path: str, tokens_NS: Tensor) -> Steps:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # read at import; it starts with no less
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(
        model_path, QuantizeConfig(bits=4, group_size=128, sym=True, desc_act=False), device="cpu"
    )
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens_NS]
    return lambda: model.quantize(rows, batch_size=1), model.save


@dataclass(frozen=True)
class Tool:
    """`method` and `scheme` in this project's words; `slow` ones take many minutes where the others take one,
    and are measured with one seed."""

    package: str
    method: str
    scheme: str
    prepare: Callable[[str, Tensor], Steps]
    slow: bool = False


TOOLS = {
    "llmcompressor-rtn": Tool("llmcompressor", "rtn", "W4A16_G128", llmcompressor("rtn")),
    "llmcompressor-gptq": Tool("llmcompressor", "gptq", "W4A16_G128", llmcompressor("gptq")),
    "llmcompressor-awq": Tool("llmcompressor", "awq", "W4A16_G128", llmcompressor("awq", "rtn"), slow=True),
    "llmcompressor-awq+gptq": Tool(
        "llmcompressor", "awq+gptq", "W4A16_G128", llmcompressor("awq", "gptq"), slow=True
    ),
    "gptqmodel": Tool("gptqmodel", "gptq", "W4A16_G128", gptqmodel),
    "auto-round": Tool("auto-round", "signround", "W4A16_G128", auto_round, slow=True),
    "autoawq": Tool("autoawq", "awq", "W4A16_G128_ASYM", autoawq, slow=True),
}


def main() -> None:
    question = json.loads(Path(sys.argv[1]).read_text())
    tool = TOOLS[question["tool"]]
    torch.manual_seed(0)
    quantize, save = tool.prepare(question["model"], load_file(question["tokens"])["tokens"].to(torch.int64))
    started_s = time.perf_counter()
    cpu_started_s = time.process_time()
    quantize()
    times = {"seconds": time.perf_counter() - started_s, "cpu_seconds": time.process_time() - cpu_started_s}
    save(question["out"])
    versions = {name: version(name) for name in (tool.package, "torch", "transformers")}
    Path(sys.argv[2]).write_text(
        json.dumps({**times, "threads": torch.get_num_threads(), "versions": versions})
    )


if __name__ == "__main__":
    main()

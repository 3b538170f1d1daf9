"""The other tool's half of `bench_quantize.py --tools`: runs in its environment and imports nothing of this
project.

    peer_speed.py QUESTION.json ANSWER.json

Question: {tool, model, tokens, device, layers}: a method of `TOOLS`, a Hugging Face directory, a safetensors
file with the calibration tokens [N, S] under `tokens`, and how many of the model's layers to quantize, run by
run. Answer: {runs: [{seconds, peak_device_bytes}], package, method, versions}. Timed is the quantizing call
alone, on a model that is on the device, with the activations kept there too, which is faster than the tool's
default; reading the model and saving the result do not count.
"""

import gc
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.peer_quantize import oneshot_of

TOOLS: dict[str, tuple[str, ...]] = {
    "llmcompressor-gptq": ("gptq",),
    "llmcompressor-awq": ("awq", "rtn"),
    "llmcompressor-awq+gptq": ("awq", "gptq"),
}


def measure(
    tool: str, model_path: str, tokens_NS: Tensor, device: torch.device, num_layers: int
) -> dict[str, Any]:
    model = (
        AutoModelForCausalLM.from_pretrained(model_path, dtype="auto", num_hidden_layers=num_layers)
        .to(device)
        .eval()
    )
    quantize = oneshot_of(model, tokens_NS, TOOLS[tool], sequential_offload_device=str(device))
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started_s = time.perf_counter()
    quantize()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started_s
    return {"seconds": seconds, "peak_device_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}


def main() -> None:
    question = json.loads(Path(sys.argv[1]).read_text())
    tool = question["tool"]
    device = torch.device(question["device"])
    tokens_NS = load_file(question["tokens"])["tokens"].to(torch.int64)
    runs = [
        measure(tool, question["model"], tokens_NS, device, num_layers) for num_layers in question["layers"]
    ]
    package, _, method = tool.partition("-")
    versions = {name: version(name) for name in (package, "torch", "transformers")}
    Path(sys.argv[2]).write_text(
        json.dumps({"runs": runs, "package": package, "method": method, "versions": versions})
    )


if __name__ == "__main__":
    main()
